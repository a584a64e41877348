"""One file of log-probs as a table: a row per sequence, a cell per response token, whatever the file's format was."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from probe.compare.report.model import counted
from probe.compare.tokens.batch import COLUMNS, Origin
from probe.compare.tokens.read.names import CELL, FILE_COLUMNS, IDS, PER_ROW, ROW, SCORES, resolve
from probe.errors import TokensError
from probe.sampling import Semantics

MAX_CELLS = 2**27
"""Cells of one column at most, padding included: 1 GB in float64."""
MAX_TOKENS = 2**25
"""Response tokens at most: with what is computed of each they fill some 8 GB."""


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths, one after the other: values [sum of lengths], lengths int64 [rows]."""

    values: np.ndarray
    lengths: np.ndarray

    @cached_property
    def starts(self) -> np.ndarray:
        """Return where each row begins in ``values``, int64 [rows]."""
        return np.cumsum(self.lengths) - self.lengths


@dataclass(frozen=True)
class Logits:
    """Logits of a file that stay there: ``shape`` (sequences, width, vocabulary), ``dtype`` their name on disk.

    ``read`` takes sequence and place of n response tokens, int64 [n] each in rising order, and returns the vectors that
    score them, float64 [n, vocabulary].
    """

    shape: tuple[int, int, int]
    dtype: str
    read: Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class RawFile:
    """What a reader took from a file: under the file's own names, Ragged rows or arrays of one value per sequence."""

    path: Path
    kind: str
    columns: Mapping[str, Ragged | np.ndarray]
    logits: Logits | None = None
    notes: tuple[str, ...] = ()


