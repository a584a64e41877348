"""Hook every module of a model and hand what passes through it, row by row, to a dump writer.

Every tensor is copied inside the hook, before the engine can overwrite it in place. Copies reach the writer when the
next call starts or the capture stops, so that an accelerator's transfers overlap the forward. No hook ever calls a
collective: each rank stores what it holds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from probe.hooks.device import HostTransfer, dtype_name, indexable
from probe.hooks.engines.base import EngineAdapter
from probe.hooks.engines.transformers import bind_arguments
from probe.hooks.repeats import Repeats
from probe.hooks.rows import CallRows, Place
from probe.hooks.statistics import RowReducer
from probe.hooks.taps import tap
from probe.hooks.tensors import outputs_of, plain, results_of, tensors_in
from probe.hooks.wrappers import entries, is_wrapper, recomputing, refuse_compiled, strip_wrappers
from probe.settings import STATISTICS, Settings
from probe.store.checksums import row_checksums
from probe.store.dtypes import DTYPES
from probe.store.schema import CELLS, CHECKSUM, COLUMNS, REPLICATED, ROW, WHOLE, ModuleInfo, RowSegment
from probe.store.statistics import WIDTH, Reduced, accumulator
from probe.store.writer import DumpWriter

SCALARS = (
    *("eps", "variance_epsilon", "scaling", "scale", "softmax_scale", "base", "rotary_base", "is_neox_style"),
    *("head_dim", "head_size", "num_heads", "total_num_heads", "num_kv_heads", "q_size", "kv_size", "hidden_size"),
    *("rotary_dim", "sliding_window", "top_k", "tp_size", "layer_number", "inv_freq_scale", "attention_scaling"),
)
"""Module attributes that numbers in a tensor cannot show and a comparison needs."""
ROWLESS_BYTES = 1 << 20
"""A tensor without a token axis (masks, attention probabilities) is stored up to this size: it grows with the square of
the length and no comparison by token can use it. Larger ones are listed with their module as left out, and so are
tensors of a dtype that a dump cannot hold (complex numbers) or without rows to gather (nested, sparse)."""
PENDING_BYTES = 256 << 20
"""Copies of a running forward that may wait in host memory before they are handed to the writer."""


@dataclass
class _Run:
    """One run of a module: its path, and the name its tensors get once one of them shows which rows it holds."""

    module: torch.nn.Module
    path: str
    name: str | None = None


@dataclass(frozen=True)
class _Copy:
    """Rows on their way to the writer; ``of``: they are statistics of such rows."""

    name: str
    slot: str
    dtype: str
    arrival: Any
    segment: RowSegment
    shard: str
    of: Reduced | None


class Capture:
    """Hooks on one model (or list of model chunks) that feed one :class:`DumpWriter`."""

    def __init__(
        self,
        writer: DumpWriter,
        adapter: EngineAdapter,
        settings: Settings | None = None,
        on_error: Callable[[Exception], None] | None = None,
    ) -> None:
        """Make a capture; with ``on_error`` a failure of its own goes there and ends it, and the model runs on."""
        self.writer, self.adapter = writer, adapter
        self.settings = settings or Settings()
        self._on_error, self._failed = on_error, False
        self.busy = False
        self.thread: int | None = None
        """The only thread whose calls are recorded, None for any."""
        self.calls = 0
        self.fired: set[str] = set()
        self._call: CallRows | None = None
        self._undo: list[Callable[[], None]] = []
        self._pending: list[_Copy] = []
        self._pending_bytes = 0
        self._root: torch.nn.Module | None = None
        self._running: list[_Run] = []
        self._repeats = Repeats()
        self._order: dict[str, int] = {}
        self._transfer, self._reducer = HostTransfer(), RowReducer()
        self._modules: dict[str, torch.nn.Module] = {}
        self._names: dict[str, str] = {}
        self._left_out: dict[str, dict[str, list[int]]] = {}
        self._listed: dict[str, ModuleInfo] = {}

    def attach(self, models: torch.nn.Module | list[torch.nn.Module]) -> int:
        """Hook every module and return how many; raise CaptureError for a compiled model, whose hooks never fire."""
        chunks = list(models) if isinstance(models, list | tuple) else [models]
        refuse_compiled(chunks)
        for number, chunk in enumerate(chunks):
            self._attach_chunk(entries(chunk), number)
        return len(self._modules)

    def detach(self) -> None:
        """Remove every hook and hand the writer the last call's tensors and what it does not know of the modules."""
        while self._undo:
            self._undo.pop()()
        self._drain()
        self._call = self._root = None
        for name, path in self._names.items():
            if name in self.fired:
                module = self._modules[path]
                info = _scalars(module) | self.adapter.facts(path)
                if name in self._left_out:
                    info["left_out"] = self._left_out[name]
                found = ModuleInfo(name, type(module).__name__, self._order[name], info)
                if self._listed.get(name) != found:
                    self._listed[name] = replace(found, info=deepcopy(info))
                    self.writer.add_module(found)
        self._modules.clear()

    def store(self, path: str, slot: str, tensor: torch.Tensor) -> None:
        """Store a tensor that no hook sees, with the rows of the running or last call (without rows before any)."""
        call = self._call or CallRows(np.zeros((0, 0), ROW), -1)
        for _, value, place in self._placed(path, [(slot, tensor)], call):
            self._record(path, path, slot, value, place, call)

    @property
    def call(self) -> CallRows | None:
        """Return the rows of the call that runs or ran last, None before any and for one that is not recorded."""
        return self._call

    @property
    def _recording(self) -> bool:
        if self._call is None or not (self._root is not None or self.adapter.runs_after_forward):
            return False
        return self.adapter.budget is None or len(self._call.segment.rows) > 0

    # -- hooks --------------------------------------------------------------------------------------------------------

    def _attach_chunk(self, chain: list[torch.nn.Module], number: int) -> None:
        root = chain[-1]
        if self.settings.task == STATISTICS:
            self._reducer.know(root)
        taken = set(self._modules)  # chunks of one pipeline stage repeat the names of their containers
        aliases: dict[int, tuple[torch.nn.Module, list[str]]] = {}
        for native, module in root.named_modules(remove_duplicate=False):
            path = None if is_wrapper(module) else self.adapter.module_path(strip_wrappers(native), module)
            if path is not None:
                path = f"chunk{number}.{path}".rstrip(".") if path in taken else path
                aliases.setdefault(id(module), (module, []))[1].append(path)
        for entry in chain:
            self._undo.append(entry.register_forward_pre_hook(self._safe(self._begin(chain)), with_kwargs=True).remove)
        for module, paths in aliases.values():
            self._attach_module(module, paths, module is root)
        for entry in chain:
            self._undo.append(entry.register_forward_hook(self._safe(self._end), always_call=True).remove)

    def _attach_module(self, module: torch.nn.Module, paths: list[str], is_root: bool) -> None:
        for path in paths:
            self._modules.setdefault(path, module)
        resolve = self._resolver(paths)
        self._undo.append(module.register_forward_pre_hook(self._safe(self._enter(resolve)), with_kwargs=True).remove)
        self._undo.append(module.register_forward_hook(self._safe(self._leave(is_root)), with_kwargs=True).remove)
        for method, slot in self.adapter.taps(paths[0], module).items():
            self._undo.append(tap(module, method, self._safe(self._tapped(module, resolve, slot))))

    def _safe(self, hook: Callable[..., None]) -> Callable[..., None]:
        """Return a hook whose failure cannot reach the model where somebody wants to hear of it instead."""
        on_error = self._on_error
        if on_error is None:
            return hook

        def guarded(*args: Any, **kwargs: Any) -> None:
            if self._failed or self.thread not in (None, threading.get_ident()):
                return
            outermost, self.busy = not self.busy, True
            try:
                hook(*args, **kwargs)
            except Exception as error:
                self._failed = True
                on_error(error)
            finally:
                self.busy = self.busy and not outermost

        return guarded

    def _resolver(self, paths: list[str]) -> Callable[[], str]:
        """Return how to name a module now: one shared by several parents is named after the parent that runs."""
        if len(paths) == 1:
            return lambda: paths[0]
        by_parent = {path.rpartition(".")[0]: path for path in paths}
        return lambda: next((by_parent[run.path] for run in reversed(self._running) if run.path in by_parent), paths[0])

    def _begin(self, chain: list[torch.nn.Module]) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if recomputing() or (module is not self._root and any(entry is self._root for entry in chain)):
                return  # inside the wrapper whose forward has begun the call
            self._drain()
            self._running.clear()
            self._repeats.clear()
            self._root = module
            if module is not chain[-1]:
                args, kwargs = (), bind_arguments(module, args, kwargs)
            self._call = self.adapter.begin_call(chain[-1], args, kwargs)
            if self._call is not None:
                self.calls += 1
                self._note_cells(self._call)

        return hook

    def _note_cells(self, call: CallRows) -> None:
        """Store which numbers the tokens of this rank have where experts of other ranks serve them."""
        cells = self.adapter.expert_cells()
        if cells is not None:
            numbers = torch.arange(len(cells), dtype=torch.int32)
            self._record(CELLS[0], *CELLS, numbers, Place("", cells), call)

    def _end(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Note that the model's forward has ended, also when it raised."""
        if not recomputing() and module is self._root:
            self._root = None
            self._running.clear()

    def _enter(self, resolve: Callable[[], str]) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if recomputing():
                return
            run = _Run(module, resolve())
            self._running.append(run)
            if self._recording:
                self._hooked(run, [*tensors_in(args, "input"), *tensors_in(kwargs, "kwargs")], "input")

        return hook

    def _leave(self, is_root: bool) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if recomputing():
                return
            run = self._left(module)
            if run is None or not self._recording:
                return
            self._hooked(run, outputs_of(output), "output")
            self.fired.add(run.name or run.path)
            if is_root:
                self.adapter.end_call(output)

        return hook

    def _tapped(self, module: torch.nn.Module, resolve: Callable[[], str], slot: str) -> Callable[[Any], None]:
        def record(result: Any) -> None:
            if self._recording and not recomputing():
                run = next((run for run in reversed(self._running) if run.module is module), None)
                if run is None:  # called from outside the module's forward
                    path = resolve()
                    run = _Run(module, path, path)
                    self.fired.add(path)
                self._hooked(run, results_of(result, slot), "output")

        return record

    def _left(self, module: torch.nn.Module) -> _Run | None:
        """Return the run with which ``module`` was entered; children that an exception ended are forgotten."""
        while self._running:
            run = self._running.pop()
            if run.module is module:
                return run
        return None

    # -- tensors ------------------------------------------------------------------------------------------------------

    def _hooked(self, run: _Run, tensors: Iterable[tuple[str, torch.Tensor]], kind: str) -> None:
        """Record a run's tensors; the first ones with rows decide whether it repeats an earlier run."""
        call = self._call
        if call is None:
            return
        placed = self._placed(run.path, tensors, call)
        if run.name is None:
            run.name = self._repeats.name(run.path, [place for _, _, place in placed if place is not None])
        name = run.name or run.path
        self._names.setdefault(name, run.path)
        self._order.setdefault(name, len(self._order))
        if self.settings.wants(run.path, kind):
            for slot, tensor, place in placed:
                self._record(run.path, name, slot, tensor, place, call)

    def _placed(
        self, path: str, tensors: Iterable[tuple[str, torch.Tensor]], call: CallRows
    ) -> list[tuple[str, torch.Tensor, Place | None]]:
        """Return each tensor with where its rows lie; None for one that cannot be stored."""
        placed: list[tuple[str, torch.Tensor, Place | None]] = []
        for slot, tensor in tensors:
            values = plain(tensor)
            if values is None or dtype_name(values) not in DTYPES:
                placed.append((slot, tensor, None))
                continue
            partial = self.adapter.partial_rows(path, slot, values)
            place = call.place_of(values.shape, self.adapter.preferred_layouts(path, slot), partial)
            if place is not None and not place.has_rows and values.nbytes > ROWLESS_BYTES:
                place = None
            placed.append((slot, values, place))
        return placed

    def _record(
        self, path: str, name: str, slot: str, tensor: torch.Tensor, place: Place | None, call: CallRows
    ) -> None:
        if place is None:
            self._left_out.setdefault(name, {})[slot] = [] if tensor.is_nested else list(tensor.shape)
            return
        if call.company and not place.has_rows:
            return
        if self.adapter.budget is not None and not len(call.segment.rows):
            return
        budget = self.adapter.budget
        of = self._reducer.reduced(tensor, place) if self.settings.task == STATISTICS else None
        if budget is not None and not self._affordable(tensor, place, call, of):
            budget.drop((name, slot), len(call.segment.rows) if place.has_rows else 0)
            return
        copy, segment = call.take(indexable(tensor), place) if of is None else self._reducer.take(tensor, place, call)
        if not len(segment.rows):
            return
        shard, dtype = self._shard_of(path, slot, place), dtype_name(copy if of else tensor)
        self._pending.append(_Copy(name, slot, dtype, self._transfer.send(copy), segment, shard, of))
        self._pending_bytes += copy.nbytes
        if self._pending_bytes > PENDING_BYTES:
            self._drain()

    def _affordable(self, tensor: torch.Tensor, place: Place, call: CallRows, of: Reduced | None) -> bool:
        """Tell whether the budget takes this tensor's rows; what has no rows goes with the rows of its call."""
        budget, rows = self.adapter.budget, len(call.segment.rows)
        if budget is None:
            return True
        share = min(1.0, rows / max(call.grid.size, 1)) if place.has_rows else 1.0
        size = int(tensor.nbytes * share)
        if of is not None:
            size = rows * WIDTH * np.dtype(accumulator(of.dtype)).itemsize
        if not budget.takes(self._pending_bytes + size):
            self._drain()  # equal contents are stored once: what waited may have taken less
        return budget.takes(self._pending_bytes + size)

    def _shard_of(self, path: str, slot: str, place: Place) -> str:
        """Return how a tensor lies over the TP ranks.

        ``columns`` splits the axis that follows the rows. Without rows that axis is the batch or one of length 1, and
        which of the others the ranks split is not known: each rank's tensor stands for itself.
        """
        shard = self.adapter.shard_of(path, slot) if self.adapter.tp_size > 1 else WHOLE
        return shard if place.has_rows or shard != COLUMNS else WHOLE

    def _drain(self) -> None:
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        for copy in pending:
            array, dtype, shard = self._transfer.arrive(copy.arrival), copy.dtype, copy.shard
            if shard == REPLICATED and self.adapter.tp_rank > 0:
                array, dtype, shard = row_checksums(array), "uint64", CHECKSUM
            has_rows = bool(copy.segment.rows["position"][0] >= 0)
            of = None if shard == CHECKSUM else copy.of
            self.writer.append(copy.name, copy.slot, array, dtype, copy.segment, has_rows=has_rows, shard=shard, of=of)


def _scalars(module: torch.nn.Module) -> dict[str, Any]:
    """Return a module's scalars and the shapes of its own parameters."""
    found = {
        name: getattr(module, name) for name in SCALARS if isinstance(getattr(module, name, None), int | float | str)
    }
    shapes = {name: list(parameter.shape) for name, parameter in module.named_parameters(recurse=False)}
    return found | ({"parameters": shapes} if shapes else {})
