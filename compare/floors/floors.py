"""The noise floor of each matched tensor, and where it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from probe.compare.judge import effective_dtype, modelled_floor
from probe.compare.match import Match
from probe.compare.side import Side

MODELLED, MEASURED, QUANTISED = "modelled", "measured", "quantised"


@dataclass(frozen=True)
class Floor:
    """A relative L2 difference that rounding explains, and its source: one of the three words above."""

    value: float
    source: str = MODELLED


@dataclass
class Floors:
    """The floors of two sides; ``measured``: canonical label -> relative L2 of one side measured twice."""

    a: Side
    b: Side
    measured: Mapping[str, float] = field(default_factory=dict)

    def of(self, match: Match) -> Floor:
        """Return the floor of a matched tensor."""
        return Floor(modelled_floor(*noise_model(self.a, self.b, match)))


def noise_model(a: Side, b: Side, match: Match) -> tuple[str, int, int]:
    """Return the arguments of :func:`modelled_floor`: dtype, operations before the tensor, longest dot product."""
    dtypes = a.dtype_of(match.source_a), b.dtype_of(match.source_b)
    reduction = max(size for side in (a, b) for size in (side.shape.hidden, side.shape.intermediate))
    return effective_dtype(*dtypes, *model_dtypes(a, b)), match.place.ops, reduction


def model_dtypes(a: Side, b: Side) -> tuple[str, str]:
    """Return the dtypes that the two models ran in."""
    return str(a.dump.manifest.get("dtype", "")), str(b.dump.manifest.get("dtype", ""))
