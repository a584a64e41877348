"""One dump read through a table of names: native labels, what each canonical tensor is made of, the model's sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from probe.compare.names import TABLES, table_for
from probe.compare.names.base import (
    EngineTable,
    Key,
    ModelShape,
    Resolution,
    Rule,
    Source,
    fill,
    holds,
    key_of,
    label_of,
    pattern,
    resolve,
    strip_native,
)
from probe.compare.names.canonical import EMBEDDING, FINAL_NORM, LOGITS, layer_of
from probe.compare.names.common import ROPE
from probe.store.reader import Dump
from probe.store.schema import WeightSketch

IDENTITY_CLASSES = ("IdentityOp", "IdentityFuncOp", "Identity")
STAGE_UNKNOWN = (
    "one stage of a pipeline that numbers its layers from 0 and has no layer_number: which layers these are is unknown"
)
_LAYER = re.compile(r"^((?:.*\.)?layers\.)(\d+)(?=[.:]|$)")


@dataclass(frozen=True)
class Given:
    """Rules that a user's mapping file adds in front of one side's table."""

    tensors: tuple[Rule, ...] = ()
    parameters: tuple[Rule, ...] = ()


@dataclass
class Side:
    """One dump, read through its engine's table.

    ``natives``: stripped label -> key in the dump; ``resolution``: canonical label -> source; ``facts``: what the
    conditions of rules ask for (:func:`facts_of`); ``numbers``: layer number in the dump -> in the model, where a model
    numbers the layers of each pipeline stage from 0; ``refused``: why the numbered layers cannot be placed, if so.
    """

    dump: Dump
    table: EngineTable
    shape: ModelShape
    natives: dict[str, Key]
    resolution: Resolution
    facts: set[str] = field(default_factory=set)
    given: Given = field(default_factory=Given)
    numbers: dict[int, int] = field(default_factory=dict)
    refused: str = ""

    def dtype_of(self, source: Source) -> str:
        """Return the dtype in which the first native tensor of a source was stored."""
        return self.dump.tensors[self.natives[source.native[0]]].dtype

    def native_labels(self, source: Source) -> list[str]:
        """Return ``module:slot`` of a source's tensors as the dump spells them, then the parameters it reads."""
        return [label_of(self.natives[label]) for label in source.native] + list(source.parameters)

    def strip(self, name: str) -> str:
        """Return a native name without wrappers and prefixes, its layer numbered as in the whole model."""
        return renumber(strip_native(name, self.table.prefixes), self.numbers)

    def excuse(self, label: str) -> str:
        """Return why the engine cannot give a canonical tensor, or an empty string where it could have."""
        if self.numbers and self._elsewhere(label):
            held = sorted(self.numbers.values())
            return f"ran in another stage of the pipeline: this dump holds layers {held[0]} to {held[-1]}"
        for entry in self.table.unavailable:
            for wanted in entry.canonical:
                found = pattern(wanted).match(label)
                if found and holds(entry, found.groupdict(), self.facts) and wanted not in self._shown:
                    return entry.reason
        layer, recorded = layer_of(label), self.dump.budget.layers
        if recorded and layer is not None and layer not in recorded:
            return f"left out by the budget: PROBE_LAYERS was {','.join(map(str, recorded))}"
        return self.refused if layer is not None else ""

    @cached_property
    def _shown(self) -> set[str]:
        """Return patterns of single experts that have sources: one expert that is missing is then no engine's way."""
        wanted = [label for entry in self.table.unavailable for label in entry.canonical if "{e}" in label]
        return {label for label in wanted if any(pattern(label).match(found) for found in self.resolution.sources)}

    def _elsewhere(self, label: str) -> bool:
        """Tell whether a canonical tensor belongs to another pipeline stage than this side's."""
        layer = layer_of(label)
        if layer is not None:
            return layer not in self.numbers.values()
        return not ran(self, label)

    def parameter_sources(self) -> dict[str, Source]:
        """Return canonical parameter -> source; natives are stripped names of the dump's weights."""
        weights = {self.strip(name): weight for name, weight in self.dump.weights.items()}
        experts = {name: weight.shape[0] for name, weight in weights.items() if len(weight.shape) == 3}
        rules = (*self.given.parameters, *self.table.parameters)
        return resolve(rules, weights, self.facts, experts).sources

    def parameter(self, name: str) -> WeightSketch:
        """Return the sketch of a parameter by its stripped name."""
        return self._parameters[name]

    @cached_property
    def _parameters(self) -> dict[str, WeightSketch]:
        return {self.strip(name): weight for name, weight in self.dump.weights.items()}


