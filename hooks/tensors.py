"""Find the tensors in what modules take and return, whatever holds them, and bring odd ones into a plain form."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch


def tensors_in(value: Any, slot: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (slot, tensor) for every tensor in nested tuples, lists and mappings; parameters are left out."""
    if isinstance(value, torch.Tensor):
        if not isinstance(value, torch.nn.Parameter):
            yield slot, value
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from tensors_in(item, f"{slot}.{number}")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{slot}.{key}")


def outputs_of(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a module's outputs as output.0, output.1, ... whether it returned one tensor or several.

    Outputs that have names (a mapping, a ModelOutput, a dataclass) are output.NAME.
    """
    value = _fields(value)
    yield from tensors_in(value if isinstance(value, list | tuple | Mapping) else (value,), "output")


def _fields(value: Any) -> Any:
    """Return a value in which every dataclass is the mapping of its fields.

    Only for outputs: among the inputs, dataclasses are an engine's bookkeeping (packed sequences, sampling metadata).
    """
    if isinstance(value, Mapping):
        return {key: _fields(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _fields(getattr(value, field.name, None)) for field in dataclasses.fields(value)}
    return [_fields(item) for item in value] if isinstance(value, list | tuple) else value


def results_of(value: Any, slot: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what a tapped method returned: one tensor as ``slot``, several counted on from the number it ends in.

    A ``slot`` of several words names the values of a tuple, one word each.
    """
    if not isinstance(value, list | tuple):
        yield from tensors_in(value, slot)
        return
    if " " in slot:
        for word, item in zip(slot.split(), value):
            yield from tensors_in(item, word)
        return
    name, _, number = slot.rpartition(".")
    name, first = (name, int(number)) if number.isdigit() and name else (slot, 0)
    for place, item in enumerate(value, first):
        yield from tensors_in(item, f"{name}.{place}")


def plain(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return this process's strided values of a tensor, or None where no collective-free way leads to them.

    A DTensor gives its local tensor where every process holds all of it; nested (jagged) and sparse tensors have no
    rows that could be gathered.
    """
    placements = getattr(tensor, "placements", None)
    if placements is not None:
        if not all(placement.is_replicate() for placement in placements):
            return None
        tensor = tensor.to_local()
    return None if tensor.is_nested or tensor.layout is not torch.strided else tensor.detach()
