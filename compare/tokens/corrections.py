"""What the corrections for a rollout mismatch that trainers offer would do to these tokens: how many they touch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from probe.compare.tokens.batch import TokenBatch


@dataclass(frozen=True)
class Correction:
    """One correction of importance ratios rho = exp(D).

    ``of``: what is held against the bounds: ``token`` (rho of each token), or of a sequence the ``product`` of its
    ratios, their geometric ``mean``, or the ``least`` of them. ``kind``: ``clamp`` (the weight is cut to the bound),
    ``mask`` (weight 0), ``veto`` (one token takes its whole sequence out). ``low`` and ``high``: bounds on the ratio;
    what lies on a bound is kept. ``source``: who sets it so.
    """

    name: str
    kind: str
    of: str
    low: float | None
    high: float | None
    source: str

    @property
    def level(self) -> str:
        """Return whether tokens or whole sequences are touched."""
        return "token" if self.of == "token" else "sequence"

    @property
    def words(self) -> str:
        """Return the bound in words."""
        subject = _SUBJECTS[self.of]
        if self.low is not None and self.high is not None:
            return f"{subject} outside {self.low:.4g} to {self.high:.4g}"
        return f"{subject} above {self.high:g}" if self.low is None else f"{subject} below {self.low:g}"


_SUBJECTS = {"token": "rho", "product": "product of rho", "mean": "geometric mean of rho", "least": "any rho"}

CORRECTIONS = (
    Correction(
        "TIS, token", "clamp", "token", None, 2.0,
        "verl 0.9.1 decoupled_token_is and slime --tis-clip: 2 (verl's guide: 1.5 to 5)",
    ),
    Correction("TIS, token, loose", "clamp", "token", None, 5.0, "upper end of the 1.5 to 5 of verl's guide"),
    Correction(
        "TIS, sequence", "clamp", "product", None, 2.0,
        "verl 0.9.1 rollout_is_threshold, decoupled_seq_is: 2 (verl's guide: 2 to 10)",
    ),
    Correction("TIS, sequence, loose", "clamp", "product", None, 10.0, "upper end of the 2 to 10 of verl's guide"),
    Correction(
        "IcePop", "mask", "token", 0.5, 5.0,
        "Ring-1T (Ling team, 2025): alpha 0.5, beta 5; verl 0.9.1 decoupled_token_icepop likewise",
    ),
    Correction(
        "sequence rejection", "mask", "product", 0.5, 2.0, "verl 0.9.1 decoupled_seq_is_rs: seq_sum_k1, 0.5_2.0"
    ),
    Correction(
        "geometric rejection", "mask", "mean", 1 / 1.001, 1 / 0.999,  # verl bounds the inverse, exp(-mean D)
        "verl 0.9.1 decoupled_geo_rs: seq_mean_k1, 0.999_1.001",
    ),
    Correction(
        "veto", "veto", "least", 1e-4, None,
        "verl 0.6 rollout_token_veto_threshold: 1e-4 to 1e-6 where it is on",
    ),
)  # fmt: skip
"""Corrections in the order in which they are shown, each with the bound that its trainer sets or advises."""


def corrections(batch: TokenBatch) -> list[dict[str, Any]]:
    """Return what each of CORRECTIONS would touch: ``share`` of the tokens, ``sequences_share`` of the sequences.

    Sequences are those of which a token was compared; one counts at token level when any of its tokens is touched. All
    is decided on D, so that no ratio overflows. Empty without tokens or log-probs.
    """
    if batch.a is None or batch.b is None or not len(batch):
        return []
    difference = batch.b - batch.a
    starts = np.flatnonzero(np.diff(batch.sequence, prepend=-1))
    counts = np.diff(starts, append=len(difference))
    sums = np.add.reduceat(difference, starts)
    values = {
        "token": difference,
        "product": sums,
        "mean": sums / counts,
        "least": np.minimum.reduceat(difference, starts),
    }
    entries = []
    for correction in CORRECTIONS:
        touched = _outside(values[correction.of], correction)
        if correction.level == "token":
            share, sequences = touched.mean(), np.logical_or.reduceat(touched, starts).mean()
        else:
            share, sequences = counts[touched].sum() / len(difference), touched.mean()
        entries.append(_entry(correction, float(share), float(sequences)))
    return entries


def _outside(values: np.ndarray, correction: Correction) -> np.ndarray:
    low = -np.inf if correction.low is None else np.log(correction.low)
    high = np.inf if correction.high is None else np.log(correction.high)
    return np.asarray((values < low) | (values > high))


def _entry(correction: Correction, share: float, sequences: float) -> dict[str, Any]:
    named = {name: getattr(correction, name) for name in ("name", "level", "kind", "low", "high")}
    shares = {"share": share, "sequences_share": sequences}
    return {**named, "bound": correction.words, **shares, "source": correction.source}
