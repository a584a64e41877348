"""Count what a comparison saw: every row and every native tensor of both sides is joined or has one reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from probe.compare.align import NO_ROWS, RowAligner, RowJoin, RowTable, last_of_equals, pack
from probe.compare.report.model import ROW_REASONS
from probe.compare.untrained import need_no_partner
from probe.metrics import BLOCK_VALUES
from probe.store.budget import Budget, within_rows
from probe.store.reader import Dump

if TYPE_CHECKING:
    from probe.compare.tokens.batch import TokenBatch

REASONS = tuple(ROW_REASONS)
"""Why a row did not join (docs/report.md). A row counts under the first that fits; the last one fits any."""

EXCUSED = frozenset(
    {
        *("padding", "computed_again", "not_trained", "prefix_cache", "not_executed"),
        *("prompts_only", "budget", "beyond_prefix"),
    }
)
"""Rows that the two sides could not both have stored: they do not lower the share of rows that was compared."""


@dataclass
class Recomputed:
    """Cells (packed) of one side that its model ran more than once, and those that came out with other bits."""

    again: set[int] = field(default_factory=set)
    differing: set[int] = field(default_factory=set)

    def note(self, table: RowTable, read: Callable[[np.ndarray], np.ndarray], features: int) -> None:
        """Look at the repeated rows of one tensor; the last computation is the one that counts.

        ``read``: returns rows [n, features] by their numbers.
        """
        step = max(1, BLOCK_VALUES // max(1, features))
        for start in range(0, len(table.earlier), step):
            at = slice(start, start + step)
            first, last = (_bits(read(rows[at])) for rows in (table.earlier, table.last[table.again]))
            cells = table.cells[table.again[at]]
            self.again.update(cells.tolist())
            self.differing.update(cells[(first != last).any(axis=1)].tolist())


def _bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).reshape(len(values), -1).view(np.uint8)


@dataclass
class RowCoverage:
    """Rows of two dumps over all matched tensors: ``joined``, and for each side reason -> rows that did not join.

    A row is joined where any tensor has it on both sides; ``held`` is the share of them that a tensor has on average.
    """

    joined: int = 0
    a: Counter[str] = field(default_factory=Counter)
    b: Counter[str] = field(default_factory=Counter)
    recomputed: tuple[Recomputed, ...] = ()
    held: float = 1.0

    @property
    def covered(self) -> float:
        """Return joined / rows that both sides could have stored (1 when there is none), times ``held``."""
        missed = sum(count for side in (self.a, self.b) for reason, count in side.items() if reason not in EXCUSED)
        return self.held * self.joined / (self.joined + missed) if self.joined + missed else 1.0

    def count(self, reason: str) -> int:
        """Return how many rows of both sides have a reason."""
        return self.a[reason] + self.b[reason]

    def as_dict(self) -> dict[str, Any]:
        """Return the report's ``coverage.rows``."""
        sides = {name: {r: side[r] for r in REASONS if side[r]} for name, side in (("a", self.a), ("b", self.b))}
        again = [{"rows": len(side.again), "differing": len(side.differing)} for side in self.recomputed]
        return {"joined": self.joined, **sides, "recomputed": dict(zip("ab", again))}


@dataclass(frozen=True)
class FewerRows:
    """One tensor that was compared on fewer rows than others.

    Of the ``missing`` rows, which joined in another tensor, side a lacks ``lacking_a`` of this one and b ``lacking_b``.
    """

    label: str
    joined: int
    missing: int
    lacking_a: int
    lacking_b: int


@dataclass
class _Joined:
    """All joined (pair, position), packed and sorted, and the cell of each side that stands for them."""

    keys: np.ndarray
    cells: tuple[np.ndarray, np.ndarray]


def count_rows(
    aligner: RowAligner,
    joins: list[RowJoin],
    a: Dump,
    b: Dump,
    recomputed: tuple[Recomputed, ...] = (),
    left_out: tuple[int, int] = (0, 0),
) -> RowCoverage:
    """Give every row of the two dumps, over all joins, its reason (:class:`RowCoverage`).

    ``left_out``: for each side, rows that its reader could make whole in no tensor.
    """
    distinct = _distinct(joins)
    joined = _all_joined(aligner, distinct)
    held = [_union([join.table(side).cells for join in distinct]) for side in (0, 1)]
    coverage = RowCoverage(joined=len(joined.keys), recomputed=recomputed)
    for side, counts in enumerate((coverage.a, coverage.b)):
        lone = np.setdiff1d(held[side], joined.cells[side], assume_unique=True)
        reasons = _reasons(_Lone(aligner, lone, side), joined, held[1 - side], (a, b))
        counts.update({REASONS[n]: int(count) for n, count in enumerate(np.bincount(reasons)) if count})
        unread = {
            "padding": max((join.table(side).padding for join in distinct), default=0),
            "part_of_shards": left_out[side],
        }
        counts.update({reason: count for reason, count in unread.items() if count})
    return coverage


