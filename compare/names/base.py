"""Rules that reach canonical names from an engine's native tensors; the tables themselves are data.

Labels may hold placeholders: ``{i}`` a layer number, ``{e}`` an expert's global number, ``{p}`` weight or bias.
:mod:`probe.compare.names.canonical` lists the canonical ones; docs/names.md shows how to add a family.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

from probe.compare.moe.routing import RoutingRule, routing_rule

Key = tuple[str, str]

RECOMPUTED = frozenset({"rms_norm", "route"})
"""Operations that compute a tensor which no module returned, from what went into the module and its parameters."""


def label_of(key: Key) -> str:
    """Return ``module:slot``."""
    return f"{key[0]}:{key[1]}"


def key_of(label: str) -> Key:
    """Return (module, slot) of a label."""
    module, _, slot = label.rpartition(":")
    return module, slot


# -- rules ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """Canonical tensors out of native ones.

    ``native``: labels that must all be there; ``canonical``: one label per part that ``operation`` yields, in order.
    ``operation`` is a key of :data:`probe.compare.merge.OPERATIONS`. ``parameters``: names of 1-D parameters whose
    stored values the operation needs too. Earlier rules of a table win. The rule applies only where every fact in
    ``needs`` and none in ``unless`` holds (see :func:`probe.compare.side.facts_of`).
    """

    native: tuple[str, ...]
    canonical: tuple[str, ...]
    operation: str = "whole"
    parameters: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    stated: str = ""
    """Where a user stated the rule; empty for those of a table."""


@dataclass(frozen=True)
class Unavailable:
    """A canonical tensor that an engine cannot give, and why: read where no rule found a source.

    ``needs`` and ``unless`` restrict it to models of which those facts hold.
    """

    canonical: tuple[str, ...]
    reason: str
    needs: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()


@dataclass(frozen=True)
class EngineTable:
    """Everything the comparison knows about one engine's names.

    ``prefixes`` are stripped from native names (the first that fits); ``auxiliary`` gives, by regular expression on the
    stripped label, why a tensor outside the rules is not compared.
    """

    engine: str
    tensors: tuple[Rule, ...]
    parameters: tuple[Rule, ...]
    unavailable: tuple[Unavailable, ...] = ()
    auxiliary: tuple[tuple[str, str], ...] = ()
    prefixes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """How one canonical tensor is made: part ``part`` of ``operation`` on these native labels.

    ``parameters`` are the native parameters whose values the operation reads; ``origin`` says what decided: the table,
    a mapping file, a common name or a proposal; ``stated`` is the mapping file, if it was one.
    """

    native: tuple[str, ...]
    operation: str
    part: int
    parameters: tuple[str, ...] = ()
    origin: str = ""
    stated: str = ""


@dataclass
class Resolution:
    """What a table made of a set of native labels.

    ``sources``: canonical label -> source. ``used``: native labels that some source reads. ``spare``: native label ->
    the canonical label it would also have given.
    """

    sources: dict[str, Source] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    spare: dict[str, str] = field(default_factory=dict)


_WRAPPERS = re.compile(r"(_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module)\.")
_OUTER = re.compile(r"^(module\.|base_model\.model\.)+")
_ADAPTED = re.compile(r"\.(base_layer|modules_to_save\.default)(?=\.(weight|bias)$)")


@lru_cache(1 << 14)
def strip_native(label: str, prefixes: tuple[str, ...]) -> str:
    """Return a native label without the engine's prefix and the wrappers of DDP, FSDP, torch.compile, checkpointing.

    PEFT's outer wrapper goes too; of a layer that it adapts, the base layer's parameters keep the layer's own name.
    """
    label = _ADAPTED.sub("", _OUTER.sub("", _WRAPPERS.sub("", label)))
    prefix = next((p for p in prefixes if label.startswith(p)), "")
    return label.removeprefix(prefix)


_PLACEHOLDERS = {"i": r"\d+", "e": r"\d+", "p": "weight|bias"}


@cache
def pattern(label: str) -> re.Pattern[str]:
    """Compile a label with placeholders; one that occurs twice must have the same value both times."""
    text = re.escape(label)
    for name, values in _PLACEHOLDERS.items():
        text = text.replace(rf"\{{{name}\}}", f"(?P<{name}>{values})", 1).replace(rf"\{{{name}\}}", f"(?P={name})")
    return re.compile(text + r"\Z")


def fill(label: str, values: Mapping[str, str]) -> str:
    """Replace the placeholders of a label by the values of a match."""
    for name, value in values.items():
        label = label.replace("{" + name + "}", value)
    return label


def holds(entry: Rule | Unavailable, values: Mapping[str, str], facts: Iterable[str]) -> bool:
    """Tell whether the conditions of an entry hold, with its placeholders filled."""
    return all(fill(fact, values) in facts for fact in entry.needs) and not any(
        fill(fact, values) in facts for fact in entry.unless
    )


def resolve(
    rules: Iterable[Rule],
    natives: Iterable[str],
    facts: Iterable[str] = (),
    experts: Mapping[str, int] | None = None,
) -> Resolution:
    """Apply a table's rules to native labels.

    ``facts``: what else holds of the model; ``experts``: native label -> how many experts it stacks, for rules whose
    canonical labels have an ``{e}`` that the native one has not.
    """
    present, known, result = dict.fromkeys(natives), set(facts), Resolution()
    alike: dict[str, list[str]] = defaultdict(list)
    for native in present:
        alike[_NUMBER.sub("#", native)].append(native)
    for rule in rules:
        for native in [native for form in _forms(rule.native[0]) for native in alike.get(form, ())]:
            match = pattern(rule.native[0]).match(native)
            if match:
                _apply(rule, match.groupdict(), present, known, (experts or {}).get(native, 0), result)
    for label in result.used:
        result.spare.pop(label, None)
    return result


_NUMBER = re.compile(r"\d+|\{[ie]\}")


def _forms(label: str) -> tuple[str, ...]:
    """Return a label with every number taken out, once for each kind of parameter: few labels share such a form."""
    form = _NUMBER.sub("#", label)
    return tuple(form.replace("{p}", kind) for kind in ("weight", "bias")) if "{p}" in form else (form,)


def _apply(
    rule: Rule, values: dict[str, str], present: dict[str, None], facts: set[str], experts: int, result: Resolution
) -> None:
    natives = tuple(fill(label, values) for label in rule.native)
    parameters = tuple(fill(name, values) for name in rule.parameters)
    if not all(label in present for label in natives) or not all(f"value {name}" in facts for name in parameters):
        return
    if not all(fill(fact, values) in facts for fact in rule.needs):
        return
    allowed = holds(rule, values, facts)
    for part, label in enumerate(_parts(rule, values, experts)):
        if not allowed or label in result.sources:
            result.spare.update((native, label) for native in natives if native not in result.spare)
        else:
            result.sources[label] = Source(natives, rule.operation, part, parameters, rule_text(rule), rule.stated)
            result.used.update(natives)


def _parts(rule: Rule, values: dict[str, str], experts: int) -> list[str]:
    """Return the canonical label of each part; stacked experts yield their parts one expert after the other."""
    labels = [fill(label, values) for label in rule.canonical]
    if not any("{e}" in label for label in labels):
        return labels
    return [fill(label, {"e": str(expert)}) for expert in range(experts) for label in labels]


def rule_text(rule: Rule) -> str:
    """Return a rule in one line, as ``probe compare --explain`` shows it."""
    how = "" if rule.operation == "whole" else f" ({rule.operation})"
    where = rule.stated or "table"
    return f"{where}: {' + '.join((*rule.native, *rule.parameters))} -> {', '.join(rule.canonical)}{how}"


# -- facts about the model --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelShape:
    """Sizes that splitting and the noise model need; 0 where a dump does not say."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    experts: int = 0
    eps: float = 0.0
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    rope_dim: int = 0
    routing: RoutingRule | None = None

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> ModelShape:
        """Read the sizes from a manifest: what the engine reported (``layout``) before the model's config."""
        layout = manifest.get("layout") or {}
        config = (manifest.get("model") or {}).get("config") or {}
        config = config.get("text_config") or config

        def number(name: str, *others: str) -> float:
            found = (source.get(key) for source in (layout, config) for key in (name, *others))
            return next((value for value in found if isinstance(value, int | float) and 0 <= value < math.inf), 0)

        def size(name: str, *others: str) -> int:
            return int(number(name, *others))

        hidden, heads = size("hidden_size"), size("num_attention_heads")
        return cls(
            layers=size("num_layers", "num_hidden_layers"),
            hidden=hidden,
            intermediate=size("intermediate_size", "ffn_hidden_size"),
            heads=heads,
            kv_heads=size("num_key_value_heads", "num_query_groups") or heads,
            head_dim=size("head_dim") or (hidden // heads if heads else 0),
            vocab=size("vocab_size"),
            tied=bool(config.get("tie_word_embeddings")),
            experts=size("num_experts", "num_local_experts", "n_routed_experts", "num_moe_experts"),
            eps=float(number("rms_norm_eps", "layernorm_epsilon")),
            q_lora_rank=size("q_lora_rank"),
            kv_lora_rank=size("kv_lora_rank"),
            rope_dim=size("qk_rope_head_dim"),
            routing=routing_rule(config),
        )
