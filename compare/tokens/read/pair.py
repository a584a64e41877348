"""Which sequences of two files are the same one: by uid, by token ids, else by their place where the shapes agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from probe.compare.report.model import counted
from probe.compare.sequences import join_sequences
from probe.compare.tokens.read.table import Table
from probe.compare.trajectories import common_prefix
from probe.errors import CompareError
from probe.store.schema import Sequence

ENDLESS = 2**31 - 1
"""The common prefix of two sequences whose ids need not be compared."""
UNPROVEN = (
    "their order alone: a uid names several sequences that neither sample numbers, token ids nor lengths tell apart. "
    "Every figure is wrong if one file was reordered (verl balances batches): add sample numbers or token ids"
)
"""How rows of repeated uids were joined where nothing but their order could."""

Name = tuple[int, str, int]
"""Step, uid and sample number of a sequence, -1 or empty where they do not count."""


@dataclass(frozen=True)
class Pairs:
    """P sequences that two tables share: ``rows`` int64 [P] of each side, sorted by those of a.

    ``before``: tokens of the prompt before each side's cells, int64 [P]; 0 where positions count from the response on.
    ``prefix`` int64 [P] counts the tokens that both have in common, from where ``before`` counts. ``left_out``: what of
    the files is in no pair, or behind the prefix of one.
    """

    rows: tuple[np.ndarray, np.ndarray]
    before: tuple[np.ndarray, np.ndarray]
    prefix: np.ndarray
    notes: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def pair_with_itself(table: Table) -> Pairs:
    """Return the pairs of a file that holds both sides."""
    rows, nothing = np.arange(len(table)), np.zeros(len(table), np.int64)
    return Pairs((rows, rows), (nothing, nothing), np.full(len(table), ENDLESS))


def pair_tables(a: Table, b: Table) -> Pairs:
    """Pair the sequences of two files; raise CompareError where nothing says which belong together."""
    if a.token is not None and b.token is not None:
        return _by_tokens(a, b)
    if a.uid is not None and b.uid is not None:
        return _pairs(a, b, *_by_uid(a, b))
    if len(a) != len(b) or not np.array_equal(a.width, b.width):
        said = f"{_shape(a)} of {a.path} and {_shape(b)} of {b.path} have no uid and no token ids in common to join by"
        raise CompareError(said, "give both files a uid column or the responses' ids, or rows of equal shape")
    rows = [(row, row) for row in range(len(a))]
    return _pairs(a, b, rows, "their order, for want of uid and token ids on both")


def identities(table: Table) -> list[Name]:
    """Return (step, uid, sample) of each sequence; rows of one uid and step without a sample number are counted."""
    steps = table.step.tolist() if table.step is not None else [-1] * len(table)
    uids = table.uid or [""] * len(table)
    if table.sample is not None:
        return list(zip(steps, uids, table.sample.tolist()))
    times: Counter[tuple[int, str]] = Counter()
    named = []
    for key in zip(steps, uids):
        named.append((*key, times[key]))
        times[key] += 1
    return named


def shared_names(a: Table, b: Table) -> tuple[list[Name], list[Name]]:
    """Return the names of each file's sequences, made of what both files have."""
    steps, samples = _numbers(a, b, a.step, b.step), _numbers(a, b, a.sample, b.sample)
    uids = (a.uid, b.uid) if a.uid is not None and b.uid is not None else ([""] * len(a), [""] * len(b))
    names = [list(zip(*columns)) for columns in zip(steps, uids, samples)]
    return names[0], names[1]


def _numbers(a: Table, b: Table, left: np.ndarray | None, right: np.ndarray | None) -> tuple[list[int], list[int]]:
    if left is None or right is None:
        return [-1] * len(a), [-1] * len(b)
    return left.tolist(), right.tolist()


def _shape(table: Table) -> str:
    low, high = int(table.width.min()), int(table.width.max())
    each = counted(low, "token") if low == high else f"{low} to {high} tokens"
    return f"{counted(len(table), 'sequence')} of {each}"


