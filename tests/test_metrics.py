"""Metrics against straightforward float64 references, on hypothesis' choice of values."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from probe import metrics
from probe.logprobs import token_metrics
from probe.metrics import (
    PairMeasure,
    coarser_dtype,
    logprobs_from_logits,
    measure_pair,
)
from probe.store.dtypes import round_to
from probe.ulp import UlpHistogram, ulp_distance

# float32 values whose squares neither overflow nor vanish in float64 sums
VALUES = st.floats(-1e6, 1e6, width=32).map(lambda v: 0.0 if abs(v) < 1e-6 else v)
SHAPES = st.tuples(st.integers(1, 9), st.integers(1, 13))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    shape = draw(SHAPES)
    return tuple(draw(hnp.arrays(np.float32, shape, elements=VALUES)) for _ in range(2))  # type: ignore[return-value]


@given(pairs(), st.integers(1, 9))
@settings(deadline=None, max_examples=60)
def test_pair_metrics_equal_a_direct_float64_computation_for_any_chunking(pair, chunk):
    x, y = pair
    measure = PairMeasure(len(x), "float32")
    for start in range(0, len(x), chunk):
        measure.update(x[start : start + chunk], y[start : start + chunk], start)
    got = measure.result()

    x64, y64 = x.astype(np.float64), y.astype(np.float64)
    d = x64 - y64
    nx, ny, nd = (np.linalg.norm(v) for v in (x64, y64, d))
    # sums of at most 117 float64 terms in another order differ by far less than 1e-12
    close = {"rel_tol": 1e-12, "abs_tol": 0.0}
    assert math.isclose(got.rel_l2, nd / (ny or nx) if nd else 0.0, **close)
    assert math.isclose(got.rmse, math.sqrt(np.mean(d**2)), **close)
    assert got.max_abs == np.abs(d).max()
    if got.max_abs:
        assert abs(d[got.max_abs_at]) == got.max_abs
    assert math.isclose(got.norm_x, nx, **close)
    if ny:
        assert math.isclose(got.norm_ratio, nx / ny, **close)
    if nx and ny:
        # the reference cancels to about 1e-16 around 1; both are exact to a few units of that
        assert math.isclose(got.one_minus_cos, 1 - (x64 * y64).sum() / (nx * ny), rel_tol=1e-9, abs_tol=1e-13)
    assert got.identical == bool((x == y).all())


@given(pairs())
@settings(deadline=None, max_examples=40)
def test_row_errors_are_each_rows_own_relative_error_with_small_rows_raised(pair):
    x, y = pair
    got = measure_pair(x, y).row_rel_l2
    d2 = ((x.astype(np.float64) - y) ** 2).sum(1)
    y2, x2 = (y.astype(np.float64) ** 2).sum(1), (x.astype(np.float64) ** 2).sum(1)
    reference = np.where(y2 > 0, y2, x2)
    scale = np.maximum(reference, max(metrics.ROW_NORM_FLOOR, 1 / x.shape[1]) ** 2 * np.median(reference))
    expected = np.sqrt(np.divide(d2, scale, out=np.zeros_like(d2), where=scale > 0))
    np.testing.assert_allclose(got, expected, rtol=1e-12)  # summation order only


def test_one_minus_cos_of_nearly_parallel_vectors_does_not_cancel():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 256)).astype(np.float32)
    y = (x * np.float32(1 + 1e-3) + rng.normal(size=x.shape) * 1e-6).astype(np.float32)
    x128, y128 = x.astype(np.longdouble), y.astype(np.longdouble)
    exact = 1 - (x128 * y128).sum() / np.sqrt((x128**2).sum() * (y128**2).sum())
    # 64-bit-mantissa reference: its own cancellation leaves about 1e-19 / 5e-13 = 1e-6 relative
    assert measure_pair(x, y).one_minus_cos == pytest.approx(float(exact), rel=1e-5)


# -- ULP --------------------------------------------------------------------------------------------------------------

NUMPY_ULP = {"float16": np.float16, "float32": np.float32, "float64": np.float64}


@pytest.mark.parametrize("dtype", [*NUMPY_ULP, "bfloat16"])
@given(start=st.floats(-100, 100, width=16), steps=st.integers(0, 200))
@settings(deadline=None, max_examples=50)
def test_ulp_distance_counts_representable_numbers(dtype, start, steps):
    if dtype == "bfloat16":
        bits = int(round_to(np.array([start], np.float32), dtype).view(np.uint32)[0]) >> 16
        if bits & 0x8000 and (bits & 0x7FFF) < steps:
            return  # the walk below goes away from zero only
        y = np.array([(bits + steps) << 16], np.uint32).view(np.float32)
        x = np.array([bits << 16], np.uint32).view(np.float32)
    else:
        x = np.array([start], NUMPY_ULP[dtype])
        y = x.copy()
        for _ in range(steps):
            y = np.nextafter(y, NUMPY_ULP[dtype](np.inf))
    assert ulp_distance(x, y, dtype)[0] == steps
    assert ulp_distance(y, x, dtype)[0] == steps


def test_ulp_distance_crosses_zero_and_joins_signed_zeros():
    tiny = np.finfo(np.float32).smallest_subnormal
    assert ulp_distance(np.array([-tiny]), np.array([tiny]), "float32")[0] == 2
    assert ulp_distance(np.array([-0.0], np.float32), np.array([0.0], np.float32), "float32")[0] == 0
    far = ulp_distance(np.array([-1.7e308]), np.array([1.7e308]), "float64")[0]
    assert far > 2**63  # more than int64 holds: returned as float64


def test_fp32_pairs_in_bfloat16_units_are_rounded_first():
    x, y = np.array([1.0], np.float32), np.array([1.0 + 2**-9], np.float32)
    assert ulp_distance(x, y, "bfloat16")[0] == 0
    assert ulp_distance(x, np.array([1.0 + 2**-7], np.float32), "bfloat16")[0] == 1


@given(hnp.arrays(np.int64, st.integers(1, 200), elements=st.integers(0, 1 << 31)), st.sampled_from([0.5, 0.99, 1.0]))
def test_ulp_quantiles_are_exact_below_65536_and_close_above(values, q):
    histogram = UlpHistogram()
    histogram.add(values)
    exact = np.quantile(values, q, method="inverted_cdf")
    (got,) = histogram.quantiles([q])
    assert histogram.largest == values.max()
    if exact < UlpHistogram.EXACT:
        assert got == exact
    else:
        assert exact * (1 - 2**-10) <= got <= exact  # the lower edge of a bin of relative width 2^-10


def test_coarser_dtype_has_fewer_mantissa_bits():
    assert coarser_dtype("float32", "bfloat16") == "bfloat16"
    assert coarser_dtype("float16", "bfloat16") == "bfloat16"
    assert coarser_dtype("float64", "auto", "float32") == "float32"
    assert coarser_dtype("auto") == "float32"


# -- non-finite values ------------------------------------------------------------------------------------------------


def test_nonfinite_pairs_are_counted_and_left_out():
    x = np.array([[1.0, np.nan, 3.0, np.inf], [1.0, 2.0, 3.0, 4.0]], np.float32)
    y = np.array([[1.0, np.nan, np.nan, np.inf], [1.0, 2.0, 3.0, 4.5]], np.float32)
    got = measure_pair(x, y)
    assert (got.nan_x, got.nan_y, got.inf_x, got.inf_y) == (1, 2, 1, 1)
    assert got.nonfinite_mismatch == 1
    assert got.row_mismatch.tolist() == [True, False]
    assert got.pairs == 5
    assert got.max_abs == 0.5 and got.max_abs_at == (1, 3)
    assert not got.identical


def test_infinities_of_opposite_sign_and_of_one_side_are_mismatches():
    x = np.array([[np.inf, -np.inf, 1.0]], np.float32)
    y = np.array([[np.inf, np.inf, 1.0]], np.float32)
    assert measure_pair(x, y).nonfinite_mismatch == 1


def test_the_same_nonfinite_values_on_both_sides_are_identical():
    x = np.array([[np.nan, np.inf, 1.0]], np.float32)
    assert measure_pair(x, x.copy()).identical


def test_nothing_finite_gives_no_figure():
    x = np.full((2, 3), np.nan, np.float32)
    got = measure_pair(x, x)
    assert got.pairs == 0
    assert math.isnan(got.rel_l2) and math.isnan(got.max_abs)


def test_a_zero_side_is_a_full_difference():
    x, zero = np.ones((2, 3), np.float32), np.zeros((2, 3), np.float32)
    assert measure_pair(x, zero).rel_l2 == 1.0
    assert measure_pair(zero, x).rel_l2 == 1.0
    assert measure_pair(zero, zero).rel_l2 == 0.0


# -- log-probabilities ------------------------------------------------------------------------------------------------


@given(hnp.arrays(np.float32, st.tuples(st.integers(1, 6), st.integers(2, 40)), elements=st.floats(-80, 80, width=32)))
@settings(deadline=None, max_examples=50)
def test_logprobs_are_a_softmax_in_float64(logits):
    tokens = np.arange(len(logits)) % logits.shape[1]
    wide = logits.astype(np.float64)
    expected = wide - np.log(np.exp(wide).sum(1, keepdims=True))  # exp(80) is far from float64's limit
    # both lose a few float64 units of the largest logit (80)
    np.testing.assert_allclose(
        logprobs_from_logits(logits, tokens), expected[np.arange(len(logits)), tokens], atol=1e-12
    )


def test_logprobs_survive_large_logits_and_reject_foreign_tokens():
    assert logprobs_from_logits(np.array([[1e4, 0.0]], np.float32), np.array([0]))[0] == 0.0
    with pytest.raises(ValueError, match="do not fit"):
        logprobs_from_logits(np.zeros((1, 4), np.float32), np.array([4]))


def test_logprobs_of_many_rows_are_computed_block_by_block(monkeypatch):
    monkeypatch.setattr(metrics, "BLOCK_VALUES", 16)
    logits = np.random.default_rng(0).normal(size=(11, 7)).astype(np.float32)
    tokens = np.arange(11) % 7
    whole = logits - np.log(np.exp(logits.astype(np.float64)).sum(1, keepdims=True))
    np.testing.assert_allclose(logprobs_from_logits(logits, tokens), whole[np.arange(11), tokens], atol=1e-12)


def test_token_metrics_follow_their_formulas():
    a, b = np.log([0.5, 0.25, 0.8]), np.log([0.4, 0.25, 0.9])
    got = token_metrics(a, b)
    d, gap = b - a, np.array([0.1, 0.0, 0.1])
    expected = {
        "mean_abs_logprob_diff": np.abs(d).mean(),
        "max_abs_logprob_diff": np.abs(d).max(),
        "mean_prob_diff": gap.mean(),
        "max_prob_diff": 0.1,
        "std_prob_diff": gap.std(ddof=1),
        "pearson": np.corrcoef(np.exp(a), np.exp(b))[0, 1],
        "k1": -d.mean(),
        "k2": (d**2).mean() / 2,
        "k3": (np.exp(d) - d - 1).mean(),
    }
    assert got == pytest.approx(expected, rel=1e-12)  # float64 on three values


def test_token_metrics_of_too_few_tokens_are_nan_not_errors():
    assert all(math.isnan(value) for value in token_metrics(np.zeros(0), np.zeros(0)).values())
    one = token_metrics(np.array([-1.0]), np.array([-1.0]))
    assert one["max_abs_logprob_diff"] == 0.0 and math.isnan(one["pearson"]) and math.isnan(one["std_prob_diff"])
