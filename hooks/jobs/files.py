"""The file of one stage and step of a job: opened with the weight sketches, completed with what the budget left out."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from probe.errors import CaptureError, OutputExistsError
from probe.hooks.attach import Subject, describe, make_adapter, open_writer, sequence_prefix, store_weights
from probe.hooks.budget import chosen_folder, estimate_line, make_budget
from probe.hooks.capture import Capture
from probe.hooks.debugger import global_rank
from probe.hooks.engines.base import EngineAdapter
from probe.hooks.engines.sequences import SequenceBook
from probe.hooks.jobs.log import note, trouble
from probe.hooks.jobs.run import holds_earlier, run_id
from probe.hooks.rows import Announced
from probe.manifest import write_manifest
from probe.settings import TOKENS, Settings
from probe.store.schema import RL, RL_COLUMNS, RL_KEPT, ROW, TOKEN, RowSegment, Versions, WeightSketch
from probe.store.writer import DumpWriter

MOST_FILES = 1000
"""Files of one process in one step, after which something is wrong."""


@dataclass
class StepFile:
    """The open file of one step, and what feeds it; without a capture no tensor of the model is stored."""

    step: int
    writer: DumpWriter
    adapter: Any
    manifest: dict[str, Any]
    capture: Capture | None
    listed: set[int] = field(default_factory=set)
    """Numbers of the sequences whose ids are in the token table."""

    def list_sequence(
        self,
        number: int,
        ids: np.ndarray,
        *,
        returned: Any = None,
        recomputed: Any = None,
        declared: Versions | None = None,
    ) -> None:
        """Add a sequence to the token table: its ids (int64 [n]), and the log-prob of each (float [n] or None).

        ``returned`` are those of the engine, ``recomputed`` those that the logits give; ``declared``: what a trainer
        says of the weights.
        """
        self.listed.add(number)
        sequence = self.adapter.book.sequences[number]
        sequence.length, sequence.declared = max(sequence.length, len(ids)), declared
        self.writer.end_sequence(sequence, ids)
        self.adapter.book.forget_ids(number)
        rows = np.zeros(len(ids), TOKEN)
        rows["sequence"], rows["position"], rows["token"] = number, np.arange(len(ids)), ids
        rows["response"] = rows["position"] >= sequence.prompt_len
        rows["logprob"] = np.nan if returned is None else np.asarray(returned, np.float64)
        rows["logprob_recomputed"] = np.nan if recomputed is None else np.asarray(recomputed, np.float64)
        self.writer.add_tokens(rows)
        budget = self.adapter.budget
        if budget is not None and budget.is_recorded(number):
            budget.selection.note(ids)

    def list_rl(self, about: Announced, column: str, values: np.ndarray) -> None:
        """Store one column of what a trainer knows of a response: float64 [response], from its first token on."""
        known = (*RL_COLUMNS, *RL_KEPT)
        if column not in known:
            raise CaptureError(f"{column!r} is no column of a trainer", f"use {', '.join(known)}")
        first = about.prompt_len or 0
        number = self.adapter.book.number(about, length=first + len(values))
        rows = np.zeros(len(values), ROW)
        rows["sequence"], rows["position"] = number, first + np.arange(len(values))
        rows["token"] = rows["call"] = -1
        self.writer.append(RL, column, values, "float64", RowSegment(rows))

    def complete(self) -> None:
        """Close the file; one that holds nothing but sketches of a whole model, of which nothing ran, is deleted."""
        if not self.writer.tensor_rows and not self.listed and self.manifest["world_size"] == 1:
            self.writer.discard()
            return
        self._settle()
        self.writer.close()

    def _settle(self) -> None:
        """Say what the budget left out, in the log and, where the bytes ran out, in the file."""
        budget = self.adapter.budget
        if budget is None:
            return
        if budget.rows_cut or budget.copies_dropped:
            self.manifest["budget"]["dropped_rows"] = budget.rows_dropped
            self.writer.restate(self.manifest)
        chosen, total = budget.selection.admitted, budget.selection.admitted + budget.selection.refused
        line = f"{self.manifest['stage']} step {self.step}: tensors of {chosen} of {total} sequences,"
        line += f" {budget.rows_kept} rows, {self.writer.stored_bytes / 1e6:.1f} MB"
        if budget.rows_left:
            line += f"; the budget left out {budget.rows_left} rows"
        if budget.rows_cut or budget.copies_dropped:
            line += f"; PROBE_MAX_BYTES left out {budget.rows_cut} of them"
            line += f" and {budget.copies_dropped} tensors of others"
        note(line)


def is_taken(folder: Path, stage: str, step: int) -> bool:
    """Tell whether an earlier run recorded this step into the same folder, which is then left as it is, and say so."""
    taken = holds_earlier(folder / stage / f"step{step}")
    if taken:
        trouble(
            f"{stage}: {folder / stage} holds steps of an earlier run, and these are not recorded again: "
            "use a new PROBE_DUMP_DIR for each run, or delete the old folder"
        )
    return taken


def open_step(
    folder: Path,
    stage: str,
    step: int,
    subject: Subject,
    settings: Settings,
    about: dict[str, Any],
    sketches: Callable[[], Iterable[WeightSketch]] | None,
    on_error: Callable[[Exception], None],
) -> StepFile:
    """Open the file of a step, store the weight sketches, and make the capture that hooks the modules, if any."""
    manifest = describe(subject, stage, settings) | {"run": run_id()} | about
    if settings.task == TOKENS:
        manifest.pop("budget", None)
    else:
        note(estimate_line(manifest))
    runner = subject.runner
    rank = global_rank() if runner is None else int(subject.place.rank)
    writer = _open_writer(folder / stage / f"step{step}", manifest, subject, rank, settings)
    try:
        if settings.task == TOKENS and runner is not None:
            adapter: Any = EngineAdapter(SequenceBook(writer))  # its sequences are told by add_tokens alone
        else:
            adapter = make_adapter(subject.kind, writer, runner, settings)
        adapter.sequence_prefix = sequence_prefix(manifest, rank)
        adapter.chunks = len(subject.chunks)
        if sketches is None:
            store_weights(subject, writer, adapter, settings)
        for weight in sketches() if sketches is not None else ():
            writer.add_weight(weight)
        capture = None
        if settings.task != TOKENS:
            adapter.budget = make_budget(manifest, writer, chosen_folder(folder, step))
            capture = Capture(writer, adapter, settings, on_error=on_error)
        write_manifest(folder, manifest)
    except BaseException:
        writer.discard()
        raise
    return StepFile(step, writer, adapter, manifest, capture)


def _open_writer(folder: Path, manifest: dict[str, Any], subject: Subject, rank: int, settings: Settings) -> DumpWriter:
    """Open a file of a name that no other process of the job takes."""
    host = "".join(c if c.isalnum() else "_" for c in socket.gethostname())
    own = f"{subject.kind.engine}-{host}-{os.getpid()}-rank{rank}"
    names = [own] if subject.runner is not None else [f"rank{rank}", own]
    for name in [*names, *(f"{own}-{number}" for number in range(2, MOST_FILES))]:
        try:
            return open_writer(folder / f"{name}.h5", manifest, settings)
        except OutputExistsError:
            continue
    raise CaptureError(f"{folder} holds too many files of this process", "use a new PROBE_DUMP_DIR for each run")
