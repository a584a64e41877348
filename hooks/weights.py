"""Sketch a model's parameters: enough to say how two copies differ, at a few numbers per output row.

Each process sketches the values it holds and never calls a collective. What it holds no rows of, or rows that cannot
be told (flat parameters of FSDP1), gets a sketch without rows: listed in the dump, compared with nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from probe.hooks.device import dtype_name
from probe.hooks.wrappers import is_wrapper, parameter_path, strip_wrappers
from probe.store.schema import WeightSketch
from probe.store.sketches import column_vector

_CHUNK = 4 << 20
FLOAT64_DEVICES = ("cpu", "cuda")
Split = Callable[[str, torch.Tensor, torch.nn.Module], tuple[int, int]]
"""(name, parameter, the module that owns it) -> (axis, first global input column): an adapter's ``weight_split``."""


def sketch(name: str, parameter: torch.Tensor, axis: int = -1, column_start: int = 0) -> WeightSketch:
    """Return the sketch of one parameter, computed in float64 in bounded memory.

    ``axis`` and ``column_start`` say how tensor-parallel ranks share it (:data:`Split`). Of a DTensor that FSDP2 slices
    along the first axis it is the sketch of this process's slice. Experts [E, out, in] are sketched per expert, other
    tensors of more than two axes as [out, the rest]. The products run where the parameter is, or on the host for
    devices that may lack float64 products (NPUs).
    """
    dtype, piece = dtype_name(parameter), _piece(parameter)
    if piece is None:
        return unavailable(name, tuple(parameter.shape), dtype, axis)
    weight, shape = piece.values, tuple(piece.values.shape)
    lies: dict[str, Any] = {"axis": axis, "start": piece.start, "whole": piece.whole}
    if weight.dim() < 2:
        values = weight.reshape(-1, 1).to("cpu").to(torch.float64).numpy()
        return WeightSketch(name, shape, dtype, values, **lies)
    weight = weight.flatten(0, 1) if weight.dim() == 3 else weight.flatten(1)
    table = _products(weight, column_start)
    square = len(shape) == 2 and shape[0] == shape[1] == piece.whole and axis < 0
    quad = float(column_vector(weight.shape[0]) @ table[:, 0]) if square else float("nan")
    return WeightSketch(name, shape, dtype, table, quad, **lies)


def unavailable(name: str, shape: tuple[int, ...], dtype: str, axis: int = -1) -> WeightSketch:
    """Return the entry of a parameter that could not be sketched: no rows and no alias."""
    return WeightSketch(name, shape, dtype, np.zeros((0, 3)), axis=axis)


def sketches(model: torch.nn.Module, split: Split = lambda name, parameter, module: (-1, 0)) -> Iterator[WeightSketch]:
    """Yield the sketch of every parameter; one that shares another's storage becomes an alias of it.

    Names are paths in the model without its wrappers. Parameters without values here (on the meta device, emptied by
    an engine that repacked them, or of which FSDP2 left this process no row) are left out.
    """
    for entry in _parameters(model):
        if entry.flat:
            yield from _flattened(entry.native, entry.parameter)
        elif entry.alias:
            held = _held(entry.parameter)
            nothing = np.zeros((0, 3))
            yield WeightSketch(entry.name, tuple(held.shape), dtype_name(held), nothing, alias=entry.alias)
        else:
            yield sketch(entry.name, entry.parameter, *split(entry.name, entry.parameter, entry.owner))


@dataclass(frozen=True)
class _Entry:
    """One parameter of a model: its name there, the name without wrappers, and whose storage it shares."""

    native: str
    name: str
    parameter: torch.Tensor
    owner: torch.nn.Module
    alias: str = ""
    flat: bool = False


def _parameters(model: torch.nn.Module) -> Iterator[_Entry]:
    """Yield the parameters that have values here, each storage once and then as aliases."""
    seen: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    fsdp2 = any(_is_dtensor(parameter) for parameter in model.parameters())
    for native, parameter in model.named_parameters(remove_duplicate=False):
        owner = modules.get(native.rpartition(".")[0], model)
        if getattr(owner, "_is_fsdp_managed_module", False) and not fsdp2:
            yield _Entry(native, "", parameter, owner, flat=True)
            continue
        held = _held(parameter)
        if not held.numel() or held.device.type == "meta":
            continue
        name = parameter_path(native)
        key = (held.data_ptr() or id(parameter), tuple(held.shape), held.stride())
        yield _Entry(native, name, parameter, owner, alias=seen.get(key, ""))
        seen.setdefault(key, name)


