"""Processes that torchrun starts for a dump: their answers, their errors, and that none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkpoints import make_checkpoint

from probe.errors import CheckpointError, EngineError
from probe.hooks.runners.job import DumpJob, Parallel, TokenSequence
from probe.hooks.runners.launch import launch

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
SECONDS = 30
"""How long a process may take to be seen starting or ending on a busy machine."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), layers=1)


@pytest.fixture(autouse=True)
def entries(monkeypatch):
    """Let the processes import tests/launch_entries.py."""
    monkeypatch.setenv("PYTHONPATH", str(HERE))


def start(checkpoint, entry, observer=lambda *what: None, **engine_args):
    sequences = [TokenSequence(f"s{n}", [1, 2, 3], 1) for n in range(3)]
    job = DumpJob("actor", "megatron", checkpoint, Path("out"), source=Path("in"), device="cpu")
    job.parallel, job.engine_args = Parallel(dp=2), engine_args
    manifest = {"coordinates": None}
    done = launch(job, sequences, manifest, observer, entry=f"launch_entries:{entry}")
    return done, manifest


def pids(folder: Path) -> set[int]:
    """Wait for both ranks, and return their processes and their parent."""
    files = [folder / f"{rank}.pid" for rank in range(2)]
    wait_for(lambda: all(file.exists() for file in files), "the ranks did not start")
    return {int(word) for file in files for word in file.read_text().split()}


def wait_for(happened, otherwise: str) -> None:
    until = time.monotonic() + SECONDS
    while not happened():
        assert time.monotonic() < until, otherwise
        time.sleep(0.1)


def gone(process: int) -> bool:
    """Tell whether a process has ended (a zombie that nobody here reaps has)."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{process}/status").read_text()
    except FileNotFoundError:
        return True


def test_every_rank_answers_for_its_sequences(checkpoint):
    seen = []
    done, manifest = start(checkpoint, "score", lambda *what: seen.append(what))
    assert [(s.uid, s.logprobs.tolist()) for s in done] == [("s0", [-1.0] * 3), ("s1", [-2.0] * 3), ("s2", [-1.0] * 3)]
    assert manifest == {"device": "rank 0 of 2", "coordinates": None}
    assert seen == [("scoring", 2, 3)]


def test_a_ranks_own_words_are_the_error_and_its_peers_are_ended(checkpoint, tmp_path):
    with pytest.raises(CheckpointError, match=r"^the checkpoint is not what it says: get another\.$"):
        start(checkpoint, "refuse", pids=str(tmp_path))
    assert all(map(gone, pids(tmp_path)))


def test_any_other_error_names_the_rank_in_one_line(checkpoint):
    with pytest.raises(EngineError, match=r"rank [01] of 2 failed .*ValueError: seven is not eight.*-v"):
        start(checkpoint, "crash")


SCRIPT = """
import signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in its background without
sys.path.insert(0, {here!r})
import test_launch
test_launch.start(Path({model!r}), "hang", pids={folder!r})
"""


@pytest.mark.parametrize(
    ("signals", "status"), [((signal.SIGINT,), 1), ((signal.SIGTERM,), 143), ((signal.SIGKILL,), -9)], ids=str
)
def test_no_process_outlives_the_one_that_asked_for_it(checkpoint, tmp_path, signals, status):
    script = SCRIPT.format(here=str(HERE), model=str(checkpoint), folder=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE)
    started = pids(tmp_path)
    for number in signals:
        os.kill(process.pid, number)
    process.communicate(timeout=SECONDS)
    assert process.returncode == status or (signals == (signal.SIGINT,) and process.returncode == -signal.SIGINT)
    wait_for(lambda: all(map(gone, started)), f"of {started} some are left")
