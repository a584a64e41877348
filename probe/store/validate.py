"""Refuse what a hostile or damaged HDF5 file could make a reader do, before any byte of it is read.

HDF5 follows external links and virtual datasets silently, returns another file's bytes through external storage, and
believes a small file that declares gigabytes. A dump uses none of these, so anything but a hard link to a plain,
fully stored dataset of a known type is refused.
"""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
from h5py import h5d, h5l

from probe.errors import DumpError
from probe.store.dtypes import type_matches

MAX_RATIO = 1000
"""Logical over stored bytes at most; a dump is never compressed at capture, an offline repack stays far below."""


def open_file(path: Path) -> h5py.File:
    """Open an HDF5 file for reading or raise DumpError with the reason."""
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise DumpError(
            f"{path} is not a readable HDF5 file ({str(error).splitlines()[0]})",
            "it is truncated, damaged or from another program: dump again",
        ) from None


def safe_dataset(file: h5py.File, path: str) -> h5py.Dataset:
    """Return the dataset at ``path`` after checking links, storage class and size; raise DumpError otherwise."""
    where = f"{file.filename}:{path}"
    group = file.id
    parts = [part for part in path.split("/") if part]
    for part in parts:
        name = part.encode()
        if not isinstance(group, h5py.h5g.GroupID | h5py.h5f.FileID) or not group.links.exists(name):
            raise DumpError(f"{where} is missing from the file", "the dump is damaged: dump again")
        if group.links.get_info(name).type != h5l.TYPE_HARD:
            raise DumpError(f"{where} is a soft or external link", "a dump holds none: do not trust this file")
        group = h5py.h5o.open(group, name)
    if not isinstance(group, h5d.DatasetID):
        raise DumpError(f"{where} is not a dataset", "the dump is damaged: dump again")
    _check_storage(group, where)
    return h5py.Dataset(group)


def _check_storage(dataset: h5d.DatasetID, where: str) -> None:
    plist = dataset.get_create_plist()
    if plist.get_external_count() or plist.get_layout() == h5d.VIRTUAL:
        raise DumpError(f"{where} keeps its bytes in another file", "a dump never does: do not trust this file")
    logical = int(np.prod(dataset.shape, dtype=np.int64)) * dataset.get_type().get_size()
    stored = dataset.get_storage_size()
    if logical > MAX_RATIO * max(stored, 1):
        raise DumpError(f"{where} declares {logical} bytes but holds {stored}", "the dump is damaged or forged")


def check_tensor(dataset: h5py.Dataset, shape: tuple[int, ...], dtype: str) -> None:
    """Check that a tensor's dataset has the element type and count that the index promises."""
    if not type_matches(dataset.id.get_type(), dtype):
        raise DumpError(f"{dataset.file.filename}:{dataset.name} is not stored as {dtype}", "the dump is damaged")
    if int(np.prod(shape, dtype=np.int64)) != int(np.prod(dataset.shape, dtype=np.int64)):
        raise DumpError(
            f"{dataset.file.filename}:{dataset.name} has shape {dataset.shape}, the index says {shape}",
            "the dump is damaged",
        )


def check_table(dataset: h5py.Dataset, expected: np.dtype) -> None:
    """Check that a table has the columns of this schema version."""
    if dataset.dtype.names != expected.names:
        raise DumpError(
            f"{dataset.file.filename}:{dataset.name} has columns {dataset.dtype.names}, expected {expected.names}",
            "it was written by another version or another program",
        )
