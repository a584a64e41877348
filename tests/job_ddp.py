"""A data-parallel training script that knows nothing of probe: ``torchrun job_ddp.py MODEL``."""

from __future__ import annotations

import sys

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM


def main(checkpoint: str) -> None:
    """Train one step, each rank on a sequence of its own."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    model = DistributedDataParallel(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.tensor([[5 + rank, 6, 7, 8]])
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    del model, optimizer  # freed after its process group, DDP may wait for ever
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