# -- by uid -----------------------------------------------------------------------------------------------------------


def _by_uid(a: Table, b: Table) -> tuple[list[tuple[int, int]], str]:
    """Pair what has the same name, and say how; several of one name by length, else by order where all agrees in it."""
    for table in (a, b):
        _refuse_repeated(table)
    names = shared_names(a, b)
    groups = [_grouped(own, range(len(own))) for own in names]
    shared = {name: (rows, groups[1][name]) for name, rows in groups[0].items() if name in groups[1]}
    found = {name: _by_length(a, b, *rows) for name, rows in shared.items()}
    unclear = next((name for name, rows in found.items() if rows is None), None)
    if unclear is None:
        several = any(len(rows) > 1 for both in shared.values() for rows in both)
        how = "uid, those of one uid by their length" if several else "uid"
        return sorted(pair for rows in found.values() for pair in rows or ()), how
    if names[0] == names[1] and _agree_in_length(a, b):
        return [(row, row) for row in range(len(a))], UNPROVEN
    table, rows = max(zip((a, b), shared[unclear]), key=lambda side: len(side[1]))
    said = f"the uid {unclear[1]} names {counted(len(rows), 'sequence')} of {table.path}, which nothing tells apart"
    raise CompareError(said, "add sample numbers or token ids to both files")


def _refuse_repeated(table: Table) -> None:
    twice = next((name for name, count in Counter(identities(table)).items() if count > 1), None)
    if twice is not None:
        said = f"two sequences of {table.path} have the uid {twice[1]} and the sample {twice[2]}"
        raise CompareError(said, "number the samples of a uid, or give the responses' ids")


def _grouped(names: list[Name], rows: Iterable[int]) -> dict[Name, list[int]]:
    groups: dict[Name, list[int]] = {}
    for row in rows:
        groups.setdefault(names[row], []).append(row)
    return groups


def _by_length(a: Table, b: Table, mine: list[int], theirs: list[int]) -> list[tuple[int, int]] | None:
    """Pair sequences of one name: by their lengths where these are the same on both sides, each once, else None."""
    if len(mine) == len(theirs) == 1:
        return [(mine[0], theirs[0])]
    lengths = [{int(_lengths(t)[row]): row for row in rows} for t, rows in ((a, mine), (b, theirs))]
    if not len(lengths[0]) == len(mine) == len(theirs) or lengths[0].keys() != lengths[1].keys():
        return None
    return [(row, lengths[1][length]) for length, row in lengths[0].items()]


def _lengths(table: Table) -> np.ndarray:
    return table.width if table.lengths is None else table.lengths


def _agree_in_length(a: Table, b: Table) -> bool:
    known = a.lengths is not None and b.lengths is not None
    return np.array_equal(a.width, b.width) and (not known or np.array_equal(_lengths(a), _lengths(b)))


# -- by token ids -----------------------------------------------------------------------------------------------------


@dataclass
class _Listed:
    """What joining sequences reads of a dump."""

    sequences: list[Sequence]


def _by_tokens(a: Table, b: Table) -> Pairs:
    """Pair what agrees in its ids: those of the whole sequence where both files know it, else of the response."""
    whole = a.whole and b.whole
    ids = [_ids(table, whole) for table in (a, b)]
    aligned = [table.start if whole else np.zeros(len(table), np.int64) for table in (a, b)]
    names = shared_names(a, b)
    same = (
        len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(*ids)) and np.array_equal(aligned[0], aligned[1])
    )
    if same and names[0] == names[1]:
        return _pairs(a, b, [(row, row) for row in range(len(a))], "", before=aligned)
    join = join_sequences(*cast(Any, [_Listed(_sequences(*side)) for side in zip(names, ids, aligned)]))
    found = {(pair.a, pair.b): pair.prefix for pair in join.pairs}
    if "dump" not in (a.kind, b.kind):  # its names may only number what it holds
        named = a.uid is not None and b.uid is not None
        found |= _leftovers(names if named else None, list(found), ids, aligned)
    rows = sorted(found)
    prefix = [_parting(found[row], ids[0][row[0]], ids[1][row[1]]) for row in rows]
    pairs = _pairs(a, b, rows, "token ids", prefix, aligned)
    parting = sum(length != ENDLESS for length in prefix)
    if parting:
        pairs.notes.append(f"the token ids of {counted(parting, 'sequence')} part: compared up to there")
        pairs.left_out.append(f"{counted(parting, 'sequence')} from the first token id on that differs")
    return pairs


