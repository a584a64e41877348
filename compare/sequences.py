"""Find which sequences of two dumps are the same one, by identity and token content, never by their place in a batch.

A trajectory that an engine ran as several requests (turns with tools, partial rollouts) is one logical sequence: each
piece's tokens begin those of the next, so that a position means the same in all of them.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import pairwise

from probe.compare.trajectories import Trajectory, name_of, pair_by_content, trajectories
from probe.store.reader import Dump
from probe.store.schema import Sequence

NUMBERED = re.compile(r"([dr]\d+\.)?s\d+")
"""Names that sequences get for want of a uid (``announce`` in probe/hooks/debugger.py)."""

NESTED_HOSTS = 64
"""A piece known only by its content is tried against at most this many longer sequences; more are ambiguous."""


@dataclass(frozen=True)
class SequencePair:
    """One logical sequence that both sides ran, and its name.

    ``a`` and ``b`` index the dumps' sequences: of each side the piece with the most tokens. ``pieces_a`` and
    ``pieces_b`` are all pieces, the shortest first. ``prefix`` counts the leading tokens in common, ``prompt_len``
    those of the first prompt.
    """

    a: int
    b: int
    prefix: int
    label: str
    pieces_a: tuple[int, ...] = ()
    pieces_b: tuple[int, ...] = ()
    prompt_len: int = 0

    def pieces(self, side: int) -> tuple[int, ...]:
        """Return all pieces of side 0 (a) or 1 (b)."""
        return (self.pieces_b or (self.b,)) if side else (self.pieces_a or (self.a,))


@dataclass
class SequenceJoin:
    """Which sequences of two dumps are the same one.

    ``conflicts`` are pairs of one uid whose prompts differ: they are not joined. ``lent`` counts for each side the
    sequences that hold no ids and were given those of the other side. ``same_weights``: the weights of which both sides
    hold sketches are the same, although a trainer declares that they lag (``settle_lag`` of the weights gate).
    """

    pairs: list[SequencePair] = field(default_factory=list)
    only_a: list[int] = field(default_factory=list)
    only_b: list[int] = field(default_factory=list)
    conflicts: list[tuple[int, int]] = field(default_factory=list)
    lent: tuple[int, int] = (0, 0)
    same_weights: bool = False


def sequence_labels(sequences: list[Sequence]) -> list[str]:
    """Return one name per sequence: its uid, with the sample number where several share the uid."""
    names = [name_of(s) or f"s{s.index}" for s in sequences]
    counts = Counter(names)
    return [f"{name}.s{s.sample}" if counts[name] > 1 else name for name, s in zip(names, sequences)]


# -- sequences without ids --------------------------------------------------------------------------------------------


def _lend_tokens(giver: Dump, taker: Dump) -> int:
    """Give sequences without ids (a pipeline stage sees hidden states only) those of the other side's namesake.

    Only where that one has the same sample number and is as long. A name that only numbers the sequences of a run is
    the same on both sides by chance: it counts where no other sequence is as long. Returns how many were lent ids.
    """
    known = {(s.uid, s.sample): s for s in giver.sequences if s.uid and len(s.tokens)}
    lengths = Counter(len(s.tokens) for s in giver.sequences)
    lent = 0
    for sequence in taker.sequences:
        other = known.get((sequence.uid, sequence.sample))
        if other is None or len(sequence.tokens) or sequence.length != len(other.tokens):
            continue
        if NUMBERED.fullmatch(sequence.uid) is None or lengths[sequence.length] == 1:
            sequence.tokens = other.tokens
            lent += 1
    return lent


# -- joining ----------------------------------------------------------------------------------------------------------

Name = Callable[[Trajectory], Hashable]


def _everything(trajectory: Trajectory) -> Hashable:
    return "all"


def _by_name(trajectory: Trajectory) -> Hashable:
    return trajectory.name or None


def _by_name_and_sample(trajectory: Trajectory) -> Hashable:
    return (trajectory.name, trajectory.lead.sample) if trajectory.name else None


def _by_trajectory_and_sample(trajectory: Trajectory) -> Hashable:
    return (trajectory.lead.trajectory, trajectory.lead.sample) if trajectory.lead.trajectory else None


def _if_numbered(trajectory: Trajectory) -> Hashable:
    return "all" if NUMBERED.fullmatch(trajectory.name) else None


ROUNDS: tuple[tuple[Name, bool], ...] = (
    (_by_name_and_sample, True),
    (_by_trajectory_and_sample, True),
    (_by_name, True),
    (_if_numbered, True),
    (_by_name_and_sample, False),
    (_by_trajectory_and_sample, False),
    (_by_name, False),
    (_everything, False),
)
"""What two sequences must share to be tried, the surest first, and whether one must continue the other without a
differing token. A sample number that the two sides count differently thus yields to equal content, and so does a name
that only numbers the sequences of a run, which may have come in another order."""


@dataclass
class _Pairing:
    """The state of one join: partner and common prefix of each trajectory of ``a``, and which of ``b`` are taken."""

    a: list[Trajectory]
    b: list[Trajectory]
    found: dict[int, tuple[int, int]] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)
    absorbed: tuple[set[int], set[int]] = field(default_factory=lambda: (set(), set()))

    def paired(self, side: int) -> list[Trajectory]:
        """Return the trajectories of one side that have a partner."""
        return [t for t in self.b if t.number in self.taken] if side else [t for t in self.a if t.number in self.found]

    def free(self, side: int) -> list[Trajectory]:
        """Return the trajectories of one side that have no partner and are no piece of one that has."""
        busy = (self.taken if side else self.found.keys()) | self.absorbed[side]
        return [t for t in (self.b if side else self.a) if t.number not in busy]

    def run(self) -> None:
        """Pair what can be paired, round by round."""
        for name, continued in ROUNDS:
            groups: dict[Hashable, tuple[list[Trajectory], list[Trajectory]]] = defaultdict(lambda: ([], []))
            for side in (0, 1):
                for trajectory in self.free(side):
                    key = name(trajectory) if trajectory.size else None
                    if key is not None:
                        groups[key][side].append(trajectory)
            for left, right in groups.values():
                for one, other, prefix in pair_by_content(left, right, continued=continued) if left and right else ():
                    self.found[one.number] = (other.number, prefix)
                    self.taken.add(other.number)


def join_sequences(a: Dump, b: Dump) -> SequenceJoin:
    """Join logical sequences by identity where the token content agrees, then by token content in order.

    Two sequences agree when their common prefix holds the whole prompt (or all that one side stored). What is then left
    on one side joins the logical sequence that it begins, where names do not forbid it and it is certain which.
    Sequences of either dump that hold no ids are first given those of the namesake on the other side.
    """
    lent = _lend_tokens(b, a), _lend_tokens(a, b)
    pairing = _Pairing(trajectories(a.sequences), trajectories(b.sequences))
    pairing.run()
    _attach_pieces(pairing)
    labels = sequence_labels(a.sequences)
    join = SequenceJoin(lent=lent)
    for number, (other, prefix) in sorted(pairing.found.items()):
        left, right = pairing.a[number], pairing.b[other]
        join.pairs.append(_pair(left, right, prefix, labels))
    join.only_a, join.only_b = ([s.index for t in pairing.free(side) for s in t.pieces] for side in (0, 1))
    join.only_a.sort(), join.only_b.sort()
    join.conflicts = _conflicts(pairing)
    return join


def _pair(left: Trajectory, right: Trajectory, prefix: int, labels: list[str]) -> SequencePair:
    pieces_a, pieces_b = (tuple(s.index for s in side.pieces) for side in (left, right))
    label, prompt_len = labels[pieces_a[0]], left.prompt_len or right.prompt_len
    return SequencePair(left.lead.index, right.lead.index, prefix, label, pieces_a, pieces_b, prompt_len)


def _conflicts(pairing: _Pairing) -> list[tuple[int, int]]:
    """Return pairs of equal uid and sample that found no partner: their prompts differ."""
    waiting: dict[Hashable, list[Trajectory]] = defaultdict(list)
    for other in pairing.free(1):
        if other.lead.uid and other.size:
            waiting[_by_name_and_sample(other)].append(other)
    conflicts = []
    for one in pairing.free(0):
        partners = waiting.get(_by_name_and_sample(one)) if one.lead.uid and one.size else None
        if partners:
            conflicts.append((one.lead.index, partners.pop(0).lead.index))
    return conflicts


# -- pieces that no trajectory ties together --------------------------------------------------------------------------


def _attach_pieces(pairing: _Pairing) -> None:
    """Add to paired trajectories what is left of their own side and begins them: pieces that no name ties to them."""
    partners = {one: other for one, (other, _) in pairing.found.items()}
    partners_of = (partners, {other: one for one, other in partners.items()})
    sides = pairing.a, pairing.b
    for side in (0, 1):
        others, partner = sides[1 - side], partners_of[side]
        known = {name for t in others for s in t.pieces for name in (_identity(s), s.trajectory) if name}
        hosts = sorted(pairing.paired(side), key=lambda t: (t.key, t.number))
        keys = [host.key for host in hosts]
        for piece in pairing.free(side):
            host = None
            if piece.size:
                found = _continuations(piece, hosts, keys)
                host = _certain([h for h in found if not _forbidden(piece, h, others[partner[h.number]], known)])
            if host is not None:
                host.pieces = sorted([*piece.pieces, *host.pieces], key=lambda s: (len(s.tokens), s.weight_version))
                pairing.absorbed[side].add(piece.number)


def _continuations(piece: Trajectory, hosts: list[Trajectory], keys: list[bytes]) -> list[Trajectory]:
    """Return the trajectories that begin with ``piece`` and go on, the shortest first; none where they are too many."""
    found: list[Trajectory] = []
    for at in range(bisect_left(keys, piece.key), len(hosts)):
        if not keys[at].startswith(piece.key) or len(found) > NESTED_HOSTS:
            break
        if hosts[at].size > piece.size:
            found.append(hosts[at])
    return found if len(found) <= NESTED_HOSTS else []


def _certain(hosts: list[Trajectory]) -> Trajectory | None:
    """Return the shortest host where each begins the next: whichever is taken, the tokens are the same. Else None."""
    nested = all(after.key.startswith(before.key) for before, after in pairwise(hosts))
    return hosts[0] if hosts and nested else None


def _identity(sequence: Sequence) -> Hashable:
    return (name_of(sequence), sequence.sample) if name_of(sequence) else None


def _forbidden(piece: Trajectory, host: Trajectory, partner: Trajectory, known: set[Hashable]) -> bool:
    """Tell whether names say that two trajectories of one side are different samples or prompts.

    A name that the other side has too identifies a sequence; one that it has not is an engine's own request number.
    """
    one, other = piece.lead, host.lead
    if not name_of(one) or _identity(one) in {_identity(s) for s in partner.pieces}:
        return False
    if all(s.trajectory and s.trajectory != s.uid for s in (one, other)):
        return (one.trajectory, one.sample) != (other.trajectory, other.sample)
    if name_of(one) == name_of(other):
        return one.sample != other.sample
    return bool(known & {_identity(one), _identity(other), one.trajectory, other.trajectory})
