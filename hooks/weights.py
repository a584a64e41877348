"""Sketch a model's parameters: enough to say how two copies differ, at a few numbers per output row."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from probe.store.schema import WeightSketch

_CHUNK = 4 << 20
FLOAT64_DEVICES = ("cpu", "cuda")


def column_vector(columns: int, start: int = 0) -> np.ndarray:
    """Return r for global input columns ``start .. start + columns``: float64 in (-1, 1), the same on every rank.

    Each entry is the splitmix64 hash of its column number (Steele, Lea and Flood, 2014) scaled to (-1, 1). Random
    values rather than signs: with signs, half of all swaps of two columns would go unseen.
    """
    z = (np.arange(start, start + columns, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) / 2.0**52 - 1.0 + 2.0**-53


def sketch(name: str, parameter: torch.Tensor) -> WeightSketch:
    """Return the sketch of one parameter, computed in float64 in bounded memory.

    The products run where the parameter is, or on the host for devices that may lack float64 products (NPUs).
    """
    shape, dtype = tuple(parameter.shape), str(parameter.dtype).removeprefix("torch.")
    weight = parameter.detach()
    if weight.dim() < 2:
        values = weight.reshape(-1, 1).to("cpu").to(torch.float64).numpy()
        return WeightSketch(name, shape, dtype, values)
    weight = weight.reshape(weight.shape[0], -1)
    where = weight.device if weight.device.type in FLOAT64_DEVICES else torch.device("cpu")
    r = torch.from_numpy(column_vector(weight.shape[1])).to(where)
    rows = max(1, _CHUNK // max(weight.shape[1], 1))
    parts = []
    for chunk in weight.split(rows):
        wide = chunk.to(where).to(torch.float64)
        parts.append(torch.stack([wide @ r, wide.sum(1), wide.square().sum(1)], 1).cpu())
    table = torch.cat(parts).numpy()
    square = weight.shape[0] == weight.shape[1]
    quad = float(column_vector(weight.shape[0]) @ table[:, 0]) if square else float("nan")
    return WeightSketch(name, shape, dtype, table, quad)


def sketches(model: torch.nn.Module) -> Iterator[WeightSketch]:
    """Yield the sketch of every parameter; one that shares another's storage becomes an alias of it."""
    seen: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.numel() or parameter.device.type == "meta":
            continue
        key = (parameter.data_ptr() or id(parameter), tuple(parameter.shape), parameter.stride())
        if key in seen:
            dtype = str(parameter.dtype).removeprefix("torch.")
            yield WeightSketch(name, tuple(parameter.shape), dtype, np.zeros((0, 3)), alias=seen[key])
            continue
        seen[key] = name
        yield sketch(name, parameter)
