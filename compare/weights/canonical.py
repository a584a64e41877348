"""The parameters of one side under canonical names: their sketches, and the values that a dump stores of some."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from probe.compare.merge import OPERATIONS
from probe.compare.names.base import ModelShape, Source
from probe.compare.side import Side
from probe.errors import ProbeError
from probe.store.sketches import JoinedSketch, by_output

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Weight:
    """One canonical parameter of one side: the native name it comes from and the sketch of its rows.

    ``gap``: which shard of it is in no file; ``conflict``: which ranks hold copies of it that differ; ``axis`` and
    ``ranks``: along which axis (-1: none) how many tensor-parallel ranks share it; ``alias``: the canonical parameter
    whose memory it shares.
    """

    name: str
    native: str
    shape: tuple[int, ...]
    dtype: str
    rows: np.ndarray
    gap: str = ""
    conflict: str = ""
    axis: int = -1
    ranks: int = 1
    alias: str = ""


def canonical_weights(side: Side) -> dict[str, Weight]:
    """Return the side's sketched parameters by canonical name, in the model's order; unsketched ones are left out."""
    natives = {side.strip(name): name for name in side.dump.weights}
    order = {label: place for place, label in enumerate(natives)}
    sources = side.parameter_sources()
    found: dict[str, Weight] = {}
    for label, source in sorted(sources.items(), key=lambda item: (order[item[1].native[0]], item[1].part)):
        name = natives[source.native[0]]
        joined = side.dump.joined_weights[name]
        alias = ""
        if joined.whole.alias in side.dump.joined_weights and not joined.whole.rows.size:
            alias = joined.whole.alias
            joined = side.dump.joined_weights[alias]
        if joined.whole.rows.size:
            weight = canonical_weight(label, source, joined, side.shape)
            found[weight.name] = replace(weight, native=name, alias=alias)
    if HEAD not in found and EMBEDDING in found and side.shape.tied:
        found[HEAD] = replace(found[EMBEDDING], name=HEAD, alias=found[EMBEDDING].native)
    return found


def canonical_weight(label: str, source: Source, joined: JoinedSketch, shape: ModelShape) -> Weight:
    """Return the part of a native parameter that ``source`` names, of a model of sizes ``shape``."""
    whole = joined.whole
    shared: dict[str, Any] = {
        "axis": whole.axis,
        "ranks": len(joined.shards),
        "gap": joined.gap,
        "conflict": joined.conflict,
    }
    if joined.gap:
        return Weight(label, whole.name, whole.shape, whole.dtype, whole.rows, **shared)
    by_rank = whole.axis == 0 and source.operation != "whole"
    tables = [by_output(sketch) for sketch in (joined.shards if by_rank else [whole])]
    try:
        rows = OPERATIONS[source.operation]([tables], source.part, shape, 0)
    except ProbeError:  # sizes that do not fit the config: compared as a whole, so that it shows as a difference
        label, rows = f"{label} (unsplit)", whole.rows
    is_expert = rows.ndim < tables[0].ndim
    rows = rows.reshape(-1, rows.shape[-1])
    sizes = (len(rows), whole.shape[-1]) if is_expert else whole.shape
    if len(whole.shape) < 3:
        sizes = (len(rows), *whole.shape[1:])
    return Weight(label, whole.name, sizes, whole.dtype, rows, **shared)


def canonical_parameter(side: Side, name: str) -> np.ndarray | None:
    """Return the values of a canonical parameter that the dump stores (``PROBE_WEIGHTS=layers``): float64 [out, in] or
    [n]; None where it stores none, or not every shard of it.
    """
    natives = {side.strip(native): native for native in side.dump.parameters}
    sources = side.parameter_sources()
    source = sources.get(name)
    if source is None and name == HEAD and side.shape.tied:
        source = sources.get(EMBEDDING)
    if source is None or source.native[0] not in natives:
        return None
    native = natives[source.native[0]]
    shards = side.dump.parameter_shards(native)
    if shards is None:
        return None
    wide = [shard.astype(np.float64) for shard in shards]
    if side.dump.weights[native].axis != 0 and len(wide) > 1:  # shards of input columns: whole before it is split
        wide = [np.concatenate(wide, axis=-1)]
    return OPERATIONS[source.operation]([wide], source.part, side.shape, 0)
