"""Replaying one side in a forked copy: the same result, the same errors, and never where a fork would not be safe."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from synthetic_dumps import Scenario, actor, write_dump

from probe.compare.replay import beside
from probe.compare.replay.beside import Beside, can_fork
from probe.errors import DumpError

FORKED = pytest.mark.skipif(sys.platform != "linux", reason="copies of a process are made on Linux only")


@pytest.fixture
def forking(monkeypatch):
    """Fork whatever this process, which has loaded torch, may hold."""
    monkeypatch.setattr(beside, "can_fork", lambda: True)


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
    monkeypatch.setattr(beside, "can_fork", lambda: False)
    assert Beside(os.getpid).result() == os.getpid()


def test_no_fork_beside_threads_or_packages_with_threads_of_their_own():
    code = "import sys, types; from probe.compare.replay.beside import can_fork; {}print(can_fork())"
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1
    cases = {"": cores > 1, "sys.modules['torch'] = types.ModuleType('torch'); ": False}
    for more, expected in cases.items():
        done = subprocess.run([sys.executable, "-c", code.format(more)], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == str(expected)
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    assert not can_fork()
    stop.set()
    thread.join()


def test_a_comparison_reads_the_same_with_and_without_a_copy(tmp_path):
    paths = [write_dump(tmp_path / "a", Scenario()), write_dump(tmp_path / "b", actor())]
    code = """
import json, sys
from probe.compare.replay import beside
from probe.compare.run import compare_dumps
forked = []
beside._fork = lambda work, fork=beside._fork: forked.append(1) or fork(work)
if sys.argv[3] == "here":
    beside.can_fork = lambda: False
elif sys.platform == "linux":
    beside.can_fork = lambda: True
report = compare_dumps(sys.argv[1], sys.argv[2])
del report["created"]
print(len(forked), json.dumps(report))
"""
    texts = [
        subprocess.run([sys.executable, "-c", code, *map(str, paths), how], capture_output=True, text=True, check=True)
        for how in ("here", "beside")
    ]
    (none, here), (forks, copied) = (done.stdout.split(" ", 1) for done in texts)
    assert here == copied and none == "0" and forks == ("1" if sys.platform == "linux" else "0")
    assert '"kind": "attention"' in here