def token_share(aligner: RowAligner, a: Dump, b: Dump, batch: TokenBatch | None) -> float:
    """Return the share of the response tokens of both sides whose log-probs were compared (1 where there is none).

    As with rows, what lies after the point where two sequences part does not count, nor does the last token of a
    sequence where one side has no log-prob of it, nor sequences that a list left out or that were not trained on.
    """
    shared, alone = [NO_ROWS], 0
    for side, dump in enumerate((a, b)):
        response = dump.tokens[dump.tokens["response"]]
        _, position, pair, _ = aligner.places(pack(response["sequence"], response["position"]), side)
        other = (b, a)[side]
        listed = 0 < other.budget.listed <= len(other.sequences)
        lone = response["sequence"][pair < 0]
        alone += 0 if listed else int((~need_no_partner(aligner.join, a, b, side, lone)).sum())
        within = np.flatnonzero(pair >= 0)
        within = within[position[within] < aligner.prefix[pair[within]]]
        shared.append(pack(pair[within], position[within]))
    compared, last = (len(batch), sum(batch.lone_last)) if batch is not None else (0, 0)
    total = max(compared, len(np.unique(np.concatenate(shared))) - last) + alone
    return compared / total if total else 1.0


def _distinct(joins: list[RowJoin]) -> list[RowJoin]:
    return list({id(join): join for join in joins}.values())


def _union(arrays: list[np.ndarray]) -> np.ndarray:
    distinct = list({id(array): array for array in arrays}.values())
    if len(distinct) == 1:
        return distinct[0]
    return np.unique(np.concatenate(distinct)) if distinct else NO_ROWS


def _all_joined(aligner: RowAligner, joins: list[RowJoin]) -> _Joined:
    """Return what joined in any tensor; where tensors took a row from several pieces the last piece stands for it."""
    if not joins:
        return _Joined(NO_ROWS, (NO_ROWS, NO_ROWS))
    keys = np.concatenate([pack(join.pair, join.position) for join in joins])
    chosen = []
    for side in (0, 1):
        cells = np.concatenate([join.cells(side) for join in joins])
        order = np.lexsort((aligner.places(cells, side)[3], keys))
        chosen.append(cells[order[last_of_equals(keys[order])]])
    return _Joined(np.unique(keys), (chosen[0], chosen[1]))


