"""The figures of tensor pairs: rows read, joined and added up block by block, several tensors at the same time.

Memory holds a block of each side per thread or forked copy, whatever a tensor's size.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

import numpy as np

from probe import kernels
from probe.compare.align import RowAligner, RowJoin
from probe.compare.copies import Pool, can_fork
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

WORTH_A_COPY = 48
"""Tensors per forked copy: a copy costs 10 ms, a tensor 2 ms."""

WORTH_A_THREAD = 1 << 20
"""Values of a tensor, on average, from which threads pay where copies cannot be made: below, the parts that hold
Python's lock decide."""


Measured = tuple[PairMetrics | None, str]
"""Figures, or a sentence that says why there are none."""


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
    """Make the figures of the matched tensors of two sides; ``jobs``: tensors at a time, 0 for one per core."""

    readers: tuple[CanonicalReader, CanonicalReader]
    aligner: RowAligner
    jobs: int = 0
    observer: Observer | None = None

    def __post_init__(self) -> None:
        self._joining = Lock()

    @contextmanager
    def each(self, matches: Sequence[Match]) -> Iterator[list[Callable[[], Figures]]]:
        """Yield for each tensor a function that returns its figures, or raises what went wrong.

        They are made meanwhile, in order, by forked copies or threads where there is work for them; else when the
        function is called.
        """
        values = sum(map(self._values, matches))
        if kinds := self.kinds(matches):
            kernels.load(kinds, self._say)
        jobs = self.jobs or len(os.sched_getaffinity(0))
        copies = min(jobs, len(matches) // WORTH_A_COPY) if can_fork() else 0
        if copies > 1 and (pool := self._pool(matches, copies - 1)):
            with closing(pool):
                yield [partial(self.make, match, partial(pool.result, at)) for at, match in enumerate(matches)]
            return
        work = [partial(self.make, match) for match in matches]
        if jobs < 2 or len(work) < 2 or values < WORTH_A_THREAD * len(work):
            yield list(work)
            return
        with ThreadPoolExecutor(jobs, "probe-figures") as threads:
            futures: list[Future[Figures]] = []
            with suppress(RuntimeError):  # no more threads are to be had: what none has taken is done here
                for call in work:
                    futures.append(threads.submit(call))
            try:
                yield [*(future.result for future in futures), *work[len(futures) :]]
            finally:
                for future in futures:
                    future.cancel()

    def _pool(self, matches: Sequence[Match], copies: int) -> Pool[Measured | None] | None:
        """Return copies that measure tensors, None where no process or no descriptor is to be had."""
        with suppress(OSError):
            return Pool([partial(self.measure, match) for match in matches], copies)
        return None

    def make(self, match: Match, measured: Callable[[], Measured | None] | None = None) -> Figures:
        """Join the rows of a tensor pair and measure it; of routing only the join is made.

        ``measured``: returns what :meth:`measure` does, where that is done elsewhere.
        """
        join = self.joined(match)
        found = (measured or partial(self.measure, match))()
        return Figures(join, *found) if found else Figures(join)

    def measure(self, match: Match) -> Measured | None:
        """Return the figures of a tensor pair, or why its joined rows cannot be compared; None where there is none."""
        join = self.joined(match)
        if is_routing(match.label) or not len(join.index_a):
            return None
        try:
            return measure_stored(self.readers, match, join), ""
        except FeaturesDifferError as error:
            return None, error.problem

    def joined(self, match: Match) -> RowJoin:
        """Join the rows of a tensor pair; joins are kept for tensors of equal rows."""
        sources = match.source_a, match.source_b
        with self._joining:
            return self.aligner.rows(*(reader.rows(source) for reader, source in zip(self.readers, sources)))

    def kinds(self, matches: Sequence[Match]) -> list[str]:
        """Return the kinds of values to load kernels for, none where the tensors are too small to need them."""
        if sum(map(self._values, matches)) < kernels.WORTH_LOADING:
            return []
        return sorted(set(map(self._kind, matches)))

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
    measure = partial(readers[0].measure, match.source_a)
    return measure_blocks(a, b, join, coarser_dtype(*_dtypes(readers, match)), features, measure)


def measure_rows(x: np.ndarray, y: np.ndarray, join: RowJoin, ulp_dtype: str) -> PairMetrics:
    """Return the figures of the joined rows of two tensors [rows, features] in memory."""
    return measure_blocks(partial(_take, x), partial(_take, y), join, ulp_dtype, x.shape[1])


def measure_blocks(
    a: Rows, b: Rows, join: RowJoin, ulp_dtype: str, features: int, measuring: Callable[[int, str], Any] = PairMeasure
) -> PairMetrics:
    """Return the figures of the joined rows of two tensors, read block by block.

    ``features``: how many numbers are read per row; ``measuring``: makes what takes them in, of a number of rows and
    the dtype of ULPs. Raises FeaturesDifferError where the two sides' rows are of different lengths.
    """
    measure = measuring(len(join.index_a), ulp_dtype)
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
    found: PairMetrics = measure.result()
    return found


def _take(values: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, str]:
    """Return the given rows, without a copy where they are consecutive."""
    return (values[rows[0] : rows[-1] + 1] if is_run(rows) else values[rows]), ""


def _dtypes(readers: Sequence[CanonicalReader], match: Match) -> tuple[str, str]:
    a, b = (reader.side.dtype_of(source) for reader, source in zip(readers, (match.source_a, match.source_b)))
    return a, b
