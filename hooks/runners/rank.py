"""What each process does that :func:`probe.hooks.runners.launch.launch` starts: ``python -m ... rank FOLDER``."""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import threading
import time
import traceback
from pathlib import Path

from probe.checkpoint import Checkpoint
from probe.errors import ProbeError
from probe.hooks.runners.launch import ERROR, EVENTS, read_work, write_result

WATCH_SECONDS = 0.5
ORPHANED = 3
"""Exit status of a rank whose parent is gone."""


class EventLog(logging.Handler):
    """Hands log records and progress to the process that started this one, a JSON line each."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        """Pass a log record on."""
        self._write({"level": record.levelno, "text": record.getMessage()})

    def observe(self, what: str, done: int, total: int) -> None:
        """Pass progress on."""
        self._write({"what": what, "done": done, "total": total})

    def _write(self, event: dict[str, object]) -> None:
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")


def main(folder: Path) -> int:
    """Run this rank's part of the job; return the exit status after leaving its result or its error in ``folder``."""
    rank = int(os.environ["RANK"])
    try:
        work, job, sequences = read_work(folder)
        _end_with((os.getppid(), work["parent"]))
        events = _events(folder, rank, work["log_level"])
        module, _, function = work["entry"].partition(":")
        run = getattr(importlib.import_module(module), function)
        observer = events.observe if rank == 0 else lambda what, done, total: None
        done = run(job, Checkpoint(job.model), sequences, work["manifest"], observer)
        write_result(folder, rank, done, work["manifest"])
        _leave_group()
    except ProbeError as error:
        _write_error(folder, rank, error.slug, error.problem, error.fix)
        return 1
    except Exception as error:  # whatever the engine raises: the parent must learn why this rank is gone
        traceback.print_exc()
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        _write_error(folder, rank, "", reason, "")
        return 1
    return 0


def _leave_group() -> None:
    """Wait until every rank has its result, then leave; a rank that left early would break its peers' last message."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _events(folder: Path, rank: int, level: int) -> EventLog:
    """Send this package's log to the parent; only rank 0 speaks, because all ranks say the same."""
    events = EventLog(folder / EVENTS)
    logger = logging.getLogger("probe")
    logger.setLevel(level)
    logger.propagate = False
    logger.addHandler(events if rank == 0 else logging.NullHandler())
    return events


def _write_error(folder: Path, rank: int, slug: str, problem: str, fix: str) -> None:
    error = {"rank": rank, "time": time.time(), "slug": slug, "problem": problem, "fix": fix}
    (folder / ERROR.format(rank=rank)).write_text(json.dumps(error))


def _end_with(processes: tuple[int, ...]) -> None:
    """End this process as soon as one of those it works for is gone, however that ended."""

    def watch() -> None:
        while os.getppid() == processes[0] and all(map(_alive, processes)):
            time.sleep(WATCH_SECONDS)
        os._exit(ORPHANED)

    threading.Thread(target=watch, daemon=True).start()


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
