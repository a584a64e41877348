"""What one process of a job records: one recorder per stage and model, step by step, within the budget.

A session knows the dump's folder, the settings and the step. Patches (verl, vLLM, plain models) ask it for recorders
and bracket each pass of the model with ``begin`` and ``end``; everything else (files, hooks, budget) is the recorder's.
"""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import signal
import threading
import weakref
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from probe.hooks.debugger import global_rank
from probe.hooks.jobs.recorder import Recorder
from probe.hooks.jobs.run import run_id
from probe.hooks.jobs.steps import StepClock
from probe.hooks.wrappers import unwrap
from probe.settings import TOKENS, Settings, job_settings

SIGNAL_WAIT = 2.0
"""Seconds that a terminated process waits for another thread to be done with a file."""
EXIT_PRIORITY = 100
"""Before whatever else a child of multiprocessing finalizes."""


class Session:
    """The recorders of this process. Use :func:`session`; tests make their own.

    Recorded are the steps that ``settings.step`` names; without any, every step for task ``tokens``, and for ``tensor``
    the first step that the process sees of each stage. A trainer that says 0 does not train yet (it validates): that
    step is recorded only where ``settings.step`` names it, negative ones never.

    ``others`` counts the passes of other patches that run now: what they call is theirs, recorded or not.
    """

    def __init__(self, settings: Settings) -> None:
        run_id()  # the run begins before anything of it is written
        self.settings = settings
        self.folder = Path(settings.dump_path)
        self.clock = StepClock(self.folder)
        self.pid = os.getpid()
        self.others = 0
        self._recorders: dict[tuple[str, int], Recorder] = {}
        self._first: dict[str, int] = {}
        self._plain: dict[str, list[weakref.ref[Any]]] = {}
        self._claimed: weakref.WeakSet[Any] = weakref.WeakSet()
        atexit.register(self.close)  # after h5py's own handler, so that it runs before: exit handlers run backwards
        multiprocessing.util.Finalize(None, self.close, exitpriority=EXIT_PRIORITY)

    @property
    def step(self) -> int:
        """Return the trainer's step: what the driver last said, else what this process counted."""
        return self.clock.step

    def records(self, stage: str, step: int) -> bool:
        """Tell whether a step of a stage is recorded in this process."""
        wanted = self.settings
        if step < 0 or self.pid != os.getpid() or (wanted.rank and global_rank() not in wanted.rank):
            return False
        if wanted.step:
            return step in wanted.step
        if step == 0 and self.clock.said == 0:
            return False
        return wanted.task == TOKENS or self._first.setdefault(stage, step) == step

    def records_later(self, stage: str) -> bool:
        """Tell whether the step of now or a later one may be recorded."""
        if self.settings.step:
            return max(self.settings.step) >= self.step
        return self.settings.task == TOKENS or self._first.get(stage, self.step) >= self.step

    def recorder(self, stage: str, model: Any, *, runner: Any = None, plain: bool = False) -> Recorder:
        """Return the recorder of a model (a module or a list of Megatron chunks) under a stage, made on first use.

        A model for which a trainer's or an engine's patch asks is theirs: calls of it outside their passes are nobody's
        (``plain`` is for the patch that records whatever is called).
        """
        parts = list(model) if isinstance(model, list | tuple) else [model]
        if not plain:
            for part in parts:
                self._claim(part)
        key = (stage, id(parts[0]))
        known = self._recorders.get(key)
        if known is None or not known.serves(model):
            if known is not None:
                known.close()
            self._close_orphans()
            known = self._recorders[key] = Recorder(self, stage, model, runner=runner)
            known.plain = plain
            known.turn = self._turn(stage, unwrap(parts[0])) if plain else 0
        return known

    def _close_orphans(self) -> None:
        """Complete the files of models that the job has dropped: they hold a descriptor each."""
        for key, recorder in [*self._recorders.items()]:
            if recorder.is_orphan:
                recorder.close()
                del self._recorders[key]

    def is_claimed(self, model: Any) -> bool:
        """Tell whether another patch records this model."""
        return model in self._claimed

    def first_plain(self, stage: str) -> Any:
        """Return the first model that was recorded under a stage just because it was called, None before any."""
        mine = (r for (name, _), r in self._recorders.items() if name == stage and r.plain)
        return next((model for recorder in mine if (model := recorder.inner) is not None), None)

    def _turn(self, stage: str, model: Any) -> int:
        """Return how many other models were called under a stage before this one."""
        models = self._plain.setdefault(stage, [])
        here = next((number for number, known in enumerate(models) if known() is model), None)
        if here is None:
            here = len(models)
            models.append(weakref.ref(model))
        return here

    def restage_plain(self, model: Any, stage: str, other: str) -> None:
        """Move what was recorded of a model just because it was called from one stage to another.

        Who is called next under the former stage is the first there; files that are complete stay where they are.
        """
        mine = {key: r for key, r in self._recorders.items() if key[0] == stage and r.plain and r.inner is model}
        for key, recorder in mine.items():
            del self._recorders[key]
            self._recorders[other, key[1]] = recorder
            recorder.restage(other)
            recorder.turn = self._turn(other, model)
        if mine:
            self._plain[stage] = [known for known in self._plain.get(stage, []) if known() is not model]
            if stage in self._first:
                self._first.setdefault(other, self._first[stage])
            if not any(name == stage for name, _ in self._recorders):
                self._first.pop(stage, None)

    def discard_plain(self) -> None:
        """Take back what was recorded just because it was called, as far as its files are still open."""
        for recorder in self._recorders.values():
            if recorder.plain:
                recorder.discard()

    def _claim(self, part: Any) -> None:
        if isinstance(part, torch.nn.Module) and part not in self._claimed:
            self._claimed.add(part)
            self._claimed.add(unwrap(part))

    def close_stage(self, stage: str) -> None:
        """Complete the files of a stage whose pass is known to be over."""
        for (name, _), recorder in [*self._recorders.items()]:
            if name == stage:
                recorder.close()

    def close(self) -> None:
        """Complete every file of this process; a forked child leaves its parent's alone."""
        if self.pid == os.getpid():
            for recorder in [*self._recorders.values()]:
                recorder.close()

    def watch(self) -> None:
        """Mind the process's end as long as any file is open."""
        if self is _session:
            _terminations.watch(any(recorder.file is not None for recorder in [*self._recorders.values()]))

    def close_at_once(self) -> None:
        """Complete what can be completed in a signal handler."""
        for recorder in [*self._recorders.values()] if self.pid == os.getpid() else ():
            recorder.close_at_once(SIGNAL_WAIT)


