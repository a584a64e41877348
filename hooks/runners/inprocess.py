"""What the runners share that hold the model in this process: one capture around forwards of known sequences."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from probe.errors import CaptureError, EngineError
from probe.hooks.capture import Capture
from probe.hooks.engines.sequences import SequenceBook
from probe.hooks.engines.transformers import BatchAdapter
from probe.hooks.noise import add_noise
from probe.hooks.parameters import store_model
from probe.hooks.rows import Announced
from probe.hooks.runners.job import DTYPES, DumpJob, TokenSequence, step_folder
from probe.hooks.weights import named_sketches
from probe.hooks.wrappers import strip_wrappers
from probe.sampling import Semantics
from probe.settings import Settings, weights_settings
from probe.store.schema import WeightSketch
from probe.store.writer import DumpWriter

CHUNK_VALUES = 1 << 22
"""Logits that are scored at a time: 16 MiB in fp32, a few times over, whatever the batch holds."""
UNTOUCHED = Semantics()


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype called ``name``; raise EngineError for one that a forward cannot run in."""
    if name not in DTYPES:
        raise EngineError(f"cannot run a model in dtype {name!r}", f"use --dtype {', '.join(DTYPES)}")
    return getattr(torch, name)


@contextlib.contextmanager
def capturing(
    job: DumpJob,
    manifest: dict[str, Any],
    model: torch.nn.Module | list[torch.nn.Module],
    adapter: type[BatchAdapter],
    rank: int = 0,
    weights: list[WeightSketch] | None = None,
) -> Iterator[BatchAdapter]:
    """Sketch the weights, hook the model (or its chunks) while the block runs, and complete this rank's file.

    ``weights`` are sketches taken before a wrapper made the parameters unreadable.
    """
    chunks = model if isinstance(model, list) else [model]
    writer = DumpWriter(step_folder(job) / f"rank{rank}.h5", manifest, block_bytes=job.block_bytes)
    try:
        rows = adapter(SequenceBook(writer), prompts_only=job.prompts_only)
        for weight in weights or (sketch for chunk in chunks for sketch in named_sketches(chunk, rows)):
            writer.add_weight(weight)
        for chunk in chunks:
            store_model(writer, chunk, rows, weights_settings())
        if job.noise is not None:
            add_noise(chunks, job.noise, manifest["dtype"], lambda path, module: strip_wrappers(path))
        capture = Capture(writer, rows, Settings(task=job.task))
        capture.attach(chunks)
        yield rows
        capture.detach()
        if not capture.fired:
            raise CaptureError("no module of the model ran while it was being captured")
        writer.close()
    finally:
        writer.abandon()


def announce(sequences: list[TokenSequence], *, whole: bool) -> list[Announced]:
    """Say which sequences the rows of the next call are (``whole``: the call holds every token of them)."""
    return [
        Announced(s.uid, s.prompt_len, len(s.tokens) if whole else None, s.sample, s.trajectory, tokens=tuple(s.tokens))
        for s in sequences
    ]


def token_logprobs(
    logits: torch.Tensor, tokens: list[int], start: int = 0, meaning: Semantics = UNTOUCHED
) -> np.ndarray:
    """Return log-probs of ``tokens[start + 1:]`` under ``logits`` [length - start, vocab] in fp32: float64 [length].

    Entry p scores token p with row p - 1; entries that no row scores are NaN.
    """
    return logprobs_at(logits, tokens, start + np.arange(len(logits)), meaning)


def logprobs_at(
    logits: torch.Tensor, tokens: list[int], positions: np.ndarray, meaning: Semantics = UNTOUCHED
) -> np.ndarray:
    """Return the log-probs that rows of ``logits`` [rows, vocab] at these positions give in fp32: float64 [length].

    The row at position p scores token p + 1; entries that no row scores are NaN.
    """
    result = np.full(len(tokens), np.nan)
    rows = np.nonzero(positions < len(tokens) - 1)[0]
    scored = positions[rows] + 1
    targets = np.asarray(tokens, np.int64)[scored]
    step = max(1, CHUNK_VALUES // max(1, logits.shape[-1]))
    for at in (slice(n, n + step) for n in range(0, len(rows), step)):
        here = [torch.from_numpy(array[at]).to(logits.device) for array in (rows, targets)]
        result[scored[at]] = processed_scores(logits[here[0]], here[1], meaning).double().cpu().numpy()
    return result


def processed_scores(logits: torch.Tensor, targets: torch.Tensor, meaning: Semantics) -> torch.Tensor:
    """Return the log-probs of ``targets`` [rows] under ``logits`` [rows, vocab] in fp32, processed as ``meaning`` says.

    As vLLM's processed log-probs: logits over the temperature; then the least likely tokens that together have no more
    than 1 - top-p are dropped and the others renormalised. Where the target itself is one of those, it is kept beside
    them: it was drawn from the rollout's set, and only rounding put it outside this one (prime-rl does the same, PR
    2601; minus infinity, as in NeMo-RL, would take the token out of training).
    """
    scores = torch.log_softmax(logits.float() if meaning.temperature == 1 else logits.float() / meaning.temperature, -1)
    chosen = scores.gather(-1, targets[:, None])[:, 0]
    if meaning.top_p == 1:
        return chosen
    ordered = scores.sort(-1).values
    dropped = ordered.exp().cumsum(-1) <= 1 - meaning.top_p
    dropped[:, -1] = False
    least = ordered.gather(-1, dropped.sum(-1, keepdim=True))[:, 0]
    mass = ordered.masked_fill_(dropped, -torch.inf).logsumexp(-1)
    return chosen - torch.where(chosen < least, torch.logaddexp(mass, chosen), mass)


def micro_batches(sequences: list[TokenSequence], size: int) -> Iterator[list[TokenSequence]]:
    """Yield the sequences ``size`` at a time, in order."""
    for start in range(0, len(sequences), size):
        yield sequences[start : start + size]
