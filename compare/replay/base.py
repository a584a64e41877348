"""What a replay is made of: recipes that recompute a module, the context that feeds them, hypotheses about faults."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from probe.compare.evidence import RowKeys
from probe.compare.names.base import ModelShape, fill
from probe.compare.side import Side
from probe.store.dtypes import round_to

ROWS = 256
"""Rows of a tensor that are recomputed at most: its column figures are then within 5 % of those of all rows."""

PLAIN = "plain"
"""Where a context's memory holds the recomputed output while hypotheses are tried."""


class Unreplayable(Exception):
    """Say in words why a module cannot be recomputed: an input, a parameter or a setting is not known."""


@dataclass(frozen=True)
class History:
    """All stored rows of some sequences in order of (sequence, position): values float64 [m, features], keys int64 [m].

    A position that was not stored (a prefix-cache hit, a row over the budget) is not there.
    """

    values: np.ndarray
    sequence: np.ndarray
    position: np.ndarray

    def before(self, sequence: int, position: int) -> np.ndarray:
        """Return the rows of positions 0 to ``position`` of a sequence; raise Unreplayable where one is missing."""
        start = int(np.searchsorted(self.sequence, sequence))
        end = start + position + 1
        if end > len(self.sequence) or self.sequence[end - 1] != sequence or self.position[end - 1] != position:
            raise Unreplayable(f"not every position before {position} of sequence {sequence} was stored")
        return self.values[start:end]


class Tensors(Protocol):
    """Stored tensors of one side by canonical label."""

    def rows(self, label: str, keys: RowKeys) -> np.ndarray:
        """Return float64 [n, features] at keys, NaN where a row was not stored; raise Unreplayable without tensor."""

    def history(self, label: str, sequences: np.ndarray) -> History:
        """Return all rows of the given sequences."""

    def tokens(self, keys: RowKeys) -> np.ndarray:
        """Return the token ids int64 [n] at keys, -1 where not known."""

    def dtype(self, label: str) -> str:
        """Return the dtype in which a tensor was stored."""

    def has(self, label: str) -> bool:
        """Tell whether a tensor was stored."""


class Parameters(Protocol):
    """Parameters by canonical name, each read when it is asked for."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return a parameter's shape, None where there is none of that name."""

    def dtype(self, name: str) -> str:
        """Return the dtype in which the module holds a parameter."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return rows ``start`` to ``stop`` of a parameter as float64."""


EXPLAINED_FACTOR = 3.0
"""A hypothesis that leaves less than a third of a replay's error beyond rounding explains part of it."""


@dataclass(frozen=True)
class Hypothesis:
    """A fault that may explain a broken module.

    ``assumptions``: what the recipe's ``compute`` reads through :meth:`Context.assume`; ``text``: a clause in words, in
    which ``{value}`` is the fitted number. ``fit``: (assumption, values): each is tried, and the best is refined
    between its neighbours. ``solve``: (context, stored) -> assumptions by closed form, or None where it does not apply:
    ``value`` is the fitted number, ``replaced`` the whole output under the hypothesis, where it is known without
    ``compute``. ``when``: whether the hypothesis makes sense for a context. ``factor``: it explains the module when it
    brings the error below the band, or what lies beyond rounding down by this factor (:func:`explained`); ``typical``:
    of the median row, where a fault rounds so coarsely that a replay cannot foresee the last bit of every row.
    """

    cause: str
    assumptions: Mapping[str, Any]
    text: str
    fit: tuple[str, tuple[float, ...]] | None = None
    solve: Callable[[Context, np.ndarray], Mapping[str, Any] | None] | None = None
    when: Callable[[Context], bool] | None = None
    factor: float = EXPLAINED_FACTOR
    typical: bool = False


def explained(before: float, after: float, factor: float = EXPLAINED_FACTOR) -> bool:
    """Tell whether a hypothesis explains most of an error, both in bands: before, and what it leaves.

    A fault and rounding add in squares: of the squares beyond one band, which is rounding's, 1 / factor^2 may be left.
    """
    if before <= 1:
        return factor * after <= before
    return after < before and after <= float(np.hypot(1.0, np.sqrt(before**2 - 1.0) / factor))


Compute = Callable[["Context"], Iterable[np.ndarray]]


def _always(side: Side) -> bool:
    return True


def _short(context: Context) -> int:
    return 1


def _once(context: Context) -> float:
    return 1.0


