"""Which distribution tokens are drawn from and log-probs belong to: a temperature and a top-p over the logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

DISTRIBUTION = ("temperature", "top_p", "top_k", "min_p")
"""Sampling parameters of a request that say which of the model's tokens are drawn, and how often."""


@dataclass(frozen=True)
class Semantics:
    """What distribution log-probs belong to: the temperature and top-p already in them (1 and 1: untouched logits)."""

    temperature: float = 1.0
    top_p: float = 1.0


def drawn_from(sampling: Mapping[str, Any]) -> Semantics:
    """Return the distribution that a manifest's ``sampling`` draws tokens from.

    Greedy decoding (temperature 0) draws from none; vLLM's processed log-probs are then of the untouched logits.
    """
    if sampling.get("temperature") == 0:
        return Semantics()
    return Semantics(float(sampling.get("temperature") or 1.0), float(sampling.get("top_p") or 1.0))


def engine_semantics(manifest: Mapping[str, Any]) -> Semantics:
    """Return what an engine's own log-probs contain.

    Processed ones (vLLM) have temperature and top-p in them, those after the temperature (SGLang) only that, raw ones
    neither.
    """
    mode, drawn = str(manifest.get("logprobs_mode") or ""), drawn_from(manifest.get("sampling") or {})
    if mode.startswith("temperature"):
        return replace(drawn, top_p=1.0)
    return drawn if mode.startswith("processed") else Semantics()
