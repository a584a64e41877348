"""The report's section about the routing of tokens to experts."""

from __future__ import annotations

from typing import Any

import numpy as np

from probe.compare.align import split
from probe.compare.moe.flips import LayerRouting, Routing

SHOWN_TOKENS = 50
"""Flipped tokens that a report lists, the first layers first."""


def section(routing: Routing, labels: list[str]) -> dict[str, Any] | None:
    """Return the report's ``moe`` (docs/report.md), None where no layer's routing is on both sides.

    ``labels``: the label of each sequence pair.
    """
    layers = [routing.layers[layer] for layer in sorted(routing.layers) if len(routing.layers[layer].keys)]
    if not layers:
        return None
    tokens = np.unique(np.concatenate([found.keys for found in layers]))
    flipped = np.unique(np.concatenate([found.keys[found.flipped] for found in layers]))
    decisions = sum(len(found.keys) for found in layers)
    return {
        "layers": [_layer(found) for found in layers],
        "tokens": len(tokens),
        "overlap": float(sum(found.overlap.sum() for found in layers)) / decisions,
        "exact_set_rate": float(sum(int(found.same.sum()) for found in layers)) / decisions,
        "flip_rate": len(flipped) / len(tokens),
        "flips": sum(int(found.flipped.sum()) for found in layers),
        "unexplained": sum(int(found.unexplained.sum()) for found in layers),
        "ids": {side: _how(layers, number) for number, side in enumerate("ab")},
        "first_flips": _first_flips(layers, labels),
    }


def _how(layers: list[LayerRouting], side: int) -> str:
    words = {found.ids[side] for found in layers}
    return words.pop() if len(words) == 1 else "mixed"


def _layer(found: LayerRouting) -> dict[str, Any]:
    flipped = found.flipped
    return {
        "layer": found.layer,
        "tokens": len(found.keys),
        "experts": found.sets_a.shape[1],
        "top_k": found.top_k,
        "ids": dict(zip("ab", found.ids)),
        "replayed": dict(zip("ab", found.replayed)),
        "overlap": float(found.overlap.mean()),
        "exact_set_rate": float(found.same.mean()),
        "flips": int(flipped.sum()),
        "reached": int((flipped & found.reached).sum()),
        "unexplained": int(found.unexplained.sum()),
        "margin": {"a": _quantiles(found.margin_a[flipped]), "b": _quantiles(found.margin_b[flipped])},
        "margin_all": {"a": _quantiles(found.margin_a), "b": _quantiles(found.margin_b)},
        "logits_rel_l2": found.logits_rel_l2,
        "weights_l1": found.weights_l1,
        "load": {"a": found.sets_a.sum(axis=0).tolist(), "b": found.sets_b.sum(axis=0).tolist()},
    }


def _quantiles(margins: np.ndarray) -> dict[str, float] | None:
    known = margins[np.isfinite(margins)]
    if not len(known):
        return None
    return {name: float(np.quantile(known, q)) for name, q in (("median", 0.5), ("p90", 0.9), ("max", 1.0))}


def _first_flips(layers: list[LayerRouting], labels: list[str]) -> list[dict[str, Any]]:
    """Return each flipped token's first layer, with both sides' experts and margins there; at most SHOWN_TOKENS."""
    seen: set[int] = set()
    entries: list[dict[str, Any]] = []
    for found in layers:
        for row in np.flatnonzero(found.flipped):
            key = int(found.keys[row])
            if key in seen or len(entries) >= SHOWN_TOKENS:
                continue
            seen.add(key)
            pair, position = (int(part[0]) for part in split(found.keys[row : row + 1]))
            sides = (("a", found.sets_a, found.margin_a), ("b", found.sets_b, found.margin_b))
            entry = {"sequence": labels[pair], "position": position, "layer": found.layer}
            for side, sets, margins in sides:
                entry[side] = {"experts": np.flatnonzero(sets[row]).tolist(), "margin": float(margins[row])}
            entries.append(entry | {"explained": not bool(found.unexplained[row])})
    return entries
