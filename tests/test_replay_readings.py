"""Which of a recipe's readings counts, and when the others need not be computed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from probe.compare.replay.base import Recipe
from probe.compare.replay.explain import Reading, bands_of, read_best, settled
from probe.compare.replay.figures import figures_of
from probe.compare.replay.scores import FLOAT32_RANGE, Core, Precision, Rows, attend

STORED = np.random.default_rng(0).standard_normal((32, 16))
UNIT = 2.0**-24


def read(*errors: float, enough: float = 0.0) -> tuple[Reading, list[float]]:
    """Replay with readings that are off by these relative errors; return the best and which ones were computed."""
    computed: list[float] = []

    def compute(context: Any) -> Any:
        for error in errors:
            computed.append(error)
            yield STORED * (1 + error)

    recipe = Recipe("test", "test", compute, 1.0, 1.0, 1.0)
    context: Any = SimpleNamespace(label="test", dtype="float32", value=lambda label: STORED)
    found = read_best(recipe, context, enough)
    assert found is not None and bands_of(recipe, "float32") == (2.0, 2.0, 2.0)
    return found, computed


def test_the_reading_with_the_smallest_error_counts():
    best, computed = read(3 * UNIT, UNIT, 2 * UNIT)
    assert len(computed) == 3
    assert best.first == pytest.approx(3 * best.excess, rel=1e-3)


def test_a_first_reading_that_is_close_enough_ends_the_search_and_no_other_does():
    plain, _ = read(UNIT, UNIT / 2)
    enough = 1.1 * plain.first
    assert read(UNIT, UNIT / 2, enough=enough)[1] == [UNIT]
    assert read(2 * UNIT, UNIT, UNIT / 2, enough=enough)[1] == [2 * UNIT, UNIT, UNIT / 2]


@pytest.mark.parametrize(
    ("errors", "wanted"),
    [((0.3, 0.6), 1.1), ((0.3, 0.2985), 1.1), ((0.3, 0.15), 0.0), ((40.0, 50.0), 0.0), ((np.inf, np.inf), 0.0)],
    ids=["the best", "as good as the best", "worse than another", "beyond its band", "not finite"],
)
def test_only_a_first_reading_that_fits_as_well_as_any_settles_the_next_layers(errors, wanted):
    best, _ = read(*(error * UNIT for error in errors)) if np.isfinite(errors).all() else (None, [])
    if best is None:
        figures = figures_of(STORED, np.full_like(STORED, np.nan), STORED, UNIT, "float32")
        assert figures is not None
        best = Reading(STORED, STORED, figures, np.inf, np.inf)
    assert settled(best) == pytest.approx(wanted * best.first if wanted else 0.0)


def heads(rows: int, features: int, size: float, seed: int) -> Rows:
    values = np.random.default_rng(seed).standard_normal((rows, 2, features)) * size
    return Rows(values, np.zeros(rows, np.int64), np.arange(rows))


@pytest.mark.parametrize("window", [0, 7])
def test_attention_in_blocks_is_attention_of_each_query_over_the_keys_it_sees(window):
    q, k, v = (heads(50, 8, 1.0, seed) for seed in range(3))
    found, noise = attend(q, k, v, Core(0.5, window), Precision("float32"))
    for row in (0, 1, 20, 49):
        seen = slice(max(0, row - window + 1) if window else 0, row + 1)
        for head in range(2):
            scores = 0.5 * k.values[seen, head] @ q.values[row, head]
            weights = np.exp(scores - scores.max())
            want = weights @ v.values[seen, head] / weights.sum()
            np.testing.assert_allclose(found[row, head], want, rtol=1e-12, atol=1e-14)
    assert np.isfinite(noise).all() and (noise[1:] > 0).all()


def test_the_noise_does_not_depend_on_the_precision_that_it_is_computed_in(monkeypatch):
    q, k, v = (heads(50, 8, 2.0, seed) for seed in range(3))
    core, precision = Core(0.5, cap=30.0), Precision("float32", turns=(np.ones((50, 8)), np.ones((50, 8))))
    _, fast = attend(q, k, v, core, precision)
    monkeypatch.setattr("probe.compare.replay.scores.FLOAT32_RANGE", (0.0, 0.0))
    _, slow = attend(q, k, v, core, precision)
    # where one key has nearly all the weight, sum w (v - context)^2 cancels: a thousandth of a noise is of no account
    np.testing.assert_allclose(fast[1:], slow[1:], rtol=1e-3)


def test_values_beyond_the_range_of_float32_squares_have_a_finite_noise():
    q, k, v = heads(9, 4, 1.0, 0), heads(9, 4, 1.0, 1), heads(9, 4, 1e30, 2)
    assert np.abs(v.values).max() > FLOAT32_RANGE[1]
    _, noise = attend(q, k, v, Core(0.5), Precision("float32"))
    assert np.isfinite(noise).all()
