"""Simple relations between the two sides of one tensor: factors, offsets, other orders, zeros, coarser values.

They need neither weights nor inputs, so that the first tensor that parts says something where it cannot be replayed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from probe.compare.evidence import Evidence
from probe.compare.measure import Measured
from probe.compare.merge import CanonicalReader
from probe.errors import ProbeError
from probe.store.dtypes import round_to

ROWS = 256
"""Rows that are read: those that part most, and a spread over all."""

MOST_FEATURES = 2048
"""Features among which another order is looked for: the comparison of all pairs of columns stays below a second."""

EXPLAINED = 0.2
"""A relation holds where it leaves less than this share of the difference: noise of one part in 25 of its squares."""

DROPPED = (0.005, 0.95)
"""Shares of zeros that look like dropout."""


@dataclass(frozen=True)
class Fits:
    """What relates the sides of a tensor; shares are of |a - b| over the rows that were read, 1 where nothing is left
    unexplained.

    ``offset``: one row added to all rows; ``row_factors``, ``column_factors``: one factor per row or per feature;
    ``moved``: share of the features that equal another feature of the other side; ``halves``: whether they do so with
    the two halves exchanged; ``dropped``: share of elements that only one side (``dropped_side``) has at zero while one
    factor explains the rest; ``zero_rows``: share of rows that are zero on ``zero_side`` only; ``coarse_side``: the
    side whose values all are bfloat16 numbers although it stored a finer dtype, and the other's not.
    """

    offset: float = 0.0
    row_factors: float = 0.0
    column_factors: float = 0.0
    moved: float = 0.0
    halves: bool = False
    dropped: float = 0.0
    dropped_side: str = ""
    zero_rows: float = 0.0
    zero_side: str = ""
    coarse_side: str = ""


def fits_of(e: Evidence, entry: Measured, *, starts_only: bool = False) -> Fits:
    """Return the relations of a measured tensor; with ``starts_only`` those of its rows at position 0."""
    join, metrics = entry.join, entry.metrics
    if join is None or metrics is None:
        return Fits()
    among = np.flatnonzero(join.position == 0) if starts_only else np.arange(len(join.position))
    if not len(among):
        return Fits()
    worst = among[np.argsort(-metrics.row_rel_l2[among], kind="stable")[: ROWS // 2]]
    rows = np.union1d(worst, among[np.linspace(0, len(among) - 1, min(len(among), ROWS // 2)).astype(np.int64)])
    try:
        x, y = (
            np.asarray(CanonicalReader(side).read(source, index[rows])).reshape(len(rows), -1)
            for side, source, index in (
                (e.side_a, entry.match.source_a, join.index_a),
                (e.side_b, entry.match.source_b, join.index_b),
            )
        )
    except ProbeError:  # it could be measured; what cannot be read again says nothing
        return Fits()
    return relate(x, y)


def relate(x: np.ndarray, y: np.ndarray) -> Fits:
    """Return the relations of two float arrays [rows, features]."""
    coarse = [_is_coarse(values) for values in (x, y)]
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    finite = np.isfinite(x).all(axis=1) & np.isfinite(y).all(axis=1)
    x, y = x[finite], y[finite]
    error = float(np.linalg.norm(x - y))
    if not error:
        return Fits()
    dropped, dropped_side = _dropped(x, y)
    zero_rows, zero_side = _zero_rows(x, y)
    moved, halves = _moved(x, y)
    return Fits(
        offset=1 - _rest(x - y, np.zeros_like(x) + (x - y).mean(axis=0), error),
        row_factors=1 - _rest(x, _factor(x, y, 1) * y, error),
        column_factors=1 - _rest(x, _factor(x, y, 0) * y, error),
        moved=moved,
        halves=halves,
        dropped=dropped,
        dropped_side=dropped_side,
        zero_rows=zero_rows,
        zero_side=zero_side,
        coarse_side="" if coarse[0] == coarse[1] else "ab"[coarse.index(True)],
    )


def _rest(x: np.ndarray, explained: np.ndarray, error: float) -> float:
    return min(1.0, float(np.linalg.norm(x - explained)) / error)


def _factor(x: np.ndarray, y: np.ndarray, axis: int) -> np.ndarray:
    """Return the least-squares factors of y along an axis, kept as an axis; rows or features without values get 1."""
    square = (y * y).sum(axis=axis, keepdims=True)
    return np.divide((x * y).sum(axis=axis, keepdims=True), square, out=np.ones_like(square), where=square > 0)


def _is_coarse(values: np.ndarray) -> bool:
    if values.dtype.itemsize < 4 or not np.any(values):
        return False
    return bool(np.array_equal(round_to(values, "bfloat16"), values, equal_nan=True))


def _dropped(x: np.ndarray, y: np.ndarray) -> tuple[float, str]:
    """Return the share of elements that one side dropped, and that side: zeros, and one factor above 1 elsewhere."""
    for side, (some, whole) in (("a", (x, y)), ("b", (y, x))):
        zero = (some == 0) & (whole != 0)
        share = float(zero.mean())
        if not DROPPED[0] < share < DROPPED[1] or not (some != 0).any():
            continue
        kept = np.where(zero, 0.0, whole)
        factor = float(np.vdot(kept, some) / max(float(np.vdot(kept, kept)), 1e-300))
        rest, error = np.linalg.norm(some - factor * kept), np.linalg.norm(some - whole)
        if factor > 1.0 and rest < EXPLAINED * error:
            return share, side
    return 0.0, ""


def _zero_rows(x: np.ndarray, y: np.ndarray) -> tuple[float, str]:
    zero = ~x.any(axis=1), ~y.any(axis=1)
    shares = [float((zero[side] & ~zero[1 - side]).mean()) for side in (0, 1)]
    worse = int(shares[1] > shares[0])
    return shares[worse], "ab"[worse] if shares[worse] else ""


def _moved(x: np.ndarray, y: np.ndarray) -> tuple[float, bool]:
    """Return the share of features of x that equal another feature of y, and whether the halves are exchanged."""
    features = x.shape[1]
    if not 2 <= features <= MOST_FEATURES or len(x) < 4:
        return 0.0, False
    # |x_i - y_j|^2 of all pairs of columns, from their norms and products
    distance = (x * x).sum(axis=0)[:, None] + (y * y).sum(axis=0)[None, :] - 2 * x.T @ y
    best = distance.argmin(axis=1)
    size = np.maximum((x * x).sum(axis=0), 1e-300)
    here = np.arange(features)
    own, other = np.abs(distance[here, here]) / size, np.abs(distance[here, best]) / size
    moved = (best != here) & (other < EXPLAINED**2) & (other < EXPLAINED**2 * own)
    halves = bool(moved.any()) and bool((best[moved] == (here[moved] + features // 2) % features).mean() > 0.9)
    return float(moved.mean()), halves
