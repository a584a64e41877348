"""Log-probs that are one token off, judged for each sequence by itself: a part of a batch may be moved."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from probe.compare.gates import GateFinding
from probe.compare.report.model import counted
from probe.compare.sampling_fits import FEW, SHIFT_NATS, shift_between
from probe.compare.tokens.batch import TokenBatch
from probe.compare.tokens.declared import SUBJECT

CAPPED = 2.0
"""Nats that one token counts at most, so that a few far tokens decide nothing."""
CLEAR = 4
"""Tokens of a sequence that must differ by SHIFT_NATS, below which an odd token or two could decide."""
LEFT = 0.25
"""Share of a sequence's disagreement that moving it may leave."""


def shifted(batch: TokenBatch, aside: np.ndarray) -> Iterator[tuple[GateFinding, np.ndarray]]:
    """Yield the finding that a fits b only when moved by one token, in all sequences together or in some of them, and
    which tokens these are; those ``aside`` (bool [N]) are not looked at.
    """
    assert batch.a is not None and batch.b is not None
    kept, labels = ~aside, batch.labels
    sequence, position, a, b = (values[kept] for values in (batch.sequence, batch.position, batch.a, batch.b))
    if len(a) < FEW:
        return
    shift, found, rows = shift_between(sequence, position, a, b), 0, np.zeros(len(labels), bool)
    apart = np.bincount(sequence, np.minimum(np.abs(a - b), CAPPED), minlength=len(labels))
    beside = (np.diff(sequence) == 0) & (np.diff(position) == 1)
    pairs = np.bincount(sequence[1:][beside], minlength=len(labels))
    some = bool(((pairs >= FEW) & (apart >= SHIFT_NATS * pairs)).any())  # in most batches no sequence differs enough
    for candidate in (1, -1) if some else ():
        moved = moved_sequences(sequence, position, a, b, candidate, len(labels))
        if moved.sum() > rows.sum() and shift in (0, candidate):
            rows, found = moved, candidate
    if not shift and not rows.any():
        return
    shift = shift or found
    count = int((np.bincount(sequence, minlength=len(labels)) > 0).sum())
    figures: dict[str, float | int | str] = {"shift": shift}
    where = ""
    if rows.any():
        first = labels[int(np.argmax(rows))]
        figures |= {"sequences": int(rows.sum()), "first": first}
        where = f" in {int(rows.sum())} of {counted(count, 'sequence')} (first {first})"
    text = f"the log-probs of a fit those of b only when moved by {shift:+d} token{where}: one side's are assigned to"
    finding = GateFinding("logprob-shift", SUBJECT, "unknown", f"{text} the wrong tokens", figures)
    yield finding, rows[batch.sequence] if rows.any() else np.ones(len(batch), bool)


def moved_sequences(
    sequence: np.ndarray, position: np.ndarray, a: np.ndarray, b: np.ndarray, shift: int, count: int
) -> np.ndarray:
    """Return bool [count]: sequences in which a fits b only when moved by ``shift`` (1 or -1).

    Moving leaves out an end of the sequence: what it left is held against the disagreement without either end, so that
    an odd token there is no sign.
    """
    follows = (np.roll(sequence, shift) == sequence) & (np.roll(position, shift) + shift == position)
    gap = np.minimum(np.abs(a - b), CAPPED)
    moved = np.minimum(np.abs(np.roll(a, shift) - b), CAPPED)
    at = sequence[follows]

    def total(values: np.ndarray) -> np.ndarray:
        return np.bincount(at, values[follows], minlength=count)

    tokens, clear = np.bincount(at, minlength=count), (gap > SHIFT_NATS).astype(np.float64)
    apart = np.minimum(total(gap), total(np.roll(gap, shift)))
    enough = np.minimum(total(clear), total(np.roll(clear, shift))) >= CLEAR
    return np.asarray(enough & (tokens >= FEW) & (apart >= SHIFT_NATS * tokens) & (total(moved) < LEFT * apart))
