"""One file of a dump, as a reader sees it: a complete one (checked HDF5), or what a killed run left (its journal)."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from probe.errors import DumpError
from probe.store import schema
from probe.store.dtypes import stored_dtype, type_matches
from probe.store.journal import journal_of, read_journal
from probe.store.places import check_place
from probe.store.statistics import Reduced
from probe.store.validate import (
    DAMAGED,
    CheckedFile,
    check_dtype,
    check_manifest,
    check_tensor,
    json_object,
    json_shape,
    read_table,
    reading,
    records_of,
    text_of,
)

Shape = tuple[int, ...]
_FLOAT64 = np.dtype(np.float64)


def open_part(path: Path) -> Part:
    """Open one file of a dump; raise DumpError when it cannot be read or trusted."""
    return KilledPart(path) if journal_of(path).exists() else CompletePart(path)


def read_at(descriptor: int, offset: int, dtype: np.dtype, count: int) -> np.ndarray:
    """Return ``count`` numbers that lie in a file from ``offset`` on; threads can do so at the same time."""
    out = np.empty(count, dtype)
    buffer, done = out.data.cast("B"), 0
    while done < out.nbytes:
        read = os.preadv(descriptor, [buffer[done:]], offset + done)
        if not read:
            raise OSError(f"the file ends {out.nbytes - done} bytes early")
        done += read
    return out


class Part(ABC):
    """One file with its tables in memory; ``to_global`` maps its sequence numbers to those of the whole dump."""

    tables: dict[str, np.ndarray]

    def __init__(self, path: Path) -> None:
        self.path = path
        self.to_global = np.zeros(0, np.int32)
        self._rows: dict[str, np.ndarray] = {}

    @abstractmethod
    def manifest(self) -> dict[str, Any]:
        """Return the manifest that the file carries."""

    @abstractmethod
    def raw(self, dataset: str, shape: Shape, dtype: str, start: int, stop: int) -> np.ndarray:
        """Return rows ``start .. stop`` of a block in the carrier of ``dtype``, after checking that it is there."""

    @abstractmethod
    def row_table(self, name: str) -> np.ndarray:
        """Return a row table as it is in the file."""

    @abstractmethod
    def sketch(self, dataset: str, columns: int) -> np.ndarray:
        """Return the float64 table [n, columns] of a weight sketch."""

    @abstractmethod
    def close(self) -> None:
        """Close the file."""

    def rows(self, name: str) -> np.ndarray:
        """Return row table ``name`` with sequence numbers of the whole dump.

        -1 stays (no sequence), and so do tokens of other ranks (:data:`probe.store.schema.FOREIGN`).
        """
        if name not in self._rows:
            rows = self.row_table(name)
            sequence = rows["sequence"]
            known = sequence >= 0
            if len(rows) and not sequence.max() < len(self.to_global):
                raise DumpError(f"{self.path}:/rows/{name} names a sequence that the file does not list", DAMAGED)
            if (rows["position"][known | (sequence <= schema.FOREIGN)] < 0).any():
                raise DumpError(f"{self.path}:/rows/{name} holds a negative position", DAMAGED)
            sequence[known] = self.to_global[sequence[known]]
            self._rows[name] = rows
        return self._rows[name]

    def reduced(self) -> dict[tuple[str, str], Reduced]:
        """Return (module, slot) -> what the file holds statistics of, in place of values."""
        found = {}
        for record in records_of(self.tables["statistics"]):
            key = (text_of(record["module"]), text_of(record["slot"]))
            where = f"{self.path}:/statistics {':'.join(key)}"
            dtype = check_dtype(text_of(record["dtype"]), where)
            found[key] = Reduced(dtype, json_shape(record["shape"], where))
        return found


class CompletePart(Part):
    """A file that was closed: HDF5, nothing in it read before it is checked."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._file = CheckedFile(path)
        self._descriptor = os.open(path, os.O_RDONLY)
        self._offsets: dict[tuple[str, Shape, str], int | None] = {}
        try:
            self.tables = {name: self._table(name, dtype) for name, dtype in schema.TABLES.items()}
        except BaseException:
            self.close()
            raise

    def _table(self, name: str, dtype: np.dtype) -> np.ndarray:
        if name in schema.OPTIONAL_TABLES and not self._file.has(name):
            return np.zeros(0, dtype)
        return read_table(self._file, f"/{name}", dtype)

    def manifest(self) -> dict[str, Any]:
        """Return the manifest that the file carries."""
        where = f"{self.path}:/manifest"
        found = self._file.dataset("/manifest")
        with reading(where):
            value = h5py.Dataset(found.id)[()]
        return check_place(check_manifest(json_object(value, where), where), where)

    def raw(self, dataset: str, shape: Shape, dtype: str, start: int, stop: int) -> np.ndarray:
        """Return rows of a block, read with the file's own type: HDF5 converts nothing."""
        where = (dataset, shape, dtype)
        if where not in self._offsets:
            found = self._file.dataset(dataset)
            check_tensor(found, shape, dtype)
            self._offsets[where] = found.offset
        offset, carrier = self._offsets[where], stored_dtype(dtype).carrier
        if offset is not None:  # contiguous: read past HDF5, which lets one thread in at a time
            features = math.prod(shape[1:])
            with reading(f"{self.path}:{dataset}"):
                offset += start * features * carrier.itemsize
                values = read_at(self._descriptor, offset, carrier, (stop - start) * features)
            return values.reshape(stop - start, *shape[1:])
        found = self._file.dataset(dataset)
        whole = found.shape != shape  # the same content stored once for tensors of different shapes
        count = found.shape if whole else (stop - start, *shape[1:])
        with reading(f"{self.path}:{dataset}"):
            out = np.empty(count, stored_dtype(dtype).carrier)
            if out.size:
                space = found.id.get_space()
                if not whole:
                    space.select_hyperslab((start,) + (0,) * (len(shape) - 1), count)
                found.id.read(h5py.h5s.create_simple(count), space, out, mtype=found.id.get_type())
        return out.reshape(shape)[start:stop] if whole else out

    def row_table(self, name: str) -> np.ndarray:
        """Return a row table as it is in the file."""
        return read_table(self._file, f"/rows/{name}", schema.ROW)

    def sketch(self, dataset: str, columns: int) -> np.ndarray:
        """Return the float64 table of a weight sketch."""
        found = self._file.dataset(dataset)
        if not type_matches(found.type, "float64") or len(found.shape) != 2 or found.shape[1] != columns:
            raise DumpError(f"{self.path}:{dataset} is not the sketch of a parameter", DAMAGED)
        with reading(f"{self.path}:{dataset}"):
            if found.offset is None:
                return h5py.Dataset(found.id)[...]
            return read_at(self._descriptor, found.offset, _FLOAT64, math.prod(found.shape)).reshape(found.shape)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        os.close(self._descriptor)


