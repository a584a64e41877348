"""Put together what a comparison knows about where two sides part."""

from __future__ import annotations

from probe.compare.evidence import ChannelPattern, Evidence, Located, OwnError, Replayed, RowPattern
from probe.compare.locate.channels import channel_pattern
from probe.compare.locate.deltas import block_deltas
from probe.compare.locate.growth import growth
from probe.compare.locate.heat import heat_map
from probe.compare.locate.own import own_errors
from probe.compare.locate.rows import RowReader, replayed_pattern, row_pattern
from probe.compare.locate.token_layers import FLAGGED
from probe.compare.locate.tokens import outlier_tokens
from probe.compare.measure import Measured


def locate(evidence: Evidence) -> Located:
    """Return own errors, jumps, outlier tokens, and the patterns of rows and channels of the tensors that are flagged.

    Block deltas read values again, so that they are made only where a tensor is flagged or a replay broken.
    """
    measured, pairs, sequences = evidence.measured, evidence.join.pairs, evidence.a.sequences
    located = Located(own=own_errors(measured))
    located.growth, located.jumps = growth(measured)
    located.tokens = outlier_tokens(measured, pairs, sequences)
    located.heat = heat_map(measured, pairs, sequences, evidence.batch)
    broken = {found.label: found for found in evidence.replays.broken()}
    reader = RowReader(pairs, sequences, evidence.b.sequences)
    flagged = False
    for entry in measured:
        label = entry.match.label
        if entry.judgement.verdict not in FLAGGED and label not in broken:
            continue
        flagged = True
        rows = _rows(entry, broken.get(label), reader, located.own.get(label))
        channels = channel_pattern(entry) or _replayed_channels(broken.get(label))
        located.rows |= {label: rows} if rows else {}
        located.channels |= {label: channels} if channels else {}
    if flagged:
        located.deltas = block_deltas(measured, evidence.side_a, evidence.side_b)
    return located


OWN_SHARE = 0.5
"""Share of the squared error that a tensor's inputs must leave for its rows to speak of its own module."""


def _rows(entry: Measured, found: Replayed | None, reader: RowReader, own: OwnError | None) -> RowPattern | None:
    """Return the rows that carry a tensor's error: those that differ between the sides, or those that its replay shows.

    The replay's rows are its module's own, so that they go first where most of the difference is inherited; where
    rounding noise covers the difference they are all there is.
    """
    differing = row_pattern(entry, reader)
    replayed = None if found is None else replayed_pattern(found, reader)
    inherited = own is not None and own.own**2 < OWN_SHARE * (own.own**2 + own.inherited**2)
    return replayed or differing if inherited else differing or replayed


def _replayed_channels(found: Replayed | None) -> ChannelPattern | None:
    """Return the worst column of a replay that only its columns show to be broken."""
    if found is None or found.error > found.band or found.worst_column <= found.column_band or found.column < 0:
        return None
    return ChannelPattern((found.column,), 1, 0, float("nan"))
