"""A third dump that goes with one side or with both: read its tensors beside theirs, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from probe.compare.align import RowAligner, RowJoin
from probe.compare.figures import measure_blocks
from probe.compare.match import SAME_NAME
from probe.compare.merge import CanonicalReader
from probe.compare.names.base import Source
from probe.compare.sequences import join_sequences
from probe.compare.side import Side, read_sides
from probe.errors import ProbeError, UsageError
from probe.metrics import PairMetrics
from probe.store.reader import Dump, open_dump


class Twin:
    """The canonical tensors of a third dump, and the rows that it shares with a side's."""

    def __init__(self, side: Side, dump: Dump, what: str) -> None:
        self.dump, self.side = dump, side
        _, self.own = read_sides(side.dump, dump, (side.given, side.given))
        join = join_sequences(side.dump, dump)
        if not join.pairs:
            problem = f"no sequence of {what} {dump.path} is one of {side.dump.path}"
            raise UsageError(problem, "make it from the same tokens (probe dump --from)")
        if (side.shape.hidden, side.shape.layers) != (self.own.shape.hidden, self.own.shape.layers):
            raise UsageError(f"{what} {dump.path} is of another model than {side.dump.path}", "give one of this model")
        self._aligner = RowAligner(join, side.dump.sequences, dump.sequences, across_versions=True)
        self._readers = CanonicalReader(side), CanonicalReader(self.own)

    def source(self, label: str) -> Source | None:
        """Return where the third dump has a canonical tensor."""
        found = self.own.resolution.sources.get(label)
        return None if found is None or found.origin == SAME_NAME else found

    def rows(self, source: Source, label: str) -> RowJoin | None:
        """Return the rows that a tensor of the side (``source``) and the third dump's have in common."""
        own = self.source(label)
        if own is None:
            return None
        join = self._aligner.rows(self._readers[0].rows(source), self._readers[1].rows(own))
        return join if len(join.index_a) else None

    def measure(
        self, source: Source, label: str, join: RowJoin, reader: CanonicalReader | None = None
    ) -> PairMetrics | None:
        """Return the figures of rows ``index_a`` of a side's tensor beside rows ``index_b`` of the third dump's.

        Both are read block by block. ``reader``: that of another side than this one's. None where the rows of the two
        are of different lengths, or a tensor cannot be put together: a third dump may lack parts of it.
        """
        own = self.source(label)
        mine, theirs = reader or self._readers[0], self._readers[1]
        if own is None:
            return None
        features = max(mine.features(source), theirs.features(own))
        try:
            return measure_blocks(
                partial(mine.read_bits, source), partial(theirs.read_bits, own), join, "float32", features
            )
        except UsageError:
            raise
        except ProbeError:
            return None


def moved(metrics: PairMetrics, *, routed: bool) -> float:
    """Return how far apart two runs of the same rows lie (relative L2), NaN without a finite pair.

    Of a model with experts it is the median row's: flips of experts reach other rows far more than rounding does.
    """
    if not metrics.pairs:
        return float("nan")
    return float(np.median(metrics.row_rel_l2)) if routed else metrics.rel_l2


@contextmanager
def opened(path: str | Path, what: str) -> Iterator[Dump]:
    """Open a third dump; ``what`` it is for goes into the error of one that holds no tensor."""
    with open_dump(path) as dump:
        if not dump.tensors:
            raise UsageError(f"{what} {path} holds no tensor", "make it with probe dump")
        if dump.reduced:
            problem = f"{what} {path} holds statistics of rows in place of values (task statistics)"
            raise UsageError(problem, "make it with task tensor")
        yield dump
