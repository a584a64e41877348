"""Read the findings of all parameters together: what one alone leaves open, the others decide."""

from __future__ import annotations

from dataclasses import replace

from probe.compare.names.canonical import layer_of
from probe.compare.weights.changes import Finding


def settled(found: list[Finding]) -> list[Finding]:
    """Return the findings with the causes that hold of all of them together."""
    return _stale_biases(_precision_or_content(found))


def _precision_or_content(found: list[Finding]) -> list[Finding]:
    """Return the findings, those of one rounding's size as other content where the other parameters contradict them.

    A cast rounds every parameter that it reaches to one dtype, and a vector's values show whether it was. Where others
    differ by something else, or by another dtype's rounding, an update happens to be of that size.
    """
    sized = [finding for finding in found if finding.cause == "weight-precision" and not finding.side]
    dtypes = {finding.figures["dtype"] for finding in sized}
    others = [f for f in found if f.cause in ("stale-weights", "wrong-bias") and f.status == "different"]
    if not sized or (len(dtypes) == 1 and not others):
        return found
    return [
        replace(f, cause="stale-weights", detail=f"has other content, relative difference {f.figures['relative']:.1e}")
        if f in sized
        else f
        for f in found
    ]


def _stale_biases(found: list[Finding]) -> list[Finding]:
    """Return the findings, wrong biases of layers whose matrices are stale as stale too."""
    stale = {layer_of(f"{f.name}:") for f in found if f.cause == "stale-weights" and not f.name.endswith(".bias")}
    return [
        replace(f, cause="stale-weights") if f.cause == "wrong-bias" and layer_of(f"{f.name}:") in stale else f
        for f in found
    ]
