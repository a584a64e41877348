"""What SGLang's ``ModelRunner`` says of itself: whether its rows can be told apart, its ranks, weights and kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from probe.hooks.engines import vllm_parallel
from probe.hooks.engines.vllm_parallel import RankPlace
from probe.hooks.taps import wrap_method
from probe.hooks.weights import sketches, unavailable
from probe.store.schema import WeightSketch

UNSUPPORTED: tuple[tuple[str, Any, str, str], ...] = (
    ("speculative_algorithm", None, "speculative decoding runs rows of tokens that it then rejects", "switch it off"),
    ("enable_dp_attention", False, "data-parallel attention pads and gathers the rows of all ranks", "switch it off"),
    ("attn_cp_size", 1, "context parallelism cuts prompts between ranks", "use attn_cp_size=1"),
    ("enable_two_batch_overlap", False, "two-batch overlap runs two halves of a batch at once", "switch it off"),
    ("enable_pdmux", False, "its prefills run layer by layer, outside the model's forward", "switch it off"),
    ("disaggregation_mode", "null", "prefill and decode run in different servers", "run both in one"),
    ("dllm_algorithm", None, "diffusion models run a token several times", "record an autoregressive model"),
)
"""(argument of the server, the value rows can be told apart with, why, what to do)."""
GRAPHS = ("graph_runner", "piecewise_cuda_graph_runner")
WITHOUT_GRAPHS = (
    "SGLang replays its model from graphs, where hooks never fire: set disable_cuda_graph=True and "
    "disable_piecewise_cuda_graph=True (verl: actor_rollout_ref.rollout.enforce_eager=True and "
    "+actor_rollout_ref.rollout.engine_kwargs.sglang.disable_piecewise_cuda_graph=True)"
)


def why_tokens_only(runner: Any) -> str:
    """Return why modules cannot be recorded and what to set, empty where they can."""
    arguments = runner.server_args
    if any(getattr(runner, name, None) is not None for name in GRAPHS):
        return WITHOUT_GRAPHS
    if getattr(arguments, "enable_torch_compile", False):
        return "SGLang compiles its model, where hooks never fire: set enable_torch_compile=False"
    for name, fine, reason, fix in UNSUPPORTED:
        if getattr(arguments, name, fine) != fine:
            return f"SGLang's {name} cannot be dumped: {reason}; {fix}"
    return ""


def call_through_hooks(model: torch.nn.Module) -> Callable[[], None]:
    """Make ``model.forward(...)``, which is how SGLang calls it, run the model's hooks; return the undo."""
    inside = False

    def enter(*_: Any) -> None:
        nonlocal inside
        inside = True

    def leave(*_: Any) -> None:
        nonlocal inside
        inside = False

    def through(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) if inside else model(*args, **kwargs)

        return forward

    undo = wrap_method(model, "forward", through)
    handles = model.register_forward_pre_hook(enter), model.register_forward_hook(leave, always_call=True)

    def restore() -> None:
        undo()
        for handle in handles:
            handle.remove()

    return restore


def place_of(runner: Any) -> RankPlace:
    """Return where this process stands, from SGLang's process groups and what its runner was told."""
    from sglang.srt.distributed import parallel_state

    tp, pp = parallel_state.get_tp_group(), parallel_state.get_pp_group()
    dp, number = int(getattr(runner, "dp_size", None) or 1), int(getattr(runner, "dp_rank", None) or 0)
    ep, expert = int(runner.moe_ep_size or 1), int(runner.moe_ep_rank or 0)
    sizes = {"tp": tp.world_size, "pp": pp.world_size, "cp": 1, "ep": ep, "dp": dp, "vpp": 1, "sp": False}
    numbers = {"tp": tp.rank_in_group, "pp": pp.rank_in_group, "cp": 0, "ep": expert, "dp": number}
    within = tp.world_size * pp.world_size
    rank = (number * pp.world_size + pp.rank_in_group) * tp.world_size + tp.rank_in_group
    return RankPlace(sizes, numbers, rank, within * dp)


def samples_here(runner: Any) -> bool:
    """Tell whether this rank is the one that requests' tokens are written from: the first of the last stage."""
    place = place_of(runner)
    return place.coordinates["tp"] == 0 and place.coordinates["pp"] == place.topology["pp"] - 1


def weight_split(name: str, parameter: torch.Tensor, module: Any) -> tuple[int, int]:
    """Return (axis, start) of a parameter: how ranks share it and its first global input column.

    SGLang's layers state it as vLLM's do, from which they come; its fused experts count their ranks apart.
    """
    ranks = getattr(module, "moe_tp_size", None)
    if ranks is None:
        return vllm_parallel.weight_split(name, parameter, module)
    leaf = name.rpartition(".")[2]
    if int(ranks) == 1 or not leaf.startswith(("w13_", "w2_")):
        return -1, 0
    if leaf.startswith("w13_"):
        return 0, 0
    return (1, int(module.moe_tp_rank) * parameter.shape[-1]) if leaf == "w2_weight" else (-1, 0)


def sketches_of(runner: Any) -> Iterator[WeightSketch]:
    """Yield the sketch of every parameter where it lies; without rows for a quantised model, which was repacked."""
    repacked = getattr(runner.model_config, "quantization", None) is not None
    for weight in sketches(runner.model, weight_split):
        if repacked and not weight.alias:
            yield unavailable(weight.name, weight.shape, weight.dtype, weight.axis)
        else:
            yield weight


def backends_of(runner: Any) -> dict[str, Any]:
    """Return the names of the kernels in use, for the report."""
    arguments = runner.server_args
    return {
        "attention": arguments.attention_backend,
        "kv_cache": str(getattr(runner, "kv_cache_dtype", "")) or None,
        "moe": getattr(arguments, "moe_runner_backend", None),
        "quantization": getattr(runner.model_config, "quantization", None),
    }
