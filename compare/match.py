"""Match the canonical tensors of two dumps; every tensor of either side ends up matched or listed with its reason."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from probe.compare.names.base import EngineTable, Source, key_of, label_of
from probe.compare.names.canonical import LAYER_TENSORS, OPS_PER_LAYER, Place, is_routing, layer_of, place_of
from probe.compare.propose import LAYER_NUMBER, Leftover, Proposal, propose
from probe.compare.side import Side
from probe.metrics import MANTISSA_BITS

NO_ROWS = "stored without token rows (no axis of it runs along tokens)"
UNKNOWN = "not in the"
"""How the reason of a tensor begins that no table of names knows."""
SAME_NAME = "the same name on both sides"


@dataclass(frozen=True)
class Match:
    """One tensor that both sides have: canonical, named by the user, or proposed (then ``proposal`` says why)."""

    label: str
    place: Place
    source_a: Source
    source_b: Source
    proposal: Proposal | None = None


@dataclass(frozen=True)
class Entry:
    """One tensor that is not compared, with the reason (and for unavailable ones the side)."""

    label: str
    reason: str
    side: str = ""


@dataclass
class Matching:
    """The two sides' tensors, sorted out; ``matched`` is in execution order.

    ``routing`` are the pairs whose columns follow a token's choice of experts: ids, compared as sets, and the weights,
    compared expert by expert.
    """

    matched: list[Match] = field(default_factory=list)
    routing: list[Match] = field(default_factory=list)
    only_a: list[Entry] = field(default_factory=list)
    only_b: list[Entry] = field(default_factory=list)
    unavailable: list[Entry] = field(default_factory=list)
    auxiliary_a: list[Entry] = field(default_factory=list)
    auxiliary_b: list[Entry] = field(default_factory=list)


def match_tensors(a: Side, b: Side) -> Matching:
    """Pair the canonical tensors of two sides and give every other tensor its reason."""
    layers = _layer_count(a, b)
    matching = Matching()
    for label in {**a.resolution.sources, **b.resolution.sources}:
        _place_label(label, layers, a, b, matching)
    for lone in (matching.only_a, matching.only_b, matching.unavailable):
        lone.sort(key=lambda entry: place.rank if (place := place_of(entry.label, layers)) else (layers + 1,))
    matching.matched.sort(key=lambda match: (match.place.rank, match.label))
    extras = _same_names(a, b, matching) if a.table.engine == b.table.engine else []
    taken = {match.label for match in extras}
    proposals = propose(_leftovers(a, taken), _leftovers(b, taken), _anchors(matching.matched, a, b))
    places = _running_places(a, matching.matched) if proposals.pairs else {}
    extras += [_proposed(proposal, places[proposal.a]) for proposal in proposals.pairs]
    matching.matched.extend(extras)
    matching.matched.sort(key=lambda match: (match.place.rank, match.label))
    matching.auxiliary_a = _auxiliary(a, {m.source_a.native[0] for m in extras}, proposals.unpaired_a)
    matching.auxiliary_b = _auxiliary(b, {m.source_b.native[0] for m in extras}, proposals.unpaired_b)
    return matching


def _place_label(label: str, layers: int, a: Side, b: Side, matching: Matching) -> None:
    source_a, source_b = a.resolution.sources.get(label), b.resolution.sources.get(label)
    if source_a and source_b:
        place = place_of(label, layers) or _place_of_name(label, a, source_a)
        (matching.routing if is_routing(label) else matching.matched).append(Match(label, place, source_a, source_b))
        return
    missing, side = (b, "b") if source_a else (a, "a")
    reason = missing.excuse(label)
    if reason:
        matching.unavailable.append(Entry(label, reason, side))
    else:
        only = matching.only_a if source_a else matching.only_b
        lost = f" ({'; '.join(missing.dump.lost)})" if missing.dump.lost else ""
        stored = f"{missing.dump.stage or side} ({missing.table.engine}) stored nothing that gives it{lost}"
        only.append(Entry(label, stored))


def _place_of_name(label: str, side: Side, source: Source) -> Place:
    """Place a name that only the user's mapping knows: in its layer, by order of execution."""
    order = side.dump.tensors[side.natives[source.native[0]]].order
    layer = layer_of(label)
    return Place((-2 if layer is None else layer, len(LAYER_TENSORS), order), OPS_PER_LAYER * (layer or 0))


