"""Run an engine in several processes on this machine: start them with torchrun, follow them, gather their results.

The processes get the job as a JSON file in a folder of their own and answer through files there: progress and log lines
of rank 0, the sequences that each rank scored, and the error of a rank that failed. Nothing outlives the call: on an
error, Ctrl-C or SIGTERM the processes are ended, and each of them ends by itself when this process is gone
(:mod:`probe.hooks.runners.rank`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import probe
from probe import errors
from probe.errors import EngineError, ProbeError, UsageError
from probe.hooks.device import device_module, pick_device
from probe.hooks.runners.job import DumpJob, Observer, Parallel, Sampling, TokenSequence

log = logging.getLogger("probe")

WORK, EVENTS, OUTPUT = "work.json", "events.jsonl", "output.txt"
RESULT, ERROR = "result{rank}.json", "error{rank}.json"
POLL_SECONDS, GRACE_SECONDS = 0.1, 10.0
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--max-restarts", "0")
"""``--standalone`` makes the processes meet on a free port of this machine."""
_PATHS = ("model", "output", "prompts", "source")


def launch(
    job: DumpJob, sequences: list[TokenSequence], manifest: dict[str, Any], observer: Observer, *, entry: str
) -> list[TokenSequence]:
    """Run ``entry`` in as many processes as the job's split takes; return the sequences with the log-probs they found.

    ``entry`` is ``package.module:function`` with the signature of a runner's ``run``. Each rank returns the sequences
    that it scored, with NaN where another rank scores; ``manifest`` takes over what rank 0 added to its own. Raises
    UsageError or EngineError where sequences or devices are too few, and the error of the rank that failed first.
    """
    world = job.parallel.world
    _check_enough(job, world, len(sequences))
    with tempfile.TemporaryDirectory(prefix="probe-ranks-") as name:
        folder = Path(name)
        work = {
            "entry": entry,
            "parent": os.getpid(),
            "log_level": log.getEffectiveLevel(),
            "job": dataclasses.asdict(job),
            "sequences": [_packed(sequence) for sequence in sequences],
            "manifest": manifest,
        }
        (folder / WORK).write_text(json.dumps(work, default=str))
        status = _follow(folder, world, observer)
        if status:
            raise _failure(folder, world, job, status)
        results = [json.loads((folder / RESULT.format(rank=rank)).read_text()) for rank in range(world)]
    manifest.update({key: value for key, value in results[0]["manifest"].items() if key != "coordinates"})
    return _joined(sequences, [unpacked(entry) for result in results for entry in result["sequences"]])


def _check_enough(job: DumpJob, world: int, sequences: int) -> None:
    if sequences < job.parallel.dp:
        problem = f"{sequences} sequences cannot be dealt out to {job.parallel.dp} data-parallel ranks"
        raise UsageError(problem, "lower --dp or give more sequences")
    device = pick_device(job.device)
    if device != "cpu" and (count := device_module(device).device_count()) < world:
        axes = ", ".join(f"--{axis}" for axis in ("tp", "pp", "cp", "dp") if getattr(job.parallel, axis) > 1)
        raise EngineError(f"{world} processes need {world} devices, but there are {count}", f"lower {axes}")


def read_work(folder: Path) -> tuple[dict[str, Any], DumpJob, list[TokenSequence]]:
    """Return what :func:`launch` left for its ranks: the file itself, the job and the sequences."""
    work = json.loads((folder / WORK).read_text())
    told = work["job"]
    told |= {name: Path(told[name]) for name in _PATHS if told[name] is not None}
    told |= {"sampling": Sampling(**told["sampling"]), "parallel": Parallel(**told["parallel"])}
    return work, DumpJob(**told), [unpacked(entry) for entry in work["sequences"]]


def write_result(folder: Path, rank: int, done: list[TokenSequence], manifest: dict[str, Any]) -> None:
    """Leave what a rank returns for :func:`launch`."""
    result = {"sequences": [_packed(sequence) for sequence in done], "manifest": manifest}
    (folder / RESULT.format(rank=rank)).write_text(json.dumps(result, default=str))


def _packed(sequence: TokenSequence) -> dict[str, Any]:
    values = None if sequence.logprobs is None else [float(value) for value in sequence.logprobs]
    return {**vars(sequence), "tokens": [int(token) for token in sequence.tokens], "logprobs": values}


def unpacked(entry: dict[str, Any]) -> TokenSequence:
    """Return the sequence that a JSON entry of these files describes."""
    values = entry["logprobs"]
    return TokenSequence(**{**entry, "logprobs": None if values is None else np.array(values, np.float64)})


def _joined(sequences: list[TokenSequence], parts: list[TokenSequence]) -> list[TokenSequence]:
    """Return every sequence in the given order, its log-probs put together from the ranks that scored some of it."""
    whole: dict[str, TokenSequence] = {}
    for part in parts:
        known = whole.setdefault(part.uid, part)
        if known is not part and known.logprobs is not None and part.logprobs is not None:
            known.logprobs = np.where(np.isnan(known.logprobs), part.logprobs, known.logprobs)
    missing = [sequence.uid for sequence in sequences if sequence.uid not in whole]
    if missing:
        raise EngineError(f"no rank returned sequence {missing[0]} ({len(missing)} are missing)")
    return [whole[sequence.uid] for sequence in sequences]


# -- the processes -----------------------------------------------------------------------------------------------------


def _follow(folder: Path, world: int, observer: Observer) -> int:
    """Start the processes, pass on what they report, and return torchrun's exit status."""
    command = [sys.executable, *TORCHRUN, "--nproc-per-node", str(world), "-m", "probe.hooks.runners.rank", str(folder)]
    events, output = _Tail(folder / EVENTS), _Tail(folder / OUTPUT)
    with open(folder / OUTPUT, "wb") as sink, _raising_on_sigterm():
        process = subprocess.Popen(
            command, env=_environment(), stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True
        )
        try:
            while process.poll() is None:
                time.sleep(POLL_SECONDS)
                _report(events, output, observer)
        finally:
            _end(process)
    _report(events, output, observer)
    return process.returncode


