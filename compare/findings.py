"""The sections of a report on single modules: where the divergence is, and what replaying each module showed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from probe.compare.evidence import Evidence, Replayed
from probe.compare.names.base import key_of

_SAID_ELSEWHERE = ("label", "kind", "side", "keys", "each_row", "relative_rows")


def located_section(evidence: Evidence) -> dict[str, Any]:
    """Return where the divergence is: the growth curve, block deltas, outlier tokens, patterns, the heat map."""
    found = evidence.located
    lists: dict[str, list[Any]] = {"jumps": found.jumps, "deltas": found.deltas, "tokens": found.tokens}
    patterns: dict[str, dict[str, Any]] = {"rows": found.rows, "channels": found.channels}
    return {
        "growth": found.growth,
        **{name: [_named(asdict(entry)) for entry in entries] for name, entries in lists.items()},
        **{
            name: [_placed(label) | asdict(pattern) for label, pattern in entries.items()]
            for name, entries in patterns.items()
        },
        "heat": found.heat,
    }


def replay_section(evidence: Evidence) -> dict[str, Any]:
    """Return what recomputing each module from its own stored inputs showed, both sides of a module side by side."""
    replays = evidence.replays
    sequences = {side: _labels(evidence, number) for number, side in enumerate("ab")}
    order = {entry.match.label: entry.order for entry in evidence.measured}
    labels = dict.fromkeys(label for found in replays.by_side.values() for label in found)
    modules = []
    for label in sorted(labels, key=lambda name: order.get(name, len(order))):
        sides = {side: replays.by_side[side].get(label) for side in "ab"}
        kind = next(found.kind for found in sides.values() if found is not None)
        entry: dict[str, Any] = {**_placed(label), "kind": kind}
        modules.append(entry | {side: found and _replayed(found, sequences[side]) for side, found in sides.items()})
    skipped = [entry for side in "ab" for entry in _skipped(side, replays.skipped[side])]
    return {"weights": replays.weights, "why_not": replays.why_not, "modules": modules, "skipped": skipped}


def _placed(label: str) -> dict[str, Any]:
    name, slot = key_of(label)
    return {"name": name, "slot": slot}


def _named(entry: dict[str, Any]) -> dict[str, Any]:
    return _placed(entry.pop("label")) | entry


def _labels(evidence: Evidence, side: int) -> dict[int, str]:
    """Return the label of each joined sequence of a dump by its number."""
    return {piece: pair.label for pair in evidence.join.pairs for piece in pair.pieces(side)}


def _replayed(found: Replayed, sequences: Mapping[int, str]) -> dict[str, Any]:
    entry = {name: value for name, value in asdict(found).items() if name not in _SAID_ELSEWHERE}
    number, position = found.row
    row = {"sequence": sequences.get(number, f"s{number}"), "position": position}
    return entry | {"row": row, "excess": found.excess}


def _skipped(side: str, reasons: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return one entry per reason why modules of a side were not replayed, with the first of them and their number."""
    counts = Counter(reasons.values())
    first: dict[str, str] = {}
    for label, reason in reasons.items():
        first.setdefault(reason, label)
    return [_placed(first[why]) | {"side": side, "count": counts[why], "reason": why} for why in counts]
