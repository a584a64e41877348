"""The figures of tokens: equal to plain loops over tokens on any batch, capped where stated, defined where empty."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from token_batches import batch_of, token_batches

from probe.compare.tokens import groups, section
from probe.compare.tokens.entries import CONTEXT_TOKENS
from probe.compare.tokens.section import token_section
from probe.logprobs import RATIO_METRICS, SEQUENCE_METRICS, TOKEN_METRICS

CLOSE: dict[str, Any] = {"rel": 1e-9, "abs": 1e-12}
"""Sums of at most 45 float64 in two orders: a few units of 1e-16 each."""


def tokens_of(batch) -> list[dict[str, Any]]:
    """Return each token as a plain dictionary."""
    known = batch.a is not None
    return [
        {
            "sequence": int(batch.sequence[n]),
            "position": int(batch.position[n]),
            "token": int(batch.token[n]),
            "a": float(batch.a[n]) if known else None,
            "d": float(batch.b[n] - batch.a[n]) if known else None,
            "gap": abs(float(batch.b[n] - batch.a[n])) if known else None,
            "prob_diff": float(batch.prob_diff[n]),
        }
        for n in range(len(batch))
    ]


def group_of(tokens: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of a group of tokens, straight from their definition."""
    found: dict[str, Any] = {"count": len(tokens)}
    for key, (mean, top) in (("gap", ("mean_abs", "max_abs")), ("prob_diff", ("mean_prob_diff", "max_prob_diff"))):
        values = [t[key] for t in tokens if t[key] is not None]
        found |= {mean: sum(values) / len(values) if values else None, top: max(values) if values else None}
    return found


