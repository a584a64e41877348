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
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5d, h5l, h5s

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


Groups = dict[str, h5py.h5g.GroupID]
"""Groups of a file that were reached by hard links only, by path: a file has hundreds of datasets in a few groups."""


def safe_dataset(file: h5py.File, path: str, groups: Groups | None = None) -> h5py.Dataset:
    """Return the dataset at ``path`` after checking links, storage class and size; raise DumpError otherwise.

    ``groups``: what was checked before, extended by what is checked now.
    """
    filename = file.filename
    where = f"{filename}:{path}"
    with reading(where):
        folder, _, name = path.rpartition("/")
        found = _child(_group(file, folder, groups if groups is not None else {}, filename), name, where)
        if not isinstance(found, h5d.DatasetID):
            raise DumpError(f"{where} is not a dataset", DAMAGED)
        _check_storage(found, where, os.stat(filename).st_size)
        return h5py.Dataset(found)


def _group(file: h5py.File, path: str, known: Groups, filename: str) -> h5py.h5g.GroupID:
    """Return the group at ``path``, every link to it checked; the file itself at the empty path."""
    if not path:
        return file.id
    if path not in known:
        folder, _, name = path.rpartition("/")
        where = f"{filename}:{path}"
        known[path] = _child(_group(file, folder, known, filename), name, where)
    return known[path]


def _child(group: h5py.h5g.GroupID, name: str, where: str) -> Any:
    """Return what a hard link of a group leads to; raise DumpError for another link, or none."""
    if not name:
        return group
    links = group.links if isinstance(group, h5py.h5g.GroupID | h5py.h5f.FileID) else None
    if links is None or not links.exists(name.encode()):
        raise DumpError(f"{where} is missing from the file", "it is damaged, or not a probe dump file")
    if links.get_info(name.encode()).type != h5l.TYPE_HARD:
        raise DumpError(f"{where} is a soft or external link", "a dump holds none: do not trust this file")
    return h5py.h5o.open(group, name.encode())


def _check_storage(dataset: h5d.DatasetID, where: str, file_size: int) -> None:
    plist = dataset.get_create_plist()
    layout = plist.get_layout()
    if plist.get_external_count() or layout == h5d.VIRTUAL:
        raise DumpError(f"{where} keeps its bytes in another file", UNTRUSTED)
    if plist.get_nfilters():
        raise DumpError(f"{where} is compressed or filtered", UNTRUSTED)
    if dataset.get_space().get_simple_extent_type() == h5s.NULL:
        raise DumpError(f"{where} has no shape", DAMAGED)
    logical = math.prod(dataset.shape) * dataset.get_type().get_size()
    stored = dataset.get_storage_size()
    if layout == h5d.CONTIGUOUS and stored:
        stored = min(stored, file_size - dataset.get_offset())
    if logical > stored:
        raise DumpError(f"{where} declares {logical} bytes but holds {max(stored, 0)}", "it is damaged or forged")


def check_tensor(dataset: h5py.Dataset, shape: tuple[int, ...], dtype: str) -> None:
    """Check that a tensor's dataset has the element type and count that the index promises."""
    if not type_matches(dataset.id.get_type(), dtype):
        raise DumpError(f"{dataset.file.filename}:{dataset.name} is not stored as {dtype}", DAMAGED)
    if math.prod(shape) != math.prod(dataset.shape):
        where = f"{dataset.file.filename}:{dataset.name}"
        raise DumpError(f"{where} has shape {dataset.shape}, the index says {shape}", DAMAGED)


def read_table(file: h5py.File, path: str, expected: np.dtype) -> np.ndarray:
    """Return a whole table after checking that it has the columns, and their types, of this schema version."""
    dataset = safe_dataset(file, path)
    where = f"{file.filename}:{path}"
    with reading(where):
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
    try:
        parsed = json.loads(value)
    except (ValueError, TypeError, RecursionError):
        parsed = None
    whole = isinstance(parsed, list) and all(type(size) is int and size >= 0 for size in parsed)
    if not whole or len(parsed) > MAX_RANK or (rows and not parsed):
        raise DumpError(f"{where} has the shape {text_of(value)[:80]!r}, which no tensor has", DAMAGED)
    return tuple(parsed)


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
