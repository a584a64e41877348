"""Which distribution tokens are drawn from and log-probs belong to: a temperature and a top-p over the logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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
    """Return what an engine's own log-probs contain: processed ones have temperature and top-p in them, raw neither."""
    if not str(manifest.get("logprobs_mode") or "").startswith("processed"):
        return Semantics()
    return drawn_from(manifest.get("sampling") or {})
