"""What is added up over the blocks of a tensor pair: sums and maxima of rows and features, non-finite values.

Two ways to the same figures: the compiled loop of :mod:`probe.kernels` where it is loaded, numpy otherwise. Sums are
float64 in both: fp32 dot products were measured to put 1 - cos off by up to 1.8 %, float64 ones keep it within 1e-7.
Of n terms that are not negative, a float64 sum in any order lies within (n + 2) 2^-53 of the exact one.
"""

from __future__ import annotations

import numpy as np

from probe.kernels import (
    COUNTS,
    EXCLUDED,
    INF_X,
    INF_Y,
    MAX_FEATURE,
    MAX_ROW,
    MISMATCH,
    NAN_X,
    NAN_Y,
    SHOWN,
    Compiled,
)

NONFINITE_SHOWN = 8
"""Places of one-sided non-finite values that are kept: enough to see whether they lie in one row or one column."""


class PairSums:
    """Sums over a pair x, y of [rows, features], with d = x - y; pairs with a non-finite member count as zero.

    float64: ``row_d2``, ``row_x2``, ``row_y2``, ``row_max`` (max |d|), ``channel_d2``, ``channel_y2``, ``channel_max``;
    ``row_mismatch``: bool [rows], a value is non-finite on one side only; ``counts``: int64, numbered in
    :mod:`probe.kernels`; ``places``: int64 [n, 2], (row, feature) of the first one-sided ones; ``max_abs`` = max |d|.
    """

    def __init__(self, rows: int, features: int) -> None:
        self.row_d2, self.row_x2, self.row_y2, self.row_max = (np.zeros(rows) for _ in range(4))
        self.row_mismatch = np.zeros(rows, bool)
        self.channel_d2, self.channel_y2, self.channel_max = (np.zeros(features) for _ in range(3))
        self.counts, self.places = np.zeros(COUNTS, np.int64), np.zeros((NONFINITE_SHOWN, 2), np.int64)
        self.max_abs = 0.0

    @property
    def excluded(self) -> int:
        """Return how many pairs so far have a non-finite member."""
        return int(self.counts[EXCLUDED])

    @property
    def max_abs_at(self) -> tuple[int, int]:
        """Return (row, feature) of the first pair with the largest |d|."""
        return int(self.counts[MAX_ROW]), int(self.counts[MAX_FEATURE])

    @property
    def nonfinite_at(self) -> tuple[tuple[int, int], ...]:
        """Return (row, feature) of the first values that are non-finite on one side only."""
        return tuple((int(row), int(feature)) for row, feature in self.places[: self.counts[SHOWN]])

    def add_compiled(self, kernels: Compiled, kind: str, x: np.ndarray, y: np.ndarray, where: slice) -> None:
        """Take rows ``where``, of one of the kinds of :data:`probe.kernels.CARRIERS`."""
        rows = self.row_d2, self.row_x2, self.row_y2, self.row_max, self.row_mismatch
        columns = self.channel_d2, self.channel_y2, self.channel_max
        more = columns, self.counts, self.places, where.start, self.max_abs
        self.max_abs = kernels.sums(kind, x, y, tuple(values[where] for values in rows), *more)

    def add(self, x: np.ndarray, y: np.ndarray, where: slice) -> None:
        """Take rows ``where``, numbers of any real dtype."""
        with np.errstate(invalid="ignore"):  # some processors flag the cast of a signalling NaN
            x64, y64 = x.astype(np.float64), y.astype(np.float64)
        finite = np.isfinite(x64) & np.isfinite(y64)
        if not finite.all():
            self._count_nonfinite(x64, y64, finite, where)
            x64, y64 = np.where(finite, x64, 0.0), np.where(finite, y64, 0.0)
        self.row_x2[where] = np.einsum("ij,ij->i", x64, x64)
        self.row_y2[where] = np.einsum("ij,ij->i", y64, y64)
        self.channel_y2 += np.einsum("ij,ij->j", y64, y64)
        with np.errstate(over="ignore"):
            difference = np.subtract(x64, y64, out=x64)
        self.row_d2[where] = np.einsum("ij,ij->i", difference, difference)
        self.channel_d2 += np.einsum("ij,ij->j", difference, difference)
        magnitude = np.abs(difference, out=difference)
        if magnitude.size:
            self.row_max[where] = magnitude.max(axis=1)
            np.maximum(self.channel_max, magnitude.max(axis=0), out=self.channel_max)
            row = int(self.row_max[where].argmax())
            if magnitude[row].max() > self.max_abs:
                self.max_abs = float(magnitude[row].max())
                self.counts[MAX_ROW], self.counts[MAX_FEATURE] = where.start + row, magnitude[row].argmax()

    def _count_nonfinite(self, x: np.ndarray, y: np.ndarray, finite: np.ndarray, where: slice) -> None:
        same = (np.isnan(x) & np.isnan(y)) | (x == y) | finite
        for number, values in ((NAN_X, np.isnan(x)), (NAN_Y, np.isnan(y)), (INF_X, np.isinf(x)), (INF_Y, np.isinf(y))):
            self.counts[number] += int(values.sum())
        self.counts[EXCLUDED] += int((~finite).sum())
        self.counts[MISMATCH] += int((~same).sum())
        self.row_mismatch[where] = ~same.all(axis=1)
        shown = int(self.counts[SHOWN])
        found = np.argwhere(~same)[: len(self.places) - shown]
        found[:, 0] += where.start
        self.places[shown : shown + len(found)] = found
        self.counts[SHOWN] += len(found)