@dataclass
class Table:
    """The sequences of one file: ``width`` int64 [S] counts the cells of each, padding included.

    ``cells``: the columns of SCORES and COLUMNS that there are, flat [cells], in the file's dtype; ``mask`` bool
    [cells] says which are response tokens, None where nothing does, ``masked_by`` is its name; ``token`` [cells] are
    ids. ``prompts``: ids of each prompt without padding, None where unknown; ``whole``: whether ids begin where the
    sequence does. ``lengths`` int64 [S] counts the response tokens before the padding, None where unknown. ``names``:
    column -> name in the file. ``uid``, ``sample`` and ``step`` are None where the file has none. ``sampled_at``:
    the distribution that tokens were drawn from; ``origins``: where a column is from, if the file says more than that.
    ``per_row``: nothing says how long the sequences are, and each has one cell, which stands for all its tokens.
    """

    path: Path
    kind: str
    width: np.ndarray
    cells: dict[str, np.ndarray]
    names: dict[str, str]
    mask: np.ndarray | None = None
    masked_by: str = ""
    token: np.ndarray | None = None
    prompts: list[np.ndarray] | None = None
    whole: bool = False
    lengths: np.ndarray | None = None
    uid: list[str] | None = None
    sample: np.ndarray | None = None
    step: np.ndarray | None = None
    origins: dict[str, Origin] = field(default_factory=dict)
    sampled_at: Semantics | None = None
    logits: Logits | None = None
    notes: list[str] = field(default_factory=list)
    per_row: bool = False

    def __len__(self) -> int:
        return len(self.width)

    @cached_property
    def starts(self) -> np.ndarray:
        """Return the number of each sequence's first cell, int64 [S]."""
        return np.cumsum(self.width) - self.width

    def place(self, cells: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (sequence, place in its response) of cells in rising order, int64 each."""
        row = np.searchsorted(self.starts + self.width, cells, side="right")
        return row, cells - self.starts[row]

    @cached_property
    def start(self) -> np.ndarray:
        """Return the length of each prompt, int64 [S], 0 where unknown."""
        return np.array([len(ids) for ids in self.prompts or ()] or [0] * len(self), np.int64)

    @cached_property
    def ids(self) -> list[np.ndarray]:
        """Return the known ids of each sequence without padding, the prompt's first; empty where unknown."""
        if self.token is None:
            return [np.zeros(0, np.int64)] * len(self)
        ends = self.starts + (self.width if self.lengths is None else self.lengths)
        responses = [self.token[start:end].astype(np.int64) for start, end in zip(self.starts, ends)]
        if self.prompts is None:
            return responses
        return [np.concatenate(pair) for pair in zip(self.prompts, responses)]


def rows_of_matrix(values: np.ndarray) -> Ragged:
    """Return a matrix [rows, width] as rows of one length."""
    return Ragged(values.reshape(-1), np.full(len(values), values.shape[1], np.int64))


def make_table(raw: RawFile, *, scores: bool = True) -> Table:
    """Return the table of what a reader took from a file; raise TokensError where its columns do not fit together.

    Without ``scores`` the file needs no log-probs, but columns of the PPO update, if only one value per sequence.
    """
    names = resolve(raw.columns)
    build = _Builder(raw, names.found, scores)
    table = build.table()
    table.notes[:0] = raw.notes
    if names.spare:
        table.notes.append(f"{raw.path} also holds {', '.join(names.spare)}, which is not used")
    return table


class _Builder:
    """Put a table together, column by column, and say of the first that does not fit what is wrong."""

    def __init__(self, raw: RawFile, found: Mapping[str, str], scores: bool) -> None:
        self.raw, self.found = raw, dict(found)
        self.notes: list[str] = []
        for column in IDS:
            if column in self.found and _values(raw.columns[self.found[column]]).dtype.kind in "US":
                self.notes.append(f"{self._name(column)} is text, not token ids, and is not used")
                del self.found[column]
        first = next((c for c in self.found if FILE_COLUMNS[c].lies == CELL and self._is_ragged(c)), None)
        single = next((c for c in self.found if c in PER_ROW and self._one_axis(c)), None)
        self.per_row = not scores and first is None and single is not None
        if self.per_row and single is not None:
            self.first, self.width = single, np.ones(len(_values(raw.columns[self.found[single]])), np.int64)
            self.found = {c: n for c, n in self.found.items() if c in PER_ROW or FILE_COLUMNS[c].lies == ROW}
        elif first is not None:
            self.first, self.width = first, self._ragged(first).lengths
        else:
            raise self._nothing(scores)

    def _one_axis(self, column: str) -> bool:
        value = self.raw.columns[self.found[column]]
        return not isinstance(value, Ragged) and value.ndim == 1

    def _nothing(self, scores: bool) -> TokensError:
        """Return what to say of a file without a column of one value per token."""
        wanted = SCORES if scores else COLUMNS
        for column in (c for c in wanted if c in self.found):
            values = _values(self.raw.columns[self.found[column]])
            if values.dtype.kind in "fiub":
                message = f"{self._name(column)} has the shape {values.shape}"
                return TokensError(message, "it must be [sequences, tokens]")
        known = ", ".join(sorted(self.raw.columns)) or "nothing that this tool knows"
        what = "log-probs" if scores else "column of the PPO update"
        message = f"{self.raw.path} holds no {what} (it has {known})"
        return TokensError(message, f"name {'them' if scores else 'it'} {', '.join(wanted)}")

    def table(self) -> Table:
        """Return the table."""
        if not len(self.width):
            raise TokensError(f"{self.raw.path} holds no sequence", "check how it was written")
        cells = {c: self._cells(c) for c in self.found if c in (*SCORES, *PER_ROW)}
        table = Table(self.raw.path, self.raw.kind, self.width, cells, self.found, notes=self.notes)
        table.logits, table.per_row = self.raw.logits, self.per_row
        self._set_mask(table)
        self._set_ids(table)
        if "uid" in self.found:
            table.uid = [u.decode(errors="replace") if isinstance(u, bytes) else str(u) for u in self._per_row("uid")]
        for name in ("sample", "step"):
            if name in self.found:
                setattr(table, name, self._per_row(name).astype(np.int64))
        table.sampled_at = self._sampled_at()
        return table

    def _set_mask(self, table: Table) -> None:
        tail, ends = None, None
        if "attention_mask" in self.found:
            tail = self._tail("attention_mask")
            ends = _last(tail, table)
        if "response_mask" in self.found:
            table.mask, table.masked_by = self._cells("response_mask"), self.found["response_mask"]
        elif tail is not None:
            table.mask, table.masked_by = tail, "attention_mask"
            table.notes.append(f"{table.path} has no response_mask: attention_mask says what is padding")
        if table.mask is not None:  # a mask that reaches beyond the attention's end is believed
            table.lengths = _last(table.mask, table) if ends is None else np.maximum(ends, _last(table.mask, table))

    def _set_ids(self, table: Table) -> None:
        if "responses" in self.found:
            table.token = self._cells("responses")
        elif "input_ids" in self.found:
            table.token = self._tail("input_ids")
        heads = None
        if "prompts" in self.found:
            heads = self._ragged("prompts")
            self._same_rows("prompts", heads)
        elif "input_ids" in self.found:
            heads = self._heads("input_ids")
        if heads is None or table.token is None:
            return
        keep = self._heads("attention_mask") if "attention_mask" in self.found else None
        parts = np.split(heads.values.astype(np.int64), heads.starts[1:])
        if keep is not None and np.array_equal(keep.lengths, heads.lengths):
            parts = [ids[kept] for ids, kept in zip(parts, np.split(keep.values, keep.starts[1:]))]
        table.prompts, table.whole = parts, True

    def _sampled_at(self) -> Semantics | None:
        found: dict[str, float] = {}
        for name in ("temperature", "top_p"):
            if name not in self.found:
                continue
            values = np.unique(self._per_row(name))
            if len(values) == 1 and values[0] > 0 and np.isfinite(values[0]):
                found[name] = float(values[0])
            else:
                self.notes.append(f"{self._name(name)} is not one positive number and is not used")
        return Semantics(**found) if found else None

    # -- columns ------------------------------------------------------------------------------------------------------

    def _name(self, column: str) -> str:
        return f"{self.found[column]} of {self.raw.path}"

    def _is_ragged(self, column: str) -> bool:
        return isinstance(self.raw.columns[self.found[column]], Ragged)

    def _ragged(self, column: str) -> Ragged:
        value = self.raw.columns[self.found[column]]
        if not isinstance(value, Ragged):
            raise TokensError(f"{self._name(column)} holds no value per token", "it must be [sequences, tokens]")
        return Ragged(_as_kind(value.values, FILE_COLUMNS[column].kind, self._name(column)), value.lengths)

    def _cells(self, column: str) -> np.ndarray:
        if not self._is_ragged(column) and column in PER_ROW:
            return np.repeat(self._per_row(column), self.width)
        rows = self._ragged(column)
        self._same_rows(column, rows)
        if not np.array_equal(rows.lengths, self.width):
            row = int(np.flatnonzero(rows.lengths != self.width)[0])
            said = f"{rows.lengths[row]} values in sequence {row}, {self.found[self.first]} {self.width[row]}"
            raise TokensError(f"{self._name(column)} has {said}", "both must have one per response token")
        return rows.values

    def _same_rows(self, column: str, rows: Ragged) -> None:
        if len(rows.lengths) != len(self.width):
            said = f"{counted(len(rows.lengths), 'sequence')}, {self.found[self.first]} {len(self.width)}"
            raise TokensError(f"{self._name(column)} has {said}", "both must have the same ones")

    def _cut(self, column: str) -> tuple[Ragged, np.ndarray]:
        """Return a column of whole sequences, and how many of each row's values lie before the response."""
        rows = self._ragged(column)
        self._same_rows(column, rows)
        before = rows.lengths - self.width
        if before.min() < 0:
            row = int(np.argmin(before))
            said = f"{rows.lengths[row]} values in sequence {row}, {self.found[self.first]} {self.width[row]}"
            raise TokensError(f"{self._name(column)} has {said}", "it must cover the response")
        return rows, before

    def _tail(self, column: str) -> np.ndarray:
        rows, before = self._cut(column)
        if not before.any():
            return rows.values
        return rows.values[np.arange(self.width.sum()) + np.repeat(np.cumsum(before), self.width)]

    def _heads(self, column: str) -> Ragged:
        rows, before = self._cut(column)
        skipped = np.cumsum(self.width) - self.width
        return Ragged(rows.values[np.arange(before.sum()) + np.repeat(skipped, before)], before)

    def _per_row(self, column: str) -> np.ndarray:
        value = self.raw.columns[self.found[column]]
        values = value.values if isinstance(value, Ragged) and (value.lengths == 1).all() else value
        if isinstance(values, Ragged) or values.shape not in ((), (len(self.width),)):
            raise TokensError(f"{self._name(column)} does not hold one value per sequence", "there are as many of both")
        values = _as_kind(values, FILE_COLUMNS[column].kind, self._name(column))
        return np.broadcast_to(values, (len(self.width),))


def _values(column: Ragged | np.ndarray) -> np.ndarray:
    return column.values if isinstance(column, Ragged) else column


def _last(mask: np.ndarray, table: Table) -> np.ndarray:
    """Return for each sequence one more than the place of its last cell inside a mask, int64 [S]."""
    ends = np.zeros(len(table), np.int64)
    row, place = table.place(np.flatnonzero(mask))
    ends[row] = place + 1  # in rising order: the last one stays
    return ends


def _as_kind(values: np.ndarray, kind: str, name: str) -> np.ndarray:
    """Return values as numbers of a kind (see names.Column) or raise TokensError."""
    if kind == "text":
        return values
    if values.dtype.kind not in "fiub":
        raise TokensError(f"{name} holds {values.dtype.name} values", "it must hold numbers")
    if kind == "float":
        return values if values.dtype.kind == "f" else values.astype(np.float64)
    if values.dtype.kind == "f" and not (np.isfinite(values).all() and (np.floor(values) == values).all()):
        what = "a mask must hold 0 and 1" if kind == "bool" else "they must be whole numbers"
        raise TokensError(f"{name} holds values that are not whole numbers", what)
    if kind == "int" and values.size and max(-float(values.min()), float(values.max())) >= 2**62:
        raise TokensError(f"{name} holds {values.max()}", "it must hold ids and numbers below 2^62")
    return values != 0 if kind == "bool" else values
