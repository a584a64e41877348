"""Match the canonical tensors of two dumps; every tensor of either side ends up matched or listed with its reason."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from probe.compare.names import table_for
from probe.compare.names.base import (
    EngineTable,
    Key,
    ModelShape,
    Place,
    Resolution,
    Source,
    Unavailable,
    fill,
    key_of,
    label_of,
    layer_of,
    pattern,
    place_of,
    resolve,
    strip_native,
)
from probe.metrics import MANTISSA_BITS
from probe.store.reader import Dump

NO_ROWS = "stored without token rows (no axis of it runs along tokens)"
IDENTITY_CLASSES = ("IdentityOp", "IdentityFuncOp", "Identity")


@dataclass
class Side:
    """One dump, read through its engine's table.

    ``natives``: stripped label -> key in the dump; ``resolution``: canonical label -> source; ``unavailable``:
    canonical label -> reason, for what the engine's spec rules out.
    """

    dump: Dump
    table: EngineTable
    shape: ModelShape
    natives: dict[str, Key]
    resolution: Resolution
    unavailable: dict[str, str]

    def dtype_of(self, source: Source) -> str:
        """Return the dtype in which the first native tensor of a source was stored."""
        return self.dump.tensors[self.natives[source.native[0]]].dtype

    def native_labels(self, source: Source) -> list[str]:
        """Return ``module:slot`` of a source's tensors as the dump spells them."""
        return [label_of(self.natives[label]) for label in source.native]


@dataclass(frozen=True)
class Match:
    """One canonical tensor that both sides have."""

    label: str
    place: Place
    source_a: Source
    source_b: Source


@dataclass(frozen=True)
class Entry:
    """One tensor that is not compared, with the reason (and for unavailable ones the side)."""

    label: str
    reason: str
    side: str = ""


@dataclass
class Matching:
    """The two sides' tensors, sorted out; ``matched`` is in execution order."""

    matched: list[Match] = field(default_factory=list)
    only_a: list[Entry] = field(default_factory=list)
    only_b: list[Entry] = field(default_factory=list)
    unavailable: list[Entry] = field(default_factory=list)
    auxiliary_a: list[Entry] = field(default_factory=list)
    auxiliary_b: list[Entry] = field(default_factory=list)


def read_side(dump: Dump) -> Side:
    """Read a dump's tensors through the table of its engine."""
    table = table_for(dump.engine)
    natives: dict[str, Key] = {}
    for key in dump.tensors:
        natives.setdefault(strip_native(label_of(key), table.prefixes), key)
    usable = [label for label, key in natives.items() if dump.tensors[key].has_rows]
    refused = _refused(dump, table)
    return Side(
        dump, table, ModelShape.of(dump.manifest), natives, resolve(table.tensors, usable, refused), dict(refused)
    )


def share_vocabulary(a: Side, b: Side) -> None:
    """Let both sides be cut to the smaller vocabulary where one knows its own only with padding (a Megatron model)."""
    known = [side.shape.vocab for side in (a, b) if side.shape.vocab]
    if known and any(vocab_is_padded(side.dump) for side in (a, b)):
        a.shape, b.shape = (replace(side.shape, vocab=min(known)) for side in (a, b))


def vocab_is_padded(dump: Dump) -> bool:
    """Tell whether a dump states a vocabulary size that may include padding."""
    return bool((dump.manifest.get("layout") or {}).get("vocab_padded"))


def match_tensors(a: Side, b: Side) -> Matching:
    """Pair the canonical tensors of two sides and give every other tensor its reason."""
    layers = _layer_count(a, b)
    matching = Matching()
    for label in {**a.resolution.sources, **b.resolution.sources}:
        _place_label(label, layers, a, b, matching)
    extras = _same_names(a, b, matching) if a.table.engine == b.table.engine else []
    matching.matched.extend(extras)
    matching.matched.sort(key=lambda match: (match.place.rank, match.label))
    named = {match.label for match in extras}
    matching.auxiliary_a, matching.auxiliary_b = _auxiliary(a, named), _auxiliary(b, named)
    return matching


