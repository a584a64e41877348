"""What each canonical tensor is computed from, as a table: the way of an error from one tensor to the next.

``{i}`` is the layer, ``{e}`` an expert, ``{stream}`` the residual stream that enters the layer. A tensor has one or
several ways, the fullest first: an engine that hides a tensor (a fused norm, rope inside a kernel) is followed through
what it does show.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from probe.compare.names.canonical import EMBEDDING, FINAL_NORM, LOGITS, layer_of

ADDS, COMBINES = "adds", "combines"
"""How inputs act: their values are added up, or each enters with its own relative error (a product, a norm, a linear,
attention)."""


@dataclass(frozen=True)
class Way:
    """One set of inputs of a tensor (canonical labels) and how they act; ``unless``: a label whose presence rules this
    way out, because the model is then of another family."""

    inputs: tuple[str, ...]
    how: str = COMBINES
    unless: str = ""


_A, _M = "layers.{i}.self_attn", "layers.{i}.mlp"
_STREAM, _ATTENTION = "{stream}", f"{_A}.o_proj:output.0"
_PRE_FEEDFORWARD = "layers.{i}.pre_feedforward_layernorm:output.0"
_POST_ATTENTION = "layers.{i}.post_attention_layernorm:output.0"
_POST_FEEDFORWARD = "layers.{i}.post_feedforward_layernorm:output.0"

_NORMED = (Way(("layers.{i}.input_layernorm:output.0",)), Way((_STREAM,)))
_MLP_INPUT = (Way((_PRE_FEEDFORWARD,)), Way((_POST_ATTENTION,)), Way((_STREAM, _ATTENTION), ADDS))
_ACTIVATED = ("{m}.gate_proj:output.0", "{m}.up_proj:output.0")


def _activation(module: str) -> tuple[Way, ...]:
    return (Way(tuple(name.replace("{m}", module) for name in _ACTIVATED)),)


INPUTS: dict[str, tuple[Way, ...]] = {
    "layers.{i}.input_layernorm:output.0": (Way((_STREAM,)),),
    f"{_A}.q_proj:output.0": _NORMED,
    f"{_A}.k_proj:output.0": _NORMED,
    f"{_A}.v_proj:output.0": _NORMED,
    f"{_A}.q_a_proj:output.0": _NORMED,
    f"{_A}.kv_a_proj_with_mqa:output.0": _NORMED,
    f"{_A}.q_a_layernorm:output.0": (Way((f"{_A}.q_a_proj:output.0",)),),
    f"{_A}.kv_a_layernorm:output.0": (Way((f"{_A}.kv_a_proj_with_mqa:output.0",)),),
    f"{_A}.q_norm:output.0": (Way((f"{_A}.q_proj:output.0",)),),
    f"{_A}.k_norm:output.0": (Way((f"{_A}.k_proj:output.0",)),),
    f"{_A}.q_b_proj:output.0": (Way((f"{_A}.q_a_layernorm:output.0",)), Way((f"{_A}.q_a_proj:output.0",))),
    f"{_A}.kv_b_proj:output.0": (
        Way((f"{_A}.kv_a_layernorm:output.0",)),
        Way((f"{_A}.kv_a_proj_with_mqa:output.0",)),
    ),
    f"{_A}.rotary_emb:output.0": tuple(Way((f"{_A}.{name}:output.0",)) for name in ("q_norm", "q_proj", "q_b_proj")),
    f"{_A}.rotary_emb:output.1": tuple(
        Way((f"{_A}.{name}:output.0",)) for name in ("k_norm", "k_proj", "kv_a_proj_with_mqa")
    ),
    f"{_A}.o_proj:input.0": (
        Way((f"{_A}.rotary_emb:output.0", f"{_A}.rotary_emb:output.1", f"{_A}.v_proj:output.0")),
        Way((f"{_A}.q_norm:output.0", f"{_A}.k_norm:output.0", f"{_A}.v_proj:output.0")),
        Way((f"{_A}.q_proj:output.0", f"{_A}.k_proj:output.0", f"{_A}.v_proj:output.0")),
        Way((f"{_A}.q_b_proj:output.0", f"{_A}.kv_b_proj:output.0")),
        Way((f"{_A}.q_proj:output.0", f"{_A}.kv_b_proj:output.0")),
        *_NORMED,
    ),
    _ATTENTION: (Way((f"{_A}.o_proj:input.0",)),),
    # Gemma norms the attention's output before it is added; elsewhere this norm reads the sum
    _POST_ATTENTION: (Way((_STREAM, _ATTENTION), ADDS, unless=_PRE_FEEDFORWARD), Way((_ATTENTION,))),
    _PRE_FEEDFORWARD: (Way((_STREAM, _POST_ATTENTION), ADDS),),
    f"{_M}.gate_proj:output.0": _MLP_INPUT,
    f"{_M}.up_proj:output.0": _MLP_INPUT,
    f"{_M}.router:output.0": _MLP_INPUT,
    f"{_M}.router:weights": (Way((f"{_M}.router:output.0",)),),
    f"{_M}.router:ids": (Way((f"{_M}.router:output.0",)),),
    f"{_M}.shared_expert_gate:output.0": _MLP_INPUT,
    f"{_M}.shared_expert.gate_proj:output.0": _MLP_INPUT,
    f"{_M}.shared_expert.up_proj:output.0": _MLP_INPUT,
    f"{_M}.experts.{{e}}.gate_proj:output.0": _MLP_INPUT,
    f"{_M}.experts.{{e}}.up_proj:output.0": _MLP_INPUT,
    f"{_M}.down_proj:input.0": _activation(_M),
    f"{_M}.shared_expert.down_proj:input.0": _activation(f"{_M}.shared_expert"),
    f"{_M}.experts.{{e}}.down_proj:input.0": _activation(f"{_M}.experts.{{e}}"),
    f"{_M}.down_proj:output.0": (Way((f"{_M}.down_proj:input.0",)),),
    f"{_M}.experts.{{e}}.down_proj:output.0": (Way((f"{_M}.experts.{{e}}.down_proj:input.0",)),),
    f"{_M}.shared_expert:output.0": (
        Way((f"{_M}.shared_expert.down_proj:input.0", f"{_M}.shared_expert_gate:output.0")),
        Way((f"{_M}.shared_expert.down_proj:input.0",)),
        *_MLP_INPUT,
    ),
    f"{_M}.experts:output.0": (
        Way((_PRE_FEEDFORWARD, f"{_M}.router:weights")),
        Way((_POST_ATTENTION, f"{_M}.router:weights")),
        *_MLP_INPUT,
    ),
    f"{_M}:output.0": (
        Way((f"{_M}.experts:output.0", f"{_M}.shared_expert:output.0"), ADDS),
        Way((f"{_M}.experts:output.0",)),
        *_MLP_INPUT,
    ),
    _POST_FEEDFORWARD: (Way((f"{_M}.down_proj:output.0",)), Way((f"{_M}:output.0",))),
    "layers.{i}:output.0": (
        Way((_STREAM, _POST_ATTENTION, _POST_FEEDFORWARD), ADDS),
        Way((_STREAM, _ATTENTION, f"{_M}.down_proj:output.0"), ADDS),
        Way((_STREAM, _ATTENTION, f"{_M}:output.0"), ADDS),
        Way((_STREAM,)),
    ),
    FINAL_NORM: (Way((_STREAM,)),),
    LOGITS: (Way((FINAL_NORM,)), Way((_STREAM,))),
}
"""Canonical tensor -> its ways, the fullest first. The embedding has none: tokens are equal or nothing is compared."""

_EXPERT = re.compile(r"(?<=\.experts\.)(\d+)(?=[.:])")
_LAYER = re.compile(r"^layers\.\d+(?=[.:])")


def stream_before(label: str, layers: int) -> str:
    """Return the residual stream that a tensor's layer reads; of the tensors after the layers the last layer's."""
    layer = layer_of(label)
    layer = layers if layer is None else layer
    return f"layers.{layer - 1}:output.0" if layer else EMBEDDING


def inputs_of(label: str, layers: int, known: Callable[[str], bool]) -> Way | None:
    """Return the fullest way of a canonical tensor whose inputs are all ``known``, with their full labels.

    ``layers`` counts the model's layers. None for a tensor without inputs, or where they are not known.
    """
    expert = _EXPERT.search(label)
    layer = layer_of(label)
    stream = stream_before(label, layers)

    def filled(template: str) -> str:
        named = template.replace("{stream}", stream).replace("{i}", str(layer))
        return named.replace("{e}", expert.group(1)) if expert else named

    for way in INPUTS.get(_EXPERT.sub("{e}", _LAYER.sub("layers.{i}", label)), ()):
        if way.unless and known(filled(way.unless)):
            continue
        names = tuple(filled(name) for name in way.inputs)
        if all(known(name) for name in names):
            return Way(names, way.how)
    return None
