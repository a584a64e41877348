"""How large a difference of two sketches may be: summation order, one rounding of every weight."""

from __future__ import annotations

import numpy as np

from probe.compare.judge import ROUNDING
from probe.metrics import MANTISSA_BITS

EXACT = 1e-9
"""Relative difference of two float64 sketches of one weight: summation order only, 1e-16 times a row's length."""

WORST_ROW = 8.0
"""Standard deviations that one row of a rounded copy may differ by: a row's error is a sum of bounded terms, so that
none above 6 is expected among even 200,000 rows."""

RMS_ROWS = 2.0
"""Standard deviations that all rows of a rounded copy may differ by in the root mean square; 1 is expected."""

SAME = 1e-7
"""Relative difference, against the largest entry, within which two rows count as the same row elsewhere."""


def exact_scale(rows: np.ndarray) -> np.ndarray:
    """Return the size of each sketch entry, against which summation error is measured."""
    if rows.shape[1] < 3:
        return np.maximum(np.abs(rows), np.finfo(np.float64).tiny)
    norm = np.sqrt(rows[:, 2:3])
    return np.maximum(np.hstack([norm, norm * np.sqrt(len(rows)), rows[:, 2:3]]), np.finfo(np.float64).tiny)


def rounding_scale(rows: np.ndarray, dtype: str) -> np.ndarray:
    """Return the standard deviation that one rounding of every weight gives each sketch entry.

    With R the RMS relative rounding error and r uniform in (-1, 1), W @ r moves by R sqrt(sum w^2 / 3), the row sum by
    R sqrt(sum w^2); the sum of squares by at most 2 R times itself. A vector's values move by at most one unit
    2^-(mantissa bits + 1), a bound and not a deviation, so it is divided by the bound on the worst row.
    """
    rounding, tiny = ROUNDING[dtype], np.finfo(np.float64).tiny
    if rows.shape[1] < 3:
        return np.maximum(np.abs(rows) * 2.0 ** -(MANTISSA_BITS[dtype] + 1), tiny)
    squares = rows[:, 2:3]
    spread = np.hstack([np.sqrt(squares / 3), np.sqrt(squares), 2 * squares])
    return np.maximum(rounding * spread, tiny)


def within(a: np.ndarray, b: np.ndarray, scale: np.ndarray, rms: float, worst: float) -> bool:
    """Tell whether two sketches differ by at most ``rms`` scales in the root mean square, and ``worst`` anywhere."""
    with np.errstate(over="ignore"):  # against a weight that is zero any other is infinitely far
        deviation = np.abs(a - b) / scale
        return bool(np.sqrt(np.mean(deviation**2)) <= rms and deviation.max() <= worst)


def close(x: np.ndarray, y: np.ndarray) -> bool:
    """Tell whether two tables hold the same rows up to the order of summation."""
    return x.shape == y.shape and bool(np.allclose(x, y, rtol=SAME, atol=SAME * float(np.abs(x).max(initial=0.0))))


def in_order(rows: np.ndarray) -> np.ndarray:
    """Return the rows sorted, so that tables of the same rows in another order are equal."""
    return rows[np.lexsort(rows.T)]
