"""Rows of other expert-parallel ranks' tokens: named by the other ranks' files, or dropped, counted, refused."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from dump_tools import open_rank, rank_file, refusal
from hypothesis import given, settings
from hypothesis import strategies as st

from probe.errors import DumpError
from probe.store.reader import open_dump
from probe.store.schema import CELLS, FOREIGN, ROW, RowSegment, Sequence
from probe.store.writer import DumpWriter

EXPERT = ("layers.0.mlp.experts.local_experts.0.linear_fc1", "input.0")
FIRST, OTHER = 0, 3
"""The numbers of the two files' ranks, as dump_tools counts them; the first holds the expert."""
CALLS, WIDTH = 2, 6


def open_one(folder: Path, rank: int) -> DumpWriter:
    """Return the writer of one of two expert-parallel ranks, each with a sequence of its own."""
    number = int(rank == OTHER)
    sequence = Sequence(0, uid=f"s{number}", prompt_len=2, length=CALLS * WIDTH)
    return open_rank(folder, [sequence], sizes={"ep": 2, "dp": 2}, at={"ep": number, "dp": number})


def table(entries: list[tuple[int, int, int, int]]) -> RowSegment:
    """Return a row table from (sequence, position, token, call)."""
    return RowSegment(np.array(entries, ROW))


def append_cells(writer: DumpWriter, cells: list[int], call: int = 0, dtype: str = "int32") -> None:
    """Append which cells of a call hold tokens: cell c holds position c of that call's part of the sequence."""
    rows = table([(0, call * WIDTH + cell, 7, call) for cell in cells])
    writer.append(*CELLS, np.array(cells, dtype), dtype, rows)


def two_ranks(folder: Path, stored: dict[tuple[int, int], list[int]], served: list[list[tuple[int, int]]]) -> None:
    """Write two ranks: ``stored`` cells by (rank, call), and what the expert ``served`` in each call: (rank, cell)."""
    for rank in (FIRST, OTHER):
        writer = open_one(folder, rank)
        for call in range(CALLS):
            if stored[rank, call]:
                append_cells(writer, stored[rank, call], call)
            entries = [
                (0, call * WIDTH + cell, 7, call) if peer == FIRST else (FOREIGN - peer, cell, -1, call)
                for peer, cell in served[call]
                if peer == OTHER or cell in stored[FIRST, call]
            ]
            if rank == FIRST and entries:
                values = np.array([value_of(s < 0, p + (s < 0) * call * WIDTH) for s, p, _, _ in entries], np.float32)
                writer.append(*EXPERT, values[:, None], "float32", table(entries))
        writer.append("m", "output.0", np.ones((1, 1), np.float32), "float32", table([(0, 0, 7, 0)]))
        writer.close()


def value_of(other: bool, position: int) -> float:
    """Return the value of a token's row."""
    return 100.0 * other + position


CELLS_OF = st.lists(st.integers(0, WIDTH - 1), max_size=WIDTH, unique=True)
TOKENS = st.lists(st.tuples(st.sampled_from([FIRST, OTHER]), st.integers(0, WIDTH - 1)), max_size=8, unique=True)


@settings(max_examples=40, deadline=None)
@given(st.lists(CELLS_OF, min_size=2 * CALLS, max_size=2 * CALLS), st.lists(TOKENS, min_size=CALLS, max_size=CALLS))
def test_an_expert_has_the_stored_tokens_of_all_ranks_and_nothing_else(cells, served):
    stored = {(rank, call): cells.pop() for rank in (FIRST, OTHER) for call in range(CALLS)}
    expected = {
        (f"s{int(rank == OTHER)}", call * WIDTH + cell, 7, call)
        for call in range(CALLS)
        for rank, cell in served[call]
        if cell in stored[rank, call]
    }
    with tempfile.TemporaryDirectory() as folder:
        two_ranks(Path(folder), stored, served)
        with open_dump(folder) as dump:
            assert CELLS not in dump.tensors
            assert (EXPERT in dump.tensors) == bool(expected)
            if expected:
                info, rows = dump.tensors[EXPERT], dump.rows(*EXPERT)
                found = [(dump.sequences[r["sequence"]].uid, *(int(r[n]) for n in ROW.names[1:])) for r in rows]
                assert len(found) == len(expected) == info.rows and set(found) == expected
                assert (info.left_out, info.lacking) == (0, "")
                wanted = [value_of(uid == "s1", position) for uid, position, _, _ in found]
                assert dump.read(*EXPERT)[:, 0].tolist() == wanted
                assert np.concatenate([part[:, 0] for part, _ in dump.iter_blocks(*EXPERT)]).tolist() == wanted


