"""What was done to a parameter that should be a checkpoint's: each guess is made from the checkpoint and sketched."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from probe.compare.weights.canonical import Weight
from probe.compare.weights.changes import SHARD_COUNTS, Change
from probe.compare.weights.checkpoint import CheckpointWeights
from probe.compare.weights.sizes import close
from probe.store.dtypes import round_to
from probe.store.sketches import sketch_rows

LARGEST = 64 << 20
"""Entries of a parameter that are tried: 512 MiB in float64."""

FLOAT8 = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
"""Largest number of each 8-bit float (OCP OFP8, revision 1.0), to which a scaled cast brings the largest weight."""

Guess = tuple[str, str, Callable[[np.ndarray], np.ndarray]]


def explain_weight(reference: CheckpointWeights, name: str, weight: Weight) -> Change | None:
    """Return what turns the checkpoint's parameter into the one that a side holds, None where no guess fits."""
    source = reference.sources.get(name)
    if source is None or reference.checkpoint.entries(source.native[0]) > LARGEST:
        return None
    truth = reference.values(name)
    if truth is None or truth.ndim != 2 or weight.rows.shape != (len(truth), 3):
        return None
    for cause, words, change in _guesses(truth):
        if close(sketch_rows(round_to(change(truth), weight.dtype)), weight.rows):
            return Change(cause, words)
    return None


def _guesses(truth: np.ndarray) -> Iterator[Guess]:
    if truth.shape[0] == truth.shape[1]:
        yield "transposed-weight", "is transposed", lambda w: w.T
    for dtype in ("bfloat16", "float16", *FLOAT8):
        yield "weight-precision", f"was rounded to {dtype}", lambda w, d=dtype: round_to(w, d)  # type: ignore[misc]
    for dtype in FLOAT8:
        for axis, per in ((None, "tensor"), (1, "row")):
            words = f"was rounded to {dtype} with a scale per {per}"
            yield "weight-precision", words, lambda w, d=dtype, a=axis: _scaled_cast(w, d, a)  # type: ignore[misc]
    for count in (n for n in SHARD_COUNTS if truth.shape[1] % n == 0):
        for words, order in _orders(count):
            text = f"has its input columns in blocks of another order: {words} of {count}"
            yield "tp-shards-swapped", text, lambda w, c=count, o=order: _reordered(w, c, o)  # type: ignore[misc]
        for part in range(count):
            text = f"lacks part {part} of {count} of its input columns, which are zero"
            yield "missing-shard", text, lambda w, c=count, p=part: _without(w, c, p)  # type: ignore[misc]


def _scaled_cast(w: np.ndarray, dtype: str, axis: int | None) -> np.ndarray:
    scale = np.abs(w).max(axis=axis, keepdims=True) / FLOAT8[dtype]
    scale = np.where(scale == 0, 1.0, scale)
    return np.asarray(round_to(w / scale, dtype) * scale)


def _orders(count: int) -> Iterator[tuple[str, list[int]]]:
    """Yield the exchanges of two parts, all in reverse, and all moved on by one."""
    whole = list(range(count))
    for one in range(count):
        for other in range(one + 1, count):
            order = whole.copy()
            order[one], order[other] = other, one
            yield f"{one} and {other} are exchanged", order
    if count > 2:
        yield "reversed, all", whole[::-1]
        yield "moved on by one, all", whole[1:] + whole[:1]


def _reordered(w: np.ndarray, count: int, order: list[int]) -> np.ndarray:
    parts = np.split(w, count, axis=1)
    return np.concatenate([parts[n] for n in order], axis=1)


def _without(w: np.ndarray, count: int, part: int) -> np.ndarray:
    parts = [block.copy() for block in np.split(w, count, axis=1)]
    parts[part][:] = 0
    return np.concatenate(parts, axis=1)
