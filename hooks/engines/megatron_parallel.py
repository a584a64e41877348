"""How Megatron-core spreads a model over ranks: who this rank is, and what of each tensor and parameter it holds.

Nothing here imports Megatron: the facts come from its ``parallel_state`` where a process has initialised that.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from probe.hooks.rows import foreign_rows
from probe.store.schema import CELLS, COLUMNS, PARTIAL, REPLICATED, WHOLE

_STATE = "megatron.core.parallel_state"
_GROUPS = {
    "tp": "tensor_model_parallel",
    "pp": "pipeline_model_parallel",
    "cp": "context_parallel",
    "ep": "expert_model_parallel",
    "dp": "data_parallel",
    "etp": "expert_tensor_parallel",
}
"""Axis -> Megatron's name of the group, in ``get_NAME_rank`` and ``get_NAME_world_size``."""


@dataclass(frozen=True)
class Ranks:
    """This process's number and the size of each of Megatron's groups; ``etp`` is the experts' tensor-parallel one.

    ``sharing``: the global ranks that give each other's experts tokens, in the order in which these are gathered.
    """

    tp: int = 0
    tp_size: int = 1
    pp: int = 0
    pp_size: int = 1
    cp: int = 0
    cp_size: int = 1
    ep: int = 0
    ep_size: int = 1
    dp: int = 0
    dp_size: int = 1
    etp: int = 0
    etp_size: int = 1
    vpp: int = 1
    sharing: tuple[int, ...] = ()


def ranks() -> Ranks:
    """Return this process's place, which is alone where Megatron's parallel state is not initialised."""
    state = sys.modules.get(_STATE)
    if state is None or not state.model_parallel_is_initialized():
        return Ranks()
    found: dict[str, int] = {}
    for axis, group in _GROUPS.items():
        found[axis] = getattr(state, f"get_{group}_rank")()
        found[f"{axis}_size"] = getattr(state, f"get_{group}_world_size")()
    vpp = state.get_virtual_pipeline_model_parallel_world_size() or 1
    return Ranks(**found, vpp=vpp, sharing=_sharing(state))


def _sharing(state: Any) -> tuple[int, ...]:
    group = state.get_expert_tensor_and_model_parallel_group(check_initialized=False)
    return () if group is None else tuple(torch.distributed.get_process_group_ranks(group))


def parallel_facts(model: Any = None) -> tuple[dict[str, Any] | None, dict[str, int] | None]:
    """Return the manifest's ``topology`` and ``coordinates`` of this rank, None each where Megatron does not know.

    ``model`` (a GPTModel, or a wrapper around one) tells whether sequence parallelism is on.
    """
    state = sys.modules.get(_STATE)
    if state is None or not state.model_parallel_is_initialized():
        return None, None
    here = ranks()
    axes = ("tp", "pp", "cp", "ep", "dp")
    sizes = {axis: getattr(here, f"{axis}_size") for axis in axes}
    return {**sizes, "vpp": here.vpp, "sp": sequence_parallel(model)}, {axis: getattr(here, axis) for axis in axes}


def sequence_parallel(model: Any) -> bool:
    """Tell whether a model's tensors outside attention and MLP are split by position between tensor-parallel ranks."""
    config = getattr(model, "config", None)
    return bool(getattr(config, "sequence_parallel", False)) and getattr(config, "tensor_model_parallel_size", 1) > 1


def zigzag(length: int, size: int, rank: int) -> np.ndarray:
    """Return which positions of a sequence a context-parallel rank holds: int64 [length / size].

    Each sequence is cut into 2 * size chunks and rank r holds chunks r and 2 * size - 1 - r, so that causal attention
    costs every rank the same. ``length`` is a multiple of 2 * size.
    """
    if size == 1:
        return np.arange(length)
    chunks = np.arange(length).reshape(2 * size, -1)
    return np.concatenate([chunks[rank], chunks[2 * size - 1 - rank]])


# -- features ----------------------------------------------------------------------------------------------------------

_ALL = ("input", "kwargs", "output")
SHARDS: dict[str, dict[str, str]] = {
    "linear_qkv": {"output": COLUMNS},
    "linear_q_proj": {"output": COLUMNS},
    "linear_q_up_proj": {"output": COLUMNS},
    "linear_kv_up_proj": {"output": COLUMNS},
    "q_layernorm": dict.fromkeys(_ALL, COLUMNS),
    "k_layernorm": dict.fromkeys(_ALL, COLUMNS),
    "core_attention": dict.fromkeys(_ALL, COLUMNS),
    "linear_proj": {"input": COLUMNS},
    "linear_fc1": {"output": COLUMNS},
    "linear_fc2": {"input": COLUMNS},
    "output_layer": {"output": COLUMNS},
}
"""By the last part of a module's path and the kind of slot: what a tensor-parallel rank holds. Anything else outside
attention and MLP is the same on all ranks, or with sequence parallelism other rows on each."""
LATENT = ".linear_kv_down_proj"
"""Where it exists, attention is DeepSeek's, and its norms act on latents that no rank splits."""
_LATENT_NORMS = ("q_layernorm", "kv_layernorm")


