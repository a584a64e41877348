"""Formulas shared by capture and compare: tensor pairs in bounded memory, log-probabilities and their divergence.

What is added up over the blocks of a pair is in :mod:`probe.sums` and :mod:`probe.ulp`, by numpy or by compiled loops.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from probe.kernels import CARRIERS, INF_X, INF_Y, MISMATCH, NAN_X, NAN_Y, compiled
from probe.store.dtypes import widen
from probe.sums import PairSums
from probe.ulp import UlpHistogram, ulp_bits, ulp_distance

BLOCK_VALUES = 1 << 17
"""Values per block: two blocks of float32, or numpy's five float64 work arrays, stay near the size of an L2 cache."""

MANTISSA_BITS = {
    "float64": 52,
    "float32": 23,
    "float16": 10,
    "bfloat16": 7,
    "float8_e4m3fn": 3,
    "float8_e5m2": 2,
}
"""Explicit mantissa bits of the floating dtypes, the measure of which of two is coarser."""

ROW_NORM_FLOOR = 0.01
"""A row's norm counts as at least this share of the median row norm, so that nearly zero rows cannot raise an alarm;
where rows have few features, of which one alone may come out near zero, as at least one over their number."""


def coarser_dtype(*names: str) -> str:
    """Return the dtype with the fewest mantissa bits; names that are not floating dtypes are ignored.

    Returns "float32" when none is a floating dtype.
    """
    known = [name for name in names if name in MANTISSA_BITS]
    return min(known, key=lambda name: MANTISSA_BITS[name], default="float32")


# -- pairs of tensors -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PairMetrics:
    """What two tensors of one shape [rows, features] say about each other, x against the reference y.

    Pairs with a non-finite member are counted (``nan_*``, ``inf_*``; ``nonfinite_mismatch`` where only one side has
    it, or another kind) and left out of every other figure. Formulas, with d = x - y:

    * ``rel_l2`` = |d| / |y|, or |d| / |x| when y is zero; ``rmse`` = sqrt(mean d^2); ``max_abs`` = max |d| at
      (row, feature) ``max_abs_at``;
    * ``one_minus_cos`` = (sum d^2 - (|x| - |y|)^2) / (2 |x| |y|), which does not cancel as 1 - x.y / (|x| |y|) does;
    * ``norm_ratio`` = |x| / |y|; ``slope`` = x.y / y.y, the s for which |x - s y| is least, and ``slope_rel_l2`` =
      |x - s y| / |s y|, what is left where x is y times a factor;
    * ``ulp_p50``, ``ulp_p99``, ``ulp_max`` = quantiles and maximum of the ULP distance in ``ulp_dtype``;
    * ``row_rel_l2`` = float64 [rows], each row's |d| / |y| with the row norm raised to ROW_NORM_FLOOR of the median
      (to 1 / features of it where that is more); ``row_max_abs`` = its max |d|, ``row_norm_ratio`` = its |x| / |y|;
      ``row_mismatch`` = bool [rows], rows with a non-finite value on one side only;
    * ``channel_rel_l2`` = float64 [features], each feature's |d| / |y| over the rows, its norm raised likewise (to
      1 / rows); ``channel_d2`` = its sum d^2, ``channel_max_abs`` = its max |d|;
    * ``nonfinite_at`` = (row, feature) of the first eight values that are non-finite on one side only;
    * ``is_bound``: the errors (``rel_l2``, ``row_rel_l2``, ``nonfinite_mismatch``) are what they are at least.

    A figure that has no value (no pair, zero norm) is NaN. Fields that a caller does not fill in have no value.
    """

    rows: int
    pairs: int
    rel_l2: float
    rmse: float
    max_abs: float
    max_abs_at: tuple[int, int]
    one_minus_cos: float
    norm_ratio: float
    norm_x: float
    norm_y: float
    ulp_dtype: str
    ulp_p50: float
    ulp_p99: float
    nan_x: int
    nan_y: int
    inf_x: int
    inf_y: int
    nonfinite_mismatch: int
    row_rel_l2: np.ndarray
    row_mismatch: np.ndarray
    slope: float = float("nan")
    slope_rel_l2: float = float("nan")
    ulp_max: float = float("nan")
    row_max_abs: np.ndarray = field(default_factory=lambda: np.zeros(0))
    row_norm_ratio: np.ndarray = field(default_factory=lambda: np.zeros(0))
    channel_rel_l2: np.ndarray = field(default_factory=lambda: np.zeros(0))
    channel_d2: np.ndarray = field(default_factory=lambda: np.zeros(0))
    channel_max_abs: np.ndarray = field(default_factory=lambda: np.zeros(0))
    nonfinite_at: tuple[tuple[int, int], ...] = ()
    is_bound: bool = False

    @property
    def identical(self) -> bool:
        """Tell whether every pair holds the same value, non-finite ones included (+0 equals -0)."""
        return self.max_abs == 0 and not self.nonfinite_mismatch

    @property
    def worst_row(self) -> int:
        """Return the row with the largest ``row_rel_l2``."""
        return int(np.argmax(self.row_rel_l2))


