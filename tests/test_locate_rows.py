"""Which rows are bad, and what the bad ones have in common."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from probe.compare.locate.rows import RowFacts, bad_rows, pattern_of

PROMPT, LENGTH, COUNT = 10, 24, 4


def facts(cached: tuple[int, ...] = (0, 0, 0, 0), prompt: tuple[int, ...] = (10, 8, 12, 9)) -> RowFacts:
    pair, position = np.repeat(np.arange(COUNT), LENGTH), np.tile(np.arange(LENGTH), COUNT)
    return RowFacts(position, pair, position >= np.array(prompt)[pair], np.array(cached)[pair])


CACHED = facts(cached=(0, 6, 0, 8))
PATTERNS = {
    "all": (facts(), lambda f: f.position >= 0),
    "one-row": (facts(), lambda f: (f.pair == 2) & (f.position == 7)),
    "few-rows": (facts(), lambda f: f.position * (f.pair + 3) % 17 == 2),
    "decode-only": (facts(), lambda f: f.response),
    "prompt-only": (facts(), lambda f: ~f.response),
    "from-position": (facts(), lambda f: f.position >= 17),
    "one-sequence": (facts(), lambda f: (f.pair == 1) & (f.position >= 3)),
    "cached-prefix": (CACHED, lambda f: f.cached > 0),
}


@pytest.mark.parametrize("kind", PATTERNS)
def test_each_pattern_is_recognised(kind):
    rows, wanted = PATTERNS[kind]
    found = pattern_of(wanted(rows), rows)
    assert (found.kind, found.rows, found.of) == (kind, int(wanted(rows).sum()), COUNT * LENGTH)


@given(
    kind=st.sampled_from(["all", "decode-only", "prompt-only", "from-position", "cached-prefix"]),
    seed=st.integers(0, 99),
)
def test_a_pattern_is_recognised_although_a_tenth_of_its_rows_seem_fine(kind, seed):
    rows, wanted = PATTERNS[kind]
    bad = wanted(rows)
    hidden = np.random.default_rng(seed).choice(np.flatnonzero(bad), bad.sum() // 11, replace=False)
    bad[hidden] = False
    assert pattern_of(bad, rows).kind == kind


@given(st.integers(1, LENGTH - 1))
def test_the_position_is_found(start):
    rows = facts(prompt=(0, 0, 0, 0))
    found = pattern_of(rows.position >= start, rows)
    if found.kind != "all":
        assert found.kind == "from-position" and found.figures["position"] == start


@given(
    healthy=st.floats(1e-6, 1e-2),
    strength=st.floats(12, 1e5),
    share=st.floats(0.01, 1.0),
    seed=st.integers(0, 1000),
)
def test_bad_rows_part_from_healthy_ones(healthy, strength, share, seed):
    rng = np.random.default_rng(seed)
    bad = rng.uniform(size=200) < share
    bad[0] = True
    spread = rng.uniform(0.7, 1.4, 200)
    errors = np.where(bad, strength * spread, 0.5 * spread) * healthy
    assert np.array_equal(bad_rows(errors, healthy), bad)


def test_a_faint_error_of_all_rows_is_of_all_rows():
    spread = np.random.default_rng(1).lognormal(0, 0.3, 400)
    assert bad_rows(8e-3 * spread, 1e-3).mean() > 0.97


def test_non_finite_rows_are_bad_whatever_the_others_are():
    errors = np.full(20, 1e-4)
    errors[4] = np.inf
    assert np.flatnonzero(bad_rows(errors, 1e-3)).tolist() == [4]
