"""Parameters: their sketches by canonical name, how they differ, what a checkpoint says of them, their values."""

from probe.compare.weights.agreement import Agreement, agreement
from probe.compare.weights.canonical import Weight, canonical_parameter, canonical_weights
from probe.compare.weights.changes import Finding, compare_weights
from probe.compare.weights.checkpoint import CheckpointWeights

__all__ = [
    "Agreement",
    "CheckpointWeights",
    "Finding",
    "Weight",
    "agreement",
    "canonical_parameter",
    "canonical_weights",
    "compare_weights",
]
