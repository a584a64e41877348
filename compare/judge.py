"""Judge a measured difference against a modelled noise floor, and the whole comparison from its parts.

docs/verdicts.md derives every constant here and says how it was checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from probe.metrics import PairMetrics, coarser_dtype, median

ROUNDING = {
    "float64": 4.7e-17,
    "float32": 2.5e-8,
    "float16": 2.07e-4,
    "bfloat16": 1.66e-3,
    "float8_e4m3fn": 2.66e-2,
    "float8_e5m2": 5.3e-2,
}
"""RMS relative error of one rounding to a dtype: 0.425 times 2^-(mantissa bits + 1), measured on bf16 and fp32."""

ACCUMULATOR_ROUNDINGS = 4.0
"""Accumulator roundings in the result of one operation, RMS over a layer's operations, for short reductions."""

REDUCTION_SHARE = 0.04
"""Accumulator roundings that one operation adds per square root of the reduction length; the two were fitted to fp32
forwards with reductions of 256 to 8,192 terms."""

GROWTH = 3.5
"""Amplification of a rounding by the operations after it, fitted to measured floors."""

SUSPECT_RISE, DIVERGENT_RISE = 4.0, 10.0
"""Bands on the excess: noise floors of a tensor over the level that the tensors before it had reached (at least one
floor). Healthy pairs measured at most 2.17 whatever the model amplifies, because amplification builds up gradually."""

SUSPECT_FLOORS, DIVERGENT_FLOORS = 80.0, 200.0
"""Bands on the noise floors themselves, which stop a gradual rise. Healthy pairs of models built to amplify (sharp
attention) measured at most 40.3, ordinary ones at most 3.3."""

MEASURED_SUSPECT, MEASURED_DIVERGENT = 4.0, 8.0
"""Bands in floors that were measured by re-rounding at random: healthy pairs measured at most 2.6 of them in models
built to amplify, 1.4 in others; above 4 the faulty module was the first one in six faults of six."""

ROW_FACTOR = 5.0
"""A single row may stray this much further than a whole tensor: healthy worst rows of ordinary models measured at most
5.9 times it in 96 to 128 rows, with outliers. With sharp attention they measured up to 21 times it, gradually: no
absolute band ends that rise for a row alone."""

NORM_FACTOR = 0.25
"""The ratio of the two norms may stray this much of a whole tensor's bands: rounding errors mostly cancel in it
(healthy pairs measured at most 0.28 floors), a scaled tensor shows in full."""

SUSPECT_SHARE = 0.01
"""More suspect modules than this share make the whole comparison suspect (design: healthy pairs stay below)."""

TOKEN_WORST = 1.0
"""Nats that the log-prob of a single token may lie beyond what agreeing logits account for. Rounding logits of up to
128 to bf16 moves them by 0.25, and the logarithm of their sum likewise: 0.5 on either side."""

TOKEN_SUSPECT = 0.1
"""Mean absolute log-prob difference above which tokens alone make a comparison suspect (slime's CI limit; healthy
dense bf16 pairs measure about 0.011, mixture-of-experts pairs up to 0.07)."""


MODELLED, MEASURED, REPEATED, QUANTISED = "modelled", "measured", "repeated", "quantised"
"""Where a floor comes from: the formula; random re-rounding of one side; one side run again; declared quantisation."""


@dataclass(frozen=True)
class Floor:
    """A relative L2 difference that rounding explains, its source, and what the formula alone says (0: the same)."""

    value: float
    source: str = MODELLED
    modelled: float = 0.0

    def times(self, factor: float) -> Floor:
        """Return the floor of a tensor that carries ``factor`` times the noise."""
        return Floor(self.value * factor, self.source, self.modelled * factor)

    @property
    def gain(self) -> float:
        """Return the floor in modelled floors."""
        return self.value / self.modelled if self.modelled else 1.0


@dataclass(frozen=True)
class Bands:
    """Noise floors above which a tensor is suspect and divergent: over the level before it, and at any level."""

    suspect_rise: float
    divergent_rise: float
    suspect: float
    divergent: float

    def at(self, level: float, *, rises: bool = False) -> dict[str, float]:
        """Return the bands of a tensor before which others had reached ``level``, the worse word first.

        A sign that ``rises`` has no absolute band where the bands follow the level at all.
        """
        above = max(level, 1.0)
        ends = not rises or self.suspect <= self.suspect_rise
        pairs = {"divergent": (self.divergent_rise, self.divergent), "suspect": (self.suspect_rise, self.suspect)}
        return {word: min(rise * above, end) if ends else rise * above for word, (rise, end) in pairs.items()}


@dataclass(frozen=True)
class Judgement:
    """A verdict word with what it rests on.

    ``floor``: modelled noise floor (relL2); ``ratio``: measured relL2 / floor; ``evidence``: the noise floors that
    decided (of the whole tensor, its median row or its worst row); ``band``: floors above which it is divergent;
    ``reason``: in words, empty where there is nothing to explain.
    """

    verdict: str
    floor: float
    ratio: float
    evidence: float = 0.0
    band: float = DIVERGENT_RISE
    reason: str = ""

    @property
    def row_band(self) -> float:
        """Return the row error (relL2) that marks a row as divergent, for the search of the first such row."""
        return self.band * self.floor


