"""The figures of tensor pairs: rows read, joined and added up block by block, several tensors at the same time.

Memory holds a block of each side per thread, whatever a tensor's size.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Lock

import numpy as np

from probe import kernels
from probe.compare.align import RowAligner, RowJoin
from probe.compare.match import Match
from probe.compare.merge import CanonicalReader
from probe.compare.names.canonical import is_routing
from probe.errors import CompareError
from probe.metrics import BLOCK_VALUES, PairMeasure, PairMetrics, coarser_dtype
from probe.store.dtypes import widen
from probe.store.tensors import is_run

Observer = Callable[[str, int, int], None]
"""Called with (what is being done, steps done, steps in all)."""

Rows = Callable[[np.ndarray], tuple[np.ndarray, str]]
"""Called with row numbers; returns the rows [n, features], and the dtype whose bits they are where they are bits."""

COMPILING = "compiling the measuring loops, once per machine"

WORTH_A_THREAD = 1 << 20
"""Values of a tensor, on average, from which threads pay: below, the parts that hold Python's lock decide."""


class FeaturesDifferError(CompareError):
    """The two tensors of a pair hold rows of different lengths."""


@dataclass(frozen=True)
class Figures:
    """The joined rows of a tensor pair and what was measured on them; ``metrics`` is None where nothing was.

    ``problem``: why the joined rows could not be compared.
    """

    join: RowJoin
    metrics: PairMetrics | None = None
    problem: str = ""


@dataclass
class FigureMaker:
    """Make the figures of the matched tensors of two sides; ``jobs``: threads, 0 for one per core."""

    readers: tuple[CanonicalReader, CanonicalReader]
    aligner: RowAligner
    jobs: int = 0
    observer: Observer | None = None

    def __post_init__(self) -> None:
        self._joining = Lock()

    @contextmanager
    def each(self, matches: Sequence[Match]) -> Iterator[list[Callable[[], Figures]]]:
        """Yield for each tensor a function that returns its figures, or raises what went wrong.

        With threads they are made meanwhile, in order; else when the function is called.
        """
        work = [partial(self.make, match) for match in matches]
        values = sum(map(self._values, matches))
        if values >= kernels.WORTH_LOADING:
            kernels.load(sorted(set(map(self._kind, matches))), self._say)
        jobs = self.jobs or len(os.sched_getaffinity(0))
        if jobs < 2 or len(work) < 2 or values < WORTH_A_THREAD * len(work):
            yield list(work)
            return
        with ThreadPoolExecutor(jobs, "probe-figures") as pool:
            futures = [pool.submit(call) for call in work]
            try:
                yield [future.result for future in futures]
            finally:
                for future in futures:
                    future.cancel()

    def make(self, match: Match) -> Figures:
        """Join the rows of a tensor pair and measure it; of routing only the join is made."""
        sources = match.source_a, match.source_b
        with self._joining:  # joins are kept for tensors of equal rows
            join = self.aligner.rows(*(reader.rows(source) for reader, source in zip(self.readers, sources)))
        if is_routing(match.label) or not len(join.index_a):
            return Figures(join)
        try:
            return Figures(join, measure_stored(self.readers, match, join))
        except FeaturesDifferError as error:
            return Figures(join, problem=error.problem)

    def _values(self, match: Match) -> int:
        """Return about how many values of each side a tensor has."""
        sides = zip(self.readers, (match.source_a, match.source_b))
        return min(reader.stored_rows(source) * reader.features(source) for reader, source in sides)

    def _kind(self, match: Match) -> str:
        """Return the kind of values that a tensor's sums are compiled for."""
        dtypes = set(_dtypes(self.readers, match))
        if len(dtypes) == 1 and dtypes <= kernels.CARRIERS.keys():
            return dtypes.pop()
        return "float32" if all(name.startswith(("float32", "bfloat16", "float8")) for name in dtypes) else "float64"

    def _say(self) -> None:
        if self.observer:
            self.observer(COMPILING, 0, 1)


def measure_stored(readers: Sequence[CanonicalReader], match: Match, join: RowJoin) -> PairMetrics:
    """Return the figures of the joined rows of a matched tensor (see :func:`measure_blocks`)."""
    sources = match.source_a, match.source_b
    a, b = (partial(reader.read_bits, source) for reader, source in zip(readers, sources))
    features = max(reader.features(source) for reader, source in zip(readers, sources))
    return measure_blocks(a, b, join, coarser_dtype(*_dtypes(readers, match)), features)


def measure_rows(x: np.ndarray, y: np.ndarray, join: RowJoin, ulp_dtype: str) -> PairMetrics:
    """Return the figures of the joined rows of two tensors [rows, features] in memory."""
    return measure_blocks(partial(_take, x), partial(_take, y), join, ulp_dtype, x.shape[1])


def measure_blocks(a: Rows, b: Rows, join: RowJoin, ulp_dtype: str, features: int) -> PairMetrics:
    """Return the figures of the joined rows of two tensors, read block by block.

    ``features``: how many numbers are read per row. Raises FeaturesDifferError where the two sides' rows are of
    different lengths.
    """
    measure = PairMeasure(len(join.index_a), ulp_dtype)
    step = max(2, BLOCK_VALUES // max(1, features))
    for start in range(0, len(join.index_a), step):
        at = slice(start, start + step)
        (x, bits), (y, other) = a(join.index_a[at]), b(join.index_b[at])
        if x.shape[1:] != y.shape[1:]:
            raise FeaturesDifferError(f"the sides hold {x.shape[1]} and {y.shape[1]} features per row")
        if bits != other:
            x, y = (widen(values, name) if name else values for values, name in ((x, bits), (y, other)))
            bits = ""
        measure.update(x, y, start, bits)
    return measure.result()


def _take(values: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, str]:
    """Return the given rows, without a copy where they are consecutive."""
    return (values[rows[0] : rows[-1] + 1] if is_run(rows) else values[rows]), ""


def _dtypes(readers: Sequence[CanonicalReader], match: Match) -> tuple[str, str]:
    a, b = (reader.side.dtype_of(source) for reader, source in zip(readers, (match.source_a, match.source_b)))
    return a, b
