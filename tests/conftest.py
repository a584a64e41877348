"""Fixtures shared by the tests that need the demo model or dumps of real engines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Small models run on one thread: several only spin against each other when the cores are busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that ships, made once for the whole run."""
    from probe.hooks.demo_model import make_demo_model

    return make_demo_model(tmp_path_factory.mktemp("demo") / "model")


@pytest.fixture(scope="session")
def rollouts(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of dumps that real vLLM made of the demo model (tests/engine_dumps.py lists them).

    vLLM takes a process for itself, so that one process starts its engines one after the other.
    """
    folder = tmp_path_factory.mktemp("rollouts")
    script = Path(__file__).parent / "engine_dumps.py"
    made = subprocess.run([sys.executable, str(script), str(demo_model), str(folder)], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[-4000:]
    return folder
