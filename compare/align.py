"""Join the rows of two dumps by (sequence, position), whatever the batching, order or chunking of either side was."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from probe.store.reader import Dump
from probe.store.schema import Sequence

_POSITION_BITS = 32


@dataclass(frozen=True)
class SequencePair:
    """One sequence that both sides ran: indices into the dumps' sequences, tokens in common, and its name."""

    a: int
    b: int
    prefix: int
    label: str


@dataclass
class SequenceJoin:
    """Which sequences of two dumps are the same one.

    ``conflicts`` are pairs of one uid whose prompts differ: they are not joined.
    """

    pairs: list[SequencePair] = field(default_factory=list)
    only_a: list[int] = field(default_factory=list)
    only_b: list[int] = field(default_factory=list)
    conflicts: list[tuple[int, int]] = field(default_factory=list)


def common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    """Return how many leading ids two token arrays share."""
    length = min(len(left), len(right))
    differing = np.flatnonzero(left[:length] != right[:length])
    return int(differing[0]) if len(differing) else length


def join_sequences(a: Dump, b: Dump) -> SequenceJoin:
    """Join by uid and sample where the token content agrees, then by token content in order.

    Two sequences agree when their common prefix holds the whole prompt (or all that one side stored).
    """
    join = SequenceJoin()
    labels = sequence_labels(a.sequences)
    found: dict[int, tuple[int, int]] = {}
    by_name: dict[tuple[str, int], list[Sequence]] = defaultdict(list)
    for sequence in b.sequences:
        by_name[sequence.uid, sequence.sample].append(sequence)
    for sequence in a.sequences:
        candidates = by_name.get((sequence.uid, sequence.sample)) if sequence.uid else None
        if candidates:
            other, prefix = candidates[0], common_prefix(sequence.tokens, candidates[0].tokens)
            if _agree(sequence, other, prefix):
                found[sequence.index] = (candidates.pop(0).index, prefix)
            else:
                join.conflicts.append((sequence.index, other.index))
    found |= _by_content(a.sequences, b.sequences, found)
    join.pairs = [SequencePair(i, *found[i], label=labels[i]) for i in sorted(found)]
    taken = {other for other, _ in found.values()}
    join.only_a = [s.index for s in a.sequences if s.index not in found]
    join.only_b = [s.index for s in b.sequences if s.index not in taken]
    join.conflicts = [(i, j) for i, j in join.conflicts if i in join.only_a and j in join.only_b]
    return join


def _agree(left: Sequence, right: Sequence, prefix: int) -> bool:
    shorter = min(len(left.tokens), len(right.tokens))
    prompt = max(left.prompt_len, right.prompt_len)
    return shorter > 0 and prefix >= min(shorter, prompt or shorter)


