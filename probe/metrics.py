"""Formulas shared by capture and compare: tensor pairs in bounded memory, log-probabilities and their divergence.

Everything is numpy. Sums are accumulated in float64 block by block: fp32 dot products were measured to put 1 - cos off
by up to 1.8 %, float64 blocks keep it within 1e-7.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from probe.store.dtypes import round_to

BLOCK_VALUES = 1 << 17
"""Values per block: five float64 work arrays of it stay near the size of a CPU's L2 cache."""

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


NONFINITE_SHOWN = 8
"""Places of one-sided non-finite values that are kept: enough to see whether they lie in one row or one column."""


def coarser_dtype(*names: str) -> str:
    """Return the dtype with the fewest mantissa bits; names that are not floating dtypes are ignored.

    Returns "float32" when none is a floating dtype.
    """
    known = [name for name in names if name in MANTISSA_BITS]
    return min(known, key=lambda name: MANTISSA_BITS[name], default="float32")


# -- ULP distance -----------------------------------------------------------------------------------------------------


def ulp_distance(x: np.ndarray, y: np.ndarray, dtype: str) -> np.ndarray:
    """Count the representable numbers of ``dtype`` between x and y, after rounding both to it.

    Finite values of one shape; +0 and -0 coincide. Returns int64 (float64 for dtype float64, where opposite signs may
    exceed int64). fp8 is counted in bfloat16 steps. Source: the ordered-integer view of IEEE 754 numbers.
    """
    left, right = _ordinals(x, dtype), _ordinals(y, dtype)
    if dtype == "float64" and ((left < 0) != (right < 0)).any():
        return np.abs(left.astype(np.float64) - right)
    return np.abs(left - right)


_VIEWS: dict[str, tuple[type[np.floating], type[np.signedinteger]]] = {
    "float64": (np.float64, np.int64),
    "float32": (np.float32, np.int32),
    "float16": (np.float16, np.int16),
}


def _ordinals(values: np.ndarray, dtype: str) -> np.ndarray:
    """Map floats to int64 so that neighbours in ``dtype`` differ by one."""
    shift = 0
    if dtype not in _VIEWS:
        values, dtype, shift = round_to(values, "bfloat16"), "float32", 16
    carrier, integer = _VIEWS[dtype]
    with np.errstate(over="ignore"):
        bits = np.ascontiguousarray(values, carrier).view(integer).astype(np.int64)
    magnitude = bits & np.int64(np.iinfo(integer).max)
    return np.where(bits < 0, -magnitude, magnitude) >> shift


class UlpHistogram:
    """Count ULP distances so that quantiles need no second pass.

    Exact up to 65,535; above that, bins of relative width 2^-10 (a quantile there is low by at most 0.1 %).
    """

    EXACT = 1 << 16
    _SHIFT = 52 - 10

    def __init__(self) -> None:
        self.small = np.zeros(self.EXACT, np.int64)
        self.large: dict[int, int] = {}

    def add(self, distances: np.ndarray) -> None:
        """Count an array of non-negative distances."""
        flat = distances.ravel()
        below = flat < self.EXACT
        counts = np.bincount(flat[below].astype(np.int64))
        self.small[: len(counts)] += counts
        if not below.all():
            keys = flat[~below].astype(np.float64).view(np.int64) >> self._SHIFT
            for key, count in zip(*np.unique(keys, return_counts=True)):
                self.large[int(key)] = self.large.get(int(key), 0) + int(count)

    def add_zeros(self, count: int) -> None:
        """Count ``count`` pairs of equal values."""
        self.small[0] += count

    def quantile(self, q: float) -> float:
        """Return the smallest counted distance with at least the share ``q`` at or below it; NaN when empty."""
        total = int(self.small.sum()) + sum(self.large.values())
        if not total:
            return float("nan")
        target = max(1, int(np.ceil(q * total)))
        cumulative = np.cumsum(self.small)
        if cumulative[-1] >= target:
            return float(np.searchsorted(cumulative, target))
        seen = int(cumulative[-1])
        for key in sorted(self.large):
            seen += self.large[key]
            if seen >= target:
                break
        return float(np.int64(key << self._SHIFT).view(np.float64))


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
    * ``nonfinite_at`` = (row, feature) of the first NONFINITE_SHOWN values that are non-finite on one side only.

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

    @property
    def identical(self) -> bool:
        """Tell whether every pair holds the same value, non-finite ones included (+0 equals -0)."""
        return self.max_abs == 0 and not self.nonfinite_mismatch

    @property
    def worst_row(self) -> int:
        """Return the row with the largest ``row_rel_l2``."""
        return int(np.argmax(self.row_rel_l2))


