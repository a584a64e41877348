"""Measure every matched tensor once: read, join rows, accumulate, judge. Memory holds one tensor of each side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from probe.compare.align import RowAligner, RowJoin
from probe.compare.coverage import Recomputed
from probe.compare.floors.floors import Floors, model_dtypes
from probe.compare.judge import Judgement, effective_dtype, judge
from probe.compare.match import Match, Matching
from probe.compare.merge import CanonicalReader
from probe.compare.moe.flips import Routing
from probe.compare.moe.restrict import Levels, Restricted
from probe.compare.names.canonical import is_routing
from probe.compare.side import Side
from probe.errors import ProbeError, UsageError
from probe.metrics import BLOCK_VALUES, PairMeasure, PairMetrics, coarser_dtype, measure_pair

Observer = Callable[[str, int, int], None]
"""Called with (what is being done, steps done, steps in all)."""


@dataclass
class Measured:
    """One matched tensor: its figures, its verdict, and where its joined rows came from.

    ``metrics`` and ``join`` are None where the two sides cannot be compared; ``judgement.reason`` says why.
    ``restricted``: the figures that decided where flips of experts reached some rows. ``among``: the joined rows (bool)
    of which alone one can be at fault, None for all.
    """

    match: Match
    order: int
    judgement: Judgement
    metrics: PairMetrics | None = None
    join: RowJoin | None = None
    restricted: Restricted | None = None
    among: np.ndarray | None = None


@dataclass
class Measurer:
    """Measure the matched tensors of two sides."""

    a: Side
    b: Side
    aligner: RowAligner
    matching: Matching
    floors: Floors
    observer: Observer | None = None
    joins: list[RowJoin] = field(default_factory=list)
    recomputed: tuple[Recomputed, Recomputed] = field(default_factory=lambda: (Recomputed(), Recomputed()))

    def __post_init__(self) -> None:
        self._readers = CanonicalReader(self.a), CanonicalReader(self.b)
        self._levels = Levels()
        self._verdicts: dict[str, str] = {}
        dtype = effective_dtype(*model_dtypes(self.a, self.b))
        self.routing = Routing(self._readers, self.aligner, self.matching, dtype)

    def run(self) -> list[Measured]:
        """Return one entry per matched tensor, in execution order."""
        matches = (*self.matching.matched, *self.matching.routing)
        everything = sorted(matches, key=lambda match: (match.place.rank, match.label))
        results = []
        for order, match in enumerate(everything):
            if self.observer:
                self.observer("measuring", order, len(everything))
            try:
                results.append(self._ids(match, order) if match.label.endswith(":ids") else self._one(match, order))
            except UsageError:
                raise
            except ProbeError as error:  # a tensor that cannot be merged is reported, the others go on
                results.append(_incomparable(match, order, str(error)))
            self._verdicts[match.label] = results[-1].judgement.verdict
        return results

    def _values(self, match: Match) -> tuple[np.ndarray, np.ndarray]:
        if is_routing(match.label):
            return self.routing.weights(match)
        return self._readers[0].read(match.source_a), self._readers[1].read(match.source_b)

    def left_out(self) -> tuple[int, int]:
        """Return for each side the rows that no matched tensor holds whole: ranks that share them lack parts."""
        counts = []
        for side, name in ((self.a, "source_a"), (self.b, "source_b")):
            natives = [label for match in self.matching.matched for label in getattr(match, name).native]
            counts.append(min((side.dump.tensors[side.natives[label]].left_out for label in natives), default=0))
        return counts[0], counts[1]

    def _ids(self, match: Match, order: int) -> Measured:
        """Compare the experts used as sets: the figures are those of each token's membership, 1 or 0 per expert."""
        layer = match.place.rank[0]
        found = self.routing.look(layer)
        if found is None or not len(found.keys):
            return _incomparable(match, order, "no row of it was stored on both sides")
        self.joins.append(found.join)
        metrics = measure_pair(found.sets_a.astype(np.float32), found.sets_b.astype(np.float32))
        verdict = self._verdicts.get(f"layers.{layer}.mlp.router:output.0", "")
        among = found.unexplained if found.unexplained.any() else None
        judgement = self.routing.judge_ids(layer, verdict)
        return Measured(match, order, judgement, metrics, found.join, among=among)

    def _one(self, match: Match, order: int) -> Measured:
        reader_a, reader_b = self._readers
        join = self.aligner.rows(reader_a.rows(match.source_a), reader_b.rows(match.source_b))
        self.joins.append(join)
        if not len(join.index_a):
            return _incomparable(match, order, "no row of it was stored on both sides")
        x, y = self._values(match)
        for side, values in enumerate((x, y)):
            self.recomputed[side].note(join.table(side), values)
        if x.shape[1:] != y.shape[1:]:
            problem = f"the sides hold {x.shape[1]} and {y.shape[1]} features per row"
            stated = match.source_a.stated or match.source_b.stated
            if stated:
                raise UsageError(f"{stated} pairs two tensors as {match.label}, but {problem}", "correct the entry")
            return _incomparable(match, order, problem)
        dtypes = self.a.dtype_of(match.source_a), self.b.dtype_of(match.source_b)
        metrics = measure_rows(x, y, join, coarser_dtype(*dtypes))
        if not metrics.pairs and not metrics.nonfinite_mismatch:
            return _incomparable(match, order, "no value of it is finite on either side")
        floor = self.floors.of(match).value
        if match.proposal is not None:
            return Measured(match, order, as_proposed(judge(metrics, floor, self._levels.level)), metrics, join)
        if is_routing(match.label):
            self.routing.note_weights(match.place.rank[0], x, y, join)
            floor *= self.routing.weights_gain(match.place.rank[0])

        def on(rows: np.ndarray) -> PairMetrics:
            part = replace(join, index_a=join.index_a[rows], index_b=join.index_b[rows])
            return measure_rows(x, y, part, coarser_dtype(*dtypes))

        judgement, restricted = self._levels.judge(metrics, floor, self.routing.left(match.place, join), on)
        among = None if restricted is None else restricted.at
        return Measured(match, order, judgement, metrics, join, restricted, among)


def as_proposed(judgement: Judgement) -> Judgement:
    """Return the judgement of a pair that is only proposed: it may be no pair, so at worst it raises a suspicion."""
    if judgement.verdict != "divergent":
        return judgement
    return replace(judgement, verdict="suspect", reason=f"{judgement.reason}; but the pair is only proposed")


def measure_rows(x: np.ndarray, y: np.ndarray, join: RowJoin, ulp_dtype: str) -> PairMetrics:
    """Return the figures of the joined rows of two tensors [rows, features], gathered block by block."""
    measure = PairMeasure(len(join.index_a), ulp_dtype)
    step = max(1, BLOCK_VALUES // max(1, x.shape[1]))
    for start in range(0, len(join.index_a), step):
        rows = slice(start, start + step)
        measure.update(_take(x, join.index_a[rows]), _take(y, join.index_b[rows]), start)
    return measure.result()


def _take(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the given rows, without a copy where they are consecutive."""
    first, last = int(rows[0]), int(rows[-1])
    if last - first == len(rows) - 1 and (np.diff(rows) == 1).all():
        return values[first : last + 1]
    return values[rows]


def _incomparable(match: Match, order: int, reason: str) -> Measured:
    return Measured(match, order, Judgement("incomparable", float("nan"), float("nan"), reason=reason))