def _environment() -> dict[str, str]:
    """Return the processes' environment: one thread each unless told, and the same ``probe`` as this one."""
    home = str(Path(probe.__file__).parent.parent)
    path = os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])
    defaults = {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return {**defaults, **os.environ, "PYTHONPATH": path}


@contextlib.contextmanager
def _raising_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into an exception while the block runs, so that whoever waits here cleans up."""
    if threading.current_thread() is not threading.main_thread():  # signals belong to the main thread
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End torchrun, which ends its processes; one that does not listen is killed, and its processes notice."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class _Tail:
    """Reads the whole lines that were added to a file since the last look."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def lines(self) -> list[str]:
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            file.seek(self._at)
            whole = file.read().rpartition(b"\n")[0]
        if not whole:
            return []
        self._at += len(whole) + 1
        return whole.decode("utf-8", "replace").splitlines()


def _report(events: _Tail, output: _Tail, observer: Observer) -> None:
    for line in output.lines():
        log.info("%s", line)
    for line in events.lines():
        event = json.loads(line)
        if "what" in event:
            observer(event["what"], event["done"], event["total"])
        else:
            log.log(event["level"], "%s", event["text"])


def _failure(folder: Path, world: int, job: DumpJob, status: int) -> ProbeError:
    """Return the error to raise: a rank's own words before those of ranks that only lost their peer."""
    found = [json.loads(path.read_text()) for r in range(world) if (path := folder / ERROR.format(rank=r)).exists()]
    if not found:
        last = (folder / OUTPUT).read_text(errors="replace").strip().splitlines()[-1:]
        reason = f"torchrun ended with status {status}" + (f": {last[0]}" if last else "")
        return EngineError(f"the {world} processes of {job.engine} failed ({reason})", "run it again with -v")
    first = min(found, key=lambda error: (not error["slug"], error["time"]))
    if not first["slug"]:
        where = f"rank {first['rank']} of {world} failed on {job.model} ({first['problem']})"
        return EngineError(f"{job.engine}: {where}", "run it again with -v to see its log")
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ProbeError)]
    kind = next((kind for kind in kinds if kind.slug == first["slug"]), EngineError)
    return kind(first["problem"], first["fix"])
