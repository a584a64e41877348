"""Work in forked copies of this process, beside what this one does: several cores under one interpreter lock.

A copy shares all that is in memory already; what it makes comes back pickled.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import select
import signal
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, Generic, TypeVar

T = TypeVar("T")

UNSAFE = ("torch", "ray")
"""Packages whose own threads do not live on in a forked copy, so that it may wait for them for ever."""

DRAWING = ("_RefreshThread",)
"""Threads that draw a bar of progress (rich): they hold nothing that a copy would wait for, for it draws nothing."""

_TICKET, _MADE = struct.Struct("=I"), struct.Struct("=IQQ")
"""What goes through the pipes: the number of a task; that of a task done, with the place and size of its result."""
_PR_SET_PDEATHSIG = 1
"""Linux's prctl: the signal to get when the parent ends."""


def can_fork() -> bool:
    """Tell whether a forked copy would run safely, and on a core of its own: on Linux, without other threads."""
    others = (thread for thread in threading.enumerate() if type(thread).__name__ not in DRAWING)
    alone = all(thread is threading.main_thread() for thread in others)
    safe = alone and not any(name in sys.modules for name in UNSAFE)
    return sys.platform == "linux" and safe and len(os.sched_getaffinity(0)) > 1


def fork(work: Callable[[], None]) -> int:
    """Run ``work`` in a copy and return its process; its exit status is 0 where ``work`` returned.

    The copy ends with this process, however that ends. Raises OSError where no process is to be had.
    """
    parent, status = os.getpid(), 1
    try:
        child = os.fork()
        if not child:
            _end_with(parent)
            gc.freeze()  # what is here already is never freed: to look at it would copy its memory
            work()
            status = 0
    finally:  # whatever happens, a copy must not go on as the program: no handlers, no buffers written twice
        if os.getpid() != parent:
            os._exit(status)
    return child


def _end_with(parent: int) -> None:
    """Let the kernel end this copy with its parent, even one that is killed and can stop no copy."""
    with contextlib.suppress(Exception):  # where there is no prctl, a copy ends when it finds its reader gone
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:  # it ended before it was asked for
        os._exit(1)


def stop(child: int) -> None:
    """End a copy at once."""
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