class KilledPart(Part):
    """A file whose writer died, or still runs: its journal says which bytes of it have a meaning."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with reading(journal_of(path)):
            self._manifest, self._places, tables = read_journal(path)
            self.tables = {name: np.array(tables.get(name, []), dtype) for name, dtype in schema.TABLES.items()}

    def manifest(self) -> dict[str, Any]:
        """Return the manifest that the journal opens with."""
        where = str(journal_of(self.path))
        return check_place(check_manifest(self._manifest, where), where)

    def raw(self, dataset: str, shape: Shape, dtype: str, start: int, stop: int) -> np.ndarray:
        """Return rows of a block from where the journal says that it lies."""
        carrier, features = stored_dtype(dtype).carrier, math.prod(shape[1:])
        size = self._place(dataset)[1]
        if size != math.prod(shape) * carrier.itemsize:
            raise DumpError(f"{self.path}:{dataset} has {size} bytes, the index says shape {shape}", DAMAGED)
        return self._read(dataset, carrier, start * features, (stop - start) * features).reshape(
            stop - start, *shape[1:]
        )

    def row_table(self, name: str) -> np.ndarray:
        """Return a row table from where the journal says that it lies."""
        return self._read(f"/rows/{name}", schema.ROW)

    def sketch(self, dataset: str, columns: int) -> np.ndarray:
        """Return the float64 table of a weight sketch."""
        with reading(f"{self.path}:{dataset}"):
            return self._read(dataset, np.dtype("<f8")).reshape(-1, columns)

    def close(self) -> None:
        """Do nothing: the file is opened for each read."""

    def _place(self, dataset: str) -> tuple[int, int]:
        """Return where a dataset starts and how many bytes it has, all of which are in the file."""
        where = f"{self.path}:{dataset}"
        with reading(where):
            start, size = self._places.get(dataset, (None, None))
        if type(start) is not int or type(size) is not int:
            raise DumpError(f"{where} is missing from the journal", DAMAGED)
        if start < 0 or size < 0 or start + size > os.stat(self.path).st_size:
            raise DumpError(f"{where} lies outside the file", DAMAGED)
        return start, size

    def _read(self, dataset: str, dtype: np.dtype, first: int = 0, count: int | None = None) -> np.ndarray:
        start, size = self._place(dataset)
        nbytes = size if count is None else count * dtype.itemsize
        with reading(f"{self.path}:{dataset}"), open(self.path, "rb") as file:
            return read_at(file.fileno(), start + first * dtype.itemsize, dtype, nbytes // dtype.itemsize)
