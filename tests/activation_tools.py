"""What the tests of activation share: processes with a known environment, and a patch of a module of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

OURS = ("DUMP_ON", "PROMPTS_ONLY", "RANK")


def clean_environment(**more: str) -> dict[str, str]:
    """Return this process's environment without what switches capture on, and with ``more``."""
    kept = {k: v for k, v in os.environ.items() if k not in OURS and not k.startswith("PROBE_")}
    return {**kept, **more}


def python(*words: str | Path, cwd: Path, environ: Mapping[str, str], timeout: float = 300) -> str:
    """Run Python in a process of its own and return its standard output; any failure is the test's."""
    done = run_python(*words, cwd=cwd, environ=environ, timeout=timeout)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def run_python(
    *words: str | Path, cwd: Path, environ: Mapping[str, str], timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=dict(environ), timeout=timeout)


def write_library(folder: Path) -> None:
    """Write a library ``somelib`` with a function, and patches of it: one that works and several that do not."""
    (folder / "somelib.py").write_text("__version__ = '1.2'\n\ndef answer():\n    return 41\n")
    (folder / "otherlib.py").write_text("def answer():\n    return 7\n")
    (folder / "somepatch.py").write_text(PATCHES)


PATCHES = """
from probe.errors import UsageError

def patch(module):
    original = module.answer
    module.answer = lambda: original() + 1

def fail(module):
    raise RuntimeError("no such\\n method")
"""
