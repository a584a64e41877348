"""Work in forked copies: the same results, the same errors, and never where a fork would not be safe."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from synthetic_dumps import Scenario, actor, write_dump

from probe.compare import copies
from probe.compare.copies import Beside, Pool, can_fork
from probe.errors import DumpError

FORKED = pytest.mark.skipif(sys.platform != "linux", reason="copies of a process are made on Linux only")


@pytest.fixture
def forking(monkeypatch):
    """Fork whatever this process, which has loaded torch, may hold."""
    monkeypatch.setattr(copies, "can_fork", lambda: True)


@FORKED
def test_a_result_comes_out_of_a_process_of_its_own(forking):
    numbers = np.arange(1_000_000)  # more than a pipe holds at a time
    found = Beside(lambda: (os.getpid(), numbers * 2)).result()
    assert found[0] != os.getpid() and np.array_equal(found[1], numbers * 2)


@FORKED
def test_an_error_is_raised_here_as_it_is(forking):
    def fail():
        raise DumpError("it is damaged", "dump again")

    with pytest.raises(DumpError, match=r"it is damaged: dump again\."):
        Beside(fail).result()


@FORKED
def test_a_copy_that_dies_is_replaced(forking):
    here = os.getpid()

    def work():
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return "done"

    assert Beside(work).result() == "done"


@FORKED
def test_a_copy_that_nobody_waits_for_is_stopped(forking):
    started = Beside(lambda: time.sleep(600))
    child = started._child
    started.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    started.close()


@FORKED
def test_an_interrupt_while_waiting_ends_the_copy_and_is_what_is_raised(forking):
    started = Beside(lambda: time.sleep(600))
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            try:
                started.result()
            finally:
                started.close()
    finally:
        signal.signal(signal.SIGINT, before)


def test_without_a_fork_the_work_is_done_here(monkeypatch):
    monkeypatch.setattr(copies, "can_fork", lambda: False)
    assert Beside(os.getpid).result() == os.getpid()


def test_no_fork_beside_threads_or_packages_with_threads_of_their_own():
    code = "import sys, types; from probe.compare.copies import can_fork; {}print(can_fork())"
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1
    bar = "from rich.progress import Progress; bar = Progress(disable=False); bar.start(); "
    cases = {"": cores > 1, "sys.modules['torch'] = types.ModuleType('torch'); ": False, bar: cores > 1}
    for more, expected in cases.items():
        done = subprocess.run([sys.executable, "-c", code.format(more)], capture_output=True, text=True, check=True)
        assert str(expected) in done.stdout
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    assert not can_fork()
    stop.set()
    thread.join()


# -- several tasks ----------------------------------------------------------------------------------------------------


def made_by(task: int) -> tuple[int, int, np.ndarray]:
    time.sleep(0.002)
    return task, os.getpid(), np.full(1000, task)


@FORKED
def test_tasks_are_shared_out_and_their_results_come_in_order():
    with contextlib.closing(Pool([functools.partial(made_by, number) for number in range(200)], 2)) as pool:
        found = [pool.result(number) for number in range(200)]
    assert [number for number, _, _ in found] == list(range(200))
    assert all((values == number).all() for number, _, values in found)
    assert os.getpid() in {process for _, process, _ in found} and len({process for _, process, _ in found}) == 3


@FORKED
def test_more_tasks_than_a_pipe_holds_tickets_for(monkeypatch):
    monkeypatch.setattr(copies, "_TICKETS", 7)
    with contextlib.closing(Pool([functools.partial(int, number) for number in range(100)], 1)) as pool:
        assert [pool.result(number) for number in range(100)] == list(range(100))


@FORKED
def test_a_task_that_fails_raises_here_and_the_others_go_on():
    def task(number: int) -> int:
        if number % 3 == 1:
            raise DumpError(f"{number} is damaged", "dump again")
        time.sleep(0.001)
        return number

    with contextlib.closing(Pool([functools.partial(task, number) for number in range(30)], 1)) as pool:
        for number in range(30):
            if number % 3 == 1:
                with pytest.raises(DumpError, match=f"{number} is damaged"):
                    pool.result(number)
            else:
                assert pool.result(number) == number


@FORKED
def test_tasks_of_a_copy_that_dies_are_done_here():
    here = os.getpid()

    def task(number: int) -> int:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)
        return number

    with contextlib.closing(Pool([functools.partial(task, number) for number in range(20)], 2)) as pool:
        assert [pool.result(number) for number in range(20)] == list(range(20))


@FORKED
def test_a_pool_that_is_closed_leaves_no_process_and_no_descriptor():
    before = os.listdir("/proc/self/fd")
    pool = Pool([functools.partial(time.sleep, 600 * (number > 0)) for number in range(4)], 2)
    pool._take()
    processes = [copy.process for copy in pool._at_work.values()]
    pool.close()
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
    assert len(processes) == 2 and os.listdir("/proc/self/fd") == before


# -- a comparison -----------------------------------------------------------------------------------------------------


def test_a_comparison_reads_the_same_with_and_without_copies(tmp_path):
    paths = [write_dump(tmp_path / "a", Scenario()), write_dump(tmp_path / "b", actor())]
    code = """
import json, os, sys
from probe.compare import copies, figures
from probe.compare.run import compare_dumps
forked = []
copies.fork = lambda work, fork=copies.fork: forked.append(1) or fork(work)
figures.WORTH_A_COPY = 4
for module in (copies, figures):
    if sys.argv[3] == "here":
        module.can_fork = lambda: False
    elif sys.platform == "linux":
        module.can_fork = lambda: True
report = compare_dumps(sys.argv[1], sys.argv[2], jobs=3)
del report["created"]
print(len(forked), json.dumps(report))
"""
    texts = [
        subprocess.run([sys.executable, "-c", code, *map(str, paths), how], capture_output=True, text=True, check=True)
        for how in ("here", "beside")
    ]
    (none, here), (forks, copied) = (done.stdout.split(" ", 1) for done in texts)
    # two that measure, and one that replays a side
    assert here == copied and none == "0" and forks == ("3" if sys.platform == "linux" else "0")
    assert '"kind": "attention"' in here