def modelled_floor(dtype: str, ops: int, reduction: int) -> float:
    """Return the relL2 that rounding alone explains after ``ops`` operations in ``dtype``.

    floor = GROWTH * e * sqrt(1 + ops); e joins the rounding of the result to ``dtype`` and the roundings of its float32
    accumulator (float64 for float64) over ``reduction``, the length of the model's longest dot product. Errors of
    independent roundings add as a square root (N. Higham and T. Mary, 2019).
    """
    accumulator = ROUNDING["float64" if dtype == "float64" else "float32"]
    inside = accumulator * float(np.hypot(ACCUMULATOR_ROUNDINGS, REDUCTION_SHARE * np.sqrt(reduction)))
    return GROWTH * float(np.hypot(ROUNDING[dtype], inside)) * float(np.sqrt(1 + ops))


def effective_dtype(*names: str) -> str:
    """Return the dtype whose rounding decides: the coarser of the stored tensors and of the models' own dtypes.

    Logits upcast to float32 after a bf16 forward still carry bf16's noise.
    """
    return coarser_dtype(*names)


BANDS = {
    MODELLED: Bands(SUSPECT_RISE, DIVERGENT_RISE, SUSPECT_FLOORS, DIVERGENT_FLOORS),
    QUANTISED: Bands(SUSPECT_RISE, DIVERGENT_RISE, SUSPECT_FLOORS, DIVERGENT_FLOORS),
    REPEATED: Bands(SUSPECT_RISE, DIVERGENT_RISE, SUSPECT_RISE, DIVERGENT_RISE),
    MEASURED: Bands(MEASURED_SUSPECT, MEASURED_DIVERGENT, MEASURED_SUSPECT, MEASURED_DIVERGENT),
}
"""Bands by where the floor comes from. A floor that was measured holds the model's amplification already: no level of
the tensors before raises its bands."""


def judge(metrics: PairMetrics, floor: Floor | float, level: float = 1.0) -> Judgement:
    """Judge one tensor pair against its noise floor (a number is a modelled one).

    ``level``: the most modelled floors that the tensors before it reached without being divergent, at least 1.
    :data:`BANDS` says how far above it, or above its floor, a tensor of each source may lie.
    """
    known = floor if isinstance(floor, Floor) else Floor(floor)
    floor = known.value
    ratio = metrics.rel_l2 / floor if metrics.pairs else float("nan")
    if metrics.nonfinite_mismatch:
        reason = f"{metrics.nonfinite_mismatch} values are NaN or Inf on one side only"
        return Judgement("divergent", floor, ratio, reason=reason)
    if not metrics.pairs:
        return Judgement("incomparable", floor, ratio, reason="no pair of finite values")
    if metrics.identical:
        return Judgement("identical", floor, ratio)
    signs = _signs(metrics, floor, ratio)
    evidence = max(sign.floors / sign.allowance for sign in signs)
    bands = {rises: BANDS[known.source].at(level / known.gain, rises=rises) for rises in (False, True)}
    for word in bands[False]:
        sign = next((s for s in signs if s.floors > bands[s.rises][word] * s.allowance), None)
        if sign is not None:
            reason = _explain(sign, bands[sign.rises][word])
            return Judgement(word, floor, ratio, evidence, bands[False]["divergent"], reason)
    return Judgement("consistent", floor, ratio, evidence, bands[False]["divergent"])


@dataclass(frozen=True)
class _Sign:
    """Where a difference may show, how many noise floors it has there, and how many times the band it is allowed.

    ``rises``: judged by its rise over the level before alone.
    """

    where: str
    floors: float
    allowance: float
    rises: bool = False


def _signs(metrics: PairMetrics, floor: float, ratio: float) -> tuple[_Sign, ...]:
    """Return the signs of a difference, the plainest first.

    The median row speaks where a few rows of huge norm hide the others; the worst row where most are healthy; the norm
    where bf16's noise covers a change of scale.
    """
    norm = abs(metrics.norm_ratio - 1) if np.isfinite(metrics.norm_ratio) else 0.0
    return (
        _Sign("over the whole tensor", ratio, 1.0),
        _Sign("in the median row", median(metrics.row_rel_l2) / floor, 1.0),
        _Sign("in the worst row", float(metrics.row_rel_l2.max()) / floor, ROW_FACTOR, rises=True),
        _Sign("in the ratio of the norms", norm / floor, NORM_FACTOR),
    )


def _explain(sign: _Sign, band: float) -> str:
    """Say where a difference exceeds its band."""
    return f"{sign.floors:.3g} noise floors {sign.where}, where {band * sign.allowance:.3g} are allowed"


def overall(
    modules: Iterable[str],
    gates: Mapping[str, str],
    tokens: float | None,
    coverage: float,
    min_coverage: float,
    worst_token: float = 0.0,
    other_distribution: bool = False,
) -> str:
    """Return the verdict word of a whole comparison.

    ``modules``: verdicts of the compared tensors; ``gates``: status by gate name; ``tokens``: mean absolute log-prob
    difference that the tensors do not account for, or None, and ``worst_token`` the largest where logits say what they
    allow; ``other_distribution``: the engines' own log-probs mean different things, although their logits do not;
    ``coverage``: the smallest of the shares of tensors, rows and response tokens that were compared.
    """
    words = [word for word in modules if word not in ("missing", "incomparable")]
    failed = any(gates.get(name) == "fail" for name in ("tokens", "weights", "sampling", "config", "positions"))
    if "divergent" in words or failed:
        return "divergent"
    if (not words and tokens is None) or coverage < min_coverage:
        return "incomparable"
    if (words and words.count("suspect") > SUSPECT_SHARE * len(words)) or gates.get("replicas") == "fail":
        return "suspect"
    if other_distribution:
        return "suspect"
    return "suspect" if (tokens or 0.0) > TOKEN_SUSPECT or worst_token > TOKEN_WORST else "consistent"