def shard_of(path: str, slot: str, here: Ranks, split_rows: bool, latent: bool) -> str:
    """Return how a tensor lies over the tensor-parallel ranks (:data:`probe.store.schema.SHARDS`).

    ``split_rows``: sequence parallelism is on. ``latent``: the attention is multi-latent (MLA).
    """
    if path == CELLS[0]:
        return WHOLE
    leaf, kind = path.rpartition(".")[2], slot.partition(".")[0]
    rest = WHOLE if split_rows else REPLICATED
    if ".local_experts." in path or path.endswith("mlp.experts"):
        return _expert_shard(leaf, kind, here)
    if ".core_attention." in path:
        return COLUMNS
    if latent and leaf in _LATENT_NORMS:
        return rest
    return SHARDS.get(leaf, {}).get(kind, rest)


def _expert_shard(leaf: str, kind: str, here: Ranks) -> str:
    """Return what a rank holds of an expert: its down projection is summed only after the tokens are back home."""
    if here.etp_size == 1:
        return WHOLE
    if leaf == "linear_fc1" or (leaf == "linear_fc2" and kind == "input"):
        return SHARDS[leaf].get(kind, WHOLE)
    return PARTIAL if kind == "output" else WHOLE


PARAMETER_AXES = {
    "word_embeddings.weight": 0,
    "output_layer.weight": 0,
    "linear_qkv.weight": 0,
    "linear_qkv.bias": 0,
    "linear_q_proj.weight": 0,
    "linear_q_up_proj.weight": 0,
    "linear_kv_up_proj.weight": 0,
    "linear_fc1.weight": 0,
    "linear_fc1.bias": 0,
    "linear_proj.weight": 1,
    "linear_fc2.weight": 1,
}
"""Which axis of a parameter [output, input] is split, for models built without Megatron's own initialisation: only
that marks parameters with ``tensor_model_parallel`` and ``partition_dim``."""


def parallel_axis(name: str, parameter: Any) -> tuple[int, int]:
    """Return (axis, column): the axis over which tensor-parallel ranks split a parameter, and its first input column.

    Axis -1: it is not split; 0: by output rows; 1: by input columns, of which this rank holds ``column`` and on.
    """
    here = ranks()
    rank, size = (here.etp, here.etp_size) if ".local_experts." in f".{name}" else (here.tp, here.tp_size)
    if size == 1:
        return -1, 0
    axis = PARAMETER_AXES.get(".".join(name.split(".")[-2:]), -1)
    if getattr(parameter, "tensor_model_parallel", False):
        axis = int(parameter.partition_dim)
    return axis, rank * parameter.shape[1] if axis == 1 else 0


# -- rows of experts ---------------------------------------------------------------------------------------------------


def local_rows(grid: tuple[int, int], here: Ranks, split_rows: bool) -> np.ndarray:
    """Return the flat rows of the call's grid [batch, position] that a rank's layers hold, position-major.

    All of them, or with sequence parallelism those of its own positions. Its experts and those of other ranks count its
    tokens in this order.
    """
    batch, length = grid
    part, first = (length // here.tp_size, here.tp) if split_rows else (length, 0)
    positions = first * part + np.arange(part)
    return (np.arange(batch)[None] * length + positions[:, None]).reshape(-1)


def expert_rows(dispatcher: Any, expert: int, grid: tuple[int, int], here: Ranks, split_rows: bool) -> np.ndarray:
    """Return the flat rows of the call's grid [batch, position] that a local expert serves.

    Tokens of other ranks are :func:`probe.hooks.rows.foreign_rows`; a token that two ranks hold counts once, the other
    time it is -1. Megatron's all-gather dispatcher collects the tokens of all ranks that share the experts, rank after
    rank and position-major, and keeps in ``local_map`` [tokens, local experts] who goes where; each expert takes its
    tokens in that order.
    """
    chosen = dispatcher.local_map[:, expert].nonzero()[:, 0].cpu().numpy()
    own = local_rows(grid, here, split_rows)
    owner, cell = np.divmod(chosen, len(own))
    peer_ep, peer_etp = np.divmod(owner, here.etp_size)
    rows = foreign_rows(np.array(here.sharing or range(here.etp_size * here.ep_size))[owner], cell)
    tensor_group = here.etp_size == here.tp_size  # these ranks run one grid, each its own positions or all the same
    for peer in range(here.etp_size) if tensor_group and split_rows else (here.etp,):
        mine = (peer_ep == here.ep) & (peer_etp == peer)
        held = local_rows(grid, replace(here, tp=peer), True) if tensor_group and split_rows else own
        rows[mine] = held[cell[mine]]
    if not split_rows:
        rows[peer_etp != here.etp] = -1
    return rows
