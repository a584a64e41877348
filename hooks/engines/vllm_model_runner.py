"""The object of vLLM that runs a model's passes (its ``GPUModelRunner``): find it, refuse it, listen to it.

Listening says which requests each pass serves, and when the weights are replaced.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch

from probe.errors import CaptureError
from probe.hooks.engines.vllm import VllmAdapter
from probe.hooks.taps import wrap_method


def find_runner(model: Any) -> Any:
    """Return the vLLM model runner that holds ``model`` (an in-process ``LLM`` or a bare model), None for others."""
    executor = getattr(getattr(model, "llm_engine", None), "model_executor", None)
    worker = getattr(getattr(executor, "driver_worker", None), "worker", None)
    if worker is not None:
        return worker.model_runner
    if not type(model).__module__.startswith(("vllm.", "vllm_ascend.")):
        return None
    if hasattr(model, "llm_engine"):
        raise CaptureError(
            "this vllm.LLM runs its model in another process",
            "set VLLM_ENABLE_V1_MULTIPROCESSING=0, or use 'probe dump --stage rollout'",
        )
    # vLLM's model does not know its runner, whose batch bookkeeping says which row is which request
    known = _runners[model]() if model in _runners else None
    if getattr(known, "model", None) is model:
        return known
    candidates = (o for o in _live_objects() if type(o).__name__.endswith("ModelRunner"))
    found = next((o for o in candidates if getattr(o, "model", None) is model), None)
    if found is not None:
        _runners[model] = weakref.ref(found)
    return found


_runners: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""Models whose runner was found: whoever starts a debugger for every pass asks every time."""


def _live_objects() -> list[Any]:
    """Return what the garbage collector tracks, with what vLLM has frozen to spare it work (its runner is there)."""
    frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    try:
        return gc.get_objects()
    finally:
        if frozen:
            gc.freeze()


UNSUPPORTED: tuple[tuple[str, Any, str, str], ...] = (
    ("speculative_config", None, "speculative decoding runs rows of tokens that it then rejects", "switch it off"),
    (
        "parallel_config.prefill_context_parallel_size",
        1,
        "prefill context parallelism cuts prompts between ranks",
        "use prefill_context_parallel_size=1",
    ),
    ("parallel_config.enable_dbo", False, "dual batch overlap runs two halves of a batch at once", "switch it off"),
)
"""(entry of vLLM's configuration, the value rows can be told apart with, why, what to do)."""


def refuse_unsupported(runner: Any) -> None:
    """Raise CaptureError for a runner whose rows would not be known for certain."""
    if getattr(runner, "input_batch", None) is None:
        raise CaptureError(
            "this vLLM uses its second-generation model runner, whose batches are not known outside it",
            "set VLLM_USE_V2_MODEL_RUNNER=0",
        )
    for entry, fine, reason, fix in UNSUPPORTED:
        value: Any = runner.vllm_config
        for name in entry.split("."):
            value = getattr(value, name, fine)
        if value != fine:
            raise CaptureError(f"vLLM's {entry.rpartition('.')[2]} cannot be dumped: {reason}", fix)


def model_of(runner: Any) -> torch.nn.Module:
    """Return the model that a runner runs, without the wrappers that newer versions put around ``runner.model``."""
    model: torch.nn.Module = runner.get_model() if hasattr(runner, "get_model") else runner.model
    return model


def backends_of(runner: Any) -> dict[str, Any]:
    """Return the names of the kernels in use, for the report."""
    groups = getattr(runner, "attn_groups", None) or []
    names = sorted({g.backend.get_name() for group in groups for g in group if hasattr(g, "backend")})
    return {
        "attention": ", ".join(names) or None,
        "kv_cache": str(getattr(runner, "kv_cache_dtype", "")) or None,
        "moe": None,
        "quantization": getattr(getattr(runner, "model_config", None), "quantization", None),
    }


def prepare_stage(runner: Any) -> None:
    """Give a later pipeline stage the buffer for what it receives, where vLLM has made none.

    vLLM makes it in its profiling pass, which it leaves out on a CPU in eager mode; the first forward then fails.
    """
    from vllm.distributed import parallel_state

    if parallel_state.get_pp_group().is_first_rank or getattr(runner, "intermediate_tensors", 0) is not None:
        return
    runner.intermediate_tensors = model_of(runner).make_empty_intermediate_tensors(
        batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
    )


def record_schedule(runner: Any, adapter: VllmAdapter) -> Callable[[], None]:
    """Let the adapter know which requests each ``execute_model`` serves, and of every weight load; return the undo."""
    undo = [wrap_method(runner, "execute_model", functools.partial(_announcing, adapter))]
    for owner, name in ((model_of(runner), "load_weights"), (runner, "reload_weights")):
        if hasattr(owner, name):
            undo.append(wrap_method(owner, name, functools.partial(_marking, adapter)))

    def restore() -> None:
        for step in undo:
            step()

    return restore


def _announcing(adapter: VllmAdapter, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        started = {r.req_id: int(r.num_computed_tokens) for r in scheduler_output.scheduled_new_reqs}
        adapter.begin_pass(dict(scheduler_output.num_scheduled_tokens), started)
        try:
            return original(scheduler_output, *args, **kwargs)
        finally:
            adapter.end_pass()

    return execute_model


def _marking(adapter: VllmAdapter, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load(*args: Any, **kwargs: Any) -> Any:
        adapter.weights_changed = True
        return original(*args, **kwargs)

    return load
