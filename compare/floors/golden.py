"""``--golden DUMP``: a reference of the same tokens in higher precision says which of two sides is farther from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from probe.compare.floors.floors import model_dtypes
from probe.compare.floors.ratio import BUG, NORMAL, GoldenRatio, golden_ratio
from probe.compare.floors.twin import Twin, moved, opened
from probe.compare.gates import Gate
from probe.compare.judge import DIVERGENT_FLOORS, Judgement, effective_dtype, modelled_floor
from probe.compare.match import Match
from probe.compare.measure import Measured
from probe.compare.merge import CanonicalReader
from probe.compare.names.canonical import is_routing
from probe.compare.report.model import counted
from probe.compare.side import Side
from probe.errors import UsageError
from probe.metrics import MANTISSA_BITS, coarser_dtype

WHAT = "the golden dump"
UNRELATED = 1.0
"""Relative L2 of two tensors that have little to do with each other."""


def measure_golden(a: Side, b: Side, measured: Sequence[Measured], path: str | Path | None) -> list[Gate]:
    """Set ``golden`` of every tensor that the reference holds too, and return the gate that says what it showed.

    Raises UsageError for a reference that is not in a higher precision, or of other tokens or another model.
    """
    if path is None:
        return []
    with opened(path, WHAT) as dump:
        dtype = str(dump.manifest.get("dtype", ""))
        _require_precise(dtype, str(dump.path), a, b)
        twin, reader_b = Twin(a, dump, WHAT), CanonicalReader(b)
        for entry in measured:
            if entry.join is not None and not is_routing(entry.match.label) and entry.match.proposal is None:
                entry.golden = _ratio(entry, twin, reader_b, a, b)
                entry.judgement = _raised(entry, routed=bool(a.shape.experts or b.shape.experts))
    return [_gate(measured, a, b, str(dump.path))]


def _require_precise(dtype: str, path: str, a: Side, b: Side) -> None:
    """Raise UsageError unless the reference is finer than the coarser side and no coarser than the other."""
    sides = model_dtypes(a, b)
    bits = [MANTISSA_BITS.get(name, 0) for name in (coarser_dtype(*sides), *sides, dtype)]
    if bits[-1] <= bits[0] or bits[-1] < max(bits):
        own = f"{WHAT} {path} is in {dtype or 'an unknown dtype'}"
        raise UsageError(
            f"{own}, no higher precision than the sides ({' and '.join(sides)})",
            "make it with probe dump --stage reference --dtype float64 (float32 for half precision)",
        )


def _ratio(entry: Measured, twin: Twin, reader_b: CanonicalReader, a: Side, b: Side) -> GoldenRatio | None:
    """Return the ratio of one tensor over the rows that all three dumps hold, None where there are none."""
    join, match = entry.join, entry.match
    assert join is not None
    shared = twin.rows(match.source_a, match.label)
    if shared is None:
        return None
    _, mine, theirs = np.intersect1d(join.index_a, shared.index_a, assume_unique=True, return_indices=True)
    if not len(mine):
        return None
    routed = bool(a.shape.experts or b.shape.experts)
    errors = []
    for source, rows, reader in ((match.source_a, join.index_a, None), (match.source_b, join.index_b, reader_b)):
        pair = replace(shared, index_a=rows[mine], index_b=shared.index_b[theirs])
        metrics = twin.measure(source, match.label, pair, reader)
        if metrics is None:
            return None
        errors.append(moved(metrics, routed=routed))
    floors = [_floor(side, match) for side in (a, b)]
    if not np.isfinite(errors).all():
        return None
    found = golden_ratio(errors[0], errors[1], floors[0], floors[1])
    if routed and found.verdict != BUG:  # one side may by chance flip more tokens: healthy pairs measured up to 1.9
        return replace(found, side="", verdict=NORMAL)
    return found


WORSE = {"consistent": "suspect", "suspect": "divergent"}
"""What a tensor's verdict becomes where one side is at fault by the reference (three times as far: healthy pairs stayed
below 1.5). The errors of a model with experts are as large as the flips are many: they raise nothing."""


def _raised(entry: Measured, *, routed: bool) -> Judgement:
    """Return a tensor's judgement in the light of the reference."""
    golden, judgement = entry.golden, entry.judgement
    if golden is None or golden.verdict != BUG or routed or judgement.verdict not in WORSE:
        return judgement
    reason = f"side {golden.side} is {golden.ratio:.3g} times as far from the golden dump as the other"
    return replace(
        judgement, verdict=WORSE[judgement.verdict], reason="; ".join(filter(None, (judgement.reason, reason)))
    )


def _floor(side: Side, match: Match) -> float:
    """Return the modelled floor of one side in its own dtype, in which its error is counted."""
    dtype = effective_dtype(str(side.dump.manifest.get("dtype", "")))
    return modelled_floor(dtype, match.place.ops, max(side.shape.hidden, side.shape.intermediate))


def _unrelated(match: Match, a: Side, b: Side) -> float:
    """Return the relative L2 above which neither side's tensor is the reference's: unrelated ones lie 1.41 apart."""
    return min(DIVERGENT_FLOORS * max(_floor(side, match) for side in (a, b)), UNRELATED)


def _gate(measured: Sequence[Measured], a: Side, b: Side, path: str) -> Gate:
    """Say what the reference showed; where both sides are far from it, it is a reference of something else."""
    found = [(entry, entry.golden) for entry in measured if entry.golden is not None]
    if not found:
        return Gate("golden", "warn", f"{path} has no tensor and row in common with both sides")
    far = sum(min(golden.error_a, golden.error_b) > _unrelated(entry.match, a, b) for entry, golden in found)
    if far > len(found) / 2:
        return Gate("golden", "warn", f"both sides are far from {path}: it was run from other weights or another model")
    worse = {side: [e.match.label for e, g in found if g.side == side and g.verdict != NORMAL] for side in "ab"}
    bugs = sum(g.verdict == BUG for _, g in found)
    if not any(worse.values()):
        whole = counted(len(found), "tensor")
        return Gate("golden", "pass", f"neither side is clearly farther from {path} than the other in any of {whole}")
    parts = [
        f"side {side} is farther in {counted(len(labels), 'tensor')}, first {labels[0]}"
        for side, labels in worse.items()
        if labels
    ]
    return Gate("golden", "warn", f"{'; '.join(parts)} ({bugs} by more than a factor of 3), measured against {path}")
