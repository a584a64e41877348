"""Statistics of the rows of a tensor, computed where the tensor is: a few kernels, and no wait for a device."""

from __future__ import annotations

import math

import torch
import xxhash

from probe.hooks.device import dtype_name
from probe.hooks.rows import CallRows, Place
from probe.store.schema import RowSegment
from probe.store.statistics import COUNT, INF, LARGEST, NAN, NORM, SMALLEST, SUM, WIDTH, Reduced, accumulator

LEADING = {"bs": 2, "sb": 2, "flat": 1, "flat_sb": 1}
"""Layout -> how many leading axes of a tensor number its rows; "bhs" has heads between them."""
FEW = 0.5
"""Share of a tensor's rows up to which copying the recorded ones first costs less than reducing all."""
BLOCK_VALUES = 1 << 18
"""Values that a host widens at a time: 2 MiB in float64, which stay in its cache."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "num_moe_experts")
"""Attributes of a model's modules and configurations that say how many experts a router chooses among."""


def _features(tensor: torch.Tensor, place: Place) -> tuple[int, ...]:
    """Return the shape of one row, as :meth:`CallRows.take` cuts it out."""
    if place.layout == "bhs":
        return (tensor.shape[1], *tensor.shape[3:])
    return tuple(tensor.shape[_leading(place) :])


def _leading(place: Place) -> int:
    return LEADING[place.layout] if place.layout else place.leading if place.has_rows else 0


class RowReducer:
    """Take the statistics of the recorded rows of tensors, on a host of equal contents of one call once.

    A linear's input is the norm's output before it, and a layer's input the output of the last one. Equal contents are
    told by their digest, as in a dump's file: it costs a tenth of the statistics, and a write in place cannot hide from
    it, as it can from torch's own count of writes.
    """

    def __init__(self) -> None:
        self._experts = 0
        self._known: dict[tuple[object, ...], tuple[torch.Tensor, RowSegment]] = {}
        self._call: CallRows | None = None
        self._scratch: dict[torch.dtype, torch.Tensor] = {}

    def know(self, model: torch.nn.Module) -> None:
        """Learn how many experts the routers of a model choose among."""
        found = [vars(module).get(name) for module in model.modules() for name in EXPERTS]
        found += [getattr(getattr(model, "config", None), name, None) for name in EXPERTS]
        self._experts = max([self._experts, *(count for count in found if isinstance(count, int))])

    def reduced(self, tensor: torch.Tensor, place: Place) -> Reduced | None:
        """Return what statistics of a tensor's rows would be of; None where its rows are stored as they are.

        So are integers (ids, positions, masks), of which statistics say nothing, rows that are no longer than their
        statistics, and rows no longer than a router's logits, from which follows what a choice of experts explains.
        """
        if not tensor.is_floating_point() or tensor.dtype == getattr(torch, "float4_e2m1fn_x2", None):
            return None
        features, dtype = _features(tensor, place), dtype_name(tensor)
        kept = getattr(torch, accumulator(dtype)).itemsize * WIDTH
        size = math.prod(features)
        return Reduced(dtype, features) if size * tensor.itemsize > kept and size > self._experts else None

    def take(self, tensor: torch.Tensor, place: Place, call: CallRows) -> tuple[torch.Tensor, RowSegment]:
        """Return the statistics of the stored rows of a tensor, [rows, WIDTH], and which rows they are.

        As :meth:`CallRows.take` does: without token rows, of all of it as one row.
        """
        if call is not self._call:
            self._known, self._call = {}, call
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or place.flat_rows is not None:
            return self._take(tensor, place, call)
        digest = xxhash.xxh3_128_digest(tensor.view(torch.uint8).numpy().data)
        key = digest, tensor.shape, tensor.dtype, place.layout
        if key not in self._known:
            self._known[key] = self._take(tensor, place, call)
        return self._known[key]

    def _take(self, tensor: torch.Tensor, place: Place, call: CallRows) -> tuple[torch.Tensor, RowSegment]:
        if not place.has_rows:
            return self.statistics(tensor.reshape(1, -1)).contiguous(), call.whole
        if place.layout == "bhs":
            tensor, place = tensor.transpose(1, 2), Place("bs")
        leading = _leading(place)
        if len(call.segment.rows) < FEW * math.prod(tensor.shape[:leading]):
            rows, segment = call.take(tensor, place)
            return self.statistics(rows.flatten(1)).contiguous(), segment
        rows = tensor.reshape(-1, math.prod(tensor.shape[leading:]))
        if len(rows) == len(call.segment.rows) and place.layout in ("bs", "flat"):
            return self.statistics(rows).contiguous(), call.segment
        return call.take(self.statistics(rows).unflatten(0, tensor.shape[:leading]), place)

    def statistics(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the statistics of rows [n, features] of a floating dtype: [n, WIDTH] in their accumulator's dtype.

        Columns as :mod:`probe.store.statistics` numbers them, each of them contiguous. On a host NaN and Inf are
        counted where a norm is not finite; on a device, where that look would wait for it, always.
        """
        dtype = getattr(torch, accumulator(dtype_name(rows)))
        count, features = rows.shape
        found = rows.new_empty((WIDTH, count), dtype=dtype)
        found[NAN : INF + 1], found[COUNT] = 0, features
        if not rows.numel():
            return found.zero_().t()
        if rows.device.type != "cpu":
            _reduce(rows.to(dtype), found)
            _count(rows, found)
            return found.t()
        step = max(1, BLOCK_VALUES // features)
        for start in range(0, count, step):
            at = slice(start, start + step)
            _reduce(self._widened(rows[at], dtype), found[:, at])
        if not math.isfinite(float(found[NORM].sum())):
            _count(rows, found)
        return found.t()

    def _widened(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return rows in another dtype, in memory that the next call uses again: new memory costs as much as a sum."""
        if rows.dtype == dtype:
            return rows
        size = rows.numel()
        if dtype not in self._scratch or self._scratch[dtype].numel() < size:
            self._scratch[dtype] = torch.empty(max(size, BLOCK_VALUES), dtype=dtype)
        return self._scratch[dtype][:size].view(rows.shape).copy_(rows)


def _reduce(wide: torch.Tensor, found: torch.Tensor) -> None:
    torch.linalg.vector_norm(wide, dim=-1, out=found[NORM])
    torch.sum(wide, -1, out=found[SUM])
    torch.amax(wide, -1, out=found[LARGEST])
    torch.amin(wide, -1, out=found[SMALLEST])


def _count(rows: torch.Tensor, found: torch.Tensor) -> None:
    found[NAN], found[INF] = rows.isnan().sum(-1), rows.isinf().sum(-1)
