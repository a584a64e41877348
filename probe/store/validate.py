"""Refuse what a hostile or damaged HDF5 file could make a reader do, before any byte of it is read.

HDF5 follows external links and virtual datasets silently, returns another file's bytes through external storage, and
believes a small file that declares gigabytes. A dump uses none of these, so anything but a hard link to a plain,
unfiltered, fully stored dataset of a known type is refused.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from h5py import h5d, h5l, h5o, h5s, h5t

from probe.errors import DumpError, first_line
from probe.store.dtypes import DTYPES, type_matches

MAX_RANK = 32
"""Axes of a tensor at most: HDF5's own limit (H5S_MAX_RANK)."""
DAMAGED = "the dump is damaged: dump again"
UNTRUSTED = "a dump never does: do not trust this file"


@contextlib.contextmanager
def reading(where: str | Path) -> Iterator[None]:
    """Turn whatever h5py, HDF5, numpy or a decoder raise over damaged content into one DumpError about ``where``."""
    try:
        yield
    except (OSError, RuntimeError, KeyError, ValueError, TypeError, OverflowError, MemoryError) as error:
        raise DumpError(f"{where} cannot be read ({first_line(error)})", DAMAGED) from None


def open_file(path: Path) -> h5py.File:
    """Open an HDF5 file for reading or raise DumpError with the reason."""
    try:
        return h5py.File(path, "r")
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        if "unable to lock" in reason:
            raise DumpError(f"{path} is still being written", "wait until the run has ended") from None
        raise DumpError(
            f"{path} is not a readable HDF5 file ({reason})",
            "it is truncated, damaged or from another program: dump again",
        ) from None


class Checked(NamedTuple):
    """A dataset that may be read: where it is in words, its shape and type, where its bytes lie if in one piece."""

    id: h5d.DatasetID
    where: str
    shape: tuple[int, ...]
    type: h5t.TypeID
    offset: int | None


class CheckedFile:
    """An HDF5 file whose datasets are handed out after a check of their links, storage class and size."""

    def __init__(self, path: Path) -> None:
        self.file = open_file(path)
        self.name: str = self.file.filename
        self._links: dict[bytes, int] = {}

    def has(self, name: str) -> bool:
        """Tell whether the file has an entry of this name at its root."""
        return bool(self.file.id.links.exists(name.encode()))

    def dataset(self, path: str) -> Checked:
        """Return the dataset at ``path``; raise DumpError where it is not what a dump holds."""
        where = f"{self.name}:{path}"
        with reading(where):
            name = b"/".join(filter(None, path.encode().split(b"/")))
            if name:
                self._check_links(name, where)
            found = h5o.open(self.file.id, name) if name else self.file.id
            if not isinstance(found, h5d.DatasetID):
                raise DumpError(f"{where} is not a dataset", DAMAGED)
            return _check_storage(found, where, os.stat(self.name).st_size)

    def _check_links(self, name: bytes, where: str) -> None:
        """Refuse a path that hard links alone do not lead to.

        HDF5 lists what it reaches by hard links: other links by their names and kinds, not what lies behind them. One
        walk through a file of hundreds of datasets takes as long as looking at every link of ten of their paths.
        """
        if not self._links:
            self.file.id.links.visit(lambda link, info: self._links.__setitem__(link, info.type), info=True)
        if self._links.get(name) == h5l.TYPE_HARD:
            return
        steps = name.split(b"/")
        kinds = [self._links.get(b"/".join(steps[: n + 1])) for n in range(len(steps))]
        if any(kind not in (None, h5l.TYPE_HARD) for kind in kinds):
            raise DumpError(f"{where} is a soft or external link", "a dump holds none: do not trust this file")
        raise DumpError(f"{where} is missing from the file", "it is damaged, or not a probe dump file")

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def _check_storage(dataset: h5d.DatasetID, where: str, file_size: int) -> Checked:
    space, kind, offset = dataset.get_space(), dataset.get_type(), dataset.get_offset()
    if offset is None:  # only what lies in one piece in this file, unfiltered, has an offset
        _refuse_elsewhere(dataset.get_create_plist(), where)
    if space.get_simple_extent_type() == h5s.NULL:
        raise DumpError(f"{where} has no shape", DAMAGED)
    shape = space.shape
    logical = math.prod(shape) * kind.get_size()
    stored = dataset.get_storage_size()
    if offset is not None:
        stored = min(stored, file_size - offset)
    if logical > stored:
        raise DumpError(f"{where} declares {logical} bytes but holds {max(stored, 0)}", "it is damaged or forged")
    return Checked(dataset, where, shape, kind, offset)


def _refuse_elsewhere(plist: Any, where: str) -> None:
    """Refuse a dataset whose bytes lie in another file, or not as they are."""
    if plist.get_external_count() or plist.get_layout() == h5d.VIRTUAL:
        raise DumpError(f"{where} keeps its bytes in another file", UNTRUSTED)
    if plist.get_nfilters():
        raise DumpError(f"{where} is compressed or filtered", UNTRUSTED)


