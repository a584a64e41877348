"""Which of the versions that a trainer recorded in other steps are the weights that its rollout holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from probe.compare.side import Side, read_side
from probe.compare.weights.canonical import Weight, canonical_weights
from probe.compare.weights.changes import compare_weights
from probe.compare.weights.settle import settled
from probe.errors import ProbeError
from probe.store.reader import open_dump, step_of, steps_in

LOOKED_AT = 8
"""Other steps of the trainer that are opened at most, those nearest before its own first: a job may have recorded
hundreds, and the sketches of each are read whole."""


@dataclass(frozen=True)
class Recorded:
    """One version of a trainer's weights that a job recorded: in which step, and whether the rollout holds it."""

    version: int
    step: int
    held: bool


def recorded_versions(trainer: Side, weights: Mapping[str, Weight]) -> list[Recorded]:
    """Compare a rollout's weights with those that the trainer declares in its other steps, the newest version first.

    The steps lie beside the trainer's own (STAGE/stepN); what cannot be read is passed over.
    """
    found: dict[int, Recorded] = {}
    for step, path in _others(trainer)[:LOOKED_AT]:
        try:
            with open_dump(path) as dump:
                version = max((s.declared.trained for s in dump.sequences if s.declared is not None), default=-1)
                side = read_side(dump, trainer.given)
                side.shape = trainer.shape
                known = canonical_weights(side)
        except (ProbeError, OSError):
            continue
        judged = settled(compare_weights(weights, known))
        if version >= 0 and judged:
            found.setdefault(version, Recorded(version, step, all(f.status != "different" for f in judged)))
    return sorted(found.values(), key=lambda one: -one.version)


def _others(trainer: Side) -> list[tuple[int, Path]]:
    """Return (step, path for open_dump) of the other steps that every folder of a dump's stage holds, earlier first."""
    folders = list(dict.fromkeys(file.parent for file in trainer.dump.files))
    own = step_of(folders[0])
    held = [{step_of(step) for step in steps_in(folder.parent)} for folder in folders]
    steps = set.intersection(*held) - {own}
    order = sorted(steps, key=lambda step: (step > own, abs(step - own)))
    return [(step, Path(",".join(str(folder.with_name(f"step{step}")) for folder in folders))) for step in order]