def _by_content(a: list[Sequence], b: list[Sequence], found: dict[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
    """Join what is left: the longest agreeing token content first, in order among equals."""
    taken = {other for other, _ in found.values()}
    left = [s for s in a if s.index not in found and len(s.tokens)]
    right = [s for s in b if s.index not in taken and len(s.tokens)]
    if not left or not right:
        return {}
    head = min(min(s.prompt_len or len(s.tokens), len(s.tokens)) for s in (*left, *right))
    groups: dict[bytes, list[Sequence]] = defaultdict(list)
    for sequence in right:
        groups[sequence.tokens[:head].tobytes()].append(sequence)
    candidates = []
    for sequence in left:
        for other in groups.get(sequence.tokens[:head].tobytes(), ()):
            prefix = common_prefix(sequence.tokens, other.tokens)
            if _agree(sequence, other, prefix):
                candidates.append((-prefix, sequence.index, other.index))
    result: dict[int, tuple[int, int]] = {}
    used: set[int] = set()
    for negative, i, j in sorted(candidates):
        if i not in result and j not in used:
            result[i] = (j, -negative)
            used.add(j)
    return result


def sequence_labels(sequences: list[Sequence]) -> list[str]:
    """Return one name per sequence: its uid, with the sample number where several share the uid."""
    names = [s.uid or s.request_id or f"s{s.index}" for s in sequences]
    return [f"{name}.s{s.sample}" if names.count(name) > 1 else name for name, s in zip(names, sequences)]


# -- rows -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowJoin:
    """Rows that two tensors share, sorted by (sequence, position), and those that only one has.

    ``index_a`` and ``index_b`` are row numbers of the stored tensors; ``pair`` indexes the sequence pairs. ``keys_a``
    and ``keys_b`` are all distinct row keys of each side (see :meth:`RowAligner.split_key`).
    """

    index_a: np.ndarray
    index_b: np.ndarray
    pair: np.ndarray
    position: np.ndarray
    keys_a: np.ndarray
    keys_b: np.ndarray


class RowAligner:
    """Join row tables of two dumps whose sequences were joined; equal tables are joined once."""

    def __init__(self, join: SequenceJoin, count_a: int, count_b: int) -> None:
        self.join, self.pairs = join, len(join.pairs)
        self._sides = tuple(self._identity(side, count) for side, count in (("a", count_a), ("b", count_b)))
        self._first = (self.pairs, self.pairs + count_a)
        self.owners = self.pairs + count_a + count_b
        self._cache: dict[tuple[bytes, bytes], RowJoin] = {}

    def _identity(self, side: str, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return per sequence its number among the pairs (-1: none) and how many of its positions join."""
        number, prefix = np.full(count, -1, np.int64), np.zeros(count, np.int64)
        for index, pair in enumerate(self.join.pairs):
            number[getattr(pair, side)], prefix[getattr(pair, side)] = index, pair.prefix
        return number, prefix

    def rows(self, rows_a: np.ndarray, rows_b: np.ndarray) -> RowJoin:
        """Join two row tables; of a (sequence, position) that was computed twice the last call counts."""
        cached = (rows_a.tobytes(), rows_b.tobytes())
        if cached not in self._cache:
            keys_a, last_a = _last_of_each(self.keys(rows_a, 0), rows_a["call"])
            keys_b, last_b = _last_of_each(self.keys(rows_b, 1), rows_b["call"])
            common, in_a, in_b = np.intersect1d(keys_a, keys_b, assume_unique=True, return_indices=True)
            pair, position = self.split_key(common)
            self._cache[cached] = RowJoin(last_a[in_a], last_b[in_b], pair, position, keys_a, keys_b)
        return self._cache[cached]

    def keys(self, rows: np.ndarray, side: int) -> np.ndarray:
        """Return one int64 per row; rows of no sequence are -1, rows outside the joined part never equal another's."""
        number, prefix = self._sides[side]
        sequence, position = rows["sequence"].astype(np.int64), rows["position"].astype(np.int64)
        known = sequence >= 0
        safe = np.where(known, sequence, 0)
        if not len(number):
            return np.full(len(rows), -1, np.int64)
        alone = safe + self._first[side]
        joined = (number[safe] >= 0) & (position < prefix[safe])
        owner = np.where(joined, number[safe], alone)
        return np.where(known & (position >= 0), (owner << _POSITION_BITS) | position, -1)

    def alone(self, side: int, sequence: int) -> int:
        """Return the owner of the rows of a sequence of one side that lie outside the joined part."""
        return self._first[side] + sequence

    @staticmethod
    def split_key(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (owner, position) of row keys; an owner below the number of pairs is a sequence pair."""
        return keys >> _POSITION_BITS, keys & ((1 << _POSITION_BITS) - 1)


def _last_of_each(keys: np.ndarray, calls: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct keys, sorted, and for each the row of its last call (of equal calls, the last row)."""
    rows = np.flatnonzero(keys >= 0)
    order = rows[np.lexsort((rows, calls[rows], keys[rows]))]
    ordered = keys[order]
    last = np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True)) if len(ordered) else np.zeros(0, np.int64)
    return ordered[last], order[last]


@dataclass
class RowCoverage:
    """Rows of two dumps over all matched tensors: joined, on one side only, and never executed.

    ``not_executed``: the last token of a sequence that a side generated is never fed to its model. ``beyond_prefix``:
    rows after the point where the two sides' tokens part. ``prompts_only``: response rows that one side was told not to
    store. The last two are part of ``only_a`` / ``only_b`` but not of the share that :attr:`covered` judges.
    """

    joined: int = 0
    only_a: int = 0
    only_b: int = 0
    not_executed: int = 0
    beyond_prefix: int = 0
    prompts_only: int = 0

    @property
    def covered(self) -> float:
        """Return joined / rows that could have been joined (1 when there is none)."""
        excused = self.beyond_prefix + self.prompts_only
        total = self.joined + self.only_a + self.only_b - excused
        return self.joined / total if total > 0 else 1.0


def count_rows(aligner: RowAligner, joins: list[RowJoin], a: Dump, b: Dump) -> RowCoverage:
    """Count rows over all joins (:class:`RowCoverage`)."""
    keys_a, keys_b = (_union([getattr(j, name) for j in joins]) for name in ("keys_a", "keys_b"))
    coverage = RowCoverage(joined=len(np.intersect1d(keys_a, keys_b, assume_unique=True)))
    for side, (mine, other) in enumerate(((keys_a, keys_b), (keys_b, keys_a))):
        lone = np.setdiff1d(mine, other, assume_unique=True)
        owner, position = aligner.split_key(lone)
        skipped = _skipped(aligner, owner, position, side, a, b)
        coverage.not_executed += int(skipped.sum())
        kept, at = owner[~skipped], position[~skipped]
        excused = _prompts_only(aligner, kept, at, a, b)
        coverage.prompts_only += int(excused.sum())
        coverage.beyond_prefix += int((_is_beyond_prefix(aligner, kept, side) & ~excused).sum())
        setattr(coverage, "only_b" if side else "only_a", len(kept))
    return coverage


def _union(arrays: list[np.ndarray]) -> np.ndarray:
    distinct = {array.tobytes(): array for array in arrays}
    return np.unique(np.concatenate(list(distinct.values()))) if distinct else np.zeros(0, np.int64)


def _skipped(aligner: RowAligner, owner: np.ndarray, position: np.ndarray, side: int, a: Dump, b: Dump) -> np.ndarray:
    """Tell which rows of one side are the last generated token of the other side's sequence."""
    pairs = aligner.join.pairs
    sequences = [(a if side else b).sequences[pair.a if side else pair.b] for pair in pairs]
    generated = [len(s.tokens) - 1 if len(s.tokens) > s.prompt_len else -1 for s in sequences]
    last = np.array([*generated, -1], np.int64)
    return position == last[np.where(owner < len(pairs), owner, len(pairs))]


def _prompts_only(aligner: RowAligner, owner: np.ndarray, position: np.ndarray, a: Dump, b: Dump) -> np.ndarray:
    """Tell which rows are response rows that exactly one side was told not to store.

    A dump without a driver knows only the ids it stored, so that such rows lie beyond the common prefix: their owner is
    then one of the other side's sequences, not a pair.
    """
    short = [bool(dump.manifest.get("prompts_only")) for dump in (a, b)]
    if short[0] == short[1]:
        return np.zeros(len(owner), bool)
    whole = 1 if short[0] else 0
    first_response = np.full(aligner.owners, 1 << 31, np.int64)
    for number, pair in enumerate(aligner.join.pairs):
        sequences = a.sequences[pair.a], b.sequences[pair.b]
        first_response[number] = sequences[whole].prompt_len
        if len(sequences[1 - whole].tokens) == pair.prefix:
            first_response[aligner.alone(whole, sequences[whole].index)] = pair.prefix
    return position >= first_response[owner]


def _is_beyond_prefix(aligner: RowAligner, owner: np.ndarray, side: int) -> np.ndarray:
    """Tell which rows belong to a joined sequence but lie after its common prefix."""
    paired = [aligner.alone(side, pair.b if side else pair.a) for pair in aligner.join.pairs]
    return np.isin(owner, np.array(paired, np.int64))
