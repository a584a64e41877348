"""Join what the ranks of a run stored of one tensor: which rows of which file make up the whole.

Ranks that differ in anything but their tensor-parallel (TP) number hold other rows. TP ranks of one such group hold the
same rows (columns of them, or terms of a sum, or copies) or, under sequence parallelism, other rows. What tells rows
apart is (sequence, position, call) and, where one call has a token twice, the order in which they were stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from probe.errors import DumpError
from probe.store.places import Place, absent_ranks
from probe.store.schema import CHECKSUM, COLUMNS, PARTIAL, ROW, WHOLE
from probe.store.validate import DAMAGED


@dataclass(frozen=True)
class Piece:
    """What one file holds of a tensor: its rows, the dtype and shape of one row, how it is a shard."""

    place: Place
    shard: str
    rows: np.ndarray
    dtype: str
    features: tuple[int, ...]


@dataclass
class Copy:
    """Rows that another rank stored again: the pieces and rows they are, and which rows of the whole they repeat.

    ``take`` has, per TP shard, row numbers in that shard's pieces; for checksums it is one array of rows of ``piece``.
    """

    place: Place
    reference: Place
    take: list[np.ndarray]
    at: np.ndarray
    piece: int | None = None


@dataclass
class Plan:
    """How a whole tensor is read.

    ``shards``: per TP shard the numbers of its pieces, whose rows are read one after another; ``take``: which of those
    rows, in the order of ``rows`` (None: all of them as they are). ``left_out`` counts rows that some TP rank lacks, or
    of which it stores another shape; ``lacking`` says why.
    """

    shards: list[list[int]]
    take: list[np.ndarray | None]
    rows: np.ndarray
    copies: list[Copy] = field(default_factory=list)
    left_out: int = 0
    lacking: str = ""


@dataclass
class _Group:
    """The tensor of one group of TP ranks, its rows counted from 0: like a plan, with row numbers of its own pieces."""

    shards: list[list[int]]
    take: list[np.ndarray]
    rows: np.ndarray
    copies: list[Copy]
    left_out: int = 0
    lacking: str = ""
    kind: tuple[object, ...] = ()


def plan(pieces: Sequence[Piece], tp: int | None, name: str) -> Plan:
    """Return how ``pieces``, each of another file, make up the tensor ``name``.

    ``tp`` is the number of TP ranks, None where no file states it. Raises DumpError when TP ranks disagree about how
    the tensor is shared.
    """
    size = tp or 1 + max(piece.place.tp for piece in pieces)
    numbers: dict[tuple[object, ...], list[int]] = {}
    for number in sorted(range(len(pieces)), key=lambda n: pieces[n].place.tp):
        numbers.setdefault(pieces[number].place.group, []).append(number)
    in_order = sorted(numbers.values(), key=min)
    groups = [_join_group(pieces, members, size, name) for members in in_order]
    usable = [group for group in groups if group.shards]
    reasons = [group.lacking for group in groups if group.lacking]
    left_out = sum(group.left_out for group in groups)
    if not usable:
        return Plan([], [], np.zeros(0, ROW), left_out=left_out, lacking=reasons[0])
    # Masks and rope tables are as long as a rank's own batch, and a pipeline stage has an output of its own. As where a
    # shape changes from call to call, the first one stands.
    kinds = [(group.kind, pieces[group.shards[0][0]].place.pp) for group in usable]
    fitting = [group for group, kind in zip(usable, kinds) if kind == kinds[0]]
    joined = _join_rows(pieces, fitting)
    joined.left_out, joined.lacking = left_out, reasons[0] if reasons else ""
    return joined


# -- the TP ranks of one group ----------------------------------------------------------------------------------------


def _join_group(pieces: Sequence[Piece], members: list[int], tp: int, name: str) -> _Group:
    kinds = {pieces[n].shard for n in members} - {CHECKSUM}
    if len(kinds) > 1:
        said = " and ".join(repr(kind) for kind in sorted(kinds))
        raise DumpError(f"the ranks disagree about how they share {name} ({said})", DAMAGED)
    if kinds & {COLUMNS, PARTIAL}:
        return _join_shards(pieces, members, tp, kinds.pop())
    return _join_copies(pieces, members)


def _join_shards(pieces: Sequence[Piece], members: list[int], tp: int, shard: str) -> _Group:
    """Line up the rows of TP ranks that each hold a part of every row, in the first one's order."""
    by_tp = {pieces[n].place.tp: n for n in members}
    what = {COLUMNS: "part of the features", PARTIAL: "a term of the sum"}[shard]
    absent = absent_ranks(by_tp, tp)
    if absent:
        reason = f"{what} is in no file: that of tensor-parallel {absent} is missing or lacks this tensor"
        longest = max(len(pieces[n].rows) for n in members)
        return _Group([], [], np.zeros(0, ROW), [], longest, reason)
    order = [by_tp[number] for number in range(tp)]
    parts = [pieces[n] for n in order]
    inner = {(part.dtype, part.features[1:] if shard == COLUMNS else part.features) for part in parts}
    if len(inner) > 1 or (shard == COLUMNS and not all(part.features for part in parts)):
        reason = f"its tensor-parallel ranks store shapes or dtypes that do not join ({_described(parts)})"
        return _Group([], [], np.zeros(0, ROW), [], len(parts[0].rows), reason)
    ids = identify([part.rows for part in parts], ("sequence", "position", "call"))
    common = ids[0]
    for other in ids[1:]:
        common = common[np.isin(common, other)]
    total = len(np.unique(np.concatenate(ids)))
    take = [np.argsort(own)[np.searchsorted(np.sort(own), common)] for own in ids]
    lost = total - len(common)
    reason = f"{what} of some rows is in no file: not every tensor-parallel rank stored them" if lost else ""
    kind = (shard, *(part.features for part in parts), parts[0].dtype)
    return _Group([[n] for n in order], take, parts[0].rows[take[0]], [], lost, reason, kind)