def read_side(
    dump: Dump, given: Given | None = None, numbers: Mapping[int, int] | None = None, refused: str = ""
) -> Side:
    """Read a dump's tensors through the table of its engine (chosen by structure for an engine without one)."""
    given = given or Given()
    table = table_for(dump.engine, [label_of(key) for key in dump.tensors])
    known = dict(numbers or {}) or _layer_numbers(dump, table)
    natives: dict[str, Key] = {}
    for key in dump.tensors:
        natives.setdefault(renumber(strip_native(label_of(key), table.prefixes), known), key)
    shape = ModelShape.of(dump.manifest)
    side = Side(dump, table, shape, natives, Resolution(), given=given, numbers=known, refused=refused)
    side.facts = facts_of(side)
    usable = [label for label, key in natives.items() if dump.tensors[key].has_rows]
    if refused:
        usable = [label for label in usable if not _LAYER.match(label)]
    side.resolution = resolve((*given.tensors, *table.tensors), usable, side.facts)
    side.shape = _with_inferred(side)
    return side


def read_sides(a: Dump, b: Dump, given: tuple[Given, Given] | None = None) -> tuple[Side, Side]:
    """Read both dumps, and let each say what the other does not: head counts, and the layers of a pipeline stage."""
    first, second = given or (Given(), Given())
    side_a, side_b = read_side(a, first), read_side(b, second)
    side_a, side_b = _placed(side_a, side_b), _placed(side_b, side_a)
    side_a.shape, side_b.shape = _completed(side_a.shape, side_b.shape), _completed(side_b.shape, side_a.shape)
    share_vocabulary(side_a, side_b)
    return side_a, side_b


def share_vocabulary(a: Side, b: Side) -> None:
    """Let both sides be cut to the smaller vocabulary where one knows its own only with padding (a Megatron model)."""
    known = [side.shape.vocab for side in (a, b) if side.shape.vocab]
    if known and any(vocab_is_padded(side.dump) for side in (a, b)):
        a.shape, b.shape = (replace(side.shape, vocab=min(known)) for side in (a, b))


def vocab_is_padded(dump: Dump) -> bool:
    """Tell whether a dump states a vocabulary size that may include padding."""
    return bool((dump.manifest.get("layout") or {}).get("vocab_padded"))


def facts_of(side: Side) -> set[str]:
    """Return what the conditions of rules can ask for.

    Labels of tensors and names of parameters that exist; ``module PATH`` for modules that ran; ``value NAME`` for
    parameters whose values are stored (1-D); ``identity PATH`` for modules that pass their input through;
    ``config.KEY`` for settings that are neither zero nor false nor none, ``config.KEY=VALUE`` for all, and
    ``config.eps`` where the norms' epsilon is known.
    """
    facts = set(side.natives)
    for path, module in side.dump.modules.items():
        stripped = side.strip(path)
        facts.add(f"module {stripped}")
        facts |= {f"{stripped}.{name}" for name in module.info.get("parameters") or ()}
        if module.cls in IDENTITY_CLASSES:
            facts.add(f"identity {stripped}")
    for name, weight in side.dump.weights.items():
        facts.add(side.strip(name))
        if len(weight.shape) == 1 and len(weight.rows):
            facts.add(f"value {side.strip(name)}")
    config = (side.dump.manifest.get("model") or {}).get("config") or {}
    for key, value in {**config, **(config.get("text_config") or {})}.items():
        if isinstance(value, str | int | float):
            facts.add(f"config.{key}={value}")
            facts |= {f"config.{key}"} if value else set()
    known = {"config.eps": side.shape.eps, "config.routing": side.shape.routing}
    return facts | {fact for fact, value in known.items() if value}