@dataclass(frozen=True)
class Recipe:
    """How one canonical tensor is recomputed.

    ``output``: its label with ``{i}`` and ``{e}``. ``compute`` yields one or several readings float64 [n, features] of
    it at ``context.keys`` (a fused kernel may round elsewhere): the one with the smallest error counts; rows of NaN are
    left out. ``band``, ``row_band``, ``column_band``: roundings that healthy modules reach in the whole tensor, the
    worst row and the worst column (docs/replay.md has the measurements). ``length``: terms of the longest dot product,
    which sets the size of one rounding in fp32; ``steps``: how many roundings to the dtype, as a root mean square, the
    module makes where that depends on the run. ``applies``: whether a side's model has the module in this form.
    ``rows``, ``sequences``: keys of at most so many rows and sequences (0: any). ``distance``: (context, stored,
    computed) -> difference of the same shape, where it is not stored - computed; ``size``: (context, computed) ->
    magnitudes [n, features or 1] that differences are relative to, where they are not computed itself.
    """

    kind: str
    output: str
    compute: Compute
    band: float
    row_band: float
    column_band: float
    hypotheses: tuple[Hypothesis, ...] = ()
    length: Callable[[Context], int] = _short
    applies: Callable[[Side], bool] = _always
    rows: int = ROWS
    sequences: int = 0
    distance: Callable[[Context, np.ndarray, np.ndarray], np.ndarray] | None = None
    size: Callable[[Context, np.ndarray], np.ndarray] | None = None
    steps: Callable[[Context], float] = _once


@dataclass(frozen=True)
class Context:
    """One module of one side at the rows ``keys`` (int64 [n, 2]: sequence number, position).

    ``config``: the checkpoint's configuration, else the manifest's, flat (settings_gates.flat_config) with its
    ``model_type``. ``dtype``: the coarser of the stored dtype and the model's. Labels and parameter names may hold
    ``{i}`` and ``{e}``, which are this module's.
    """

    side: Side
    label: str
    layer: int | None
    expert: int | None
    keys: RowKeys
    dtype: str
    config: Mapping[str, Any]
    tensors: Tensors
    parameters: Parameters | None
    why_no_parameters: str = "no weights are at hand"
    assumptions: Mapping[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> ModelShape:
        """Return the model's sizes."""
        return self.side.shape

    def name(self, label: str) -> str:
        """Return a label or parameter name with this module's layer and expert in it."""
        values = {"i": self.layer, "e": self.expert}
        return fill(label, {key: str(value) for key, value in values.items() if value is not None})

    def has(self, label: str) -> bool:
        """Tell whether a tensor was stored."""
        return self.tensors.has(self.name(label))

    def value(self, label: str) -> np.ndarray:
        """Return a stored tensor float64 [n, features] at ``keys``, rows of NaN where one was not stored.

        Raises Unreplayable where the tensor was not stored at all.
        """
        label = self.name(label)
        if label not in self.memory:
            self.memory[label] = self.tensors.rows(label, self.keys)
        return np.asarray(self.memory[label])

    def history(self, label: str) -> History:
        """Return all stored rows of the sequences of ``keys``: what attention looks back on."""
        key = f"history {self.name(label)}"
        if key not in self.memory:
            self.memory[key] = self.tensors.history(self.name(label), np.unique(self.keys[:, 0]))
        found: History = self.memory[key]
        return found

    def tokens(self) -> np.ndarray:
        """Return the token ids int64 [n] at ``keys``, -1 where not known."""
        return self.tensors.tokens(self.keys)

    def parameter(self, name: str) -> np.ndarray:
        """Return a canonical parameter whole, as float64; raise Unreplayable where it is not at hand."""
        found = self.optional(name)
        if found is None:
            raise Unreplayable(f"the weights at hand hold no {self.name(name)}")
        return found

    def optional(self, name: str) -> np.ndarray | None:
        """Return a canonical parameter, None where the model has none of that name (a bias)."""
        name, parameters = self.name(name), self._parameters()
        return parameters.read(name) if parameters.shape(name) is not None else None

    def parameter_shape(self, name: str) -> tuple[int, ...] | None:
        """Return a parameter's shape without reading it, None where there is none."""
        return self._parameters().shape(self.name(name))

    def parameter_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return output rows ``start`` to ``stop`` of a parameter as float64."""
        return self._parameters().read(self.name(name), start, stop)

    def _parameters(self) -> Parameters:
        if self.parameters is None:
            raise Unreplayable(self.why_no_parameters)
        return self.parameters

    def setting(self, *names: str, default: Any = None) -> Any:
        """Return the first of these configuration keys that is set."""
        return next((self.config[name] for name in names if self.config.get(name) is not None), default)

    def assume(self, key: str, default: Any) -> Any:
        """Return what the hypothesis under test assumes about ``key``, else ``default``."""
        return self.assumptions.get(key, default)

    def assuming(self, assumptions: Mapping[str, Any]) -> Context:
        """Return this context under a hypothesis; what was read is shared."""
        return replace(self, assumptions={**self.assumptions, **assumptions})

    def plain(self) -> np.ndarray:
        """Return the output recomputed without a fault, float64 [n, features]: for hypotheses that compare with it."""
        return np.asarray(self.memory[PLAIN])

    def rounded(self, values: np.ndarray) -> np.ndarray:
        """Return values rounded to the module's dtype, as float64: for a reading in which a kernel rounds midway."""
        return round_to(values, self.dtype).astype(np.float64)