def _described(parts: list[Piece]) -> str:
    return " and ".join(f"{part.dtype} {list(part.features)}" for part in parts)


def _join_copies(pieces: Sequence[Piece], members: list[int]) -> _Group:
    """Take each row from the first TP rank that stored it; what later ranks stored of it are copies."""
    full = [n for n in members if pieces[n].shard != CHECKSUM]
    if not full:
        longest = max(len(pieces[n].rows) for n in members)
        reason = "only checksums of it are stored: the file of tensor-parallel rank 0, which held it, is missing"
        return _Group([], [], np.zeros(0, ROW), [], longest, reason)
    first, left_out, reason = pieces[full[0]], 0, ""
    kind = (first.dtype, first.features)
    odd = [n for n in full if (pieces[n].dtype, pieces[n].features) != kind]
    if odd:
        left_out = sum(len(pieces[n].rows) for n in odd)
        reason = f"{pieces[odd[0]].place.label} stores another shape or dtype under this name"
        full = [n for n in full if n not in odd]
    checks = [n for n in members if pieces[n].shard == CHECKSUM]
    tables = [pieces[n].rows for n in (*full, *checks)]
    ids = identify(tables, ("sequence", "position", "call"))
    if first.shard == WHOLE:
        ids = _apart_without_tokens(ids, tables)
    taken, at, copies = _first_of_each(ids[: len(full)], [first.place, *(pieces[n].place for n in full[1:])])
    stored = np.concatenate([pieces[n].rows for n in full])
    row_of = np.full(max((int(own.max(initial=-1)) for own in ids), default=-1) + 1, -1, np.int64)
    row_of[np.concatenate(ids[: len(full)])] = at
    for number, own in zip(checks, ids[len(full) :]):
        mine = np.flatnonzero(row_of[own] >= 0)
        copies.append(Copy(pieces[number].place, first.place, [mine], row_of[own[mine]], number))
    return _Group([full], [taken], stored[taken], copies, left_out, reason, kind)


def _apart_without_tokens(ids: list[np.ndarray], tables: list[np.ndarray]) -> list[np.ndarray]:
    """Give each row of no token an id of its own: undeclared, ranks may hold heads of their own in it."""
    joined, nobody = np.concatenate(ids), np.concatenate(tables)["sequence"] == -1
    joined[nobody] = joined.max(initial=-1) + 1 + np.arange(int(nobody.sum()))
    return np.split(joined, np.cumsum([len(own) for own in ids])[:-1])


def _first_of_each(ids: list[np.ndarray], places: list[Place]) -> tuple[np.ndarray, np.ndarray, list[Copy]]:
    """Return which of the concatenated rows come first under their id, the final row of each, and the copies."""
    is_first, at = _number_firsts(np.concatenate(ids))
    bounds = np.cumsum([0, *(len(own) for own in ids)])
    copies = []
    for number in range(1, len(ids)):
        again = bounds[number] + np.flatnonzero(~is_first[bounds[number] : bounds[number + 1]])
        if len(again):
            copies.append(Copy(places[number], places[0], [again], at[again]))
    return np.flatnonzero(is_first), at, copies


# -- groups -----------------------------------------------------------------------------------------------------------


