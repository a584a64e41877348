"""Join the rows of two dumps by (sequence, position), whatever the batching, order or chunking of either side was."""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import dataclass

import numpy as np
import xxhash

from probe.compare.sequences import SequenceJoin
from probe.compare.versions import row_versions
from probe.store.schema import Sequence

_POSITION_BITS = 32
NO_ROWS = np.zeros(0, np.int64)


@dataclass(frozen=True)
class RowTable:
    """One side's row table with its rows told apart.

    ``cells``: the distinct (sequence, position) of the side's own numbering, packed and sorted (:func:`split`);
    ``last``: for each the row of its last call; ``earlier``: rows that were computed again later, and ``again``: the
    number of the cell of each of them; ``padding``: how many rows are of no sequence.
    """

    cells: np.ndarray
    last: np.ndarray
    earlier: np.ndarray
    again: np.ndarray
    padding: int


@dataclass(frozen=True)
class RowJoin:
    """Rows that two tensors share, sorted by (pair, position).

    ``index_a`` and ``index_b`` are row numbers of the stored tensors; ``pair`` indexes the sequence pairs; ``table_a``
    and ``table_b`` hold all rows of each side, ``cells_a`` and ``cells_b`` those that joined.
    """

    index_a: np.ndarray
    index_b: np.ndarray
    pair: np.ndarray
    position: np.ndarray
    table_a: RowTable
    table_b: RowTable
    cells_a: np.ndarray
    cells_b: np.ndarray

    def table(self, side: int) -> RowTable:
        """Return the row table of side 0 (a) or 1 (b)."""
        return self.table_b if side else self.table_a

    def cells(self, side: int) -> np.ndarray:
        """Return the cells of the joined rows of side 0 (a) or 1 (b), in the order of ``pair`` and ``position``."""
        return self.cells_b if side else self.cells_a


def pack(owner: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Return one int64 per (owner, position) that sorts as they do."""
    return (owner.astype(np.int64) << _POSITION_BITS) | position


def split(cells: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (owner, position) of packed cells."""
    return cells >> _POSITION_BITS, cells & ((1 << _POSITION_BITS) - 1)


def last_of_equals(*columns: np.ndarray) -> np.ndarray:
    """Return bool [n]: whether an entry of sorted columns is the last of those equal to it in all of them."""
    differs = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return np.append(differs, True)[: len(columns[0])]


def read_table(rows: np.ndarray) -> RowTable:
    """Tell the rows of a table apart: of a (sequence, position) that ran twice the last call counts."""
    known = (rows["sequence"] >= 0) & (rows["position"] >= 0)
    cells = pack(rows["sequence"], rows["position"])
    if known.all() and (cells[1:] > cells[:-1]).all():
        return RowTable(cells, np.arange(len(cells)), NO_ROWS, NO_ROWS, 0)
    at = np.flatnonzero(known)
    order = at[np.lexsort((at, rows["call"][at], cells[at]))]
    ordered = cells[order]
    is_last = last_of_equals(ordered)
    last = np.flatnonzero(is_last)
    earlier = np.flatnonzero(~is_last)
    again = np.searchsorted(last, earlier)
    return RowTable(ordered[last], order[last], order[earlier], again, int(len(rows) - len(at)))


class RowAligner:
    """Join row tables of two dumps whose sequences were joined; equal tables are joined once.

    Rows of other weight versions (:func:`probe.compare.versions.row_versions`) do not join, unless ``across_versions``.
    """

    def __init__(
        self, join: SequenceJoin, a: Listing[Sequence], b: Listing[Sequence], *, across_versions: bool = False
    ) -> None:
        self.join, self.sequences = join, (a, b)
        found = ([0] * len(a), [0] * len(b)) if across_versions else row_versions(join, a, b)
        versions = [np.array(side, np.int64) for side in found]
        self.versions = np.unique(np.concatenate(versions)) if any(found) else np.zeros(1, np.int64)
        self.prefix = np.array([pair.prefix for pair in join.pairs], np.int64)
        self.pair, self.version, self._rank = zip(*(self._numbers(side, versions[side]) for side in (0, 1)))
        self._tables: dict[int, RowTable] = {}
        self._joins: dict[tuple[int, int], RowJoin] = {}

    def _numbers(self, side: int, versions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return per sequence its pair (-1: none), the number of its weight version and its place among the pieces."""
        sequences = self.sequences[side]
        pair, rank = np.full(len(sequences), -1, np.int64), np.zeros(len(sequences), np.int64)
        for number, joined in enumerate(self.join.pairs):
            for place, piece in enumerate(joined.pieces(side)):
                pair[piece], rank[piece] = number, place
        return pair, np.searchsorted(self.versions, versions), rank

    def rows(self, rows_a: np.ndarray, rows_b: np.ndarray) -> RowJoin:
        """Join two row tables (:data:`probe.store.schema.ROW`) whose sequences are numbered as in their dumps."""
        key = (_digest(rows_a), _digest(rows_b))
        if key not in self._joins:
            for digest, rows in zip(key, (rows_a, rows_b)):
                if digest not in self._tables:
                    self._tables[digest] = read_table(rows)
            self._joins[key] = self.join_tables(self._tables[key[0]], self._tables[key[1]])
        return self._joins[key]

    def join_tables(self, table_a: RowTable, table_b: RowTable) -> RowJoin:
        """Join two row tables that were read already (see :func:`read_table`)."""
        (keys_a, at_a), (keys_b, at_b) = self._keys(table_a, 0), self._keys(table_b, 1)
        if not np.array_equal(keys_a, keys_b):
            keys_a, in_a, in_b = np.intersect1d(keys_a, keys_b, assume_unique=True, return_indices=True)
            at_a, at_b = at_a[in_a], at_b[in_b]
        owner, position = split(keys_a)
        pair = owner // len(self.versions)
        if len(self.versions) > 1:  # a position that both sides computed with several versions: the newest counts
            order = np.lexsort((owner, position, pair))
            order = order[last_of_equals(pair[order], position[order])]
            pair, position, at_a, at_b = pair[order], position[order], at_a[order], at_b[order]
        index = table_a.last[at_a], table_b.last[at_b]
        return RowJoin(*index, pair, position, table_a, table_b, table_a.cells[at_a], table_b.cells[at_b])

    def _keys(self, table: RowTable, side: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the joinable (pair and version, position) of a table, packed and sorted, and their cells' numbers.

        Of several pieces that hold a position the last one counts.
        """
        sequence, position = split(table.cells)
        pair = self.pair[side][sequence]
        at = np.flatnonzero((pair >= 0) & (position < self.prefix[pair])) if len(self.prefix) else NO_ROWS
        sequence = sequence[at]
        keys = pack(pair[at] * len(self.versions) + self.version[side][sequence], position[at])
        if (keys[1:] > keys[:-1]).all():
            return keys, at
        order = np.lexsort((self._rank[side][sequence], keys))
        keys, at = keys[order], at[order]
        last = last_of_equals(keys)
        return keys[last], at[last]

    def places(self, cells: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return (sequence, position, pair or -1, place among the pair's pieces) of a side's cells."""
        sequence, position = split(cells)
        return sequence, position, self.pair[side][sequence], self._rank[side][sequence]


def _digest(rows: np.ndarray) -> int:
    return xxhash.xxh3_128_intdigest(np.ascontiguousarray(rows).view(np.uint8).data)