def check_tensor(found: Checked, shape: tuple[int, ...], dtype: str) -> None:
    """Check that a tensor's dataset has the element type and count that the index promises."""
    if not type_matches(found.type, dtype):
        raise DumpError(f"{found.where} is not stored as {dtype}", DAMAGED)
    if math.prod(shape) != math.prod(found.shape):
        raise DumpError(f"{found.where} has shape {found.shape}, the index says {shape}", DAMAGED)


def read_table(file: CheckedFile, path: str, expected: np.dtype) -> np.ndarray:
    """Return a whole table after checking that it has the columns, and their types, of this schema version."""
    found = file.dataset(path)
    where = found.where
    with reading(where):
        dataset = h5py.Dataset(found.id)
        dtype = dataset.dtype
        if dtype.names != expected.names:
            raise DumpError(
                f"{where} has columns {dtype.names}, expected {expected.names}",
                "it was written by another version or another program",
            )
        if dataset.ndim != 1 or any(not _same_type(dtype[name], expected[name]) for name in dtype.names):
            raise DumpError(f"{where} has columns of other types than a dump's", "it is from another program")
        return dataset[...]


def _same_type(found: np.dtype, expected: np.dtype) -> bool:
    if h5py.check_string_dtype(expected) is not None:
        return h5py.check_string_dtype(found) is not None
    return found == expected


Record = dict[str, Any]
"""A row of a table by column, as Python's own numbers and texts."""


def records_of(table: np.ndarray) -> list[Record]:
    """Return the rows of a table, each column read faster than through numpy's scalars."""
    names = table.dtype.names or ()
    return [dict(zip(names, row)) for row in table.tolist()]


def text_of(value: Any) -> str:
    """Return a text column's entry."""
    return value.decode() if isinstance(value, bytes) else str(value)


def json_object(value: Any, where: str) -> dict[str, Any]:
    """Return the JSON object in a text column or dataset, or raise DumpError."""
    try:
        parsed = json.loads(value)
    except (ValueError, TypeError, RecursionError) as error:
        raise DumpError(f"{where} is not valid JSON ({error})", DAMAGED) from None
    if not isinstance(parsed, dict):
        raise DumpError(f"{where} does not hold a JSON object", DAMAGED)
    return parsed


def json_shape(value: Any, where: str, *, rows: bool = False) -> tuple[int, ...]:
    """Return the shape in a text column: at most 32 axes of sizes >= 0; with ``rows`` the first one must exist."""
    parsed = _parsed_shape(text_of(value))
    if parsed is None or len(parsed) > MAX_RANK or (rows and not parsed):
        raise DumpError(f"{where} has the shape {text_of(value)[:80]!r}, which no tensor has", DAMAGED)
    return parsed


@lru_cache(1 << 10)
def _parsed_shape(text: str) -> tuple[int, ...] | None:
    """Return the sizes in a text, None where it holds none: most tensors of a dump have one of a few shapes."""
    try:
        parsed = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return None
    whole = isinstance(parsed, list) and all(type(size) is int and size >= 0 for size in parsed)
    return tuple(parsed) if whole else None


def check_dtype(name: str, where: str) -> str:
    """Return the name of a tensor dtype that this version can read."""
    if name not in DTYPES:
        raise DumpError(f"{where} has the dtype {name[:40]!r}, which this version cannot read", "update probe")
    return name


_OBJECTS = ("engine", "model", "layout")
_OBJECTS_OR_NULL = ("topology", "environment", "sampling", "backends", "batching")
_NUMBERS = {"sampling": ("temperature", "top_p")}
"""Entries of a section that are used as numbers; so are all of ``layout``, which probe writes itself."""


def check_manifest(manifest: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a manifest whose sections, where present, are objects; what a run may not know can be null."""
    sections = {key: manifest.get(key, {}) for key in _OBJECTS}
    sections |= {key: {} if manifest.get(key) is None else manifest[key] for key in _OBJECTS_OR_NULL}
    model = sections["model"]
    if isinstance(model, dict) and model.get("config") is not None:
        sections["model.config"] = model["config"]
        if isinstance(model["config"], dict) and model["config"].get("text_config") is not None:
            sections["model.config.text_config"] = model["config"]["text_config"]
    for key, section in sections.items():
        if not isinstance(section, dict):
            raise DumpError(f"{where} holds {key!r} as something else than an object", DAMAGED)
        for name in section if key == "layout" else _NUMBERS.get(key, ()):
            value = section.get(name)
            if value is not None and not (isinstance(value, int | float) and 0 <= value < 1 << 31):
                raise DumpError(f"{where} holds {value!r:.40} as {key}.{name}, where a number is expected", DAMAGED)
    return manifest
