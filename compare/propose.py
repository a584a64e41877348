"""Propose pairs for tensors that no table knows, from structure: layer, order of execution, size and name.

A proposal is a guess and is marked as one. Two candidates that only their names could tell apart stay unpaired unless
their names do: a false pair looks like a fault of the model.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher

LAYER_NUMBER = re.compile(r"(?:^|(?<=\.))(\d+)(?=[.:])")
NAME_EVIDENCE = 0.6
"""Likeness of two names (difflib's ratio of their words) from which on they are evidence: ``o_proj`` and ``out_proj``
have 0.71, ``q_proj`` and ``k_proj`` 0.5 after their common ending is set aside, ``dense`` and ``o_proj`` none."""
MARGIN = 0.15
"""By how much the best name must beat the second best of the same size."""
ALONE = 0.5
"""Confidence of a pair that is the only one of its size at its place, whatever the names."""


@dataclass(frozen=True)
class Leftover:
    """An output that no rule reads: stripped label, order of execution, features per row."""

    label: str
    order: int
    features: int


@dataclass(frozen=True)
class Proposal:
    """A proposed pair of labels, why, and how sure (0 to 1)."""

    a: str
    b: str
    reason: str
    confidence: float


@dataclass
class Proposals:
    """What was proposed, and why the rest was not: label -> reason for each side."""

    pairs: list[Proposal] = field(default_factory=list)
    unpaired_a: dict[str, str] = field(default_factory=dict)
    unpaired_b: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Kind:
    """Leftovers of one name in all layers: where they stand and how wide they are must agree to pair."""

    name: str
    layers: tuple[int, ...]
    features: int
    slot: str
    place: int


def propose(a: Sequence[Leftover], b: Sequence[Leftover], anchors: Sequence[tuple[int, int]]) -> Proposals:
    """Pair leftovers of two sides.

    ``anchors``: (order in a, order in b) of tensors that are matched for sure. Two leftovers can pair where they have
    the same layers, width and slot and run between the same anchors; they do where each is the other's only candidate,
    or where the names agree and no other name of the same width comes near.
    """
    kinds_a, kinds_b = _kinds(a, anchors, 0), _kinds(b, anchors, 1)
    result = Proposals()
    likeness = {
        (x, y): _likeness(x.name, y.name)
        for x in kinds_a
        for y in kinds_b
        if (x.layers, x.features, x.slot, x.place) == (y.layers, y.features, y.slot, y.place)
    }
    taken: set[_Kind] = set()
    for x, y in sorted(likeness, key=lambda pair: -likeness[pair]):
        rivals = [p for p in likeness if (p[0] == x) != (p[1] == y)]
        second = max((likeness[pair] for pair in rivals), default=0.0)
        reason, confidence = _judge(likeness[x, y], second, len(rivals))
        if reason and x not in taken and y not in taken:
            taken |= {x, y}
            for one, other in zip(kinds_a[x], kinds_b[y]):
                result.pairs.append(Proposal(one.label, other.label, reason, round(confidence, 2)))
    for mine, theirs, unpaired in ((kinds_a, 1, result.unpaired_a), (kinds_b, 0, result.unpaired_b)):
        for kind, entries in mine.items():
            if kind not in taken:
                others = [pair[theirs] for pair in likeness if pair[1 - theirs] == kind]
                unpaired.update({entry.label: _why_not(others) for entry in entries} if others else {})
    return result


def _judge(likeness: float, second: float, rivals: int) -> tuple[str, float]:
    """Return why a candidate pair is proposed and how sure that is; an empty reason where it is not."""
    where = "same layers, width and place in execution"
    if likeness >= NAME_EVIDENCE and likeness - second >= MARGIN:
        return f"{where}, and names alike", ALONE + likeness * (1 - ALONE)
    if not rivals:
        return f"{where}, and no other candidate", ALONE
    return "", 0.0


def _why_not(rivals: list[_Kind]) -> str:
    names = ", ".join(sorted(kind.name for kind in rivals)[:3])
    return f"not in the table of names, and ambiguous: of its width and place the other side has {names}"


def _kinds(leftovers: Sequence[Leftover], anchors: Sequence[tuple[int, int]], side: int) -> dict[_Kind, list[Leftover]]:
    """Group leftovers whose labels differ by the layer's number only."""
    named: dict[tuple[str, int], list[tuple[int, Leftover]]] = defaultdict(list)
    for entry in leftovers:
        found = LAYER_NUMBER.search(entry.label)
        name = entry.label if found is None else f"{entry.label[: found.start()]}{{i}}{entry.label[found.end() :]}"
        named[name, entry.features].append((int(found[1]) if found else -1, entry))
    kinds = {}
    for (name, features), members in named.items():
        members.sort(key=lambda member: member[0])
        layers = tuple(number for number, _ in members)
        first = members[0][1]
        place = sum(pair[side] <= first.order for pair in anchors)
        kinds[_Kind(name, layers, features, first.label.rpartition(":")[2], place)] = [e for _, e in members]
    return kinds


def _likeness(one: str, other: str) -> float:
    """Return how alike two names are, 0 to 1: the modules' own names and their parents', common endings set aside."""
    left, right = (name.rpartition(":")[0].split(".") for name in (one, other))
    if left[-1] == right[-1]:
        parents = SequenceMatcher(None, ".".join(left[-3:-1]), ".".join(right[-3:-1])).ratio()
        return 0.8 + 0.2 * parents
    words = [set(re.findall(r"[a-z]+|\d+", leaf.lower())) for leaf in (left[-1], right[-1])]
    own = [sorted(mine - theirs) for mine, theirs in (words, words[::-1])]
    if not all(own):  # one name is part of the other
        return SequenceMatcher(None, left[-1], right[-1]).ratio()
    return SequenceMatcher(None, "_".join(own[0]), "_".join(own[1])).ratio()