class Beside(Generic[T]):
    """The result of ``work``, computed in a forked copy from now on, or here when it is asked for.

    ``work`` must not write to files or to the terminal, and its result must pickle.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._child = 0
        self._pipe: BinaryIO | None = None
        if can_fork():
            with contextlib.suppress(OSError):  # no process or no descriptor is to be had: the work is done here
                self._child, self._pipe = self._start()

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
            stop(self._child)
            self._child = 0

    def _start(self) -> tuple[int, BinaryIO]:
        """Return the process that does the work and the end of the pipe that its result comes out of."""
        reading, writing = os.pipe()

        def work() -> None:
            os.close(reading)
            with os.fdopen(writing, "wb") as pipe:
                pickle.dump(self._work(), pipe, pickle.HIGHEST_PROTOCOL)

        try:
            child = fork(work)
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        return child, os.fdopen(reading, "rb")


@dataclass
class _Copy:
    """A copy at work on tasks: its process, where its results lie, and what it said of them and is not read yet."""

    process: int
    memory: int
    heard: bytes = b""


class Pool(Generic[T]):
    """The results of ``tasks``, made here and in ``copies`` forked ones: whoever is free takes the next task.

    A task that fails in a copy, or is lost with it, is done again here, where what it raises is raised. Results must
    pickle; tasks must not write to files or to the terminal. Where processes or descriptors run out it goes on with
    the copies it has; raises OSError where it could start none.
    """

    def __init__(self, tasks: Sequence[Callable[[], T]], copies: int) -> None:
        self._tasks = tasks
        self._step = 1
        self._made: dict[int, Callable[[], T]] = {}
        self._again: set[int] = set()
        self._at_work: dict[int, _Copy] = {}
        self._speaking = select.poll()  # not select.select, which takes no descriptor above 1023
        self._open: list[int] = []
        try:
            self._tickets = self._write_tickets()
            for _ in range(copies):
                self._start()
        except BaseException as error:
            if not isinstance(error, OSError) or not self._at_work:
                self.close()
                raise

    def result(self, number: int) -> T:
        """Return the result of a task, once, or raise what it raises; until it is there, work on others."""
        while True:
            self._listen(wait=False)
            if number in self._again:
                return self._tasks[number]()
            if number in self._made:
                return self._made.pop(number)()
            taken = self._take()
            for other in taken:
                self._do(other)
            if not taken and not self._listen(wait=True):
                self._again.add(number)  # lost with the copy that took it

    def close(self) -> None:
        """Stop the copies that are still at work."""
        while self._at_work:
            said, copy = self._at_work.popitem()
            os.close(said)
            stop(copy.process)
        while self._open:
            os.close(self._open.pop())

    def _write_tickets(self) -> int:
        """Return the end of a pipe that tickets for all the tasks come out of, of several tasks where it is small."""
        tickets, writing = os.pipe()
        self._open.append(tickets)
        try:
            self._step = 1 + len(self._tasks) // (_room(writing) // _TICKET.size)
            os.set_blocking(writing, False)  # nobody reads yet: rather no copies than to wait for ever
            for number in range(0, len(self._tasks), self._step):
                os.write(writing, _TICKET.pack(number))
        finally:
            os.close(writing)
        return tickets

    def _start(self) -> None:
        """Start one more copy. Raises OSError where no process or no descriptor is to be had."""
        memory = _memory()
        self._open.append(memory)
        said, saying = os.pipe()

        def work() -> None:
            for reading in (said, *self._at_work):  # else a copy's own hold on its pipe hides that its reader is gone
                os.close(reading)
            at = 0
            while taken := self._take():
                for number in taken:
                    size = self._write(memory, number)
                    os.write(saying, _MADE.pack(number, at, size))
                    at += size

        try:
            self._at_work[said] = _Copy(fork(work), memory)
        except BaseException:
            os.close(said)
            raise
        finally:
            os.close(saying)
        self._speaking.register(said, select.POLLIN)

    def _write(self, memory: int, number: int) -> int:
        """Do a task and write its result; return how many bytes that are, none where it failed."""
        try:
            content = pickle.dumps(self._tasks[number](), pickle.HIGHEST_PROTOCOL)
            start = os.lseek(memory, 0, os.SEEK_CUR)
            if os.write(memory, content) == len(content):
                return len(content)
            os.lseek(memory, start, os.SEEK_SET)
        except Exception:  # the task is done again where its result is asked for, and what it raises is raised there
            pass
        return 0

    def _take(self) -> range:
        """Take the next ticket and return its tasks, none where all are taken."""
        ticket = os.read(self._tickets, _TICKET.size)
        if not ticket:
            return range(0)
        (first,) = _TICKET.unpack(ticket)
        return range(first, min(first + self._step, len(self._tasks)))

    def _do(self, number: int) -> None:
        """Do a task here and keep its result."""
        try:
            found = self._tasks[number]()
        except Exception:  # as in a copy: raised where the result is asked for
            self._again.add(number)
        else:
            self._made[number] = lambda: found

    def _listen(self, *, wait: bool) -> bool:
        """Note what the copies have done since; tell whether any is at work. ``wait``: until one has said something."""
        for said, _ in self._speaking.poll(None if wait else 0) if self._at_work else ():
            copy = self._at_work[said]
            content = os.read(said, 1 << 16)
            if not content:
                del self._at_work[said]
                self._speaking.unregister(said)
                os.close(said)
                os.waitpid(copy.process, 0)
            copy.heard += content
            whole = len(copy.heard) // _MADE.size * _MADE.size
            for number, at, size in _MADE.iter_unpack(copy.heard[:whole]):
                if size:
                    self._made[number] = partial(_read, copy.memory, at, size)
                else:
                    self._again.add(number)
            copy.heard = copy.heard[whole:]
        return bool(self._at_work)


def _room(pipe: int) -> int:
    """Return how many bytes a pipe surely takes before anybody reads: 64 KiB, or 4 where its user has many of them."""
    try:
        import fcntl

        return fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)
    except (ImportError, AttributeError, OSError):
        return select.PIPE_BUF


def _memory() -> int:
    """Return a nameless file in memory; on disk where Python was built without such."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("probe-results")
    import tempfile

    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _read(memory: int, at: int, size: int) -> Any:
    return pickle.loads(os.pread(memory, size, at))
