"""Which run of a job this process is part of, and what an earlier run has left in the dump's folder.

A run is what one command starts: activation names it in the first process, every child inherits the name (Ray hands it
on). Nodes and ranks that were launched one by one have names of their own; but no file of their job is older than they
are. So only what was written before this run began, under another name, is an earlier run's.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

VARIABLE = "PROBE_RUN"
"""``SECONDS-RANDOM``: when the run began, since the epoch."""
TOLERANCE = 0.05
"""Seconds by which a file system's clock may lag: its ticks are coarser than those of the processor."""

_own = ""
_lag: dict[Path, float] = {}


def run_id() -> str:
    """Return the name of this process's run: the inherited one, else one of this process's own."""
    global _own
    _own = os.environ.get(VARIABLE) or _own or f"{time.time():.3f}-{os.urandom(4).hex()}"
    return _own


def is_earlier(path: Path) -> bool:
    """Tell whether a file (that exists) was written before this run began, by the clock of its file system."""
    begun = _begun()
    try:
        written = path.stat().st_mtime
    except OSError:  # gone in the meantime
        return False
    return written < begun - TOLERANCE and written + _lag_of(path.parent) < begun - TOLERANCE


def holds_earlier(folder: Path) -> bool:
    """Tell whether a folder holds files of a dump that an earlier run wrote."""
    with contextlib.suppress(OSError):
        return any(".h5" in path.name and is_earlier(path) for path in folder.iterdir())
    return False


def _begun() -> float:
    try:
        return float(run_id().partition("-")[0])
    except ValueError:  # a name that the user chose
        return 0.0


def _lag_of(folder: Path) -> float:
    """Return by how many seconds the clock that dates a folder's files is behind this machine's."""
    if folder not in _lag:
        _lag[folder] = 0.0
        probe = folder / f".clock-{os.getpid()}-{os.urandom(6).hex()}"
        with contextlib.suppress(OSError):
            try:
                probe.touch()
                _lag[folder] = time.time() - probe.stat().st_mtime
            finally:
                probe.unlink(missing_ok=True)
    return _lag[folder]
