"""The noise floor of each matched tensor, and where it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from probe.compare.floors.quantised import Quantisation, declared
from probe.compare.judge import (
    GROWTH,
    MEASURED,
    MODELLED,
    QUANTISED,
    REPEATED,
    ROUNDING,
    Floor,
    effective_dtype,
    modelled_floor,
)
from probe.compare.match import Match
from probe.compare.names.canonical import OPS_PER_LAYER
from probe.compare.side import Side

__all__ = ["MEASURED", "MODELLED", "QUANTISED", "REPEATED", "Floor", "Floors", "model_dtypes", "noise_model"]


@dataclass
class Floors:
    """The floors of two sides.

    ``gains``: canonical label -> how far one side's tensor moved when it was run twice: in roundings of its dtype where
    the second run was re-rounded at random (``source`` is :data:`MEASURED`), in modelled floors where it was the same
    model in another batching or split (:data:`REPEATED`).
    """

    a: Side
    b: Side
    gains: Mapping[str, float] = field(default_factory=dict)
    source: str = MODELLED

    def of(self, match: Match) -> Floor:
        """Return the floor of a matched tensor.

        Errors this small add up linearly, so that what was measured in the finer dtype of a mixed pair carries over to
        the coarser one. A repeat exercises a part of the roundings only (none, where it is bit-identical): it can raise
        the modelled floor and not lower it. No measured floor is below one rounding.
        """
        dtype, ops, reduction = noise_model(self.a, self.b, match)
        modelled = modelled_floor(dtype, ops, reduction)
        left, right = (side.error(ops, OPS_PER_LAYER) for side in self._quantised)
        extra = GROWTH * float(np.hypot(left, right))
        gain = self.gains.get(match.label)
        if extra > modelled:
            return Floor(float(np.hypot(extra, modelled)), QUANTISED, modelled)
        if gain is None or (self.source == REPEATED and gain <= 1):
            return Floor(modelled, MODELLED, modelled)
        value = gain * modelled if self.source == REPEATED else max(gain, 1.0) * ROUNDING[dtype]
        return Floor(value, self.source, modelled)

    @cached_property
    def _quantised(self) -> tuple[Quantisation, Quantisation]:
        return declared(self.a.dump.manifest), declared(self.b.dump.manifest)


def noise_model(a: Side, b: Side, match: Match) -> tuple[str, int, int]:
    """Return the arguments of :func:`modelled_floor`: dtype, operations before the tensor, longest dot product."""
    dtypes = a.dtype_of(match.source_a), b.dtype_of(match.source_b)
    reduction = max(size for side in (a, b) for size in (side.shape.hidden, side.shape.intermediate))
    return effective_dtype(*dtypes, *model_dtypes(a, b)), match.place.ops, reduction


def model_dtypes(a: Side, b: Side) -> tuple[str, str]:
    """Return the dtypes that the two models ran in."""
    return str(a.dump.manifest.get("dtype", "")), str(b.dump.manifest.get("dtype", ""))
