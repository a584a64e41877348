"""Sequences meet by identity and token content: samples, repeated prompts, reordering, pieces of one trajectory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sequence_tools import seq, side

from probe.compare import trajectories
from probe.compare.sequences import join_sequences, sequence_labels
from probe.compare.trajectories import common_prefix
from probe.store.schema import Sequence


def pairs_of(join) -> list[tuple[int, int, int]]:
    return [(pair.a, pair.b, pair.prefix) for pair in join.pairs]


# -- one request, one sequence ----------------------------------------------------------------------------------------


def test_sequences_join_by_uid_in_any_order():
    a = side(seq("x", [1, 2, 3]), seq("y", [4, 5, 6]))
    b = side(seq("y", [4, 5, 6]), seq("x", [1, 2, 3]))
    assert pairs_of(join_sequences(a, b)) == [(0, 1, 3), (1, 0, 3)]


def test_request_ids_name_sequences_that_have_no_uid():
    same = [1, 2, 3]
    a = side(seq("", same, request_id="r1"), seq("", same, request_id="r2"))
    b = side(seq("", same, request_id="r2"), seq("", same, request_id="r1"))
    assert pairs_of(join_sequences(a, b)) == [(0, 1, 3), (1, 0, 3)]


def test_sequences_without_common_uids_join_by_content_longest_first():
    a = side(seq("r1", [1, 2, 7, 8]), seq("r2", [1, 2, 9, 9]))
    b = side(seq("s0", [1, 2, 9, 9]), seq("s1", [1, 2, 7, 8]))
    assert pairs_of(join_sequences(a, b)) == [(0, 1, 4), (1, 0, 4)]


def test_equal_sequences_join_in_order():
    same = [1, 2, 3]
    a, b = side(seq("a", same), seq("b", same)), side(seq("c", same), seq("d", same))
    assert pairs_of(join_sequences(a, b)) == [(0, 0, 3), (1, 1, 3)]


def test_repeated_prompts_under_one_uid_and_sample_join_by_their_responses():
    """verl's uid names the prompt; balance_batch reorders its n responses."""
    a = side(seq("u", [1, 2, 7]), seq("u", [1, 2, 8]), seq("u", [1, 2, 8]), seq("u", [1, 2, 9]))
    b = side(seq("u", [1, 2, 9]), seq("u", [1, 2, 8]), seq("u", [1, 2, 7]), seq("u", [1, 2, 8]))
    assert pairs_of(join_sequences(a, b)) == [(0, 2, 3), (1, 1, 3), (2, 3, 3), (3, 0, 3)]


def test_sample_numbers_that_the_sides_count_differently_yield_to_equal_content():
    a = side(seq("u", [1, 2, 7, 7], sample=0), seq("u", [1, 2, 8, 8], sample=1))
    b = side(seq("u", [1, 2, 8, 8], sample=0), seq("u", [1, 2, 7, 7], sample=1))
    assert pairs_of(join_sequences(a, b)) == [(0, 1, 4), (1, 0, 4)]


def test_names_that_only_number_the_sequences_of_a_run_yield_to_equal_content():
    """A trainer that shuffles the samples of its batches numbers them in another order than the rollout did."""
    a = side(seq("s0", [1, 2, 7, 7]), seq("s1", [1, 2, 8, 8]), seq("s2", [1, 2, 9, 9]))
    b = side(seq("s0", [1, 2, 7, 7]), seq("s1", [1, 2, 9, 9]), seq("s2", [1, 2, 8, 8]))
    assert pairs_of(join_sequences(a, b)) == [(0, 0, 4), (1, 2, 4), (2, 1, 4)]
    named = [[seq(s.uid.replace("s", "u"), s.tokens.tolist()) for s in dump.sequences] for dump in (a, b)]
    assert pairs_of(join_sequences(*(side(*sequences) for sequences in named))) == [(0, 0, 4), (1, 1, 2), (2, 2, 2)]


def test_samples_whose_responses_differ_join_by_their_number():
    a = side(seq("u", [1, 2, 3], sample=0), seq("u", [1, 2, 4], sample=1))
    b = side(seq("u", [1, 2, 5], sample=1), seq("u", [1, 2, 6], sample=0))
    assert pairs_of(join_sequences(a, b)) == [(0, 1, 2), (1, 0, 2)]


def test_responses_that_part_join_on_the_common_prefix():
    a, b = side(seq("x", [1, 2, 3, 4])), side(seq("x", [1, 2, 3, 9, 9]))
    assert pairs_of(join_sequences(a, b)) == [(0, 0, 3)]


def test_prompts_that_differ_are_conflicts_and_not_joined():
    join = join_sequences(side(seq("x", [1, 2, 3])), side(seq("x", [1, 5, 3])))
    assert not join.pairs
    assert join.conflicts == [(0, 0)] and join.only_a == [0] and join.only_b == [0]