def _layer_count(a: Side, b: Side) -> int:
    stored = (layer_of(label) for side in (a, b) for label in side.resolution.sources)
    highest = max((layer for layer in stored if layer is not None), default=-1)
    return max(a.shape.layers, b.shape.layers, highest + 1)


# -- tensors outside the tables ---------------------------------------------------------------------------------------


def _same_names(a: Side, b: Side, matching: Matching) -> list[Match]:
    """Match leftover outputs of one engine on both sides by their native name, so that unknown modules count too."""
    found = []
    for label, place in _running_places(a, matching.matched).items():
        if _is_extra(label, a) and label in b.natives and _is_extra(label, b):
            info, other = (side.dump.tensors[side.natives[label]] for side in (a, b))
            if info.feature_shape == other.feature_shape:
                source = Source((label,), "whole", 0, origin=SAME_NAME)
                found.append(Match(label, place, source, source))
    return found


def _running_places(side: Side, matched: list[Match]) -> dict[str, Place]:
    """Return a place for every native label of side a, behind the matched tensors that ran before it."""
    places = {label: match.place for match in matched for label in match.source_a.native}
    current, found = Place((-2, 0), 0), {}
    for label, key in side.natives.items():
        current = max(current, places.get(label, current))
        found[label] = Place((*current.rank, side.dump.tensors[key].order), current.ops)
    return found


def _anchors(matched: list[Match], a: Side, b: Side) -> list[tuple[int, int]]:
    """Return (order in a, order in b) of the tensors that are matched for sure."""

    def order(side: Side, source: Source) -> int:
        return max(side.dump.tensors[side.natives[label]].order for label in source.native)

    return [(order(a, match.source_a), order(b, match.source_b)) for match in matched]


def _proposed(proposal: Proposal, place: Place) -> Match:
    one, other = (Source((label,), "whole", 0, origin=proposal.reason) for label in (proposal.a, proposal.b))
    return Match(proposal.a, place, one, other, proposal)


def _leftovers(side: Side, taken: set[str]) -> list[Leftover]:
    """Return the outputs of modules that no table knows, in order of execution."""
    found = []
    for label, key in side.natives.items():
        info = side.dump.tensors[key]
        if label not in taken and _is_extra(label, side) and not side.refused:
            found.append(Leftover(label, info.order, math.prod(info.feature_shape)))
    return sorted(found, key=lambda entry: entry.order)


def _is_extra(label: str, side: Side) -> bool:
    info = side.dump.tensors[side.natives[label]]
    if label in side.resolution.used or label in side.resolution.spare or not info.has_rows:
        return False
    is_output = key_of(label)[1].startswith("output.") and info.dtype in MANTISSA_BITS
    return is_output and not _table_reason(label, side.table)


def _auxiliary(side: Side, matched_by_name: set[str], unpaired: Mapping[str, str]) -> list[Entry]:
    """List the native tensors that no canonical tensor reads, each with its reason."""
    keys = {key: label for label, key in side.natives.items()}
    entries = []
    for key, info in side.dump.tensors.items():
        label = keys.get(key, "")
        if label not in side.resolution.used and label not in matched_by_name:
            entries.append(Entry(label_of(key), unpaired.get(label) or reason_of(label, info.has_rows, side)))
    return entries


def reason_of(label: str, has_rows: bool, side: Side) -> str:
    """Return why a native tensor is not compared; ``label`` is empty for one whose stripped name another has."""
    if not label:
        return "another tensor of the dump has the same name without wrappers"
    target = side.resolution.spare.get(label)
    if target in side.resolution.sources:
        return f"another tensor already gives {target}"
    if target and side.excuse(target):
        return f"not {target}: {side.excuse(target)}"
    if side.refused and has_rows and LAYER_NUMBER.search(label):
        return side.refused
    return _table_reason(label, side.table) or (
        f"{UNKNOWN} {side.table.engine} table of canonical names" if has_rows else NO_ROWS
    )


def _table_reason(label: str, table: EngineTable) -> str:
    return next((reason for regex, reason in table.auxiliary if re.fullmatch(regex, label)), "")