def test_a_sequence_that_both_ranks_ran_gives_each_token_once(tmp_path):
    for rank in (FIRST, OTHER):
        number = int(rank == OTHER)
        both = [Sequence(0, uid="s", prompt_len=2, length=2)]
        writer = open_rank(tmp_path, both, sizes={"ep": 2, "dp": 2}, at={"ep": number, "dp": number},
                           manifest={"driver": True})  # fmt: skip
        append_cells(writer, [0, 1])
        if rank == FIRST:
            entries = [(FOREIGN - OTHER, 0, -1, 0), (FOREIGN - OTHER, 1, -1, 0), (0, 1, 7, 0)]
            writer.append(*EXPERT, np.arange(3, dtype=np.float32)[:, None], "float32", table(entries))
        writer.close()
    with open_dump(tmp_path) as dump:
        assert dump.rows(*EXPERT)["position"].tolist() == [0, 1]
        assert dump.read(*EXPERT).tolist() == [[0.0], [2.0]]  # its own row rather than the other's


EVERYTHING = {(rank, call): list(range(WIDTH)) for rank in (FIRST, OTHER) for call in range(CALLS)}


def test_rows_of_a_rank_without_a_file_are_left_out_and_counted(tmp_path):
    two_ranks(tmp_path, EVERYTHING, [[(FIRST, 1), (OTHER, 2)], [(OTHER, 3), (OTHER, 4)]])
    rank_file(tmp_path, OTHER).unlink()
    with open_dump(tmp_path) as dump:
        assert dump.lost == ["the file of expert-parallel rank 1 of 2 is missing"]
        info = dump.tensors[EXPERT]
        assert (info.rows, info.left_out) == (1, 3)
        assert info.lacking == (
            "which tokens of other expert-parallel ranks they are is in no file: the file of rank 3 is missing"
        )
        assert dump.read(*EXPERT).tolist() == [[1.0]]


def test_an_expert_that_served_only_a_lost_rank_says_so_when_it_is_read(tmp_path):
    two_ranks(tmp_path, EVERYTHING, [[(OTHER, 2)], []])
    rank_file(tmp_path, OTHER).unlink()
    with open_dump(tmp_path) as dump:
        assert (dump.tensors[EXPERT].rows, dump.tensors[EXPERT].left_out) == (0, 1)
        with pytest.raises(DumpError, match=r"cannot be made whole: .* the file of rank 3 is missing"):
            dump.read(*EXPERT)


def test_calls_that_a_killed_rank_had_not_flushed_are_lost_and_its_padding_is_not(tmp_path):
    writer = open_one(tmp_path, OTHER)
    append_cells(writer, [0, 2])
    writer.flush()
    writer.abandon()
    writer = open_one(tmp_path, FIRST)
    entries = [(FOREIGN - OTHER, 2, -1, 0), (FOREIGN - OTHER, 1, -1, 0), (FOREIGN - OTHER, 0, -1, 1)]
    writer.append(*EXPERT, np.arange(3, dtype=np.float32)[:, None], "float32", table(entries))
    writer.close()
    with open_dump(tmp_path) as dump:
        info = dump.tensors[EXPERT]
        assert (info.rows, info.left_out) == (1, 1) and info.lacking.endswith("a rank's file is unfinished")
        assert dump.rows(*EXPERT)["position"].tolist() == [2]


HOSTILE = {
    "negative cell": ("int32", [0, -1], [(FOREIGN - OTHER, 0)], "does not number tokens"),
    "other dtype": ("int64", [0, 1], [(FOREIGN - OTHER, 0)], "does not number tokens"),
    "one cell twice": ("int32", [1, 1], [(FOREIGN - OTHER, 0)], "gives one number to two tokens"),
    "negative position": ("int32", [0, 1], [(FOREIGN - OTHER, -1)], "holds a negative position"),
    "largest rank": ("int32", [0, 1], [(-(2**31), 0)], "the file of rank 2147483646 is missing"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_numbers_are_refused_in_one_sentence(tmp_path, case):
    dtype, cells, foreign, problem = HOSTILE[case]
    writer = open_one(tmp_path, OTHER)
    rows = table([(0, n, 7, 0) for n in range(len(cells))])
    writer.append(*CELLS, np.array(cells, dtype), dtype, rows)
    writer.append("m", "output.0", np.ones((1, 1), np.float32), "float32", table([(0, 0, 7, 0)]))
    writer.close()
    writer = open_one(tmp_path, FIRST)
    writer.append(*EXPERT, np.ones((1, 1), np.float32), "float32", table([(*foreign[0], -1, 0)]))
    writer.close()
    assert problem in refusal(tmp_path / "rollout")


def test_numbers_of_tokens_that_are_no_tokens_are_refused(tmp_path):
    writer = open_one(tmp_path, OTHER)
    writer.append(*CELLS, np.zeros(1, np.int32), "int32", table([(-1, -1, -1, 0)]))
    writer.close()
    assert "does not number tokens" in refusal(tmp_path / "rollout")
