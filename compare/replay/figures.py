"""The error of a replay in roundings, and the word for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from probe.compare.evidence import BROKEN, FINE, SUSPECT
from probe.compare.judge import ROUNDING
from probe.compare.replay.bands import SMALLEST
from probe.metrics import median

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
    smallest = SMALLEST.get(dtype, 0.0) / ROUNDING.get(dtype, 1.0)
    size = np.broadcast_to(np.maximum(np.abs(size), smallest) if smallest else size, stored.shape)
    d2, s2 = _squares(difference, "i"), _squares(size, "i")
    usable = np.isfinite(s2)
    if not usable.any():
        return None
    bad = usable & ~np.isfinite(d2)
    good = np.flatnonzero(usable & ~bad)
    if len(good) < len(stored):
        difference, size, d2, s2 = difference[good], size[good], d2[good], s2[good]
    rows = _ratios(d2, s2, stored.shape[1]) / unit
    columns = _ratios(_squares(difference, "j"), _squares(size, "j"), len(good)) / unit
    whole = float(np.sqrt(d2.sum() / max(s2.sum(), 1e-300))) / unit if len(good) else np.inf
    if bad.any():
        row, worst = int(np.argmax(bad)), np.inf
    else:
        row, worst = int(good[np.argmax(rows)]), float(rows.max())
    judged = len(good) >= COLUMN_ROWS
    column = int(np.argmax(columns)) if judged else 0
    worst_column = float(columns[column]) if judged else 0.0
    typical = median(rows) if len(rows) else np.inf
    each = np.full(len(stored), np.nan)
    each[good], each[bad] = rows, np.inf
    return Figures(whole, worst, row, worst_column, column, int(usable.sum()), typical, each)


def relative_rows(stored: np.ndarray, difference: np.ndarray) -> np.ndarray:
    """Return each row's relative L2 difference, float64 [n]: infinite where a number of it is not finite."""
    d2, s2 = _squares(difference, "i"), _squares(stored, "i")
    finite = np.isfinite(d2) & np.isfinite(s2)
    relative = np.full(len(stored), np.inf)
    relative[finite] = _ratios(d2[finite], s2[finite], stored.shape[1])
    return relative


def finite_rows(values: np.ndarray) -> np.ndarray:
    """Return bool [n]: whether all numbers of a row are finite, of float64 far from its largest number."""
    with np.errstate(invalid="ignore"):
        return np.isfinite(values.sum(axis=1))


def _squares(values: np.ndarray, axis: str) -> np.ndarray:
    """Return the sum of squares of each row ("i") or feature ("j"), without a copy of float64 [rows, features]."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.einsum(f"ij,ij->{axis}", values, values)


def _ratios(d2: np.ndarray, s2: np.ndarray, numbers: int) -> np.ndarray:
    """Return |d| / |s| of each row or feature from the sums of squares over its ``numbers``, small norms raised."""
    share = min(1.0, max(SMALL_NORM, CHANCE / max(numbers, 1) ** 0.5))
    least = share**2 * median(s2) if len(s2) else 0.0
    return np.asarray(np.sqrt(d2 / np.maximum(np.maximum(s2, least), 1e-300)))


# -- words ------------------------------------------------------------------------------------------------------------

BROKEN_EXCESS = 1.5
"""Bands beyond which no rounding that was measured explains a module."""

LEVEL_LIMIT = 2.0
"""How far the bands give way where every layer's modules of a kind lie beyond them alike: another kernel's rounding."""

OWN_KIND, OWN_DEVIATIONS = 1.5, 8.0
"""A module within its band is suspect too where its error is so many times its kind's median, and as many robust
standard deviations of the logarithm (1.4826 times the median absolute one) above it, among at least 5 layers."""

OWN_LEAST = 1 / 3
"""Bands below which no module is apart from its kind: half a rounding. A replay that is exact but for last bits, which
flip where a float32 sum lies near a tie, errs by 2^(1/2) / 0.425 times the root of the share that flips, which is that
of the sum's error in one spacing (1e-4 in bf16): 0.03 roundings in one layer and none in the next."""


def words_of(errors: np.ndarray, excesses: np.ndarray) -> list[str]:
    """Return the word of each module of one kind from its whole-tensor error in bands and its excess."""
    level = float(np.clip(np.median(errors), 1.0, LEVEL_LIMIT)) if len(errors) >= 5 else 1.0
    logs = np.log(np.clip(errors, 1e-12, 1e12))
    spread = max(1.4826 * float(np.median(np.abs(logs - np.median(logs)))), 0.02)
    apart = (logs - np.median(logs) > max(np.log(OWN_KIND), OWN_DEVIATIONS * spread)) & (len(errors) >= 5)
    apart &= errors > OWN_LEAST
    words = []
    for excess, outlier in zip(excesses, apart):
        broken = excess > BROKEN_EXCESS * level
        words.append(BROKEN if broken else SUSPECT if excess > level or outlier else FINE)
    return words