# -- what a model without a config lets one read off its tensors ------------------------------------------------------


def _with_inferred(side: Side) -> ModelShape:
    """Fill sizes that the manifest does not give from the shapes of canonical tensors."""
    found: dict[str, Any] = {}
    for label, field_name in ((EMBEDDING, "hidden"), (LOGITS, "vocab")):
        source = side.resolution.sources.get(label)
        if source is not None:
            found[field_name] = _features(side, source)[-1]
    for slot, label in zip(("heads", "kv_heads"), ROPE):
        source = side.resolution.sources.get(fill(label, {"i": str(_first_layer(side))}))
        features = [size for size in _features(side, source) if size != 1] if source is not None else []
        if len(features) == 2:
            found[slot], found["head_dim"] = features
    return _completed(side.shape, replace(_NOTHING, **found))


_NOTHING = ModelShape(0, 0, 0, 0, 0, 0, 0, False)


def _features(side: Side, source: Source) -> tuple[int, ...]:
    return side.dump.tensors[side.natives[source.native[0]]].feature_shape or (0,)


def _first_layer(side: Side) -> int:
    return min((n for n in map(layer_of, side.resolution.sources) if n is not None), default=0)


def _completed(shape: ModelShape, other: ModelShape) -> ModelShape:
    """Return ``shape`` with its unknown sizes (0) taken from ``other``, all but the number of layers."""
    sizes = ("hidden", "intermediate", "vocab", "experts", "eps", "q_lora_rank", "kv_lora_rank", "rope_dim")
    heads = () if shape.heads and shape.head_dim else ("heads", "kv_heads", "head_dim")
    return replace(shape, **{name: getattr(shape, name) or getattr(other, name) for name in (*sizes, *heads)})


# -- pipeline stages --------------------------------------------------------------------------------------------------


def renumber(label: str, numbers: Mapping[int, int]) -> str:
    """Return a label with its layer's number in the whole model."""
    found = _LAYER.match(label) if numbers else None
    if not found:
        return label
    return f"{found[1]}{numbers.get(int(found[2]), int(found[2]))}{label[found.end() :]}"


def _layer_numbers(dump: Dump, table: EngineTable) -> dict[int, int]:
    """Return layer number in the dump -> in the model, from the layers' own ``layer_number`` (from 1).

    Engines with a table of their own have global numbers in the dump already.
    """
    numbers: dict[int, int] = {}
    for path, module in dump.modules.items() if dump.engine not in TABLES else ():
        found = _LAYER.fullmatch(strip_native(path, table.prefixes))
        if found and isinstance(module.info.get("layer_number"), int):
            numbers[int(found[2])] = module.info["layer_number"] - 1
    return numbers if any(own != whole for own, whole in numbers.items()) else {}


def _placed(side: Side, other: Side) -> Side:
    """Return the side with the layers of a later pipeline stage where the other side's whole model has them.

    The stage with the embedding has the first layers, the one with the final norm the last.
    """
    own, whole = _layers(side), _layers(other)
    if side.dump.engine in TABLES or side.numbers or 0 not in own or len(own) >= len(whole):
        return side
    first, last = ran(side, EMBEDDING), ran(side, FINAL_NORM)
    if (first and last) or not (ran(other, EMBEDDING) and ran(other, FINAL_NORM)):
        return side
    if not first and not last:
        return read_side(side.dump, side.given, refused=STAGE_UNKNOWN)
    shift = 0 if first else len(whole) - len(own)
    return read_side(side.dump, side.given, {number: number + shift for number in own})


def ran(side: Side, label: str) -> bool:
    """Tell whether a module that gives a canonical tensor ran, stored or not."""
    homes = (key_of(rule.native[0])[0] for rule in side.table.tensors if label in rule.canonical)
    return any(f"module {home}" in side.facts for home in homes)


def _layers(side: Side) -> set[int]:
    """Return the numbers of the layers that ran, stored or not."""
    found = (_LAYER.fullmatch(side.strip(path)) for path in side.dump.modules)
    return {int(match[2]) for match in found if match}