class _Lone:
    """Rows of one side that did not join, with what the other side's sequence of each says about its rows."""

    def __init__(self, aligner: RowAligner, cells: np.ndarray, side: int) -> None:
        self.aligner, self.side, pairs = aligner, side, aligner.join.pairs
        self.sequence, self.position, self.pair, _ = aligner.places(cells, side)
        self.key = pack(self.pair, self.position)
        mine, other = aligner.sequences[side], aligner.sequences[1 - side]
        leads = [other[pair.pieces(1 - side)[-1]] for pair in pairs]
        pieces = [[other[n] for n in pair.pieces(1 - side)] for pair in pairs]
        self.prefix = self._of(aligner.prefix)
        self.known = self._of([len(s.tokens) for s in leads])
        self.last_generated = self._of([len(s.tokens) - 1 if len(s.tokens) > s.prompt_len else -1 for s in leads])
        self.cached = self._of([max(s.cached for s in group) for group in pieces])
        prompts = [max(s.prompt_len for s in group) for group in pieces]
        own = [mine[pair.pieces(side)[0]].prompt_len for pair in pairs]
        self.prompt = self._of([one or two for one, two in zip(prompts, own)])

    def over_budget(self, held: np.ndarray, budget: Budget) -> np.ndarray:
        """Tell which rows the other side's budget left out: of a sequence that it did not choose, or beyond its rows.

        ``held``: the other side's cells. Where it holds rows of fewer sequences than it was to choose, as many as it
        lacks are taken as lost (those with the most rows) and only the others as not chosen.
        """
        sequence, _, pair, _ = self.aligner.places(held, 1 - self.side)
        chosen = np.unique(sequence)
        picked = (self.pair < 0) & (0 < budget.listed <= len(chosen))
        if not budget.limits_rows:
            return picked
        shared = (self.pair >= 0) & (self.position < self.prefix)
        wanted = within_rows(self.position, self.prompt, budget.rows)
        absent = shared & wanted & ~np.isin(self.pair, pair)
        pairs, rows = np.unique(self.pair[absent], return_counts=True)
        lacking = max(0, budget.seqs - self._requests(chosen)) if budget.seqs else len(pairs)
        lost = pairs[np.argsort(-rows, kind="stable")[:lacking]]
        return picked | (shared & ~wanted) | (absent & ~np.isin(self.pair, lost))

    def _requests(self, chosen: np.ndarray) -> int:
        """Return how many of the other side's sequences count as chosen: a request that new weights split counts once.

        Of a pair's pieces, the most of one weight version; each sequence of no pair.
        """
        other, owner = self.aligner.sequences[1 - self.side], self.aligner.pair[1 - self.side]
        pieces = Counter((int(owner[n]), other[n].weight_version) for n in chosen.tolist())
        most: dict[int, int] = {}
        for (pair, _), count in pieces.items():
            most[pair] = most.get(pair, 0) + count if pair < 0 else max(most.get(pair, 0), count)
        return sum(most.values())

    def _of(self, per_pair: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return one entry per row from one per pair; rows of no pair get -1."""
        return np.append(np.asarray(per_pair, np.int64), -1)[self.pair]

    def versions(self, held: np.ndarray) -> np.ndarray:
        """Tell which positions the other side holds (``held``: its cells), but in other weight versions only."""
        if len(self.aligner.versions) < 2:
            return np.zeros(len(self.pair), bool)
        sequence, position, pair, _ = self.aligner.places(held, 1 - self.side)
        versioned = [
            pack(p * len(self.aligner.versions) + self.aligner.version[side][s], at)
            for p, s, at, side in (
                (self.pair, self.sequence, self.position, self.side),
                (pair, sequence, position, 1 - self.side),
            )
        ]
        within = self.position < self.prefix
        return within & np.isin(self.key, pack(pair, position)) & ~np.isin(versioned[0], versioned[1][pair >= 0])


def _reasons(lone: _Lone, joined: _Joined, held: np.ndarray, dumps: tuple[Dump, Dump]) -> np.ndarray:
    """Return the number in REASONS of each lone row."""
    short = [bool(dump.manifest.get("prompts_only")) for dump in dumps]
    within = lone.position < lone.prefix
    told_not_to = short[1 - lone.side] and not short[lone.side]
    response = np.where(within, lone.position >= lone.prompt, lone.known == lone.prefix)
    budget = lone.over_budget(held, dumps[1 - lone.side].budget)
    untrained = lone.pair < 0
    untrained[untrained] = need_no_partner(lone.aligner.join, *dumps, lone.side, lone.sequence[untrained])
    fits = {
        "computed_again": (lone.pair >= 0) & np.isin(lone.key, joined.keys),
        "not_trained": untrained,
        "other_sequence": (lone.pair < 0) & ~budget,
        "other_version": lone.versions(held),
        "prefix_cache": within & (lone.position < lone.cached),
        "not_executed": within & (lone.position == lone.last_generated),
        "prompts_only": response & told_not_to,
        "budget": budget,
        "beyond_prefix": ~within,
    }
    numbers = [REASONS.index(reason) for reason in fits]
    found = np.select(list(fits.values()), numbers, REASONS.index("not_stored")).astype(np.int64)
    missing = np.flatnonzero(found == REASONS.index("not_stored"))
    found[missing[: dumps[1 - lone.side].budget.dropped]] = REASONS.index("budget")
    return found


def fewer_rows(aligner: RowAligner, labelled: list[tuple[str, RowJoin]]) -> list[FewerRows]:
    """Return the tensors, of (label, join), that were compared on fewer rows than joined in all."""
    joins = _distinct([join for _, join in labelled])
    everything = _union([pack(join.pair, join.position) for join in joins])
    found = {}
    for join in joins:
        missing = np.setdiff1d(everything, pack(join.pair, join.position), assume_unique=True)
        lacking = []
        for side in (0, 1):
            _, position, pair, _ = aligner.places(join.table(side).cells, side)
            lacking.append(int((~np.isin(missing, pack(pair, position)[pair >= 0])).sum()))
        found[id(join)] = FewerRows("", len(join.index_a), len(missing), lacking[0], lacking[1])
    return [replace(found[id(join)], label=label) for label, join in labelled if found[id(join)].missing]


def held_rows(labelled: Sequence[tuple[str, RowJoin]], fewer: Sequence[FewerRows], expected: Collection[str]) -> float:
    """Return the share of the joined rows that a tensor has on average, over those ``expected`` to have all of them.

    ``fewer`` are the tensors that lack some.
    """
    have = sum(len(join.index_a) for label, join in labelled if label in expected)
    lack = sum(entry.missing for entry in fewer if entry.label in expected)
    return have / (have + lack) if lack else 1.0