def test_a_uid_that_was_reused_for_another_prompt_does_not_hide_the_right_partner():
    a = side(seq("s0", [1, 2, 3]), seq("s1", [7, 8, 9]))
    b = side(seq("s0", [7, 8, 9]), seq("s1", [1, 2, 3]))
    join = join_sequences(a, b)
    assert pairs_of(join) == [(0, 1, 3), (1, 0, 3)] and not join.conflicts


def test_an_unknown_prompt_length_agrees_with_a_known_one_but_two_unknown_ones_must_end_together():
    a, known = side(seq("x", [1, 2, 3], prompt_len=0)), side(seq("y", [1, 2, 4, 5]))
    assert pairs_of(join_sequences(a, known)) == [(0, 0, 2)]
    unknown = side(seq("y", [1, 2, 4, 5], prompt_len=0))
    assert not join_sequences(a, unknown).pairs
    assert pairs_of(join_sequences(a, side(seq("y", [1, 2, 3, 5], prompt_len=0)))) == [(0, 0, 3)]


def test_sequences_without_tokens_are_listed():
    join = join_sequences(side(seq("x", [])), side(seq("x", [])))
    assert (join.pairs, join.only_a, join.only_b, join.conflicts) == ([], [0], [0], [])


def test_labels_tell_samples_of_one_prompt_apart():
    sequences = side(seq("p", [1]), seq("p", [1], sample=1), seq("q", [1])).sequences
    assert sequence_labels(sequences) == ["p.s0", "p.s1", "q"]


@pytest.mark.parametrize(("left", "right", "expected"), [([1, 2], [1, 2, 3], 2), ([], [1], 0), ([5], [1], 0)])
def test_common_prefix(left, right, expected):
    assert common_prefix(np.array(left), np.array(right)) == expected


def test_ten_thousand_anonymous_sequences_are_compared_with_their_neighbours_only(monkeypatch):
    """n responses to one prompt, no uid on either side: quadratic work would be 10^8 comparisons."""
    rng = np.random.default_rng(0)
    count = 10_000
    ids = [np.concatenate([[1, 2, 3], rng.integers(0, 50, rng.integers(3, 12))]) for _ in range(count)]
    order = rng.permutation(count)
    a = side(*(seq("", list(tokens), prompt_len=3) for tokens in ids))
    b = side(*(seq("", list(ids[n]), prompt_len=3) for n in order))
    compared = 0

    def counting(left: np.ndarray, right: np.ndarray) -> int:
        nonlocal compared
        compared += 1
        return common_prefix(left, right)

    monkeypatch.setattr(trajectories, "common_prefix", counting)
    join = join_sequences(a, b)
    assert len(join.pairs) == count and compared <= 4 * count
    assert all(np.array_equal(a.sequences[p.a].tokens, b.sequences[p.b].tokens) for p in join.pairs)


# -- pieces of one trajectory -----------------------------------------------------------------------------------------

P1, TURN1, TURN2 = [1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 90, 91, 5, 6]
WHOLE = [*TURN2, 92, 7]


def turns(names: tuple[str, ...] = ("r0", "r1"), **more: Any) -> list[Sequence]:
    return [seq(names[0], TURN1, 2, **more), seq(names[1], TURN2, 6, **more)]


def test_turns_of_one_trajectory_join_the_whole_sequence_of_the_other_side():
    a, b = side(*turns(trajectory="t")), side(seq("whole", TURN2, 2))
    (pair,) = join_sequences(a, b).pairs
    assert (pair.pieces_a, pair.pieces_b, pair.prefix, pair.prompt_len) == ((0, 1), (0,), 8, 2)
    (pair,) = join_sequences(b, a).pairs
    assert (pair.pieces_a, pair.pieces_b, pair.prefix, pair.prompt_len) == ((0,), (0, 1), 8, 2)


def test_both_sides_may_be_cut_differently():
    a = side(*turns(trajectory="t"), seq("r2", WHOLE, 9, trajectory="t"))
    b = side(seq("x1", WHOLE, 6, trajectory="T"), seq("x0", [1, 2, 3], 2, trajectory="T"))
    (pair,) = join_sequences(a, b).pairs
    assert (pair.pieces_a, pair.pieces_b, pair.prefix) == ((0, 1, 2), (1, 0), 10)


def test_pieces_without_any_name_join_by_their_tokens():
    a, b = side(*turns(("", ""))), side(seq("", TURN2, 2))
    (pair,) = join_sequences(a, b).pairs
    assert pair.pieces_a == (0, 1)
    assert join_sequences(b, a).pairs[0].pieces_b == (0, 1)


def test_pieces_named_by_request_numbers_join_by_their_tokens():
    """The uids differ from piece to piece and the other side does not know them."""
    a = side(*turns(("req-17", "req-18")))
    (pair,) = join_sequences(a, side(seq("u5", TURN2, 2))).pairs
    assert pair.pieces_a == (0, 1)


