"""Sequences and row tables as alignment reads them, without a dump on disk."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from probe.compare.align import RowAligner
from probe.compare.sequences import join_sequences
from probe.store.budget import Budget, budget_of
from probe.store.schema import ROW, Sequence


@dataclass
class Side:
    """The part of a dump that joining sequences reads."""

    sequences: list[Sequence]
    manifest: dict[str, Any] = field(default_factory=dict)

    @property
    def stage(self) -> str:
        """Return the stage that the manifest names."""
        return str(self.manifest.get("stage", ""))

    @property
    def whole_batch(self) -> bool:
        """Tell whether the manifest says that all sequences of a batch are listed."""
        return self.manifest.get("whole_batch") is True

    @property
    def budget(self) -> Budget:
        """Return what the manifest says was left out."""
        return budget_of([self.manifest])


def seq(uid: str, tokens: list[int], prompt_len: int = 2, **more: Any) -> Sequence:
    """Return a sequence of these ids; :func:`side` numbers it."""
    ids = np.array(tokens, np.int64)
    return Sequence(0, uid, prompt_len=prompt_len, length=len(ids), tokens=ids, **more)


def side(*sequences: Sequence, **manifest: Any) -> Any:
    """Return one side of a comparison."""
    for index, sequence in enumerate(sequences):
        sequence.index = index
    return Side(list(sequences), manifest)


def table(cells: list[tuple[int, ...]]) -> np.ndarray:
    """Return a row table of (sequence, position[, call]) cells."""
    return np.array([(cell[0], cell[1], 0, cell[2] if len(cell) > 2 else 0) for cell in cells], ROW)


def aligner_of(a: Any, b: Any, **options: Any) -> RowAligner:
    """Return the aligner of two sides."""
    return RowAligner(join_sequences(a, b), a.sequences, b.sequences, **options)
