"""Outlier tokens: those that stand out from the other rows, and the first tensor where each departs."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from probe.compare.align import pack, split
from probe.compare.evidence import OutlierToken
from probe.compare.judge import ROW_FACTOR
from probe.compare.measure import Measured
from probe.compare.names.canonical import is_routing
from probe.compare.sequences import SequencePair
from probe.metrics import median
from probe.store.schema import Sequence

OUTLIER_FACTOR = 2 * ROW_FACTOR
"""Times the median row, or the noise floor where that is more, above which a row departs: healthy worst rows measured
at most 5.9 times a whole tensor (docs/verdicts.md)."""

MAX_TOKENS = 20
MAX_SHARE = 0.25
"""Where more rows than this depart from the median row, a tensor has a pattern of rows and no outliers."""


def outlier_tokens(
    measured: Iterable[Measured], pairs: list[SequencePair], sequences: list[Sequence]
) -> list[OutlierToken]:
    """Return the tokens that depart, those that depart first in front, then by how far; at most MAX_TOKENS.

    ``pairs``: the joined sequences; ``sequences``: those of side a. ``label``, ``rel_l2`` and ``band`` are of the first
    tensor, in execution order, whose row error of this token exceeds the band.
    """
    first: dict[int, tuple[int, OutlierToken]] = {}
    worst: dict[int, float] = {}
    for order, entry in enumerate(measured):
        found = departing(entry)
        if found is None or entry.join is None:
            continue
        rows, band, errors = found
        cells = pack(entry.join.pair[rows], entry.join.position[rows])
        for cell, error in zip(cells.tolist(), errors.tolist()):
            worst[cell] = max(worst.get(cell, 0.0), error / band)
            if cell not in first:
                first[cell] = order, _token(cell, entry.match.label, error, band, pairs, sequences)
    ranked = sorted(first, key=lambda cell: (first[cell][0], -worst[cell], cell))
    return [first[cell][1] for cell in ranked[:MAX_TOKENS]]


def departing(entry: Measured) -> tuple[np.ndarray, float, np.ndarray] | None:
    """Return (joined rows, the band, their errors) of the rows that depart from a tensor's other rows, or None."""
    metrics = entry.metrics
    if metrics is None or not metrics.rows or is_routing(entry.match.label) or not np.isfinite(entry.judgement.floor):
        return None
    errors = np.where(metrics.row_mismatch, np.inf, metrics.row_rel_l2)
    among = np.ones(len(errors), bool) if entry.among is None else entry.among
    if not among.any():
        return None
    band = OUTLIER_FACTOR * max(median(errors[among]), entry.judgement.floor)
    rows = np.flatnonzero(among & (errors > band))
    return (rows, band, errors[rows]) if 0 < len(rows) <= MAX_SHARE * among.sum() else None


def _token(
    cell: int, label: str, error: float, band: float, pairs: list[SequencePair], sequences: list[Sequence]
) -> OutlierToken:
    owner, position = (int(part) for part in split(np.array(cell)))
    tokens = sequences[pairs[owner].a].tokens
    token = int(tokens[position]) if position < len(tokens) else -1
    return OutlierToken(pairs[owner].label, position, token, label, error, band)
