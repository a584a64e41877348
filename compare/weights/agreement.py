"""Which of a side's parameters are what a checkpoint holds: for replaying with it, and to say which side is wrong."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from probe.checkpoint import Checkpoint
from probe.compare.side import Side
from probe.compare.weights.canonical import canonical_weights
from probe.compare.weights.changes import agree, compare_weights
from probe.compare.weights.checkpoint import CheckpointWeights


@dataclass
class Agreement:
    """The canonical parameters that a side sketched, by what a checkpoint says of them.

    ``equal`` and ``rounded`` (to the coarser of the two dtypes) are the checkpoint's; ``different``: in what way the
    side's differ, in words; ``unseen``: not in the checkpoint under a known name, or held as codes there.
    """

    equal: set[str] = field(default_factory=set)
    rounded: set[str] = field(default_factory=set)
    different: dict[str, str] = field(default_factory=dict)
    unseen: set[str] = field(default_factory=set)

    @property
    def same(self) -> set[str]:
        """Return the parameters that may be taken from the checkpoint."""
        return self.equal | self.rounded

    @property
    def mostly(self) -> bool:
        """Tell whether the checkpoint is that of the side: more parameters agree than differ."""
        return len(self.same) > len(self.different)


def agreement(
    side: Side, checkpoint: str | Path | Checkpoint | CheckpointWeights, names: Iterable[str] | None = None
) -> Agreement:
    """Compare a side's sketched parameters, or those of ``names``, with a checkpoint's, sketched in the same way.

    Streams the checkpoint once in bounded memory. Raises CheckpointError for one that cannot be read.
    """
    if isinstance(checkpoint, str | Path):
        checkpoint = Checkpoint(checkpoint)
    known = CheckpointWeights(checkpoint, side.shape) if isinstance(checkpoint, Checkpoint) else checkpoint
    weights, found = canonical_weights(side), Agreement()
    wanted = set(weights if names is None else names)
    for name in weights:  # in the model's order: parts of one tensor of the checkpoint follow each other
        if name not in wanted:
            continue
        truth = known.weight(name)
        status = "" if truth is None else agree(truth, weights[name])
        if truth is None or weights[name].gap:
            found.unseen.add(name)
        elif status:
            (found.equal if status == "equal" else found.rounded).add(name)
        else:
            found.different[name] = compare_weights({name: truth}, {name: weights[name]})[0].detail
    found.unseen |= wanted - weights.keys()
    return found
