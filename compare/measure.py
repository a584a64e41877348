"""Measure every matched tensor once: read, join rows, accumulate, judge. Memory holds one tensor of each side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from probe.compare.align import RowAligner, RowJoin
from probe.compare.judge import Judgement, effective_dtype, judge, modelled_floor
from probe.compare.match import Match, Matching, Side
from probe.compare.merge import CanonicalReader
from probe.errors import ProbeError
from probe.metrics import BLOCK_VALUES, PairMeasure, PairMetrics, coarser_dtype

Observer = Callable[[str, int, int], None]
"""Called with (what is being done, steps done, steps in all)."""


@dataclass
class Measured:
    """One matched tensor: its figures, its verdict, and where its joined rows came from.

    ``metrics`` and ``join`` are None where the two sides cannot be compared; ``judgement.reason`` says why.
    """

    match: Match
    order: int
    judgement: Judgement
    metrics: PairMetrics | None = None
    join: RowJoin | None = None


@dataclass
class Measurer:
    """Measure the matched tensors of two sides."""

    a: Side
    b: Side
    aligner: RowAligner
    observer: Observer | None = None
    joins: list[RowJoin] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._readers = CanonicalReader(self.a), CanonicalReader(self.b)
        sizes = (size for side in (self.a, self.b) for size in (side.shape.hidden, side.shape.intermediate))
        self._level = 1.0
        self._reduction = max(sizes, default=0)
        self._model_dtypes = tuple(str(side.dump.manifest.get("dtype", "")) for side in (self.a, self.b))

    def run(self, matching: Matching) -> list[Measured]:
        """Return one entry per matched tensor, in execution order."""
        results = []
        for order, match in enumerate(matching.matched):
            if self.observer:
                self.observer("measuring", order, len(matching.matched))
            try:
                results.append(self._one(match, order))
            except ProbeError as error:  # a tensor that cannot be merged is reported, the others go on
                results.append(_incomparable(match, order, str(error)))
        return results

    def _one(self, match: Match, order: int) -> Measured:
        reader_a, reader_b = self._readers
        join = self.aligner.rows(reader_a.rows(match.source_a), reader_b.rows(match.source_b))
        self.joins.append(join)
        if not len(join.index_a):
            return _incomparable(match, order, "no row of it was stored on both sides")
        x, y = reader_a.read(match.source_a), reader_b.read(match.source_b)
        if x.shape[1:] != y.shape[1:]:
            problem = f"the sides hold {x.shape[1]} and {y.shape[1]} features per row"
            return _incomparable(match, order, problem)
        dtypes = self.a.dtype_of(match.source_a), self.b.dtype_of(match.source_b)
        metrics = measure_rows(x, y, join, coarser_dtype(*dtypes))
        floor = modelled_floor(effective_dtype(*dtypes, *self._model_dtypes), match.place.ops, self._reduction)
        judgement = judge(metrics, floor, self._level)
        if judgement.verdict != "divergent":
            self._level = max(self._level, judgement.evidence)
        return Measured(match, order, judgement, metrics, join)


def measure_rows(x: np.ndarray, y: np.ndarray, join: RowJoin, ulp_dtype: str) -> PairMetrics:
    """Return the figures of the joined rows of two tensors [rows, features], gathered block by block."""
    measure = PairMeasure(len(join.index_a), ulp_dtype)
    step = max(1, BLOCK_VALUES // max(1, x.shape[1]))
    for start in range(0, len(join.index_a), step):
        rows = slice(start, start + step)
        measure.update(x[join.index_a[rows]], y[join.index_b[rows]], start)
    return measure.result()


def _incomparable(match: Match, order: int, reason: str) -> Measured:
    return Measured(match, order, Judgement("incomparable", float("nan"), float("nan"), reason=reason))