def _leftovers(
    names: tuple[list[Name], list[Name]] | None,
    paired: list[tuple[int, int]],
    ids: list[list[np.ndarray]],
    starts: list[np.ndarray],
) -> dict[tuple[int, int], int]:
    """Pair what token ids did not by name, or by order where all pairs are in it, and return the common prefixes.

    A pair must have a token of the response in common, or a response that is empty: all of it is in common.
    """
    taken = [{pair[side] for pair in paired} for side in (0, 1)]
    free = [[row for row in range(len(ids[side])) if row not in taken[side]] for side in (0, 1)]
    if names is not None:
        groups = [_grouped(own, rows) for own, rows in zip(names, free)]
        both = [(rows, groups[1].get(name, [])) for name, rows in groups[0].items()]
        tried = [(mine[0], theirs[0]) for mine, theirs in both if len(mine) == len(theirs) == 1]
    else:
        in_order = len(ids[0]) == len(ids[1]) and all(x == y for x, y in paired)
        tried = list(zip(*free)) if paired and in_order else []
    found = {}
    for x, y in tried:
        prefix, start = common_prefix(ids[0][x], ids[1][y]), int(max(starts[0][x], starts[1][y]))
        empty = start == min(len(ids[0][x]), len(ids[1][y]))
        if prefix > start or (empty and prefix == start):
            found[x, y] = prefix
    return found


def _parting(prefix: int, a: np.ndarray, b: np.ndarray) -> int:
    """Return where two sequences part, which they do not where one only goes on."""
    return prefix if prefix < min(len(a), len(b)) else ENDLESS


def _ids(table: Table, whole: bool) -> list[np.ndarray]:
    return table.ids if whole else [ids[start:] for ids, start in zip(table.ids, table.start)]


def _sequences(names: list[Name], ids: list[np.ndarray], start: np.ndarray) -> list[Sequence]:
    return [
        Sequence(
            *(row, f"{step}/{uid}" if uid and step >= 0 else uid),
            sample=max(sample, 0),  # without numbers all of a uid are alike, and their tokens decide
            prompt_len=int(start[row]),
            tokens=tokens,
        )
        for row, ((step, uid, sample), tokens) in enumerate(zip(names, ids))
    ]


def _pairs(
    a: Table,
    b: Table,
    rows: list[tuple[int, int]],
    how: str,
    prefix: list[int] | None = None,
    before: list[np.ndarray] | None = None,
) -> Pairs:
    if not rows:
        by = "token ids" if how in ("", "token ids") else "uids"
        said = f"no sequence of {a.path} is one of {b.path} ({by} differ)"
        raise CompareError(said, "compare log-probs of the same tokens")
    at = np.array(rows, np.int64).T
    nothing = np.zeros(len(rows), np.int64)
    notes = [f"the sequences of the two files were joined by {how}"] if how else []
    counts = [(table, len(table) - len(rows)) for table in (a, b)]
    left_out = [f"{counted(alone, 'sequence')} of {table.path}: no partner" for table, alone in counts if alone]
    starts = (nothing, nothing) if before is None else (before[0][at[0]], before[1][at[1]])
    return Pairs((at[0], at[1]), starts, np.array(prefix if prefix else nothing + ENDLESS, np.int64), notes, left_out)
