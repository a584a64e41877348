"""Block deltas: what each residual block adds to the stream, compared by itself."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from probe.compare.align import RowJoin, pack
from probe.compare.evidence import BlockDelta
from probe.compare.judge import ROUNDING
from probe.compare.locate.inputs import stream_before
from probe.compare.measure import Measured
from probe.compare.merge import CanonicalReader
from probe.compare.names.base import Source
from probe.compare.names.canonical import layer_of
from probe.compare.side import Side
from probe.errors import ProbeError
from probe.metrics import coarser_dtype

ROWS = 256
"""Rows on which a delta is compared at most, evenly spaced: relative L2 over 256 rows is within 5 % of that of all."""


def block_deltas(measured: Iterable[Measured], a: Side, b: Side) -> list[BlockDelta]:
    """Return for each layer how its delta, stream after less stream before, differs between the sides.

    The stream's norm grows with depth, so that a broken block may be a small part of the stream it is added to; of its
    delta it is all. ``rel_l2`` = |D_a - D_b| / |D_b| and ``norm_ratio`` = |D_a| / |D_b| over at most ROWS rows;
    ``rounding`` = e |(after, before)| / |D_b|, the part of it that storing the two streams in their dtype explains (e:
    RMS of one rounding). Values are read again, one layer's at a time.
    """
    streams = {m.match.label: m for m in measured if m.metrics is not None and m.join is not None}
    readers = CanonicalReader(a), CanonicalReader(b)
    deltas = []
    for label, after in streams.items():
        layer = layer_of(label)
        before = None if label != f"layers.{layer}:output.0" else streams.get(stream_before(label, 0))
        if before is None:
            continue
        try:
            found = _delta(label, before, after, readers)
        except ProbeError:  # what cannot be read again was measured all the same: there is no delta of it
            continue
        deltas += [found] if found else []
    return deltas


def _delta(
    label: str, before: Measured, after: Measured, readers: tuple[CanonicalReader, CanonicalReader]
) -> BlockDelta | None:
    assert before.join is not None and after.join is not None
    in_before, in_after = common_rows(before.join, after.join, ROWS)
    if not len(in_after) or before.metrics is None or after.metrics is None:
        return None
    values: list[tuple[np.ndarray, np.ndarray]] = []
    for side, reader in enumerate(readers):
        parts = []
        for entry, at in ((before, in_before), (after, in_after)):
            assert entry.join is not None
            source = entry.match.source_b if side else entry.match.source_a
            index = entry.join.index_b if side else entry.join.index_a
            parts.append(reader.read(source, index[at]).astype(np.float64))
        values.append((parts[0], parts[1]))
    (before_a, after_a), (before_b, after_b) = values
    if before_a.shape != after_b.shape:
        return None
    finite = np.logical_and.reduce([np.isfinite(part) for pair in values for part in pair])
    before_a, after_a, before_b, after_b = (part[finite] for part in (before_a, after_a, before_b, after_b))
    delta_a, delta_b = after_a - before_a, after_b - before_b
    norm = _norm(delta_b)
    if not norm:
        return None
    dtype = coarser_dtype(*(reader.side.dtype_of(s) for reader, s in zip(readers, _sources(after))))
    stored = float(np.hypot(_norm(after_b), _norm(before_b)))
    difference, ratio = _norm(delta_a - delta_b), _norm(delta_a) / norm
    return BlockDelta(label, difference / norm, ROUNDING[dtype] * stored / norm, ratio, len(in_after))


def _norm(values: np.ndarray) -> float:
    """Return the L2 norm without BLAS, whose threads cost more than such a sum on a busy machine."""
    return float(np.sqrt(np.einsum("i,i->", values, values)))


def _sources(entry: Measured) -> tuple[Source, Source]:
    return entry.match.source_a, entry.match.source_b


def common_rows(one: RowJoin, other: RowJoin, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers, in two joins, of at most ``limit`` rows that both hold, evenly spaced among them."""
    left, right = (pack(join.pair, join.position) for join in (one, other))
    _, in_one, in_other = np.intersect1d(left, right, assume_unique=True, return_indices=True)
    chosen = np.unique(np.linspace(0, len(in_one) - 1, min(limit, len(in_one))).round().astype(np.int64))
    return in_one[chosen], in_other[chosen]
