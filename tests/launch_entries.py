"""What the processes run in the tests of :mod:`probe.hooks.runners.launch`: entries that stand for a runner."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from probe.errors import CheckpointError
from probe.hooks.runners.job import TokenSequence


def _rank() -> int:
    return int(os.environ["RANK"])


def score(job: Any, checkpoint: Any, sequences: list[TokenSequence], manifest: Any, observer: Any) -> Any:
    """Score the sequences of this rank's turn with its number, and say who did it."""
    world, mine = int(os.environ["WORLD_SIZE"]), sequences[_rank() :: int(os.environ["WORLD_SIZE"])]
    for sequence in mine:
        sequence.logprobs = np.full(len(sequence.tokens), -1.0 - _rank())
    manifest |= {"device": f"rank {_rank()} of {world}", "coordinates": {"dp": _rank()}}
    observer("scoring", len(mine), len(sequences))
    return mine


def refuse(job: Any, *arguments: Any) -> Any:
    """Fail on rank 1 with an error of this package while rank 0 would wait for it for ever."""
    _leave_pid(job)
    while not (Path(job.engine_args["pids"]) / "0.pid").exists():
        time.sleep(0.1)
    if _rank() == 1:
        raise CheckpointError("the checkpoint is not what it says", "get another")
    time.sleep(600)


def crash(*arguments: Any) -> Any:
    """Fail with an error of another package."""
    raise ValueError("seven\nis not eight")


def hang(job: Any, *arguments: Any) -> Any:
    """Never end."""
    _leave_pid(job)
    time.sleep(600)


def _leave_pid(job: Any) -> None:
    folder = Path(job.engine_args["pids"])
    (folder / f"{_rank()}.tmp").write_text(f"{os.getpid()} {os.getppid()}")
    (folder / f"{_rank()}.tmp").rename(folder / f"{_rank()}.pid")
