"""Load Hugging Face weights into a Megatron GPTModel.

One table says which Hugging Face tensors make up each Megatron parameter and how they are fused; the layouts are
those of :mod:`probe.layout`. Both layer specifications are covered: the local one, with separate norms, and the
TransformerEngine one, which keeps the norm weights inside the linear layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from probe import layout
from probe.checkpoint import Checkpoint
from probe.errors import CheckpointError
from probe.hooks.engines.megatron_parallel import parallel_axis, ranks
from probe.hooks.runners.megatron_config import ModelShape

Dims = tuple[str, ...]


@dataclass(frozen=True)
class Rule:
    """How one Megatron parameter is made: its sources with the names of their dimensions, and the fuse function.

    Sources whose first dimension is ``experts`` are stacked; ``expert`` is the entry to take from them.
    """

    sources: tuple[tuple[str, Dims], ...]
    fuse: Callable[[list[np.ndarray], ModelShape], np.ndarray]
    expert: int | None = None

    def of(self, prefix: str, expert: int | None = None) -> Rule:
        """Return the rule of one layer and one expert, by its global number."""
        sources = tuple((prefix + source.replace("{e}", str(expert)), dims) for source, dims in self.sources)
        return replace(self, sources=sources, expert=expert)


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
    "mlp.shared_experts.linear_fc1.weight": Rule(
        (
            ("mlp.shared_expert.gate_proj.weight", ("shared_ffn", "hidden")),
            ("mlp.shared_expert.up_proj.weight", ("shared_ffn", "hidden")),
        ),
        _gate_up,
    ),
    "mlp.shared_experts.linear_fc2.weight": Rule(
        (("mlp.shared_expert.down_proj.weight", ("hidden", "shared_ffn")),), _copy
    ),
    "mlp.shared_experts.gate_weight": Rule((("mlp.shared_expert_gate.weight", ("one", "hidden")),), _copy),
}
"""Parameters of ``decoder.layers.<i>`` made from tensors of ``model.layers.<i>``."""

_EXPERT_IN, _EXPERT_OUT = ("expert_ffn", "hidden"), ("hidden", "expert_ffn")
MOE_RULES: dict[str, tuple[Rule, ...]] = {
    "mlp.router.weight": (
        Rule((("mlp.gate.weight", ("experts", "hidden")),), _copy),
        Rule((("block_sparse_moe.gate.weight", ("experts", "hidden")),), _copy),
    ),
    "mlp.experts.local_experts.{e}.linear_fc1.weight": (
        Rule(
            (("mlp.experts.{e}.gate_proj.weight", _EXPERT_IN), ("mlp.experts.{e}.up_proj.weight", _EXPERT_IN)), _gate_up
        ),
        Rule(
            (
                ("block_sparse_moe.experts.{e}.w1.weight", _EXPERT_IN),
                ("block_sparse_moe.experts.{e}.w3.weight", _EXPERT_IN),
            ),
            _gate_up,
        ),
        Rule((("mlp.experts.gate_up_proj", ("experts", "expert_gate_up", "hidden")),), _copy),
    ),
    "mlp.experts.local_experts.{e}.linear_fc2.weight": (
        Rule((("mlp.experts.{e}.down_proj.weight", _EXPERT_OUT),), _copy),
        Rule((("block_sparse_moe.experts.{e}.w2.weight", _EXPERT_OUT),), _copy),
        Rule((("mlp.experts.down_proj", ("experts", *_EXPERT_OUT)),), _copy),
    ),
}
"""Parameters of layers with experts, each with the ways a checkpoint may store it.

