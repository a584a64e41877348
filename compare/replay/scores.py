"""The attention core in float64: scores, mask, softmax, weighted values, and how much rounding each result may carry.

Queries are few (those of the rows under test), keys are all of their sequences; memory is bounded by :data:`CELLS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from probe.compare.replay.rope import ANGLE, fineness
from probe.store.dtypes import round_to, widen

CELLS = 1 << 21
"""Scores held at a time at most: 16 MiB in float64, times the five arrays of their shape that a block needs."""
CACHED, LEAST_QUERIES = 1 << 15, 16
"""Scores held at a time where sequences are short: 256 KiB in float64, which a core's cache holds; but those of so many
queries if CELLS allows it, because a matrix product with fewer rows is slow."""
Round = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Core:
    """What the attention core computes from rotated queries and keys.

    ``scale`` on the scores; ``window``: keys that a query sees, itself included (0: all before it); ``cap``: bound of
    the soft cap (0: none); ``ahead``: keys visible after (negative: hidden before) the query's own, None without mask;
    ``tile``: query head h reads key head h mod groups instead of h // (heads / groups).
    """

    scale: float
    window: int = 0
    cap: float = 0.0
    ahead: int | None = 0
    tile: bool = False


@dataclass(frozen=True)
class Rows:
    """Heads of some tokens: values float64 [n, heads, features], sequence and position int64 [n], sorted by both."""

    values: np.ndarray
    sequence: np.ndarray
    position: np.ndarray


@dataclass(frozen=True)
class Precision:
    """Where rounding comes in.

    ``dtype`` of the tensors; ``step``: the rounding of scores and probabilities that an eager implementation does in
    that dtype, None for a fused kernel; ``turns``: where the rope is inside the replay, the angles of the rows of q and
    k by feature, float64 [rows, features]; ``quiet``: the noise is not asked for; ``once``: scores are rounded after
    they are scaled, not before.
    """

    dtype: str
    step: Round | None = None
    turns: tuple[np.ndarray, np.ndarray] | None = None
    quiet: bool = False
    once: bool = False


def attend(q: Rows, k: Rows, v: Rows, core: Core, precision: Precision) -> tuple[np.ndarray, np.ndarray]:
    """Return the heads' outputs float64 [n, heads, features] and the noise to expect in them, of the same shape.

    A query whose keys are not all there gives NaN. The noise is the root mean square of a healthy output's error
    beside the rounding of the output itself, in units of one rounding of the dtype (see :func:`_noise`).
    """
    n, heads, _ = q.values.shape
    result = np.full((n, heads, v.values.shape[2]), np.nan)
    noise = np.full_like(result, np.nan)
    known = ~np.isnan(q.values).any(axis=(1, 2))
    for sequence in np.unique(q.sequence):
        rows = np.flatnonzero((q.sequence == sequence) & known)
        span = slice(*np.searchsorted(k.sequence, [sequence, sequence + 1]))
        there = rows[_complete(q.position[rows], k.position[span], core)]
        for some, group, of_group in _blocks(there, heads, k.values.shape[1], span.stop - span.start, core.tile):
            seen, hidden = _seen(_hidden(q.position[some], k.position[span], core), span.start)
            keys, values = k.values[seen, group], v.values[seen, group]
            block, part = q.values[some][:, of_group], precision
            if precision.turns is not None:
                part = replace(precision, turns=(precision.turns[0][some], precision.turns[1][seen]))
            context, spread = _attend(block, keys, values, hidden, core, part)
            result[np.ix_(some, of_group)], noise[np.ix_(some, of_group)] = context, spread
    return result, noise


def _blocks(
    rows: np.ndarray, heads: int, groups: int, keys: int, tile: bool
) -> Iterator[tuple[np.ndarray, int, np.ndarray]]:
    """Yield (rows, group, the query heads of that group) so that rows x heads x keys stays within CELLS."""
    each = heads // groups
    wide = max(1, each * keys)
    size = max(1, min(CELLS // wide, max(LEAST_QUERIES, CACHED // wide)))
    for group in range(groups):
        members = np.arange(group, heads, groups) if tile else np.arange(group * each, (group + 1) * each)
        for start in range(0, len(rows), size):
            yield rows[start : start + size], group, members


def _complete(queries: np.ndarray, keys: np.ndarray, core: Core) -> np.ndarray:
    """Return bool [queries]: every position that a query looks back on was stored, and there is one."""
    first = np.maximum(0, queries - core.window + 1) if core.window else np.zeros_like(queries)
    found = np.searchsorted(keys, queries, side="right") - np.searchsorted(keys, first)
    seen = queries >= -min(core.ahead or 0, 0)
    return np.asarray((found == queries - first + 1) & seen)


def _hidden(queries: np.ndarray, keys: np.ndarray, core: Core) -> np.ndarray:
    """Return bool [queries, keys]: the mask."""
    gap = queries[:, None] - keys[None, :]
    hidden = np.zeros(gap.shape, bool) if core.ahead is None else gap < -core.ahead
    return np.asarray(hidden | (gap >= core.window)) if core.window else hidden


def _seen(hidden: np.ndarray, start: int) -> tuple[slice, np.ndarray]:
    """Return the keys, numbered from ``start``, between the first and the last that any query sees, and their mask."""
    any_sees = np.flatnonzero(~hidden.all(axis=0))
    first, stop = (int(any_sees[0]), int(any_sees[-1]) + 1) if len(any_sees) else (0, hidden.shape[1])
    return slice(start + first, start + stop), hidden[:, first:stop]


def times(x: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """Return x @ matrix for x [n, h, d] in one product; numpy would make n of them, with h rows each."""
    return np.asarray(x.reshape(-1, x.shape[-1]) @ matrix).reshape(*x.shape[:-1], matrix.shape[-1])


def _attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, hidden: np.ndarray, core: Core, precision: Precision
) -> tuple[np.ndarray, np.ndarray]:
    """Attend with queries [n, h, d] of one group to its keys [m, d] and values [m, e]."""
    step = precision.step or np.asarray
    scores = times(q, k.T)
    scores = scores if precision.once else step(scores)
    scores *= core.scale
    scores = step(scores)
    if core.cap:
        scores = step(core.cap * step(np.tanh(step(scores / core.cap))))
    raw, seen = scores, ~hidden[:, None, :]
    scores = np.where(seen, raw, -np.inf)
    scores -= scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores, out=np.zeros_like(scores), where=seen)  # of what is hidden it would take as long
    weights /= weights.sum(axis=-1, keepdims=True)
    context = times(step(weights), v)
    if precision.quiet:
        return context, np.full_like(context, np.nan)
    return context, _noise(q, k, v, (raw, scores), weights, context, core, precision)


ACCUMULATION = 0.25
"""Variance of a float32 sum of n terms, in squared roundings of its terms per term. Set by hand, then checked: with it
healthy attention stays within the bands that docs/replay.md gives."""

FLOAT32_RANGE = 1e-15, 1e8
"""Magnitudes of queries times keys (upper) and of values (both) between which the noise is computed in float32: its
squares and their products are then far from overflow and underflow."""


def _noise(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scores: tuple[np.ndarray, np.ndarray],
    weights: np.ndarray,
    context: np.ndarray,
    core: Core,
    precision: Precision,
) -> np.ndarray:
    """Return the noise of each output [n, h, e]: |d context| in units of one rounding of the dtype.

    To first order, errors e_j of the scores and p_j of the probabilities give d context = sum_j P_j (e_j + p_j)
    (v_j - context); independent roundings add in squares. p_j is one rounding; e_j has one of each feature of q and k
    (|q_d k_d|) and of their angles where the rope is inside, of float32 accumulation over the features, and of the
    float32 exponent (|s_j - max s|, and twice |s_j| before it). The output is accumulated in float32 over the keys that
    count, of which there are 1 / sum P_j^2.
    """
    fine = fineness(precision.dtype)
    kind = _noise_dtype(q, k, v)
    q2, k2, v2 = (np.square(x, dtype=kind, casting="same_kind") for x in (q, k, v))
    of_q, of_k = np.full((), fine**2 * ACCUMULATION * q.shape[-1], kind), None
    if precision.turns is not None:
        turned_q, of_k = ((1 + fine**2 * ANGLE * np.square(turn)).astype(kind) for turn in precision.turns)
        of_q = of_q + turned_q[:, None]
    squares = times(q2 * of_q, k2.T)
    if of_k is not None:
        squares += times(q2, (k2 * of_k).T)
    raw, away = (x.astype(kind) for x in scores)
    if core.cap:
        squares *= np.square(1 - np.square(raw / kind(core.cap)))  # the slope of the cap: c tanh(s / c)
    spread = weights.astype(kind)
    np.square(spread, out=spread)
    squares *= kind(core.scale**2)
    np.square(raw, out=raw)
    raw *= kind(2 * fine**2)
    np.square(away, out=away)
    away *= kind(fine**2)
    np.copyto(away, 0, where=spread == 0)  # a hidden key's is infinite
    squares += raw
    squares += away
    squares += 1
    squares *= spread
    effective = 1 / np.maximum(spread.sum(axis=-1, keepdims=True), np.finfo(kind).tiny)
    center = context.astype(kind)
    carried = _around(squares, v.astype(kind), v2, center)
    accumulated = kind(fine**2 * ACCUMULATION) * effective * (np.square(center) + times(spread, v2))
    return np.asarray(np.sqrt(carried + accumulated), np.float64)


def _noise_dtype(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> type[np.floating[Any]]:
    """Return float32, which is fine enough for a noise, where no square of these can overflow or vanish in it."""
    queries, keys, values = (max(x.max(initial=0.0), -x.min(initial=0.0)) for x in (q, k, v))
    scores = queries * max(1.0, keys)
    inside = scores < FLOAT32_RANGE[1] and FLOAT32_RANGE[0] < values < FLOAT32_RANGE[1]
    return np.float32 if inside else np.float64


def _around(weights: np.ndarray, v: np.ndarray, v2: np.ndarray, context: np.ndarray) -> np.ndarray:
    """Return sum_j w_j (v_j - context)^2 of each feature, [n, h, e]; ``v2``: the squares of v."""
    squares = times(weights, v2) - 2 * context * times(weights, v)
    return np.maximum(squares + weights.sum(axis=-1, keepdims=True) * np.square(context), 0)


def quantised(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return values rounded to ``dtype`` with scale 1, as float64; an empty name leaves them. fp8 saturates."""
    if dtype.startswith("float8"):
        return _to_float8(values, dtype)
    return round_to(values, dtype).astype(np.float64) if dtype else values


def _to_float8(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return the nearest numbers of an fp8 dtype, ties to the even one, the largest beyond it."""
    numbers = widen(np.arange(128, dtype=np.uint8), dtype).astype(np.float64)
    grid = np.sort(numbers[np.isfinite(numbers)])
    middle, size = (grid[1:] + grid[:-1]) / 2, np.abs(values)
    below, above = np.searchsorted(middle, size, side="left"), np.searchsorted(middle, size, side="right")
    return np.asarray(np.sign(values) * grid[np.where(below % 2 == 0, below, above)])
