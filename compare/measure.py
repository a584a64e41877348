"""Measure every matched tensor once, and judge them one after another in execution order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from probe.compare.align import RowAligner, RowJoin
from probe.compare.coverage import Recomputed
from probe.compare.figures import (
    FigureMaker,
    Figures,
    Observer,
    measure_blocks,
    measure_stored,
)
from probe.compare.floors.floors import Floors, model_dtypes
from probe.compare.floors.ratio import GoldenRatio
from probe.compare.judge import Floor, Judgement, effective_dtype, judge
from probe.compare.match import Match, Matching
from probe.compare.merge import CanonicalReader
from probe.compare.moe.flips import Routing
from probe.compare.moe.restrict import Levels, Restricted
from probe.compare.names.canonical import is_routing
from probe.compare.side import Side
from probe.errors import ProbeError, UsageError
from probe.metrics import PairMetrics, coarser_dtype, measure_pair


@dataclass
class Measured:
    """One matched tensor: its figures, its verdict, and where its joined rows came from.

    ``metrics`` and ``join`` are None where the two sides cannot be compared; ``judgement.reason`` says why.
    ``restricted``: the figures that decided where flips of experts reached some rows. ``among``: the joined rows (bool)
    of which alone one can be at fault, None for all. ``floor``: what rounding explains; ``golden``: which side is
    nearer to a reference in higher precision, where one was given.
    """

    match: Match
    order: int
    judgement: Judgement
    metrics: PairMetrics | None = None
    join: RowJoin | None = None
    restricted: Restricted | None = None
    among: np.ndarray | None = None
    floor: Floor | None = None
    golden: GoldenRatio | None = None


@dataclass
class Measurer:
    """Measure the matched tensors of two sides; ``maker`` makes their figures, by default threads of this process, from
    what ``reader`` reads."""

    a: Side
    b: Side
    aligner: RowAligner
    matching: Matching
    floors: Floors
    observer: Observer | None = None
    jobs: int = 0
    maker: Callable[..., FigureMaker] = FigureMaker
    reader: type[CanonicalReader] = CanonicalReader
    joins: list[RowJoin] = field(default_factory=list)
    recomputed: tuple[Recomputed, Recomputed] = field(default_factory=lambda: (Recomputed(), Recomputed()))

    def __post_init__(self) -> None:
        self._readers = self.reader(self.a), self.reader(self.b)
        self._levels = Levels()
        self._verdicts: dict[str, str] = {}
        dtype = effective_dtype(*model_dtypes(self.a, self.b))
        self.routing = Routing(self._readers, self.aligner, self.matching, dtype)

    def run(self) -> list[Measured]:
        """Return one entry per matched tensor, in execution order."""
        matches = (*self.matching.matched, *self.matching.routing)
        everything = sorted(matches, key=lambda match: (match.place.rank, match.label))
        results = []
        maker = self.maker(self._readers, self.aligner, self.jobs, self.observer)
        with maker.each(everything) as figures:
            for order, (match, make) in enumerate(zip(everything, figures)):
                if self.observer:
                    self.observer("measuring", order, len(everything))
                try:
                    is_ids = match.label.endswith(":ids")
                    results.append(self._ids(match, order) if is_ids else self._one(match, order, make))
                except UsageError:
                    raise
                except ProbeError as error:  # a tensor that cannot be merged is reported, the others go on
                    results.append(_incomparable(match, order, str(error)))
                self._verdicts[match.label] = results[-1].judgement.verdict
        return results

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

    def _one(self, match: Match, order: int, make: Callable[[], Figures]) -> Measured:
        found = make()
        join, metrics = found.join, found.metrics
        self.joins.append(join)
        if not len(join.index_a):
            return _incomparable(match, order, "no row of it was stored on both sides")
        for side, (reader, source) in enumerate(zip(self._readers, (match.source_a, match.source_b))):
            self.recomputed[side].note(join.table(side), partial(reader.read, source), reader.features(source))
        if is_routing(match.label):
            return self._weights(match, order, join)
        if found.problem:
            stated = match.source_a.stated or match.source_b.stated
            if stated:
                problem = f"{stated} pairs two tensors as {match.label}, but {found.problem}"
                raise UsageError(problem, "correct the entry")
            return _incomparable(match, order, found.problem)
        if metrics is None or (not metrics.pairs and not metrics.nonfinite_mismatch):
            return _incomparable(match, order, "no value of it is finite on either side")
        floor = self.floors.of(match)
        if match.proposal is not None:
            proposed = as_proposed(judge(metrics, floor, self._levels.level))
            return Measured(match, order, proposed, metrics, join, floor=floor)
        return self._judged(match, order, found, floor, lambda part: measure_stored(self._readers, match, part))

    def _weights(self, match: Match, order: int, join: RowJoin) -> Measured:
        """Compare the weights of the experts used, each in its expert's column."""
        layer = match.place.rank[0]
        a, b, experts = self.routing.weights(match)
        dtype = coarser_dtype(self.a.dtype_of(match.source_a), self.b.dtype_of(match.source_b))
        self.routing.note_weights(layer, a, b, experts, join)
        found = Figures(join, measure_blocks(a, b, join, dtype, experts))
        floor = self.floors.of(match).times(self.routing.weights_gain(layer))
        return self._judged(match, order, found, floor, lambda part: measure_blocks(a, b, part, dtype, experts))

    def _judged(
        self, match: Match, order: int, found: Figures, floor: Floor, measure: Callable[[RowJoin], PairMetrics]
    ) -> Measured:
        """Judge a tensor on the rows that flips have left; ``measure`` gives the figures of some of its rows."""
        join, metrics = found.join, found.metrics
        assert metrics is not None

        def on(rows: np.ndarray) -> PairMetrics:
            return measure(replace(join, index_a=join.index_a[rows], index_b=join.index_b[rows]))

        judgement, restricted = self._levels.judge(metrics, floor, self.routing.left(match.place, join), on)
        among = None if restricted is None else restricted.at
        return Measured(match, order, judgement, metrics, join, restricted, among, floor)


def as_proposed(judgement: Judgement) -> Judgement:
    """Return the judgement of a pair that is only proposed: it may be no pair, so at worst it raises a suspicion."""
    if judgement.verdict != "divergent":
        return judgement
    return replace(judgement, verdict="suspect", reason=f"{judgement.reason}; but the pair is only proposed")


def _incomparable(match: Match, order: int, reason: str) -> Measured:
    return Measured(match, order, Judgement("incomparable", float("nan"), float("nan"), reason=reason))
