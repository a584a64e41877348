"""Scripts without a trainer that probe knows: the outermost call of a Hugging Face or Megatron model is recorded.

The classes' ``__call__`` is patched, so that a model that is made at any time is met; what a model calls inside itself
is left alone. So are models that another patch records (verl's workers, vLLM), and scripts with a ``PrecisionDebugger``
of their own.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from probe.hooks import debugger
from probe.hooks.engines.transformers import bind_arguments
from probe.hooks.jobs.generation import Generation, is_followed, stops_of
from probe.hooks.jobs.log import note, trouble
from probe.hooks.jobs.optimizers import OptimizerSteps
from probe.hooks.jobs.recorder import Recorder
from probe.hooks.jobs.session import session
from probe.hooks.jobs.shadow import run_prompts
from probe.hooks.wrappers import recomputing, unwrap
from probe.settings import STAGES

ROLLOUT, ACTOR, REFERENCE = STAGES[:3]
ENGINES_OWN = ("vllm", "sglang")
"""Attention implementations of models that an inference engine runs, which has a patch of its own."""
GRAPHS = ("cuda", "npu", "xpu")
"""Modules of torch whose devices capture graphs; nothing may be copied to the host meanwhile."""
KEPT_LOGITS = ("logits_to_keep", "num_logits_to_keep")
"""Arguments that say of which positions a model returns logits."""


class _Here(threading.local):
    """What this thread is in: a model's call, and a ``generate``."""

    inside = False
    generation: Generation | None = None


_here = _Here()
_owners: list[type] = []
"""Classes of language models whose calls are patched."""
_trained: weakref.WeakSet[Any] = weakref.WeakSet()
"""Models that were called with gradients."""
_passed_over: weakref.WeakSet[Any] = weakref.WeakSet()
"""Compiled modules that are no language models."""
_failures: set[tuple[str, str]] = set()
"""Functions of ours that failed, each with the type of its exception."""


# -- patches -----------------------------------------------------------------------------------------------------------


def patch_transformers(module: ModuleType) -> None:
    """Patch ``transformers.modeling_utils``: calls of every model."""
    _patch_models(module.PreTrainedModel)
    _patch_compiling(module.PreTrainedModel)


def patch_peft(module: ModuleType) -> None:
    """Patch PEFT's model, which runs the adapted model's ``forward`` past its class's ``__call__``."""
    _patch_models(module.PeftModel)


def patch_megatron(module: ModuleType) -> None:
    """Patch Megatron's language module: calls of every model, or of a pipeline stage of one."""
    _patch_models(module.LanguageModule)


def patch_compiled(module: ModuleType) -> None:
    """Patch torch's compiled modules, whose calls never reach the class of the model inside."""
    _patch_call(module.OptimizedModule)


def patch_generation(module: ModuleType) -> None:
    """Patch ``transformers.generation.utils``: forwards inside ``generate`` are a rollout."""
    owner = module.GenerationMixin
    original = owner.generate
    if getattr(original, "probe_patched", False):
        return

    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _here.generation is not None or _here.inside or not _keep_job_safe(_records, self):
            return original(self, *args, **kwargs)
        if not _keep_job_safe(is_followed, self, args, kwargs):
            return _alone(original, self, *args, **kwargs)
        current = Generation(unwrap(self), _keep_job_safe(stops_of, self, args, kwargs) or frozenset())
        _here.generation = current
        try:
            output = original(self, *args, **kwargs)
            _keep_job_safe(Generation.store, current, output)
            return output
        finally:
            _here.generation = None
            if current.recorder is not None:
                current.recorder.stop_at(())
                current.recorder.end()

    generate.probe_patched = True  # type: ignore[attr-defined]
    owner.generate = generate


def _patch_models(owner: type) -> None:
    """Patch a class of language models; count optimizer steps, make way for a script's own debugger."""
    _patch_call(owner)
    if owner not in _owners:
        _owners.append(owner)
    if _stand_aside not in debugger.on_created:
        debugger.on_created.append(_stand_aside)
        register_optimizer_step_post_hook(OptimizerSteps(_count_step).stepped)
    if debugger.created:
        _stand_aside()


