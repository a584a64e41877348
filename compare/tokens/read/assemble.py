"""The tokens of one or two tables of log-probs as a batch: aligned, inside the mask, finite on both sides."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from probe.compare.align import pack, split
from probe.compare.report.model import counted
from probe.compare.sampling_fits import rows_of, some_of
from probe.compare.tokens.batch import COLUMNS, NotFinite, Origin, TokenBatch, find_not_finite
from probe.compare.tokens.read.pair import Pairs, identities
from probe.compare.tokens.read.table import MAX_TOKENS, Table
from probe.errors import TokensError

Both = tuple[int, int]


@dataclass(frozen=True)
class Reading:
    """One side: a table and which of its columns are the side's log-probs."""

    table: Table
    key: str

    @property
    def values(self) -> np.ndarray:
        """Return the log-probs, [cells]."""
        return self.table.cells[self.key]

    @property
    def name(self) -> str:
        """Return the name of the column in its file."""
        return self.table.names.get(self.key, self.key)

    def origin(self) -> Origin:
        """Return where the log-probs come from."""
        table = self.table
        plain = Origin(str(table.path), table.kind, self.name, sampled_at=table.sampled_at)
        return table.origins.get(self.key, plain)


@dataclass(frozen=True)
class Cells:
    """Cells of one side: ``key`` packs (pair, position), rising; ``at`` numbers the cells of its table."""

    key: np.ndarray
    at: np.ndarray


def assemble(a: Reading, b: Reading, pairs: Pairs) -> TokenBatch:
    """Return the tokens that both sides have inside the mask.

    Where both files have a mask a token must be inside both; where only one has, that one counts. Without any, the
    response of a sequence ends at its last cell in which a side holds a log-prob that is finite and not 0, and before
    :func:`constant_ends`.
    """
    first = cells_of(a.table, pairs, 0)
    sides = [first, first if a.table is b.table else cells_of(b.table, pairs, 1)]
    unmasked = a.table.mask is None and b.table.mask is None
    if unmasked:
        constants = [constant_ends(reading) for reading in (a, b)]
        sides = _without(sides, [at for _, at in constants], a.table is b.table)
    in_a, in_b, key = _common(*(side.key for side in sides))
    at = [sides[0].at[in_a], sides[1].at[in_b]]
    values = [reading.values[cells].astype(np.float64) for reading, cells in zip((a, b), at)]
    notes = [*_table_notes(a.table, b.table), *pairs.notes]
    if unmasked:
        kept = _before_padding(key, *values)
        notes += _unmasked(a, b, constants, int((~kept).sum()))
        key, at, values = key[kept], [cells[kept] for cells in at], [side[kept] for side in values]
    if len(key) > MAX_TOKENS:
        raise TokensError(f"{a.table.path} holds {len(key)} response tokens", f"at most {MAX_TOKENS}: split the file")
    owner, position = split(key)
    start = np.maximum(*pairs.before)
    labels, finite = labels_of(a.table, pairs.rows[0]), np.isfinite(values[0]) & np.isfinite(values[1])
    bad: list[NotFinite] = []
    for side, own in zip("ab", values):
        bad += find_not_finite(side, own, owner, position - start[owner], labels)
    raw = [reading.values[side.at] for reading, side in zip((a, b), sides)]
    lone, lone_last = _lone((a.table, b.table), sides, raw, len(labels))
    scores = [side[finite] for side in values]
    with np.errstate(over="ignore", invalid="ignore"):
        gap = np.abs(np.exp(scores[0]) - np.exp(scores[1]))
    batch = TokenBatch(
        sequence=owner[finite],
        position=(position - start[owner])[finite],
        token=_tokens(a.table, b.table, at)[finite],
        prob_diff=gap,
        a=scores[0],
        b=scores[1],
        labels=labels,
        step=_steps(a.table, b.table, pairs),
        start=_prompt_lengths(a.table, b.table, pairs),
        valid=np.bincount(owner, minlength=len(labels)).astype(np.int64),
        ids=_ids(a.table, b.table, pairs),
        width=max(int(a.table.width[pairs.rows[0]].max()), int(b.table.width[pairs.rows[1]].max())),
        origins=(a.origin(), b.origin()),
        columns=_columns(a.table, b.table, [cells[finite] for cells in at]),
        not_finite=bad,
        lone=lone,
        lone_last=lone_last,
        **_names(a.table, pairs.rows[0]),
        notes=notes,
        left_out=list(pairs.left_out),
    )
    _add_logits(batch, (a, b), [cells[finite] for cells in at])
    return batch


# -- which cells ------------------------------------------------------------------------------------------------------


