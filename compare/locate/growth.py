"""The growth curve: where the error, in noise floors, jumps, and where it only drifts."""

from __future__ import annotations

import math
from collections.abc import Iterable

from probe.compare.evidence import Jump
from probe.compare.measure import Measured
from probe.compare.names.canonical import is_routing, layer_of

JUMP_FACTOR = 4.0
"""Times the level before that a tensor must rise to be a jump: the judge's band of a suspicion, twice what any healthy
pair reached (1.93: docs/verdicts.md)."""

DRIFT_FLOORS = 4.0
"""Noise floors that a curve without a jump must reach to be called a drift: above the judge's band of a suspicion for a
first tensor. Rounding that grows as the floor does stays near 1, whatever the depth."""

WINDOW_LAYERS = 2
"""The level before a tensor is the highest of its own layer and of the layer before: a drift raises it as it goes, and
a jump is not hidden by another one far above it."""

MAX_JUMPS = 20


def floors_of(entry: Measured) -> float | None:
    """Return the noise floors that decided on a tensor; infinity where values are non-finite on one side only."""
    if entry.metrics is None or entry.judgement.verdict == "incomparable":
        return None
    if entry.metrics.nonfinite_mismatch:
        return math.inf
    return entry.judgement.evidence


def growth(measured: Iterable[Measured]) -> tuple[str, list[Jump]]:
    """Return ``jump``, ``drift`` or ``none``, and the jumps in execution order.

    A tensor jumps where its noise floors exceed JUMP_FACTOR times the level before it: the most that a tensor of the
    same layer or the one before had reached, at least 1. What inherits a jump lies at its level and is none.
    """
    jumps: list[Jump] = []
    recent: list[tuple[int, float]] = []
    top, layer = 0.0, -1
    for entry in measured:
        floors = floors_of(entry)
        if floors is None or is_routing(entry.match.label):
            continue
        here = layer_of(entry.match.label)
        layer = layer + 1 if here is None and layer >= 0 else here if here is not None else layer
        recent = [(at, value) for at, value in recent if at > layer - WINDOW_LAYERS]
        before = max([1.0, *(value for _, value in recent)])
        if floors > JUMP_FACTOR * before:
            jumps.append(Jump(entry.match.label, before, floors, floors / before))
        recent.append((layer, floors))
        top = max(top, floors)
    if jumps:
        return "jump", jumps[:MAX_JUMPS]
    return ("drift" if top > DRIFT_FLOORS else "none"), []
