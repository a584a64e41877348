"""Load Hugging Face weights into a Megatron GPTModel.

One table says which Hugging Face tensors make up each Megatron parameter and how they are fused; the layouts are
those of :mod:`probe.layout`. Both layer specifications are covered: the local one, with separate norms, and the
TransformerEngine one, which keeps the norm weights inside the linear layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from probe import layout
from probe.checkpoint import Checkpoint
from probe.errors import CheckpointError

if TYPE_CHECKING:
    from probe.hooks.runners.megatron_model import ModelShape

Dims = tuple[str, ...]


@dataclass(frozen=True)
class Rule:
    """How one Megatron parameter is made: its sources with the names of their dimensions, and the fuse function."""

    sources: tuple[tuple[str, Dims], ...]
    fuse: Callable[[list[np.ndarray], ModelShape], np.ndarray]


def _copy(parts: list[np.ndarray], shape: ModelShape) -> np.ndarray:
    """Take the only part as it is."""
    return parts[0]


def _qkv(parts: list[np.ndarray], shape: ModelShape) -> np.ndarray:
    """Interleave q, k and v by query group."""
    query, key, value = parts
    return layout.fuse_qkv_groups(query, key, value, shape.heads, shape.groups, shape.head_dim, axis=0)


def _gate_up(parts: list[np.ndarray], shape: ModelShape) -> np.ndarray:
    """Put gate before up."""
    gate, up = parts
    return layout.fuse_gate_up(gate, up, axis=0)


def _vocabulary(parts: list[np.ndarray], shape: ModelShape) -> np.ndarray:
    """Pad the vocabulary rows with zeros."""
    return layout.pad_vocabulary(parts[0], shape.padded_vocab, axis=0)


_INPUT_NORM = Rule((("input_layernorm.weight", ("hidden",)),), _copy)
_MLP_NORM = Rule((("post_attention_layernorm.weight", ("hidden",)),), _copy)

LAYER_RULES: dict[str, Rule] = {
    "input_layernorm.weight": _INPUT_NORM,
    "self_attention.linear_qkv.layer_norm_weight": _INPUT_NORM,
    "self_attention.linear_qkv.weight": Rule(
        (
            ("self_attn.q_proj.weight", ("query", "hidden")),
            ("self_attn.k_proj.weight", ("key_value", "hidden")),
            ("self_attn.v_proj.weight", ("key_value", "hidden")),
        ),
        _qkv,
    ),
    "self_attention.linear_qkv.bias": Rule(
        (
            ("self_attn.q_proj.bias", ("query",)),
            ("self_attn.k_proj.bias", ("key_value",)),
            ("self_attn.v_proj.bias", ("key_value",)),
        ),
        _qkv,
    ),
    "self_attention.q_layernorm.weight": Rule((("self_attn.q_norm.weight", ("head_dim",)),), _copy),
    "self_attention.k_layernorm.weight": Rule((("self_attn.k_norm.weight", ("head_dim",)),), _copy),
    "self_attention.linear_proj.weight": Rule((("self_attn.o_proj.weight", ("hidden", "query")),), _copy),
    "pre_mlp_layernorm.weight": _MLP_NORM,
    "mlp.linear_fc1.layer_norm_weight": _MLP_NORM,
    "mlp.linear_fc1.weight": Rule(
        (("mlp.gate_proj.weight", ("ffn", "hidden")), ("mlp.up_proj.weight", ("ffn", "hidden"))), _gate_up
    ),
    "mlp.linear_fc2.weight": Rule((("mlp.down_proj.weight", ("hidden", "ffn")),), _copy),
}
"""Parameters of ``decoder.layers.<i>`` made from tensors of ``model.layers.<i>``."""

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
MODEL_RULES: dict[str, Rule] = {
    "embedding.word_embeddings.weight": Rule(((EMBEDDING, ("vocab", "hidden")),), _vocabulary),
    "decoder.final_layernorm.weight": Rule((("model.norm.weight", ("hidden",)),), _copy),
    "output_layer.weight": Rule(((HEAD, ("vocab", "hidden")),), _vocabulary),
}

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")

# Buffers that old Llama checkpoints store; they follow from config.json.
_NOT_PARAMETERS = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def load_weights(model: Any, checkpoint: Checkpoint, shape: ModelShape) -> None:
    """Fill every parameter of a GPTModel, rounding to the parameter's dtype.

    Only one Megatron parameter is held in numpy at a time. Raises CheckpointError, with the tensor's name, when a
    tensor is missing, unexpected or of another shape than config.json says.
    """
    import torch

    used: set[str] = set()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            rule = _rule(name)
            array = _build(rule, checkpoint, shape)
            if tuple(parameter.shape) != array.shape:
                raise CheckpointError(
                    f"Megatron parameter {name} has shape {tuple(parameter.shape)}, but its weights make {array.shape}"
                )
            parameter.copy_(torch.from_numpy(array))
            used.update(source for source, _ in rule.sources)
    _check_unused(checkpoint, used, shape)


def _rule(name: str) -> Rule:
    """Find the rule of a Megatron parameter and put the layer number into its sources."""
    match = _LAYER.fullmatch(name)
    rule = LAYER_RULES.get(match[2]) if match else MODEL_RULES.get(name)
    if rule is None:
        raise CheckpointError(f"Megatron parameter {name} has no counterpart in the checkpoint's architecture")
    if match is None:
        return rule
    return Rule(tuple((f"model.layers.{match[1]}.{source}", dims) for source, dims in rule.sources), rule.fuse)


def _build(rule: Rule, checkpoint: Checkpoint, shape: ModelShape) -> np.ndarray:
    """Read the sources of one parameter, check their shapes and fuse them."""
    known = set(checkpoint.names())
    for name, dims in rule.sources:
        if name not in known:
            raise CheckpointError(
                f"checkpoint {checkpoint.path} lacks the parameter {name}",
                f"check that it is a complete {checkpoint.architecture} and that config.json belongs to it",
            )
        expected = tuple(shape.dimension(dim) for dim in dims)
        if checkpoint.shape(name) != expected:
            raise CheckpointError(
                f"parameter {name} of {checkpoint.path} has shape {checkpoint.shape(name)}, "
                f"but config.json makes it {expected}",
                "use the config.json that was saved with these weights",
            )
    return rule.fuse([checkpoint.tensor(name) for name, _ in rule.sources], shape)


def _check_unused(checkpoint: Checkpoint, used: set[str], shape: ModelShape) -> None:
    """Refuse tensors that no parameter took: they would change the model elsewhere."""
    unused = [name for name in checkpoint.names() if name not in used and not _NOT_PARAMETERS.fullmatch(name)]
    if shape.tied and HEAD in unused and np.array_equal(checkpoint.tensor(HEAD), checkpoint.tensor(EMBEDDING)):
        unused.remove(HEAD)
    if unused:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} has {len(unused)} unexpected parameters, e.g. {', '.join(unused[:3])}",
            f"check that config.json describes these weights as {checkpoint.architecture}",
        )