def test_the_trajectory_that_one_side_declares_ties_the_pieces_of_the_other():
    a, b = side(*turns(trajectory="t")), side(*turns())
    (pair,) = join_sequences(a, b).pairs
    assert (pair.pieces_a, pair.pieces_b) == ((0, 1), (0, 1))


def test_samples_that_happen_to_begin_each_other_do_not_merge():
    """Sample 0 stopped where sample 1 went on; the other side has sample 1 only."""
    for names in ({}, {"trajectory": "t"}):
        a = side(seq("u", TURN1, 2, sample=0, **names), seq("u", WHOLE, 2, sample=1, **names))
        b = side(seq("u", WHOLE, 2, sample=1, **names))
        join = join_sequences(a, b)
        assert [pair.pieces_a for pair in join.pairs] == [(1,)] and join.only_a == [0]


def test_different_prompts_known_to_both_sides_do_not_merge():
    a, b = side(seq("p0", TURN1, 2), seq("p1", WHOLE, 2)), side(seq("p1", WHOLE, 2))
    join = join_sequences(a, b)
    assert [pair.pieces_a for pair in join.pairs] == [(1,)] and join.only_a == [0]


def test_a_piece_that_several_sequences_continue_is_left_alone():
    a = side(seq("", TURN1, 2), seq("", [*TURN1, 8, 8], 2), seq("", [*TURN1, 9, 9], 2))
    b = side(seq("", [*TURN1, 8, 8], 2), seq("", [*TURN1, 9, 9], 2))
    join = join_sequences(a, b)
    assert [pair.pieces_a for pair in join.pairs] == [(1,), (2,)] and join.only_a == [0]


def test_greedy_duplicates_of_one_trajectory_stay_two_sequences():
    same = {"trajectory": "t"}
    a = side(seq("u", TURN1, **same), seq("u", TURN1, **same), seq("u", TURN2, **same), seq("u", TURN2, **same))
    b = side(seq("v", TURN2), seq("v", TURN2))
    join = join_sequences(a, b)
    assert sorted(len(pair.pieces_a) for pair in join.pairs) == [2, 2] and not join.only_a


def test_equal_tokens_of_two_weight_versions_are_two_pieces():
    a = side(seq("u", TURN1, trajectory="t", weight_version=2), seq("u", TURN1, trajectory="t", weight_version=1))
    (pair,) = join_sequences(a, side(seq("x", TURN1))).pairs
    assert pair.pieces_a == (1, 0)


# -- any cut, any order -----------------------------------------------------------------------------------------------


@st.composite
def batches(draw: st.DrawFn) -> tuple[Any, Any, list[list[int]]]:
    """Draw distinct whole sequences, cut on each side into pieces of declared trajectories, in any order."""
    prompts = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), min_size=1, max_size=4))
    whole = []
    for number, prompt in enumerate(prompts):  # the number after the prompt keeps contents apart
        whole.append([*prompt, 100 + number, *draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))])
    sides = []
    for name in "ab":
        pieces = []
        for number, ids in enumerate(whole):
            prompt_len = len(prompts[number]) + 1
            cuts = draw(st.sets(st.integers(prompt_len, len(ids) - 1), max_size=2))
            for cut in (*sorted(cuts), len(ids)):
                declared = f"{name}{number}" if draw(st.booleans()) or cut == len(ids) else ""
                pieces.append(seq(f"{name}{number}.{cut}", ids[:cut], prompt_len, trajectory=declared))
        sides.append(side(*draw(st.permutations(pieces))))
    return sides[0], sides[1], whole


@given(batches())
@settings(deadline=None, max_examples=150)
def test_pieces_in_any_order_give_back_the_whole_sequences(batch):
    a, b, whole = batch
    join = join_sequences(a, b)
    assert not join.only_a and not join.only_b
    named = [pair for pair in join.pairs if a.sequences[pair.a].tokens.tolist() in whole]
    assert len(named) == len(whole)  # what is left are pieces that both sides cut off without a name
    for pair in join.pairs:
        for number, dump in ((0, a), (1, b)):
            lead = dump.sequences[pair.b if number else pair.a].tokens.tolist()
            assert any(lead == ids[: len(lead)] for ids in whole)
            for piece in pair.pieces(number):
                assert dump.sequences[piece].tokens.tolist() == lead[: len(dump.sequences[piece].tokens)]
        left, right = a.sequences[pair.a].tokens, b.sequences[pair.b].tokens
        assert pair.prefix == common_prefix(left, right) == min(len(left), len(right))
    for pair in named:
        assert a.sequences[pair.a].tokens.tolist() == b.sequences[pair.b].tokens.tolist()
    for number, dump in ((0, a), (1, b)):
        assert sorted(n for pair in join.pairs for n in pair.pieces(number)) == list(range(len(dump.sequences)))
