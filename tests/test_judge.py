"""Verdicts: healthy pairs never alarm, faults do, and the whole follows from its parts."""

from __future__ import annotations

import numpy as np
import pytest

from probe.compare import judge as j
from probe.compare.judge import effective_dtype, judge, modelled_floor, overall
from probe.metrics import measure_pair


def pair(error: float, rows: int = 64, features: int = 256, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return two tensors whose relative L2 difference is about ``error``, as float64 arrays."""
    rng = np.random.default_rng(seed)
    y = rng.normal(size=(rows, features))
    return y * (1 + error * rng.normal(size=y.shape)), y


# -- the floor --------------------------------------------------------------------------------------------------------


def test_the_floor_reproduces_the_floors_that_were_measured():
    # 12-layer model of hidden size 256 (feed-forward 768), measured by re-rounding every output at random:
    # bf16 2.1e-2 after the first layer and 8.6e-2 at the logits; a model of noise is right within a factor of two
    assert modelled_floor("bfloat16", 12, 768) == pytest.approx(2.1e-2, rel=0.5)
    assert modelled_floor("bfloat16", 12 * 12 + 2, 768) == pytest.approx(8.6e-2, rel=0.5)
    assert modelled_floor("float32", 12, 768) == pytest.approx(7.7e-7, rel=1.0)
    assert modelled_floor("float32", 12 * 12 + 2, 768) == pytest.approx(3.7e-6, rel=1.0)


def test_the_floor_grows_with_depth_and_with_fp32_reductions_only():
    assert modelled_floor("float32", 48, 768) > modelled_floor("float32", 12, 768)
    assert modelled_floor("float32", 12, 16384) > 1.2 * modelled_floor("float32", 12, 128)
    assert modelled_floor("bfloat16", 12, 16384) < 1.01 * modelled_floor("bfloat16", 12, 128)
    floors = [modelled_floor(name, 12, 768) for name in ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn")]
    assert floors == sorted(floors)


def test_the_coarsest_dtype_of_tensors_and_models_decides():
    assert effective_dtype("float32", "float32", "bfloat16", "float32") == "bfloat16"
    assert effective_dtype("float32", "float32", "auto", "") == "float32"


# -- one tensor -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("floors", "verdict"), [(0.5, "consistent"), (1.9, "consistent"), (6.0, "suspect"), (15.0, "divergent")]
)
def test_bands_of_a_tensor_after_quiet_ones(floors, verdict):
    floor = 1e-6
    assert judge(measure_pair(*pair(floors * floor)), floor).verdict == verdict


def test_identical_values_are_identical_and_without_reason():
    _, y = pair(0)
    got = judge(measure_pair(y, y.copy()), 1e-6)
    assert (got.verdict, got.ratio, got.reason) == ("identical", 0.0, "")


def test_a_gradual_rise_is_not_an_alarm_but_a_jump_is():
    floor = 1e-6
    assert judge(measure_pair(*pair(9 * floor)), floor, level=7.0).verdict == "consistent"
    assert judge(measure_pair(*pair(45 * floor)), floor, level=4.0).verdict == "divergent"


def test_a_gradual_rise_ends_at_the_absolute_bands():
    floor = 1e-6
    assert judge(measure_pair(*pair(35 * floor)), floor, level=24.0).verdict == "consistent"
    assert judge(measure_pair(*pair(90 * floor)), floor, level=84.0).verdict == "suspect"
    assert judge(measure_pair(*pair(220 * floor)), floor, level=199.0).verdict == "divergent"


def test_one_random_row_in_two_thousand_is_found_in_bf16():
    floor = modelled_floor("bfloat16", 12, 768)
    x, y = pair(0.6 * floor, rows=2000, features=32)
    x[1234] = np.random.default_rng(9).normal(size=32)
    metrics = measure_pair(x, y)
    assert metrics.rel_l2 < 4 * floor  # the whole tensor hides it
    got = judge(metrics, floor)
    assert got.verdict in ("suspect", "divergent")
    assert "worst row" in got.reason and metrics.worst_row == 1234


def test_rows_of_huge_norm_do_not_hide_the_others():
    floor = 1e-6
    x, y = pair(30 * floor)
    x[0], y[0] = 1e6, 1e6
    got = judge(measure_pair(x, y), floor)
    assert got.ratio < 1 and got.verdict == "divergent"
    assert "median row" in got.reason


def test_a_change_of_scale_shows_in_the_norm_below_bf16_noise():
    floor = modelled_floor("bfloat16", 80, 768)
    x, y = pair(0.6 * floor)
    assert judge(measure_pair(x, y), floor).verdict == "consistent"
    got = judge(measure_pair(0.85 * x, y), floor)
    assert got.verdict == "divergent" or got.verdict == "suspect"
    assert got.ratio < 4 and "norms" in got.reason


def test_nan_on_one_side_is_divergent_and_on_both_sides_is_not():
    x, y = pair(1e-7)
    x[3, 5] = np.nan
    got = judge(measure_pair(x, y), 1e-6)
    assert got.verdict == "divergent" and "NaN" in got.reason
    y[3, 5] = np.nan
    assert judge(measure_pair(x, y), 1e-6).verdict == "consistent"


def test_nothing_finite_is_incomparable():
    x = np.full((2, 2), np.nan)
    assert judge(measure_pair(x, x), 1e-6).verdict == "incomparable"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("seed", range(5))
def test_noise_of_up_to_twice_the_floor_never_alarms(dtype, seed):
    floor = modelled_floor(dtype, 40, 512)
    for rows in (1, 7, 300):
        x, y = pair(min(1.9 * floor, 0.3), rows=rows, features=128, seed=seed)
        assert judge(measure_pair(x, y), floor).verdict == "consistent"


def test_a_weight_scaled_by_three_percent_is_divergent_in_fp32():
    x, y = pair(1e-7)
    assert judge(measure_pair(1.03 * x, y), modelled_floor("float32", 400, 8192)).verdict == "divergent"


# -- the whole --------------------------------------------------------------------------------------------------------

PASS = dict.fromkeys(("tokens", "positions", "weights", "sampling", "config", "environment"), "pass")


@pytest.mark.parametrize(
    ("modules", "gates", "tokens", "coverage", "expected"),
    [
        (["identical"] * 3, {}, 0.0, 1.0, "consistent"),
        (["consistent"] * 99 + ["suspect"], {}, None, 1.0, "consistent"),
        (["consistent"] * 98 + ["suspect"] * 2, {}, None, 1.0, "suspect"),
        (["consistent"] * 99 + ["divergent"], {}, None, 1.0, "divergent"),
        (["consistent"], {"weights": "fail"}, None, 1.0, "divergent"),
        (["consistent"], {"config": "fail"}, None, 1.0, "divergent"),
        (["consistent"], {"sampling": "fail"}, None, 1.0, "divergent"),
        (["consistent"], {"positions": "fail"}, None, 1.0, "divergent"),
        (["consistent"], {"environment": "warn", "tokens": "warn"}, None, 1.0, "consistent"),
        (["consistent"], {}, None, 0.5, "incomparable"),
        (["divergent"], {}, None, 0.5, "divergent"),
        ([], {}, None, 1.0, "incomparable"),
        (["missing", "incomparable"], {}, None, 1.0, "incomparable"),
        ([], {}, 0.01, 1.0, "consistent"),
        (["consistent"], {}, 0.5, 1.0, "suspect"),
    ],
)
def test_overall_verdict(modules, gates, tokens, coverage, expected):
    assert overall(modules, PASS | gates, tokens, coverage, 0.9) == expected


def test_log_probs_of_another_distribution_are_suspect_although_logits_agree():
    agreeing = (["consistent"] * 100, PASS, 0.0, 1.0, 0.9)
    assert overall(*agreeing) == "consistent"
    assert overall(*agreeing, other_distribution=True) == "suspect"
    assert overall(["divergent"], *agreeing[1:], other_distribution=True) == "divergent"


# -- floors that were not modelled ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "floors", "level", "verdict"),
    [
        (j.MODELLED, 3.9, 1, "consistent"),
        (j.MEASURED, 3.8, 1, "consistent"),
        (j.MEASURED, 4.4, 1, "suspect"),
        (j.MEASURED, 4.4, 9, "suspect"),  # a measured floor holds the amplification: no level raises its bands
        (j.MEASURED, 9, 9, "divergent"),
        (j.REPEATED, 3.8, 1, "consistent"),
        (j.REPEATED, 4.5, 9, "suspect"),
        (j.REPEATED, 11, 9, "divergent"),
        (j.QUANTISED, 3.8, 1, "consistent"),
        (j.QUANTISED, 4.5, 1, "suspect"),
        (j.QUANTISED, 11, 1, "divergent"),
    ],
)
def test_each_source_of_a_floor_has_bands_of_its_own(source, floors, level, verdict):
    floor = j.Floor(1e-6, source, 1e-6)
    assert judge(measure_pair(*pair(floors * 1e-6)), floor, level).verdict == verdict


def test_the_level_before_counts_in_modelled_floors():
    # eight modelled floors were reached; this tensor's floor is four of them, so that two of its own were
    floor = j.Floor(4e-6, j.QUANTISED, 1e-6)
    assert judge(measure_pair(*pair(7.5 * 4e-6)), floor, level=8).verdict == "consistent"
    assert judge(measure_pair(*pair(8.5 * 4e-6)), floor, level=8).verdict == "suspect"
    assert floor.gain == 4 and floor.times(2) == j.Floor(8e-6, j.QUANTISED, 2e-6)


def test_every_band_is_wider_than_the_healthy_maximum_it_documents():
    assert j.SUSPECT_RISE > 1.5 * 2.6 and j.DIVERGENT_RISE > j.SUSPECT_RISE
    assert j.SUSPECT_FLOORS > 1.9 * 40.3 and j.DIVERGENT_FLOORS > j.SUSPECT_FLOORS
