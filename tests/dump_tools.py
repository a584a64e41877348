"""Small helpers to write dump files by hand in tests of the store."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from probe.errors import DumpError
from probe.store.reader import open_dump
from probe.store.schema import AXES, ROW, RowSegment, Sequence
from probe.store.writer import DumpWriter

MANIFEST: dict[str, Any] = {"schema": 1, "stage": "rollout", "engine": {"name": "module", "version": "1"}}
# Opening and reading the dumps below takes some milliseconds; the bounds are loose enough for a busy machine and far
# below what following the forgery would cost (gigabytes).
MAX_SECONDS, MAX_BYTES = 20.0, 64 << 20


def rank_file(folder: Path, rank: int = 0) -> Path:
    """Return where a rank's file of a dump of one stage and step is."""
    return folder / "rollout" / "step0" / f"rank{rank}.h5"


def open_writer(folder: Path, rank: int = 0, sequences: int = 1, **sizes: int) -> DumpWriter:
    """Return a writer of a rank's file that knows ``sequences`` sequences."""
    writer = DumpWriter(rank_file(folder, rank), MANIFEST, **sizes)
    for number in range(sequences):
        writer.add_sequence(Sequence(0, uid=f"s{number}", prompt_len=2, length=4))
    return writer


def open_rank(
    folder: Path,
    sequences: SequenceOf[Sequence] | None = None,
    *,
    sizes: dict[str, int] | None = None,
    at: dict[str, int] | None = None,
    manifest: dict[str, Any] | None = None,
    **settings: int,
) -> DumpWriter:
    """Return a writer of one rank's file: ``sizes`` and ``at`` give the axes of the topology that are not 1 and 0."""
    sizes, at = {**dict.fromkeys(AXES, 1), **(sizes or {})}, {**dict.fromkeys(AXES, 0), **(at or {})}
    number = 0
    for axis in AXES:
        number = number * sizes[axis] + at[axis]
    about = {**MANIFEST, "topology": {**sizes, "vpp": 1, "sp": False}, "coordinates": at, **(manifest or {})}
    writer = DumpWriter(rank_file(folder, number), about, **settings)
    for sequence in [Sequence(0, uid="s0", prompt_len=2, length=4)] if sequences is None else sequences:
        writer.add_sequence(replace(sequence))
    return writer


def segment(count: int, *, sequence: int = 0, start: int = 0, call: int = 0) -> RowSegment:
    """Return the rows of ``count`` successive positions of one sequence; the token of a position is the position."""
    rows = np.zeros(count, ROW)
    rows["sequence"], rows["call"] = sequence, call
    rows["position"] = rows["token"] = start + np.arange(count)
    return RowSegment(rows)


def whole(call: int = 0) -> RowSegment:
    """Return the row of a tensor without token axis."""
    return RowSegment(np.array([(-1, -1, -1, call)], ROW))


def write_dump(
    folder: Path, tensors: SequenceOf[tuple[str, str, np.ndarray, str]] | None = None, *, sequences: int = 1
) -> Path:
    """Write a complete dump of a few tensors of sequence 0 and return its folder."""
    tensors = tensors or [("layers.0.mlp", "output.0", np.arange(32, dtype=np.float32).reshape(4, 8), "float32")]
    writer = open_writer(folder, sequences=sequences)
    rows = segment(len(tensors[0][2]))
    for module, slot, array, dtype in tensors:
        writer.append(module, slot, array, dtype, rows if len(array) == len(rows.rows) else segment(len(array)))
    writer.close()
    return folder / "rollout"


def read_everything(folder: Path) -> None:
    """Touch all that a dump holds."""
    with open_dump(folder) as dump:
        for module, slot in dump.tensors:
            dump.read(module, slot)
            for values, rows in dump.iter_blocks(module, slot):
                assert len(values) == len(rows)
            dump.rows(module, slot)


def refusal(folder: Path) -> str:
    """Return the sentence with which a dump is refused, within bounded time and memory."""
    start = time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(DumpError) as caught:
            read_everything(folder)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.monotonic() - start < MAX_SECONDS and peak < MAX_BYTES
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence.endswith(".") and str(folder.parent) in sentence
    assert caught.value.__cause__ is None
    return sentence
