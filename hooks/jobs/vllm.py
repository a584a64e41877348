"""Record vLLM wherever a job runs it: in every worker process, around the model runner, without a change to the job.

The runner is found when its worker has made it, whatever the platform (CPU, GPU, NPU) and whoever started the worker:
an in-process ``LLM``, EngineCore's own process, one worker per rank, Ray, verl's servers. Its passes are bracketed as
one recording for as long as requests run. Sequences are written when they end, with the ids and log-probs that the
worker itself sampled. Nothing here may break the job: what fails is said once and switches the recording off.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch

from probe.hooks import debugger
from probe.hooks.engines.vllm_model_runner import backends_of, model_of
from probe.hooks.engines.vllm_requests import Ended, RequestLedger, places_of
from probe.hooks.engines.vllm_weights import loaded_sketches, mark_outdated, sketch_before_repacking
from probe.hooks.jobs.log import note, trouble
from probe.hooks.jobs.session import session
from probe.hooks.jobs.steps import STEP_SECONDS
from probe.hooks.jobs.vllm_settings import samples_here, sampling_of, what_is_left_out, why_tokens_only
from probe.hooks.taps import wrap_method
from probe.sampling import DISTRIBUTION
from probe.settings import TOKENS
from probe.store.schema import WeightSketch

WARM_UP = ("_warmup", "_v2_")
"""How the ids of requests begin that vLLM sends through its runner to warm up kernels."""
RAW = "raw_logprobs"


def patch_worker(module: ModuleType) -> None:
    """Watch the model runner of every worker that ``vllm.v1.worker.worker_base`` makes in this process."""
    wrapper: Any = module.WorkerWrapperBase
    if getattr(wrapper, "probe_watches", False):
        return
    wrapper.probe_watches = True
    init_device, shutdown = wrapper.init_device, wrapper.shutdown

    @functools.wraps(init_device)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = init_device(self, *args, **kwargs)
        runner = getattr(self.worker, "model_runner", None)
        if runner is not None and getattr(self, "probe_recording", None) is None:
            try:
                self.probe_recording = RunnerRecording(runner, self.worker)
            except Exception as error:  # a version of vLLM that is built in another way
                trouble(f"vLLM is not recorded in this process: {_reason(error)}")
        return result

    @functools.wraps(shutdown)
    def closed(self: Any, *args: Any, **kwargs: Any) -> Any:
        recording = vars(self).get("probe_recording")
        if recording is not None:
            recording.close()
        return shutdown(self, *args, **kwargs)

    wrapper.init_device, wrapper.shutdown = watched, closed


class RunnerRecording:
    """The recording of one model runner: its weights, its requests, its passes."""

    def __init__(self, runner: Any, worker: Any) -> None:
        self.runner: Any = weakref.proxy(runner)  # a program that drops its engine gets the memory back
        self.recorder: Any = None
        self.recording = False
        self.version = 0
        self._updated = self._served = self._off = False
        self._step: int | None = None
        self._asked = 0.0
        self._refused: int | None = None
        self._sampling: dict[str, Any] | None = None
        self._places: dict[str, int | None] = {}
        self._arrived: deque[tuple[Any, dict[str, int | None]]] = deque()
        config = runner.vllm_config
        mode = str(getattr(config.model_config, "logprobs_mode", RAW) or RAW)
        self.ledger = RequestLedger(int(config.model_config.max_model_len), raw=mode == RAW)
        self._ahead = bool(getattr(config.scheduler_config, "async_scheduling", False)) and (
            getattr(config, "speculative_config", None) is not None
        )
        self._samples = True
        self._undo: list[Callable[[], None]] = []
        _recordings.add(self)
        sketch_before_repacking(_sketches_wanted)
        updating = functools.partial(self._after, self._weights_written)
        wrapped: tuple[tuple[Any, str, Any], ...] = (
            (runner, "load_model", self._loading),
            (runner, "execute_model", self._executing),
            (runner, "sample_tokens", self._sampling_tokens),
            (runner, "reload_weights", updating),
            (runner, "add_lora", updating),
            (worker, "finish_weight_update", updating),
            (worker, "sleep", functools.partial(self._after, self._pause)),
        )
        for owner, name, wrapper in wrapped:
            if hasattr(owner, name):
                self._undo.append(wrap_method(owner, name, wrapper))
        atexit.register(_close, weakref.ref(self))
        if _stand_aside not in debugger.on_created:
            debugger.on_created.append(_stand_aside)
        if debugger.created:
            self.stand_aside()

    # -- what is wrapped ----------------------------------------------------------------------------------------------

    def _loading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def load_model(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._safely(self._loaded)
            return result

        return load_model

    def _after(self, first: Callable[[], None], original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that calls ``first``, whatever comes of it, before the original."""

        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            self._safely(first)
            return original(*args, **kwargs)

        return method

    def _executing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self._safely(self._before, scheduler_output)
            try:
                result = original(scheduler_output, *args, **kwargs)
            finally:
                self._safely(self._forward_over)
            self._safely(self._received, result)
            return result

        return execute_model

    def _sampling_tokens(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def sample_tokens(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._safely(self._received, result)
            return result

        return sample_tokens

    def _safely(self, function: Callable[..., Any], *args: Any) -> None:
        """Call one of this class's methods; what it raises ends the recording, not the job."""
        if self._off:
            return
        try:
            function(*args)
        except Exception as error:
            self._off = True
            trouble(f"vLLM is no longer recorded in this process: {_reason(error)}")
            with contextlib.suppress(Exception):
                self.recorder.end()

    # -- the model and its weights ------------------------------------------------------------------------------------

    def _loaded(self) -> None:
        model = model_of(self.runner)
        self._samples = samples_here()
        self.recorder = session().recorder("rollout", model, runner=self.runner)
        self.recorder.sketches = functools.partial(_sketches_of, weakref.ref(model))
        if session().settings.task != TOKENS:
            reason = why_tokens_only(self.runner)
            if reason:
                self.recorder.tokens_only(reason)
            for advice in what_is_left_out(self.runner, session().settings):
                note(advice)
        if hasattr(model, "load_weights"):
            updating = functools.partial(self._after, self._weights_written)
            self._undo.append(wrap_method(model, "load_weights", updating))

    def wants_sketches(self) -> bool:
        """Tell whether the weights that arrive now may be recorded."""
        return not self._off and (self.recorder is None or self.recorder.records_later())

    def _weights_written(self) -> None:
        """Note that weights arrive; however many loads there are between two passes, they are one update."""
        if not self._updated:
            self._pause()
        self._updated = True
        if self.recorder is not None:
            mark_outdated(model_of(self.runner))

    def _pause(self) -> None:
        """Complete the file while no request runs: the rollout is over, and a trainer may end this process unasked."""
        if self.recorder is not None:
            self._take_arrived()
            if not self.ledger.busy:
                self._close_file()

    # -- passes -------------------------------------------------------------------------------------------------------

    def _before(self, output: Any) -> None:
        if self.recorder is None or any(new.req_id.startswith(WARM_UP) for new in output.scheduled_new_reqs):
            return
        self._take_arrived()
        ended = list(self.ledger.finish(output.finished_req_ids))
        if self.recording:
            self._write(ended)
            if self.recorder.adapter is not None:
                self.recorder.adapter.forget(output.finished_req_ids)
        if not output.num_scheduled_tokens:
            self._rest()
            return
        self._count_update(output)
        self._begin(output)
        if not self.recording:
            return
        self._check_sampling(output)
        pieces, ended = self.ledger.schedule(output, self.version, getattr(self.runner, "requests", {}))
        self._write(ended)
        self._places = places_of(output, ahead=self._ahead)
        adapter = self.recorder.adapter
        if adapter is not None:
            started = {new.req_id: int(new.num_computed_tokens) for new in output.scheduled_new_reqs}
            adapter.begin_pass(dict(output.num_scheduled_tokens), started, pieces)

    def _count_update(self, output: Any) -> None:
        """Count a weight update; those before the first pass are how the engine got its first weights."""
        updated, self._updated = self._updated, False
        if updated and self._served:
            self.version += 1
            places = places_of(output, ahead=self._ahead)
            self._write(self.ledger.renew(self.version, places, getattr(self.runner, "requests", {})))
            self._close_file()  # what newer weights run goes into a file of its own, beside their sketches
        self._served = True

    def _begin(self, output: Any) -> None:
        """Begin to record, or end where the trainer has gone on to a step that is not recorded."""
        now = time.monotonic()
        if output.scheduled_new_reqs or self._step is None or now - self._asked > STEP_SECONDS:
            self._asked = now
            step = session().step
            if step != self._step:
                self._write(self.ledger.unfinished() if self.recording else ())
                self._close_file()
                self.ledger.number_samples()
            self._step = step
        if self.recording or self._refused == self._step:
            return
        if self.recorder.file is None:
            self._describe(output)
        self.recording = bool(self.recorder.begin())
        if not self.recording:
            self._refused = self._step
            self.ledger.forget()

    def _describe(self, output: Any) -> None:
        """Say in the manifest how tokens are drawn and which kernels run, before the step's file is made."""
        drawn = [p for new in output.scheduled_new_reqs if (p := sampling_of(new.sampling_params)) is not None]
        self._sampling = drawn[0] if drawn else self._sampling
        mode = str(getattr(self.runner.model_config, "logprobs_mode", RAW) or RAW)
        about = {"logprobs_mode": mode, "backends": backends_of(self.runner)}
        self.recorder.update_manifest(**about, **({"sampling": self._sampling} if self._sampling else {}))

    def _check_sampling(self, output: Any) -> None:
        for new in output.scheduled_new_reqs:
            drawn, named = sampling_of(new.sampling_params) or {}, self._sampling or {}
            if any(drawn.get(name) != named.get(name) for name in DISTRIBUTION):
                note("vLLM's requests of a step differ in temperature or top_p: the manifest names those of the first")

    def _forward_over(self) -> None:
        if self.recording and self.recorder.adapter is not None:
            self.recorder.adapter.end_pass()

    def _rest(self) -> None:
        """Put on disk what was recorded, once no request runs."""
        if self.recording and not self.ledger.busy and not self._arrived:
            self._end()

    def _end(self) -> None:
        self.recording = False
        self.recorder.end()

    def _close_file(self) -> None:
        self.recording = False
        self.recorder.close()

    # -- results ------------------------------------------------------------------------------------------------------

    def _received(self, result: Any) -> None:
        """Take note of what a pass returns; what has yet to arrive from the device is noted where vLLM waits for it."""
        if not self.recording or result is None:
            return
        if hasattr(result, "get_output"):
            wrap_method(result, "get_output", functools.partial(_noting, self._arrived, self._places))
        elif getattr(result, "req_ids", None):
            self._arrived.append((result, self._places))
            self._take_arrived()
            self._rest()

    def _take_arrived(self) -> None:
        while self._arrived:
            output, places = self._arrived.popleft()
            if self.recording:
                self._write(self.ledger.sampled(output, places))

    def _write(self, ended: Iterable[Ended]) -> None:
        for sequence in ended:
            if not self._samples:
                continue
            self.recorder.add_tokens(
                sequence.piece.uid,
                sequence.tokens,
                sequence.prompt_len,
                sequence.logprobs,
                sample=sequence.piece.sample,
                request_id=sequence.piece.uid,
                trajectory=sequence.request,
                weight_version=sequence.piece.version,
            )

    def stand_aside(self) -> None:
        """Record nothing more, and take back the open file: the script records this engine by itself."""
        self._safely(self._discard)
        self._off = True

    def _discard(self) -> None:
        self.recording = False
        note("the script has a PrecisionDebugger of its own: what vLLM runs in this process is left to it")
        if self.recorder is not None:
            self.recorder.discard()

    def close(self) -> None:
        """Write what is unfinished and complete the file: the worker shuts down."""
        self._safely(self._close)
        self._off = True
        while self._undo:
            self._undo.pop()()

    def _close(self) -> None:
        if self.recorder is None:
            return
        self._take_arrived()
        if self.recording:
            self._write(self.ledger.unfinished())
        self._close_file()


_recordings: weakref.WeakSet[RunnerRecording] = weakref.WeakSet()


def _stand_aside() -> None:
    for recording in [*_recordings]:
        recording.stand_aside()


def _sketches_wanted() -> bool:
    return any(recording.wants_sketches() for recording in _recordings)


def _sketches_of(model: weakref.ref[torch.nn.Module]) -> Iterable[WeightSketch]:
    found = model()
    return loaded_sketches(found) if found is not None else ()


def _close(recording: weakref.ref[RunnerRecording]) -> None:
    """Complete a recording whose engine nobody has shut down when the program ends."""
    found = recording()
    if found is not None:
        found.close()


def _noting(
    arrived: deque[tuple[Any, dict[str, int | None]]], places: dict[str, int | None], original: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a future's method that notes what it returns: in a thread of its own, so that the runner's must write."""

    @functools.wraps(original)
    def get_output(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        arrived.append((output, places))
        return output

    return get_output


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
