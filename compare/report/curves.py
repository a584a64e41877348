"""The heat map of the HTML report, and which of its columns is the layer curve of which token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from probe.compare.report.findings import first_words
from probe.compare.report.model import Report, label, visible, worst_tokens
from probe.compare.report.shared.page import MAX_NAME, short

Columns = Mapping[tuple[str, int], int]
"""(label of a sequence, position of a token) -> the column of the heat map whose row scores the token."""


def heat_data(report: Report, limit: int) -> tuple[dict[str, Any] | None, Columns]:
    """Return the heat map with at most ``limit`` tokens, None without one, and the tokens that its columns score.

    Rows that score one of the worst tokens are kept first, then those with the largest cell. A sequence whose label is
    not its own has no curves: nothing says whose row it would be.
    """
    heat = report["located"].get("heat")
    if not heat or not heat["tokens"]:
        return None, {}
    worst = {(token["sequence"], token["position"] - 1) for token in worst_tokens(report)}
    top = [max((cell for cell in row if cell is not None), default=-1.0) for row in heat["cells"]]
    places = [(token["sequence"], token["position"]) for token in heat["tokens"]]
    order = sorted(range(len(top)), key=lambda index: (places[index] not in worst, -top[index]))
    kept = sorted(order[:limit])
    names = Counter(sequence["sequence"] for sequence in report["tokens"].get("sequences") or [])
    tokens = [heat["tokens"][index] for index in kept]
    data = {
        "layers": [visible(name, MAX_NAME) for name in heat["layers"]],
        "sequences": [visible(token["sequence"], 60) for token in tokens],
        "positions": [token["position"] for token in tokens],
        "tokens": [token.get("token") for token in tokens],
        "cells": [[short(cell, 3) for cell in heat["cells"][index]] for index in kept],
        "first": [_first(heat["first"][index]) for index in kept],
        "row_band": heat["row_band"],
        "of_tokens": heat["of_tokens"],
        "of_layers": heat["of_layers"],
    }
    scored = ((places[index][0], places[index][1] + 1) for index in kept)
    return data, {place: column for column, place in enumerate(scored) if names[place[0]] <= 1}


def worst_rows(report: Report, limit: int, columns: Columns) -> list[dict[str, Any]]:
    """Return the worst tokens with what the page shows of them: the column of their curve, where they first depart."""
    return [
        {**token, "column": columns.get((token["sequence"], token["position"])), "first_at": first_words(token)}
        for token in worst_tokens(report)[:limit]
    ]


def _first(departure: Mapping[str, Any] | None) -> list[Any] | None:
    if departure is None:
        return None
    return [visible(label(departure), MAX_NAME), short(departure["rel_l2"]), short(departure["band"])]
