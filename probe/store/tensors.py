"""The tensors of a dump, whole: blocks of one file as they lie, or what several ranks stored, joined while reading."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import xxhash

from probe.errors import DumpError
from probe.store.checksums import row_checksums
from probe.store.dtypes import narrow, round_to, stored_dtype, widen
from probe.store.parts import Part
from probe.store.peers import Peers
from probe.store.places import Place
from probe.store.schema import CELLS, CHECKSUM, COLUMNS, FOREIGN, PARTIAL, SHARDS, TensorInfo
from probe.store.shards import Piece, Plan, plan
from probe.store.statistics import WIDTH, Reduced
from probe.store.validate import DAMAGED, Record, check_dtype, json_shape, records_of, text_of

PIECE_BYTES = 64 << 20
"""What is read of a tensor at once where it is read piece by piece, unless one row is larger."""

GAP_BYTES = 16 << 10
"""Bytes between wanted rows that are read and dropped sooner than a second read is made: what one call costs (2 us)."""

Key = tuple[str, str]


@dataclass(frozen=True)
class _Block:
    file: int
    dataset: str
    shape: tuple[int, ...]
    rows: str


@dataclass
class _Stored:
    """The blocks that one file has of a tensor, all of one dtype, row shape and kind of shard."""

    file: int
    dtype: str
    features: tuple[int, ...]
    shard: str
    order: int
    has_rows: bool
    reduced: Reduced | None = None
    blocks: list[_Block] = field(default_factory=list)
    statistics: list[Record] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(block.shape[0] for block in self.blocks)

    @property
    def whole(self) -> Reduced:
        """Return dtype and row shape of the tensor itself, which rows of statistics are of."""
        return self.reduced or Reduced(self.dtype, self.features)


class Replica(NamedTuple):
    """Rows that another rank stored again, or only the checksums of.

    ``tp``: its tensor-parallel number; ``rows``: which rows; ``checksums``: uint64 [rows] of what it holds; ``at``: the
    numbers of the same rows in :meth:`probe.store.reader.Dump.rows`; ``rank`` and ``reference``: its name in sentences
    and that of the rank whose values count.
    """

    tp: int
    rows: np.ndarray
    checksums: np.ndarray
    at: np.ndarray
    rank: str
    reference: str


class TensorStore:
    """Every tensor of the files of a dump; ``infos`` describes them in the order of files and of first execution.

    ``tp`` and ``ep``: how many tensor- and expert-parallel ranks there are, None where no file says it.
    """

    def __init__(self, parts: list[Part], places: list[Place], tp: int | None, ep: int | None = None) -> None:
        self._parts, self._places, self._tp = parts, places, tp
        self._stored: dict[Key, list[_Stored]] = {}
        self._plans: dict[Key, Plan] = {}
        self._known_plans: dict[Any, Plan] = {}
        self._row_cache: dict[tuple[int, tuple[str, ...]], tuple[np.ndarray, bytes]] = {}
        self._row_tables: dict[tuple[int, str], np.ndarray] = {}
        self._peers = Peers([part.path for part in parts], (ep or 1) > 1)
        for number, part in enumerate(parts):
            self._collect(number, part)
        for own in self._stored.pop(CELLS, []) if self._peers.allowed else []:
            self._peers.add(parts[own.file].path, self._gather([own], None), self._rows_of(own))
        infos = {key: self._describe(key, stored) for key, stored in self._stored.items()}
        # an expert may have served nothing but other ranks' padding, of which no tensor is left
        self.infos = {key: info for key, info in infos.items() if info.rows or info.left_out or key not in self._plans}

    # -- reading ------------------------------------------------------------------------------------------------------

    def rows(self, key: Key) -> np.ndarray:
        """Return the row table of a tensor."""
        found = self._plans.get(key)
        if found is None:
            return self._rows_of(self._stored[key][0])
        return self._readable(key, found).rows

    def raw(self, key: Key, at: np.ndarray | None = None) -> np.ndarray:
        """Return rows ``at`` (all if None) in the carrier of the tensor's dtype."""
        found = self._plans.get(key)
        if found is None:
            return self._gather([self._stored[key][0]], at)
        return self._joined(key, _chosen(self._readable(key, found).take, at))

    def shards(self, key: Key, at: np.ndarray | None = None) -> list[np.ndarray]:
        """Return rows ``at`` (all if None) of each tensor-parallel rank's columns, or whole as the only entry, raw."""
        found = self._plans.get(key)
        if found is None or self.infos[key].shard != COLUMNS:
            return [self.raw(key, at)]
        return self._columns(key, _chosen(self._readable(key, found).take, at))

    def statistics(self, key: Key, at: np.ndarray | None = None) -> list[np.ndarray]:
        """Return the statistics of rows ``at`` (all if None) of what each tensor-parallel rank holds, float32 or 64."""
        found = self._plans.get(key)
        takes = [at] if found is None else _chosen(self._readable(key, found).take, at)
        return self._columns(key, takes)

    def pieces(self, key: Key) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (raw rows, row table) in order, a stored block or about PIECE_BYTES of it at a time."""
        found, info = self._plans.get(key), self.infos[key]
        step = _rows_at_once(info)
        if found is not None:
            rows = self._readable(key, found).rows
            for at in _steps(len(rows), step):
                yield self._joined(key, [_part_of(take, at) for take in found.take]), rows[at]
            return
        for block in self._stored[key][0].blocks:
            rows = self._block_rows(block)
            for at in _steps(block.shape[0], step):
                yield self._raw(block, info.dtype, at.start, at.stop), rows[at]

    def replicas(self, key: Key) -> list[Replica]:
        """Return what other ranks hold of the same rows: stored again, or as checksums."""
        found = self._plans.get(key)
        copies = found.copies if found is not None else []
        result = []
        for copy in copies:
            if copy.piece is None:
                checksums = self._checksums(key, copy.take)
            else:
                checksums = self._gather([self._stored[key][copy.piece]], copy.take[0])
            rows = self.rows(key)[copy.at]
            place = copy.place
            result.append(Replica(place.tp, rows, checksums, copy.at, place.label, copy.reference.label))
        return result

    def checksums(self, key: Key, at: np.ndarray) -> np.ndarray:
        """Return the checksums of rows ``at`` of the whole tensor."""
        found = self._plans.get(key)
        takes = [at] if found is None else [at if take is None else take[at] for take in found.take]
        return self._checksums(key, takes)

    def row_tables(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (number of the file, row table) of every row table that the tensors use."""
        for number, part in enumerate(self._parts):
            for name in sorted({text_of(record["rows"]) for record in part.tables["index"]}):
                yield number, part.rows(name)

    # -- what the files hold ------------------------------------------------------------------------------------------

    def _collect(self, number: int, part: Part) -> None:
        mine: dict[Key, _Stored] = {}
        reduced = part.reduced()
        for record in sorted(records_of(part.tables["index"]), key=lambda r: (r["order"], r["block"])):
            key = (text_of(record["module"]), text_of(record["slot"]))
            where = f"{part.path}:/index {':'.join(key)}"
            shape = json_shape(record["shape"], where, rows=True)
            dtype = check_dtype(text_of(record["dtype"]), where)
            shard = _check_shard(text_of(record["shard"]), dtype, shape, where)
            fields = (dtype, shape[1:], shard)
            if key not in mine:
                has_rows = text_of(record["row_axes"]) != ""
                of = None if shard == CHECKSUM else reduced.get(key)
                mine[key] = _Stored(number, *fields, record["order"], has_rows, of)
                _check_reduced(mine[key], where)
                self._stored.setdefault(key, []).append(mine[key])
            stored = mine[key]
            if (stored.dtype, stored.features, stored.shard) == fields:
                # a tensor that changes its shape between calls has no common row: its first shape stands
                stored.blocks.append(_Block(number, text_of(record["dataset"]), shape, text_of(record["rows"])))
                stored.statistics.append(record)

    def _describe(self, key: Key, stored: list[_Stored]) -> TensorInfo:
        first = stored[0]
        whole = first.whole
        info = TensorInfo(*key, whole.dtype, whole.features, order=first.order, has_rows=first.has_rows)
        info.shard, info.ranks, info.reduced = first.shard, len(stored), first.reduced is not None
        needs_plan = first.shard == CHECKSUM or (first.shard in (COLUMNS, PARTIAL) and (self._tp or 1) > 1)
        if len(stored) == 1 and not needs_plan and not self._serves_others(first):
            info.rows = first.rows
            _add_statistics(info, stored)
            return info
        found = self._plans[key] = self._plan(key, stored)
        info.rows, info.left_out, info.lacking = len(found.rows), found.left_out, found.lacking
        if first.shard in (COLUMNS, PARTIAL):
            info.ranks = len(found.shards) or self._tp or 1
        if found.shards:
            parts = [stored[numbers[0]] for numbers in found.shards]
            info.dtype, info.order = parts[0].whole.dtype, parts[0].order
            info.has_rows, info.shard = parts[0].has_rows, parts[0].shard
            info.feature_shape, info.reduced = parts[0].whole.features, parts[0].reduced is not None
            if info.shard == COLUMNS:
                info.feature_shape = (sum(part.whole.features[0] for part in parts), *info.feature_shape[1:])
            if info.shard != PARTIAL:
                _add_statistics(info, self._counted(found, stored))
        return info

    def _serves_others(self, stored: _Stored) -> bool:
        """Tell whether rows of one file are of other ranks' tokens (resolved or not)."""
        names = {block.rows for block in stored.blocks} if self._peers.allowed else ()
        return any((self._parts[stored.file].rows(name)["sequence"] <= FOREIGN).any() for name in names)

    def _counted(self, found: Plan, stored: list[_Stored]) -> list[_Stored]:
        """Return the files whose blocks are part of the whole tensor, not only copies of others'."""
        used = []
        for numbers, take in zip(found.shards, found.take):
            bounds = np.cumsum([0, *(stored[n].rows for n in numbers)])
            where = np.arange(len(numbers)) if take is None else np.searchsorted(bounds, take, side="right") - 1
            used += [stored[numbers[place]] for place in np.unique(where)]
        return used

    def _plan(self, key: Key, stored: list[_Stored]) -> Plan:
        pieces, digests = [], []
        for entry in stored:
            rows, digest = self._joined_rows(entry)
            whole = entry.whole
            pieces.append(Piece(self._places[entry.file], entry.shard, rows, whole.dtype, whole.features))
            digests.append((entry.file, entry.shard, digest))
        kinds = [(piece.dtype, piece.features) for piece in pieces]
        inner = [(piece.dtype, piece.features[1:]) for piece in pieces]
        same = tuple(tuple(values.index(value) for value in values) for values in (kinds, inner))
        known = (tuple(digests), same, all(piece.features for piece in pieces))
        if known not in self._known_plans:
            found = self._peers.without_strangers(plan(pieces, self._tp, ":".join(key)))
            if found.lacking:  # its words may name this tensor's shapes
                return found
            self._known_plans[known] = found
        return self._known_plans[known]

    def _joined_rows(self, stored: _Stored) -> tuple[np.ndarray, bytes]:
        """Return the rows of all blocks of one file and their digest; tensors of the same calls share the array."""
        names = (stored.file, tuple(block.rows for block in stored.blocks))
        rows = self._rows_of(stored) if names not in self._row_cache else self._row_cache[names][0]
        if len(rows) != stored.rows:
            self._rows_of(stored)  # raises with the block that does not fit
        if names not in self._row_cache:
            self._row_cache[names] = rows, xxhash.xxh3_128_digest(np.ascontiguousarray(rows).data)
        return self._row_cache[names]

    def _rows_of(self, stored: _Stored) -> np.ndarray:
        return np.concatenate([self._block_rows(block) for block in stored.blocks])

    def _block_rows(self, block: _Block) -> np.ndarray:
        part = self._parts[block.file]
        name = (block.file, block.rows)
        if name not in self._row_tables:
            self._row_tables[name] = self._peers.resolve(part.rows(block.rows), f"{part.path}:/rows/{block.rows}")
        rows = self._row_tables[name]
        if len(rows) != block.shape[0]:
            raise DumpError(
                f"{part.path}:{block.dataset} has {block.shape[0]} rows, /rows/{block.rows} {len(rows)}", DAMAGED
            )
        return rows

    def _raw(self, block: _Block, dtype: str, start: int, stop: int) -> np.ndarray:
        return self._parts[block.file].raw(block.dataset, block.shape, dtype, start, stop)

    # -- joining ------------------------------------------------------------------------------------------------------

    def _readable(self, key: Key, found: Plan) -> Plan:
        if not found.shards:
            where = self._parts[self._stored[key][0].file].path.parent
            raise DumpError(f"{':'.join(key)} of {where} cannot be made whole: {found.lacking}", "dump every rank")
        return found

    def _columns(self, key: Key, takes: list[np.ndarray | None]) -> list[np.ndarray]:
        """Return the chosen rows of each TP shard."""
        stored, found = self._stored[key], self._plans.get(key)
        shards = [[0]] if found is None else found.shards
        return [self._gather([stored[n] for n in numbers], take) for numbers, take in zip(shards, takes)]

    def _joined(self, key: Key, takes: list[np.ndarray | None]) -> np.ndarray:
        """Return the chosen rows, whole, in the carrier of the tensor's dtype."""
        arrays, info = self._columns(key, takes), self.infos[key]
        if len(arrays) == 1:
            return arrays[0]
        if info.shard == COLUMNS or info.reduced:  # statistics side by side: only compared with other ranks' checksums
            return np.concatenate(arrays, axis=1)
        total = widen(arrays[0], info.dtype)
        total = total.astype(np.promote_types(total.dtype, np.float32))
        for other in arrays[1:]:
            total += widen(other, info.dtype)
        return narrow(round_to(total, info.dtype), info.dtype)

    def _gather(self, sources: list[_Stored], index: np.ndarray | None) -> np.ndarray:
        """Return rows ``index`` (all if None) of the blocks of ``sources``, counted through them in order."""
        blocks, dtype = [block for source in sources for block in source.blocks], sources[0].dtype
        if index is None:
            arrays = [self._raw(block, dtype, 0, block.shape[0]) for block in blocks]
            return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        run = is_run(index)
        if run and len(blocks) == 1 and index[0] >= 0 and index[-1] < blocks[0].shape[0]:
            return self._raw(blocks[0], dtype, int(index[0]), int(index[-1]) + 1)
        starts = np.cumsum([0, *(block.shape[0] for block in blocks)])
        if run:  # of one block: read as it lies
            holder = int(np.searchsorted(starts, index[0], side="right")) - 1
            if index[-1] < starts[holder + 1]:
                first = int(index[0] - starts[holder])
                return self._raw(blocks[holder], dtype, first, first + len(index))
        out = np.empty((len(index), *sources[0].features), stored_dtype(dtype).carrier)
        order = np.argsort(index, kind="stable")
        ordered = index[order]
        bounds = np.searchsorted(ordered, starts)
        row_bytes = max(1, math.prod(out.shape[1:]) * out.itemsize)
        gaps = np.append(np.flatnonzero(np.diff(ordered) > 1 + GAP_BYTES // row_bytes) + 1, len(ordered))
        for block, first, low, high in zip(blocks, starts, bounds, bounds[1:]):
            while low < high:  # a range of the block at a time, so that memory stays bounded
                start = int(ordered[low] - first)
                limit = first + start + max(1, PIECE_BYTES // row_bytes)
                stop = int(min(high, np.searchsorted(ordered, limit), gaps[np.searchsorted(gaps, low, side="right")]))
                values = self._raw(block, dtype, start, int(ordered[stop - 1] - first) + 1)
                out[order[low:stop]] = values[ordered[low:stop] - first - start]
                low = stop
        return out

    def _checksums(self, key: Key, takes: list[np.ndarray]) -> np.ndarray:
        step = _rows_at_once(self.infos[key])
        parts = [row_checksums(self._joined(key, [take[at] for take in takes])) for at in _steps(len(takes[0]), step)]
        return np.concatenate([np.zeros(0, np.uint64), *parts])


def _check_reduced(stored: _Stored, where: str) -> None:
    if stored.reduced is not None and (stored.features != (WIDTH,) or stored.dtype not in ("float32", "float64")):
        shape = ["rows", *stored.features]
        raise DumpError(f"{where} holds statistics as {stored.dtype} {shape} instead of [rows, {WIDTH}]", DAMAGED)


def _check_shard(shard: str, dtype: str, shape: tuple[int, ...], where: str) -> str:
    if shard not in SHARDS:
        raise DumpError(f"{where} is shared over ranks as {shard[:40]!r}, which this version cannot read", DAMAGED)
    if shard == CHECKSUM and (dtype != "uint64" or len(shape) != 1):
        raise DumpError(f"{where} holds row checksums as {dtype} {list(shape)} instead of uint64 [rows]", DAMAGED)
    return shard


def _rows_at_once(info: TensorInfo) -> int:
    return max(1, PIECE_BYTES // max(math.prod(info.feature_shape) * stored_dtype(info.dtype).carrier.itemsize, 1))


def _steps(count: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def _chosen(takes: list[np.ndarray | None], at: np.ndarray | None) -> list[np.ndarray | None]:
    return takes if at is None else [at if take is None else take[at] for take in takes]


def is_run(rows: np.ndarray) -> bool:
    """Tell whether row numbers follow one another without a gap."""
    return bool(len(rows)) and int(rows[-1]) - int(rows[0]) == len(rows) - 1 and bool((rows[1:] > rows[:-1]).all())


def _part_of(take: np.ndarray | None, at: slice) -> np.ndarray:
    return np.arange(at.start, at.stop) if take is None else take[at]


def _add_statistics(info: TensorInfo, stored: Iterable[_Stored]) -> None:
    """Fold the statistics of blocks into those of their tensor."""
    sums = []
    for entry in stored:
        for block, record in zip(entry.blocks, entry.statistics):
            info.nan += record["nan"]
            info.inf += record["inf"]
            finite = block.shape[0] * math.prod(entry.whole.features) - record["nan"] - record["inf"]
            if finite and math.isfinite(record["norm"]):
                info.min = float(np.fmin(info.min, record["min"]))
                info.max = float(np.fmax(info.max, record["max"]))
                sums.append((record["mean"], finite, record["norm"]))
    count = sum(n for _, n, _ in sums)
    info.mean = sum(m * n for m, n, _ in sums) / count if count else float("nan")
    info.norm = float(np.sqrt(sum(norm**2 for *_, norm in sums)))
