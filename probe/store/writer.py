"""Write one file of a dump: rows of successive calls gathered into blocks, content stored once, readable if killed.

While open the file is ``NAME.h5.partial`` with a journal beside it (probe.store.journal): every flush appends the
blocks *and* their index rows to both, so that whatever was flushed can be read with its meaning however the process
ends. ``close`` fsyncs, renames and deletes the journal.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import xxhash
from h5py import h5d, h5p, h5s

from probe.errors import DumpError, OutputExistsError
from probe.store.dtypes import file_type, stored_dtype
from probe.store.journal import JournalWriter
from probe.store.schema import (
    CHECKSUM,
    PARTIAL_SUFFIX,
    RESERVED,
    ROW,
    TABLES,
    TOKEN,
    ModuleInfo,
    RowSegment,
    Sequence,
    StoredParameter,
    WeightSketch,
)
from probe.store.statistics import NO_STATISTICS, Reduced, block_statistics

# Of the versions every HDF5 since 1.8 reads, the newest.
LIBVER = ("v108", "v108")
CHUNK_ROWS = {"tokens": 1024}
"""Rows by which a table grows, 64 where not given: small, because a chunk is stored whole."""
FOLDER_TRIES = 3
"""How often a folder that another writer has deleted is made again."""


@dataclass
class _Series:
    """Rows of one (module, slot) that are waiting to become a block."""

    order: int
    group: str
    dtype: str = ""
    feature_shape: tuple[int, ...] = ()
    arrays: list[np.ndarray] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    segments: list[RowSegment] = field(default_factory=list)
    nbytes: int = 0
    blocks: int = 0
    has_rows: bool = True
    shard: str = ""
    reduced: bool = False


class DumpWriter:
    """Append tensors, rows and tables to one HDF5 file of a dump.

    Parameters: ``path`` ends in ``.h5``; ``block_bytes`` is the size at which the rows of one (module, slot) become a
    block; ``buffer_bytes`` bounds what waits in memory over all of them. ``stored_bytes`` counts the sketches and
    tensors handed over so far, equal contents once. Raises OutputExistsError, never overwrites.
    """

    def __init__(
        self, path: Path, manifest: dict[str, Any], *, block_bytes: int = 8 << 20, buffer_bytes: int = 512 << 20
    ) -> None:
        self.path = Path(path)
        self.partial = _partial_of(self.path)
        for existing in (self.path, self.partial):
            if existing.exists():
                raise OutputExistsError(f"{existing} already exists", "choose another output folder")
        self.block_bytes, self.buffer_bytes = block_bytes, buffer_bytes
        self.file = _created(self.partial)
        self.file.create_dataset("manifest", data=json.dumps(manifest, default=str))
        self._tables = {
            name: self.file.create_dataset(
                name, shape=(0,), maxshape=(None,), chunks=(CHUNK_ROWS.get(name, 64),), dtype=dtype, track_times=False
            )
            for name, dtype in TABLES.items()
        }
        self._series: dict[tuple[str, str], _Series] = {}
        self._paths: set[str] = set()
        self._row_tables: dict[tuple[int, ...], str] = {}
        self._stored: dict[tuple[str, bool, tuple[bytes, ...]], tuple[str, str, tuple[float, ...]]] = {}
        self._live: dict[bytes, tuple[np.ndarray, int]] = {}
        self._waiting: dict[str, list[tuple[Any, ...]]] = {name: [] for name in TABLES}
        self._sequences: list[Sequence] = []
        self._digests: dict[int, str] = {}
        self._buffered = 0
        self.tensor_rows = self.stored_bytes = 0
        self._lcpl = h5p.create(h5p.LINK_CREATE)
        self._lcpl.set_create_intermediate_group(True)
        self._dcpl = h5p.create(h5p.DATASET_CREATE)
        self._dcpl.set_obj_track_times(False)
        self._dcpl.set_fill_time(h5d.FILL_TIME_NEVER)
        self.file.flush()
        self._journal = JournalWriter(self.partial, manifest)
        self._places: dict[str, tuple[int, int]] = {}

    # -- what a capture says ------------------------------------------------------------------------------------------

    def add_sequence(self, sequence: Sequence) -> int:
        """Register a sequence and return its number in this file (rows refer to it)."""
        sequence.index = len(self._sequences)
        self._sequences.append(sequence)
        self._waiting["sequences"].append(_sequence_record(sequence))
        return sequence.index

    def end_sequence(self, sequence: Sequence, tokens: np.ndarray) -> None:
        """Note what is known of a sequence in the end: what its trainer declares, a digest of its ids (int64 [n])."""
        self._digests[sequence.index] = _digest(tokens)
        if sequence.declared is not None:
            self._waiting["versions"].append((sequence.index, *astuple(sequence.declared)))

    def add_module(self, module: ModuleInfo) -> None:
        """Record a module of the model."""
        record = (module.path, module.cls, module.order, json.dumps(module.info, default=str))
        self._waiting["modules"].append(record)

    def add_weight(self, sketch: WeightSketch) -> None:
        """Store the sketch of a parameter."""
        dataset = ""
        if sketch.rows.size:
            dataset = self._unused("sketches", sketch.name)
            self._create(dataset, np.ascontiguousarray(sketch.rows, np.float64), "float64")
            self.stored_bytes += sketch.rows.size * 8
        shape, lies = json.dumps(list(sketch.shape)), (sketch.axis, sketch.start, sketch.whole)
        self._waiting["weights"].append((sketch.name, shape, sketch.dtype, *lies, sketch.quad, sketch.alias, dataset))

    def add_parameter(self, about: StoredParameter, values: np.ndarray) -> None:
        """Store the values of a parameter: an array of shape ``about.shape`` in the carrier of its dtype."""
        dataset = self._unused("values", about.name)
        self._create(dataset, np.ascontiguousarray(values).reshape(about.shape), about.dtype)
        whole = about.whole if about.whole >= 0 else (about.shape[0] if about.shape else 1)
        lies = (about.axis, about.start, whole, about.weight_version)
        self._waiting["parameters"].append((about.name, json.dumps(list(about.shape)), about.dtype, *lies, dataset))

    def add_tokens(self, tokens: np.ndarray) -> None:
        """Append rows of the token table (an array of :data:`probe.store.schema.TOKEN`)."""
        self._waiting["tokens"].extend(np.asarray(tokens, TOKEN).tolist())

    def append(
        self,
        module: str,
        slot: str,
        array: np.ndarray,
        dtype: str,
        segment: RowSegment,
        *,
        has_rows: bool = True,
        shard: str = "",
        of: Reduced | None = None,
    ) -> None:
        """Append one call's rows of a tensor.

        ``array`` is [rows, *features] in the numpy carrier of ``dtype`` and belongs to the writer from now on;
        ``segment`` has one entry per row. ``has_rows=False`` marks a tensor without a token axis (one row per call).
        ``shard`` says how the tensor lies over tensor-parallel ranks (:data:`probe.store.schema.SHARDS`); the row
        checksums of a replicated tensor are a uint64 array [rows] of dtype ``uint64``. ``of``: the rows are statistics
        (:mod:`probe.store.statistics`) of rows of that kind.
        """
        if len(array) != len(segment.rows):
            raise DumpError(f"{module}:{slot} has {len(array)} rows but its call has {len(segment.rows)}")
        if not len(array):
            return
        series = self._series_of(module, slot)
        if series.dtype and series.reduced != (of is not None):
            return  # as where a shape changes from call to call: the first kind of rows stands
        if series.arrays and (series.dtype, series.feature_shape, series.shard) != (dtype, array.shape[1:], shard):
            self._write_block(module, slot, series)
        series.dtype, series.feature_shape, series.has_rows, series.shard = dtype, array.shape[1:], has_rows, shard
        if of is not None and not series.reduced:
            series.reduced = True
            self._waiting["statistics"].append((module, slot, of.dtype, json.dumps(list(of.features))))
        digest = xxhash.xxh3_128_digest(np.ascontiguousarray(array).data)
        shared, count = self._live.get(digest, (array, 0))
        if shared.shape != array.shape or shared.dtype != array.dtype:
            shared = array
        self._live[digest] = (shared, count + 1)
        self._buffered += 0 if count else array.nbytes
        self.stored_bytes += 0 if count else array.nbytes
        series.arrays.append(shared)
        series.digests.append(digest)
        series.segments.append(segment)
        series.nbytes += array.nbytes
        self.tensor_rows += len(array)
        if series.nbytes >= self.block_bytes:
            self._write_block(module, slot, series)
            self._commit()
        if self._buffered > self.buffer_bytes:
            self._relieve()

    # -- what reaches the disk ----------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write everything that waits and make it readable should the process die."""
        for (module, slot), series in self._series.items():
            if series.arrays:
                self._write_block(module, slot, series)
        self._commit()

    def close(self) -> Path:
        """Flush, update the sequences' final lengths, fsync, and give the file its final name."""
        self.flush()
        if self._sequences:
            table = self._tables["sequences"]
            records = [_sequence_record(s, self._digests.get(s.index, "")) for s in self._sequences]
            table[...] = np.array(records, TABLES["sequences"])
        self.file.close()
        _fsync(self.partial)
        os.rename(self.partial, self.path)
        self._journal.close(delete=True)
        _fsync(self.path.parent)
        return self.path

    def restate(self, manifest: dict[str, Any]) -> None:
        """Put another manifest in the place of the one that the file began with: what is known only at its end."""
        self.file["manifest"][()] = json.dumps(manifest, default=str)

    def move(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Put the open file into another folder of the same file system, under a manifest that says so."""
        folder.mkdir(parents=True, exist_ok=True)
        stem, left = self.path.stem, self.path.parent
        names = (f"{stem}{f'-{number}' if number > 1 else ''}.h5" for number in itertools.count(1))
        path = next(p for name in names if not (p := folder / name).exists() and not _partial_of(p).exists())
        os.rename(self.partial, _partial_of(path))
        self.path, self.partial = path, _partial_of(path)
        self._journal.move(self.partial, manifest)
        self.restate(manifest)
        _remove_empty(left, left.parent)

    def abandon(self) -> None:
        """Close without completing: the file keeps its ``.partial`` name."""
        if self.file:
            self.file.close()
            self._journal.close()

    def discard(self) -> None:
        """Close, delete the file and the folders that it leaves empty (its step's and its stage's)."""
        self.abandon()
        self._journal.path.unlink(missing_ok=True)
        self.partial.unlink(missing_ok=True)
        _remove_empty(self.path.parent, self.path.parent.parent)

    def _series_of(self, module: str, slot: str) -> _Series:
        if (module, slot) not in self._series:
            top = module if module and module not in RESERVED else f"module:{module}"
            self._series[(module, slot)] = _Series(order=len(self._series), group=self._unused(top, slot))
        return self._series[(module, slot)]

    def _unused(self, *names: str) -> str:
        """Return a path made of ``names`` that no other tensor has; a name may hold any character but NUL."""
        path = "/" + "/".join("(.)" if name == "." else name.replace("/", "|") for name in names)
        while path in self._paths:
            path += "~"
        self._paths.add(path)
        return path

    def _relieve(self) -> None:
        """Write the largest waiting series until half of the buffer is free (large blocks, bounded memory)."""
        by_size = sorted(self._series.items(), key=lambda item: -item[1].nbytes)
        for (module, slot), series in by_size:
            if self._buffered <= self.buffer_bytes // 2:
                break
            if series.arrays:
                self._write_block(module, slot, series)
        self._commit()

    def _write_block(self, module: str, slot: str, series: _Series) -> None:
        content = (series.dtype, series.reduced, tuple(series.digests))
        if content not in self._stored:
            data = series.arrays[0] if len(series.arrays) == 1 else np.concatenate(series.arrays)
            data = np.ascontiguousarray(data)
            dataset = f"{series.group}/block{series.blocks}"
            self._create(dataset, data, series.dtype)
            checksum = xxhash.xxh3_128_hexdigest(data.data)
            with np.errstate(all="ignore"):  # NaN and Inf are counted, not warned about
                found = block_statistics(data, series.dtype, reduced=series.reduced)
            self._stored[content] = (dataset, checksum, found)
        dataset, checksum, statistics = self._stored[content]
        shape = [sum(len(a) for a in series.arrays), *series.feature_shape]
        self._waiting["index"].append(
            (
                *(module, slot, series.blocks, series.order, series.dtype, json.dumps(shape)),
                *("0" if series.has_rows else "", series.shard, self._row_table(series.segments)),
                *(*(NO_STATISTICS if series.shard == CHECKSUM else statistics), checksum, dataset),
            )
        )
        for digest in series.digests:
            shared, count = self._live[digest]
            if count > 1:
                self._live[digest] = (shared, count - 1)
            else:
                del self._live[digest]
                self._buffered -= shared.nbytes
        series.arrays, series.digests, series.segments, series.nbytes = [], [], [], 0
        series.blocks += 1

    def _row_table(self, segments: list[RowSegment]) -> str:
        key = tuple(segment.key for segment in segments)
        if key not in self._row_tables:
            name = f"t{len(self._row_tables)}"
            rows = np.concatenate([segment.rows for segment in segments])
            table = self.file.create_dataset(f"rows/{name}", data=np.asarray(rows, ROW), track_times=False)
            self._places[f"/rows/{name}"] = (table.id.get_offset(), rows.nbytes)
            self._row_tables[key] = name
        return self._row_tables[key]

    def _create(self, path: str, data: np.ndarray, dtype: str) -> None:
        tid = file_type(dtype)
        space = h5s.create_simple(data.shape)
        dataset = h5d.create(self.file.id, path.encode(), tid, space, dcpl=self._dcpl, lcpl=self._lcpl)
        if data.size:
            dataset.write(h5s.ALL, h5s.ALL, data.view(stored_dtype(dtype).carrier), mtype=tid)
        self._places[path] = (dataset.get_offset() if data.size else 0, data.nbytes)

    def _commit(self) -> None:
        """Make what was written readable, first in the file and then, should the process die, through the journal."""
        for name, records in self._waiting.items():
            if records:
                self._append_table(name, np.array(records, TABLES[name]))
        self.file.flush()
        if self._places or any(self._waiting.values()):
            self._journal.commit(self._waiting, self._places)
            self._places.clear()
            for records in self._waiting.values():
                records.clear()

    def _append_table(self, name: str, records: np.ndarray) -> None:
        table = self._tables[name]
        old = table.shape[0]
        table.resize((old + len(records),))
        table[old:] = records


def _created(path: Path) -> h5py.File:
    """Return a new file in a folder that is made for it; of two processes that ask at once, one gets it."""
    for _ in range(FOLDER_TRIES):
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # a writer that discarded its file took the empty folder away
            return h5py.File(path, "x", libver=LIBVER)
    path.parent.mkdir(parents=True, exist_ok=True)
    return h5py.File(path, "x", libver=LIBVER)


def _digest(tokens: np.ndarray) -> str:
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(tokens, "<i8").data) if len(tokens) else ""


def _sequence_record(sequence: Sequence, digest: str = "") -> tuple[Any, ...]:
    digest = digest or _digest(sequence.tokens)
    return (
        *(sequence.index, sequence.trajectory or sequence.uid, sequence.request_id, sequence.uid, sequence.sample),
        *(sequence.prompt_len, sequence.length, digest, sequence.weight_version, sequence.cached),
    )


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _partial_of(path: Path) -> Path:
    """Return the name that a file has until it is complete."""
    return path.with_name(path.name + PARTIAL_SUFFIX)


def _remove_empty(*folders: Path) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):  # not empty: another writer's file or another step is there
            folder.rmdir()
