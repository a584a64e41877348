"""Apply the rules to the evidence and rank what they find."""

from __future__ import annotations

from typing import Any

from probe.compare.evidence import Evidence, Suspect


def diagnose(evidence: Evidence) -> list[Suspect]:
    """Return the suspects, the likeliest first."""
    return []


def recommend(evidence: Evidence) -> dict[str, Any]:
    """Return the recommended action with the figures it rests on."""
    return {"word": "continue", "text": "", "figures": []}
