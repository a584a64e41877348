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
@pytest.mark.timeout(60)
@pytest.mark.parametrize("pipe", ["64 KiB", "4 KiB", "of a size that nobody tells"])
def test_more_tasks_than_a_pipe_holds_tickets_for(monkeypatch, pipe):
    import fcntl

    plain = os.pipe

    def small() -> tuple[int, int]:  # as those of a user with many pipes are
        ends = plain()
        fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, 4096)
        return ends

    if pipe == "4 KiB":
        monkeypatch.setattr(os, "pipe", small)
    elif pipe != "64 KiB":
        monkeypatch.delattr(fcntl, "F_GETPIPE_SZ")
    count = 20_000
    with contextlib.closing(Pool([functools.partial(int, number) for number in range(count)], 1)) as pool:
        assert [pool.result(number) for number in range(count)] == list(range(count))


@FORKED
@pytest.mark.timeout(60)
def test_a_pipe_that_holds_less_than_it_says_is_no_reason_to_wait(monkeypatch):
    monkeypatch.setattr(copies, "_room", lambda pipe: 1 << 30)
    with leaving_nothing(), pytest.raises(OSError):
        Pool([int] * 100_000, 2)


@FORKED
def test_results_come_through_descriptors_above_1023():
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip("this process may open too few files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    held = [os.dup(0) for _ in range(1100)]
    try:
        with contextlib.closing(Pool([functools.partial(made_by, number) for number in range(50)], 2)) as pool:
            assert min(pool._at_work) > 1023
            assert [pool.result(number)[0] for number in range(50)] == list(range(50))
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@FORKED
def test_a_python_without_files_in_memory_takes_those_on_disk(monkeypatch):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    with (
        leaving_nothing(),
        contextlib.closing(Pool([functools.partial(made_by, number) for number in range(50)], 2)) as pool,
    ):
        assert [pool.result(number)[0] for number in range(50)] == list(range(50))


# -- where no more processes or descriptors are to be had -------------------------------------------------------------


@contextlib.contextmanager
def leaving_nothing():
    """Check that no descriptor and no copy of this process is left behind."""
    before = os.listdir("/proc/self/fd")
    yield
    assert os.listdir("/proc/self/fd") == before
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def refusing(monkeypatch, name: str, after: int, error: BaseException) -> None:
    """Let a function of os fail from its call number ``after`` on."""
    plain, calls = getattr(os, name), []

    def refuse(*arguments):
        calls.append(1)
        if len(calls) > after:
            raise error
        return plain(*arguments)

    monkeypatch.setattr(os, name, refuse)


REFUSALS = [("pipe", 24, "too many open files"), ("fork", 11, "try again"), ("fork", 12, "no memory")]


@FORKED
@pytest.mark.parametrize(("name", "number", "words"), [*REFUSALS, ("memfd_create", 24, "too many open files")])
def test_a_pool_goes_on_with_the_copies_that_it_gets(monkeypatch, name, number, words):
    refusing(monkeypatch, name, 2 if name == "pipe" else 1, OSError(number, words))
    with leaving_nothing(), contextlib.closing(Pool([functools.partial(made_by, n) for n in range(50)], 3)) as pool:
        assert len(pool._at_work) == 1
        assert [pool.result(number)[0] for number in range(50)] == list(range(50))


@FORKED
@pytest.mark.parametrize(("name", "number", "words"), [*REFUSALS, ("memfd_create", 24, "too many open files")])
def test_a_pool_without_a_copy_says_so(monkeypatch, name, number, words):
    refusing(monkeypatch, name, 0, OSError(number, words))
    with leaving_nothing(), pytest.raises(OSError, match=words):
        Pool([int] * 4, 2)


@FORKED
@pytest.mark.parametrize(("name", "number", "words"), REFUSALS)
def test_work_that_no_process_is_to_be_had_for_is_done_here(forking, monkeypatch, name, number, words):
    refusing(monkeypatch, name, 0, OSError(number, words))
    with leaving_nothing():
        started = Beside(os.getpid)
        assert started.result() == os.getpid()
        started.close()


@FORKED
def test_an_interrupt_while_copies_are_started_ends_those_that_were(monkeypatch):
    refusing(monkeypatch, "fork", 2, KeyboardInterrupt())
    with leaving_nothing(), pytest.raises(KeyboardInterrupt):
        Pool([functools.partial(time.sleep, 600)] * 4, 3)


# -- a process that is killed -----------------------------------------------------------------------------------------

KILLED = """
import functools, os, signal, sys, time
from probe.compare import copies
if sys.argv[1] == "by what they cannot say":
    copies._end_with = lambda parent: None
    pool = copies.Pool([functools.partial(time.sleep, 0.05)] * 8000, 3)
else:
    pool = copies.Pool([functools.partial(time.sleep, 600)] * 4, 3)
    copies.can_fork = lambda: True
    pool.beside = copies.Beside(functools.partial(time.sleep, 600))
print(*(copy.process for copy in pool._at_work.values()), *([pool.beside._child] if hasattr(pool, "beside") else []))
sys.stdout.flush()
time.sleep(0.5)
os.kill(os.getpid(), signal.SIGKILL)
"""


def runs(process: str) -> bool:
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@FORKED
@pytest.mark.parametrize("how", ["by the kernel", "by what they cannot say"])
def test_copies_end_with_a_process_that_is_killed(how):
    done = subprocess.run([sys.executable, "-c", KILLED, how], stdout=subprocess.PIPE, text=True, timeout=60)
    processes = done.stdout.split()
    assert done.returncode == -signal.SIGKILL and len(processes) == (4 if how == "by the kernel" else 3)
    until = time.monotonic() + 10
    while any(map(runs, processes)) and time.monotonic() < until:
        time.sleep(0.05)
    left = [process for process in processes if runs(process)]
    for process in left:
        os.kill(int(process), signal.SIGKILL)
    assert not left


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
import json, os, sys, threading
from probe.compare import copies, figures
from probe.compare.run import compare_dumps
forked = []
copies.fork = lambda work, fork=copies.fork: forked.append(1) or fork(work)
figures.WORTH_A_COPY = 4
if sys.argv[3] == "refused":  # no process, and then no thread
    figures.WORTH_A_THREAD = 0
    def no_process():
        raise BlockingIOError(11, "Resource temporarily unavailable")
    def no_thread(_):
        raise RuntimeError("can't start new thread")
    os.fork, threading.Thread.start = no_process, no_thread
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
        for how in ("here", "beside", "refused")
    ]
    (none, here), (forks, copied), (refused, alone) = (done.stdout.split(" ", 1) for done in texts)
    # two that measure, and one that replays a side
    assert here == copied and none == "0" and forks == ("3" if sys.platform == "linux" else "0")
    assert '"kind": "attention"' in here and alone == here
    assert int(refused) > 1 or sys.platform != "linux"
