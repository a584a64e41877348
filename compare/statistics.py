"""Compare dumps of which one holds statistics of its rows (task ``statistics``) in place of their values.

Each statistic bounds the difference of two rows x and y of n features from below, whatever their order:

* | |x| - |y| | <= |x - y| (the triangle inequality);
* |sum x - sum y| <= sqrt(n) |x - y| (Cauchy and Schwarz);
* |max x - max y| <= max |x - y| <= |x - y|, and so for the smallest.

The largest of them over |y| is what a row's relative L2 is at least. A tensor that exceeds its band therefore diverges;
of one that does not, statistics may see a part of the difference only: a permutation of features leaves them as they
are, and of a difference that is at random they see about 1 / sqrt(n) in each row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from probe.compare.figures import FeaturesDifferError
from probe.compare.match import Entry, Match, Matching
from probe.compare.merge import CanonicalReader, without_copies
from probe.compare.names.base import Source, key_of
from probe.compare.names.canonical import layer_of
from probe.compare.side import Side
from probe.errors import UsageError
from probe.metrics import PairMetrics, relative, relative_each
from probe.store.reader import Dump
from probe.store.schema import COLUMNS, PARTIAL
from probe.store.statistics import COUNT, INF, LARGEST, NAN, NORM, SMALLEST, SUM, WIDTH, merged, statistics_of

FUSED = ("split_qkv", "split_qkv_groups", "split_gate_up", "split_q_a_kv_a")
"""Operations whose parts are all the features of one native tensor: compared together, as the one tensor they are."""
ROUNDOFF = WIDTH
"""Column that a reader adds to statistics: the unit roundoff of the dtype in which they were accumulated."""

SUMMED = "it is a sum of tensors, and the statistics of the terms do not say those of the sum"
TERMS = "tensor-parallel ranks hold terms of a sum, whose statistics do not say those of the sum"
PARTS = "it is a part of a fused tensor of which only statistics are stored, and not every other part is on both sides"
COPIES = "ranks hold copies of the same heads, which statistics of the fused tensor do not tell from the others"
PADDED = "its statistics count padding of the vocabulary, which the other side lacks"
COMPUTED = "it follows from values, of which only statistics are stored"


@dataclass(frozen=True)
class ByStatistics(Source):
    """A source that is compared by the statistics of its rows: ``parts`` of them side by side."""

    parts: tuple[Source, ...] = ()


def _joined(parts: Sequence[Source]) -> ByStatistics:
    native = tuple(dict.fromkeys(label for part in parts for label in part.native))
    parameters = tuple(dict.fromkeys(name for part in parts for name in part.parameters))
    first = parts[0]
    operation = first.operation if len(parts) == 1 else "whole"
    return ByStatistics(native, operation, first.part, parameters, first.origin, first.stated, tuple(parts))


class StatisticsReader(CanonicalReader):
    """Read what :func:`by_statistics` has chosen as statistics, [rows, WIDTH + 1] with :data:`ROUNDOFF`.

    They are those stored, or follow from the values that are; everything else is read as it is.
    """

    def read_bits(self, source: Source, rows: np.ndarray | None = None) -> tuple[np.ndarray, str]:
        """Return what :class:`CanonicalReader` does, of a :class:`ByStatistics` its statistics as float64."""
        if not isinstance(source, ByStatistics):
            return super().read_bits(source, rows)
        found = [self._statistics(part, rows) for part in source.parts]
        roundoff = np.full((len(found[0][0]), 1), max(roundoff for _, roundoff in found))
        return np.hstack([merged([statistics for statistics, _ in found]), roundoff]), ""

    def _statistics(self, source: Source, rows: np.ndarray | None) -> tuple[np.ndarray, float]:
        """Return statistics, float64 [rows, WIDTH], and the unit roundoff with which they were accumulated."""
        if not _is_reduced(self.side, source):
            return statistics_of(self.read(source, rows)), float(np.finfo(np.float64).eps / 2)
        shards = self.side.dump.read_statistics(*self.side.natives[source.native[0]], rows)
        kept = without_copies(shards, self.side.shape) if source.operation == "kv_heads" else shards
        return merged([shard.astype(np.float64) for shard in kept]), float(np.finfo(shards[0].dtype).eps / 2)

    def features(self, source: Source) -> int:
        """Return how many numbers of a row are read for a source, at most."""
        if not isinstance(source, ByStatistics):
            return super().features(source)
        held = [
            1 if _is_reduced(self.side, part) else super(StatisticsReader, self).features(part) for part in source.parts
        ]
        return max(WIDTH + 1, *held)

    def measure(self, source: Source, rows: int, ulp_dtype: str) -> Any:
        """Return what takes the rows of a pair in and gives its figures."""
        if isinstance(source, ByStatistics):
            return BoundMeasure(rows, ulp_dtype)
        return super().measure(source, rows, ulp_dtype)


# -- which tensors ----------------------------------------------------------------------------------------------------


def by_statistics(a: Side, b: Side, matching: Matching) -> Matching:
    """Return the pairs that can be compared where statistics stand in for values; the others become unavailable.

    Pairs of which both sides hold values stay as they are. The parts of a fused tensor of which statistics are stored
    become one pair, under a name that joins theirs.
    """
    found = replace(matching, matched=[], routing=[], unavailable=list(matching.unavailable))
    fused: dict[tuple[int, str], list[Match]] = {}
    for match in (_with_whole_stream(match, a, b) for match in matching.matched):
        sources = (a, match.source_a), (b, match.source_b)
        group = next(
            ((n, source.native[0]) for n, (side, source) in enumerate(sources) if _is_fused(side, source)), None
        )
        if group is not None:
            fused.setdefault(group, []).append(match)
        elif not any(_is_reduced(side, source) for side, source in sources):
            found.matched.append(match)
        else:
            _add([match], [match.source_a], [match.source_b], (a, b), found)
    for (number, native), matches in fused.items():
        _add_fused(matches, number, native, (a, b), found)
    by_value = {match.label for match in found.matched if not isinstance(match.source_a, ByStatistics)}
    for match in matching.routing:
        logits = f"{key_of(match.label)[0]}:output.0"
        readable = not _is_reduced(a, match.source_a) and not _is_reduced(b, match.source_b)
        if readable and (logits in by_value or logits not in {m.label for m in matching.matched}):
            found.routing.append(match)
        else:
            found.unavailable.append(Entry(match.label, COMPUTED, "a" if _is_reduced(a, match.source_a) else "b"))
    found.matched.sort(key=lambda match: (match.place.rank, match.label))
    return found


def refuse_options(dump: Dump, **options: Any) -> None:
    """Raise UsageError for an option that needs values, of which a dump holds statistics only."""
    given = next((name for name, value in options.items() if value is not None), None)
    if given is not None:
        problem = f"--{given} compares values, and {dump.path} holds statistics of rows (task statistics)"
        raise UsageError(problem, f"leave --{given} out, or record with task tensor")


def _is_reduced(side: Side, source: Source) -> bool:
    return any(side.dump.tensors[side.natives[label]].reduced for label in source.native)


def _is_fused(side: Side, source: Source) -> bool:
    return source.operation in FUSED and _is_reduced(side, source)


def _add(
    matches: list[Match], parts_a: list[Source], parts_b: list[Source], sides: tuple[Side, Side], found: Matching
) -> None:
    """Add the pair that matches make up side by side, or each of them with the reason why there is none."""
    reasons = [(name, _why_not(side, parts)) for name, side, parts in zip("ab", sides, (parts_a, parts_b))]
    name, reason = next((entry for entry in reasons if entry[1]), ("", ""))
    if reason:
        found.unavailable += [Entry(match.label, reason, name) for match in matches]
        return
    first = matches[0]
    label = first.label if len(matches) == 1 else _joined_label([match.label for match in matches])
    found.matched.append(replace(first, label=label, source_a=_joined(parts_a), source_b=_joined(parts_b)))


def _add_fused(matches: list[Match], number: int, native: str, sides: tuple[Side, Side], found: Matching) -> None:
    """Add the parts of a fused tensor as one pair; ``number``: of the side that holds its statistics."""
    matches = sorted(matches, key=lambda match: _source(match, number).part)
    wanted = _parts_of(sides[number], native)
    complete = len(matches) == len(wanted)
    parts = [[_source(match, n) for match in matches] for n in (0, 1)]
    for n, side in enumerate(sides):
        alone = {source.native for source in parts[n]}
        if (
            complete
            and len(alone) == 1
            and _is_fused(side, parts[n][0])
            and len(_parts_of(side, parts[n][0].native[0])) == len(matches)
        ):
            copied = parts[n][0].operation == "split_qkv" and _holds_copies(side, parts[n][0])
            parts[n] = parts[n] if copied else [replace(parts[n][0], operation="whole", part=0)]
    _add(matches, parts[0], parts[1], sides, found)


def _source(match: Match, number: int) -> Source:
    return match.source_b if number else match.source_a


def _parts_of(side: Side, native: str) -> list[str]:
    """Return the canonical labels that are parts of a fused native tensor."""
    sources = side.resolution.sources.items()
    return [label for label, source in sources if source.native == (native,) and source.operation in FUSED]


def _holds_copies(side: Side, source: Source) -> bool:
    info = side.dump.tensors[side.natives[source.native[0]]]
    return info.shard == COLUMNS and 0 < side.shape.kv_heads < info.ranks


def _joined_label(labels: list[str]) -> str:
    """Return one label for several of one parent and slot: ``layers.0.mlp.gate_proj+up_proj:output.0``."""
    keys = [key_of(label) for label in labels]
    parent = keys[0][0].rpartition(".")[0]
    return f"{parent}.{'+'.join(module.rpartition('.')[2] for module, _ in keys)}:{keys[0][1]}"


def _why_not(side: Side, parts: list[Source]) -> str:
    """Return why the statistics of sources side by side are not known, empty where they are."""
    return next((reason for reason in (_unknown(side, source) for source in parts) if reason), "")


def _unknown(side: Side, source: Source) -> str:
    if not _is_reduced(side, source):
        return ""
    if source.operation in FUSED:
        return COPIES if source.operation == "split_qkv" and _holds_copies(side, source) else PARTS
    info = side.dump.tensors[side.natives[source.native[0]]]
    if source.operation == "sum":
        return SUMMED
    if source.operation not in ("whole", "kv_heads", "cut_vocabulary"):
        return COMPUTED
    if info.shard == PARTIAL and info.ranks > 1:
        return TERMS
    padded = source.operation == "cut_vocabulary" and side.shape.vocab not in (0, math.prod(info.feature_shape))
    return PADDED if padded else ""


def _with_whole_stream(match: Match, a: Side, b: Side) -> Match:
    """Return a match with the sum of the residual stream where a side stored it beside the two terms.

    vLLM's layers return their MLP's output and the residual apart; the norm behind adds them up and returns the sum.
    """
    found = [_whole_stream(side, source) for side, source in ((a, match.source_a), (b, match.source_b))]
    return replace(match, source_a=found[0], source_b=found[1])


def _whole_stream(side: Side, source: Source) -> Source:
    layer = layer_of(source.native[0])
    if source.operation != "sum" or layer is None or not _is_reduced(side, source):
        return source
    behind = "norm" if layer + 1 == side.shape.layers else f"layers.{layer + 1}.input_layernorm"
    label, terms = f"{behind}:output.1", tuple(f"layers.{layer}:output.{n}" for n in (0, 1))
    if source.native != terms or label not in side.natives:
        return source
    return replace(source, native=(label,), operation="whole", part=0)


# -- figures ----------------------------------------------------------------------------------------------------------


class BoundMeasure:
    """Take in the statistics of two tensors and return lower bounds of their figures (see the module's text).

    The rounding of the statistics themselves is taken off each bound. With g = n u / (1 - n u) for n features and unit
    roundoff u a sum is off by g sum |x| <= g sqrt(n) |x| at most, in any order of its terms (N. Higham, Accuracy and
    Stability of Numerical Algorithms, 2002, section 4.2), and a norm by g |x| / 2, rounded up with four more operations
    (squares, root, two conversions) and what underflows in the squares.
    """

    def __init__(self, rows: int, ulp_dtype: str) -> None:
        self.rows, self.ulp_dtype = rows, ulp_dtype
        self._x, self._y = (np.zeros((rows, WIDTH + 1)) for _ in range(2))

    def update(self, x: np.ndarray, y: np.ndarray, row_offset: int, bits: str = "") -> None:
        """Take statistics [rows, WIDTH + 1] from ``row_offset`` on; raise FeaturesDifferError for rows that differ."""
        other = np.flatnonzero(x[:, COUNT] != y[:, COUNT])
        if len(other):
            sizes = [int(values[other[0], COUNT]) for values in (x, y)]
            raise FeaturesDifferError(f"the sides hold {sizes[0]} and {sizes[1]} features per row")
        at = slice(row_offset, row_offset + len(x))
        self._x[at], self._y[at] = x, y

    def result(self) -> PairMetrics:
        """Return the bounds as figures; those that statistics say nothing of are NaN."""
        x, y, nan = self._x, self._y, float("nan")
        odd = np.abs(x[:, [NAN, INF]] - y[:, [NAN, INF]]).sum(axis=1)
        finite = np.isfinite(x[:, NORM]) & np.isfinite(y[:, NORM])
        bounds = np.where(finite, row_bounds(x, y), 0.0)
        x2, y2 = (np.where(finite, np.square(values[:, NORM]), 0.0) for values in (x, y))
        largest_y2 = np.where(y2 > 0, np.square(y[:, NORM] + _norm_error(y)), 0.0)
        pairs = int(y[finite, COUNT].sum())
        norms = float(np.sqrt(x2.sum())), float(np.sqrt(y2.sum()))
        own = max(float(_relative_error(values[finite]).max(initial=0.0)) for values in (x, y))
        return PairMetrics(
            rows=self.rows,
            pairs=pairs,
            rel_l2=relative(float(np.square(bounds).sum()), float(largest_y2.sum()), float(x2.sum())) if pairs else nan,
            rmse=nan,
            max_abs=nan,
            max_abs_at=(0, 0),
            one_minus_cos=nan,
            norm_ratio=_toward_one(norms[0] / norms[1], 2 * own) if norms[1] else nan,
            norm_x=norms[0],
            norm_y=norms[1],
            ulp_dtype=self.ulp_dtype,
            ulp_p50=nan,
            ulp_p99=nan,
            nan_x=int(x[:, NAN].sum()),
            nan_y=int(y[:, NAN].sum()),
            inf_x=int(x[:, INF].sum()),
            inf_y=int(y[:, INF].sum()),
            nonfinite_mismatch=int(odd.sum()),
            row_rel_l2=relative_each(np.square(bounds), largest_y2, int(y[:, COUNT].max(initial=1))),
            row_mismatch=odd > 0,
            is_bound=True,
        )


def row_bounds(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return what |x - y| of each row is at least, float64 [rows], from statistics [rows, WIDTH + 1] of both sides."""
    root = np.sqrt(np.maximum(y[:, COUNT], 1.0))
    with np.errstate(invalid="ignore", over="ignore"):
        slack = _norm_error(x) + _norm_error(y)
        norms = np.abs(x[:, NORM] - y[:, NORM]) - slack
        sums = np.abs(x[:, SUM] - y[:, SUM]) / root - 2 * slack
        ends = np.abs(x[:, [LARGEST, SMALLEST]] - y[:, [LARGEST, SMALLEST]]).max(axis=1)
        return np.maximum(np.maximum(np.maximum(norms, sums), ends), 0.0)


def _relative_error(statistics: np.ndarray) -> np.ndarray:
    """Return by how much the norm of each row may be off, relative to it."""
    terms = (statistics[:, COUNT] + 4) * statistics[:, ROUNDOFF]
    return np.asarray(terms / (1 - terms) / 2)


def _norm_error(statistics: np.ndarray) -> np.ndarray:
    """Return by how much the norm of each row may be off; squares below the smallest normal number may be lost."""
    tiny = np.where(statistics[:, ROUNDOFF] > 1e-12, np.finfo(np.float32).tiny, np.finfo(np.float64).tiny)
    norm = np.where(np.isfinite(statistics[:, NORM]), statistics[:, NORM], 0.0)
    return np.asarray(_relative_error(statistics) * norm + np.sqrt(statistics[:, COUNT] * tiny))


def _toward_one(ratio: float, error: float) -> float:
    """Return a ratio of norms as far from 1 as its own rounding leaves certain."""
    return 1.0 + math.copysign(max(0.0, abs(ratio - 1.0) - error * max(ratio, 1.0)), ratio - 1.0)
