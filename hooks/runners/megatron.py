"""Recompute a rollout's tokens on real Megatron-core, in padded or packed micro-batches."""

from __future__ import annotations

from typing import Any

from probe.checkpoint import Checkpoint
from probe.errors import UsageError
from probe.hooks.device import pick_device
from probe.hooks.engines.megatron import MegatronAdapter
from probe.hooks.runners import megatron_batch
from probe.hooks.runners.inprocess import announce, capturing, micro_batches, token_logprobs, torch_dtype
from probe.hooks.runners.job import DumpJob, Observer, TokenSequence
from probe.hooks.runners.megatron_model import build_model

BATCHES = {"padded": megatron_batch.padded, "packed": megatron_batch.packed}


def run(
    job: DumpJob, checkpoint: Checkpoint, sequences: list[TokenSequence], manifest: dict[str, Any], observer: Observer
) -> list[TokenSequence]:
    """Run the job and return its sequences with log-probs; ``manifest`` gains what only the engine knows."""
    if job.layout not in BATCHES:
        raise UsageError(f"unknown batch layout {job.layout!r}", f"use one of {', '.join(BATCHES)}")
    import megatron.core

    torch_dtype(manifest["dtype"])
    observer("building the Megatron model", 0, 1)
    device = pick_device(job.device)
    model = build_model(checkpoint, dtype=manifest["dtype"], device=device)
    manifest["engine"]["version"] = megatron.core.__version__
    manifest["device"] = device
    manifest["backends"] = {"attention": type(model.decoder.layers[0].self_attention.core_attention).__name__}
    vocab_size = manifest["layout"]["vocab_size"]
    done = 0
    with capturing(job, manifest, model, MegatronAdapter) as rows:
        for batch in micro_batches(sequences, job.micro_batch_size):
            rows.announce(announce(batch, whole=True))
            inputs = BATCHES[job.layout]([s.tokens for s in batch], device=device)
            for sequence, logits in zip(batch, megatron_batch.forward(model, inputs)):
                sequence.logprobs = token_logprobs(logits[:, :vocab_size], sequence.tokens)
            done += len(batch)
            observer("recomputing", done, len(sequences))
    return sequences
