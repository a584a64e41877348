"""Tensors of single experts: rows exist only for the tokens that an expert served, and on the rank that holds it."""

from __future__ import annotations

import re

from probe.compare.match import Entry, Matching
from probe.compare.moe.flips import Routing

_EXPERT = re.compile(r"layers\.(\d+)\.mlp\.experts\.(\d+)\.")


def is_expert(label: str) -> bool:
    """Tell whether a canonical label is a tensor of one expert, which holds the rows of its own tokens only."""
    return _EXPERT.match(label) is not None


def excuse_idle(matching: Matching, routing: Routing) -> None:
    """Move the tensors of an expert that only one side has to the unavailable ones, if the other's served no token."""
    for side, only in ((1, matching.only_a), (0, matching.only_b)):
        for entry in list(only):
            found = _EXPERT.match(entry.label)
            reason = _idle(routing, side, int(found[1]), int(found[2])) if found else ""
            if reason:
                only.remove(entry)
                matching.unavailable.append(Entry(entry.label, reason, "ab"[side]))


def _idle(routing: Routing, side: int, layer: int, expert: int) -> str:
    seen = routing.layers.get(layer)
    sets = None if seen is None else (seen.sets_a, seen.sets_b)[side]
    if sets is not None and expert < sets.shape[1] and not sets[:, expert].any():
        return f"expert {expert} of layer {layer} served no token there"
    return ""
