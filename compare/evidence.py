"""What a comparison found, as the types that its steps hand on: replays, locations, suspects, all of it together."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from probe.compare.coverage import FewerRows, RowCoverage
    from probe.compare.gates import Gate
    from probe.compare.match import Matching
    from probe.compare.measure import Measured
    from probe.compare.sequences import SequenceJoin
    from probe.compare.side import Side
    from probe.compare.tokens.batch import TokenBatch
    from probe.store.reader import Dump

RowKeys = np.ndarray
"""int64 [n, 2]: (sequence number in a dump, position)."""

FINE, SUSPECT, BROKEN, UNMODELLED = "fine", "suspect", "broken", "unmodelled"
"""Words of one replayed module: rounding explains it; not clearly; not at all; both sides agree on something else than
the replay computes, so that the replay does not describe this model."""


@dataclass(frozen=True)
class Explanation:
    """A hypothesis under which a broken module's replay fits: its cause (a slug), what is left of the error in
    roundings, and in words what was assumed (with the fitted number, where one was fitted). ``fits``: all its figures
    are within their bands then, those of the worst row and column too."""

    cause: str
    error: float
    text: str
    value: float | None = None
    fits: bool = False


@dataclass(frozen=True)
class Replayed:
    """One canonical tensor of one side, recomputed in float64 from that side's own stored inputs.

    ``error``: |stored - recomputed| / |recomputed| (relative L2 over ``rows`` rows) in roundings of the output's dtype;
    ``worst_row`` and ``worst_column`` likewise of one row or feature, at ``row`` = (sequence number in the dump,
    position) and ``column``; the three ``*_band`` are what rounding may reach. ``explanations``: best first.
    ``each_row``: the error of every row at ``keys`` (NaN: not recomputed), ``relative_rows``: the same as relative L2,
    of modules that do not fit only. ``toward_zero``: it fits only when results are rounded toward zero.
    """

    label: str
    kind: str
    side: str
    rows: int
    error: float
    band: float
    worst_row: float
    row_band: float
    row: tuple[int, int]
    worst_column: float
    column_band: float
    column: int
    verdict: str = FINE
    explanations: tuple[Explanation, ...] = ()
    reason: str = ""
    toward_zero: bool = False
    keys: RowKeys = field(default_factory=lambda: np.zeros((0, 2), np.int64), repr=False, compare=False)
    each_row: np.ndarray = field(default_factory=lambda: np.zeros(0), repr=False, compare=False)
    relative_rows: np.ndarray = field(default_factory=lambda: np.zeros(0), repr=False, compare=False)

    @property
    def excess(self) -> float:
        """Return how many times its band the module's error reaches, in the worst of its three figures."""
        pairs = ((self.error, self.band), (self.worst_row, self.row_band), (self.worst_column, self.column_band))
        return max(value / band for value, band in pairs)


@dataclass
class Replays:
    """The replays of both sides by canonical label; ``skipped``: label -> why it was not replayed, by side.

    ``weights``: where the parameters came from, in words; ``why_not``: why a side could not be replayed at all.
    """

    by_side: dict[str, dict[str, Replayed]] = field(default_factory=lambda: {"a": {}, "b": {}})
    skipped: dict[str, dict[str, str]] = field(default_factory=lambda: {"a": {}, "b": {}})
    why_not: dict[str, str] = field(default_factory=dict)
    weights: dict[str, str] = field(default_factory=dict)

    def broken(self) -> list[Replayed]:
        """Return the broken modules of both sides."""
        return [found for side in self.by_side.values() for found in side.values() if found.verdict == BROKEN]


@dataclass(frozen=True)
class OwnError:
    """The relative L2 difference of a tensor's inputs (``inherited``) and the part of its own that they do not explain
    (``own``)."""

    inherited: float
    own: float


@dataclass(frozen=True)
class Jump:
    """A tensor at which the error, in noise floors, rises by ``factor`` over the level before it."""

    label: str
    before: float
    after: float
    factor: float


@dataclass(frozen=True)
class BlockDelta:
    """What a residual block adds to the stream (its output less its input) on ``rows`` rows.

    ``rel_l2``: |D_a - D_b| / |D_b|; ``rounding``: the part of it that storing the streams in their dtype explains;
    ``norm_ratio``: |D_a| / |D_b|.
    """

    label: str
    rel_l2: float
    rounding: float
    norm_ratio: float
    rows: int


