"""Which weights ran a sequence: versions that both engines count, or those that a trainer declares of its rollout."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Listing
from dataclasses import dataclass

from probe.compare.sequences import SequenceJoin, SequencePair
from probe.store.schema import Sequence, Versions


@dataclass(frozen=True)
class Lag:
    """How many versions older than the trainer's weights those of a rollout are, as the trainer declares.

    ``side``: the trainer's (0: a, 1: b); ``pieces``: (number of a rollout's sequence, fewest, most versions that its
    weights lag, what the trainer declares of it); ``counted``: the weight version of each of the rollout's sequences as
    the engine counts.
    """

    side: int
    pieces: tuple[tuple[int, int, int, Versions], ...]
    counted: tuple[int, ...]

    @property
    def rows(self) -> dict[int, int]:
        """Return sequence of the rollout -> versions that its rows lag; the most where it is not certain."""
        return {number: most for number, _, most, _ in self.pieces}

    @property
    def first(self) -> list[tuple[int, int, Versions]]:
        """Return (fewest, most, declared) of the sequences that ran before any update that the engine counted.

        Their weights are those that the dump holds sketches of. An engine counts any number of syncs between two passes
        as one, so that later sequences say of them only that they are older.
        """
        earliest = min(self.counted)
        found = [(few, most, said) for n, few, most, said in self.pieces if self.counted[n] == earliest]
        later = [(few + 1, said.trained, said) for _, few, _, said in self.pieces]
        return found or later[:1]

    @property
    def sketched(self) -> tuple[int, int]:
        """Return the fewest and most versions that the sketched weights lag; fewest > most: no weights could."""
        return max(few for few, _, _ in self.first), min(most for _, most, _ in self.first)

    @property
    def declared(self) -> bool:
        """Tell whether all that ran with the sketched weights is declared to have run with older ones."""
        few, most = self.sketched
        return 1 <= few <= most

    @property
    def version(self) -> int | None:
        """Return the trainer's number of the sketched weights, None where its declarations leave several."""
        few, most = self.sketched
        return self.first[0][2].trained - few if few == most else None


def lag_of(join: SequenceJoin, a: Listing[Sequence], b: Listing[Sequence]) -> Lag | None:
    """Return what a trainer on one side declares of the rollout on the other; None where neither or both declare."""
    declares = [any(s.declared is not None and s.declared.trained >= 0 for s in side) for side in (a, b)]
    if sum(declares) != 1:
        return None
    side = declares.index(True)
    trainer, rollout = (a, b) if side == 0 else (b, a)
    pieces = tuple(piece for pair in join.pairs for piece in _pieces(pair, side, trainer, rollout))
    return Lag(side, pieces, tuple(s.weight_version for s in rollout)) if pieces else None


def _pieces(
    pair: SequencePair, side: int, trainer: Listing[Sequence], rollout: Listing[Sequence]
) -> Iterator[tuple[int, int, int, Versions]]:
    """Yield :attr:`Lag.pieces` of a pair; nothing where the trainer does not declare its versions.

    The piece that ends where the trainer's sequence ends has its last version, and so have pieces of the same count;
    what ran before an update that the engine counted is older; of a piece that goes on elsewhere all are possible.
    """
    whole = trainer[pair.a if side == 0 else pair.b]
    said = whole.declared
    if said is None or said.trained < 0 or not 0 <= said.first <= said.last:
        return
    lead = rollout[pair.b if side == 0 else pair.a]
    for number in pair.pieces(1 - side):
        oldest, newest = said.first, said.last
        if rollout[number].weight_version < lead.weight_version:
            newest = max(oldest, newest - 1)
        elif len(lead.tokens) >= len(whole.tokens):
            oldest = newest
        yield number, max(0, said.trained - newest), max(0, said.trained - oldest), said


def row_versions(join: SequenceJoin, a: Listing[Sequence], b: Listing[Sequence]) -> tuple[list[int], list[int]]:
    """Return a number for each sequence of each side: rows of different numbers are of different weights.

    Where a trainer declares the lag of its rollout these are versions behind its own, 0 for what ran with sketched
    weights that are the trainer's all the same; else the updates that both engines counted; all 0 where one did not
    count (all its versions are 0).
    """
    lag = lag_of(join, a, b)
    if lag is not None:
        same = min(lag.counted) if join.same_weights else None
        behind = [0 if count == same else lag.rows.get(number, 0) for number, count in enumerate(lag.counted)]
        own = [0] * len((a, b)[lag.side])
        return (own, behind) if lag.side == 0 else (behind, own)
    counted = all(any(s.weight_version for s in side) for side in (a, b))
    return [s.weight_version if counted else 0 for s in a], [s.weight_version if counted else 0 for s in b]
