"""Replay both sides of a comparison."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from probe.compare.evidence import Replays, RowKeys
from probe.compare.side import Side


def replay_sides(
    a: Side, b: Side, weights: str | Path | None, prefer: tuple[Mapping[str, RowKeys], Mapping[str, RowKeys]]
) -> Replays:
    """Replay every canonical tensor of both sides whose inputs are stored."""
    return Replays()
