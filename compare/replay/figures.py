"""The error of a replay in roundings, and the word for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from probe.compare.evidence import BROKEN, FINE, SUSPECT
from probe.compare.judge import ROUNDING
from probe.compare.replay.bands import SMALLEST

SMALL_NORM, CHANCE = 0.1, 1.5
"""A row or feature counts as at least this share of the median one, and over n numbers as CHANCE / sqrt(n) of it (all
of it at most): what is nearly zero, by chance where n is small, has a large relative error."""

COLUMN_ROWS = 8
"""Features are judged over at least so many rows: a norm over fewer may be small by chance."""


@dataclass(frozen=True)
class Figures:
    """Errors in roundings: of the whole tensor, of the worst row and feature and where these are, of the median row,
    and of ``each_row`` (NaN: not recomputed)."""

    error: float
    worst_row: float
    row: int
    worst_column: float
    column: int
    rows: int
    typical_row: float
    each_row: np.ndarray = field(default_factory=lambda: np.zeros(0), repr=False, compare=False)

    def excess(self, bands: Sequence[float]) -> float:
        """Return how many times its band the worst figure reaches."""
        values = (self.error, self.worst_row, self.worst_column)
        return max(value / band for value, band in zip(values, bands))


def figures_of(stored: np.ndarray, difference: np.ndarray, size: np.ndarray, unit: float, dtype: str) -> Figures | None:
    """Return the figures of float64 [n, features]; None where no row could be recomputed.

    ``size``: magnitudes that differences are relative to; ``unit``: the relative error of one rounding. Rows whose
    recomputed values are NaN are left out; one in which only the stored values are not finite is infinitely wrong.
    """
    usable = np.isfinite(size).all(axis=1)
    if not usable.any():
        return None
    bad = usable & ~np.isfinite(difference).all(axis=1)
    good = np.flatnonzero(usable & ~bad)
    smallest = SMALLEST.get(dtype, 0.0) / ROUNDING.get(dtype, 1.0)
    d2 = np.square(difference[good])
    s2 = np.maximum(np.square(np.broadcast_to(size, stored.shape)[good]), smallest**2)
    rows, columns = (_ratios(d2, s2, axis) / unit for axis in (1, 0))
    whole = float(np.sqrt(d2.sum() / max(s2.sum(), 1e-300))) / unit if len(good) else np.inf
    if bad.any():
        row, worst = int(np.argmax(bad)), np.inf
    else:
        row, worst = int(good[np.argmax(rows)]), float(rows.max())
    judged = len(good) >= COLUMN_ROWS
    column = int(np.argmax(columns)) if judged else 0
    worst_column = float(columns[column]) if judged else 0.0
    typical = float(np.median(rows)) if len(rows) else np.inf
    each = np.full(len(stored), np.nan)
    each[good], each[bad] = rows, np.inf
    return Figures(whole, worst, row, worst_column, column, int(usable.sum()), typical, each)


def _ratios(d2: np.ndarray, s2: np.ndarray, axis: int) -> np.ndarray:
    """Return |d| / |s| of each row (axis 1) or feature (axis 0), small norms raised."""
    squares = s2.sum(axis)
    share = min(1.0, max(SMALL_NORM, CHANCE / max(s2.shape[axis], 1) ** 0.5))
    least = share**2 * float(np.median(squares)) if len(squares) else 0.0
    return np.asarray(np.sqrt(d2.sum(axis) / np.maximum(np.maximum(squares, least), 1e-300)))


# -- words ------------------------------------------------------------------------------------------------------------

BROKEN_EXCESS = 1.5
"""Bands beyond which no rounding that was measured explains a module."""

LEVEL_LIMIT = 2.0
"""How far the bands give way where every layer's modules of a kind lie beyond them alike: another kernel's rounding."""

OWN_KIND, OWN_DEVIATIONS = 1.5, 8.0
"""A module within its band is suspect too where its error is so many times its kind's median, and as many robust
standard deviations of the logarithm (1.4826 times the median absolute one) above it, among at least 5 layers."""


def words_of(errors: np.ndarray, excesses: np.ndarray) -> list[str]:
    """Return the word of each module of one kind from its whole-tensor error in bands and its excess."""
    level = float(np.clip(np.median(errors), 1.0, LEVEL_LIMIT)) if len(errors) >= 5 else 1.0
    logs = np.log(np.maximum(errors, 1e-12))
    spread = max(1.4826 * float(np.median(np.abs(logs - np.median(logs)))), 0.02)
    apart = (logs - np.median(logs) > max(np.log(OWN_KIND), OWN_DEVIATIONS * spread)) & (len(errors) >= 5)
    words = []
    for excess, outlier in zip(excesses, apart):
        broken = excess > BROKEN_EXCESS * level
        words.append(BROKEN if broken else SUSPECT if excess > level or outlier else FINE)
    return words
