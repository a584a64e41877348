"""The verdict on a batch of tokens: from what its log-probs are, and from figures held against healthy ranges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from probe.compare.diagnose.action import HEALTHY, healthy_figures
from probe.compare.gates import GateFinding
from probe.compare.sampling_gate import OTHER_DISTRIBUTION
from probe.compare.tokens.batch import TokenBatch

NOTHING_SAID = ("bypassed-logprobs",)
"""Causes that make a comparison say nothing: both sides are one array."""

NO_FAULT = (*OTHER_DISTRIBUTION, "raw-logprobs", "length-mismatch")
"""Causes that leave each side's log-probs right and a ratio of the two wrong: suspect. Any other is a fault."""

SEEN_BY_PROBABILITY = ("mean_prob_diff", "mean_abs_logprob_diff")
"""|p - q| is at most |D|, since no probability exceeds 1: where the mean of the first is outside the range of the
second, so is the mean of the second. The reverse does not hold."""


def held_figures(batch: TokenBatch, tokens: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the figures of a ``tokens`` section against their healthy ranges (compare/diagnose/action.py)."""
    if not len(batch) or batch.a is not None:
        return healthy_figures(tokens, loose=batch.loose)
    known, implied = SEEN_BY_PROBABILITY
    figures = healthy_figures({implied: tokens[known]}, loose=batch.loose)
    return [
        {**figure, "name": known, "source": f"|p - q| <= |D|, and for {implied}: {HEALTHY[implied].source}"}
        for figure in figures
    ]


def verdict(batch: TokenBatch, findings: Sequence[GateFinding], figures: Sequence[Mapping[str, Any]]) -> str:
    """Return the verdict word: the first of these that holds.

    ``divergent``: a finding that is a fault (log-probs that are not finite are one); ``incomparable``: no token was
    compared, or both sides are one array; ``suspect``: a finding that only concerns the distribution or the lengths, or
    a figure outside its healthy range; else ``consistent``.
    """
    causes = {finding.cause for finding in findings}
    if causes - {*NOTHING_SAID, *NO_FAULT}:
        return "divergent"
    if not len(batch) or causes & set(NOTHING_SAID):
        return "incomparable"
    return "suspect" if causes or not all(figure["ok"] for figure in figures) else "consistent"
