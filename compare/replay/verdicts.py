"""Let replays speak in the verdicts of tensors."""

from __future__ import annotations

from probe.compare.evidence import Evidence


def apply_replays(evidence: Evidence) -> None:
    """Make tensors divergent whose module one side's replay shows to be broken."""
