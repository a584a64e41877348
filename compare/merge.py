"""Make one canonical tensor [rows, features] out of native ones: split, de-interleave, sum, cut, flatten."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from probe.compare.match import Side
from probe.compare.names.base import ModelShape, Source
from probe.errors import CompareError
from probe.layout import cut_vocabulary, split_gate_up, split_qkv_groups, split_sizes
from probe.store.dtypes import round_to

Operation = Callable[[list[np.ndarray], int, ModelShape, int], np.ndarray]


def _whole(arrays: list[np.ndarray], part: int, shape: ModelShape, axis: int) -> np.ndarray:
    return arrays[0]


def _split_qkv(arrays: list[np.ndarray], part: int, shape: ModelShape, axis: int) -> np.ndarray:
    _need_heads(shape)
    kv = shape.kv_heads * shape.head_dim
    return split_sizes(arrays[0], (shape.heads * shape.head_dim, kv, kv), axis)[part]


def _split_qkv_groups(arrays: list[np.ndarray], part: int, shape: ModelShape, axis: int) -> np.ndarray:
    _need_heads(shape)
    return split_qkv_groups(arrays[0], shape.heads, shape.kv_heads, shape.head_dim, axis)[part]


def _split_gate_up(arrays: list[np.ndarray], part: int, shape: ModelShape, axis: int) -> np.ndarray:
    return split_gate_up(arrays[0], axis)[part]


def _sum(arrays: list[np.ndarray], part: int, shape: ModelShape, axis: int) -> np.ndarray:
    total = arrays[0].astype(np.promote_types(arrays[0].dtype, np.float32))
    for other in arrays[1:]:
        total = total + other
    return total


def _cut_vocabulary(arrays: list[np.ndarray], part: int, shape: ModelShape, axis: int) -> np.ndarray:
    return cut_vocabulary(arrays[0], shape.vocab, axis) if shape.vocab else arrays[0]


OPERATIONS: dict[str, Operation] = {
    "whole": _whole,
    "split_qkv": _split_qkv,
    "split_qkv_groups": _split_qkv_groups,
    "split_gate_up": _split_gate_up,
    "sum": _sum,
    "cut_vocabulary": _cut_vocabulary,
}
"""Name -> function(native arrays, part, model shape, axis of the features or output rows)."""


def _need_heads(shape: ModelShape) -> None:
    if not (shape.heads and shape.kv_heads and shape.head_dim):
        raise CompareError(
            "the manifest gives no head counts, so a fused QKV projection cannot be split",
            "dump with the model's config.json in place",
        )


class CanonicalReader:
    """Read canonical tensors of one side as [rows, features].

    The native tensors read last are kept (``keep`` of them), because q, k and v, or gate and up, come from one.
    """

    def __init__(self, side: Side, keep: int = 2) -> None:
        self.side, self.keep = side, keep
        self._recent: dict[str, np.ndarray] = {}

    def read(self, source: Source) -> np.ndarray:
        """Return all stored rows; a sum is taken in float32 and rounded to the dump's dtype, as an engine would."""
        arrays = [self._native(label) for label in source.native]
        values = OPERATIONS[source.operation](arrays, source.part, self.side.shape, -1)
        return round_to(values, self.side.dtype_of(source)) if source.operation == "sum" else values

    def rows(self, source: Source) -> np.ndarray:
        """Return the row table of a source; raise CompareError when its native tensors disagree about rows."""
        tables = [self.side.dump.rows(*self.side.natives[label]) for label in source.native]
        if any(not np.array_equal(tables[0], other) for other in tables[1:]):
            labels = " and ".join(self.side.native_labels(source))
            raise CompareError(f"{labels} of {self.side.dump.path} hold different rows", "dump again")
        return tables[0]

    def _native(self, label: str) -> np.ndarray:
        if label not in self._recent:
            array = self.side.dump.read(*self.side.natives[label])
            while len(self._recent) >= self.keep:
                self._recent.pop(next(iter(self._recent)))
            self._recent[label] = array.reshape(len(array), -1)
        return self._recent[label]
