"""Run the preflight gates of a comparison in their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from probe.compare.environment_gate import environment_gate
from probe.compare.gates import Gate, in_order, tokens_gate
from probe.compare.positions_gate import positions_gate
from probe.compare.replicas import replicas_gate
from probe.compare.sampling_gate import sampling_gate
from probe.compare.sequences import SequenceJoin
from probe.compare.settings_gates import config_gate
from probe.compare.side import Side
from probe.compare.versions import lag_of
from probe.compare.weights_gate import weights_gate


def preflight(
    a: Side, b: Side, join: SequenceJoin, environment: Sequence[Mapping[str, Any]], weights: str | Path | None = None
) -> list[Gate]:
    """Return all gates; ``environment``: the facts of both runs; ``weights``: the checkpoint that both should hold."""
    return in_order(
        (
            tokens_gate(a.dump, b.dump, join),
            positions_gate(a, b, join),
            weights_gate(a, b, weights, lag_of(join, a.dump.sequences, b.dump.sequences)),
            replicas_gate(a.dump, b.dump),
            sampling_gate(a, b, join),
            config_gate(a, b),
            environment_gate(environment),
        )
    )