@dataclass(frozen=True)
class OutlierToken:
    """A token that stands out: its sequence's label, position and id, and the first tensor where it departs."""

    sequence: str
    position: int
    token: int
    label: str
    rel_l2: float
    band: float


@dataclass(frozen=True)
class Departure:
    """The first tensor in which a row leaves the noise band: its canonical label, the row's error (relative L2,
    infinite where a value is finite on one side only) and the band."""

    label: str
    rel_l2: float
    band: float


@dataclass(frozen=True)
class RowPattern:
    """Which rows of a tensor are beyond its band: ``kind`` is one of ``all``, ``one-row``, ``few-rows``,
    ``decode-only``, ``prompt-only``, ``from-position``, ``one-sequence``, ``cached-prefix``; ``figures`` in numbers."""

    kind: str
    rows: int
    of: int
    figures: Mapping[str, float | int | str] = field(default_factory=dict)


@dataclass(frozen=True)
class ChannelPattern:
    """Features of a tensor that carry its error: their numbers (the first 16), how many, and their share of |d|^2."""

    columns: tuple[int, ...]
    count: int
    of: int
    share: float


@dataclass
class Located:
    """Where the divergence is: ``own`` by label, the jumps of the growth curve, and patterns of rows and channels.

    ``growth``: ``jump``, ``drift`` or ``none``; ``deltas``: of the residual blocks, where there is something to locate;
    ``heat``: tokens x layers for the report, as plain data.
    """

    own: dict[str, OwnError] = field(default_factory=dict)
    jumps: list[Jump] = field(default_factory=list)
    growth: str = "none"
    deltas: list[BlockDelta] = field(default_factory=list)
    tokens: list[OutlierToken] = field(default_factory=list)
    rows: dict[str, RowPattern] = field(default_factory=dict)
    channels: dict[str, ChannelPattern] = field(default_factory=dict)
    heat: dict[str, Any] | None = None


@dataclass(frozen=True)
class Suspect:
    """A possible cause. ``name``: the canonical module (or ``config``, ``weights``, ``log-probs``); ``side``: ``a``,
    ``b``, ``both`` or ``unknown``; ``cause``: a slug of docs/diagnosis.md; ``evidence``: sentences with numbers."""

    name: str
    side: str
    cause: str
    confidence: float
    evidence: tuple[str, ...]
    next_check: str
    label: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the report's entry."""
        return asdict(self)


@dataclass
class Evidence:
    """Everything a comparison found; the summary, the diagnosis and the report's sections read it.

    ``options``: what the command line that repeats the comparison needs beside the two dumps; ``operands``: what it
    names instead of their two paths, empty for these; ``token_share``: of the response tokens of both sides those whose
    log-probs were compared, where a side holds no tensor.
    """

    side_a: Side
    side_b: Side
    join: SequenceJoin
    gates: list[Gate]
    matching: Matching
    measured: list[Measured]
    rows: RowCoverage
    fewer: list[FewerRows]
    tokens: dict[str, Any]
    batch: TokenBatch | None
    ppo: dict[str, Any]
    environment: list[dict[str, Any]]
    tensor_share: float
    min_coverage: float
    options: str = ""
    operands: str = ""
    token_share: float | None = None
    replays: Replays = field(default_factory=Replays)
    located: Located = field(default_factory=Located)
    verdict: str = ""
    first: dict[str, Any] | None = None
    suspects: list[Suspect] = field(default_factory=list)
    _by_label: dict[str, Measured] = field(default_factory=dict)

    @property
    def a(self) -> Dump:
        """Return the dump of side a."""
        return self.side_a.dump

    @property
    def b(self) -> Dump:
        """Return the dump of side b."""
        return self.side_b.dump

    @property
    def again(self) -> str:
        """Return the command that repeats the comparison."""
        named = self.operands or " ".join(shlex.quote(str(dump.path)) for dump in (self.a, self.b))
        return f"probe compare {named} {self.options}".rstrip()

    def entry(self, label: str) -> Measured | None:
        """Return the measured tensor of a canonical label."""
        if not self._by_label:
            self._by_label = {entry.match.label: entry for entry in self.measured}
        return self._by_label.get(label)

    def gate(self, name: str) -> Gate:
        """Return a gate by its name."""
        return next(gate for gate in self.gates if gate.name == name)
