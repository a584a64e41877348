"""Fixtures shared by the tests that need the demo model or dumps of real engines."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.pop("COLUMNS", None)  # pytest -n hands on the terminal's, and tests are of text that goes to no terminal
# Small models run on one thread: several only spin against each other when the cores are busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder that ``make`` filled, once for all the processes of a run (pytest -n)."""
    base = factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, done = base / name, base / f"{name}.done"
    with open(base / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            make(folder)
            done.touch()
    return folder


@pytest.fixture(autouse=True)
def commands_leave_no_trace() -> Iterator[None]:
    """Put back what a command that ran in this process set for good: verbosity, consoles, where log lines go."""
    from probe.cli import common

    logger = logging.getLogger("probe")
    before = logger.level, logger.propagate, list(logger.handlers), common.State.verbosity
    yield
    logger.setLevel(before[0])
    logger.propagate, logger.handlers, common.State.verbosity = before[1:]
    common.stdout.cache_clear()
    common.stderr.cache_clear()


@pytest.fixture(autouse=True)
def no_debugger_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test begin as a process does: without a PrecisionDebugger, to which the recording of jobs makes way."""
    from probe.hooks import debugger

    monkeypatch.setattr(debugger, "created", False)
    monkeypatch.setattr(debugger, "on_created", [])


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that ships, made once for the whole run."""

    def make(folder: Path) -> None:
        from probe.hooks.demo_model import make_demo_model

        make_demo_model(folder / "model")

    return made_once(tmp_path_factory, "demo", make) / "model"


@pytest.fixture(scope="session")
def rollouts(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of dumps that real vLLM made of the demo model (tests/engine_dumps.py lists them).

    vLLM takes a process for itself, so that one process starts its engines one after the other.
    """

    def make(folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)  # of an attempt that failed
        folder.mkdir()
        script = Path(__file__).parent / "engine_dumps.py"
        words = [sys.executable, str(script), str(demo_model), str(folder)]
        made = subprocess.run(words, capture_output=True, text=True)
        assert made.returncode == 0, made.stderr[-4000:]

    return made_once(tmp_path_factory, "rollouts", make)