def agrees(entry: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        assert entry[name] == (value if value is None or isinstance(value, str) else pytest.approx(value, **CLOSE)), (
            name
        )


# -- groups -----------------------------------------------------------------------------------------------------------


@given(st.one_of(token_batches(), token_batches(monitor=True)))
def test_positions_are_those_of_a_loop(batch):
    tokens, (entries, size) = tokens_of(batch), groups.by_position(batch)
    assert size == 1
    assert [entry["position"] for entry in entries] == sorted({t["position"] for t in tokens})
    for entry in entries:
        assert entry["last"] == entry["position"]
        agrees(entry, group_of([t for t in tokens if t["position"] == entry["position"]]))


@pytest.mark.parametrize("width", [512, 513, 1024, 1025, 5000])
def test_long_responses_are_cut_into_equal_bins_that_hold_every_token(width):
    rng = np.random.default_rng(width)
    a = -rng.exponential(1.0, (3, width))
    batch = batch_of(a, a - rng.exponential(0.01, a.shape), rng.random(a.shape) < 0.7)
    entries, size = groups.by_position(batch)
    assert len(entries) <= groups.MAX_POSITIONS
    assert size == -(-(int(batch.position.max()) + 1) // groups.MAX_POSITIONS)
    assert sum(entry["count"] for entry in entries) == len(batch)
    assert entries[-1]["last"] == int(batch.position.max())
    assert all(entry["last"] - entry["position"] + 1 == size for entry in entries[:-1])
    tokens = tokens_of(batch)
    for entry in entries[:: len(entries) // 7]:
        agrees(entry, group_of([t for t in tokens if entry["position"] <= t["position"] <= entry["last"]]))


@given(token_batches())
def test_probability_bins_are_those_of_a_loop(batch):
    tokens, entries = tokens_of(batch), groups.by_probability(batch)
    if not tokens:
        assert entries == []
        return
    assert [(entry["low"], entry["high"]) for entry in entries] == list(
        zip(groups.PROBABILITY_EDGES, groups.PROBABILITY_EDGES[1:])
    )
    total = sum(t["gap"] for t in tokens)
    for entry in entries:
        last = entry["high"] == 1.0
        inside = [t for t in tokens if entry["low"] <= math.exp(t["a"]) and (last or math.exp(t["a"]) < entry["high"])]
        share = sum(t["gap"] for t in inside) / total if total else None
        agrees(entry, group_of(inside) | {"share": share})
    assert sum(entry["count"] for entry in entries) == len(tokens)


def test_probability_bins_include_their_lower_edge_and_certain_tokens():
    edges = np.log(np.array([1e-4, 1e-3, 0.1, 0.5, 0.9, 0.99, 1.0]))
    slightly_above_one = 1e-7  # a log-prob that fp32 rounded upwards
    a = np.array([[-math.inf, *edges, slightly_above_one]])
    a[0, 0] = -1000.0  # exp of it is 0: the first bin
    counts = [entry["count"] for entry in groups.by_probability(batch_of(a, a))]
    # log(x) and back is off by an ulp at most, to either side; 0.1 and the others survive it
    assert counts == [1, 1, 1, 0, 1, 1, 1, 3]


@given(token_batches())
def test_token_ids_are_those_of_a_loop_the_largest_sum_first(batch):
    tokens, (entries, left_out) = tokens_of(batch), groups.by_token(batch, lambda ids: f"<{ids[0]}>")
    total = sum(t["gap"] for t in tokens)
    sums = {number: sum(t["gap"] for t in tokens if t["token"] == number) for number in {t["token"] for t in tokens}}
    assert {entry["token"] for entry in entries} == {number for number, value in sums.items() if value > 0}
    assert left_out == 0
    assert [entry["sum_abs"] for entry in entries] == sorted((entry["sum_abs"] for entry in entries), reverse=True)
    for entry in entries:
        mine = [t for t in tokens if t["token"] == entry["token"]]
        expected = {"sum_abs": sums[entry["token"]], "share": sums[entry["token"]] / total}
        agrees(entry, group_of(mine) | expected | {"text": f"<{entry['token']}>"})


def test_token_ids_are_capped_and_unknown_ones_left_out():
    a = -np.ones((2, 100))
    batch = batch_of(a, a - 0.01 * np.arange(100), token=np.tile(np.arange(100), (2, 1)))
    entries, left_out = groups.by_token(batch, None)
    assert [entry["token"] for entry in entries] == list(range(99, 99 - groups.MAX_TOKENS, -1))
    assert left_out == 99 - groups.MAX_TOKENS  # id 0 never differs
    assert groups.by_token(batch_of(a, a - 1), None) == ([], 0)


@given(st.one_of(token_batches(), token_batches(monitor=True)))
def test_steps_are_those_of_a_loop(batch):
    tokens, (entries, left_out) = tokens_of(batch), groups.by_step(batch)
    assert left_out == 0
    assert [entry["step"] for entry in entries] == sorted({step for step in batch.step.tolist() if step >= 0})
    for entry in entries:
        mine = [t for t in tokens if batch.step[t["sequence"]] == entry["step"]]
        expected = {"sequences": batch.step.tolist().count(entry["step"]), "compared": len(mine)}
        figures = group_of(mine)
        expected |= {"mean_abs_logprob_diff": figures["mean_abs"]}
        expected |= {name: figures[name] for name in ("mean_prob_diff", "max_prob_diff")}
        if mine and batch.a is not None:
            expected["k3"] = sum(math.exp(t["d"]) - t["d"] - 1 for t in mine) / len(mine)
        if len(mine) > 1:
            squares = sum((t["prob_diff"] - figures["mean_prob_diff"]) ** 2 for t in mine)
            expected["std_prob_diff"] = math.sqrt(squares / (len(mine) - 1))
        agrees(entry, expected)


def test_only_the_latest_steps_are_listed(monkeypatch):
    monkeypatch.setattr(groups, "MAX_STEPS", 3)
    a = -np.ones((7, 2))
    entries, left_out = groups.by_step(batch_of(a, a, step=np.arange(7)[::-1].copy()))
    assert ([entry["step"] for entry in entries], left_out) == ([4, 5, 6], 4)


@given(st.one_of(token_batches(), token_batches(monitor=True)), st.integers(0, 6), st.integers(0, 12))
def test_the_grid_holds_the_first_places_and_none_outside_the_mask(batch, samples, positions):
    found = groups.grid(batch, samples, positions)
    rows, columns = min(samples, len(batch.labels)), min(positions, batch.width)
    assert (found["labels"], found["positions"]) == (batch.labels[:rows], list(range(columns)))
    cells = {(t["sequence"], t["position"]): t["prob_diff"] for t in tokens_of(batch)}
    assert found["values"] == [[cells.get((row, column)) for column in range(columns)] for row in range(rows)]


@given(st.lists(st.sampled_from([0.0, 1.0, 1.5, 2.0, 7.0]), max_size=30), st.integers(0, 12))
def test_the_largest_are_those_of_a_stable_sort(values, count):
    assert (
        groups.largest(np.array(values), count).tolist() == sorted(range(len(values)), key=lambda n: -values[n])[:count]
    )


# -- the section ------------------------------------------------------------------------------------------------------

FIGURES = (*TOKEN_METRICS, *RATIO_METRICS, *SEQUENCE_METRICS)


@settings(deadline=None)  # the first example imports numpy's linear algebra
@given(token_batches())
def test_the_worst_tokens_are_the_first_of_a_stable_sort(batch):
    found = token_section(batch, None)
    order = sorted(tokens_of(batch), key=lambda t: -t["gap"])[: section.WORST_TOKENS]
    start = int(batch.start[0])
    expected = [(batch.labels[t["sequence"]], start + t["position"], t["token"]) for t in order]
    assert [(entry["sequence"], entry["position"], entry["token"]) for entry in found["worst"]] == expected
    for entry, token in zip(found["worst"], order):
        agrees(entry, {"diff": token["d"], "prob_diff": token["prob_diff"], "logprob_a": token["a"]})
        ids = batch.ids[token["sequence"]].tolist()
        assert entry["context"] == " ".join(map(str, ids[: start + token["position"]][-CONTEXT_TOKENS:]))
        assert entry["after"] == " ".join(map(str, ids[start + token["position"] + 1 :][:CONTEXT_TOKENS]))


@settings(deadline=None)
@given(token_batches())
def test_sequences_are_those_of_a_loop(batch):
    found = token_section(batch, None)
    tokens = tokens_of(batch)
    assert [entry["sequence"] for entry in found["sequences"]] == batch.labels
    assert (found["sequences_left_out"], found["strip_truncated"]) == (0, 0)
    for number, entry in enumerate(found["sequences"]):
        mine = [t for t in tokens if t["sequence"] == number]
        figures = group_of(mine)
        agrees(entry, {"compared": figures.pop("count"), **figures})
        assert entry["step"] == (None if batch.step[number] < 0 else batch.step[number])
        if mine:
            mean = sum(t["d"] for t in mine) / len(mine)
            agrees(
                entry, {"log_ppl_diff": -mean, "ratio": math.exp(mean * len(mine)), "ratio_geometric": math.exp(mean)}
            )
        known = {t["position"] + int(batch.start[number]): t for t in mine}
        assert [t["position"] for t in entry["strip"]] == list(range(len(batch.ids[number])))
        for token in entry["strip"]:
            there = known.get(token["position"])
            assert token["token"] == int(batch.ids[number][token["position"]])
            assert token["response"] == (token["position"] >= batch.start[number])
            assert (token["diff"] is None) == (there is None)
            assert there is None or token["diff"] == pytest.approx(there["d"], **CLOSE)


@given(token_batches(monitor=True))
def test_a_monitor_s_differences_fill_what_they_can(batch):
    found, tokens = token_section(batch, None), tokens_of(batch)
    known = {"mean_prob_diff", "max_prob_diff", "std_prob_diff"}
    assert all(found[name] is None for name in FIGURES if name not in known)
    assert (found["by_probability"], found["by_token"], found["corrections"]) == ([], [], [])
    assert found["quantiles"]["abs_logprob_diff"] is None
    if tokens:
        assert found["mean_prob_diff"] == pytest.approx(sum(t["prob_diff"] for t in tokens) / len(tokens), **CLOSE)
        assert found["worst"][0]["prob_diff"] == max(t["prob_diff"] for t in tokens)
        assert found["worst"][0]["diff"] is None and found["worst"][0]["logprob_a"] is None
    for number, entry in enumerate(found["sequences"]):
        figures = group_of([t for t in tokens if t["sequence"] == number])
        agrees(entry, {"compared": figures.pop("count"), **figures, "ratio": None})


def test_nothing_compared_leaves_figures_without_a_number():
    a = np.full((2, 3), -1.0)
    found = token_section(batch_of(a, a, np.zeros((2, 3), bool)), None)
    assert found["compared"] == 0
    assert all(found[name] is None or math.isnan(found[name]) for name in FIGURES)
    assert (found["by_position"], found["worst"], found["corrections"]) == ([], [], [])
    assert [(entry["compared"], entry["mean_abs"]) for entry in found["sequences"]] == [(0, None), (0, None)]
    assert found["grid"]["values"] == [[None] * 3, [None] * 3]
    assert token_section(None, None)["compared"] == 0


def test_one_token_has_every_figure_but_those_that_need_two():
    found = token_section(batch_of(np.array([[-1.0]]), np.array([[-1.5]])), None)
    lacking = {name for name in FIGURES if math.isnan(found[name])}
    assert lacking == {"std_prob_diff", "pearson"}
    assert found["quantiles"]["abs_logprob_diff"] == dict.fromkeys(groups.QUANTILES, 0.5)


def test_equal_sides_differ_nowhere():
    a = -np.random.default_rng(0).exponential(1.0, (3, 50))
    found = token_section(batch_of(a, a), None)
    exact = {"mean_ratio": 1.0, "ess": 1.0, "tme": 1.0, "ppl_ratio": 1.0, "tme_sequence_max": 1.0, "chi2_token": 0.0}
    assert {name: found[name] for name in exact} == exact
    assert found["by_token"] == [] and all(entry["share"] is None for entry in found["by_probability"])
    assert all(entry["share"] == 0.0 for entry in found["corrections"])
    assert set(found["quantiles"]["abs_logprob_diff"].values()) == {0.0}


def test_quantiles_tell_the_tail():
    a = np.full((1, 1000), -1.0)
    b = a.copy()
    b[0, 500] = -6.0
    found = token_section(batch_of(a, b), None)["quantiles"]["abs_logprob_diff"]
    assert (found["p50"], found["p99"], found["max"]) == (0.0, 0.0, 5.0)
    assert found["p999"] == pytest.approx(5.0 * 0.001, abs=1e-9)  # rank 998.001 of 0 to 999: almost all of it below


# -- caps -------------------------------------------------------------------------------------------------------------


def test_the_worst_sequences_are_kept_and_those_of_the_worst_tokens_with_them(monkeypatch):
    monkeypatch.setattr(section, "MAX_SEQUENCES", 4)
    monkeypatch.setattr(section, "WORST_TOKENS", 1)
    a = np.full((10, 100), -1.0)
    b = a - 0.01 * np.arange(10)[:, None]
    b[0, 7] -= 2.0  # the worst token, in a sequence whose mean is 0.02
    found = token_section(batch_of(a, b), None)
    assert [entry["sequence"] for entry in found["sequences"]] == ["s0", "s7", "s8", "s9"]
    assert (found["sequences_left_out"], found["strip_truncated"]) == (6, 6)


def test_strips_go_to_the_sequences_with_the_largest_single_differences(monkeypatch):
    monkeypatch.setattr(section, "STRIP_TOKENS", 25)
    a = np.full((4, 10), -1.0)
    b = a - np.array([0.1, 0.4, 0.2, 0.3])[:, None]
    found = token_section(batch_of(a, b), None)
    assert [len(entry["strip"]) for entry in found["sequences"]] == [0, 10, 0, 10]
    assert found["strip_truncated"] == 2


def test_tokens_without_ids_still_have_places():
    a = np.full((1, 4), -1.0)
    found = token_section(batch_of(a, a - 0.5, np.array([[1, 0, 1, 0]])), lambda ids: "never called")
    strip = found["sequences"][0]["strip"]
    assert [(t["position"], t["token"], t["text"], t["diff"]) for t in strip] == [
        (0, None, None, -0.5),
        (1, None, None, None),
        (2, None, None, -0.5),
    ]
    assert found["sequences"][0]["length"] == 3
    assert (found["worst"][0]["token"], found["worst"][0]["text"]) == (None, None)
