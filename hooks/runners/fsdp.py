"""Recompute a rollout's tokens on a Hugging Face model that FSDP shards over data-parallel ranks (FSDP2 or FSDP1)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from probe.checkpoint import Checkpoint
from probe.hooks.device import device_module, pick_device
from probe.hooks.engines.transformers import BatchAdapter
from probe.hooks.runners.inprocess import capturing, micro_batches, torch_dtype
from probe.hooks.runners.job import DumpJob, Observer, TokenSequence
from probe.hooks.runners.launch import launch
from probe.hooks.weights import sketches
from probe.sampling import engine_semantics
from probe.store.schema import AXES

ENTRY = "probe.hooks.runners.fsdp:rank_main"
BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}


def run(
    job: DumpJob, checkpoint: Checkpoint, sequences: list[TokenSequence], manifest: dict[str, Any], observer: Observer
) -> list[TokenSequence]:
    """Run the job and return its sequences with log-probs; ``manifest`` gains what only the engine knows."""
    torch_dtype(manifest["dtype"])
    return launch(job, sequences, manifest, observer, entry=ENTRY)


def rank_main(
    job: DumpJob, checkpoint: Checkpoint, sequences: list[TokenSequence], manifest: dict[str, Any], observer: Observer
) -> list[TokenSequence]:
    """Run this rank's part of the job and return the sequences that it scored.

    Sequences are dealt out in turn. Every forward gathers parameters from all ranks, so that all run the same number
    of micro-batches.
    """
    import transformers

    from probe.hooks.runners.transformers import load, precision, score

    observer("loading the model", 0, 1)
    kind = pick_device(job.device)
    device = kind if kind == "cpu" else f"{kind}:{os.environ['LOCAL_RANK']}"
    if kind != "cpu":
        device_module(kind).set_device(device)
    torch.distributed.init_process_group(BACKENDS[kind])
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = load(job, manifest["dtype"]).to(device).eval()
    weights = list(sketches(model)) if job.engine == "fsdp1" else None  # its flat parameters cannot be sketched
    attention = getattr(model.config, "_attn_implementation", None)
    manifest["engine"] = {"name": BatchAdapter.name, "version": transformers.__version__}
    manifest["device"] = kind
    manifest["backends"] = {"attention": attention, "wrapper": {"fsdp": "FSDP2", "fsdp1": "FSDP1"}[job.engine]}
    manifest["world_size"] = world
    manifest["topology"] = {**dict.fromkeys(AXES, 1), "dp": world, "vpp": 1, "sp": False}
    manifest["coordinates"] = {**dict.fromkeys(AXES, 0), "dp": rank}
    wrapped = WRAP[job.engine](model, device)
    shares = [list(micro_batches(sequences[n::world], job.micro_batch_size)) for n in range(world)]
    fill = max(map(len, shares)) - len(shares[rank])
    batches: list[list[TokenSequence]] = shares[rank] + [[] for _ in range(fill)]
    with (
        capturing(job, manifest, wrapped, BatchAdapter, rank, weights) as rows,
        torch.no_grad(),
        precision(manifest["dtype"]),
    ):
        return score(wrapped, batches, rows, device, observer, engine_semantics(manifest))


def _blocks(model: Any) -> list[torch.nn.Module]:
    """Return the layers that are sharded one by one: those that transformers says must stay together."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def _shard_fsdp2(model: Any, device: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.partition(":")[0], (torch.distributed.get_world_size(),))
    for block in _blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _shard_fsdp1(model: Any, device: str) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({type(block) for block in _blocks(model)})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device(device))


WRAP: dict[str, Callable[[Any, str], Any]] = {"fsdp": _shard_fsdp2, "fsdp1": _shard_fsdp1}