One tensor per expert, as Qwen and Mixtral name them, or all experts stacked (a transformers 5 model saved as it is in
memory). ``{e}`` is the global number of an expert.
"""

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_EMBEDDING_OF_MEGATRON, _HEAD_OF_MEGATRON = "embedding.word_embeddings.weight", "output_layer.weight"
MODEL_RULES: dict[str, Rule] = {
    _EMBEDDING_OF_MEGATRON: Rule(((EMBEDDING, ("vocab", "hidden")),), _vocabulary),
    "decoder.final_layernorm.weight": Rule((("model.norm.weight", ("hidden",)),), _copy),
    _HEAD_OF_MEGATRON: Rule(((HEAD, ("vocab", "hidden")),), _vocabulary),
}

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+(?=\.)")

# Buffers that old Llama checkpoints store; they follow from config.json.
_NOT_PARAMETERS = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def load_weights(chunks: Sequence[Any], checkpoint: Checkpoint, shape: ModelShape) -> None:
    """Fill every parameter of this rank's GPTModels with its part of the weights, rounding to the parameter's dtype.

    Only one Megatron parameter is held in numpy at a time. Raises CheckpointError, with the tensor's name, when a
    tensor is missing, unexpected or of another shape than config.json says.
    """
    names, first_expert = set(checkpoint.names()), _first_expert(shape)
    used: set[str] = set()
    with torch.no_grad():
        for chunk in chunks:
            for local, parameter in chunk.named_parameters():
                name = _global_name(chunk, local)
                rule = _rule(name, names, first_expert, shape.tied)
                array = _part(name, _build(rule, checkpoint, shape), parameter)
                if tuple(parameter.shape) != array.shape:
                    raise CheckpointError(
                        f"Megatron parameter {name} has shape {tuple(parameter.shape)}, "
                        f"but its weights make {array.shape}"
                    )
                parameter.copy_(torch.from_numpy(array))
                used.update(source for source, _ in rule.sources)
    _check_unused(checkpoint, _on_all_ranks(used), shape)


def _global_name(chunk: Any, name: str) -> str:
    """Return a parameter's name with its layer's number in the whole model; a pipeline stage counts from 0."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return name
    return f"decoder.layers.{chunk.decoder.layers[int(match[1])].layer_number - 1}.{match[2]}"


def _part(name: str, array: np.ndarray, parameter: Any) -> np.ndarray:
    """Cut this rank's part out of a whole parameter; of gate and up, which lie end to end, it holds a part of each."""
    here = ranks()
    rank, size = (here.etp, here.etp_size) if _EXPERT.search(name) else (here.tp, here.tp_size)
    axis, _ = parallel_axis(name, parameter)
    if axis < 0:
        return array
    wholes = np.split(array, 2) if ".linear_fc1." in name else [array]
    if any(whole.shape[axis] % size for whole in wholes):
        return array  # the caller names the parameter and both shapes
    return np.ascontiguousarray(np.concatenate([np.split(whole, size, axis)[rank] for whole in wholes]))


def _on_all_ranks(used: set[str]) -> set[str]:
    """Return the tensors that any rank took, so that each can tell which none did."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return used
    every: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(every, used)
    return set().union(*every)


def _first_expert(shape: ModelShape) -> int:
    """Return the global number of this rank's expert 0: expert-parallel ranks hold consecutive experts."""
    here = ranks()
    return shape.moe.experts // here.ep_size * here.ep if shape.moe else 0


def _rule(name: str, known: Collection[str] = (), first_expert: int = 0, tied: bool = False) -> Rule:
    """Find the rule of a Megatron parameter and put the numbers of its layer and expert into its sources.

    Where there are several, the one of which most sources are ``known`` counts. With ``tied`` embeddings the head that
    a last pipeline stage has of its own is a copy of the embedding.
    """
    if tied and name == _HEAD_OF_MEGATRON:
        name = _EMBEDDING_OF_MEGATRON
    match, expert = _LAYER.fullmatch(name), _EXPERT.search(name)
    number = first_expert + int(expert[0]) if expert else None
    found = LAYER_RULES.get(match[2]) if match else MODEL_RULES.get(name)
    rules = (found,) if found else MOE_RULES.get(_EXPERT.sub("{e}", match[2]), ()) if match else ()
    if not rules:
        raise CheckpointError(f"Megatron parameter {name} has no counterpart in the checkpoint's architecture")
    filled = [rule.of(f"model.layers.{match[1]}." if match else "", number) for rule in rules]
    return max(filled, key=lambda rule: sum(source in known for source, _ in rule.sources))


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
    return rule.fuse([_read(checkpoint, name, dims, rule.expert) for name, dims in rule.sources], shape)


def _read(checkpoint: Checkpoint, name: str, dims: Dims, expert: int | None) -> np.ndarray:
    """Read a tensor, of stacked experts only one."""
    return checkpoint.tensor(name, entry=expert if dims[0] == "experts" else None)


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
