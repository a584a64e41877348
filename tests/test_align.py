"""Rows are joined by (sequence, position), whatever the order, chunking, padding and repetition of either side."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from sequence_tools import aligner_of, seq, side, table

from probe.compare.align import pack, read_table, split
from probe.compare.coverage import Recomputed
from probe.store.schema import Sequence

PADDING = -1


# -- any batching -----------------------------------------------------------------------------------------------------


@st.composite
def runs(draw: st.DrawFn, lengths: list[int]) -> list[tuple[int, int, int]]:
    """Draw one engine's calls over sequences of these lengths: (sequence, position, call) with padding and repeats.

    Micro-batches, chunked prefill and decode are all permutations of cells over calls; a preempted sequence runs again.
    """
    cells = [(s, p) for s, length in enumerate(lengths) for p in range(length)]
    repeats = draw(st.lists(st.sampled_from(cells), max_size=6)) if cells else []
    padding = [(PADDING, PADDING)] * draw(st.integers(0, 4))
    shuffled = draw(st.permutations([*cells, *repeats, *padding]))
    calls = sorted(draw(st.lists(st.integers(0, 6), min_size=len(shuffled), max_size=len(shuffled))))
    return [(s, p, c) for (s, p), c in zip(shuffled, calls)]


@st.composite
def dumps(draw: st.DrawFn) -> tuple[list[list[int]], list[tuple[list[Sequence], list[tuple[int, int, int]]]]]:
    """Draw contents and, for each side, sequences in any order with or without names, and the rows of its calls.

    Prompts repeat and responses are short over few ids, so that equal sequences are common.
    """
    count = draw(st.integers(1, 4))
    prompts = [draw(st.lists(st.integers(0, 1), min_size=1, max_size=2)) for _ in range(count)]
    contents = [
        [*prompt, *draw(st.lists(st.integers(0, 1), max_size=4))]
        for prompt in prompts
        for _ in range(draw(st.integers(1, 3)))
    ]
    named = draw(st.booleans())
    sides = []
    for _ in range(2):
        order = draw(st.permutations(range(len(contents))))
        sequences = [seq(f"u{n}" if named else "", contents[n], 1) for n in order]
        sides.append((sequences, draw(runs([len(contents[n]) for n in order]))))
    return contents, sides


def values_of(sequences: list[Sequence], cells: list[tuple[int, int, int]]) -> np.ndarray:
    """Return per row a number that depends on the token's whole history, as a causal model's output does.

    A row that its engine computed again later gets another value: it must not be the one that is compared.
    """
    last = {cell[:2]: n for n, cell in enumerate(cells)}
    return np.array(
        [
            hash(tuple(sequences[s].tokens[: p + 1].tolist())) if s >= 0 and last[s, p] == n else n
            for n, (s, p, _) in enumerate(cells)
        ],
        np.int64,
    )


@given(dumps())
@settings(deadline=None, max_examples=200)
def test_any_batching_of_any_order_gives_back_the_original_rows(drawn):
    contents, ((sequences_a, cells_a), (sequences_b, cells_b)) = drawn
    a, b = side(*sequences_a), side(*sequences_b)
    join = aligner_of(a, b).rows(table(cells_a), table(cells_b))
    assert len(join.index_a) == sum(map(len, contents))
    x, y = values_of(sequences_a, cells_a), values_of(sequences_b, cells_b)
    assert np.array_equal(x[join.index_a], y[join.index_b])
    assert (np.diff(pack(join.pair, join.position)) > 0).all()


def test_equal_tables_are_joined_once():
    a, b = side(seq("x", [1, 2, 3])), side(seq("x", [1, 2, 3]))
    aligner = aligner_of(a, b)
    cells = [(0, 0), (0, 1)]
    assert aligner.rows(table(cells), table(cells)) is aligner.rows(table(cells), table(cells))


def test_rows_of_no_sequence_are_never_joined():
    a, b = side(seq("x", [1, 2])), side(seq("x", [1, 2]))
    join = aligner_of(a, b).rows(table([(-1, -1), (0, 0)]), table([(-1, -1), (0, 0)]))
    assert join.index_a.tolist() == [1] and join.index_b.tolist() == [1]
    assert join.table_a.padding == 1


def test_dumps_without_common_sequences_or_rows_join_nothing():
    a, b = side(seq("x", [1, 2])), side(seq("y", [8, 9]))
    aligner = aligner_of(a, b)
    assert not len(aligner.rows(table([(0, 0)]), table([(0, 0)])).index_a)
    assert not len(aligner_of(a, a).rows(table([]), table([(0, 0)])).index_a)


def test_the_last_call_of_a_row_counts_and_the_earlier_ones_are_known():
    rows = table([(0, 1, 0), (0, 0, 0), (0, 1, 2), (0, 1, 1)])
    found = read_table(rows)
    assert [n.tolist() for n in split(found.cells)] == [[0, 0], [0, 1]] and found.last.tolist() == [1, 2]
    assert found.earlier.tolist() == [0, 3] and found.again.tolist() == [1, 1]


def test_repeated_rows_are_compared_bit_by_bit_with_the_one_that_counts():
    found, again = read_table(table([(0, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)])), Recomputed()
    nan = float("nan")
    again.note(found, np.array([[1.0, nan], [2.0, 0.0], [1.0, nan], [2.0, -0.0]], np.float32).__getitem__, 2)
    assert again.again == {0, 1} and again.differing == {1}
    again.note(found, np.array([[1.0], [2.0], [3.0], [2.0]], np.float32).__getitem__, 1)
    assert again.differing == {0, 1}


# -- pieces and weight versions ---------------------------------------------------------------------------------------

FIRST, SECOND = [1, 2, 3, 4], [1, 2, 3, 4, 9, 5, 6]


def pieces(*versions: int) -> Any:
    found = [seq("r0", FIRST, 2, trajectory="t"), seq("r1", SECOND, 5, trajectory="t")]
    for sequence, version in zip(found, versions):
        sequence.weight_version = version
    return side(*found)


FED_FIRST = [(0, p) for p in range(3)]
"""The last token that a piece generated is not fed while it generates."""


def joined(a: Any, b: Any, cells_a: list[tuple[int, int]], cells_b: list[tuple[int, int]], **options: Any):
    """Return position -> (row of a, row of b)."""
    join = aligner_of(a, b, **options).rows(table(cells_a), table(cells_b))
    assert (join.pair == 0).all()
    rows = zip(join.index_a.tolist(), join.index_b.tolist())
    return dict(zip(join.position.tolist(), rows))


def test_rows_of_a_trajectory_come_from_every_piece():
    """The second turn found the first in the prefix cache, so each holds some of the rows."""
    cells = [*FED_FIRST, *((1, p) for p in range(3, 6))]
    whole = [(0, p) for p in range(7)]
    assert joined(pieces(), side(seq("x", SECOND, 2)), cells, whole) == {p: (p, p) for p in range(6)}


def test_of_a_row_in_several_pieces_the_last_one_counts():
    cells = [*((1, p) for p in range(6)), *FED_FIRST]
    found = joined(pieces(), side(seq("x", SECOND, 2)), cells, [(0, p) for p in range(7)])
    assert found == {p: (p, p) for p in range(6)}


def test_both_sides_in_pieces():
    b = side(seq("y1", SECOND, 4, trajectory="T"), seq("y0", FIRST[:3], 2, trajectory="T"))
    found = joined(
        pieces(), b, [*FED_FIRST, *((1, p) for p in range(3, 6))], [(1, 0), (1, 1), *((0, p) for p in range(2, 6))]
    )
    assert found == {p: (p, p) for p in range(6)}


def test_a_row_is_taken_from_the_piece_of_the_other_sides_weight_version():
    cells = [*FED_FIRST, *((1, p) for p in range(6))]
    whole = [(0, p) for p in range(7)]
    old = joined(pieces(1, 2), side(seq("x", SECOND, 2, weight_version=1)), cells, whole)
    assert old == {p: (p, p) for p in range(3)}
    new = joined(pieces(1, 2), side(seq("x", SECOND, 2, weight_version=2)), cells, whole)
    assert new == {p: (p + 3, p) for p in range(6)}
    both = joined(pieces(1, 2), pieces(1, 2), cells, cells)
    assert both == {p: (p + 3, p + 3) for p in range(6)}


def test_rows_of_other_weight_versions_join_only_when_asked():
    a, b = side(seq("x", FIRST, weight_version=1)), side(seq("x", FIRST, weight_version=2))
    cells = [(0, p) for p in range(4)]
    assert joined(a, b, cells, cells) == {}
    assert joined(a, b, cells, cells, across_versions=True) == {p: (p, p) for p in range(4)}


def test_a_dump_that_does_not_count_versions_joins_any():
    a, b = side(seq("x", FIRST, weight_version=7)), side(seq("x", FIRST))
    cells = [(0, p) for p in range(4)]
    assert len(joined(a, b, cells, cells)) == len(joined(b, a, cells, cells)) == 4


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_trajectories_cut_into_pieces_with_cache_holes_give_back_their_rows(data):
    """Each side cuts sequences into pieces; what an earlier piece ran may be missing from the next (prefix cache)."""
    whole = [[n, 5, *data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=5))] for n in range(2)]
    sides, tables, held = [], [], []
    for name in "ab":
        found, cells = [], []
        for number, ids in enumerate(whole):
            cuts = sorted(data.draw(st.sets(st.integers(2, len(ids) - 1), max_size=2)))
            start = 0
            for stop in (*cuts, len(ids)):
                first = data.draw(st.integers(0, start))
                cells += [(len(found), p) for p in range(first, stop)]
                found.append(seq(f"{name}{number}.{stop}", ids[:stop], 2, trajectory=f"{name}{number}"))
                start = stop
        sides.append(side(*found))
        cells = data.draw(st.permutations(cells))
        tables.append(table(cells))
        held.append([tuple(found[s].tokens[: p + 1].tolist()) for s, p in cells])
    join = aligner_of(*sides).rows(*tables)
    assert len(join.index_a) == sum(map(len, whole))
    assert [held[0][n] for n in join.index_a] == [held[1][n] for n in join.index_b]
