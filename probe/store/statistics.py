"""What task ``statistics`` keeps of a row of a tensor: a few numbers in place of its features.

They do not depend on the order of the features, and those of a row that ranks share follow from those of its parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from probe.store.dtypes import widen

NORM, SUM, LARGEST, SMALLEST, NAN, INF, COUNT = range(7)
"""Columns of a row of statistics: L2 norm, sum, largest and smallest value (none of the four is finite where a value is
not), how many values are NaN, how many infinite, and how many there are."""
WIDTH = 7
ACCUMULATORS = {"float32": "float64", "float64": "float64"}
"""Dtype of a tensor -> the dtype in which its statistics are computed and kept, float32 for every other one.

A comparison must not be limited by the rounding of its statistics. Sums of n terms in a dtype of unit roundoff u are
off by n u at most: for 4,096 features 2.4e-4 in float32, where the noise floor of one operation is 5.8e-3 in bfloat16
and 7e-4 in float16 (docs/verdicts.md) but 3.6e-7 in float32, which needs float64 (4.5e-13)."""


@dataclass(frozen=True)
class Reduced:
    """The tensor that rows of statistics are of: its dtype, and the shape of one of its rows."""

    dtype: str
    features: tuple[int, ...]


def accumulator(dtype: str) -> str:
    """Return the dtype in which the statistics of a tensor of ``dtype`` are kept."""
    return ACCUMULATORS.get(dtype, "float32")


def statistics_of(values: np.ndarray) -> np.ndarray:
    """Return the statistics of rows [n, features...] of any real dtype: float64 [n, WIDTH], accumulated in float64."""
    wide = np.asarray(values, np.float64).reshape(len(values), -1)
    found = np.zeros((len(wide), WIDTH))
    found[:, COUNT] = wide.shape[1]
    if wide.shape[1]:
        with np.errstate(all="ignore"):  # what is not finite is counted
            found[:, NORM] = np.sqrt(np.einsum("ij,ij->i", wide, wide))
            found[:, SUM], found[:, LARGEST], found[:, SMALLEST] = wide.sum(1), wide.max(1), wide.min(1)
    found[:, NAN], found[:, INF] = np.isnan(wide).sum(1), np.isinf(wide).sum(1)
    return found


def merged(parts: list[np.ndarray]) -> np.ndarray:
    """Return the statistics of rows from those of parts that hold features of them: [n, WIDTH] each, in any order."""
    if len(parts) == 1:
        return parts[0]
    stacked = np.stack(parts)
    found = stacked.sum(axis=0)
    with np.errstate(all="ignore"):
        found[:, NORM] = np.sqrt(np.square(stacked[:, :, NORM]).sum(axis=0))
    found[:, LARGEST] = stacked[:, :, LARGEST].max(axis=0)  # NaN where a part has it
    found[:, SMALLEST] = stacked[:, :, SMALLEST].min(axis=0)
    return found


NO_STATISTICS = (np.nan, np.nan, np.nan, np.nan, 0, 0)


def block_statistics(data: np.ndarray, dtype: str, *, reduced: bool = False) -> tuple[float, ...]:
    """Return min, max, mean, L2 norm (finite values only) and the counts of NaN and Inf of a block.

    ``reduced``: the block holds rows of statistics, and what is returned is of the rows that they are of.
    """
    if dtype == "float4_e2m1fn_x2":
        return NO_STATISTICS
    if reduced:
        return _of_statistics(np.asarray(data, np.float64))
    values = widen(data, dtype)
    if not values.size:
        return NO_STATISTICS
    if values.dtype.kind in "iub":
        wide = values.astype(np.float64)
        return (wide.min(), wide.max(), wide.mean(), float(np.sqrt(np.square(wide).sum())), 0, 0)
    total = float(np.sum(values, dtype=np.float64))
    nan = inf = 0
    if not np.isfinite(total):
        nan, inf = int(np.isnan(values).sum()), int(np.isinf(values).sum())
        values = values[np.isfinite(values)]
        if not values.size:
            return (np.nan, np.nan, np.nan, np.nan, nan, inf)
        total = float(np.sum(values, dtype=np.float64))
    wide = values.astype(np.float64).ravel()
    norm = float(np.sqrt(np.dot(wide, wide)))
    return (float(values.min()), float(values.max()), total / values.size, norm, nan, inf)


def _of_statistics(rows: np.ndarray) -> tuple[float, ...]:
    nan, inf = int(rows[:, NAN].sum()), int(rows[:, INF].sum())
    finite = rows[np.isfinite(rows[:, NORM]) & (rows[:, COUNT] > 0)]
    if not len(finite):
        return (np.nan, np.nan, np.nan, np.nan, nan, inf)
    mean = float(finite[:, SUM].sum() / finite[:, COUNT].sum())
    norm = float(np.sqrt(np.square(finite[:, NORM]).sum()))
    return (float(finite[:, SMALLEST].min()), float(finite[:, LARGEST].max()), mean, norm, nan, inf)
