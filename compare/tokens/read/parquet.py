"""Columns of a parquet file with one row per sequence; needs pyarrow, which is imported when such a file is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from probe.compare.tokens.read.names import FILE_COLUMNS, ID_NAMES, LOGITS, resolve
from probe.compare.tokens.read.table import MAX_CELLS, Ragged, RawFile
from probe.errors import TokensError, first_line


def read_parquet(path: Path, trust: bool) -> RawFile:
    """Read a parquet file whose every row is one sequence: lists of one value per token, or one value."""
    try:
        import pyarrow as arrow
        from pyarrow import compute, parquet
    except ImportError:
        raise TokensError(f"{path} is a parquet file, which needs pyarrow", "pip install pyarrow") from None
    try:
        file = parquet.ParquetFile(path)
        known = file.schema_arrow.names
        wanted = {column: name for column, name in resolve(known).found.items() if FILE_COLUMNS[column].lies != LOGITS}
        _refuse_huge(path, file.metadata)
        table = file.read(columns=list(wanted.values()))
        arrays = {name: table.column(name).combine_chunks() for name in wanted.values()}
        columns = {name: _column(arrow.types, compute, array, path, name) for name, array in arrays.items()}
    except (arrow.ArrowException, OSError, ValueError, MemoryError) as error:
        raise TokensError(f"{path} cannot be read as a parquet file ({first_line(error)})", "write it again") from None
    return RawFile(path, "parquet", columns or dict.fromkeys(known, np.zeros(0)))


def _refuse_huge(path: Path, metadata: Any) -> None:
    """Refuse a file whose footer announces more values of one column than can be held."""
    counts: dict[str, int] = {}
    for group in range(metadata.num_row_groups):
        for number in range(metadata.num_columns):
            column = metadata.row_group(group).column(number)
            counts[column.path_in_schema] = counts.get(column.path_in_schema, 0) + column.num_values
    for name, count in counts.items():
        if count > MAX_CELLS and name.partition(".")[0] in {n for c in FILE_COLUMNS.values() for n in c.names}:
            raise TokensError(f"{name} of {path} has {count} values", f"at most {MAX_CELLS} can be read: split it")


def _column(types: Any, compute: Any, array: Any, path: Path, column: str) -> Ragged | np.ndarray:
    name = f"{column} of {path}"
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if types.is_string(array.type) or types.is_large_string(array.type):
        return np.array([value or "" for value in array.to_pylist()], dtype=str)
    if not (types.is_list(array.type) or types.is_large_list(array.type) or types.is_fixed_size_list(array.type)):
        return _numbers(types, array, name)
    if array.null_count:
        row = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
        raise TokensError(f"{name} has no list in row {row}", "give one value per response token in each row")
    if types.is_nested(array.type.value_type) and column in ID_NAMES:
        return np.full(len(array), "messages")
    lengths = compute.list_value_length(array).to_numpy(zero_copy_only=False).astype(np.int64)
    return Ragged(_numbers(types, array.flatten(), name), lengths)


def _numbers(types: Any, array: Any, name: str) -> np.ndarray:
    """Return an arrow array of numbers; a null is NaN."""
    if not (types.is_floating(array.type) or types.is_integer(array.type) or types.is_boolean(array.type)):
        raise TokensError(f"{name} holds values of the type {array.type}", "it must hold numbers")
    values = np.asarray(array.to_numpy(zero_copy_only=False))
    return values.astype(np.float64) if values.dtype.kind == "O" else values  # booleans beside a null
