"""What the processes of a job say about capture: lines of ``activation.log`` in the dump, and of the ``probe`` logger.

One line per process and library that was hooked, and one per reason why something is not recorded; each is said once
per process. ``probe dump -- CMD`` reads them back when nothing was captured.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

NAME = "activation.log"
HOOKED, NOTE, TROUBLE = "hooked", "note", "trouble"
_LEVELS = {HOOKED: logging.INFO, NOTE: logging.INFO, TROUBLE: logging.WARNING}
_COMMAND_LENGTH = 80

log = logging.getLogger("probe")
_said: set[tuple[int, str, str]] = set()


@dataclass(frozen=True)
class Line:
    """One line of an activation.log: when (local time), which process (``host:pid``), what kind, what was said."""

    time: str
    process: str
    kind: str
    text: str


def hooked(module: ModuleType) -> None:
    """Say that a library's module is patched; once per library, with its version where it states one."""
    library = module.__name__.partition(".")[0]
    version = getattr(sys.modules.get(library), "__version__", "")
    _say(HOOKED, f"{library} {version}".strip())


def note(text: str) -> None:
    """Say once in this process what someone who reads the log wants to know (what is recorded, and how much)."""
    _say(NOTE, text)


def trouble(text: str) -> None:
    """Say once in this process why something is not recorded, and what to change."""
    _say(TROUBLE, text)


def folder() -> Path:
    """Return the job's dump folder, and say it to child processes where only PROBE_CONFIG does."""
    path = os.environ.get("PROBE_DUMP_DIR", "")
    if not path:
        from probe.settings import job_settings

        path = os.environ["PROBE_DUMP_DIR"] = os.path.abspath(job_settings().dump_path)
    return Path(path)


def read_lines(dump: Path) -> list[Line]:
    """Return the lines of a dump's activation.log; lines cut off by a killed process are left out."""
    try:
        text = (dump / NAME).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    rows = [row.split("\t") for row in text.splitlines()]
    return [Line(row[0], row[1], row[3], row[4]) for row in rows if len(row) == 6]


def _say(kind: str, text: str) -> None:
    text = " ".join(text.split())
    if (os.getpid(), kind, text) in _said:
        return
    _said.add((os.getpid(), kind, text))
    _listen()
    log.log(_LEVELS[kind], "%s", f"hooked {text}" if kind == HOOKED else text)
    try:
        _append(kind, text)
    except Exception as error:  # no folder to write to: standard error has it
        log.debug("activation.log cannot be written (%s)", error)


def _append(kind: str, text: str) -> None:
    """Append a line in one write, so that lines of other processes stay whole."""
    rank = os.environ.get("RANK")
    process = f"{socket.gethostname()}:{os.getpid()}"
    fields = (time.strftime("%Y-%m-%dT%H:%M:%S"), process, f"rank {rank}" if rank else "-", kind, text, _command())
    target = folder()
    target.mkdir(parents=True, exist_ok=True)
    file = os.open(target / NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, ("\t".join(fields) + "\n").encode("utf-8", errors="replace"))
    finally:
        os.close(file)


def _command() -> str:
    """Return what this process runs, short: ``train.py --lr 1e-6``, ``-m vllm.entrypoints``."""
    words = " ".join(os.path.basename(word) if os.path.isabs(word) else word for word in sys.orig_argv[1:])
    return " ".join(words.split())[:_COMMAND_LENGTH]


class _LastResort(logging.Handler):
    """Print a line to standard error where the program has set up no logging of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            sys.stderr.write(f"probe[{os.getpid()}]: {record.getMessage()}\n")


def _listen() -> None:
    if not log.handlers:
        log.addHandler(_LastResort())
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)
