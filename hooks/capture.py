"""Hook every module of a model and hand what passes through it, row by row, to a dump writer.

Every tensor is copied inside the hook, before the engine can overwrite it in place. Copies reach the writer when the
next call starts or the capture stops, so that an accelerator's transfers overlap the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import torch

from probe.errors import CaptureError
from probe.hooks.device import HostTransfer, dtype_name, indexable
from probe.hooks.rows import CallRows
from probe.settings import Settings
from probe.store.dtypes import DTYPES
from probe.store.schema import ROW, ModuleInfo, RowSegment
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
tensors of a dtype that a dump cannot hold (complex numbers)."""
PENDING_BYTES = 256 << 20
"""Copies of a running forward that may wait in host memory before they are handed to the writer."""


class EngineAdapter(Protocol):
    """What a capture must know about an engine; one per file in probe.hooks.engines."""

    name: str
    runs_after_forward: bool
    """Whether modules that belong to a call run after the model's own forward has returned."""

    def module_path(self, path: str, module: torch.nn.Module) -> str | None:
        """Return the module's path in the dump, or None for a module that is not hooked."""

    def begin_call(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallRows | None:
        """Return the rows of the forward that starts now, or None when it serves no real request."""

    def preferred_layouts(self, path: str, slot: str) -> tuple[str, ...]:
        """Return the layouts to try first for a tensor (they decide where batch and length are equal)."""

    def partial_rows(self, path: str, slot: str, tensor: torch.Tensor) -> Any:
        """Return the call's row numbers that a tensor holds when it holds only some of them, else None."""

    def end_call(self, output: Any) -> None:
        """Take note of the output of a forward that has ended."""


def tensors_in(value: Any, slot: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (slot, tensor) for every tensor in nested tuples, lists and dicts; parameters are left out."""
    if isinstance(value, torch.Tensor):
        if not isinstance(value, torch.nn.Parameter):
            yield slot, value
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from tensors_in(item, f"{slot}.{number}")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_in(item, f"{slot}.{key}")


def outputs_of(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a module's outputs as output.0, output.1, ... whether it returned one tensor or several."""
    yield from tensors_in(value if isinstance(value, list | tuple | dict) else (value,), "output")


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside wrappers (DDP, Float16Module, ...) that hold it in ``module`` and nothing else."""
    while [name for name, _ in model.named_children()] == ["module"]:
        model = model.module
    return model


class Capture:
    """Hooks on one model (or list of model chunks) that feed one :class:`DumpWriter`."""

    def __init__(self, writer: DumpWriter, adapter: EngineAdapter, settings: Settings | None = None) -> None:
        self.writer, self.adapter = writer, adapter
        self.settings = settings or Settings()
        self.calls = 0
        self.fired: set[str] = set()
        self._call: CallRows | None = None
        self._handles: list[Any] = []
        self._pending: list[tuple[str, str, str, Any, RowSegment]] = []
        self._pending_bytes = 0
        self._inside = False
        self._running: list[tuple[torch.nn.Module, str]] = []
        self._order: dict[str, int] = {}
        self._transfer = HostTransfer()
        self._modules: dict[str, torch.nn.Module] = {}
        self._left_out: dict[str, dict[str, list[int]]] = {}

    def attach(self, models: torch.nn.Module | list[torch.nn.Module]) -> int:
        """Hook every module and return how many; raise CaptureError for a compiled model, whose hooks never fire."""
        chunks = [unwrap(chunk) for chunk in (models if isinstance(models, list | tuple) else [models])]
        refuse_compiled(chunks)
        for number, chunk in enumerate(chunks):
            self._attach_chunk(chunk, number)
        return len(self._modules)

    def detach(self) -> None:
        """Remove every hook and hand the last call's tensors and the list of modules to the writer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._drain()
        self._call = None
        for path, module in self._modules.items():
            if path in self.fired:
                info = _scalars(module)
                if path in self._left_out:
                    info["left_out"] = self._left_out[path]
                self.writer.add_module(ModuleInfo(path, type(module).__name__, self._order[path], info))
        self._modules.clear()

    def store(self, path: str, slot: str, tensor: torch.Tensor) -> None:
        """Store a tensor that no hook sees, with the rows of the running or last call (without rows before any)."""
        self._record(path, slot, tensor, self._call or CallRows(np.zeros((0, 0), ROW), -1))

    @property
    def _recording(self) -> bool:
        return self._call is not None and (self._inside or self.adapter.runs_after_forward)

    def _attach_chunk(self, root: torch.nn.Module, number: int) -> None:
        taken = set(self._modules)  # chunks of one pipeline stage repeat the names of their containers
        aliases: dict[int, tuple[torch.nn.Module, list[str]]] = {}
        for native, module in root.named_modules(remove_duplicate=False):
            path = self.adapter.module_path(native, module)
            if path is not None:
                path = f"chunk{number}.{path}".rstrip(".") if path in taken else path
                aliases.setdefault(id(module), (module, []))[1].append(path)
        for module, paths in aliases.values():
            for path in paths:
                self._modules.setdefault(path, module)
            resolve = self._resolver(paths)
            enter = self._enter_root(resolve) if module is root else self._enter(resolve)
            self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leave(module is root), with_kwargs=True))
        self._handles.append(root.register_forward_hook(self._end, always_call=True))

    def _resolver(self, paths: list[str]) -> Callable[[], str]:
        """Return how to name a module now: one shared by several parents is named after the parent that runs."""
        if len(paths) == 1:
            return lambda: paths[0]
        by_parent = {path.rpartition(".")[0]: path for path in paths}
        return lambda: next((by_parent[name] for _, name in reversed(self._running) if name in by_parent), paths[0])

    def _enter_root(self, resolve: Callable[[], str]) -> Callable[..., None]:
        enter = self._enter(resolve)

        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._drain()
            self._running.clear()
            self._call = self.adapter.begin_call(module, args, kwargs)
            self._inside = True
            if self._call is not None:
                self.calls += 1
            enter(module, args, kwargs)

        return hook

    def _enter(self, resolve: Callable[[], str]) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            path = resolve()
            self._running.append((module, path))
            if not self._recording:
                return
            self._order.setdefault(path, len(self._order))
            for slot, tensor in tensors_in(args, "input"):
                self._hooked(path, slot, tensor)
            for slot, tensor in tensors_in(kwargs, "kwargs"):
                self._hooked(path, slot, tensor)

        return hook

    def _leave(self, is_root: bool) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            path = self._left(module)
            if path is None or not self._recording:
                return
            self.fired.add(path)
            for slot, tensor in outputs_of(output):
                self._hooked(path, slot, tensor)
            if is_root:
                self.adapter.end_call(output)

        return hook

    def _hooked(self, path: str, slot: str, tensor: torch.Tensor) -> None:
        if self._call is not None and self.settings.wants(path, slot):
            self._record(path, slot, tensor, self._call)

    def _left(self, module: torch.nn.Module) -> str | None:
        """Return the name under which ``module`` was entered; children that an exception ended are forgotten."""
        while self._running:
            entered, path = self._running.pop()
            if entered is module:
                return path
        return None

    def _end(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Note that the model's forward has ended, also when it raised."""
        self._inside = False
        self._running.clear()

    def _record(self, path: str, slot: str, tensor: torch.Tensor, call: CallRows) -> None:
        dtype, tensor = dtype_name(tensor), indexable(tensor.detach())
        taken = self._taken(path, slot, tensor, call) if dtype in DTYPES else None
        if taken is None:
            self._left_out.setdefault(path, {})[slot] = list(tensor.shape)
            return
        copy, segment = taken
        if len(segment.rows):
            self._pending.append((path, slot, dtype, self._transfer.send(copy), segment))
            self._pending_bytes += copy.nbytes
            if self._pending_bytes > PENDING_BYTES:
                self._drain()

    def _taken(
        self, path: str, slot: str, tensor: torch.Tensor, call: CallRows
    ) -> tuple[torch.Tensor, RowSegment] | None:
        """Return a copy of the stored rows of a tensor and which they are; None for one too large without rows."""
        flat_rows = self.adapter.partial_rows(path, slot, tensor)
        if flat_rows is not None:
            chosen, segment = call.subset(flat_rows)
            rows = tensor.reshape(len(flat_rows), tensor.shape[-1])
            return rows[torch.from_numpy(chosen).to(tensor.device)], segment
        layout = call.layout_of(tensor.shape, self.adapter.preferred_layouts(path, slot))
        if layout is not None:
            return call.gather(tensor, layout), call.segment
        return None if tensor.nbytes > ROWLESS_BYTES else (tensor.clone()[None], call.whole)

    def _drain(self) -> None:
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        for path, slot, dtype, arrival, segment in pending:
            has_rows = bool(segment.rows["position"][0] >= 0)
            self.writer.append(path, slot, self._transfer.arrive(arrival), dtype, segment, has_rows=has_rows)


def refuse_compiled(chunks: list[torch.nn.Module]) -> None:
    """Raise CaptureError when a model, or any module in it, is compiled: hooks inside it would never fire."""
    for chunk in chunks:
        for path, module in chunk.named_modules():
            if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
                where = f"module {path}" if path else "the model"
                raise CaptureError(f"{where} is compiled, so hooks inside it would never fire", "dump it uncompiled")


def _scalars(module: torch.nn.Module) -> dict[str, Any]:
    """Return a module's scalars and the shapes of its own parameters."""
    found = {
        name: getattr(module, name) for name in SCALARS if isinstance(getattr(module, name, None), int | float | str)
    }
    shapes = {name: list(parameter.shape) for name, parameter in module.named_parameters(recurse=False)}
    return found | ({"parameters": shapes} if shapes else {})
