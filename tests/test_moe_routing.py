"""Choices of experts as sets: rules, overlaps, margins, and the distance at which two choices differ."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from probe.compare.moe import routing
from probe.compare.moe.biased import BiasBounds, expert_groups, scores_of
from probe.compare.moe.routing import RoutingRule

CONFIG = {"model_type": "qwen3_moe", "num_experts_per_tok": 2, "norm_topk_prob": True}


@st.composite
def choices(draw):
    """Draw logits of two engines [tokens, experts] that differ a little, and how many experts serve a token."""
    tokens, experts = draw(st.integers(1, 12)), draw(st.integers(2, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    a = rng.normal(size=(tokens, experts)) * draw(st.sampled_from((0.1, 1.0, 20.0)))
    b = a + rng.normal(size=a.shape) * draw(st.sampled_from((0.0, 1e-3, 0.3, 5.0)))
    return a, b, draw(st.integers(1, experts))


@given(choices())
def test_ids_and_map_of_the_experts_used_say_the_same(drawn):
    logits, _, k = drawn
    ids, weights = routing.route(logits, RoutingRule(k, True))
    used = routing.membership(ids, logits.shape[1])
    assert (used.sum(axis=1) == k).all()
    again = routing.chosen_experts(used)
    assert [set(row) for row in again] == [set(row) for row in ids]
    dense = routing.spread(weights, ids, logits.shape[1])
    assert np.array_equal(routing.spread(routing.chosen_weights(dense, used), again, logits.shape[1]), dense)
    assert np.allclose(dense.sum(axis=1), 1)


@given(choices())
def test_overlap_is_the_share_of_common_experts(drawn):
    a, b, k = drawn
    sets = [routing.membership(routing.route(x, RoutingRule(k, True))[0], a.shape[1]) for x in (a, b)]
    expected = [len(set(np.flatnonzero(x)) & set(np.flatnonzero(y))) / k for x, y in zip(*sets)]
    assert np.allclose(routing.overlap(*sets), expected)
    assert np.array_equal(routing.overlap(*sets), routing.overlap(*reversed(sets)))
    assert np.array_equal(routing.overlap(*sets) == 1, (sets[0] == sets[1]).all(axis=1))


@given(choices())
def test_an_engine_that_follows_its_logits_swaps_only_what_their_difference_explains(drawn):
    a, b, k = drawn
    sets = [routing.membership(routing.route(x, RoutingRule(k, True))[0], a.shape[1]) for x in (a, b)]
    allowed = 2 * np.abs(a - b).max(axis=1) + 1e-12
    for logits in (a, b):
        distance = routing.swap_distance(logits, *sets)
        assert (distance <= allowed).all()
        assert np.array_equal(distance > 0, (sets[0] != sets[1]).any(axis=1))


@given(choices())
def test_margin_is_the_gap_at_the_last_expert_chosen(drawn):
    logits, _, k = drawn
    ordered = -np.sort(-logits, axis=1)
    expected = ordered[:, k - 1] - ordered[:, k] if k < logits.shape[1] else np.full(len(logits), np.inf)
    assert np.allclose(routing.margin(logits, k), expected)


def test_order_does_not_matter_and_missing_places_are_no_expert():
    a, b = np.array([[3, 1], [0, 2], [2, -1]]), np.array([[1, 3], [2, 1], [2, -1]])
    assert routing.overlap(routing.membership(a, 4), routing.membership(b, 4)).tolist() == [1.0, 0.5, 1.0]
    dropped = np.array([[True, False, True], [False, False, True]])
    assert routing.chosen_experts(dropped).tolist() == [[0, 2], [2, -1]]
    assert routing.chosen_weights(np.array([[0.7, 0, 0.3], [0, 0, 0.4]]), dropped).tolist() == [[0.7, 0.3], [0.4, 0.0]]


def test_choices_of_another_size_are_never_explained():
    logits = np.array([[1.0, 0.9, 0.8]])
    distance = routing.swap_distance(logits, np.array([[True, True, False]]), np.array([[True, False, False]]))
    assert np.isinf(distance).all()


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        (CONFIG, RoutingRule(2, True)),
        ({**CONFIG, "norm_topk_prob": False}, RoutingRule(2, False)),
        ({"model_type": "qwen2_moe", "num_experts_per_tok": 4}, RoutingRule(4, False)),
        ({"model_type": "mixtral", "num_experts_per_tok": 2}, RoutingRule(2, True)),
        ({"model_type": "deepseek_v3", "num_experts_per_tok": 8}, None),  # a bias corrects the choice
        ({"model_type": "qwen2"}, None),
        ({}, None),
    ],
)
def test_rules_of_families(config, rule):
    assert routing.routing_rule(config) == rule


def test_weights_without_normalisation_are_those_of_the_softmax_over_all():
    logits = np.array([[2.0, 1.0, 0.0]])
    softmax = np.exp(logits) / np.exp(logits).sum()
    ids, weights = routing.route(logits, RoutingRule(2, False))
    assert ids.tolist() == [[0, 1]]
    assert np.allclose(weights, softmax[:, :2])
    assert np.allclose(routing.route(logits, RoutingRule(2, True))[1], softmax[:, :2] / softmax[:, :2].sum())


# -- a router with a bias ---------------------------------------------------------------------------------------------


def biased_choices(bias_b: float, count: int = 400) -> tuple[np.ndarray, np.ndarray]:
    """Return the distances of side b's flips: its logits are a's but for rounding, its bias is ``bias_b`` times a's."""
    rng = np.random.default_rng(7)
    logits, bias = rng.normal(size=(count, 8)), 0.4 * rng.normal(size=8)
    scores, sets = [scores_of(logits), scores_of(logits + 2e-2 * rng.normal(size=logits.shape))], []
    for values, factor in zip(scores, (1.0, bias_b)):
        ids = np.argsort(-(values + factor * bias), axis=1)[:, :3]
        sets.append(routing.membership(ids, 8))
    bounds = BiasBounds(expert_groups({"model_type": "deepseek_v3"}, 8))
    for values, members in zip(scores, sets):
        bounds.learn(values, members)
    apart = np.maximum(bounds.distance(scores[0], sets[0], sets[1]), bounds.distance(scores[1], sets[1], sets[0]))
    return apart, (sets[0] != sets[1]).any(axis=1)


def test_a_bias_that_the_dumps_do_not_hold_explains_flips_that_the_logits_alone_do_not():
    apart, flipped = biased_choices(1.0)
    assert flipped.any() and apart.max() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("factor", [0.0, 2.0, 0.5])
def test_flips_of_another_bias_contradict_the_other_choices(factor):
    apart, flipped = biased_choices(factor)
    assert (apart[flipped] > 0.05).mean() > 0.8 and not apart[~flipped].any()


def test_a_model_without_such_a_bias_and_experts_in_groups():
    assert expert_groups({"model_type": "mixtral"}, 8) is None
    assert expert_groups({"model_type": "deepseek_v3", "n_group": 4}, 8).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    bounds = BiasBounds(np.array([0, 0, 1, 1]))
    bounds.learn(np.array([[0.9, 0.1, 0.2, 0.8]]), np.array([[True, False, False, True]]))
    assert np.isfinite(bounds.least).sum() == 2  # only within a group
    uneven = np.array([[True, True, False, False]]), np.array([[True, False, False, False]])
    assert np.isinf(bounds.distance(np.zeros((1, 4)), *uneven))
