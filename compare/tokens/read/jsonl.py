"""Columns of a file with one JSON object per sequence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from probe.compare.tokens.read.names import FILE_COLUMNS, ID_NAMES, LOGITS
from probe.compare.tokens.read.table import MAX_CELLS, Ragged, RawFile
from probe.errors import TokensError

Row = dict[str, np.ndarray]

KNOWN = {name: entry for entry in FILE_COLUMNS.values() for name in entry.names if entry.lies != LOGITS}
MISSING = {"text": "", "float": np.nan, "int": -1, "bool": 0}
"""What one value per sequence is where a line does not give it."""
FIX = 'write {"rollout_log_probs": [...], "old_log_probs": [...], ...} on each line'


def read_jsonl(path: Path, trust: bool) -> RawFile:
    """Read a file whose every line is an object of one sequence: lists of one value per token, or one value."""
    lines: list[tuple[int, Row]] = []
    others: set[str] = set()
    cells = 0
    try:
        with path.open(encoding="utf-8-sig") as text:
            for number, line in enumerate(text, 1):
                if not line.strip():
                    continue
                row = _parse(path, number, line)
                others |= row.keys() - KNOWN.keys()
                lines.append((number, _arrays(path, number, row)))
                cells += sum(array.size for array in lines[-1][1].values())
                if cells > MAX_CELLS:
                    raise TokensError(f"{path} holds more than {MAX_CELLS} values", "split the file")
    except UnicodeDecodeError as error:
        raise TokensError(f"{path} is not UTF-8 text ({error.reason})", FIX) from None
    names = dict.fromkeys(name for _, row in lines for name in row)
    columns: dict[str, Ragged | np.ndarray] = {name: _column(path, name, lines) for name in names}
    return RawFile(path, "jsonl", columns or dict.fromkeys(others, np.zeros(0)))


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "a value that cannot be read"
        raise TokensError(f"line {number} of {path} is not JSON ({reason})", FIX) from None
    if not isinstance(value, dict):
        raise TokensError(f"line {number} of {path} is not an object", FIX)
    return value


def _arrays(path: Path, number: int, row: dict[str, Any]) -> Row:
    """Return the known values of a line as arrays: a list has one axis, one value none."""
    return {
        name: _array(value, f"{name} in line {number} of {path}", ids=name in ID_NAMES)
        for name, value in row.items()
        if name in KNOWN and value is not None
    }


def _array(value: Any, name: str, ids: bool) -> np.ndarray:
    try:
        array = np.array(value)
        if array.dtype.kind == "O":  # null is a value that is not there
            array = np.array(value, np.float64)
    except (ValueError, TypeError, OverflowError):
        array = np.zeros((0, 0))
    wrong = array.ndim > 1 or (array.ndim and array.dtype.kind not in "fiub")
    if wrong and ids:
        return np.array("text or messages")
    if wrong:
        raise TokensError(f"{name} is not a list of numbers", "a line holds one sequence, one number per token")
    return array


def _column(path: Path, name: str, lines: list[tuple[int, Row]]) -> Ragged | np.ndarray:
    entry = KNOWN[name]
    values = [row.get(name) for _, row in lines]
    if not any(value is not None and value.ndim for value in values):
        filled = [MISSING[entry.kind] if value is None else value.item() for value in values]
        return np.array([str(v) for v in filled]) if entry.kind == "text" else np.array(filled)
    if any(value is not None and not value.ndim for value in values):
        number = next(n for (n, _), value in zip(lines, values) if value is not None and not value.ndim)
        raise TokensError(f"{name} in line {number} of {path} is one value, in other lines it is a list", FIX)
    if any(value is None for value in values):
        number = next(n for (n, _), value in zip(lines, values) if value is None)
        raise TokensError(f"line {number} of {path} has no {name}, which other lines have", "give it in each line")
    rows = [value for value in values if value is not None]
    return Ragged(np.concatenate(rows), np.array([len(row) for row in rows], np.int64))