_session: Session | None = None
_inherited: list[Session] = []
"""Sessions of a parent process, kept so that their files are not touched (garbage collection would close them)."""
_lock = threading.Lock()


def session() -> Session:
    """Return this process's session, with the settings that the environment (or ``PROBE_CONFIG``) gives."""
    global _session
    with _lock:
        if _session is not None and _session.pid != os.getpid():
            _inherited.append(_session)
            _session = None
        if _session is None:
            _session = Session(job_settings())
        return _session


class _Terminations:
    """Completes files when the process is asked to end, where nobody else handles that.

    Only while a file is open: a handler in Python waits for whatever runs in C, which a plain SIGTERM would end.
    """

    def __init__(self) -> None:
        self._handler: Any = None

    def watch(self, opened: bool) -> None:
        """Handle SIGTERM from now on, or no more; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            return
        present = signal.getsignal(signal.SIGTERM)
        if opened and self._handler is None and present == signal.SIG_DFL:
            self._handler = self._terminated
            signal.signal(signal.SIGTERM, self._handler)
        elif not opened and self._handler is not None:
            if present == self._handler:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._handler = None

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        called = signal.getsignal(number) != self._handler
        if _session is not None:
            _session.close_at_once()
        if called:
            return  # by a handler that came later, which says itself what becomes of the process
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


_terminations = _Terminations()
