"""Scripts without a trainer that probe knows: the outermost call of a Hugging Face or Megatron model is recorded.

The classes' ``__call__`` is patched, so that a model that is made at any time is met; what a model calls inside itself
is left alone. So are models that another patch records (verl's workers, vLLM), and scripts with a ``PrecisionDebugger``
of their own.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from probe.hooks import debugger
from probe.hooks.jobs.log import note, trouble
from probe.hooks.jobs.recorder import Recorder
from probe.hooks.jobs.session import session
from probe.hooks.jobs.trail import Trail
from probe.hooks.wrappers import recomputing, unwrap
from probe.settings import STAGES

ROLLOUT, ACTOR, REFERENCE = STAGES[:3]
ENGINES_OWN = ("vllm", "sglang")
"""Attention implementations of models that an inference engine runs, which has a patch of its own."""


class _Here(threading.local):
    """What this thread is in: a model's call, and a ``generate`` with its recorder."""

    inside = False
    generation: _Generation | None = None


class _Generation:
    """One call of ``generate``: the recorder that its first forward begins, and what the forwards showed."""

    def __init__(self, stops: frozenset[int]) -> None:
        self.recorder: Recorder | None = None
        self.stops = stops
        self.trail = Trail()
        self.order: list[int] = []
        self.known = False


_here = _Here()


# -- patches -----------------------------------------------------------------------------------------------------------


def patch_transformers(module: ModuleType) -> None:
    """Patch ``transformers.modeling_utils``: calls of every model."""
    _patch_call(module.PreTrainedModel)
    _prepare()


def patch_peft(module: ModuleType) -> None:
    """Patch PEFT's model, which runs the adapted model's ``forward`` past its class's ``__call__``."""
    _patch_call(module.PeftModel)
    _prepare()


def patch_megatron(module: ModuleType) -> None:
    """Patch Megatron's language module: calls of every model, or of a pipeline stage of one."""
    _patch_call(module.LanguageModule)
    _prepare()


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
        if not _keep_job_safe(_plain, self, kwargs):
            return _alone(original, self, *args, **kwargs)
        current = _here.generation = _Generation(_keep_job_safe(_stops, self, kwargs) or frozenset())
        try:
            output = original(self, *args, **kwargs)
            _keep_job_safe(_end_generation, self, current, output)
            return output
        finally:
            _here.generation = None
            if current.recorder is not None:
                current.recorder.stop_at(())
                current.recorder.end()

    generate.probe_patched = True  # type: ignore[attr-defined]
    owner.generate = generate


def _prepare() -> None:
    """Do once what every model's recording needs: count optimizer steps, make way for a script's own debugger."""
    if _stand_aside in debugger.on_created:
        return
    debugger.on_created.append(_stand_aside)
    register_optimizer_step_post_hook(_Steps().stepped)


class _Steps:
    """Counts optimizer steps: the step of jobs whose trainer does not say it."""

    def __init__(self) -> None:
        self._taken: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._furthest = 0

    def stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Note a step; of several optimizers that each step once, the first one counts."""
        taken = self._taken[optimizer] = self._taken.get(optimizer, 0) + 1
        if taken > self._furthest:
            self._furthest = taken
            _keep_job_safe(lambda: session().clock.count())


def _patch_call(owner: Any) -> None:
    original = owner.__call__
    if getattr(original, "probe_patched", False):
        return

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(self, *args, **kwargs)
        if _here.inside or torch.jit.is_tracing() or recomputing():
            return original(self, *args, **kwargs)
        return _alone(_recorded, functools.partial(original, self), self, args, kwargs)

    call.probe_patched = True  # type: ignore[attr-defined]
    owner.__call__ = call


# -- a call ------------------------------------------------------------------------------------------------------------


def _recorded(original: Callable[..., Any], model: Any, args: Any, kwargs: Any) -> Any:
    """Run a model's call, recorded where its step and stage are."""
    recorder = _keep_job_safe(_begin, model)
    if recorder is None:
        return original(*args, **kwargs)
    rows = recorder.rows_before(getattr(model, "_orig_mod", model), args, kwargs)
    try:
        output = original(*args, **kwargs)
        _keep_job_safe(_note_tokens, recorder, rows, output)
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
    if not _records(model):
        return None
    inner = unwrap(getattr(model, "_orig_mod", model))
    running = _here.generation
    if running is not None and running.recorder is not None:
        return running.recorder
    here = session()
    recorder = here.recorder(_stage(inner), _outer(model), plain=True)
    if not recorder.begin():
        return None
    if running is not None:
        running.recorder = recorder
        recorder.stop_at(running.stops)
    return recorder


