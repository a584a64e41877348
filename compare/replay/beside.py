"""Run a function in a forked copy of this process, beside what this one does: two cores under one interpreter lock."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from typing import BinaryIO, Generic, TypeVar

T = TypeVar("T")

UNSAFE = ("torch",)
"""Packages whose own threads do not live on in a forked copy, so that it may wait for them for ever."""


def can_fork() -> bool:
    """Tell whether a forked copy would run safely, and on a core of its own: on Linux, without other threads."""
    alone = threading.active_count() == 1 and not any(name in sys.modules for name in UNSAFE)
    return sys.platform == "linux" and alone and len(os.sched_getaffinity(0)) > 1


class Beside(Generic[T]):
    """The result of ``work``, computed in a forked copy from now on, or here when it is asked for.

    ``work`` must not write to files or to the terminal, and its result must pickle.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._child, self._pipe = _fork(work) if can_fork() else (0, None)

    def result(self) -> T:
        """Return what ``work`` returns; raise what it raises."""
        if self._child and self._pipe is not None:
            with self._pipe as pipe:
                content = pipe.read()
            child, self._child = self._child, 0
            if os.waitpid(child, 0)[1] == 0:
                found: T = pickle.loads(content)
                return found
        return self._work()  # what went wrong there is raised here

    def close(self) -> None:
        """Stop a copy whose result nobody asked for."""
        if self._child and self._pipe is not None:
            self._pipe.close()  # closed already where an interrupt broke the reading off
            os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)
            self._child = 0


def _fork(work: Callable[[], T]) -> tuple[int, BinaryIO | None]:
    """Return the process that does the work and the end of the pipe that its result comes out of."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, os.fdopen(reading, "rb")
    status = 1
    try:
        os.close(reading)
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(work(), pipe, pickle.HIGHEST_PROTOCOL)
        status = 0
    finally:  # whatever happens, this copy must not go on as the program: no handlers, no buffers written twice
        os._exit(status)
