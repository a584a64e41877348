"""Columns of a numpy archive, without pickle, and logits of it row by row."""

from __future__ import annotations

import contextlib
import math
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy

from probe.compare.tokens.read.names import FILE_COLUMNS, LOGITS, resolve
from probe.compare.tokens.read.table import MAX_CELLS, Logits, Ragged, RawFile, rows_of_matrix
from probe.errors import TokensError, first_line

_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
_BROKEN = (OSError, ValueError, KeyError, EOFError, RuntimeError, NotImplementedError, zipfile.BadZipFile, zlib.error)


def read_npz(path: Path, trust: bool) -> RawFile:
    """Read the columns that a comparison needs of an npz file: arrays [sequences, tokens], or of one value each."""
    columns: dict[str, Ragged | np.ndarray] = {}
    logits = None
    with _reading(path), zipfile.ZipFile(path) as archive:
        members = {name.removesuffix(".npy"): name for name in archive.namelist() if name.endswith(".npy")}
        for column, name in resolve(members).found.items():
            with archive.open(members[name]) as stream:
                shape, fortran, dtype = _header(stream, f"{name} of {path}")
                if FILE_COLUMNS[column].lies == LOGITS:
                    logits = _logits(path, members[name], shape, fortran, dtype)
                    continue
            with archive.open(members[name]) as stream:
                values = npy.read_array(stream, allow_pickle=False)
            columns[name] = as_column(values, f"{name} of {path}")
    return RawFile(path, "npz", columns or dict.fromkeys(members, np.zeros(0)), logits)


def as_column(values: np.ndarray, name: str) -> Ragged | np.ndarray:
    """Return an array as a column: rows of one length where it is a matrix; TokensError where it has more axes."""
    if values.ndim > 2:
        raise TokensError(f"{name} has the shape {values.shape}", "it must be [sequences, tokens]")
    return rows_of_matrix(values) if values.ndim == 2 else values


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except _BROKEN as error:
        raise TokensError(f"{path} cannot be read as an npz file ({first_line(error)})", "write it again") from None


def _header(stream: IO[bytes], name: str) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Return shape, order and dtype of an array and leave the stream at its values; refuse what must not be read."""
    version = npy.read_magic(stream)
    if version not in _HEADERS:
        raise ValueError(f"{name} has the array format {version}")
    shape, fortran, dtype = _HEADERS[version](stream)
    if dtype.hasobject:
        raise TokensError(
            f"{name} is an array of Python objects, which would have to be unpickled",
            "save it as numbers (ragged rows padded, with a response_mask) or, for a uid, with .astype(str)",
        )
    if math.prod(shape) * dtype.itemsize > 8 * MAX_CELLS and len(shape) < 3:
        raise TokensError(f"{name} has {math.prod(shape) * dtype.itemsize} bytes", "split the file")
    if math.prod(shape[:2]) > MAX_CELLS:
        raise TokensError(f"{name} has {math.prod(shape[:2])} cells", f"at most {MAX_CELLS} can be read: split it")
    return shape, fortran, dtype


def _logits(path: Path, member: str, shape: tuple[int, ...], fortran: bool, dtype: np.dtype) -> Logits | None:
    """Return logits that are read when asked for; None for an array that is none or cannot be read in order."""
    if len(shape) != 3 or fortran or dtype.kind != "f":
        return None

    def read(sequence: np.ndarray, place: np.ndarray) -> np.ndarray:
        found = np.zeros((len(sequence), shape[2]))
        size = shape[2] * dtype.itemsize
        with _reading(path), zipfile.ZipFile(path) as archive, archive.open(member) as stream:
            _header(stream, str(path))
            begin = stream.tell()
            for number, row in enumerate(sequence * shape[1] + place):
                stream.seek(begin + int(row) * size)
                found[number] = np.frombuffer(stream.read(size), dtype)
        return found

    return Logits((shape[0], shape[1], shape[2]), dtype.name, read)