def cells_of(table: Table, pairs: Pairs, side: int) -> Cells:
    """Return the cells of a table inside its mask (all without one) of sequences that have a partner."""
    rows, before = pairs.rows[side], pairs.before[side]
    at = np.arange(int(table.width.sum())) if table.mask is None else np.flatnonzero(table.mask)
    row, place = table.place(at)
    owner = np.full(len(table), -1, np.int64)
    owner[rows] = np.arange(len(rows))
    pair = owner[row]
    position = place + before[pair]  # of a row without a partner (-1) whatever: it is dropped
    start = np.maximum(*pairs.before)
    kept = (pair >= 0) & (position < pairs.prefix[pair]) & (position >= start[pair])
    if not kept.all():
        at, pair, position = at[kept], pair[kept], position[kept]
    key = pack(pair, position)
    if len(key) and not (key[1:] > key[:-1]).all():
        order = np.argsort(key)
        key, at = key[order], at[order]
    return Cells(key, at)


def constant_ends(reading: Reading) -> tuple[float, np.ndarray]:
    """Return what pads the rows of a file without a mask, and the numbers of these cells, rising; none where none is.

    In rows of one width a number that is not 0 is padding where most rows end in two of it or more, but hold something
    else before: log-probs are not the same that often. (0, NaN and infinity say nothing anyway where both sides do.)
    """
    nothing = 0.0, np.zeros(0, np.int64)
    width = reading.table.width
    if not (width == width[0]).all() or width[0] < 3:
        return nothing
    values = reading.values.reshape(len(width), -1)
    numbers, times = np.unique(values[:, -1], return_counts=True)
    constant = numbers[np.argmax(times)]
    if not np.isfinite(constant) or constant == 0:
        return nothing
    same = np.logical_and.accumulate(values[:, ::-1] == constant, axis=1)
    run = same.sum(axis=1)
    if int(((run >= 2) & (run < width)).sum()) * 2 <= len(width):
        return nothing
    return float(constant), np.flatnonzero(same[:, ::-1])


def _without(sides: list[Cells], padding: list[np.ndarray], alike: bool) -> list[Cells]:
    """Return the cells of both sides that are no padding; ``alike``: they are cells of one table."""
    if alike:
        padding = [np.union1d(*padding)] * 2
    kept = [np.isin(cells.at, at, invert=True) for cells, at in zip(sides, padding)]
    return [Cells(cells.key[keep], cells.at[keep]) for cells, keep in zip(sides, kept)]


