"""Locate a divergence: the first module in execution order, and the first row of it, by position."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from probe.compare.align import split
from probe.compare.evidence import RowKeys
from probe.compare.measure import Measured
from probe.compare.names.base import key_of
from probe.compare.sequences import SequencePair


def first_divergent(measured: Iterable[Measured]) -> Measured | None:
    """Return the first divergent tensor in execution order; a leaf precedes the layer that contains it."""
    return next((entry for entry in measured if entry.judgement.verdict == "divergent"), None)


def first_row(entry: Measured) -> int | None:
    """Return the joined row, first by position and then by sequence, whose error exceeds the divergent band.

    A row with a non-finite value on one side only counts as such; without any the worst row is returned. Rows that a
    choice of other experts has reached do not count.
    """
    metrics, join = entry.metrics, entry.join
    if metrics is None or join is None or not metrics.rows:
        return None
    among = np.ones(metrics.rows, bool) if entry.among is None else entry.among
    beyond = np.flatnonzero(among & ((metrics.row_rel_l2 > entry.judgement.row_band) | metrics.row_mismatch))
    if not len(beyond):
        return int(np.argmax(np.where(among, metrics.row_rel_l2, -1.0)))
    return int(beyond[np.lexsort((join.pair[beyond], join.position[beyond]))[0]])


def first_divergence(measured: list[Measured], pairs: list[SequencePair]) -> dict[str, object] | None:
    """Return ``{name, slot, position, sequence}`` of the first divergence, or None."""
    entry = first_divergent(measured)
    if entry is None:
        return None
    name, slot = key_of(entry.match.label)
    row = first_row(entry)
    if row is None or entry.join is None:
        return {"name": name, "slot": slot, "position": None, "sequence": None}
    position, pair = int(entry.join.position[row]), pairs[int(entry.join.pair[row])]
    return {"name": name, "slot": slot, "position": position, "sequence": pair.label}


WORST_ROWS = 8
"""Rows of each tensor that are worth replaying before all others: those that differ most."""


def worst_rows(measured: Iterable[Measured]) -> tuple[Mapping[str, RowKeys], Mapping[str, RowKeys]]:
    """Return for each side: canonical label -> int64 [n, 2] (sequence number, position) of those that differ most."""
    found: tuple[dict[str, RowKeys], dict[str, RowKeys]] = {}, {}
    for entry in measured:
        if entry.metrics is None or entry.join is None:
            continue
        score = np.where(entry.metrics.row_mismatch, np.inf, entry.metrics.row_rel_l2)
        worst = np.argsort(-score, kind="stable")[:WORST_ROWS]
        for side in (0, 1):
            found[side][entry.match.label] = np.stack(split(entry.join.cells(side)[worst]), 1)
    return found
