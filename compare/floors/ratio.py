"""The errors of two sides against a reference in higher precision, and what their ratio says."""

from __future__ import annotations

from dataclasses import dataclass

NORMAL, SUSPECT_RATIO, BUG = "normal", "suspect", "bug"

RATIO_SUSPECT, RATIO_BUG = 2.0, 3.0
"""Ratio of the two errors above which the farther side is suspect, and at fault. Three-way checks of single operations
use 1.5 and 3 (simulated kernels measured up to 1.46 where they were legitimate, defects from 4); whole healthy forwards
of 48 layers measured up to 1.62."""

SAME_DTYPE, MIXED_DTYPES = 0.5, 2.0
"""Modelled floors that a side's error counts as at least: below it a ratio says which rounding was luckier. Healthy
sides measured 0.2 to 1.2 of them; between two dtypes the error of the formula, a factor of up to two, stays."""


@dataclass(frozen=True)
class GoldenRatio:
    """How far each side lies from a reference in higher precision.

    ``error_a``, ``error_b``: relative L2 to the reference over the rows that all three hold; ``ratio``: the farther
    side's error over the nearer one's (:func:`golden_ratio`); ``side``: the farther side where that is above
    RATIO_SUSPECT, else empty; ``verdict``: ``normal``, ``suspect`` or ``bug``.
    """

    error_a: float
    error_b: float
    ratio: float
    side: str
    verdict: str


def golden_ratio(error_a: float, error_b: float, floor_a: float, floor_b: float) -> GoldenRatio:
    """Compare two relative L2 errors, each with the modelled floor of its side.

    In one dtype the ratio is that of the errors, counted as at least SAME_DTYPE floors. Of two dtypes the coarser side
    is farther where it errs by more of its own floors than the finer side does of its own (from MIXED_DTYPES on): a
    model amplifies in both. The finer side is farther only where it errs by more in absolute terms: in its own floors
    it may well do, because the errors of a coarse dtype end where nothing is left to lose.
    """
    errors, floors = {"a": error_a, "b": error_b}, {"a": floor_a, "b": floor_b}
    fine, coarse = sorted("ab", key=lambda side: floors[side])
    least = SAME_DTYPE * floors[coarse]
    by_side = {fine: max(errors[fine], least) / max(errors[coarse], least)}
    if floors[fine] == floors[coarse]:
        by_side[coarse] = 1 / by_side[fine]
    else:
        counted = {side: max(errors[side] / floors[side], MIXED_DTYPES) for side in "ab"}
        by_side[coarse] = counted[coarse] / counted[fine]
    side = max(by_side, key=lambda name: by_side[name])
    ratio = max(by_side[side], 1.0)
    verdict = BUG if ratio > RATIO_BUG else SUSPECT_RATIO if ratio > RATIO_SUSPECT else NORMAL
    return GoldenRatio(error_a, error_b, ratio, "" if verdict == NORMAL else side, verdict)