def _common(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return where two rising arrays of keys have their common ones, and these."""
    if np.array_equal(a, b):
        everything = np.arange(len(a))
        return everything, everything, a
    key, in_a, in_b = np.intersect1d(a, b, assume_unique=True, return_indices=True)
    return in_a, in_b, key


def _before_padding(key: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Tell which cells lie before the padding: up to the last one of its sequence in which a side says something."""
    owner, position = split(key)
    last = _ends(key[_says(a) | _says(b)], int(owner.max(initial=-1)) + 1)
    return np.asarray(position <= last[owner])


def _lone(tables: tuple[Table, Table], sides: list[Cells], values: list[np.ndarray], count: int) -> tuple[Both, Both]:
    """Return (tokens that only a, only b has) and (sequences whose last token is one of these).

    A token is one inside the mask; without any mask, one whose log-prob is finite and not 0. Nothing where one of two
    files has a mask: what lies outside it is padding in the other as likely as not.
    """
    a, b = tables
    if a is b or (a.mask is None) != (b.mask is None):
        return (0, 0), (0, 0)
    lone, last = [], []
    for side, other, own in ((0, 1, values[0]), (1, 0, values[1])):
        mine = sides[side].key
        only = mine[~np.isin(mine, sides[other].key) & (_says(own) | (a.mask is not None))]
        lone.append(len(only))
        last.append(int((_ends(only, count) > _ends(sides[other].key, count)).sum()))
    return (lone[0], lone[1]), (last[0], last[1])


def _says(values: np.ndarray) -> np.ndarray:
    return np.isfinite(values) & (values != 0)


def _ends(key: np.ndarray, count: int) -> np.ndarray:
    """Return the last position of each of ``count`` pairs among rising keys, -1 without one, int64 [count]."""
    ends = np.full(count, -1, np.int64)
    owner, position = split(key)
    ends[owner] = position  # in rising order: the last one stays
    return ends


# -- what is said of them ---------------------------------------------------------------------------------------------


def _unmasked(a: Reading, b: Reading, constants: list[tuple[float, np.ndarray]], dropped: int) -> list[str]:
    """Say what was taken for padding: ``constants`` of each side, and ``dropped`` cells in which both say nothing."""
    files = str(a.table.path) if a.table is b.table else f"{a.table.path} and {b.table.path}"
    text = f"no mask in {files}: a response ends at the last log-prob that is finite and not 0 on a side"
    found = [
        f"most rows of {side.name} in {side.table.path} end in several {constant:g}: {counted(len(at), 'cell')} of it "
        "at the ends of rows count as padding"
        for side, (constant, at) in zip((a, b), constants)
        if len(at)
    ]
    return [f"{text}; {counted(dropped, 'cell')} after it count as padding", *found]


def _table_notes(a: Table, b: Table) -> list[str]:
    notes = list(dict.fromkeys([*a.notes, *b.notes]))
    if a is not b and (a.mask is None) != (b.mask is None):
        masked = a if b.mask is None else b
        notes.append(f"only {masked.path} has a mask ({masked.masked_by}): it counts for both files")
    return notes


def labels_of(table: Table, rows: np.ndarray) -> list[str]:
    """Return the names of some rows: the uid, with the sample number where several share it, else the row's number."""
    found = identities(table)
    shared = Counter((step, uid) for step, uid, _ in found)
    several = table.step is not None and len(set(table.step.tolist())) > 1
    labels = []
    for row in rows.tolist():
        step, uid, sample = found[row]
        name = (f"{uid}.s{sample}" if shared[step, uid] > 1 else uid) if uid else f"s{row}"
        labels.append(f"step {step} {name}" if several else name)
    times = Counter(labels)
    return [f"{label} (row {row})" if times[label] > 1 else label for label, row in zip(labels, rows.tolist())]


def _names(table: Table, rows: np.ndarray) -> dict[str, Any]:
    """Return the uids and sample numbers of a file's rows as the fields of a batch."""
    if table.kind == "dump" or table.uid is None or not all(table.uid):
        return {}
    samples = None if table.sample is None else np.asarray(table.sample[rows])
    return {"uids": [table.uid[row] for row in rows.tolist()], "samples": samples}


def _steps(a: Table, b: Table, pairs: Pairs) -> np.ndarray:
    for table, rows in zip((a, b), pairs.rows):
        if table.step is not None:
            return np.asarray(table.step[rows])
    return np.full(len(pairs.prefix), -1, np.int64)


def _known(a: Table, b: Table, pairs: Pairs) -> tuple[Table, np.ndarray]:
    """Return the table that knows most of the ids, and its rows."""
    best = max((a.whole, a.token is not None, True), (b.whole, b.token is not None, False))
    return (a, pairs.rows[0]) if best[2] else (b, pairs.rows[1])


def _ids(a: Table, b: Table, pairs: Pairs) -> list[np.ndarray]:
    table, rows = _known(a, b, pairs)
    return [table.ids[row] for row in rows.tolist()]


def _prompt_lengths(a: Table, b: Table, pairs: Pairs) -> np.ndarray:
    table, rows = _known(a, b, pairs)
    return np.maximum(np.maximum(*pairs.before), table.start[rows])


def _tokens(a: Table, b: Table, at: list[np.ndarray]) -> np.ndarray:
    for table, cells in zip((a, b), at):
        if table.token is not None:
            return table.token[cells].astype(np.int64)
    return np.full(len(at[0]), -1, np.int64)


def _columns(a: Table, b: Table, at: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Return the columns of the PPO update; of two files that have one, the actor's counts."""
    found: dict[str, np.ndarray] = {}
    for table, cells in ((a, at[0]), (b, at[1])):
        found |= {c: table.cells[c][cells].astype(np.float64) for c in COLUMNS if c in table.cells}
    return found


def _add_logits(batch: TokenBatch, sides: tuple[Reading, Reading], at: list[np.ndarray]) -> None:
    """Add the logits of some of the tokens: the actor's where there are any.

    ``at``: for each side the cells of the batch's tokens in its table, int64 [N]. In a file with both sides logits are
    the actor's; row r of a sequence's logits scores its response token r.
    """
    for number in (1, 0):
        table = sides[number].table
        known = table.logits is not None and len(batch) > 0 and table.token is not None
        if not known or table.logits is None:
            continue
        if table.logits.shape[:2] != (len(table), int(table.width[0])) or int(table.width.min()) != table.width[0]:
            batch.notes.append(f"the logits of {table.path} have the shape {table.logits.shape}: not used")
            continue
        picked = some_of(len(batch))
        row, place = table.place(np.sort(at[number][picked]))
        picked = picked[np.argsort(at[number][picked])]
        ids = batch.token[picked]
        inside = (ids >= 0) & (ids < table.logits.shape[2])
        picked, ids = picked[inside], ids[inside]
        logits = table.logits.read(row[inside], place[inside])
        finite = np.isfinite(logits).all(axis=1)
        scores = batch.b if number else batch.a
        if finite.any() and scores is not None:
            batch.rows_of, batch.rows_at = "ab"[number], picked[finite]
            batch.rows = rows_of(logits[finite], ids[finite], scores[picked][finite], table.logits.dtype)
            return
