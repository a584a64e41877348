"""Small helpers to write dump files by hand in tests of the store."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import numpy as np

from probe.store.schema import ROW, RowSegment, Sequence
from probe.store.writer import DumpWriter

MANIFEST: dict[str, Any] = {"schema": 1, "stage": "rollout", "engine": {"name": "module", "version": "1"}}


def rank_file(folder: Path, rank: int = 0) -> Path:
    """Return where a rank's file of a dump of one stage and step is."""
    return folder / "rollout" / "step0" / f"rank{rank}.h5"


def open_writer(folder: Path, rank: int = 0, sequences: int = 1, **sizes: int) -> DumpWriter:
    """Return a writer of a rank's file that knows ``sequences`` sequences."""
    writer = DumpWriter(rank_file(folder, rank), MANIFEST, **sizes)
    for number in range(sequences):
        writer.add_sequence(Sequence(0, uid=f"s{number}", prompt_len=2, length=4))
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
