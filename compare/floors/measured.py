"""``--floor DUMP``: the floor of each tensor, measured on one side that ran twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from probe.compare.floors.floors import MEASURED, REPEATED, Floors
from probe.compare.floors.twin import Twin, moved, opened
from probe.compare.gates import Gate, GateFinding
from probe.compare.judge import DIVERGENT_RISE, ROUNDING, effective_dtype, modelled_floor
from probe.compare.match import Match
from probe.compare.names.base import Source, key_of
from probe.compare.names.canonical import is_routing
from probe.compare.report.model import counted
from probe.compare.side import Side
from probe.compare.weights import canonical_weights, compare_weights
from probe.errors import UsageError
from probe.store.reader import Dump

WHAT = "the floor dump"


@dataclass
class _Found:
    """What two runs of one side showed: gains by label, all of them in modelled floors, how many tensors are the same
    bits, and those at which the runs part as no rounding does."""

    gains: dict[str, float] = field(default_factory=dict)
    floors: list[float] = field(default_factory=list)
    parted: list[str] = field(default_factory=list)
    same: int = 0


def measure_floors(a: Side, b: Side, matches: Sequence[Match], path: str | Path | None) -> tuple[Floors, list[Gate]]:
    """Return the floors of the matched tensors and, with a floor dump, the gate that says what it showed.

    Raises UsageError for a floor dump that belongs to neither side, or was run from other weights.
    """
    if path is None:
        return Floors(a, b), []
    with opened(path, WHAT) as dump:
        name, side = side_of(dump, a, b)
        if dump.path.resolve() == side.dump.path.resolve():
            raise UsageError(f"{WHAT} {dump.path} is side {name} itself", "run that side again, or with dump --noise")
        noise = bool(dump.manifest.get("noise"))
        twin = Twin(side, dump, WHAT)
        _require_same_weights(side, twin)
        ordered = sorted(matches, key=lambda match: (match.place.rank, match.label))
        found = _measure(twin, [(m, m.source_a if name == "a" else m.source_b) for m in ordered], noise)
    floors = Floors(a, b, found.gains, MEASURED if noise else REPEATED)
    return floors, [_gate(name, dump, found, noise)]


def side_of(dump: Dump, a: Side, b: Side) -> tuple[str, Side]:
    """Return the side ("a" or "b") that a floor dump measures again: the same engine and dtype, at best the same stage.

    Where both fit, the kernels (``backends``) and then the split (``topology``) decide, then the order.
    """

    def fits(side: Side) -> tuple[bool, ...]:
        own, manifest = side.dump, dump.manifest
        same = [own.manifest.get(key) == manifest.get(key) for key in ("backends", "topology")]
        return (own.stage == dump.stage, *same)

    sides = [(name, s) for name, s in (("a", a), ("b", b)) if _kind(s.dump) == _kind(dump)]
    if not sides:
        of = ", ".join(f"{s.dump.path} ({' in '.join(_kind(s.dump))})" for s in (a, b))
        problem = f"{WHAT} {dump.path} ({' in '.join(_kind(dump))}) is of neither side: {of}"
        raise UsageError(problem, "run one side again, in the same engine and dtype")
    return max(sides, key=lambda entry: fits(entry[1]))


def _kind(dump: Dump) -> tuple[str, str]:
    return dump.engine, str(dump.manifest.get("dtype", ""))


def _require_same_weights(side: Side, twin: Twin) -> None:
    """Raise UsageError where a parameter is not the same: what the two runs differ by would not be rounding."""
    found = compare_weights(canonical_weights(side), canonical_weights(twin.own))
    other = next((finding.name for finding in found if finding.status == "different"), None)
    if other is not None:
        problem = f"{WHAT} {twin.dump.path} was run from other weights than {side.dump.path} ({other} differs)"
        raise UsageError(problem, "run the same weights again")


def _measure(twin: Twin, matches: Sequence[tuple[Match, Source]], noise: bool) -> _Found:
    """Return each tensor's gain (see :class:`Floors`): how far the two runs lie apart.

    Two runs of one model that part by a jump are no measure of rounding: such a tensor keeps the modelled floor.
    """
    found, level, side = _Found(), 1.0, twin.side
    reduction = max(side.shape.hidden, side.shape.intermediate)
    for match, source in matches:
        join = None if is_routing(match.label) or match.proposal else twin.rows(source, match.label)
        metrics = twin.measure(source, match.label, join) if join is not None else None
        if metrics is None:
            continue
        dtype = effective_dtype(side.dtype_of(source), str(side.dump.manifest.get("dtype", "")))
        error = moved(metrics, routed=bool(side.shape.experts))
        floors = error / modelled_floor(dtype, match.place.ops, reduction)
        found.same += metrics.identical
        if not np.isfinite(error):
            continue
        if not noise and floors > DIVERGENT_RISE * level:
            found.parted.append(match.label)
            continue
        level = max(level, floors)
        found.floors.append(floors)
        found.gains[match.label] = error / ROUNDING[dtype] if noise else floors
    return found


def _gate(name: str, dump: Dump, found: _Found, noise: bool) -> Gate:
    """Say what the floor dump showed; two runs of one side that part are a finding about that side."""
    how = "re-rounded at random" if noise else "run again"
    if found.parted:
        label = found.parted[0]
        text = f"side {name} run twice parts by more than rounding, first in {label} ({dump.path})"
        more = f"{counted(len(found.parted), 'tensor')} keep the modelled floor"
        finding = GateFinding("batch-variance", key_of(label)[0], name, text, {"tensors": len(found.parted)})
        return Gate("floor", "warn", f"{text}; {more}", (finding,))
    if not found.gains:
        return Gate("floor", "warn", f"{dump.path} has no tensor in common with side {name}: floors are modelled")
    gains = sorted(found.floors)
    middle = f"{gains[len(gains) // 2]:.2g} modelled floors in the middle, {gains[-1]:.2g} at most"
    same = "; its tensors are the same bits, so that floors are modelled" if found.same == len(gains) else ""
    detail = f"{counted(len(gains), 'tensor')} of side {name} {how}: {middle}{same}"
    return Gate("floor", "pass", detail)
