"""Canonical names and the rules that reach them from an engine's native tensors; the tables themselves are data.

A *label* is ``module:slot`` in one string (``layers.{i}.self_attn.q_proj:output.0``) or a parameter name; ``{i}``
stands for a layer number and ``{p}`` for ``weight`` or ``bias``. Canonical names are Hugging Face's, less ``model.``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

Key = tuple[str, str]

# (label, operations that precede the tensor inside its layer). Operations drive the modelled noise floor; the residual
# addition between o_proj and post_attention_layernorm counts as one.
LAYER_TENSORS: tuple[tuple[str, int], ...] = (
    ("layers.{i}.input_layernorm:output.0", 1),
    ("layers.{i}.self_attn.q_proj:output.0", 2),
    ("layers.{i}.self_attn.k_proj:output.0", 2),
    ("layers.{i}.self_attn.v_proj:output.0", 2),
    ("layers.{i}.self_attn.q_norm:output.0", 3),
    ("layers.{i}.self_attn.k_norm:output.0", 3),
    ("layers.{i}.self_attn.rotary_emb:output.0", 4),
    ("layers.{i}.self_attn.rotary_emb:output.1", 4),
    ("layers.{i}.self_attn.o_proj:input.0", 5),
    ("layers.{i}.self_attn.o_proj:output.0", 6),
    ("layers.{i}.post_attention_layernorm:output.0", 8),
    ("layers.{i}.mlp.gate_proj:output.0", 9),
    ("layers.{i}.mlp.up_proj:output.0", 9),
    ("layers.{i}.mlp.down_proj:input.0", 10),
    ("layers.{i}.mlp.down_proj:output.0", 11),
    ("layers.{i}:output.0", 12),
)
OPS_PER_LAYER = 12
EMBEDDING = "embed_tokens:output.0"
FINAL_NORM = "norm:output.0"
LOGITS = "lm_head:output.0"
_TAIL = {FINAL_NORM: 1, LOGITS: 2}
_OFFSETS = {label: (place, ops) for place, (label, ops) in enumerate(LAYER_TENSORS)}
_LAYER = re.compile(r"^layers\.(\d+)(?=[.:])")


def layer_of(label: str) -> int | None:
    """Return the layer number of a canonical label, or None outside the layers."""
    found = _LAYER.match(label)
    return int(found.group(1)) if found else None


@dataclass(frozen=True, order=True)
class Place:
    """Where a tensor stands in execution: sort key, and the number of operations whose rounding it inherits."""

    rank: tuple[int, ...]
    ops: int


def place_of(label: str, layers: int) -> Place | None:
    """Return the :class:`Place` of a canonical label in a model of ``layers`` layers; None if it is not canonical."""
    if label == EMBEDDING:
        return Place((-1, 0), 0)
    if label in _TAIL:
        return Place((layers, _TAIL[label]), layers * OPS_PER_LAYER + _TAIL[label])
    layer = layer_of(label)
    if layer is None:
        return None
    offset = _OFFSETS.get(_LAYER.sub("layers.{i}", label))
    return Place((layer, offset[0]), layer * OPS_PER_LAYER + offset[1]) if offset else None


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
    ``operation`` is a key of :data:`probe.compare.merge.OPERATIONS`. Earlier rules of a table win.
    """

    native: tuple[str, ...]
    canonical: tuple[str, ...]
    operation: str = "whole"


@dataclass(frozen=True)
class Unavailable:
    """A canonical tensor that an engine cannot give, and why.

    It applies where the module ``identity`` is an IdentityOp or the parameter ``parameter`` exists; with neither named,
    wherever no rule found a source.
    """

    canonical: tuple[str, ...]
    reason: str
    identity: str = ""
    parameter: str = ""


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
    """How one canonical tensor is made: part ``part`` of ``operation`` on these native labels."""

    native: tuple[str, ...]
    operation: str
    part: int


@dataclass
class Resolution:
    """What a table made of a set of native labels.

    ``sources``: canonical label -> source. ``used``: native labels that some source reads. ``spare``: native label ->
    the canonical label it would also have given.
    """

    sources: dict[str, Source] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    spare: dict[str, str] = field(default_factory=dict)


_WRAPPERS = ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.")


def strip_native(label: str, prefixes: tuple[str, ...]) -> str:
    """Return a native label without the wrappers of DDP, FSDP and torch.compile and without the engine's prefix."""
    for wrapper in _WRAPPERS:
        label = label.replace(wrapper, "")
    while label.startswith("module."):
        label = label.removeprefix("module.")
    prefix = next((p for p in prefixes if label.startswith(p)), "")
    return label.removeprefix(prefix)


@cache
def pattern(label: str) -> re.Pattern[str]:
    """Compile a label with ``{i}`` and ``{p}`` placeholders."""
    text = re.escape(label).replace(r"\{i\}", r"(?P<i>\d+)").replace(r"\{p\}", "(?P<p>weight|bias)")
    return re.compile(text + r"\Z")


def fill(label: str, values: Mapping[str, str]) -> str:
    """Replace the placeholders of a label by the values of a match."""
    for name, value in values.items():
        label = label.replace("{" + name + "}", value)
    return label


def resolve(rules: tuple[Rule, ...], natives: Iterable[str], refused: Iterable[str] = ()) -> Resolution:
    """Apply a table's rules to native labels; canonical labels in ``refused`` get no source."""
    present = dict.fromkeys(natives)
    blocked, result = set(refused), Resolution()
    for rule in rules:
        for native in present:
            match = pattern(rule.native[0]).match(native)
            if match:
                _apply(rule, match.groupdict(), present, blocked, result)
    for label in result.used:
        result.spare.pop(label, None)
    return result


def _apply(rule: Rule, values: dict[str, str], present: dict[str, None], blocked: set[str], result: Resolution) -> None:
    natives = tuple(fill(label, values) for label in rule.native)
    if not all(label in present for label in natives):
        return
    for part, label in enumerate(rule.canonical):
        target = fill(label, values)
        if target in blocked or target in result.sources:
            result.spare.update(dict.fromkeys(natives, target))
        else:
            result.sources[target] = Source(natives, rule.operation, part)
            result.used.update(natives)


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

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> ModelShape:
        """Read the sizes from a manifest: what the engine reported (``layout``) before the model's config."""
        layout = manifest.get("layout") or {}
        config = (manifest.get("model") or {}).get("config") or {}
        config = config.get("text_config") or config

        def size(name: str, *others: str) -> int:
            found = (source.get(key) for source in (layout, config) for key in (name, *others))
            return int(next((value for value in found if isinstance(value, int | float)), 0))

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
        )
