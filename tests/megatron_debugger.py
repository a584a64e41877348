"""A user's own Megatron script with a PrecisionDebugger in it: ``torchrun megatron_debugger.py MODEL DUMP SIZES``.

SIZES is JSON for :class:`probe.hooks.runners.job.Parallel`. As Megatron-LM's own scripts do, only the first pipeline
stage is given token ids; a context-parallel rank is given its chunks. Sequences of one length, none announced.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from probe import PrecisionDebugger
from probe.checkpoint import Checkpoint
from probe.hooks.engines.megatron_parallel import ranks, zigzag
from probe.hooks.runners.job import Parallel
from probe.hooks.runners.megatron_model import build_chunks

SEQUENCES = [[(11 * row + 3 * place) % 197 for place in range(8)] for row in range(4)]
BATCHES = (SEQUENCES[:2], SEQUENCES[2:])


def main(model: str, dump: str, sizes: str) -> None:
    """Run every batch through the pipeline once, captured."""
    parallel = Parallel(**json.loads(sizes))
    chunks: list[Any] = list(build_chunks(Checkpoint(model), parallel, dtype="float32"))
    from megatron.core.pipeline_parallel import get_forward_backward_func

    here = ranks()
    positions = torch.from_numpy(zigzag(8, here.cp_size, here.cp))
    mask = torch.ones(8, 8, dtype=torch.bool).triu(1)[None, None] if parallel.cp == 1 else None

    def step(batches: Any, chunk: Any) -> Any:
        tokens = torch.tensor(next(batches))[:, positions]
        ids = tokens if chunk.pre_process else None
        output = chunk(input_ids=ids, position_ids=None, attention_mask=mask)
        return output, lambda output, non_loss_data: None

    iterators = [iter(BATCHES) for _ in chunks]
    with PrecisionDebugger(enabled=True, dump_path=dump).start(chunks), torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(BATCHES),
            seq_length=8,
            micro_batch_size=2,
            forward_only=True,
            collect_non_loss_data=True,
        )
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
