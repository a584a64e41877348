"""What vLLM's settings mean for a recording: what it cannot hold, what to set to have it, how tokens are drawn."""

from __future__ import annotations

from typing import Any

from probe.errors import CaptureError
from probe.hooks.engines.vllm_model_runner import refuse_unsupported
from probe.settings import Settings

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty")
"""Sampling parameters of a request that the manifest names."""


def samples_here() -> bool:
    """Tell whether this rank is the one that vLLM takes sampled tokens from: the first of the last pipeline stage."""
    from vllm.distributed import parallel_state

    return bool(parallel_state.get_pp_group().is_last_rank and parallel_state.get_tp_group().rank_in_group == 0)


def sampling_of(params: Any) -> dict[str, Any] | None:
    """Return the sampling parameters that say which distribution tokens are drawn from, None for pooling requests."""
    if params is None:
        return None
    return {name: value for name in SAMPLING if isinstance(value := getattr(params, name, None), int | float)}


def why_tokens_only(runner: Any) -> str:
    """Return why modules cannot be recorded and what to set, empty where they can."""
    config = runner.vllm_config
    compilation = config.compilation_config
    compiled = _number(getattr(compilation, "mode", None)) or _number(getattr(compilation, "cudagraph_mode", None))
    if not config.model_config.enforce_eager and compiled:
        return (
            "vLLM compiles its model or replays it from graphs, where hooks never fire: set enforce_eager=True "
            "(vllm serve --enforce-eager; verl: actor_rollout_ref.rollout.enforce_eager=True)"
        )
    try:
        refuse_unsupported(runner)
    except CaptureError as error:
        return str(error)
    return ""


def what_is_left_out(runner: Any, settings: Settings) -> list[str]:
    """Return what is kept out of a recording of tensors, and what to set to have it."""
    config, advice = runner.vllm_config, []
    if settings.weights == "layers":
        advice.append(
            "PROBE_WEIGHTS=layers stores no parameters of a job's vLLM, only sketches: give 'probe compare' the "
            "checkpoint with --weights, or dump with 'probe dump --stage rollout'"
        )
    if getattr(config.cache_config, "enable_prefix_caching", False):
        advice.append(
            "vLLM's prefix cache is on: rows of a prompt that it finds there never run and are not recorded; set "
            "enable_prefix_caching=False (verl: actor_rollout_ref.rollout.enable_prefix_caching=False) to have them"
        )
    return advice


def _number(value: Any) -> int:
    """Return an enumeration's number: those of compilation and graphs are 0 where nothing is done."""
    value = getattr(value, "value", value)
    return value if isinstance(value, int) else int(value is not None)
