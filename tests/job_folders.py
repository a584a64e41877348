"""Folders as a job under DUMP_ON=1 leaves them, made of synthetic dumps: JOB/STAGE/stepN."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from synthetic_dumps import Scenario, actor, manifest_of, prompts, write_dump

from probe.compare.report import model as report_model
from probe.compare.run import compare_dumps
from probe.store.reader import open_dump
from probe.store.schema import INDEX, RL, ROW, TOKEN, VERSION, RowSegment, Sequence
from probe.store.writer import DumpWriter

Prompts = list[tuple[str, np.ndarray, int]]


def write_stage(job: Path, scenario: Scenario, step: int = 0, sequences: Prompts | None = None) -> Path:
    """Write one stage and step of a job and return its folder."""
    made = write_dump(job.parent / f"{job.name}-new", scenario, sequences) / scenario.stage / "step0"
    folder = job / scenario.stage / f"step{step}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    made.rename(folder)
    return folder


def write_job(job: Path, steps: tuple[int, ...] = (0,), *, sequences: Prompts | None = None, **changes: Any) -> Path:
    """Write a job whose rollout and log-prob pass agree; ``changes`` are of the log-prob pass's scenario."""
    for step in steps:
        write_stage(job, Scenario(), step, sequences)
        write_stage(job, actor(**{"stage": "logprob", "engine_logprobs": True, **changes}), step, sequences)
    return job


def write_update(job: Path, columns: Mapping[str, float], step: int = 0, sequences: Prompts | None = None) -> Path:
    """Write an update stage that knows ``columns`` of every response token: column -> the value of the first token.

    The value grows by one with every position; sequences come in another order than elsewhere, as batches do.
    """
    scenario = replace(actor(), stage="update")
    path = job / "update" / f"step{step}" / "rank0.h5"
    writer = DumpWriter(path, manifest_of(scenario, "megatron"))
    for uid, ids, prompt_len in reversed(prompts() if sequences is None else sequences):
        number = writer.add_sequence(Sequence(0, uid, prompt_len=prompt_len, length=len(ids), tokens=ids))
        at = np.arange(prompt_len, len(ids))
        writer.add_tokens(np.array([(number, p, t, p >= prompt_len, np.nan, np.nan) for p, t in enumerate(ids)], TOKEN))
        segment = RowSegment(np.array([(number, p, ids[p], 0) for p in at], ROW))
        for column, first in columns.items():
            writer.append(RL, column, np.arange(first, first + len(at), dtype=np.float32), "float32", segment)
    writer.close()
    return path.parent


def without_tensors(folder: Path, task: str = "tokens") -> None:
    """Take the tensors out of a step's files: what PROBE_TASK=tokens leaves; with task "tensor" they were lost."""
    for path in folder.glob("*.h5"):
        with h5py.File(path, "r+") as file:
            manifest = json.loads(file["manifest"][()]) | {"task": task}
            del file["index"], file["manifest"]
            file.create_dataset("index", data=np.zeros(0, INDEX))
            file.create_dataset("manifest", data=json.dumps(manifest), dtype=h5py.string_dtype())


def with_budget(folder: Path, keep: Any = None, version: int = 0, **budget: Any) -> None:
    """Let a step's files state a budget and hold only the rows that ``keep(sequence, position)`` takes.

    ``version``: the weight version of its sequences.
    """
    with open_dump(folder) as dump:
        tensors = {key: (dump.read_raw(*key), dump.rows(*key), dump.tensors[key].dtype) for key in dump.tensors}
        sequences = [replace(s, weight_version=version) for s in dump.sequences]
        tokens, weights, modules = dump.tokens.copy(), dump.weights, dump.modules
        manifest = dump.manifest | {"budget": budget}
    for path in folder.glob("*.h5"):
        path.unlink()
    writer = DumpWriter(folder / "rank0.h5", manifest)
    for sequence in sequences:
        writer.add_sequence(sequence)
    for module in modules.values():
        writer.add_module(module)
    for weight in weights.values():
        writer.add_weight(weight)
    writer.add_tokens(tokens)
    for key, (values, rows, dtype) in tensors.items():
        wanted = np.array([keep is None or keep(int(r["sequence"]), int(r["position"])) for r in rows], bool)
        writer.append(*key, values[wanted], dtype, RowSegment(rows[wanted]))
    writer.close()


def with_versions(
    folder: Path, declared: Mapping[int, tuple[int, int, int]], counted: Mapping[int, int] | None = None
) -> None:
    """Let a step's file hold, by the number of a sequence, what a trainer declares of it: (first, last, trained).

    ``counted``: the weight versions that an engine counted.
    """
    (path,) = folder.glob("*.h5")
    with h5py.File(path, "r+") as file:
        rows = np.array([(number, *versions) for number, versions in declared.items()], VERSION)
        sequences = file["sequences"][...]
        for number, version in (counted or {}).items():
            sequences["weight_version"][number] = version
        del file["versions"]
        file.create_dataset("versions", data=rows)
        file["sequences"][...] = sequences


def ranks(rank: int) -> dict[str, Any]:
    """Return what the manifest of one of two data-parallel ranks says of its place."""
    at = dict.fromkeys(("tp", "pp", "cp", "ep"), 0) | {"dp": rank}
    return {"topology": dict.fromkeys(("tp", "pp", "cp", "ep"), 1) | {"dp": 2}, "coordinates": at, "world_size": 2}


def compared(*paths: Any, **options: Any) -> dict[str, Any]:
    """Return a report that is valid and can be printed."""
    report = compare_dumps(*paths, replay=False, **options)
    report_model.validate(report)
    json.dumps(report, allow_nan=False)
    return report