def _stage(model: Any) -> str:
    """Return the stage of a call: as the environment says, else what the call is part of."""
    if session().settings.stage:
        return session().settings.stage
    if _here.generation is not None:
        return ROLLOUT
    first = session().first_plain(ACTOR)
    if first is None or first is model or torch.is_grad_enabled():
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
    if next((p.device.type for p in inner.parameters()), "meta") == "meta":
        return False
    head = getattr(inner, "get_output_embeddings", None)
    if head is not None and head() is None:
        note(f"{type(inner).__name__} has no output embeddings, so it is not recorded")
        return False
    return True


def _note_tokens(recorder: Recorder, before: Any, output: Any) -> None:
    """Take on the ids and log-probs of a forward that has ended."""
    rows = before if before is not None else recorder.rows_after()
    if rows is None:
        return
    logits = _logits(recorder, output)
    running = _here.generation
    if running is not None:
        running.trail.add(rows, logits)
        if not running.known:
            running.known = True
            running.order = rows.grid["sequence"].max(axis=1).tolist()
        return
    trail = Trail()
    trail.add(rows, logits)
    for number, trace in trail.traces.items():
        recorder.add_known(number, trace.tokens(), trace.logprobs())


def _logits(recorder: Recorder, output: Any) -> torch.Tensor | None:
    """Return the logits [batch, position, vocabulary] that a model returned, None where it returned none, or a part."""
    found = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", output)
    if isinstance(found, tuple | list):
        found = next((t for t in found if isinstance(t, torch.Tensor) and t.dim() == 3), None)
    if not isinstance(found, torch.Tensor) or type(found).__name__ == "DTensor" or not found.is_floating_point():
        return None
    return found if found.dim() == 3 and found.shape[2] >= recorder.vocab_size > 0 else None


def _end_generation(model: Any, current: _Generation, output: Any) -> None:
    """Store the sequences of a ``generate`` that is over, each up to the token with which it stopped."""
    recorder = current.recorder
    if recorder is None:
        return
    sequences = output if isinstance(output, torch.Tensor) else getattr(output, "sequences", None)
    current.trail.finish(sequences, current.order, current.stops)
    for number, trace in current.trail.traces.items():
        tokens, logprobs = trace.tokens(), trace.logprobs()
        first = recorder.prompt_len(number)
        length = next((n + 1 for n in range(first, len(tokens)) if tokens[n] in current.stops), len(tokens))
        recorder.add_known(number, tokens[:length], logprobs[:length])


def _stops(model: Any, kwargs: dict[str, Any]) -> frozenset[int]:
    """Return the ids with which a ``generate`` ends a sequence."""
    configs = (kwargs.get("generation_config"), getattr(model, "generation_config", None))
    given = [kwargs.get("eos_token_id"), *(getattr(config, "eos_token_id", None) for config in configs)]
    found = next((ids for ids in given if ids is not None), ())
    if isinstance(found, torch.Tensor):
        found = found.reshape(-1).tolist()
    return frozenset(int(number) for number in (found if isinstance(found, list | tuple) else [found]))


def _plain(model: Any, kwargs: dict[str, Any]) -> bool:
    """Tell whether a ``generate`` goes on with the same sequence in each row of its batch."""
    config = kwargs.get("generation_config") or getattr(model, "generation_config", None)
    beams = kwargs.get("num_beams") or getattr(config, "num_beams", 1) or 1
    odd = beams > 1 or any(kwargs.get(name) is not None for name in ("assistant_model", "prompt_lookup_num_tokens"))
    if odd:
        trouble("rollout: a generate with beams or an assistant is not recorded: it swaps the rows of its batch")
    return not odd


# -- standing aside ----------------------------------------------------------------------------------------------------


class _Aside:
    """Whether the script records by itself."""

    stands = False


def _stand_aside() -> None:
    """Leave the recording, and the names of files, to a PrecisionDebugger that the script has made."""
    if not _Aside.stands:
        _Aside.stands = True
        session().discard_plain()
        note("the script has a PrecisionDebugger of its own: only what it records is recorded")


def _keep_job_safe(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of ours; its failure is one line, and None."""
    try:
        return function(*args)
    except Exception as error:
        trouble(f"a call is not recorded ({' '.join(f'{type(error).__name__}: {error}'.split())})")
        return None
