"""Which step of training this process is at: what the trainer said (in the dump's folder), else what was counted."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from probe.hooks.jobs.run import is_earlier, run_id

STEP_FILE = "step"
STEP_SECONDS = 1.0
"""How long an engine's passes may go without asking for the step: a file is read for it. New requests always ask."""


class StepClock:
    """The step of a job.

    Whoever runs the training loop says it (:meth:`advance_to`) and leaves it in ``FOLDER/step`` for every other
    process. Where nobody does, the optimizer steps that this process counted (:meth:`count`) are the step.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / STEP_FILE
        self._said: int | None = None
        self._counted = 0

    @property
    def step(self) -> int:
        """Return the step now."""
        said = self.said
        return self._counted if said is None else said

    @property
    def said(self) -> int | None:
        """Return what this run's trainer said, None where none did; the file is read anew, for it may have gone on."""
        if self._said is not None:
            return self._said
        try:
            step, _, run = self.path.read_text().partition(" ")
            return None if run.strip() != run_id() and is_earlier(self.path) else int(step)
        except (OSError, ValueError):
            return None

    def advance_to(self, step: int) -> None:
        """Say which step begins, for this process and those that share the folder."""
        if step == self._said:
            return
        self._said = step
        temporary = self.path.with_name(f".{STEP_FILE}.{os.getpid()}-{os.urandom(6).hex()}")
        with contextlib.suppress(OSError):  # others then count for themselves
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(f"{step} {run_id()}\n")
            os.replace(temporary, self.path)

    def count(self) -> None:
        """Note that an optimizer of this process has stepped."""
        self._counted += 1
