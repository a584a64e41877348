"""Record SGLang wherever a job runs it: in every scheduler process, around its batches, without a change to the job.

A scheduler (one process per rank) knows its requests in full: prompt, sampled ids and log-probs. So a sequence is
written when the scheduler calls it finished, from that. Rows of the tensors come from the forwards of the model runner
that it drives. Nothing here may break the job: what fails is said once and switches the recording off.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from probe.hooks import debugger
from probe.hooks.engines.sglang_runner import (
    backends_of,
    call_through_hooks,
    samples_here,
    sketches_of,
    why_tokens_only,
)
from probe.hooks.engines.vllm_requests import Piece, digest_of, next_number
from probe.hooks.jobs.log import note, trouble
from probe.hooks.jobs.session import session
from probe.hooks.jobs.steps import STEP_SECONDS
from probe.hooks.taps import wrap_method
from probe.sampling import DISTRIBUTION
from probe.settings import TOKENS

HEALTH_CHECK = "HEALTH_CHECK"
"""How the ids of requests begin with which a server asks itself whether it lives."""
IDLE_SECONDS = 1.0
"""After how long without a request the file is completed: SGLang ends its schedulers with SIGKILL, unannounced."""
UPDATES = tuple(f"update_weights_from_{source}" for source in ("disk", "distributed", "tensor", "ipc"))
WHOLE_VOCABULARY = 1 << 30
"""SGLang's ``top_k`` where there is none (``TOP_K_ALL``); vLLM's is -1, and so is a manifest's."""
ALTERED = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "min_new_tokens": 0,
    "logit_bias": None,
}
"""Parameters of a request with which SGLang changes its logits before it takes their log-probs -> where it does not."""
MODES = {False: "temperature_logprobs", True: "raw_logprobs"}
"""SGLang's log-probs are of the logits over the temperature, before top-p; SGLANG_RETURN_ORIGINAL_LOGPROB: raw."""
CACHED = (
    "SGLang's radix cache is on: rows of a prompt that it finds there never run and are not recorded; set "
    "disable_radix_cache=True (verl: +actor_rollout_ref.rollout.engine_kwargs.sglang.disable_radix_cache=True)"
)
NO_PARAMETERS = (
    "PROBE_WEIGHTS=layers stores no parameters of a job's SGLang, only sketches: give 'probe compare' the checkpoint "
    "with --weights"
)


def patch_scheduler(module: ModuleType) -> None:
    """Watch every scheduler that ``sglang.srt.managers.scheduler`` makes in this process."""
    scheduler: Any = module.Scheduler
    if getattr(scheduler, "probe_watches", False):
        return
    scheduler.probe_watches = True
    for name, method in {name: _around(getattr(scheduler, name), *calls) for name, calls in WATCHED.items()}.items():
        setattr(scheduler, name, method)


WATCHED = {
    "run_batch": ("before", "after"),
    "process_batch_result": ("", "processed"),
    "on_idle": ("", "idle"),
    "release_memory_occupation": ("pause", ""),
}
"""Method of a scheduler -> the methods of its recording that are called before and after it."""


