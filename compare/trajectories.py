"""Logical sequences: the pieces that an engine ran of one trajectory, and pairs of them that agree in their tokens."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import numpy as np

from probe.store.schema import Sequence


@dataclass
class Trajectory:
    """The pieces of one logical sequence on one side, the shortest first; the last holds all its tokens."""

    number: int
    pieces: list[Sequence]
    key: bytes

    @property
    def lead(self) -> Sequence:
        """Return the piece with the most tokens."""
        return self.pieces[-1]

    @property
    def size(self) -> int:
        """Return the number of tokens."""
        return len(self.lead.tokens)

    @property
    def prompt_len(self) -> int:
        """Return the length of the first prompt, 0 where it is unknown."""
        return self.pieces[0].prompt_len

    @property
    def name(self) -> str:
        """Return the uid, or the request id where there is none."""
        return name_of(self.lead)


def name_of(sequence: Sequence) -> str:
    """Return what names a sequence: its uid, or the request id where there is none."""
    return sequence.uid or sequence.request_id


def common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    """Return how many leading ids two token arrays share."""
    length = min(len(left), len(right))
    differing = np.flatnonzero(left[:length] != right[:length])
    return int(differing[0]) if len(differing) else length


# -- the pieces of one trajectory -------------------------------------------------------------------------------------


def _sort_key(tokens: np.ndarray) -> bytes:
    """Return bytes that sort as the tokens do, a prefix before what extends it."""
    return tokens.astype(">u4").tobytes()


def trajectories(sequences: list[Sequence]) -> list[Trajectory]:
    """Group sequences of one trajectory and sample whose tokens extend one another; numbered by their first piece.

    Equal tokens are two runs of one prompt, not two pieces, unless their weight versions differ.
    """
    groups: dict[Hashable, list[Sequence]] = defaultdict(list)
    for sequence in sequences:
        alone = not sequence.trajectory or not len(sequence.tokens)
        groups[sequence.index if alone else (sequence.trajectory, sequence.sample)].append(sequence)
    chains = [chain for group in groups.values() for chain in _chains(group)]
    chains.sort(key=lambda chain: min(piece.index for piece in chain))
    return [Trajectory(number, chain, _sort_key(chain[-1].tokens)) for number, chain in enumerate(chains)]


def _chains(group: list[Sequence]) -> list[list[Sequence]]:
    """Cut one group into chains in which each piece begins the next.

    Sorted, a piece follows what begins it: the open chains form levels of one tail each, every level's tail beginning
    the next level's. A run of the same tokens and version is no later piece, so it extends a chain of the level below.
    """
    if len(group) == 1:
        return [group]
    keys = {s.index: (_sort_key(s.tokens), s.weight_version) for s in group}
    chains: list[list[Sequence]] = []
    levels: list[tuple[tuple[bytes, int], deque[list[Sequence]]]] = []
    for piece in sorted(group, key=lambda s: (keys[s.index], s.index)):
        tail = keys[piece.index]
        while levels and not tail[0].startswith(levels[-1][0][0]):
            levels.pop()
        again = bool(levels) and levels[-1][0] == tail
        at = len(levels) - 1 - again
        if at < 0:
            chain: list[Sequence] = []
            chains.append(chain)
        else:
            chain = levels[at][1].popleft()
            if not levels[at][1]:
                levels.pop(at)
        chain.append(piece)
        if again:
            levels[-1][1].append(chain)
        else:
            levels.append((tail, deque([chain])))
    return chains


# -- token content ----------------------------------------------------------------------------------------------------


@dataclass
class _Node:
    """Trajectories that share their first ``depth`` tokens and have no partner among those that share more."""

    depth: int
    sides: tuple[list[Trajectory], list[Trajectory]]


def pair_by_content(
    left: list[Trajectory], right: list[Trajectory], *, continued: bool
) -> Iterator[tuple[Trajectory, Trajectory, int]]:
    """Yield (left, right, common prefix) of agreeing trajectories: the longest prefix first, in order among equals.

    Sorting the tokens puts those with a common prefix side by side, so that only neighbours are compared; the stack
    walks the tree of prefixes from the leaves up.
    """
    entries = sorted([(t.key, 0, t) for t in left] + [(t.key, 1, t) for t in right], key=lambda entry: entry[:2])
    stack: list[_Node] = []
    for at, (_, side, trajectory) in enumerate(entries):
        shared = common_prefix(entries[at - 1][2].lead.tokens, trajectory.lead.tokens) if at else 0
        yield from _fold(stack, shared, continued)
        if not stack or stack[-1].depth < trajectory.size:
            stack.append(_Node(trajectory.size, ([], [])))
        stack[-1].sides[side].append(trajectory)
    yield from _fold(stack, 0, continued)


def _fold(stack: list[_Node], depth: int, continued: bool) -> Iterator[tuple[Trajectory, Trajectory, int]]:
    """Finish the nodes below ``depth`` and hand what they leave unpaired to the node above."""
    while stack and stack[-1].depth > depth:
        node = stack.pop()
        yield from _pairs_at(node, continued)
        if not stack or stack[-1].depth < depth:
            stack.append(_Node(depth, ([], [])))
        for kept, rest in zip(stack[-1].sides, node.sides):
            kept.extend(rest)


def _pairs_at(node: _Node, continued: bool) -> Iterator[tuple[Trajectory, Trajectory, int]]:
    """Pair the two sides of one node, in order, and leave in it what found no partner."""
    depth, sides = node.depth, node.sides

    def ends(t: Trajectory) -> bool:
        return t.size == depth

    def past_prompt(t: Trajectory) -> bool:
        return 0 < t.prompt_len <= depth

    def unknown(t: Trajectory) -> bool:
        return t.prompt_len == 0

    def anything(t: Trajectory) -> bool:
        return True

    whole = ((ends, ends), (ends, anything), (anything, ends))
    parting = ((past_prompt, past_prompt), (past_prompt, unknown), (unknown, past_prompt))
    for wanted_a, wanted_b in whole if continued else whole + parting:
        if not sides[0] or not sides[1]:
            return
        chosen = [sorted(filter(w, s), key=lambda t: t.number) for w, s in zip((wanted_a, wanted_b), sides)]
        paired = list(zip(*chosen))
        for mine, gone in zip(sides, zip(*paired)):
            numbers = {t.number for t in gone}
            mine[:] = [t for t in mine if t.number not in numbers]
        yield from ((one, other, depth) for one, other in paired)