def _place_label(label: str, layers: int, a: Side, b: Side, matching: Matching) -> None:
    source_a, source_b = a.resolution.sources.get(label), b.resolution.sources.get(label)
    place = place_of(label, layers)
    if source_a and source_b and place:
        matching.matched.append(Match(label, place, source_a, source_b))
        return
    missing, side = (b, "b") if source_a else (a, "a")
    reason = missing.unavailable.get(label) or _fallback(label, missing.table.unavailable)
    if reason:
        matching.unavailable.append(Entry(label, reason, side))
    else:
        only = matching.only_a if source_a else matching.only_b
        only.append(Entry(label, f"{missing.dump.stage or side} ({missing.table.engine}) stored nothing that gives it"))


def _layer_count(a: Side, b: Side) -> int:
    stored = (layer_of(label) for side in (a, b) for label in side.resolution.sources)
    highest = max((layer for layer in stored if layer is not None), default=-1)
    return max(a.shape.layers, b.shape.layers, highest + 1)


# -- what an engine's spec rules out ----------------------------------------------------------------------------------


def _refused(dump: Dump, table: EngineTable) -> dict[str, str]:
    """Return canonical label -> reason for tensors that a spec fuses away, such as TransformerEngine's norms."""
    modules = {strip_native(path, table.prefixes): info for path, info in dump.modules.items()}
    parameters = {strip_native(name, table.prefixes) for name in dump.weights}
    parameters |= {f"{path}.{name}" for path, info in modules.items() for name in info.info.get("parameters", ())}
    identities = {path for path, info in modules.items() if info.cls in IDENTITY_CLASSES}
    refused: dict[str, str] = {}
    for entry in table.unavailable:
        for wanted, present in ((entry.identity, identities), (entry.parameter, parameters)):
            for values in _matches(wanted, present):
                refused |= {fill(label, values): entry.reason for label in entry.canonical}
    return refused


def _matches(wanted: str, present: Iterable[str]) -> list[dict[str, str]]:
    if not wanted:
        return []
    return [found.groupdict() for found in map(pattern(wanted).match, present) if found]


def _fallback(label: str, entries: tuple[Unavailable, ...]) -> str:
    """Return the reason of an unconditional entry that covers ``label``, or an empty string."""
    for entry in entries:
        if not entry.identity and not entry.parameter and any(pattern(p).match(label) for p in entry.canonical):
            return entry.reason
    return ""


# -- tensors outside the tables ---------------------------------------------------------------------------------------


def _same_names(a: Side, b: Side, matching: Matching) -> list[Match]:
    """Match leftover outputs of one engine on both sides by their native name, so that unknown modules count too."""
    places = {label: match.place for match in matching.matched for label in match.source_a.native}
    current, found = Place((-2, 0), 0), []
    for label, key in a.natives.items():
        current = max(current, places.get(label, current))
        if _is_extra(label, a) and label in b.natives and _is_extra(label, b):
            info, other = a.dump.tensors[key], b.dump.tensors[b.natives[label]]
            if info.feature_shape == other.feature_shape:
                source = Source((label,), "whole", 0)
                found.append(Match(label, Place((*current.rank, info.order), current.ops), source, source))
    return found


def _is_extra(label: str, side: Side) -> bool:
    info = side.dump.tensors[side.natives[label]]
    if label in side.resolution.used or label in side.resolution.spare or not info.has_rows:
        return False
    is_output = key_of(label)[1].startswith("output.") and info.dtype in MANTISSA_BITS
    return is_output and not _table_reason(label, side.table)


def _auxiliary(side: Side, matched_by_name: set[str]) -> list[Entry]:
    """List the native tensors that no canonical tensor reads, each with its reason."""
    keys = {key: label for label, key in side.natives.items()}
    entries = []
    for key, info in side.dump.tensors.items():
        label = keys.get(key, "")
        if label not in side.resolution.used and label not in matched_by_name:
            entries.append(Entry(label_of(key), _reason(label, info.has_rows, side)))
    return entries


def _reason(label: str, has_rows: bool, side: Side) -> str:
    if not label:
        return "another tensor of the dump has the same name without wrappers"
    target = side.resolution.spare.get(label)
    if target in side.unavailable:
        return f"not {target}: {side.unavailable[target]}"
    if target:
        return f"another tensor already gives {target}"
    return _table_reason(label, side.table) or (
        f"not in the {side.table.engine} table of canonical names" if has_rows else NO_ROWS
    )


def _table_reason(label: str, table: EngineTable) -> str:
    return next((reason for regex, reason in table.auxiliary if re.fullmatch(regex, label)), "")
