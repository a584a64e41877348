"""The heat map of a report: the error of each token's residual stream after each layer, in noise floors.

Its rows are also the layer curves of the tokens that they score.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from probe.compare.align import pack, split
from probe.compare.judge import ROW_FACTOR, SUSPECT_RISE
from probe.compare.locate.token_layers import departed, departures, scoring_cells
from probe.compare.measure import Measured
from probe.compare.names.canonical import EMBEDDING, LOGITS, layer_of
from probe.compare.sequences import SequencePair
from probe.compare.tokens.batch import TokenBatch
from probe.store.schema import Sequence

NON_FINITE = 1e9
"""Stands in a cell for a row with a value that is NaN or infinite on one side only."""

MAX_TOKENS, MAX_LAYERS = 400, 64
"""Cells that a report holds: 25,600 of a few bytes. Half of the tokens are the worst, up to a quarter the rows that
score the tokens with the largest log-prob differences, the others a sample."""

ROW_BAND = ROW_FACTOR * SUSPECT_RISE
"""Noise floors that the worst row of a healthy tensor may reach, where those before it are at 1 (docs/verdicts.md)."""


def heat_map(
    measured: list[Measured], pairs: list[SequencePair], sequences: list[Sequence], batch: TokenBatch | None = None
) -> dict[str, Any] | None:
    """Return tokens x layers as plain data, or None where no residual stream was compared.

    ``batch``: the tokens whose scoring rows are kept where their log-probs differ most. ``cells``: one list per token
    of the relative L2 error after each of ``layers`` and of the logits, in noise floors (None: not compared there;
    NON_FINITE: not finite on one side); ``tokens``: {sequence, position, token} each, by sequence and position;
    ``first``: for each the first tensor where its row leaves the noise band, or None; ``worst``: how many of them are
    those with the largest cell; ``of_tokens``, ``of_layers``: how many there were; ``row_band``: ROW_BAND.
    """
    streams = [entry for entry in measured if _is_stream(entry)]
    if all(entry.match.label == LOGITS for entry in streams):
        return None
    labels = _evenly(len(streams), MAX_LAYERS, _worst_stream(streams))
    chosen = [streams[number] for number in labels]
    cells = np.unique(np.concatenate([pack(e.join.pair, e.join.position) for e in chosen if e.join is not None]))
    matrix = np.full((len(cells), len(chosen)), np.nan)
    for column, entry in enumerate(chosen):
        assert entry.join is not None and entry.metrics is not None
        at = np.searchsorted(cells, pack(entry.join.pair, entry.join.position))
        errors = entry.metrics.row_rel_l2 / entry.judgement.floor
        matrix[at, column] = np.where(entry.metrics.row_mismatch, NON_FINITE, errors)
    rows, worst = _rows(matrix, np.flatnonzero(np.isin(cells, scoring_cells(batch, MAX_TOKENS // 4))))
    found = departures(measured, cells[rows])
    first = [found.get(cell) for cell in cells[rows].tolist()]
    owners, positions = split(cells[rows])
    return {
        "unit": "noise floors",
        "layers": [_name(entry.match.label) for entry in chosen],
        "tokens": [_token(int(o), int(p), pairs, sequences) for o, p in zip(owners, positions)],
        "cells": [[_short(value) for value in row] for row in matrix[rows].tolist()],
        "first": [None if departure is None else departed(departure) for departure in first],
        "row_band": ROW_BAND,
        "worst": worst,
        "of_tokens": len(cells),
        "of_layers": len(streams),
    }


def _is_stream(entry: Measured) -> bool:
    module = entry.match.label.rpartition(":")[0]
    wanted = entry.match.label in (EMBEDDING, LOGITS) or module == f"layers.{layer_of(entry.match.label)}"
    compared = entry.metrics is not None and entry.join is not None and entry.metrics.rows
    return bool(wanted and compared and entry.judgement.floor > 0)


def _name(label: str) -> str:
    return label.rpartition(":")[0]


def _worst_stream(streams: list[Measured]) -> int:
    """Return the first divergent stream, which a sample of the layers must hold; else the last."""
    return next((n for n, entry in enumerate(streams) if entry.judgement.verdict == "divergent"), len(streams) - 1)


def _evenly(count: int, limit: int, keep: int) -> list[int]:
    """Return at most ``limit`` of ``count`` numbers, evenly spaced with both ends, one of them moved to ``keep``."""
    if count <= limit:
        return list(range(count))
    numbers = np.linspace(0, count - 1, limit).round().astype(int)
    numbers[int(np.abs(numbers - keep).argmin())] = keep
    return sorted(set(numbers.tolist()))


def _rows(matrix: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, int]:
    """Return which rows to show, in their order, and how many of them are the worst; ``wanted`` ones are among them."""
    if len(matrix) <= MAX_TOKENS:
        return np.arange(len(matrix)), len(matrix)
    score = np.nan_to_num(matrix, nan=-1.0).max(axis=1)
    order = np.argsort(-score, kind="stable")
    worst = order[: MAX_TOKENS // 2]
    kept = np.union1d(worst, wanted)
    rest = np.setdiff1d(order, kept)
    sample = rest[np.linspace(0, len(rest) - 1, MAX_TOKENS - len(kept)).round().astype(int)]
    return np.sort(np.concatenate([kept, sample])), len(worst)


def _token(owner: int, position: int, pairs: list[SequencePair], sequences: list[Sequence]) -> dict[str, Any]:
    tokens = sequences[pairs[owner].a].tokens
    token = int(tokens[position]) if position < len(tokens) else None
    return {"sequence": pairs[owner].label, "position": position, "token": token}


def _short(value: float) -> float | None:
    """Return three significant digits, None for NaN."""
    return None if math.isnan(value) else float(f"{value:.3g}")