def _join_rows(pieces: Sequence[Piece], groups: list[_Group]) -> Plan:
    """Put the rows of groups one after another; a token that a later group ran as well is a copy of the first's row."""
    shards = [[n for group in groups for n in group.shards[t]] for t in range(len(groups[0].shards))]
    offsets = [np.zeros(len(shards), np.int64)]
    for group in groups:
        lengths = [sum(len(pieces[n].rows) for n in numbers) for numbers in group.shards]
        offsets.append(offsets[-1] + np.array(lengths))
    is_first, at = _repeated([group.rows for group in groups])
    takes: list[list[np.ndarray]] = [[] for _ in shards]
    copies: list[Copy] = []
    start = 0
    first_place = pieces[shards[0][0]].place
    for group, offset in zip(groups, offsets):
        span = slice(start, start + len(group.rows))
        kept, final = is_first[span], at[span]
        own = [offset[t] + rows for t, rows in enumerate(group.take)]
        for t, rows in enumerate(own):
            takes[t].append(rows[kept])
        if not kept.all():
            place = pieces[group.shards[0][0]].place
            copies.append(Copy(place, first_place, [rows[~kept] for rows in own], final[~kept]))
        for copy in group.copies:
            moved = copy.take if copy.piece is not None else [copy.take[0] + offset[0]]
            copies.append(Copy(copy.place, copy.reference, moved, final[copy.at], copy.piece))
        start = span.stop
    rows = np.concatenate([group.rows for group in groups])[is_first]
    take = [_unless_all(np.concatenate(parts), pieces, numbers) for parts, numbers in zip(takes, shards)]
    return Plan(shards, take, rows, copies)


def _unless_all(take: np.ndarray, pieces: Sequence[Piece], numbers: list[int]) -> np.ndarray | None:
    total = sum(len(pieces[n].rows) for n in numbers)
    return None if len(take) == total and np.array_equal(take, np.arange(total)) else take


def _repeated(tables: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return, over the concatenated tables, which rows no earlier table has, and the number of each among those.

    Within one table every row counts: a token that one rank ran twice (recomputation) has two rows. The k-th run of a
    token in one table is the k-th in another. Rows of no token are never the same.
    """
    total = sum(map(len, tables))
    if len(tables) == 1:
        return np.ones(total, bool), np.arange(total)
    ids = np.concatenate(identify(tables, ("sequence", "position"), ordered_by="call"))
    nobody = np.concatenate(tables)["sequence"] < 0
    ids[nobody] = -1 - np.arange(int(nobody.sum()))
    return _number_firsts(ids)


def _number_firsts(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which entries are the first of their id, and for every entry the number of its id's first among those."""
    _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    is_first = np.zeros(len(ids), bool)
    is_first[first] = True
    return is_first, (np.cumsum(is_first) - 1)[first][inverse]


def identify(tables: list[np.ndarray], columns: tuple[str, ...], ordered_by: str = "") -> list[np.ndarray]:
    """Return an int64 id per row of each table: rows of two tables share it where they are the same row.

    The same are rows equal in ``columns`` and in the number of such rows before them in their table, in the order of
    ``ordered_by`` and then of storage.
    """
    if not ordered_by and all(np.array_equal(table, tables[0]) for table in tables[1:]):
        return [np.arange(len(table)) for table in tables]
    rows = np.concatenate(tables)
    table = np.repeat(np.arange(len(tables)), [len(t) for t in tables])
    keys = [rows[name] for name in columns]
    within = [np.arange(len(rows))] + ([rows[ordered_by]] if ordered_by else [])
    order = np.lexsort((*within, table, *keys))
    occurrence = _numbered([key[order] for key in (*keys, table)])
    same = np.empty(len(rows), np.int64)
    same[order] = occurrence
    order = np.lexsort((same, *keys))
    starts = _starts([key[order] for key in (*keys, same)])
    ids = np.empty(len(rows), np.int64)
    ids[order] = np.cumsum(starts) - 1
    return np.split(ids, np.cumsum([len(t) for t in tables])[:-1])


def _starts(keys: list[np.ndarray]) -> np.ndarray:
    """Tell where, in sorted columns, a row differs from the one before."""
    starts = np.ones(len(keys[0]), bool)
    if len(starts):
        starts[1:] = np.any([key[1:] != key[:-1] for key in keys], axis=0)
    return starts


def _numbered(keys: list[np.ndarray]) -> np.ndarray:
    """Number the rows of each run of equal rows in sorted columns 0, 1, ..."""
    starts = np.flatnonzero(_starts(keys))
    counts = np.diff(np.append(starts, len(keys[0])))
    return np.arange(len(keys[0])) - np.repeat(starts, counts)
