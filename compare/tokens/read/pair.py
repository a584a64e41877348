"""Which sequences of two files are the same one: by uid, by token ids, else by their place where the shapes agree."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from probe.compare.report.model import counted
from probe.compare.sequences import join_sequences
from probe.compare.tokens.read.table import Table
from probe.errors import CompareError
from probe.store.schema import Sequence

ENDLESS = 2**31 - 1
"""The common prefix of two sequences whose ids need not be compared."""


@dataclass(frozen=True)
class Pairs:
    """P sequences that two tables share: ``rows`` int64 [P] of each side, sorted by those of a.

    ``before``: tokens of the prompt before each side's cells, int64 [P]; 0 where positions count from the response on.
    ``prefix`` int64 [P] counts the tokens that both have in common, from where ``before`` counts.
    """

    rows: tuple[np.ndarray, np.ndarray]
    before: tuple[np.ndarray, np.ndarray]
    prefix: np.ndarray
    notes: list[str] = field(default_factory=list)


def pair_with_itself(table: Table) -> Pairs:
    """Return the pairs of a file that holds both sides."""
    rows, nothing = np.arange(len(table)), np.zeros(len(table), np.int64)
    return Pairs((rows, rows), (nothing, nothing), np.full(len(table), ENDLESS))


def pair_tables(a: Table, b: Table) -> Pairs:
    """Pair the sequences of two files; raise CompareError where nothing says which belong together."""
    names = [identities(table) for table in (a, b)]
    if a.token is not None and b.token is not None:
        return _by_tokens(a, b, names)
    if a.uid is not None and b.uid is not None:
        for table, own in zip((a, b), names):
            _refuse_repeated(table, own)
        found = {name: row for row, name in enumerate(names[1])}
        rows = [(row, found[name]) for row, name in enumerate(names[0]) if name in found]
        return _pairs(a, b, rows, None, "uid")
    if len(a) != len(b) or not np.array_equal(a.width, b.width):
        said = f"{_shape(a)} of {a.path} and {_shape(b)} of {b.path} have no uid and no token ids in common to join by"
        raise CompareError(said, "give both files a uid column or the responses' ids, or rows of equal shape")
    return _pairs(
        a, b, [(row, row) for row in range(len(a))], None, "their order, for want of uid and token ids on both"
    )


def identities(table: Table) -> list[tuple[int, str, int]]:
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


def _refuse_repeated(table: Table, names: list[tuple[int, str, int]]) -> None:
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        said = f"two sequences of {table.path} have the uid {twice[1]} and the sample {twice[2]}"
        raise CompareError(said, "number the samples of a uid, or give the responses' ids")


def _shape(table: Table) -> str:
    low, high = int(table.width.min()), int(table.width.max())
    return f"{counted(len(table), 'sequence')} of {low if low == high else f'{low} to {high}'} tokens"


# -- by token ids -----------------------------------------------------------------------------------------------------


@dataclass
class _Listed:
    """What joining sequences reads of a dump."""

    sequences: list[Sequence]


def _by_tokens(a: Table, b: Table, names: list[list[tuple[int, str, int]]]) -> Pairs:
    """Pair what agrees in its ids: those of the whole sequence where both files know it, else of the response."""
    whole = a.whole and b.whole
    ids = [_ids(table, whole) for table in (a, b)]
    aligned = [table.start if whole else np.zeros(len(table), np.int64) for table in (a, b)]
    same = (
        len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(*ids)) and np.array_equal(aligned[0], aligned[1])
    )
    if same and (a.uid is None or b.uid is None or names[0] == names[1]):
        rows = [(row, row) for row in range(len(a))]
        return _pairs(a, b, rows, None, "", aligned)
    steps = a.step is not None and b.step is not None
    sides = [_Listed(_sequences(t, n, i, s, steps)) for t, n, i, s in zip((a, b), names, ids, aligned)]
    join = join_sequences(*cast(Any, sides))
    rows = [(pair.a, pair.b) for pair in join.pairs]
    prefix = [_parting(pair.prefix, ids[0][pair.a], ids[1][pair.b]) for pair in join.pairs]
    pairs = _pairs(a, b, rows, prefix, "token ids", aligned)
    parting = sum(length != ENDLESS for length in prefix)
    if parting:
        pairs.notes.append(f"the token ids of {counted(parting, 'sequence')} part: compared up to there")
    return pairs


def _parting(prefix: int, a: np.ndarray, b: np.ndarray) -> int:
    """Return where two sequences part, which they do not where one only goes on."""
    return prefix if prefix < min(len(a), len(b)) else ENDLESS


def _ids(table: Table, whole: bool) -> list[np.ndarray]:
    return table.ids if whole else [ids[start:] for ids, start in zip(table.ids, table.start)]


def _sequences(
    table: Table, names: list[tuple[int, str, int]], ids: list[np.ndarray], start: np.ndarray, steps: bool
) -> list[Sequence]:
    return [
        Sequence(
            row, f"{step}/{uid}" if uid and steps else uid, sample=sample, prompt_len=int(start[row]), tokens=tokens
        )
        for row, ((step, uid, sample), tokens) in enumerate(zip(names, ids))
    ]


def _pairs(
    a: Table,
    b: Table,
    rows: list[tuple[int, int]],
    prefix: list[int] | None,
    how: str,
    before: list[np.ndarray] | None = None,
) -> Pairs:
    if not rows:
        said = f"no sequence of {a.path} is one of {b.path} ({how or 'token ids'} differ)"
        raise CompareError(said, "compare log-probs of the same tokens")
    at = np.array(rows, np.int64).T
    nothing = np.zeros(len(rows), np.int64)
    notes = [f"the sequences of the two files were joined by {how}"] if how else []
    for table, own in ((a, at[0]), (b, at[1])):
        alone = len(table) - len(own)
        if alone:
            notes.append(f"{counted(alone, 'sequence')} of {table.path} have no partner and are left out")
    starts = (nothing, nothing) if before is None else (before[0][at[0]], before[1][at[1]])
    return Pairs((at[0], at[1]), starts, np.array(prefix if prefix else nothing + ENDLESS, np.int64), notes)
