"""Join tokens with layers: the first tensor where the hidden state that scores a token leaves the noise band.

The log-prob of the token at position p comes from the row at p - 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from probe.compare.align import RowJoin, pack
from probe.compare.evidence import Departure, Evidence
from probe.compare.judge import BANDS, MODELLED, ROW_FACTOR, TOKEN_SUSPECT
from probe.compare.locate.rows import bad_above, healthy_level
from probe.compare.measure import Measured
from probe.compare.names.base import key_of
from probe.compare.names.canonical import LOGITS, is_routing
from probe.compare.tokens.batch import TokenBatch
from probe.compare.tokens.explained import explained_by_logits
from probe.compare.tokens.groups import largest
from probe.sampling import Semantics

FLAGGED = ("divergent", "suspect")
"""Verdicts of a tensor that something is wrong with."""

LAYER, LOG_PROB, NOISE, UNKNOWN = "layer", "log-prob", "noise", "unknown"
"""Where the difference of a token lies: in the tensor ``first_layer`` and after; in how its log-prob is taken, as the
hidden states and the logits agree; in rounding; not known, as the logits of its row were not compared."""


def scoring_cells(batch: TokenBatch | None, count: int) -> np.ndarray:
    """Return the rows (pair, position), packed, int64 [n], that score the ``count`` worst tokens, the worst first."""
    if batch is None or batch.a is None or batch.b is None:
        return np.zeros(0, np.int64)
    at = largest(np.abs(batch.b - batch.a), count)
    return pack(batch.sequence[at], batch.start[batch.sequence[at]] + batch.position[at] - 1)


def departures(measured: Iterable[Measured], cells: np.ndarray) -> dict[int, Departure | None]:
    """Return cell -> the first tensor, in execution order, where that row leaves the noise band, None where none is.

    ``cells``: packed (pair, position) of rows; those of which no tensor was compared are not in the result. Routing and
    pairs that are only proposed do not count: a flip that rounding explains shows in what the experts return, and a
    proposal may pair two tensors that are none.
    """
    wanted = np.unique(cells)
    found: dict[int, Departure | None] = {}
    places: dict[int, tuple[RowJoin, np.ndarray, np.ndarray]] = {}  # by join: tensors of one row table share theirs
    for entry in measured:
        if entry.metrics is None or entry.join is None or is_routing(entry.match.label) or entry.match.proposal:
            continue
        if id(entry.join) not in places:
            places[id(entry.join)] = (entry.join, *_places(entry.join, wanted))
            found = dict.fromkeys(places[id(entry.join)][2].tolist()) | found
        _, rows, here = places[id(entry.join)]
        band = row_band(entry)
        errors = np.where(entry.metrics.row_mismatch[rows], np.inf, entry.metrics.row_rel_l2[rows])
        for at in np.flatnonzero(errors > band).tolist():
            if found[int(here[at])] is None:
                found[int(here[at])] = Departure(entry.match.label, float(errors[at]), band)
    return found


def row_band(entry: Measured) -> float:
    """Return the error (relative L2) that one row of a measured tensor may reach by rounding.

    ROW_FACTOR times the band of a suspicion, which docs/verdicts.md derives for the worst row; in a tensor that is
    flagged, where rows are known to be bad, less where less tells them from the healthy ones
    (:func:`probe.compare.locate.rows.bad_above`).
    """
    bands = BANDS[entry.floor.source if entry.floor is not None else MODELLED]
    alone = ROW_FACTOR * bands.suspect_rise / bands.divergent_rise * entry.judgement.row_band
    if entry.judgement.verdict not in FLAGGED or entry.metrics is None:
        return alone
    errors = np.where(entry.metrics.row_mismatch, np.inf, entry.metrics.row_rel_l2)
    judged = errors if entry.among is None else errors[entry.among]
    return min(alone, bad_above(judged, healthy_level(entry)))


def join_layers(e: Evidence) -> None:
    """Give each of the worst tokens of ``e.tokens`` its ``first_layer``, its ``curve`` and where its difference lies.

    ``first_layer``: {name, slot, rel_l2, band} or None; ``curve``: the error of its row in noise floors after each of
    ``located.heat.layers`` (None: not compared there), None without such rows; ``lies_in``: LAYER, LOG_PROB, NOISE or
    UNKNOWN.
    """
    worst = e.tokens["worst"]
    cells = scoring_cells(e.batch, len(worst))
    found = departures(e.measured, cells)
    allowed = _allowed_by_logits(e, cells)
    heat = e.located.heat or {"tokens": [], "cells": []}
    curves = {(at["sequence"], at["position"]): cells for at, cells in zip(heat["tokens"], heat["cells"])}
    for entry, cell in zip(worst, cells.tolist()):
        departure = found.get(cell)
        entry["first_layer"] = None if departure is None else departed(departure)
        entry["curve"] = curves.get((entry["sequence"], entry["position"] - 1))
        entry["lies_in"] = _lies_in(abs(entry["diff"]), departure, allowed.get(cell))


def departed(departure: Departure) -> dict[str, Any]:
    """Return the report's entry of a departure; ``rel_l2`` is infinite where a value is finite on one side only."""
    name, slot = key_of(departure.label)
    return {"name": name, "slot": slot, "rel_l2": departure.rel_l2, "band": departure.band}


def _lies_in(difference: float, departure: Departure | None, allowed: float | None) -> str:
    if departure is not None:
        return LAYER
    if allowed is None:
        return UNKNOWN
    return LOG_PROB if difference > allowed + TOKEN_SUSPECT else NOISE


def _allowed_by_logits(e: Evidence, cells: np.ndarray) -> Mapping[int, float]:
    """Return cell -> how far the two sides' logits of that row let log-probs part, where they were compared."""
    entry = e.entry(LOGITS)
    if e.batch is None or entry is None or entry.metrics is None or entry.join is None or entry.metrics.is_bound:
        return {}
    meanings = [origin.meaning or Semantics() for origin in e.batch.origins]
    rows, here = _places(entry.join, np.unique(cells))
    apart = entry.metrics.row_max_abs[rows].tolist()
    return {cell: explained_by_logits(meanings, gap) for cell, gap in zip(here.tolist(), apart)}


def _places(join: RowJoin, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (joined rows, their cells) of the wanted cells (sorted) that a join holds."""
    held = pack(join.pair, join.position)
    at = np.searchsorted(held, wanted)
    inside = at < len(held)
    inside[inside] = held[at[inside]] == wanted[inside]
    return at[inside], wanted[inside]
