"""Whether a few features of a tensor carry its error."""

from __future__ import annotations

import numpy as np

from probe.compare.evidence import ChannelPattern
from probe.compare.judge import DIVERGENT_RISE
from probe.compare.measure import Measured
from probe.metrics import PairMetrics, median

FEW_SHARE = 0.05
"""Largest share of the features that count as a few."""

MIN_SHARE = 0.5
"""Least share of |d|^2 that they must carry."""

ABOVE_MEDIAN = 10.0
"""Times the median feature's error that a broken one must reach. Features of healthy pairs lie within a factor of 4 of
their median (replayed bf16 modules: worst column 2.2 roundings, p50 1.0; docs/verdicts.md)."""

SHOWN = 16


def channel_pattern(entry: Measured) -> ChannelPattern | None:
    """Return the few features of a measured tensor that carry its error, or None where it is spread over them all.

    A feature is broken where its relative error is ABOVE_MEDIAN times the median feature's and beyond the divergent
    band of the noise floor; it is a pattern where they are at most FEW_SHARE of all and carry MIN_SHARE of |d|^2.
    """
    if entry.metrics is None:
        return None
    return few_channels(entry.metrics, DIVERGENT_RISE * entry.judgement.floor)


def few_channels(metrics: PairMetrics, band: float) -> ChannelPattern | None:
    """Return the few features with a relative error above ``band`` that carry a tensor's error, or None."""
    errors, squares = metrics.channel_rel_l2, metrics.channel_d2
    if len(errors) < 1 / FEW_SHARE or not squares.sum():
        return None
    broken = np.flatnonzero(errors > max(ABOVE_MEDIAN * median(errors), band))
    share = float(squares[broken].sum() / squares.sum())
    if not len(broken) or len(broken) > FEW_SHARE * len(errors) or share < MIN_SHARE:
        return None
    worst = broken[np.argsort(-squares[broken], kind="stable")][:SHOWN]
    return ChannelPattern(tuple(int(column) for column in worst), len(broken), len(errors), share)
