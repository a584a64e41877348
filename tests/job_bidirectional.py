"""A training script that knows nothing of probe, for tests/test_job_shadow.py: a decoder made bidirectional.

    job_bidirectional.py RESULT [autocast|checkpointing]... [ddp|fsdp2]

Whatever a further forward could change is in it and changes what it computes: dropout, random numbers of Python and
numpy, buffers written in place and replaced, numbers and lists that a module counts with. It writes every loss,
gradient and parameter, the buffers and the states of the generators to RESULT.RANK, bit by bit.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import torch

STEPS = 3
SIZES: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "num_hidden_layers": 2, "pad_token_id": 0},
}
IDS = torch.tensor(
    [
        [0, 5, 6, 7, 11, 12, 13, 14],  # padded on the left
        [9, 10, 11, 12, 13, 14, 15, 16],
        [3, 4, 5, 6, 7, 8, 0, 0],  # and on the right
        [21, 22, 23, 24, 25, 26, 27, 28],
    ]
)
PROMPTS = [4, 5, 2, 4]
"""Cells of each row before its response."""


def batch(rows: slice) -> dict[str, torch.Tensor]:
    """Return the arguments of a forward of some rows."""
    ids = IDS[rows]
    labels = ids.clone()
    for row, prompt in zip(labels, PROMPTS[rows]):
        row[:prompt] = -100
    labels[ids == 0] = -100
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def make_model(**more: Any) -> torch.nn.Module:
    """Return a Qwen2 that attends to both sides."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(7)
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, **{"is_causal": False} | more))


class Counting(torch.nn.Module):
    """A layer's MLP whose every run changes what the next one computes."""

    def __init__(self, mlp: torch.nn.Module) -> None:
        super().__init__()
        self.mlp = mlp
        self.register_buffer("tokens", torch.zeros(4))
        self.register_buffer("replaced", torch.zeros(()))
        self.loose = torch.zeros(2)
        self.runs, self.seen, self.sizes = 0, [], {}

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Count a run."""
        self.tokens += hidden.shape[0]
        self.replaced = self.replaced * 0.5 + hidden.detach().float().abs().mean()
        self.loose.add_(0.25)
        self.runs += 1
        self.seen.append(hidden.shape[1])
        self.sizes[hidden.shape[1]] = self.sizes.get(hidden.shape[1], 0) + 1
        count = sum(self.seen) + self.runs + sum(self.sizes.values()) + len(self.sizes)
        noise = random.random() + np.random.rand() + self.loose.sum() + self.tokens.sum() + self.replaced
        return self.mlp(hidden) * (1 + 1e-3 * count) * (1 + 1e-3 * noise)


def state(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return what a forward may leave behind."""
    counting = next(module for module in model.modules() if isinstance(module, Counting))
    kept = [buffer.clone() for buffer in model.buffers()]
    kept += [counting.loose.clone(), torch.tensor([counting.runs, *counting.seen, *sorted(counting.sizes)])]
    kept.append(torch.tensor([random.random(), np.random.rand()], dtype=torch.float64))
    return [*kept, torch.get_rng_state()]


def main(result: str, *how: str) -> None:
    """Train for some steps."""
    rank, alone = 0, not {"ddp", "fsdp2"} & set(how)
    if not alone:
        torch.distributed.init_process_group("gloo")
        rank = torch.distributed.get_rank()
    model: Any = make_model(attention_dropout=0.2)
    model.model.layers[0].mlp = Counting(model.model.layers[0].mlp)
    if "checkpointing" in how:
        model.gradient_checkpointing_enable()
    model.train()
    inner = model
    if "ddp" in how:
        model = torch.nn.parallel.DistributedDataParallel(model)
    if "fsdp2" in how:
        from torch.distributed.fsdp import fully_shard

        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    random.seed(3 + rank)
    np.random.seed(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    kept = []
    for _ in range(STEPS):
        for first in (0, 2):
            rows = slice(first, first + 2) if alone else slice(first + rank, first + rank + 1)
            with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in how):
                loss = model(**batch(rows)).loss
            loss.backward()
            kept.append(loss.detach().clone())
        whole = [getattr(p.grad, "_local_tensor", p.grad).clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        kept += [*whole, *(getattr(p.detach(), "_local_tensor", p.detach()).clone() for p in model.parameters())]
    kept += state(inner)
    torch.save(kept, f"{result}.{rank}")
    if not alone:
        del model, optimizer  # freed after its process group, DDP may wait for ever
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
