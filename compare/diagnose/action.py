"""What to do next: continue, correct with importance sampling, or stop, and the figures that this rests on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from probe.compare.diagnose.causes import CAUSES, PATTERN
from probe.compare.evidence import Evidence, Suspect
from probe.compare.side import Side

CONTINUE, CORRECT, STOP = "continue", "correct", "stop"

NOISE_CAUSES = frozenset({"rounding", "environment", "router-flip", "batch-variance"})
"""Causes that no repair removes soon: training can go on with its ratios corrected."""


@dataclass(frozen=True)
class Healthy:
    """The range of a token figure in which training was seen to be healthy, ends included, and who says so.

    ``moe``: the upper end for mixture-of-experts models and quantised rollouts, where it is another one.
    """

    low: float
    high: float
    source: str
    moe: float | None = None

    def end(self, loose: bool) -> float:
        """Return the upper end for a model."""
        return self.moe if loose and self.moe is not None else self.high

    def words(self, loose: bool) -> str:
        """Return the range in words."""
        high = self.end(loose)
        if not math.isfinite(high):
            return f"at least {self.low:g}"
        return f"at most {high:g}" if not math.isfinite(self.low) or self.low == 0 else f"{self.low:g} to {high:g}"


HEALTHY: dict[str, Healthy] = {
    "mean_abs_logprob_diff": Healthy(
        0.0, 0.03, "CI limits of Miles (0.03, dense) and slime (0.1); dense bf16 measures 0.011, large MoE 0.04", 0.1
    ),
    "k3": Healthy(0.0, 1e-3, "NeMo-RL; with experts what a mean |D| of 0.1 makes it for normal differences", 0.008),
    "tme": Healthy(0.0, 1.05, "token-multiplicative error, NeMo-RL; with experts as k3", 1.11),
    "mean_ratio": Healthy(0.5, 2.0, "verl's rollout correction warns outside"),
    "ess": Healthy(0.3, math.inf, "verl's rollout correction warns below"),
    "chi2_token": Healthy(-math.inf, 1.0, "verl's rollout correction: above is severe"),
    "pearson": Healthy(
        0.97, math.inf, "0.9996 between two prefills, 0.977 between decode and prefill, 0.13 with wrong inputs"
    ),
}
"""Token figures that decide between continuing and correcting (docs/tokens.md has formulas and sources)."""


def recommend(evidence: Evidence) -> dict[str, Any]:
    """Return the recommended action as the report's ``action``: ``word``, ``text``, ``figures``.

    Words: ``continue``; ``correct`` (with importance sampling: what differs is noise, but more of it than a ratio of 1
    should ignore); ``stop`` (something is wrong, or nothing could be judged).
    """
    loose = loose_ranges(evidence.side_a, evidence.side_b)
    figures = healthy_figures(evidence.tokens, loose=loose) if evidence.tokens["compared"] else []
    off = [figure for figure in figures if not figure["ok"]]
    word, text = _decide(evidence, off)
    return {"word": word, "text": text, "figures": figures}


def healthy_figures(tokens: Mapping[str, Any], *, loose: bool) -> list[dict[str, Any]]:
    """Return the figures of HEALTHY that a ``tokens`` section has a number for, each held against its range.

    ``loose``: the upper ends of mixtures of experts and quantised rollouts hold (:func:`loose_ranges`).
    """
    figures = []
    for name, healthy in HEALTHY.items():
        value = tokens.get(name)
        if value is not None and not math.isnan(value):
            ok = healthy.low <= value <= healthy.end(loose)
            figures.append(
                {"name": name, "value": value, "healthy": healthy.words(loose), "source": healthy.source, "ok": ok}
            )
    return figures


def loose_ranges(a: Side, b: Side) -> bool:
    """Tell whether a side is a mixture of experts or computes in 8 bits: its log-probs part further when healthy."""
    return any(side.shape.experts for side in (a, b)) or "float8" in str(_dtypes(a, b))


def _dtypes(*sides: Side) -> list[Any]:
    manifests = [side.dump.manifest for side in sides]
    return [manifest.get(key) for manifest in manifests for key in ("dtype", "kv_cache_dtype", "quantization")]


def _decide(e: Evidence, off: list[dict[str, Any]]) -> tuple[str, str]:
    real = [suspect for suspect in e.suspects if suspect.cause not in NOISE_CAUSES and suspect.confidence >= PATTERN]
    if e.verdict == "incomparable":
        return STOP, "Too little could be compared to say that training is safe: dump what is missing, compare again."
    if e.verdict == "divergent" or (e.verdict == "suspect" and real):
        return STOP, _stop(e, real)
    if e.verdict == "suspect" or off:
        noise = "differs by more than noise is expected to" if e.verdict == "suspect" else "agrees within rounding"
        return CORRECT, (
            f"What was compared {noise}{_outside(off)}: correct the policy ratio with truncated importance sampling "
            "over rollout log-probs, and watch these figures."
        )
    if e.suspects:
        return CORRECT, f"The computations agree, but {_words(e.suspects[0])}: mind it in the policy ratio."
    if not e.tokens["compared"]:
        return CONTINUE, "What was compared agrees; no response log-prob was, so the policy ratio itself is unseen."
    return CONTINUE, "The sides agree within rounding, and so do their log-probs: nothing needs correcting."


def _stop(e: Evidence, real: list[Suspect]) -> str:
    if not real:
        return "The two sides do not compute the same thing: find the cause before training on these log-probs."
    first = real[0]
    if first.cause == "lagged-weights":
        return (
            "The weights lag as declared, so that a fault cannot be told from the updates in between: compare sequences"
            " of one version; the policy ratio of the others needs importance sampling."
        )
    return f"Repair {first.name} first ({_words(first)}); importance sampling would only hide it."


def _words(suspect: Suspect) -> str:
    return CAUSES.get(suspect.cause, CAUSES["unknown"]).meaning


def _outside(off: list[dict[str, Any]]) -> str:
    if not off:
        return ""
    return ", but " + ", ".join(f"{figure['name']} is {figure['value']:.3g} ({figure['healthy']})" for figure in off)
