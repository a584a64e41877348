"""How vLLM's ranks share a model: this rank's coordinates and which part of each tensor and parameter it holds.

Modules are told apart by their path and by what vLLM's layers say about themselves (``gather_output``,
``reduce_results``, ...), never by class or package, so that vllm-ascend's ``Ascend*`` classes need no entry.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from probe.store.schema import COLUMNS, PARTIAL, REPLICATED, WHOLE

PLACES: tuple[tuple[str, str, str], ...] = (
    # multi-head latent attention: the compressed key-value stream is on every rank
    (r"(^|\.)indexer(\..*)?", r".*", REPLICATED),
    (r"(^|\.)rotary_emb", r"input\.0|kwargs\.positions", REPLICATED),
    (r"(^|\.)mla_attn\.mla_attn", r"input\.[12]", REPLICATED),
    (r"(^|\.)mla_attn\.mla_attn", r"(input|output)\.\d+", COLUMNS),
    (r"(^|\.)(rotary_emb|attn|act_fn)", r"(input|output)\.\d+", COLUMNS),
    # what runs on the residual stream
    (r"(^|\.)(embed_tokens|norm|\w*layernorm|gate|logits_processor)", r".*", REPLICATED),
    (
        r"(^|\.)(layers\.\d+|self_attn|mla_attn|mlp|block_sparse_moe|experts|_?shared_experts?|_layer|model|language_model)?",
        r".*",
        REPLICATED,
    ),
)
"""(regular expression of the module's path, of the slot, how the tensor lies); the first that fits counts, the path's
expression at the end of the path. Linear layers are not listed: they declare themselves."""
HEAD_NORMS = ("q_norm", "k_norm")
ONE_KEY = ("input.2", "output.1")
"""Slots of the rotary embedding's keys, of which multi-head latent attention has one for all heads."""
REDUCERS = {
    "self_attn": ("o_proj",),
    "mla_attn": ("o_proj",),
    "mlp": ("down_proj",),
    "shared_expert": ("down_proj",),
    "shared_experts": ("down_proj",),
    "_layer": ("down_proj",),
}
"""Container -> the row-parallel child whose output it returns: a sum left open there is open here too."""
_PLACES = tuple((re.compile(rf"(.*{path})\Z"), re.compile(rf"({slot})\Z"), lies) for path, slot, lies in PLACES)


class ShardMap:
    """Say how each tensor of a model lies over the tensor-parallel ranks, from the modules that capture meets."""

    def __init__(self) -> None:
        self.modules: dict[str, torch.nn.Module] = {}

    def lies(self, path: str, slot: str) -> str:
        """Return how a tensor lies (:data:`probe.store.schema.SHARDS`), ``""`` where nothing says so."""
        module, leaf = self.modules.get(path), path.rpartition(".")[2]
        declared = _declared(module, slot)
        if declared is not None:
            return declared
        if leaf in HEAD_NORMS and "indexer." not in path:
            return self._of_head_norm(path, module)
        if leaf == "rotary_emb" and slot in ONE_KEY and f"{path.removesuffix(leaf)}kv_a_layernorm" in self.modules:
            return REPLICATED
        if slot.startswith("output") and self._left_open(path, leaf, module):
            return PARTIAL
        return next((lies for where, what, lies in _PLACES if where.match(path) and what.match(slot)), WHOLE)

    def _of_head_norm(self, path: str, module: torch.nn.Module | None) -> str:
        """Return how a norm of queries or keys lies: per head it sees this rank's heads, else it is not known."""
        attention = self.modules.get(f"{path.rpartition('.')[0]}.attn")
        size, weight = getattr(attention, "head_size", None), getattr(module, "weight", None)
        return COLUMNS if weight is not None and weight.numel() == size else WHOLE

    def _left_open(self, path: str, leaf: str, module: torch.nn.Module | None) -> bool:
        if getattr(getattr(module, "moe_config", None), "skip_final_all_reduce", False):
            return True
        children = (self.modules.get(f"{path}.{child}") for child in REDUCERS.get(leaf, ()))
        return any(getattr(child, "reduce_results", True) is False for child in children)


def _declared(module: Any, slot: str) -> str | None:
    """Return how a linear layer's tensor lies by the layer's own word; None for other modules."""
    column, row = hasattr(module, "gather_output"), hasattr(module, "input_is_parallel")
    if not (column or row or (hasattr(module, "quant_method") and hasattr(module, "output_size"))):
        return None
    size = int(getattr(module, "tp_size", 1))
    if size == 1:
        return REPLICATED
    into = not slot.startswith("output")
    if column:
        return REPLICATED if into or module.gather_output else COLUMNS
    if row and into:
        return COLUMNS if module.input_is_parallel else REPLICATED
    return PARTIAL if getattr(module, "reduce_results", True) is False else REPLICATED


def weight_split(name: str, parameter: torch.Tensor, module: Any) -> tuple[int, int]:
    """Return (axis, start) of a parameter before vLLM repacks it: how ranks share it and its first global input column.

    ``name`` is the parameter's path and ``module`` its owner. ``axis`` is that of
    :class:`probe.store.schema.WeightSketch`; ``start`` is 0 unless input columns are shared.
    """
    leaf, experts = name.rpartition(".")[2], getattr(module, "moe_config", None)
    if experts is not None and leaf.startswith(("w13_", "w2_")):
        if int(experts.tp_size) == 1:
            return -1, 0
        if leaf.startswith("w13_"):
            return 0, 0
        return (1, int(experts.tp_rank) * parameter.shape[-1]) if leaf == "w2_weight" else (-1, 0)
    if int(getattr(module, "tp_size", 1)) == 1:
        return -1, 0
    if hasattr(module, "gather_output") or hasattr(module, "num_embeddings_per_partition"):
        return 0, 0
    if hasattr(module, "input_is_parallel") and parameter.dim() > 1:
        return 1, int(module.tp_rank) * parameter.shape[1]
    return -1, 0


@dataclass(frozen=True)
class RankPlace:
    """Sizes of the parallel groups, this rank's number in each, and its number among all ranks."""

    topology: dict[str, Any]
    coordinates: dict[str, int]
    rank: int
    world_size: int


def place_of(runner: Any) -> RankPlace:
    """Return where this process stands, from vLLM's configuration and its process groups."""
    from vllm.distributed import parallel_state

    config = runner.vllm_config.parallel_config
    tp, pp, dp = (getattr(parallel_state, f"get_{axis}_group")() for axis in ("tp", "pp", "dp"))
    sizes = {"tp": tp.world_size, "pp": pp.world_size, "cp": 1, "ep": 1, "dp": dp.world_size, "vpp": 1, "sp": False}
    numbers = {"tp": tp.rank_in_group, "pp": pp.rank_in_group, "cp": 0, "ep": 0, "dp": dp.rank_in_group}
    if config.enable_expert_parallel and getattr(runner.model_config, "is_moe", True):
        ep = parallel_state.get_ep_group()
        sizes["ep"], numbers["ep"] = ep.world_size, ep.rank_in_group
    within = tp.world_size * pp.world_size
    rank = (numbers["dp"] * pp.world_size + numbers["pp"]) * tp.world_size + numbers["tp"]
    return RankPlace(sizes, numbers, rank, within * dp.world_size)
