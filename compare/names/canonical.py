"""The canonical tensors of a decoder model, in execution order: Hugging Face's names, less ``model.``.

A *label* is ``module:slot`` in one string (``layers.{i}.self_attn.q_proj:output.0``); ``{i}`` stands for a layer number
and ``{e}`` for the global number of an expert.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# (label, operations that precede the tensor inside its layer). Operations drive the modelled noise floor; the residual
# addition between o_proj and post_attention_layernorm counts as one. A model has the labels of its own family only;
# Gemma's two more norms add two operations to a layer, which moves a floor by less than 1 part in 12.
LAYER_TENSORS: tuple[tuple[str, int], ...] = (
    ("layers.{i}.input_layernorm:output.0", 1),
    ("layers.{i}.self_attn.q_proj:output.0", 2),
    ("layers.{i}.self_attn.k_proj:output.0", 2),
    ("layers.{i}.self_attn.v_proj:output.0", 2),
    # multi-head latent attention: queries, keys and values pass through low-rank projections
    ("layers.{i}.self_attn.q_a_proj:output.0", 2),
    ("layers.{i}.self_attn.kv_a_proj_with_mqa:output.0", 2),
    ("layers.{i}.self_attn.q_a_layernorm:output.0", 3),
    ("layers.{i}.self_attn.kv_a_layernorm:output.0", 3),
    ("layers.{i}.self_attn.q_norm:output.0", 3),
    ("layers.{i}.self_attn.k_norm:output.0", 3),
    ("layers.{i}.self_attn.q_b_proj:output.0", 4),
    ("layers.{i}.self_attn.kv_b_proj:output.0", 4),
    ("layers.{i}.self_attn.rotary_emb:output.0", 4),
    ("layers.{i}.self_attn.rotary_emb:output.1", 4),
    ("layers.{i}.self_attn.o_proj:input.0", 5),
    ("layers.{i}.self_attn.o_proj:output.0", 6),
    ("layers.{i}.post_attention_layernorm:output.0", 8),
    ("layers.{i}.pre_feedforward_layernorm:output.0", 8),
    ("layers.{i}.mlp.gate_proj:output.0", 9),
    ("layers.{i}.mlp.up_proj:output.0", 9),
    # mixture of experts: router logits, ids of the experts used and their weights, then the experts
    ("layers.{i}.mlp.router:output.0", 9),
    ("layers.{i}.mlp.router:ids", 9),
    ("layers.{i}.mlp.router:weights", 9),
    ("layers.{i}.mlp.shared_expert_gate:output.0", 9),
    ("layers.{i}.mlp.shared_expert.gate_proj:output.0", 9),
    ("layers.{i}.mlp.shared_expert.up_proj:output.0", 9),
    ("layers.{i}.mlp.experts.{e}.gate_proj:output.0", 9),
    ("layers.{i}.mlp.experts.{e}.up_proj:output.0", 9),
    ("layers.{i}.mlp.down_proj:input.0", 10),
    ("layers.{i}.mlp.shared_expert.down_proj:input.0", 10),
    ("layers.{i}.mlp.experts.{e}.down_proj:input.0", 10),
    ("layers.{i}.mlp.down_proj:output.0", 11),
    ("layers.{i}.mlp.shared_expert:output.0", 11),
    ("layers.{i}.mlp.experts.{e}.down_proj:output.0", 11),
    ("layers.{i}.mlp.experts:output.0", 11),
    ("layers.{i}.mlp:output.0", 11),
    ("layers.{i}.post_feedforward_layernorm:output.0", 11),
    ("layers.{i}:output.0", 12),
)
OPS_PER_LAYER = 12
EMBEDDING = "embed_tokens:output.0"
FINAL_NORM = "norm:output.0"
LOGITS = "lm_head:output.0"
ROUTING_SLOTS = ("weights", "ids")
"""Slots of ``mlp.router`` whose columns follow a token's choice of experts, in any order (see docs/names.md)."""

_TAIL = {FINAL_NORM: 1, LOGITS: 2}
_OFFSETS = {label: (place, ops) for place, (label, ops) in enumerate(LAYER_TENSORS)}
_LAYER = re.compile(r"^layers\.(\d+)(?=[.:])")
_EXPERT = re.compile(r"(?<=\.experts\.)(\d+)(?=[.:])")

# Tensors that another module than the one in their label computes: (end of the label, module in its place).
_MADE_BY: tuple[tuple[str, str], ...] = (
    (".self_attn.o_proj:input.0", ".self_attn"),  # the attention core's output
    (".down_proj:input.0", ".act_fn"),
    (".weight", ""),
    (".bias", ""),
)


@dataclass(frozen=True, order=True)
class Place:
    """Where a tensor stands in execution: sort key, and the number of operations whose rounding it inherits."""

    rank: tuple[int, ...]
    ops: int


def layer_of(label: str) -> int | None:
    """Return the layer number of a canonical label, or None outside the layers."""
    found = _LAYER.match(label)
    return int(found.group(1)) if found else None


def place_of(label: str, layers: int) -> Place | None:
    """Return the :class:`Place` of a canonical label in a model of ``layers`` layers; None if it is not canonical."""
    if label == EMBEDDING:
        return Place((-1, 0), 0)
    if label in _TAIL:
        return Place((layers, _TAIL[label]), layers * OPS_PER_LAYER + _TAIL[label])
    layer = layer_of(label)
    if layer is None:
        return None
    expert = _EXPERT.search(label)
    offset = _OFFSETS.get(_EXPERT.sub("{e}", _LAYER.sub("layers.{i}", label)))
    if offset is None:
        return None
    rank = (layer, offset[0], int(expert.group(1))) if expert else (layer, offset[0])
    return Place(rank, layer * OPS_PER_LAYER + offset[1])


def is_routing(label: str) -> bool:
    """Tell whether a canonical label is of the experts that a token uses: their ids or weights."""
    module, _, slot = label.rpartition(":")
    return module.endswith(".mlp.router") and slot in ROUTING_SLOTS


def module_at_fault(label: str) -> str:
    """Return the canonical module to look at for a canonical label: the one that computes the tensor.

    The input of ``o_proj`` is the attention core's output (``layers.i.self_attn``), that of ``down_proj`` the
    activation's (``layers.i.mlp.act_fn``), ``layers.i:output.0`` the residual addition (``layers.i``). A parameter's
    name loses ``.weight`` or ``.bias``; ``config``, ``log-probs`` and other names without a slot stay as they are.
    """
    for end, module in _MADE_BY:
        if label.endswith(end):
            return label.removesuffix(end) + module
    return label.partition(":")[0]
