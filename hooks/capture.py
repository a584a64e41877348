"""Hook every module of a model and hand what passes through it, row by row, to a dump writer.

Every tensor is copied inside the hook, before the engine can overwrite it in place. Copies reach the writer when the
next call starts or the capture stops, so that an accelerator's transfers overlap the forward.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from probe.errors import CaptureError
from probe.hooks.device import HostTransfer, dtype_name
from probe.hooks.rows import CallRows
from probe.settings import Settings
from probe.store.schema import ModuleInfo, RowSegment
from probe.store.writer import DumpWriter

log = logging.getLogger("probe")

SCALARS = (
    *("eps", "variance_epsilon", "scaling", "scale", "softmax_scale", "base", "rotary_base", "is_neox_style"),
    *("head_dim", "head_size", "num_heads", "total_num_heads", "num_kv_heads", "q_size", "kv_size", "hidden_size"),
    *("rotary_dim", "sliding_window", "top_k", "tp_size", "layer_number", "inv_freq_scale", "attention_scaling"),
)
"""Module attributes that numbers in a tensor cannot show and a comparison needs."""
ROWLESS_BYTES = 1 << 20
"""A tensor without a token axis (masks, attention probabilities) is stored up to this size: it grows with the square of
the length and no comparison by token can use it. Larger ones are listed with their module as left out."""


class EngineAdapter(Protocol):
    """What a capture must know about an engine; one per file in probe.hooks.engines."""

    name: str

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
        self._running: list[str] = []
        self._transfer = HostTransfer()
        self._modules: dict[str, tuple[int, torch.nn.Module]] = {}
        self._left_out: dict[str, dict[str, list[int]]] = {}

    def attach(self, models: torch.nn.Module | list[torch.nn.Module]) -> int:
        """Hook every module and return how many; raise CaptureError for a compiled model, whose hooks never fire."""
        for chunk in models if isinstance(models, list | tuple) else [models]:
            self._attach_chunk(unwrap(chunk))
        return len(self._modules)

    def detach(self) -> None:
        """Remove every hook and hand the last call's tensors and the list of modules to the writer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._drain()
        self._call = None
        for path, (order, module) in self._modules.items():
            if path in self.fired:
                info = _scalars(module)
                if path in self._left_out:
                    info["left_out"] = self._left_out[path]
                self.writer.add_module(ModuleInfo(path, type(module).__name__, order, info))
        self._modules.clear()

    def store(self, path: str, slot: str, tensor: torch.Tensor) -> None:
        """Store a tensor that no hook sees, with the rows of the running call."""
        if self._call is not None:
            self._record(path, slot, tensor)

    def _attach_chunk(self, root: torch.nn.Module) -> None:
        if type(root).__name__ == "OptimizedModule" or getattr(root, "_compiled_call_impl", None) is not None:
            raise CaptureError("the model is compiled, so hooks on its modules would never fire", "dump it uncompiled")
        aliases: dict[int, tuple[torch.nn.Module, list[str]]] = {}
        for native, module in root.named_modules(remove_duplicate=False):
            path = self.adapter.module_path(native, module)
            if path is not None:
                aliases.setdefault(id(module), (module, []))[1].append(path)
        for module, paths in aliases.values():
            for path in paths:
                self._modules.setdefault(path, (len(self._modules), module))
            resolve = self._resolver(paths)
            enter = self._enter_root(resolve) if module is root else self._enter(resolve)
            self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leave(module is root), with_kwargs=True))

    def _resolver(self, paths: list[str]) -> Callable[[], str]:
        """Return how to name a module now: one shared by several parents is named after the parent that runs."""
        if len(paths) == 1:
            return lambda: paths[0]
        by_parent = {path.rpartition(".")[0]: path for path in paths}
        return lambda: next((by_parent[name] for name in reversed(self._running) if name in by_parent), paths[0])

    def _enter_root(self, resolve: Callable[[], str]) -> Callable[..., None]:
        enter = self._enter(resolve)

        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._drain()
            self._running.clear()
            self._call = self.adapter.begin_call(module, args, kwargs)
            if self._call is not None:
                self.calls += 1
            enter(module, args, kwargs)

        return hook

    def _enter(self, resolve: Callable[[], str]) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            path = resolve()
            self._running.append(path)
            if self._call is None:
                return
            for slot, tensor in tensors_in(args, "input"):
                self._record(path, slot, tensor)
            for slot, tensor in tensors_in(kwargs, "kwargs"):
                self._record(path, slot, tensor)

        return hook

    def _leave(self, is_root: bool) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            path = self._running.pop() if self._running else ""
            if self._call is None:
                return
            self.fired.add(path)
            for slot, tensor in outputs_of(output):
                self._record(path, slot, tensor)
            if is_root:
                self.adapter.end_call(output)

        return hook

    def _record(self, path: str, slot: str, tensor: torch.Tensor) -> None:
        call = self._call
        assert call is not None
        if not self.settings.wants(path, slot):
            return
        tensor = tensor.detach()
        flat_rows = self.adapter.partial_rows(path, slot, tensor)
        layout = (
            None if flat_rows is not None else call.layout_of(tensor.shape, self.adapter.preferred_layouts(path, slot))
        )
        if flat_rows is not None:
            chosen, segment = call.subset(flat_rows)
            rows = tensor.reshape(len(flat_rows), tensor.shape[-1])
            copy = rows[torch.from_numpy(chosen).to(tensor.device)]
        elif layout is not None:
            copy, segment = call.gather(tensor, layout), call.segment
        elif tensor.nbytes > ROWLESS_BYTES:
            self._left_out.setdefault(path, {})[slot] = list(tensor.shape)
            return
        else:
            copy, segment = tensor.clone()[None], call.whole
        if len(segment.rows):
            self._pending.append((path, slot, dtype_name(copy), self._transfer.send(copy), segment))

    def _drain(self) -> None:
        for path, slot, dtype, arrival, segment in self._pending:
            has_rows = bool(segment.rows["position"][0] >= 0)
            self.writer.append(path, slot, self._transfer.arrive(arrival), dtype, segment, has_rows=has_rows)
        self._pending.clear()


def _scalars(module: torch.nn.Module) -> dict[str, Any]:
    """Return a module's scalars and the shapes of its own parameters."""
    found = {
        name: getattr(module, name) for name in SCALARS if isinstance(getattr(module, name, None), int | float | str)
    }
    shapes = {name: list(parameter.shape) for name, parameter in module.named_parameters(recurse=False)}
    return found | ({"parameters": shapes} if shapes else {})
