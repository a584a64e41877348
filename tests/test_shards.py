"""What ranks stored of one tensor comes back whole: columns, sums, copies, and rows of every kind of parallelism."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from dump_tools import open_rank, segment
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from probe.store.checksums import row_checksums
from probe.store.dtypes import DTYPES, widen
from probe.store.reader import Dump, open_dump
from probe.store.schema import CHECKSUM, COLUMNS, PARTIAL, REPLICATED, ROW, WHOLE, RowSegment, Sequence

TP2 = {"tp": 2}
FEATURES = {
    "whole": (3,),
    "replicated": (5,),
    "columns": (8,),
    "heads": (4, 3),
    "sequence": (2,),
    "no_features": (),
}
"""Kind of a tensor in the random tree -> the shape of one of its rows."""


# -- random trees of shards -------------------------------------------------------------------------------------------


@st.composite
def trees(draw):
    """Draw a topology, sequences (some prompts twice), micro-batches, sizes of blocks and a dtype."""
    sizes = {
        axis: draw(st.sampled_from(choices)) for axis, choices in (("tp", (1, 2, 4)), ("cp", (1, 2)), ("dp", (1, 2)))
    }
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    twice = draw(st.booleans())
    micro_batch = draw(st.integers(1, 3))
    return (
        sizes,
        lengths,
        twice,
        micro_batch,
        draw(st.sampled_from(["float32", "bfloat16"])),
        draw(st.integers(0, 2**31)),
    )


def zigzag(length: int, cp: int, rank: int) -> list[int]:
    """Return the positions that a context-parallel rank holds: chunks ``rank`` and ``2 cp - 1 - rank``."""
    chunk = -(-length // (2 * cp))
    chunks = [range(n * chunk, (n + 1) * chunk) for n in ((rank, 2 * cp - 1 - rank) if cp > 1 else (0, 1))]
    return [position for part in chunks for position in part if position < length]


class Tree:
    """The files that the ranks of a random run leave, and the rows that they hold together."""

    def __init__(self, folder: Path, drawn) -> None:
        self.sizes, self.lengths, twice, self.micro_batch, self.dtype, seed = drawn
        self.folder, self.rng = folder, np.random.default_rng(seed)
        self.tokens = [self.rng.integers(0, 9, length) for length in self.lengths]
        if twice:
            self.tokens.append(self.tokens[0].copy())
        self.truth: dict[str, dict[tuple[int, int, int], list[np.ndarray]]] = {name: {} for name in FEATURES}
        for dp, cp in itertools.product(range(self.sizes["dp"]), range(self.sizes["cp"])):
            self._write_group(dp, cp)

    def _write_group(self, dp: int, cp: int) -> None:
        """Write the files of the TP ranks of one group, each with its rows in an order and in blocks of its own."""
        mine = [number for number in range(len(self.tokens)) if number % self.sizes["dp"] == dp]
        calls = [mine[start : start + self.micro_batch] for start in range(0, len(mine), self.micro_batch)]
        names = [f"p{number}" for number in mine]
        writers = [
            open_rank(
                self.folder,
                [Sequence(0, uid, prompt_len=1, length=len(self.tokens[n])) for n, uid in zip(mine, names)],
                sizes=self.sizes,
                at={"tp": tp, "cp": cp, "dp": dp},
                block_bytes=int(self.rng.choice([1, 60, 1 << 20])),
            )
            for tp in range(self.sizes["tp"])
        ]
        calls += [calls[0]] if calls and self.rng.random() < 0.3 else []  # recomputed in a later call
        for call, members in enumerate(calls):
            cells = [(n, p) for n in members for p in zigzag(len(self.tokens[n]), self.sizes["cp"], cp)]
            if cells and self.rng.random() < 0.3:
                cells.append(cells[0])  # asked for twice in one call
            for name in FEATURES:
                self._write_tensor(name, writers, mine, cells, call)
        for writer in writers:
            writer.close()

    def _write_tensor(self, name: str, writers, mine: list[int], cells: list[tuple[int, int]], call: int) -> None:
        carrier, features = DTYPES[self.dtype].carrier, FEATURES[name]
        if name == "sequence":  # what sequence parallelism cuts has each token of a call once
            cells = list(dict.fromkeys(cells))
        count = int(np.prod(features))
        values = np.frombuffer(self.rng.bytes(len(cells) * count * carrier.itemsize), carrier)
        values = values.reshape(len(cells), *features)
        for cell, row in zip(cells, values):
            self.truth[name].setdefault((*cell, call), []).append(row)
        rows = np.array([(mine.index(n), p, self.tokens[n][p], call) for n, p in cells], ROW)
        bounds = np.linspace(0, len(cells), len(writers) + 1).astype(int)
        for tp, writer in enumerate(writers):
            order = self._order(cells)
            if name == "sequence":
                order = np.arange(bounds[tp], bounds[tp + 1])
            chosen, shard, dtype = values[order], WHOLE, self.dtype
            if name in ("columns", "heads"):
                chosen, shard = np.array_split(chosen, len(writers), axis=1)[tp], COLUMNS
            elif name == "replicated":
                shard = REPLICATED
                if tp:
                    chosen, shard, dtype = row_checksums(chosen), CHECKSUM, "uint64"
            writer.append(name, "output.0", chosen.copy(), dtype, RowSegment(rows[order]), shard=shard)

    def _order(self, cells: list[tuple[int, int]]) -> np.ndarray:
        """Return a random order in which a repeated cell keeps its place before its repetition."""
        order = self.rng.permutation(len(cells))
        if len(cells) > 1 and cells[-1] == cells[0]:
            first, again = np.flatnonzero(order == 0)[0], np.flatnonzero(order == len(cells) - 1)[0]
            if again < first:
                order[[first, again]] = order[[again, first]]
        return order


def check(dump: Dump, tree: Tree, name: str) -> None:
    """Check that a tensor holds each row that any rank computed once, bit for bit."""
    rows, values = dump.rows(name, "output.0"), dump.read_raw(name, "output.0")
    info = dump.tensors[name, "output.0"]
    expected = sum(map(len, tree.truth[name].values()))
    assert (info.rows, info.left_out, info.lacking) == (expected, 0, "") and len(rows) == len(values) == expected
    assert info.feature_shape == FEATURES[name]
    waiting = {key: list(found) for key, found in tree.truth[name].items()}
    for row, value in zip(rows, values):
        number = int(dump.sequences[row["sequence"]].uid.removeprefix("p"))
        assert tree.tokens[number][row["position"]] == row["token"]
        # a token's call is its own rank's: ranks that share a sequence (context parallelism) count alike here
        assert waiting[number, int(row["position"]), int(row["call"])].pop(0).tobytes() == value.tobytes()
    pieces = list(dump.iter_blocks(name, "output.0"))
    assert np.array_equal(np.concatenate([rows for _, rows in pieces]), rows)
    joined = np.concatenate([values for values, _ in pieces])
    assert joined.tobytes() == widen(values, info.dtype).tobytes()
    shards = dump.read_shards(name, "output.0")
    assert len(shards) == (tree.sizes["tp"] if info.shard == COLUMNS else 1)
    assert np.concatenate(shards, axis=1 if len(shards) > 1 else 0).tobytes() == joined.tobytes()


@given(trees())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_trees_of_shards_come_back_bit_for_bit(tmp_path_factory, drawn):
    tree = Tree(tmp_path_factory.mktemp("dump"), drawn)
    with open_dump(tree.folder) as dump:
        assert dump.complete and len(dump.sequences) == len(tree.tokens)
        for name in FEATURES:
            check(dump, tree, name)
            for replica in dump.replicas(name, "output.0"):
                assert name in ("whole", "replicated", "no_features") and replica.tp
                assert np.array_equal(replica.checksums, dump.row_checksums(name, "output.0", replica.at))
                assert np.array_equal(replica.rows, dump.rows(name, "output.0")[replica.at])
        for sequence in dump.sequences:  # ids are rebuilt from rows of several ranks
            assert sequence.tokens.tolist() == tree.tokens[int(sequence.uid.removeprefix("p"))].tolist()


def test_memory_stays_bounded_while_reading_reordered_columns_piece_by_piece(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    values, order = rng.normal(size=(50, 6)).astype(np.float32), rng.permutation(50)
    rows = segment(50).rows
    for tp, chosen in enumerate((np.arange(50), order)):
        writer = open_rank(tmp_path, sizes=TP2, at={"tp": tp}, block_bytes=200)
        half = values[chosen][:, 3 * tp : 3 * tp + 3]
        for start in range(0, 50, 7):
            piece = slice(start, start + 7)
            writer.append(
                "m", "output.0", half[piece].copy(), "float32", RowSegment(rows[chosen][piece]), shard=COLUMNS
            )
        writer.close()
    monkeypatch.setattr("probe.store.tensors.PIECE_BYTES", 100)
    with open_dump(tmp_path) as dump:
        pieces = list(dump.iter_blocks("m", "output.0"))
        assert max(len(piece) for piece, _ in pieces) == 4  # 4 rows of 24 bytes
        assert np.array_equal(np.concatenate([piece for piece, _ in pieces]), values)


# -- sums, statistics -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "int64"])
def test_partial_sums_are_added_in_float32_and_rounded_once(tmp_path, dtype):
    terms = [[1.0, 1.0], [2.0**-8, 3.0], [2.0**-9, -4.0]]
    for tp, term in enumerate(terms):
        writer = open_rank(tmp_path, sizes={"tp": 3}, at={"tp": tp})
        numbers = np.array([term], np.float64 if dtype == "float64" else np.float32)
        bits = (numbers.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else numbers.astype(dtype)
        writer.append("m", "output.0", bits, dtype, segment(1), shard=PARTIAL)
        writer.close()
    # 1 + 2^-8 + 2^-9 lies three quarters of the way to bf16's next number, 1 + 2^-7; rounding each sum would stay at 1
    first = {"bfloat16": 1 + 2.0**-7, "int64": 1.0}.get(dtype, 1 + 2.0**-8 + 2.0**-9)
    with open_dump(tmp_path) as dump:
        assert dump.read("m", "output.0").tolist() == [[first, 0.0]]
        assert dump.read("m", "output.0").dtype == widen(dump.read_raw("m", "output.0"), dtype).dtype
        assert [shard.tolist() for shard in dump.read_shards("m", "output.0")] == [[[first, 0.0]]]
        info = dump.tensors["m", "output.0"]
        assert info.shard == PARTIAL and np.isnan(info.norm) and (info.rows, info.ranks) == (1, 3)


def test_statistics_count_what_makes_up_the_whole_tensor(tmp_path):
    for tp in range(2):
        writer = open_rank(tmp_path, sizes=TP2, at={"tp": tp})
        writer.append("c", "output.0", np.full((2, 3), tp + 1, np.float32), "float32", segment(2), shard=COLUMNS)
        writer.append("w", "output.0", np.full((2, 3), tp + 1, np.float32), "float32", segment(2))
        writer.close()
    with open_dump(tmp_path) as dump:
        info = dump.tensors["c", "output.0"]
        assert (info.feature_shape, info.min, info.max, info.mean) == ((6,), 1, 2, 1.5)
        assert info.norm == pytest.approx(np.sqrt(6 + 24))
        assert (dump.tensors["w", "output.0"].max, dump.tensors["w", "output.0"].mean) == (
            1,
            1,
        )  # rank 0's values count


def test_tensors_without_tokens_are_joined_by_call(tmp_path):
    call = RowSegment(np.array([(-1, -1, -1, 3)], ROW))
    for dp, tp in itertools.product(range(2), range(2)):
        writer = open_rank(tmp_path, sizes={"tp": 2, "dp": 2}, at={"tp": tp, "dp": dp})
        writer.append("m", "output.0", np.full((1, 2), 10 * dp + tp, np.float32), "float32", call, has_rows=False)
        mask, dtype, shard = np.full((1, 2), dp, np.float32), "float32", REPLICATED
        if tp:
            mask, dtype, shard = row_checksums(mask), "uint64", CHECKSUM
        writer.append("mask", "output.0", mask, dtype, call, has_rows=False, shard=shard)
        writer.close()
    with open_dump(tmp_path) as dump:
        assert dump.read("m", "output.0").tolist() == [[0, 0], [1, 1], [10, 10], [11, 11]]  # undeclared: each its own
        assert dump.replicas("m", "output.0") == []
        assert dump.read("mask", "output.0").tolist() == [[0, 0], [1, 1]]  # one per data-parallel rank's call
        assert [(r.rank, r.reference) for r in dump.replicas("mask", "output.0")] == [
            ("rank tp 1, dp 0", "rank tp 0, dp 0"),
            ("rank tp 1, dp 1", "rank tp 0, dp 1"),
        ]


# -- copies -----------------------------------------------------------------------------------------------------------


def test_copies_are_compared_with_the_rank_whose_values_count(tmp_path):
    values = np.arange(8, dtype=np.float32).reshape(4, 2)
    wrong = values.copy()
    wrong[2, 1] += 1
    for tp, (copy, shard, dtype) in enumerate(
        (
            (values, REPLICATED, "float32"),
            (row_checksums(values[::-1]), CHECKSUM, "uint64"),
            (row_checksums(wrong), CHECKSUM, "uint64"),
        )
    ):
        writer = open_rank(tmp_path, sizes={"tp": 3}, at={"tp": tp})
        rows = segment(4).rows
        writer.append("m", "output.0", copy, dtype, RowSegment(rows[::-1] if tp == 1 else rows), shard=shard)
        writer.close()
    with open_dump(tmp_path) as dump:
        assert np.array_equal(dump.read("m", "output.0"), values)
        differing = {}
        for replica in dump.replicas("m", "output.0"):
            same = dump.row_checksums("m", "output.0", replica.at) == replica.checksums
            differing[replica.rank] = replica.rows[~same]["position"].tolist()
        assert differing == {"rank tp 1": [], "rank tp 2": [2]}


def test_work_that_two_ranks_did_likewise_is_stored_once(tmp_path):
    for dp in range(2):
        writer = open_rank(tmp_path, [Sequence(0, "named", prompt_len=2, length=4)], sizes={"dp": 2}, at={"dp": dp})
        for call in range(2):  # both ran the sequence twice, in calls of other numbers
            values = np.full((2, 3), call, np.float32)
            writer.append("m", "output.0", values, "float32", segment(2, call=call + 5 * dp))
        writer.close()
    with open_dump(tmp_path) as dump:
        assert dump.read("m", "output.0")[:, 0].tolist() == [0, 0, 1, 1]
        (replica,) = dump.replicas("m", "output.0")
        assert replica.at.tolist() == [0, 1, 2, 3]
        assert np.array_equal(replica.checksums, dump.row_checksums("m", "output.0", replica.at))


# -- sequences of ranks without a driver ------------------------------------------------------------------------------


def test_one_uid_with_other_tokens_is_another_sequence(tmp_path):
    """Without a driver nobody knows which sequences of two ranks are the same but their tokens."""
    for dp, tp in itertools.product(range(2), range(2)):
        named = [Sequence(0, uid, prompt_len=2, length=4, trajectory=uid) for uid in ("mine", "shared")]
        writer = open_rank(tmp_path, named, sizes={"tp": 2, "dp": 2}, at={"tp": tp, "dp": dp})
        rows = np.concatenate([segment(4, sequence=n).rows for n in range(2)])
        rows["token"][:4] += 10 * dp
        writer.append("m", "output.0", np.full((8, 1), dp, np.float32), "float32", RowSegment(rows))
        writer.close()
    with open_dump(tmp_path) as dump:
        assert [s.uid for s in dump.sequences] == ["mine", "shared", "mine@dp1"]
        assert [s.trajectory for s in dump.sequences] == [s.uid for s in dump.sequences]
        assert dump.read("m", "output.0")[:, 0].tolist() == [0] * 8 + [1] * 4
        assert dump.sequences[2].tokens.tolist() == [10, 11, 12, 13]