def _around(original: Callable[..., Any], before: str, after: str) -> Callable[..., Any]:
    """Return a method of the scheduler that calls methods of its recording first and last, with the batch if any."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        recording = _recording_of(self)
        if before:
            recording.safely(before, *args, **kwargs)
        try:
            return original(self, *args, **kwargs)
        finally:
            if after:
                recording.safely(after, *args, **kwargs)

    return method


def _recording_of(scheduler: Any) -> SchedulerRecording:
    found = vars(scheduler).get("probe_recording")
    if found is None:
        found = scheduler.probe_recording = SchedulerRecording()
        found.safely("watch", scheduler)
    return found


@dataclass
class _Request:
    """A request that has not ended, what it runs now, and how many of its tokens were sampled before it was met."""

    req: Any
    piece: Piece
    older: int = 0


class SchedulerRecording:
    """The recording of one scheduler: the weights of its model, its requests, its passes."""

    def __init__(self) -> None:
        self.scheduler: Any = None
        self.runner: Any = None
        self.recorder: Any = None
        self.recording, self.version = False, 0
        self._off = self._updated = self._served = self._samples = False
        self._step: int | None = None
        self._refused: int | None = None
        self._asked = self._worked = 0.0
        self._open: dict[str, _Request] = {}
        self._sampling: dict[str, Any] = {}
        self._asked_for: Counter[int] = Counter()
        _recordings.add(self)

    def safely(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Call one of this class's methods; what it raises ends the recording, not the job."""
        if self._off:
            return
        try:
            getattr(self, name)(*args, **kwargs)
        except Exception as error:
            self._off = True
            trouble(f"SGLang is no longer recorded in this process: {type(error).__name__}: {error}")
            with contextlib.suppress(Exception):
                self.recorder.end()

    def watch(self, scheduler: Any) -> None:
        """Find out what can be recorded of the scheduler's model, and listen for its weight updates."""
        self.scheduler, self.runner = scheduler, scheduler.tp_worker.model_runner
        settings, model = session().settings, self.runner.model
        if not scheduler.is_generation:
            self._off = True
            note("SGLang runs an embedding or reward model here, which is not recorded")
            return
        self._samples = samples_here(self.runner)
        self.recorder = session().recorder("rollout", model, runner=self.runner)
        self.recorder.sketches = functools.partial(sketches_of, self.runner)
        if settings.task != TOKENS:
            reason = why_tokens_only(self.runner)
            if reason:
                self.recorder.tokens_only(reason)
            else:
                call_through_hooks(model)
            for advice, applies in (
                (CACHED, not self.runner.server_args.disable_radix_cache),
                (NO_PARAMETERS, settings.weights == "layers"),
            ):
                if applies:
                    note(advice)
        for name in UPDATES:
            wrap_method(self.runner, name, self._updating)
        atexit.register(self.safely, "close")
        if _stand_aside not in debugger.on_created:
            debugger.on_created.append(_stand_aside)
        if debugger.created:
            self.stand_aside()

    # -- weights ------------------------------------------------------------------------------------------------------

    def _updating(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def update(*args: Any, **kwargs: Any) -> Any:
            self.safely("weights_written")
            return original(*args, **kwargs)

        return update

    def weights_written(self) -> None:
        """Note that weights arrive; however many calls there are between two passes, they are one update."""
        if not self._updated:
            self.pause()
        self._updated = True

    def pause(self, *_: Any) -> None:
        """Complete the file while no request runs."""
        if self.recorder is not None and not self._open:
            self._close_file()

    def _count_update(self, batch: Any) -> None:
        """Count a weight update; those before the first pass are how the engine got its first weights."""
        updated, self._updated = self._updated, False
        if updated and self._served:
            self.version += 1
            lengths = dict(zip((req.rid for req in batch.reqs), batch.seq_lens_cpu.tolist()))
            for name, request in self._open.items():
                known, piece = tuple(_ids(request.req)), request.piece
                if len(known) > piece.prompt_len or not piece.number:
                    self._write(request)
                length = max(len(known), lengths.get(name, 0))  # the batch may hold a token that is not known here yet
                prompt, number = known if length == len(known) else (), piece.number + 1
                request.piece = Piece(f"{name}#{number}", number, self.version, length, piece.sample, prompt)
            self._close_file()  # what newer weights run goes into a file of its own, beside their sketches
        self._served = True

    # -- passes -------------------------------------------------------------------------------------------------------

    def before(self, batch: Any, *_: Any, **__: Any) -> None:
        """Begin to record a batch, unless it serves no request of a user's."""
        mine = [req for req in batch.reqs if _is_recorded(req)]
        if not mine or batch.forward_mode.is_idle() or batch.forward_mode.is_prebuilt():
            return
        self._worked = time.monotonic()
        self._count_update(batch)
        self._begin(batch.forward_mode.is_extend(), mine)
        if not self.recording:
            return
        for req in mine:
            if req.rid not in self._open and not req.finished():
                prompt = tuple(req.origin_input_ids)
                sample = next_number(self._asked_for, digest_of(prompt))
                piece = Piece(req.rid, 0, self.version, len(prompt), sample, prompt)
                self._open[req.rid] = _Request(req, piece, len(_ids(req)))
        adapter = self.recorder.adapter
        if adapter is not None:
            adapter.begin_pass({req.rid: self._open[req.rid].piece for req in mine if req.rid in self._open})

    def _begin(self, asks: bool, reqs: list[Any]) -> None:
        """Begin to record, or end where the trainer has gone on to a step that is not recorded."""
        now = time.monotonic()
        if asks or self._step is None or now - self._asked > STEP_SECONDS:
            self._asked, step = now, session().step
            if step != self._step:
                self._write_open()
                self._close_file()
                self._asked_for.clear()
            self._step = step
        if self.recording or self._refused == self._step:
            return
        if self.recorder.file is None:
            self._describe(reqs)
        self.recording = bool(self.recorder.begin())
        if not self.recording:
            self._refused = self._step
            self._open.clear()

    def _describe(self, reqs: list[Any]) -> None:
        """Say in the manifest how tokens are drawn and which kernels run, before the step's file is made."""
        from sglang.srt.layers.sampler import SGLANG_RETURN_ORIGINAL_LOGPROB

        self._sampling = _sampling_of(reqs[0])
        mode = MODES[bool(SGLANG_RETURN_ORIGINAL_LOGPROB)]
        self.recorder.update_manifest(
            logprobs_mode=mode, backends=backends_of(self.runner), sampling=dict(self._sampling)
        )

    def after(self, *_: Any, **__: Any) -> None:
        """Note that the batch's forward is over."""
        if self.recording and self.recorder.adapter is not None:
            self.recorder.adapter.end_pass()

    def processed(self, batch: Any, *_: Any, **__: Any) -> None:
        """Write the requests that a batch's results have finished, and rest when none is left."""
        if not self.recording:
            return
        for req in batch.reqs:
            if req.rid in self._open and req.finished():
                self._write(self._open.pop(req.rid))
        if not self._open:
            self.recording = False
            self.recorder.end()

    def idle(self, *_: Any) -> None:
        """Complete the file once no request has come for a while, with those that were aborted while they waited."""
        if self.recorder.file is None or time.monotonic() - self._worked <= IDLE_SECONDS:
            return
        if self.scheduler.is_fully_idle():  # no request waits either, as those do that a trainer has taken back
            self._write_open()
            self._open.clear()
            self._close_file()

    # -- sequences ----------------------------------------------------------------------------------------------------

    def _write(self, request: _Request) -> None:
        req, piece = request.req, request.piece
        if any(_sampling_of(req)[name] != self._sampling[name] for name in DISTRIBUTION):
            note("SGLang's requests of a step differ in temperature or top_p: the manifest names those of the first")
        odd = [name for name, plain in ALTERED.items() if (getattr(req.sampling_params, name) or plain) != plain]
        if odd:
            note(f"SGLang's log-probs have {', '.join(odd)} of their requests in them, which no trainer's have")
        if not self._samples:
            return
        tokens, given = _ids(req), req.output_token_logprobs_val or []
        logprobs = np.full(len(tokens), np.nan)
        first = len(req.origin_input_ids)
        logprobs[first : first + len(given)] = given[: len(tokens) - first]
        logprobs[: max(piece.prompt_len, request.older)] = np.nan  # older ones may be of other weights
        self.recorder.add_tokens(
            piece.uid,
            tokens,
            piece.prompt_len,
            logprobs,
            sample=piece.sample,
            request_id=piece.uid,
            trajectory=req.rid,
            weight_version=piece.version,
        )

    def _write_open(self) -> None:
        for request in self._open.values() if self.recording else ():
            self._write(request)

    def _close_file(self) -> None:
        self.recording = False
        self.recorder.close()

    def stand_aside(self) -> None:
        """Record nothing more, and take back the open file: the script records this engine by itself."""
        note("the script has a PrecisionDebugger of its own: what SGLang runs in this process is left to it")
        if self.recorder is not None:
            self.recorder.discard()
        self._off = True

    def close(self) -> None:
        """Write what is unfinished and complete the file: the process ends."""
        if self.recorder is not None:
            self._write_open()
            self._close_file()
        self._off = True


def _ids(req: Any) -> list[int]:
    """Return the ids of a request: its prompt and what was sampled up to its stop."""
    sampled = req.output_ids if req.finished_len is None else req.output_ids[: req.finished_len]
    return [*req.origin_input_ids, *sampled]


def _is_recorded(req: Any) -> bool:
    """Tell whether a request is a user's that generates, of text alone: else its ids are those of placeholders.

    One that SGLang refuses still runs, on the id 0 alone. With ``n`` above 1 it first has each prompt run for nothing
    but its cache, which is no sample.
    """
    if req.multimodal_inputs is not None or req.input_embeds is not None:
        note("SGLang: requests with images, audio or embeddings are not recorded")
        return False
    refused = req.to_finish is not None and not req.output_ids
    return not (refused or req.rid.startswith(HEALTH_CHECK) or req.sampling_params.max_new_tokens == 0)


def _sampling_of(req: Any) -> dict[str, Any]:
    """Return the distribution tokens are drawn from; SGLang turns temperature 0 into 1 with the one best token."""
    found = {name: getattr(req.sampling_params, name) for name in DISTRIBUTION}
    if found["top_k"] == 1:
        found["temperature"] = 0.0
    return {**found, "top_k": -1} if found["top_k"] >= WHOLE_VOCABULARY else found


_recordings: weakref.WeakSet[SchedulerRecording] = weakref.WeakSet()


def _stand_aside() -> None:
    for recording in [*_recordings]:
        recording.stand_aside()
