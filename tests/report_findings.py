"""What realistic reports found: locations, replays, suspects and the action, for tests/report_fixture.py."""

from __future__ import annotations

import random
from typing import Any


def _heat(rng: random.Random, entries: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
    """Build tokens x layers: healthy cells, and from the first divergent layer on tokens that are far off."""
    layers = [entry for entry in entries if entry["name"].count(".") <= 1 and entry["name"].startswith("layers.")]
    streams = layers + [entry for entry in entries if entry["name"] == "lm_head"]
    fault = next((entry for entry in entries if entry["verdict"] == "divergent"), None)
    cells, first = [], []
    for token in range(tokens):
        row = [rng.uniform(0.2, 0.9) for _ in streams]
        for index, entry in enumerate(streams):
            if entry["verdict"] == "divergent" and token % 9 >= 3:
                row[index] = entry["ratio"] * 10 ** -rng.uniform(0, 5)
        cells.append([float(f"{cell:.3g}") for cell in row])
        place = fault and {"name": fault["name"], "slot": fault["slot"], "rel_l2": 0.4, "band": 2e-5}
        first.append(place if token % 9 >= 3 else None)
    return {
        "unit": "noise floors", "layers": [entry["name"] for entry in streams],
        "tokens": [{"sequence": f"p{n // 40}.s0", "position": n % 40, "token": 100 + n} for n in range(tokens)],
        "cells": cells, "first": first, "row_band": 20.0, "worst": tokens, "of_tokens": tokens,
        "of_layers": len(streams),
    }  # fmt: skip


def located(rng: random.Random, entries: list[dict[str, Any]], first: int | None, tokens: int = 240) -> dict[str, Any]:
    """Build the report's ``located`` of layers that diverge from number ``first`` on, or of healthy ones."""
    heat = _heat(rng, entries, tokens) if entries else None
    empty: dict[str, Any] = {"growth": "none", "jumps": [], "deltas": [], "tokens": [], "rows": [], "channels": []}
    if first is None:
        return empty | {"heat": heat}
    place = {key: entries[first][key] for key in ("name", "slot")}
    pattern = {"kind": "from-position", "rows": 190, "of": 242}
    figures = {"share": 0.785, "first_position": 3, "position": 3}
    token = {"sequence": "p0.s0", "position": 3, "token": 103, "rel_l2": 0.4, "band": 2e-5}
    layer = {"name": place["name"].rsplit(".", 2)[0], "slot": "output.0"}
    return {
        "growth": "jump", "jumps": [{**place, "before": 1.0, "after": 81000.0, "factor": 81000.0}],
        "deltas": [{**layer, "rel_l2": 0.4, "rounding": 3e-7, "norm_ratio": 1.2, "rows": 242}],
        "tokens": [{**token, **place}], "rows": [{**place, **pattern, "figures": figures}],
        "channels": [{**place, "columns": [5, 9], "count": 2, "of": 64, "share": 0.93}], "heat": heat,
    }  # fmt: skip


def join_layers(report: dict[str, Any]) -> None:
    """Give the worst tokens of a report the layers of the rows that score them."""
    heat = report["located"]["heat"]
    rows = {(at["sequence"], at["position"] + 1): index for index, at in enumerate(heat["tokens"])} if heat else {}
    for token in report["tokens"]["worst"]:
        index = rows.get((token["sequence"], token["position"]))
        first = None if index is None else heat["first"][index]
        token.update(first_layer=first, curve=None if index is None else heat["cells"][index])
        token["lies_in"] = "layer" if first else "unknown" if index is None else "noise"


def _replay_side(rng: random.Random, broken: bool) -> dict[str, Any]:
    error = 250.0 if broken else rng.uniform(0.7, 1.3)
    best = {"cause": "rope-base", "error": 1.2, "text": "the base is 1.05 times the config's", "value": 1.05}
    return {
        "verdict": "broken" if broken else "fine", "rows": 242, "error": error, "band": 4.5,
        "worst_row": error * 3, "row_band": 15.0, "row": {"sequence": "p0.s0", "position": 3},
        "worst_column": error * 2, "column_band": 9.0, "column": 5, "excess": error / 4.5,
        "explanations": [best] if broken else [], "reason": "", "toward_zero": False,
    }  # fmt: skip


def replay(rng: random.Random, entries: list[dict[str, Any]], first: int | None) -> dict[str, Any]:
    """Build the report's ``replay``: every module is fine but number ``first`` on side b."""
    names = [entry for entry in entries if entry["name"] != "embed_tokens"]
    modules = [
        {"name": entry["name"], "slot": entry["slot"], "kind": "rope" if "rotary" in entry["name"] else "linear",
         "a": _replay_side(rng, False), "b": _replay_side(rng, entry["order"] == first)}
        for entry in names
    ]  # fmt: skip
    skipped = [{"name": "embed_tokens", "slot": "output.0", "side": side, "count": 1, "reason": "no stored input"}
               for side in "ab"]  # fmt: skip
    return {"weights": {"a": "/models/tiny-qwen2", "b": "/models/tiny-qwen2"}, "why_not": {}, "modules": modules,
            "skipped": skipped}  # fmt: skip


def suspect(name: str) -> dict[str, Any]:
    """Build one suspect."""
    return {
        "name": name, "side": "b", "cause": "rope-base", "confidence": 0.93, "label": f"{name}:output.0",
        "evidence": ["Replayed in float64, side b is 250 roundings off where 4.5 are allowed (side a: 0.9).",
                     "With a base of 1.05 times the config's 1.2 roundings are left."],
        "next_check": "Print rope_theta in both engines' configs.",
    }  # fmt: skip


def action(broken: bool) -> dict[str, Any]:
    """Build the recommended action of a broken or a healthy pair."""
    figures = [
        {"name": "mean |log-prob difference|", "value": 0.12 if broken else 2e-6, "healthy": "below 0.02",
         "source": "dense bf16 pairs", "ok": not broken},
        {"name": "k3", "value": 2.1e-5, "healthy": "at most 0.001", "source": "NeMo-RL", "ok": True},
    ]  # fmt: skip
    if broken:
        return {"word": "stop", "text": "Training on these log-probs follows a fault.", "figures": figures}
    return {"word": "continue", "text": "What differs is rounding.", "figures": figures}
