"""Record the passes of one model under one stage of a job: a file per step, hooks only while a pass runs.

No trouble of the recording reaches the job: what goes wrong is said once (``activation.log``), and the recorder keeps
to what still works, tokens instead of tensors, or to nothing.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from probe.errors import CaptureError, ProbeError
from probe.hooks.attach import subject_of
from probe.hooks.engines.transformers import bind_arguments
from probe.hooks.jobs.files import StepFile, is_taken, open_step
from probe.hooks.jobs.log import note, trouble
from probe.hooks.jobs.trail import Continued, Trace
from probe.hooks.rows import Announced, CallRows
from probe.hooks.wrappers import refuse_compiled, unwrap
from probe.settings import TOKENS
from probe.store.schema import Versions, WeightSketch

if TYPE_CHECKING:
    from probe.hooks.jobs.session import Session

Method = TypeVar("Method", bound=Callable[..., Any])


def _harmless(method: Method) -> Method:
    """Keep whatever a method raises from the job: it is said, and the recorder stops."""

    @functools.wraps(method)
    def guarded(self: Recorder, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            self._busy += 1
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                self._stop(error)
                return None
            finally:
                self._busy -= 1

    return guarded  # type: ignore[return-value]


class Recorder:
    """What one process records of one model under one stage.

    ``sketches`` is a function that returns the weight sketches of the model as it is now, for engines that repack
    their parameters; by default they are computed from the parameters. ``task`` is one of :data:`probe.settings.TASKS`,
    of which ``tokens`` needs no hooks.
    """

    def __init__(self, session: Session, stage: str, model: Any, *, runner: Any = None) -> None:
        self.session, self.stage, self.runner = session, stage, runner
        self.task = session.settings.task
        self.sketches: Callable[[], Iterable[WeightSketch]] | None = None
        self._models = [weakref.ref(part) for part in (model if isinstance(model, list | tuple) else [model])]
        self._about: dict[str, Any] = {}
        self._file: StepFile | None = None
        self.plain = self._stopped = self._hooked = False
        self._taken: int | None = None  # the step that an earlier run recorded already
        self._busy = 0
        self._lock = threading.RLock()
        self._thread: int | None = None  # whose pass runs
        self._continued = Continued()
        self.turn = 0  # how many other models were recorded under this stage before

    # -- a pass --------------------------------------------------------------------------------------------------------

    def begin(self) -> bool:
        """Begin a pass and tell whether it is recorded: open the step's file on its first pass, hook the modules."""
        return bool(self._begin())

    @_harmless
    def _begin(self) -> bool:
        if self.session.pid != os.getpid():
            return False  # a forked child must not touch its parent's file
        if self._is_elsewhere():
            return False
        step = self.session.step
        if self._file is not None and self._file.step != step:
            self.close()
        if self._stopped or step == self._taken or not self.session.records(self.stage, step):
            return False
        if self._file is None:
            self._open(step)
        file = self._file
        if file is not None and file.capture is not None and not self._hooked:
            file.capture.attach(self.model)
            self._hooked = True
        if file is not None:
            self._thread = threading.get_ident()
            if file.capture is not None:
                file.capture.thread = self._thread
        return file is not None

    def _is_elsewhere(self) -> bool:
        """Tell whether another thread is in the middle of a pass: this one's is then not recorded."""
        if self._thread in (None, threading.get_ident()):
            return False
        if all(thread.ident != self._thread for thread in threading.enumerate()):
            return False  # it has ended without a word
        note(f"{self.stage}: threads call the model at the same time: one pass is recorded, not those beside it")
        return True

    @_harmless
    def announce(self, sequences: Sequence[Announced]) -> None:
        """Say which sequences the rows of the next forwards are, in order; an empty list forgets what was said."""
        if self._file is not None:
            self._file.adapter.announce(list(sequences))

    @_harmless
    def expect(self, sequences: Sequence[tuple[Sequence[int], int]]) -> None:
        """Say all the sequences of a pass, each (ids of prompt and response, prompt length), before its first forward.

        Optional: the budget then chooses among them; else as they come.
        """
        if self._file is not None and self._file.adapter.budget is not None:
            self._file.adapter.budget.selection.expect(list(sequences))

    @_harmless
    def end(self, *, flush: bool = True) -> None:
        """End a pass: take the hooks off and flush. With ``flush=False`` they stay on and nothing is written yet.

        That is for passes that follow one another quickly (decode steps): :meth:`flush` when the last one is over.
        """
        self._thread = None
        if flush:
            self.flush()

    @_harmless
    def flush(self) -> None:
        """Take the hooks off and make what was recorded readable should the process die; the file stays open."""
        file = self._file
        if file is None:
            return
        self._unhook()
        file.adapter.announce([])
        file.writer.flush()

    @_harmless
    def close(self) -> None:
        """Complete the file; what comes later in the same step goes to another one."""
        file = self._file
        if file is None:
            return
        self._unhook()
        self._add_traces(self._continued.finish())
        self._file = None
        file.complete()
        self.session.watch()

    def close_at_once(self, wait: float) -> None:
        """Complete the file in a signal handler, unless the signal came while it was being written.

        Then it stays as it was flushed, which can be read as well. ``wait``: seconds for other threads to be done.
        """
        if not self._lock.acquire(timeout=wait):
            return
        try:
            file = self._file
            if file is not None and not self._busy and not (file.capture is not None and file.capture.busy):
                self.close()
        finally:
            self._lock.release()

    @_harmless
    def discard(self) -> None:
        """Delete the open file, and record nothing more."""
        file = self._file
        self._stopped = True
        if file is not None:
            self._unhook()
            self._file = None
            file.writer.discard()

    @_harmless
    def restage(self, stage: str) -> None:
        """Record under another stage from now on; the open file moves there."""
        self.stage = stage
        file = self._file
        if file is not None:
            file.manifest["stage"] = stage
            file.writer.move(self.session.folder / stage / f"step{file.step}", file.manifest)

    @_harmless
    def stop(self, error: Exception) -> None:
        """Record nothing more, for what a caller of this recorder ran into."""
        raise error

    # -- what the caller knows -----------------------------------------------------------------------------------------

    @property
    def adapter(self) -> Any:
        """Return the adapter of the open file, None where none is open or no tensor is recorded."""
        return self._file.adapter if self._file is not None and self._file.capture is not None else None

    @property
    def file(self) -> Path | None:
        """Return the path that the open file will have, None where none is open."""
        return self._file.writer.path if self._file is not None else None

    @property
    def model(self) -> list[torch.nn.Module]:
        """Return the modules that are recorded; raise CaptureError when the job has dropped them."""
        parts = [part() for part in self._models]
        if any(part is None for part in parts):
            raise CaptureError("the model that was recorded is gone")
        return [part for part in parts if part is not None]

    @property
    def is_orphan(self) -> bool:
        """Tell whether the job has dropped the model."""
        return any(part() is None for part in self._models)

    @property
    def inner(self) -> torch.nn.Module | None:
        """Return the model without its wrappers, None when the job has dropped it."""
        model = self._models[0]()
        return None if model is None else unwrap(model)

    @property
    def vocab_size(self) -> int:
        """Return how many columns of the logits are tokens, 0 where that is not known."""
        return int(self._file.manifest["layout"]["vocab_size"]) if self._file is not None else 0

    def prompt_len(self, number: int) -> int:
        """Return the prompt length of a sequence of the open file."""
        return self._file.adapter.book.sequences[number].prompt_len if self._file is not None else 0

    def serves(self, model: Any) -> bool:
        """Tell whether this is the recorder of ``model`` (and not of one that had the same address)."""
        parts = list(model) if isinstance(model, list | tuple) else [model]
        return [part() for part in self._models] == parts

    def records_later(self) -> bool:
        """Tell whether this or a later step of the stage may still be recorded."""
        return not self._stopped and self.session.records_later(self.stage)

    @_harmless
    def tokens_only(self, reason: str) -> None:
        """Record no tensors of this model (from the next file on), and say why once."""
        if self.task != TOKENS:
            self.task = TOKENS
            trouble(f"{self.stage}: ids, log-probs and weight sketches only, no tensors: {reason}")

    @_harmless
    def update_manifest(self, **more: Any) -> None:
        """Add entries to the manifest of this stage's files; of an entry that is an object the keys are added."""
        for name, value in more.items():
            self._about[name] = {**self._about.get(name, {}), **value} if isinstance(value, dict) else value
        if self._file is not None:
            self._file.manifest.update(self._about)
            self._file.writer.restate(self._file.manifest)

    @_harmless
    def add_tokens(
        self,
        uid: str,
        tokens: Sequence[int] | np.ndarray,
        prompt_len: int,
        logprobs: Sequence[float] | np.ndarray | None = None,
        *,
        sample: int = 0,
        request_id: str = "",
        trajectory: str = "",
        weight_version: int = 0,
        declared: Versions | None = None,
    ) -> None:
        """Store the ids (int [n]) of a whole sequence and the log-prob of each (float [n], NaN where there is none).

        Every sequence has them, whatever the budget says; once per file. ``declared``: what a trainer says of weights.
        """
        file = self._file
        if file is None:
            return
        ids = np.asarray(tokens, np.int64)
        about = Announced(
            uid, prompt_len=prompt_len, sample=sample, trajectory=trajectory, weight_version=weight_version
        )
        book = file.adapter.book
        number = book.number(about, length=len(ids), request_id=request_id, weight_version=weight_version)
        if number in file.listed:
            return
        file.list_sequence(number, ids, returned=logprobs, declared=declared)

    @_harmless
    def stop_at(self, ids: Iterable[int]) -> None:
        """Say with which ids the sequences end that are generated now; none: they are not generated."""
        if self._file is not None and hasattr(self._file.adapter, "stops"):
            self._file.adapter.stops = frozenset(ids)

    @_harmless
    def rows_before(self, model: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> CallRows | None:
        """Return the rows of the forward that is about to run, where no hook will see them (task ``tokens``)."""
        file = self._file
        if file is None or file.capture is not None:
            return None
        inner = unwrap(model)
        if inner is not model:
            args, kwargs = (), bind_arguments(model, args, kwargs)
        return file.adapter.begin_call(inner, args, kwargs)

    @_harmless
    def rows_after(self) -> CallRows | None:
        """Return the rows of the forward that has just run, as the hooks saw them."""
        return self._file.capture.call if self._file is not None and self._file.capture is not None else None

    @_harmless
    def add_known(self, number: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Store the ids of a sequence that the forwards showed, and the log-probs that their logits give.

        Tensor-parallel ranks see the same sequences: the first of each group stores them.
        """
        file = self._file
        if file is None or number in file.listed or not tokens or min(tokens) < 0 or file.adapter.tp_rank:
            return
        file.list_sequence(number, np.asarray(tokens, np.int64), recomputed=logprobs)

    @_harmless
    def add_forward(self, rows: CallRows, logits: torch.Tensor | None, *, may_go_on: bool) -> None:
        """Store what a forward showed (see Trail.add); of sequences that others may go on with, once these are over."""
        self._add_traces(self._continued.add(rows, logits, may_go_on=may_go_on))

    def _add_traces(self, traces: dict[int, Trace]) -> None:
        for number, trace in traces.items():
            self.add_known(number, trace.tokens(), trace.logprobs())
            if 0 not in trace.ids:
                note(
                    f"{self.stage}: a forward goes on with sequences that began elsewhere; their ids are not all stored"
                )

    @_harmless
    def add_rl(self, uid: str, column: str, values: Any, *, prompt_len: int, sample: int = 0) -> None:
        """Store what the trainer knows of each response token: floats [response], the k-th of token prompt_len + k.

        ``column`` is one of :data:`probe.store.schema.RL_COLUMNS` or ``RL_KEPT``.
        """
        file = self._file
        if file is None:
            return
        found = torch.as_tensor(values).detach().to("cpu", torch.float64).numpy()
        file.list_rl(Announced(uid, prompt_len=prompt_len, sample=sample), column, found)

    # -- files ---------------------------------------------------------------------------------------------------------

    def _open(self, step: int) -> None:
        if is_taken(self.session.folder, self.stage, step):
            self._taken = step
            return
        subject = subject_of(self.model if self.runner is None else self.model[0], self.runner)
        if self.task != TOKENS:
            try:
                refuse_compiled(subject.chunks)
            except CaptureError as error:
                self.tokens_only(str(error))
        settings = replace(self.session.settings, task=self.task)
        self._file = open_step(
            self.session.folder, self.stage, step, subject, settings, self._about, self.sketches, self._stop
        )
        if self.turn:
            name = f"m{self.turn}."
            self._file.adapter.sequence_prefix = name + self._file.adapter.sequence_prefix
            kind = type(unwrap(subject.chunks[0])).__name__
            note(f"{self.stage}: several models run as this; the sequences of this {kind} are named {name}s0 and so on")
        self.session.watch()

    def _unhook(self) -> None:
        if self._hooked and self._file is not None and self._file.capture is not None:
            self._hooked = False
            self._file.capture.detach()

    def _stop(self, error: Exception) -> None:
        """Say what went wrong, once, keep what was written so far, and record nothing more."""
        if self._stopped:
            return
        self._stopped = True
        words = str(error) if isinstance(error, ProbeError) else f"{type(error).__name__}: {error}"
        trouble(f"{self.stage}: nothing more is recorded in this process ({' '.join(words.split())})")
        file, self._file = self._file, None
        if file is None:
            return
        try:
            if file.capture is not None:
                file.capture.detach()
        except Exception:  # what waited cannot be stored either
            pass
        file.writer.abandon()
        self.session.watch()
