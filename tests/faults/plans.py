"""Ways to feed a run's tokens to its model: as an actor does, padded on the left, decoding, behind a prefix cache."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from faults.base import Run
from probe.hooks.engines.transformers import BatchAdapter
from probe.hooks.rows import Announced
from probe.hooks.runners.job import TokenSequence

MICRO_BATCH = 2
CACHED = 4
"""Tokens of each prompt whose keys and values come from the cache."""


def _announced(run: Run, sequence: TokenSequence, start: int = 0, *, whole: bool = True) -> Announced:
    return Announced(
        sequence.uid,
        sequence.prompt_len,
        len(sequence.tokens) if whole else None,
        trajectory=sequence.uid,
        weight_version=run.weight_version,
        start=start,
        tokens=tuple(sequence.tokens),
    )


def score(run: Run, rows: BatchAdapter, *, left: bool = False) -> None:
    """Recompute the sequences in micro-batches that are padded on the right (``left``: on the left)."""
    for start in range(0, len(run.sequences), MICRO_BATCH):
        batch = run.sequences[start : start + MICRO_BATCH]
        longest = max(len(sequence.tokens) for sequence in batch)
        ids, mask = torch.zeros(2, len(batch), longest, dtype=torch.long)
        for row, sequence in enumerate(batch):
            count = len(sequence.tokens)
            place = slice(longest - count, None) if left else slice(0, count)
            ids[row, place], mask[row, place] = torch.tensor(sequence.tokens), 1
        more = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if left else {}
        rows.announce([_announced(run, sequence) for sequence in batch])
        logits = run.model(input_ids=ids, attention_mask=mask, use_cache=False, **more).logits
        for row, sequence in enumerate(batch):
            sequence.logprobs = run.logprobs(logits[row][mask[row] != 0], sequence.tokens)


def score_left(run: Run, rows: BatchAdapter) -> None:
    """Recompute the sequences in micro-batches padded on the left, as ``generate`` does."""
    score(run, rows, left=True)


def decode(run: Run, rows: BatchAdapter) -> None:
    """Feed the prompt in one call and each response token in one of its own, over a KV cache."""
    for sequence in run.sequences:
        rows.announce([_announced(run, sequence, whole=False)])
        cache, logits, start = None, [], 0
        for stop in range(sequence.prompt_len, len(sequence.tokens)):
            ids = torch.tensor([sequence.tokens[start:stop]])
            output = run.model(input_ids=ids, attention_mask=torch.ones(1, stop), past_key_values=cache, use_cache=True)
            cache, start = output.past_key_values, stop
            logits.append(output.logits[0])
        sequence.logprobs = run.logprobs(torch.cat(logits), sequence.tokens)


def prefix(run: Run, rows: BatchAdapter) -> None:
    """Score each sequence behind cached keys and values of its first :data:`CACHED` tokens."""
    for sequence in run.sequences:
        count = min(CACHED, sequence.prompt_len - 1)
        cache = run.cache_model(input_ids=torch.tensor([sequence.tokens[:count]]), use_cache=True).past_key_values
        rows.announce([_announced(run, sequence, count)])
        rest = torch.tensor([sequence.tokens[count:]])
        mask = torch.ones(1, len(sequence.tokens), dtype=torch.long)
        output = run.model(input_ids=rest, attention_mask=mask, past_key_values=cache, use_cache=True)
        full = torch.cat([torch.zeros(count, output.logits.shape[-1], dtype=output.logits.dtype), output.logits[0]])
        sequence.logprobs = run.logprobs(full, sequence.tokens)
        sequence.logprobs[: count + 1] = np.nan


PLANS: dict[str, Callable[[Run, BatchAdapter], None]] = {
    "score": score,
    "left": score_left,
    "decode": decode,
    "prefix": prefix,
}
"""Ways to feed the tokens."""
