"""Rows are joined by (sequence, position), whatever the order, chunking and repetition of either side."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from probe.compare.align import RowAligner, common_prefix, count_rows, join_sequences, sequence_labels
from probe.store.schema import ROW, Sequence


@dataclass
class Side:
    """The part of a dump that alignment reads."""

    sequences: list[Sequence]
    manifest: dict[str, Any] = field(default_factory=dict)


def sequence(index: int, uid: str, tokens: list[int], prompt_len: int = 2, sample: int = 0) -> Sequence:
    ids = np.array(tokens, np.int64)
    return Sequence(index, uid, prompt_len=prompt_len, length=len(ids), tokens=ids, sample=sample)


def side(*sequences: Sequence, **manifest: Any) -> Any:
    return Side(list(sequences), manifest)


def rows(cells: list[tuple[int, int]], call: int = 0) -> np.ndarray:
    return np.array([(s, p, 0, call) for s, p in cells], ROW)


def pairs_of(join) -> list[tuple[int, int, int]]:
    return [(pair.a, pair.b, pair.prefix) for pair in join.pairs]


# -- sequences --------------------------------------------------------------------------------------------------------


def test_sequences_join_by_uid_in_any_order():
    a = side(sequence(0, "x", [1, 2, 3]), sequence(1, "y", [4, 5, 6]))
    b = side(sequence(0, "y", [4, 5, 6]), sequence(1, "x", [1, 2, 3]))
    assert pairs_of(join_sequences(a, b)) == [(0, 1, 3), (1, 0, 3)]


def test_sequences_without_common_uids_join_by_content_longest_first():
    a = side(sequence(0, "r1", [1, 2, 7, 8]), sequence(1, "r2", [1, 2, 9, 9]))
    b = side(sequence(0, "s0", [1, 2, 9, 9]), sequence(1, "s1", [1, 2, 7, 8]))
    assert pairs_of(join_sequences(a, b)) == [(0, 1, 4), (1, 0, 4)]


def test_equal_sequences_join_in_order():
    same = [1, 2, 3]
    a = side(sequence(0, "a", same), sequence(1, "b", same))
    b = side(sequence(0, "c", same), sequence(1, "d", same))
    assert pairs_of(join_sequences(a, b)) == [(0, 0, 3), (1, 1, 3)]


def test_responses_that_part_join_on_the_common_prefix():
    a, b = side(sequence(0, "x", [1, 2, 3, 4])), side(sequence(0, "x", [1, 2, 3, 9, 9]))
    assert pairs_of(join_sequences(a, b)) == [(0, 0, 3)]


def test_prompts_that_differ_are_conflicts_and_not_joined():
    a, b = side(sequence(0, "x", [1, 2, 3])), side(sequence(0, "x", [1, 5, 3]))
    join = join_sequences(a, b)
    assert not join.pairs
    assert join.conflicts == [(0, 0)] and join.only_a == [0] and join.only_b == [0]


def test_a_uid_that_was_reused_for_another_prompt_does_not_hide_the_right_partner():
    a = side(sequence(0, "s0", [1, 2, 3]), sequence(1, "s1", [7, 8, 9]))
    b = side(sequence(0, "s0", [7, 8, 9]), sequence(1, "s1", [1, 2, 3]))
    join = join_sequences(a, b)
    assert pairs_of(join) == [(0, 1, 3), (1, 0, 3)] and not join.conflicts


def test_labels_tell_samples_of_one_prompt_apart():
    sequences = [sequence(0, "p", [1], sample=0), sequence(1, "p", [1], sample=1), sequence(2, "q", [1])]
    assert sequence_labels(sequences) == ["p.s0", "p.s1", "q"]


@pytest.mark.parametrize(("left", "right", "expected"), [([1, 2], [1, 2, 3], 2), ([], [1], 0), ([5], [1], 0)])
def test_common_prefix(left, right, expected):
    assert common_prefix(np.array(left), np.array(right)) == expected


# -- rows -------------------------------------------------------------------------------------------------------------


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, int]], list[int], list[tuple[int, int, int]]]:
    """Draw sequence lengths, A's row order, and B's sequence order and calls with repeated rows."""
    lengths = draw(st.lists(st.integers(1, 8), min_size=1, max_size=5))
    cells = [(s, p) for s, length in enumerate(lengths) for p in range(length)]
    order = draw(st.permutations(range(len(lengths))))
    repeats = draw(st.lists(st.sampled_from(cells), max_size=8))
    shuffled = draw(st.permutations([*cells, *repeats]))
    calls = sorted(draw(st.lists(st.integers(0, 6), min_size=len(shuffled), max_size=len(shuffled))))
    return lengths, draw(st.permutations(cells)), order, [(s, p, c) for (s, p), c in zip(shuffled, calls)]


@given(runs())
@settings(deadline=None, max_examples=80)
def test_any_order_chunking_and_repetition_gives_back_the_original_rows(run):
    lengths, cells_a, order, cells_b = run
    ids = [[10 * n + p for p in range(length)] for n, length in enumerate(lengths)]
    a = side(*(sequence(n, f"u{n}", ids[n], prompt_len=1) for n in range(len(lengths))))
    b = side(*(sequence(place, f"u{n}", ids[n], prompt_len=1) for place, n in enumerate(order)))
    place_of = {n: place for place, n in enumerate(order)}
    rows_a = np.array([(s, p, ids[s][p], 0) for s, p in cells_a], ROW)
    rows_b = np.array([(place_of[s], p, ids[s][p], call) for s, p, call in cells_b], ROW)
    # B recomputes some rows: the value of a row's last call is the one that counts
    values_a = np.array([100.0 * s + p for s, p in cells_a])
    last = {(s, p): n for n, (s, p, _) in enumerate(cells_b)}
    values_b = np.array([100.0 * s + p if last[s, p] == n else -1.0 for n, (s, p, _) in enumerate(cells_b)])

    join = RowAligner(join_sequences(a, b), len(lengths), len(lengths)).rows(rows_a, rows_b)

    assert len(join.index_a) == sum(lengths)
    assert np.array_equal(values_a[join.index_a], values_b[join.index_b])
    assert np.array_equal(values_a[join.index_a], 100.0 * join.pair + join.position)
    assert np.all(np.diff(join.pair * 1000 + join.position) > 0)


def counted(a, b, cells_a, cells_b):
    aligner = RowAligner(join_sequences(a, b), len(a.sequences), len(b.sequences))
    return count_rows(aligner, [aligner.rows(rows(cells_a), rows(cells_b))], a, b)


def test_the_last_generated_token_is_not_executed_and_not_missing():
    ids = [1, 2, 3, 4]
    a, b = side(sequence(0, "x", ids)), side(sequence(0, "x", ids))
    coverage = counted(a, b, [(0, 0), (0, 1), (0, 2)], [(0, 0), (0, 1), (0, 2), (0, 3)])
    assert (coverage.joined, coverage.only_a, coverage.only_b, coverage.not_executed) == (3, 0, 0, 1)
    assert coverage.covered == 1.0


def test_a_missing_prompt_row_counts_even_when_it_is_the_last():
    ids = [1, 2]
    a, b = side(sequence(0, "x", ids)), side(sequence(0, "x", ids))
    coverage = counted(a, b, [(0, 0)], [(0, 0), (0, 1)])
    assert (coverage.only_b, coverage.not_executed) == (1, 0)
    assert coverage.covered == 0.5


def test_rows_after_the_tokens_part_are_listed_but_excused():
    a, b = side(sequence(0, "x", [1, 2, 3, 4])), side(sequence(0, "x", [1, 2, 9, 9]))
    coverage = counted(a, b, [(0, p) for p in range(4)], [(0, p) for p in range(4)])
    assert (coverage.joined, coverage.only_a, coverage.only_b, coverage.beyond_prefix) == (2, 2, 2, 4)
    assert coverage.covered == 1.0


def test_response_rows_that_one_side_was_told_not_to_store_are_excused():
    ids = [1, 2, 3, 4, 5]
    a, b = side(sequence(0, "x", ids), prompts_only=True), side(sequence(0, "x", ids))
    coverage = counted(a, b, [(0, 0), (0, 1)], [(0, p) for p in range(5)])
    assert (coverage.joined, coverage.only_b, coverage.prompts_only, coverage.not_executed) == (2, 2, 2, 1)
    assert coverage.covered == 1.0


def test_rows_of_a_sequence_that_one_side_lacks_lower_the_coverage():
    a = side(sequence(0, "x", [1, 2, 3]), sequence(1, "y", [7, 8, 9]))
    b = side(sequence(0, "x", [1, 2, 3]))
    cells = [(0, p) for p in range(3)]
    coverage = counted(a, b, [*cells, (1, 0), (1, 1), (1, 2)], cells)
    assert (coverage.joined, coverage.only_a) == (3, 3)
    assert coverage.covered == 0.5


def test_rows_of_no_sequence_are_never_joined():
    a, b = side(sequence(0, "x", [1, 2])), side(sequence(0, "x", [1, 2]))
    aligner = RowAligner(join_sequences(a, b), 1, 1)
    join = aligner.rows(rows([(-1, -1), (0, 0)]), rows([(-1, -1), (0, 0)]))
    assert join.index_a.tolist() == [1] and join.index_b.tolist() == [1]