class PairMeasure:
    """Accumulate :class:`PairMetrics` over blocks of rows; memory does not grow with features.

    ``rows`` is the total number of rows; ``ulp_dtype`` the dtype in which ULPs are counted (the coarser of the two).
    """

    def __init__(self, rows: int, ulp_dtype: str) -> None:
        self.rows, self.ulp_dtype = rows, ulp_dtype
        self._row_d2, self._row_x2, self._row_y2 = np.zeros(rows), np.zeros(rows), np.zeros(rows)
        self._row_max, self._row_mismatch = np.zeros(rows), np.zeros(rows, bool)
        self._channel_d2, self._channel_y2, self._channel_max = np.zeros(0), np.zeros(0), np.zeros(0)
        self._nonfinite_at: list[tuple[int, int]] = []
        self._pairs = self._mismatch = 0
        self._features = 1
        self._nan, self._inf = [0, 0], [0, 0]
        self._max, self._max_at = 0.0, (0, 0)
        self._ulps = UlpHistogram()

    def update(self, x: np.ndarray, y: np.ndarray, row_offset: int) -> None:
        """Take rows ``row_offset ...`` of both tensors, [rows, features...] of equal shape, any real dtype."""
        if x.shape != y.shape:
            raise ValueError(f"blocks of shapes {x.shape} and {y.shape} cannot be paired")
        count = len(x)
        x, y = x.reshape(count, -1), y.reshape(count, -1)
        self._features = max(1, x.shape[1])
        if len(self._channel_d2) != x.shape[1]:
            self._channel_d2, self._channel_y2, self._channel_max = (np.zeros(x.shape[1]) for _ in range(3))
        step = max(1, BLOCK_VALUES // max(1, x.shape[1]))
        for start in range(0, count, step):
            stop = min(start + step, count)
            self._block(x[start:stop], y[start:stop], slice(row_offset + start, row_offset + stop))

    def _block(self, x: np.ndarray, y: np.ndarray, where: slice) -> None:
        if np.array_equal(x, y) and np.isfinite(wide := x.astype(np.float64)).all():
            self._row_x2[where] = self._row_y2[where] = np.einsum("ij,ij->i", wide, wide)
            self._channel_y2 += np.einsum("ij,ij->j", wide, wide)
            self._pairs += x.size
            self._ulps.add_zeros(x.size)
            return
        x64, y64 = x.astype(np.float64), y.astype(np.float64)
        finite = np.isfinite(x64) & np.isfinite(y64)
        if finite.all():
            self._ulps.add(ulp_distance(x, y, self.ulp_dtype))
        else:
            self._count_nonfinite(x64, y64, where)
            self._ulps.add(ulp_distance(x[finite], y[finite], self.ulp_dtype))
            x64, y64 = np.where(finite, x64, 0.0), np.where(finite, y64, 0.0)
        self._pairs += int(finite.sum())
        self._row_x2[where] = np.einsum("ij,ij->i", x64, x64)
        self._row_y2[where] = np.einsum("ij,ij->i", y64, y64)
        self._channel_y2 += np.einsum("ij,ij->j", y64, y64)
        difference = np.subtract(x64, y64, out=x64)
        self._row_d2[where] = np.einsum("ij,ij->i", difference, difference)
        self._channel_d2 += np.einsum("ij,ij->j", difference, difference)
        self._note_max(np.abs(difference, out=difference), where.start)

    def _note_max(self, magnitude: np.ndarray, row_offset: int) -> None:
        if magnitude.size:
            self._row_max[row_offset : row_offset + len(magnitude)] = magnitude.max(axis=1)
            np.maximum(self._channel_max, magnitude.max(axis=0), out=self._channel_max)
            at = int(magnitude.argmax())
            row, feature = divmod(at, magnitude.shape[1])
            if magnitude[row, feature] > self._max:
                self._max, self._max_at = float(magnitude[row, feature]), (row_offset + row, feature)

    def _count_nonfinite(self, x: np.ndarray, y: np.ndarray, where: slice) -> None:
        for side, values in enumerate((x, y)):
            self._nan[side] += int(np.isnan(values).sum())
            self._inf[side] += int(np.isinf(values).sum())
        same = (np.isnan(x) & np.isnan(y)) | (x == y) | (np.isfinite(x) & np.isfinite(y))
        self._mismatch += int((~same).sum())
        self._row_mismatch[where] = ~same.all(axis=1)
        for row, feature in np.argwhere(~same)[: NONFINITE_SHOWN - len(self._nonfinite_at)].tolist():
            self._nonfinite_at.append((where.start + row, feature))

    def result(self) -> PairMetrics:
        """Return the figures over everything taken so far."""
        d2, x2, y2 = float(self._row_d2.sum()), float(self._row_x2.sum()), float(self._row_y2.sum())
        norm_x, norm_y = float(np.sqrt(x2)), float(np.sqrt(y2))
        has_pairs = self._pairs > 0
        return PairMetrics(
            rows=self.rows,
            pairs=self._pairs,
            rel_l2=_relative(d2, y2, x2) if has_pairs else np.nan,
            rmse=float(np.sqrt(d2 / self._pairs)) if has_pairs else np.nan,
            max_abs=self._max if has_pairs else np.nan,
            max_abs_at=self._max_at,
            one_minus_cos=one_minus_cos(d2, norm_x, norm_y) if has_pairs else np.nan,
            norm_ratio=norm_x / norm_y if norm_y else np.nan,
            norm_x=norm_x,
            norm_y=norm_y,
            ulp_dtype=self.ulp_dtype,
            ulp_p50=self._ulps.quantile(0.5),
            ulp_p99=self._ulps.quantile(0.99),
            nan_x=self._nan[0],
            nan_y=self._nan[1],
            inf_x=self._inf[0],
            inf_y=self._inf[1],
            nonfinite_mismatch=self._mismatch,
            row_rel_l2=_relative_each(self._row_d2, self._row_y2, self._features),
            row_mismatch=self._row_mismatch,
            slope=(x2 + y2 - d2) / (2 * y2) if has_pairs and y2 else np.nan,
            slope_rel_l2=_beside_slope(d2, norm_x, norm_y) if has_pairs else np.nan,
            ulp_max=self._ulps.quantile(1.0),
            row_max_abs=self._row_max,
            row_norm_ratio=_ratio(np.sqrt(self._row_x2), np.sqrt(self._row_y2)),
            channel_rel_l2=_relative_each(self._channel_d2, self._channel_y2, self.rows),
            channel_d2=self._channel_d2,
            channel_max_abs=self._channel_max,
            nonfinite_at=tuple(self._nonfinite_at),
        )


def _relative_each(d2: np.ndarray, y2: np.ndarray, length: int) -> np.ndarray:
    """Return each line's |d| / |y|, the norm of y (of x = d where y is zero) raised to a share of the median."""
    if not len(d2):
        return np.zeros(0)
    reference = np.where(y2 > 0, y2, d2)
    floor = max(ROW_NORM_FLOOR, 1 / max(1, length)) ** 2 * float(np.median(reference))
    scale = np.maximum(reference, floor)
    return np.sqrt(np.divide(d2, scale, out=np.zeros_like(scale), where=scale > 0))


def _ratio(x: np.ndarray, y: np.ndarray) -> np.ndarray:
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


def _relative(d2: float, y2: float, x2: float) -> float:
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


def token_metrics(logprob_a: np.ndarray, logprob_b: np.ndarray) -> dict[str, float]:
    """Return the divergence of two log-prob vectors of the same tokens, a the rollout's and b the actor's.

    float [tokens] each, finite. With D = b - a, p = exp(a), q = exp(b):

    * ``mean_abs_logprob_diff``, ``max_abs_logprob_diff`` of |D|;
    * ``mean_prob_diff``, ``max_prob_diff``, ``std_prob_diff`` of |p - q|, std with n - 1 (verl's
      ``training/rollout_probs_diff_{mean,max,std}``); ``pearson`` = corr(p, q)
      (``training/rollout_actor_probs_pearson_corr``);
    * ``k1`` = -mean D, ``k2`` = mean D^2 / 2, ``k3`` = mean(exp(D) - D - 1): estimators of KL(rollout || actor) on
      tokens the rollout sampled (J. Schulman, "Approximating KL divergence", 2020).

    A figure that needs more tokens than there are is NaN.
    """
    a, b = np.asarray(logprob_a, np.float64), np.asarray(logprob_b, np.float64)
    if not a.size:
        return dict.fromkeys(TOKEN_METRICS, float("nan"))
    difference = b - a
    p, q = np.exp(a), np.exp(b)
    gap = np.abs(p - q)
    with np.errstate(over="ignore"):
        k3 = float(np.mean(np.expm1(difference) - difference))
    return {
        "mean_abs_logprob_diff": float(np.abs(difference).mean()),
        "max_abs_logprob_diff": float(np.abs(difference).max()),
        "mean_prob_diff": float(gap.mean()),
        "max_prob_diff": float(gap.max()),
        "std_prob_diff": float(gap.std(ddof=1)) if gap.size > 1 else float("nan"),
        "pearson": pearson(p, q),
        "k1": float(-difference.mean()),
        "k2": float(0.5 * np.mean(difference**2)),
        "k3": k3,
    }


TOKEN_METRICS = (
    *("mean_abs_logprob_diff", "max_abs_logprob_diff", "mean_prob_diff", "max_prob_diff", "std_prob_diff"),
    *("pearson", "k1", "k2", "k3"),
)


def pearson(x: np.ndarray, y: np.ndarray) -> float:
    """Return the correlation coefficient of two vectors; NaN below two values or when one is constant."""
    if x.size < 2:
        return float("nan")
    dx, dy = x - x.mean(), y - y.mean()
    scale = float(np.sqrt((dx @ dx) * (dy @ dy)))
    return float(dx @ dy) / scale if scale else float("nan")