class PairMeasure:
    """Accumulate :class:`PairMetrics` over blocks of rows; memory grows with rows and with features, not with both.

    ``rows`` is the total number of rows; ``ulp_dtype`` the dtype in which ULPs are counted (the coarser of the two).
    """

    def __init__(self, rows: int, ulp_dtype: str) -> None:
        self.rows, self.ulp_dtype = rows, ulp_dtype
        self._sums = PairSums(rows, 0)
        self._features = 0
        self._pairs = 0
        self._ulps = UlpHistogram()

    def update(self, x: np.ndarray, y: np.ndarray, row_offset: int, bits: str = "") -> None:
        """Take rows ``row_offset ...`` of both tensors, [rows, features...] of equal shape, any real dtype.

        ``bits``: "bfloat16" where both are uint16 arrays of its bits, which spares widening them.
        """
        if x.shape != y.shape:
            raise ValueError(f"blocks of shapes {x.shape} and {y.shape} cannot be paired")
        count = len(x)
        x, y = x.reshape(count, -1), y.reshape(count, -1)
        if not self._pairs and self._features != x.shape[1]:
            self._features = x.shape[1]
            self._sums = PairSums(self.rows, self._features)
        if bits and (compiled() is None or bits not in CARRIERS):
            x, y, bits = widen(x, bits), widen(y, bits), ""
        step = max(2, BLOCK_VALUES // max(1, x.shape[1]))
        for start in range(0, count, step):
            stop = min(start + step, count)
            self._block(x[start:stop], y[start:stop], slice(row_offset + start, row_offset + stop), bits)

    def _block(self, x: np.ndarray, y: np.ndarray, where: slice, bits: str) -> None:
        kernels, before, sums = compiled(), self._sums.excluded, self._sums
        self._pairs += x.size
        if kernels is None:
            sums.add(x, y, where)
        else:
            kind = bits or ("float32" if x.dtype == y.dtype == np.float32 else "float64")
            sums.add_compiled(kernels, kind, x, y, where)
        if sums.excluded > before:
            x, y = (widen(values, bits) if bits else values for values in (x, y))
            finite = np.isfinite(x) & np.isfinite(y)
            self._ulps.add(ulp_distance(x[finite], y[finite], self.ulp_dtype))
        elif not sums.row_max[where].any():
            self._ulps.add_zeros(x.size)
        elif kernels is None or self.ulp_dtype == "float64":
            self._ulps.add(ulp_distance(x, y, self.ulp_dtype))
        else:
            both = (x, y) if bits else (ulp_bits(x, self.ulp_dtype), ulp_bits(y, self.ulp_dtype))
            self._ulps.add_bits(*both)

    def result(self) -> PairMetrics:
        """Return the figures over everything taken, and end the measure."""
        sums, nan = self._sums, float("nan")
        d2, x2, y2 = (float(values.sum()) for values in (sums.row_d2, sums.row_x2, sums.row_y2))
        norm_x, norm_y = float(np.sqrt(x2)), float(np.sqrt(y2))
        pairs = self._pairs - sums.excluded
        middle, high = self._ulps.quantiles((0.5, 0.99))
        self._ulps.close()
        return PairMetrics(
            rows=self.rows,
            pairs=pairs,
            rel_l2=relative(d2, y2, x2) if pairs else nan,
            rmse=float(np.sqrt(d2 / pairs)) if pairs else nan,
            max_abs=sums.max_abs if pairs else nan,
            max_abs_at=sums.max_abs_at,
            one_minus_cos=one_minus_cos(d2, norm_x, norm_y) if pairs else nan,
            norm_ratio=norm_x / norm_y if norm_y else nan,
            norm_x=norm_x,
            norm_y=norm_y,
            ulp_dtype=self.ulp_dtype,
            ulp_p50=middle,
            ulp_p99=high,
            nan_x=int(sums.counts[NAN_X]),
            nan_y=int(sums.counts[NAN_Y]),
            inf_x=int(sums.counts[INF_X]),
            inf_y=int(sums.counts[INF_Y]),
            nonfinite_mismatch=int(sums.counts[MISMATCH]),
            row_rel_l2=relative_each(sums.row_d2, sums.row_y2, self._features),
            row_mismatch=sums.row_mismatch,
            slope=(x2 + y2 - d2) / (2 * y2) if pairs and y2 else nan,
            slope_rel_l2=_beside_slope(d2, norm_x, norm_y) if pairs else nan,
            ulp_max=self._ulps.largest if pairs else nan,
            row_max_abs=sums.row_max,
            row_norm_ratio=_ratio(np.sqrt(sums.row_x2), np.sqrt(sums.row_y2)),
            channel_rel_l2=relative_each(sums.channel_d2, sums.channel_y2, self.rows),
            channel_d2=sums.channel_d2,
            channel_max_abs=sums.channel_max,
            nonfinite_at=sums.nonfinite_at,
        )


def median(values: np.ndarray) -> float:
    """Return what np.median does of float64 [n], sooner where n is small; NaN of none, and where one is."""
    if not len(values):
        return float("nan")
    middle, odd = divmod(len(values), 2)
    parted = np.partition(values, (middle, -1) if odd else (middle - 1, middle, -1))  # NaN is sorted to the end
    if parted[-1] != parted[-1]:
        return float("nan")
    return float(parted[middle] if odd else (parted[middle - 1] + parted[middle]) / 2)


def relative_each(d2: np.ndarray, y2: np.ndarray, length: int) -> np.ndarray:
    """Return each line's |d| / |y|, the norm of y (of x = d where y is zero) raised to a share of the median."""
    if not len(d2):
        return np.zeros(0)
    reference = np.where(y2 > 0, y2, d2)
    floor = max(ROW_NORM_FLOOR, 1 / max(1, length)) ** 2 * median(reference)
    scale = np.maximum(reference, floor)
    with np.errstate(invalid="ignore"):  # squares of float64 may overflow
        return np.sqrt(np.divide(d2, scale, out=np.zeros_like(scale), where=scale > 0))


def _ratio(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return np.divide(x, y, out=np.full(len(x), np.nan), where=y > 0)


def _beside_slope(d2: float, norm_x: float, norm_y: float) -> float:
    """Return |x - s y| / |s y| for the best s: the tangent of the angle between x and y, from its 1 - cos."""
    away = one_minus_cos(d2, norm_x, norm_y)
    with np.errstate(divide="ignore"):
        return float(np.sqrt(max(0.0, away * (2 - away))) / np.abs(np.float64(1 - away)))


def one_minus_cos(d2: float, norm_x: float, norm_y: float) -> float:
    """Return 1 - cos from sum (x - y)^2 and the two norms: (d2 - (|x| - |y|)^2) / (2 |x| |y|).

    NaN when a norm is zero; never negative.
    """
    if not norm_x or not norm_y:
        return 0.0 if norm_x == norm_y else float("nan")
    return max(0.0, (d2 - (norm_x - norm_y) ** 2) / (2 * norm_x * norm_y))


def relative(d2: float, y2: float, x2: float) -> float:
    """Return |d| / |y|, or |d| / |x| where y is zero, from their sums of squares."""
    scale = y2 or x2
    return float(np.sqrt(d2 / scale)) if scale else 0.0


def measure_pair(x: np.ndarray, y: np.ndarray, ulp_dtype: str = "float32") -> PairMetrics:
    """Return the :class:`PairMetrics` of two whole tensors [rows, features...]."""
    measure = PairMeasure(len(x), ulp_dtype)
    measure.update(x, y, 0)
    return measure.result()


# -- log-probabilities ------------------------------------------------------------------------------------------------


def logprobs_from_logits(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return log softmax(logits)[row, tokens[row]], float64 [rows], accumulated in float64.

    ``logits`` is [rows, vocab] of any real dtype, ``tokens`` int [rows]. The maximum is subtracted first, so no
    exponent overflows. Raises ValueError when shapes or ids do not fit.
    """
    rows, vocab = logits.shape
    if len(tokens) != rows or (rows and not (tokens.min() >= 0 and tokens.max() < vocab)):
        raise ValueError(f"{len(tokens)} token ids do not fit logits of shape {logits.shape}")
    result = np.empty(rows, np.float64)
    step = max(1, BLOCK_VALUES // max(1, vocab))
    for start in range(0, rows, step):
        block = logits[start : start + step].astype(np.float64)
        block -= block.max(axis=1, keepdims=True)
        chosen = block[np.arange(len(block)), tokens[start : start + step]]
        result[start : start + step] = chosen - np.log(np.exp(block, out=block).sum(axis=1))
    return result
