"""Show the progress of a run on standard error: a bar on a terminal, a few plain lines elsewhere, nothing with -q."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from probe.cli import common

Observer = Callable[[str, int, int], None]

LINE_SECONDS = 15.0
"""Least time between two plain lines about one activity."""


@contextlib.contextmanager
def observing() -> Iterator[Observer]:
    """Yield an observer(what, done, total) that shows what it hears while the block runs.

    A ``total`` of 1 means that there is nothing to count: only the activity and its time are shown.
    """
    if common.State.verbosity <= common.QUIET:
        yield lambda what, done, total: None
    elif common.stderr().is_terminal:
        with _bar() as observer:
            yield observer
    else:
        yield _Lines()


@contextlib.contextmanager
def _bar() -> Iterator[Observer]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=common.stderr(), transient=True) as progress:
        tasks: dict[str, object] = {}

        def observer(what: str, done: int, total: int) -> None:
            if what not in tasks:
                for task in progress.task_ids:
                    progress.remove_task(task)
                tasks.clear()
                tasks[what] = progress.add_task(what, total=None)
            progress.update(progress.task_ids[-1], completed=done, total=total if total > 1 else None)

        yield observer


class _Lines:
    """Print a line when an activity starts, when it ends and every few seconds between."""

    def __init__(self) -> None:
        self.what, self.last = "", 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        started, ended = what != self.what, total > 1 and done >= total
        if started or ended or now - self.last >= LINE_SECONDS:
            common.note(f"{what} {done}/{total}" if total > 1 else what)
            self.what, self.last = what, now