def _held(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().to_local() if _is_dtensor(parameter) else parameter.detach()


@dataclass(frozen=True)
class Held:
    """What this process holds of one parameter, and how ranks share it (as in a :class:`WeightSketch`)."""

    name: str
    values: torch.Tensor
    axis: int
    start: int
    whole: int


def held_parameters(model: torch.nn.Module, split: Split) -> Iterator[Held]:
    """Yield what this process holds of each parameter once; of flattened or oddly sliced ones nothing."""
    for entry in _parameters(model):
        piece = None if entry.flat or entry.alias else _piece(entry.parameter)
        if piece is not None:
            axis, _ = split(entry.name, entry.parameter, entry.owner)
            yield Held(entry.name, piece.values, axis, piece.start, piece.whole)


def named_sketches(model: torch.nn.Module, adapter: Any) -> Iterator[WeightSketch]:
    """Yield the sketches of a model's parameters, named after their modules as the dump names those."""
    renamed = renamer(model, adapter)
    for weight in sketches(model, adapter.weight_split):
        yield replace(weight, name=renamed(weight.name), alias=renamed(weight.alias) if weight.alias else "")


def renamer(model: torch.nn.Module, adapter: Any) -> Callable[[str], str]:
    """Return a function from a parameter's path to the name that the dump gives it."""
    modules = {}
    for native, module in model.named_modules(remove_duplicate=False):
        path = strip_wrappers(native)
        named = None if is_wrapper(module) else adapter.module_path(path, module)
        if named is not None:
            modules[path] = named

    def renamed(parameter: str) -> str:
        native, _, leaf = parameter.rpartition(".")
        return f"{modules.get(native) or native}.{leaf}".lstrip(".")

    return renamed


# -- what a process holds of a parameter -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Piece:
    """Values of a parameter that this process holds, and where they start along its first axis of length ``whole``."""

    values: torch.Tensor
    start: int
    whole: int


def _piece(parameter: torch.Tensor) -> _Piece | None:
    """Return what this process holds of a parameter, None for a DTensor sliced in another way than FSDP2's."""
    whole = parameter.shape[0] if parameter.dim() else 1
    if not _is_dtensor(parameter):
        return _Piece(parameter.detach(), 0, whole)
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    placements = parameter.placements
    if not all(
        placement.is_replicate() or (type(placement) is Shard and placement.dim == 0) for placement in placements
    ):
        return None
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, placements)
    return _Piece(parameter.detach().to_local(), offset[0] if offset else 0, whole)


def _is_dtensor(parameter: torch.Tensor) -> bool:
    return hasattr(parameter, "placements") and hasattr(parameter, "to_local")


def _flattened(native: str, parameter: torch.Tensor) -> Iterator[WeightSketch]:
    """Yield the entries of what FSDP1 has flattened into one vector with others and sliced.

    ``parameter`` is that flat parameter, or with ``use_orig_params`` what this process holds of one in it.
    """
    fqns = getattr(parameter, "_fqns", None)
    if fqns is None:
        yield unavailable(parameter_path(native), (), dtype_name(parameter))
        return
    prefix = native.rpartition(".")[0]
    for name, shape in zip(fqns, parameter._shapes):
        yield unavailable(parameter_path(f"{prefix}.{name}".lstrip(".")), tuple(shape), dtype_name(parameter))


def _products(weight: torch.Tensor, column_start: int) -> np.ndarray:
    """Return the three numbers of each row of a matrix, float64 [rows, 3]."""
    where = weight.device if weight.device.type in FLOAT64_DEVICES else torch.device("cpu")
    r = torch.from_numpy(column_vector(weight.shape[1], column_start)).to(where)
    parts = []
    for chunk in weight.split(max(1, _CHUNK // max(weight.shape[1], 1))):
        wide = chunk.to(where).to(torch.float64)
        parts.append(torch.stack([wide @ r, wide.sum(1), wide.square().sum(1)], 1).cpu())
    return torch.cat(parts).numpy()
