"""Recompute a rollout's tokens on real Megatron-core: padded or packed micro-batches, one process or many."""

from __future__ import annotations

import os
from typing import Any

import torch

from probe.checkpoint import Checkpoint
from probe.errors import UsageError
from probe.hooks.device import pick_device
from probe.hooks.engines.megatron import MegatronAdapter
from probe.hooks.engines.megatron_parallel import parallel_facts
from probe.hooks.runners.inprocess import capturing, torch_dtype
from probe.hooks.runners.job import DumpJob, Observer, TokenSequence
from probe.hooks.runners.launch import launch
from probe.hooks.runners.megatron_batch import PACKED, PADDED
from probe.hooks.runners.megatron_model import build_chunks
from probe.hooks.runners.megatron_pipeline import make_plan, run_plan

LAYOUTS = (PADDED, PACKED)
ENTRY = "probe.hooks.runners.megatron:rank_main"


def run(
    job: DumpJob, checkpoint: Checkpoint, sequences: list[TokenSequence], manifest: dict[str, Any], observer: Observer
) -> list[TokenSequence]:
    """Run the job and return its sequences with log-probs; ``manifest`` gains what only the engine knows."""
    if job.layout not in LAYOUTS:
        raise UsageError(f"unknown batch layout {job.layout!r}", f"use one of {', '.join(LAYOUTS)}")
    torch_dtype(manifest["dtype"])
    if job.parallel.world == 1:
        return rank_main(job, checkpoint, sequences, manifest, observer)
    return launch(job, sequences, manifest, observer, entry=ENTRY)


def rank_main(
    job: DumpJob, checkpoint: Checkpoint, sequences: list[TokenSequence], manifest: dict[str, Any], observer: Observer
) -> list[TokenSequence]:
    """Run this rank's part of the job and return the sequences that it scored."""
    observer("building the Megatron model", 0, 1)
    device = _device(job)
    chunks: list[Any] = build_chunks(checkpoint, job.parallel, dtype=manifest["dtype"], device=device)
    import megatron.core

    topology, coordinates = parallel_facts(chunks[0])
    manifest["engine"]["version"] = megatron.core.__version__
    manifest["device"] = device.partition(":")[0]
    manifest["backends"] = {"attention": type(chunks[0].decoder.layers[0].self_attention.core_attention).__name__}
    manifest.update(topology=topology, coordinates=coordinates)
    assert coordinates is not None  # building the model has initialised the parallel state
    plan = make_plan(job, sequences, coordinates["dp"], coordinates["cp"])
    rank = torch.distributed.get_rank()
    with capturing(job, manifest, chunks, MegatronAdapter, rank) as rows:
        assert isinstance(rows, MegatronAdapter)
        return run_plan(plan, chunks, rows, manifest, device, observer)


def _device(job: DumpJob) -> str:
    """Return the device of this rank: of several GPUs, the one that torchrun numbered it by."""
    device = pick_device(job.device)
    return f"cuda:{os.environ['LOCAL_RANK']}" if device == "cuda" and job.parallel.world > 1 else device
