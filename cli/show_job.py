"""``probe show JOB``: the stages and steps of a job's folder, what its processes said, and what to run next."""

from __future__ import annotations

import collections
import shlex
from pathlib import Path
from typing import Any

import numpy as np

from probe.cli import common
from probe.compare.job import compare_command, stages_of
from probe.errors import ProbeError
from probe.hooks.jobs.log import HOOKED, TROUBLE, read_lines
from probe.store.reader import open_dump, roots_of

MAX_STEPS = 12
"""Steps of a stage that are opened before a note says how many were left out (--all opens them, --json always does)."""
COLUMNS = {
    **{"stage": "left", "step": "right", "files": "right", "sequences": "right", "log-probs": "right"},
    **{"tensors": "right", "rows": "right", "weights": "right", "size": "right", "": "left"},
}


def describe_job(path: Path, *, everything: bool = True) -> dict[str, Any]:
    """Return the stages and steps of a job's folder, and what ``activation.log`` says, as plain data.

    A step that cannot be read has an ``error``. Without ``everything`` a stage's later steps are only counted.
    """
    stages, left_out = [], {}
    for stage, steps in stages_of(path).items():
        for number, folders in list(steps.items())[: None if everything else MAX_STEPS]:
            stages.append({"stage": stage, "step": number, **_step(folders)})
        left_out[stage] = 0 if everything else max(0, len(steps) - MAX_STEPS)
    lines = [line for root in roots_of(path) for line in read_lines(root)]
    said = {kind: _counted(line.text for line in lines if line.kind == kind) for kind in (HOOKED, TROUBLE)}
    return {"path": str(path), "stages": stages, "left_out": left_out, **said}


def _counted(texts: Any) -> list[dict[str, Any]]:
    counts = collections.Counter(texts)
    return [{"text": text, "processes": count} for text, count in counts.most_common()]


def _step(folders: list[Path]) -> dict[str, Any]:
    files = [file for folder in folders for file in folder.iterdir() if file.is_file()]
    held: dict[str, Any] = {"files": sum(".h5" in file.suffixes for file in files)}
    held["bytes"] = sum(file.stat().st_size for file in files)
    try:
        with open_dump(",".join(map(str, folders))) as dump:
            scored = dump.tokens["logprob"][dump.tokens["response"].astype(bool)]
            return held | {
                "sequences": len(dump.sequences),
                "logprobs": int(np.isfinite(scored).sum()),
                "tensors": len(dump.tensors),
                "rows": max((t.rows for t in dump.tensors.values() if t.has_rows), default=0),
                "weights": len(dump.weights),
                "complete": dump.complete,
                "lost": dump.lost,
                "budget": dump.manifest.get("budget") or {},
                "engine": dump.engine,
                "task": dump.manifest.get("task"),
            }
    except ProbeError as error:
        return held | {"error": str(error)}


def print_job(data: dict[str, Any]) -> None:
    """Print what :func:`describe_job` returned."""
    common.say(f"{data['path']}: a job of {common.count(len(data['left_out']), 'stage')}", "bold")
    common.table("stages and steps", COLUMNS, [_row(entry) for entry in data["stages"]])
    for stage, count in data["left_out"].items():
        if count:
            common.say(f"... and {common.count(count, 'more step')} of {stage} (--all shows them)", "dim")
    for entry in data["stages"]:
        for problem in [*entry.get("lost", ()), *([entry["error"]] if "error" in entry else [])]:
            common.say(f"{entry['stage']} step {entry['step']}: {problem}", "yellow")
    budgets = {f"{e['stage']}: {_budget(e['budget'])}": None for e in data["stages"] if e.get("budget")}
    for line in budgets:
        common.say(f"budget of {line}")
    for entry in data[HOOKED]:
        common.say(f"hooked {entry['text']} in {_processes(entry)}", "dim")
    for entry in data[TROUBLE]:
        common.say(f"{entry['text']} ({_processes(entry)})", "yellow")
    common.say("")
    common.say(f"next: {_next(data)}")


def _row(entry: dict[str, Any]) -> tuple[Any, ...]:
    names = ("sequences", "logprobs", "tensors", "rows", "weights")
    state = "unreadable" if "error" in entry else "" if entry["complete"] else "incomplete"
    counts = (entry.get(name, "-") for name in names)
    return entry["stage"], entry["step"], entry["files"], *counts, common.size(entry["bytes"]), state


def _processes(entry: dict[str, Any]) -> str:
    return "1 process" if entry["processes"] == 1 else f"{entry['processes']} processes"


def _budget(budget: dict[str, Any]) -> str:
    words = {"seqs": "sequences", "rows": "rows of each", "layers": "layers", "max_bytes": "bytes per file"}
    said = [f"{budget[name]} {word}" for name, word in words.items() if name in budget]
    dropped = budget.get("dropped_rows")
    return ", ".join([*said, *([f"{dropped} rows dropped"] if dropped else [])])


def _next(data: dict[str, Any]) -> str:
    """Return the comparison of the first step that two stages share, else a look at the first stage."""
    steps: dict[str, set[int]] = collections.defaultdict(set)
    for entry in data["stages"]:
        steps[entry["stage"]] |= set() if "error" in entry else {entry["step"]}
    comparison = compare_command(data["path"], steps)
    if comparison is not None:
        return comparison
    first = roots_of(data["path"])[0] / data["stages"][0]["stage"]
    return f"probe show {shlex.quote(str(first))}"