def _patch_compiling(owner: Any) -> None:
    """Note when a ``generate`` compiles the model for its decode steps: no forward of them is seen."""
    original = getattr(owner, "get_compiled_call", None)
    if original is None or getattr(original, "probe_patched", False):
        return

    @functools.wraps(original)
    def get_compiled_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        compiled = original(self, *args, **kwargs)
        if _here.generation is not None and compiled != self.__call__:
            _here.generation.compiled = True
        return compiled

    get_compiled_call.probe_patched = True  # type: ignore[attr-defined]
    owner.get_compiled_call = get_compiled_call


def _count_step() -> None:
    _keep_job_safe(lambda: session().clock.count())


def _patch_call(owner: Any) -> None:
    own = vars(owner).get("__call__")
    if getattr(own, "probe_patched", False):
        return

    @functools.wraps(owner.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # what a base class has is looked up now: torch.fx and others put theirs in the place of nn.Module's
        original = super(owner, self).__call__ if own is None else functools.partial(own, self)
        if torch.compiler.is_compiling() or _here.inside or _untouchable():
            return original(*args, **kwargs)
        return _alone(_recorded, original, self, args, kwargs)

    call.probe_patched = True  # type: ignore[attr-defined]
    owner.__call__ = call


def _untouchable() -> bool:
    """Tell whether a call must not be touched now: it is traced, a backward repeats it, or a graph is captured."""
    if torch.jit.is_tracing() or recomputing():
        return True
    tracing = sys.modules.get("torch.fx._symbolic_trace")
    if tracing is not None and getattr(tracing, "_is_fx_tracing_flag", False):
        return True
    for name in GRAPHS:
        device = getattr(torch, name, None)
        capturing = getattr(device, "is_current_stream_capturing", None)
        if device is not None and capturing is not None and device.is_initialized() and capturing():
            note("calls that are captured as a graph, and what the graph replays, are not recorded")
            return True
    return False


# -- a call ------------------------------------------------------------------------------------------------------------


def _recorded(original: Callable[..., Any], model: Any, args: Any, kwargs: Any) -> Any:
    """Run a model's call, recorded where its step and stage are."""
    recorder = _keep_job_safe(_begin, model)
    if recorder is None:
        return original(*args, **kwargs)
    try:
        rows = None
        if _here.generation is None:  # whose first forward is of the prompts alone
            rows = _keep_job_safe(run_prompts, recorder, original, model, args, kwargs)
        if rows is None:
            rows = recorder.rows_before(getattr(model, "_orig_mod", model), args, kwargs)
        output = original(*args, **kwargs)
        _keep_job_safe(_note_tokens, recorder, rows, output, _keeps_last(model, args, kwargs))
        return output
    finally:
        if _here.generation is None:
            recorder.end()


def _alone(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function inside of which no call of a model is recorded by itself."""
    _here.inside = True
    try:
        return original(*args, **kwargs)
    finally:
        _here.inside = False


def _begin(model: Any) -> Recorder | None:
    """Begin a pass of a model, None where it is not recorded."""
    running = _here.generation
    if running is not None:
        if unwrap(getattr(model, "_orig_mod", model)) is not running.model:
            note(f"{type(model).__name__} is called inside another model's generate, so it is not recorded there")
            return None
        if running.asked:  # whether it is recorded was settled with its first forward
            return running.recorder if running.recorder is not None and running.recorder.file is not None else None
        running.asked = True
    if not _records(model):
        return None
    inner = unwrap(getattr(model, "_orig_mod", model))
    recorder = session().recorder(_stage(inner), _outer(model), plain=True)
    if running is not None and running.compiled:
        recorder.tokens_only("generate compiles the model's decode steps (cache_implementation, compile_config)")
    if not recorder.begin():
        return None
    if running is not None:
        running.recorder = recorder
        recorder.stop_at(running.stops)
    return recorder


def _stage(model: Any) -> str:
    """Return the stage of a call: as the environment says, else what the call is part of."""
    here = session()
    if here.settings.stage:
        return here.settings.stage
    if _here.generation is not None:
        return ROLLOUT
    first = here.first_plain(ACTOR)
    if model not in _trained and torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters()):
        _trained.add(model)
        if first is not None and first is not model and first not in _trained:
            here.restage_plain(first, ACTOR, REFERENCE)  # it was evaluated before the model that is trained was called
            here.restage_plain(model, REFERENCE, ACTOR)
            return ACTOR
    if first is None or first is model or model in _trained:
        return ACTOR
    return REFERENCE  # a second model that is only evaluated


def _outer(model: Any) -> Any:
    """Return the DDP wrapper that runs the model, which says how batches are spread; else the model."""
    active = getattr(torch.nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
    return active if active is not None and getattr(active, "module", None) is model else model


def _records(model: Any) -> bool:
    """Tell whether a model's calls are this module's to record."""
    inner = unwrap(getattr(model, "_orig_mod", model))
    here = session()
    if _Aside.stands or here.others or here.is_claimed(inner) or getattr(inner, "_is_replica", False):
        return False
    if getattr(getattr(inner, "config", None), "_attn_implementation", None) in ENGINES_OWN:
        return False
    if hasattr(model, "_orig_mod") and not isinstance(inner, tuple(_owners)):
        _say_held(model, inner)
        return False
    devices = {p.device.type for p in _to_look_at(inner)}
    if "meta" in devices:
        note(f"{type(inner).__name__} has parameters on the meta device (offloaded, or not loaded): it is not recorded")
        return False
    head = getattr(inner, "get_output_embeddings", None)
    if head is not None and head() is None:
        note(f"{type(inner).__name__} has no output embeddings, so it is not recorded")
        return False
    return bool(devices)


def _to_look_at(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters whose devices tell where all are: the first, unless something moves them about."""
    found = iter(model.parameters())
    moved = hasattr(model, "_hf_hook") or hasattr(model, "hf_device_map")
    return [*found] if moved else [p for p in (next(found, None),) if p is not None]


def _say_held(compiled: Any, inner: torch.nn.Module) -> None:
    """Say once of a compiled module that language models in it run out of sight; others are nobody's business."""
    if compiled in _passed_over:
        return
    _passed_over.add(compiled)
    held = next((type(m).__name__ for m in inner.modules() if isinstance(m, tuple(_owners))), None)
    if held is not None:
        trouble(f"{held} inside a compiled {type(inner).__name__} is not recorded: compile the model alone, or nothing")


def _keeps_last(model: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Tell whether the logits that a call returns are those of all, or of the last, positions."""
    if not any(isinstance(value, torch.Tensor) for value in (*args[3:], *(kwargs.get(n) for n in KEPT_LOGITS))):
        return True
    named = _keep_job_safe(bind_arguments, model, args, kwargs) or {}
    return not any(isinstance(named.get(name), torch.Tensor) for name in KEPT_LOGITS)


def _note_tokens(recorder: Recorder, before: Any, output: Any, keeps_last: bool) -> None:
    """Take on the ids and log-probs of a forward that has ended."""
    rows = before if before is not None else recorder.rows_after()
    if rows is None:
        return
    logits = _logits(recorder, output) if keeps_last else None
    if _here.generation is not None:
        _here.generation.add(rows, logits)
        return
    named = output if isinstance(output, dict) else getattr(output, "__dict__", {})
    cached = named.get("past_key_values") is not None
    recorder.add_forward(rows, logits, may_go_on=cached and not torch.is_grad_enabled())


def _logits(recorder: Recorder, output: Any) -> torch.Tensor | None:
    """Return the logits [batch, position, vocabulary] that a model returned, None where it returned none, or a part."""
    found = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", output)
    if isinstance(found, tuple | list):
        found = next((t for t in found if isinstance(t, torch.Tensor) and t.dim() == 3), None)
    if not isinstance(found, torch.Tensor) or type(found).__name__ == "DTensor" or not found.is_floating_point():
        return None
    return found if found.dim() == 3 and found.shape[2] >= recorder.vocab_size > 0 else None


# -- standing aside ----------------------------------------------------------------------------------------------------


class _Aside:
    """Whether the script records by itself."""

    stands = False


def _stand_aside() -> None:
    """Leave the recording, and the names of files, to a PrecisionDebugger that the script has made."""
    if not _Aside.stands:
        _Aside.stands = True
        _keep_job_safe(lambda: session().discard_plain())
        note("the script has a PrecisionDebugger of its own: only what it records is recorded")


def _keep_job_safe(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of ours; its failure stops the recorder, is said once for each kind, and the result is None."""
    try:
        return function(*args)
    except Exception as error:
        recorder = args[0].recorder if args and isinstance(args[0], Generation) else args[0] if args else None
        kind = getattr(function, "__name__", ""), type(error).__name__
        if isinstance(recorder, Recorder):
            recorder.stop(error)
        elif kind not in _failures:
            _failures.add(kind)
            trouble(f"a call is not recorded ({' '.join(f'{type(error).__name__}: {error}'.split())})")
        return None
