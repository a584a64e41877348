"""``probe compare --ray ADDRESS``: the figures of tensor pairs as tasks on a Ray cluster that is already running.

Rows are joined here; each task opens the dumps where it runs and measures one tensor pair. Nodes need this package, and
the dumps under the same paths. Tasks compute what threads do here; only the last digits of sums may differ, where one
process uses the compiled loops and another cannot, or has none loaded because its tensors are small.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from probe import kernels
from probe._version import __version__
from probe.compare.align import NO_ROWS, RowJoin, RowTable
from probe.compare.figures import FeaturesDifferError, FigureMaker, Figures, measure_stored
from probe.compare.mapping import UserMap, read_mapped
from probe.compare.match import Match
from probe.compare.merge import CanonicalReader
from probe.compare.names.canonical import is_routing
from probe.errors import CompareError, ProbeError, UsageError, first_line
from probe.metrics import PairMetrics
from probe.store.reader import Dump, open_files

INSTALL = "pip install 'probe-rl[ray]'"
SAME_EVERYWHERE = "install this version of probe on every node, and let all see the dumps under the same paths"


@dataclass(frozen=True)
class Sides:
    """What a task needs to read both sides of a comparison: files of each dump, the user's names, kernels to load.

    ``key`` names the comparison, so that a worker opens its dumps once.
    """

    key: str
    paths: tuple[Path, Path]
    files: tuple[tuple[Path, ...], tuple[Path, ...]]
    mapping: UserMap | None
    kinds: tuple[str, ...]
    version: str = __version__


@dataclass(frozen=True)
class Failed:
    """A ProbeError on its way back from a task."""

    features: bool
    problem: str
    fix: str


def sides_of(a: Dump, b: Dump, mapping: UserMap | None) -> Sides:
    """Return what the tasks of one comparison are told."""
    files = tuple(file.resolve() for file in a.files), tuple(file.resolve() for file in b.files)
    return Sides(uuid.uuid4().hex, (a.path, b.path), files, mapping, ())


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """Yield the ray module, connected to the cluster at ``address`` (``auto``: the one of this machine).

    A connection that this process has already is used, and stays. Raises UsageError without Ray or without a cluster.
    """
    try:
        import ray
    except ImportError:
        raise UsageError("--ray needs Ray, which is not installed", INSTALL) from None
    if ray.is_initialized():
        yield ray
        return
    try:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        problem = f"no Ray cluster can be reached at {address} ({first_line(error)})"
        raise UsageError(problem, "start one with 'ray start --head', or give its address") from None
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def figure_maker(
    address: str | None, a: Dump, b: Dump, mapping: UserMap | None
) -> Iterator[Callable[..., FigureMaker]]:
    """Yield what makes the figures of tensors: tasks of the cluster at ``address``, without one this process."""
    if address is None:
        yield FigureMaker
        return
    with connected(address) as ray:
        yield partial(RayFigures, ray=ray, sides=sides_of(a, b, mapping))


@dataclass
class RayFigures(FigureMaker):
    """Make the figures of tensors as tasks of a Ray cluster (``ray``: the connected module)."""

    ray: Any = None
    sides: Sides | None = None

    @contextmanager
    def each(self, matches: Sequence[Match]) -> Iterator[list[Callable[[], Figures]]]:
        """Yield for each tensor a function that waits for its figures, or raises what went wrong."""
        assert self.sides is not None
        told = self.ray.put(replace(self.sides, kinds=tuple(self.kinds(matches))))
        self._put: dict[int, Any] = {}
        task = self.ray.remote(num_cpus=1, max_retries=1)(measure_there)
        waiting: list[Any] = []
        try:
            yield [self._started(task, told, match, waiting) for match in matches]
        finally:
            for future in waiting:
                self.ray.cancel(future, force=False)

    def _started(self, task: Any, told: Any, match: Match, waiting: list[Any]) -> Callable[[], Figures]:
        try:
            join = self.joined(match)
        except ProbeError as error:
            return partial(_raise, error)
        if is_routing(match.label) or not len(join.index_a):
            return partial(Figures, join)
        if id(join) not in self._put:
            self._put[id(join)] = self.ray.put((join.index_a, join.index_b))
        future = task.remote(told, match, self._put[id(join)])
        waiting.append(future)
        return partial(self._finished, match, join, future, waiting)

    def _finished(self, match: Match, join: RowJoin, future: Any, waiting: list[Any]) -> Figures:
        try:
            found = self.ray.get(future)
        except self.ray.exceptions.RayError as error:
            why = first_line(getattr(error, "cause", None) or error)
            raise UsageError(f"a Ray worker could not measure {match.label} ({why})", SAME_EVERYWHERE) from None
        waiting.remove(future)
        if isinstance(found, PairMetrics):
            return Figures(join, found)
        if found.features:
            return Figures(join, problem=found.problem)
        raise CompareError(found.problem, found.fix)


def _raise(error: ProbeError) -> Figures:
    raise error


# -- on a worker ------------------------------------------------------------------------------------------------------


def measure_there(told: Sides, match: Match, rows: tuple[np.ndarray, np.ndarray]) -> PairMetrics | Failed:
    """Return the figures of the joined ``rows`` of one tensor pair, or what went wrong."""
    if told.version != __version__:
        raise RuntimeError(f"probe {__version__} here, {told.version} where the comparison runs")
    readers = _readers(told)
    nothing = RowTable(NO_ROWS, NO_ROWS, NO_ROWS, NO_ROWS, 0)
    join = RowJoin(*rows, NO_ROWS, NO_ROWS, nothing, nothing, NO_ROWS, NO_ROWS)
    try:
        return measure_stored(readers, match, join)
    except ProbeError as error:
        return Failed(isinstance(error, FeaturesDifferError), error.problem, error.fix)


_opened: dict[str, tuple[CanonicalReader, CanonicalReader]] = {}


def _readers(told: Sides) -> tuple[CanonicalReader, CanonicalReader]:
    """Return the readers of a comparison's sides; a worker that starts another comparison closes the former dumps."""
    if told.key not in _opened:
        for reader in [reader for pair in _opened.values() for reader in pair]:
            reader.side.dump.close()
        _opened.clear()
        if told.kinds:
            kernels.load(told.kinds)
        dumps = [open_files(path, list(files)) for path, files in zip(told.paths, told.files)]
        sides = read_mapped(dumps[0], dumps[1], told.mapping)
        _opened[told.key] = CanonicalReader(sides[0]), CanonicalReader(sides[1])
    return _opened[told.key]
