"""Make one canonical tensor [rows, features] out of native ones: join shards, split, de-interleave, sum, cut."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from probe.compare.moe.routing import chosen_experts, chosen_weights, route
from probe.compare.names.base import ModelShape, Source
from probe.compare.side import Side
from probe.errors import CompareError
from probe.layout import cut_vocabulary, split_gate_up, split_qkv_groups, split_sizes
from probe.metrics import BLOCK_VALUES, PairMeasure
from probe.store.dtypes import round_to, stored_dtype, widen

Shards = list[np.ndarray]
"""One native tensor: an array per tensor-parallel (TP) rank where ranks share its features, else the only entry."""
Operation = Callable[[list[Shards], int, ModelShape, int], np.ndarray]
"""(shards of each native tensor of the rule, part, model's sizes, axis of the features or output rows) -> the part."""

ROUNDED = frozenset({"sum", "rms_norm"})
"""Operations that compute: their float32 result is rounded to the dump's dtype, as an engine would."""


MOVING = frozenset(
    {"whole", "kv_heads", "split_qkv", "split_qkv_groups", "split_gate_up", "split_q_a_kv_a", "cut_vocabulary"}
)
"""Operations that only move values of one native tensor: they do the same to the bits of bf16 or fp8 as to numbers."""

PADDED = {"chosen_experts": -1, "chosen_weights": 0}
"""Operations that return as many features as any of their rows needs, and what the others are filled up with."""


def _joined(shards: Shards, axis: int) -> np.ndarray:
    return shards[0] if len(shards) == 1 else np.concatenate(shards, axis)


def _whole(arrays: list[Shards], part: int, shape: ModelShape, axis: int) -> np.ndarray:
    return _joined(arrays[0], axis)


def _kv_heads(arrays: list[Shards], part: int, shape: ModelShape, axis: int) -> np.ndarray:
    return _joined(without_copies(arrays[0], shape), axis)


def without_copies(shards: Shards, shape: ModelShape) -> Shards:
    """Return one shard per key/value head where there are fewer heads than TP ranks.

    Each head is then on ``ranks / heads`` successive ranks (vLLM's QKVParallelLinear, Megatron's SelfAttention).
    """
    heads = shape.kv_heads
    return shards[:: len(shards) // heads] if heads and len(shards) > heads and len(shards) % heads == 0 else shards


def _split_qkv(arrays: list[Shards], part: int, shape: ModelShape, axis: int) -> np.ndarray:
    _need_heads(shape)
    shards = arrays[0]
    queries = shape.heads // len(shards) * shape.head_dim
    kv = max(1, shape.kv_heads // len(shards)) * shape.head_dim
    parts = [split_sizes(shard, (queries, kv, kv), axis)[part] for shard in shards]
    return _joined(parts if part == 0 else without_copies(parts, shape), axis)


def _split_qkv_groups(arrays: list[Shards], part: int, shape: ModelShape, axis: int) -> np.ndarray:
    _need_heads(shape)
    # all shards are joined first: with fewer groups than ranks, Megatron cuts in the middle of a group
    fused = _joined(arrays[0], axis)
    return split_qkv_groups(fused, shape.heads, shape.kv_heads, shape.head_dim, axis)[part]


def _split_gate_up(arrays: list[Shards], part: int, shape: ModelShape, axis: int) -> np.ndarray:
    return _joined([split_gate_up(shard, axis)[part] for shard in arrays[0]], axis)


def _split_q_a_kv_a(arrays: list[Shards], part: int, shape: ModelShape, axis: int) -> np.ndarray:
    """Split DeepSeek's fused down projections: the queries' latent, then the keys' and values' with the rope part."""
    sizes = (shape.q_lora_rank, shape.kv_lora_rank + shape.rope_dim)
    return split_sizes(_joined(arrays[0], axis), sizes, axis)[part]


def _split_experts(arrays: list[Shards], part: int, shape: ModelShape, axis: int) -> np.ndarray:
    """Return expert ``part`` of shards [experts, ...]; ``axis`` counts from the axis after the experts'."""
    return _joined([shard[part] for shard in arrays[0]], axis)


def _split_experts_gate_up(arrays: list[Shards], part: int, shape: ModelShape, axis: int) -> np.ndarray:
    """Return gate (even parts) or up (odd ones) of expert ``part // 2``, each rank holding [gate | up]."""
    return _split_gate_up([[shard[part // 2] for shard in arrays[0]]], part % 2, shape, axis)


def _sum(arrays: list[Shards], part: int, shape: ModelShape, axis: int) -> np.ndarray:
    terms = [_joined(shards, axis) for shards in arrays]
    total = terms[0].astype(np.promote_types(terms[0].dtype, np.float32))
    for other in terms[1:]:
        total = total + other
    return total


def _rms_norm(arrays: list[Shards], part: int, shape: ModelShape, axis: int) -> np.ndarray:
    """Return x / sqrt(mean(x^2) + eps) times the weight that follows the tensor (B. Zhang and R. Sennrich, 2019)."""
    values, weight = _joined(arrays[0], axis), _joined(arrays[1], 0).reshape(-1)
    wide = values.astype(np.promote_types(values.dtype, np.float32))
    square = np.mean(np.square(wide), axis=axis, keepdims=True)
    return wide / np.sqrt(square + wide.dtype.type(shape.eps)) * weight.astype(wide.dtype)


def _cut_vocabulary(arrays: list[Shards], part: int, shape: ModelShape, axis: int) -> np.ndarray:
    joined = _joined(arrays[0], axis)
    return cut_vocabulary(joined, shape.vocab, axis) if shape.vocab else joined


def _chosen_experts(arrays: list[Shards], part: int, shape: ModelShape, axis: int) -> np.ndarray:
    return chosen_experts(_joined(arrays[0], axis))


def _chosen_weights(arrays: list[Shards], part: int, shape: ModelShape, axis: int) -> np.ndarray:
    """Return the weights of the experts used from dense weights and the map of the experts used."""
    return chosen_weights(_joined(arrays[0], axis), _joined(arrays[1], axis))


def _route(arrays: list[Shards], part: int, shape: ModelShape, axis: int) -> np.ndarray:
    """Return the ids (part 0) or weights (part 1) that follow from the router's logits by the model's rule."""
    if shape.routing is None:
        raise CompareError("how this model picks its experts is not known, so its ids cannot be derived from logits")
    return route(_joined(arrays[0], axis), shape.routing)[part]


OPERATIONS: dict[str, Operation] = {
    "whole": _whole,
    "kv_heads": _kv_heads,
    "split_qkv": _split_qkv,
    "split_qkv_groups": _split_qkv_groups,
    "split_gate_up": _split_gate_up,
    "split_q_a_kv_a": _split_q_a_kv_a,
    "split_experts": _split_experts,
    "split_experts_gate_up": _split_experts_gate_up,
    "chosen_experts": _chosen_experts,
    "chosen_weights": _chosen_weights,
    "route": _route,
    "sum": _sum,
    "rms_norm": _rms_norm,
    "cut_vocabulary": _cut_vocabulary,
}
"""Name -> function; activations are joined along their last axis, the sketches of weights along axis 0."""


def _need_heads(shape: ModelShape) -> None:
    if not (shape.heads and shape.kv_heads and shape.head_dim):
        raise CompareError(
            "the manifest gives no head counts, so a fused QKV projection cannot be split",
            "dump with the model's config.json in place",
        )


KEPT_BYTES = 64 << 20
"""Larger native tensors are not kept in memory after they were read."""


class CanonicalReader:
    """Read canonical tensors of one side as [rows, features], whole or some rows of them.

    The native tensors last read whole are kept (``keep`` of them), because q, k and v, or gate and up, come from one.
    Several threads can read rows at the same time.
    """

    def __init__(self, side: Side, keep: int = 2) -> None:
        self.side, self.keep = side, keep
        self._recent: dict[tuple[str, bool], Shards] = {}
        self._widths: dict[tuple[tuple[str, ...], str], int] = {}

    def read(self, source: Source, rows: np.ndarray | None = None) -> np.ndarray:
        """Return all stored rows, or those numbered in ``rows`` (int64) in their order.

        What is computed from several tensors is rounded to the dump's dtype.
        """
        values, bits = self.read_bits(source, rows)
        return widen(values, bits) if bits else values

    def read_bits(self, source: Source, rows: np.ndarray | None = None) -> tuple[np.ndarray, str]:
        """Return what :meth:`read` does, and the dtype whose bits it is where bf16 and fp8 were left as stored."""
        dtype = self.side.dtype_of(source)
        bits = dtype if source.operation in MOVING and stored_dtype(dtype).raw_bits else ""
        arrays = [self._native(label, rows, raw=bool(bits)) for label in source.native]
        arrays += [[self.side.parameter(name).rows] for name in source.parameters]
        values = OPERATIONS[source.operation](arrays, source.part, self.side.shape, -1)
        if source.operation in ROUNDED:
            values = round_to(values, dtype)
        if source.operation in PADDED and rows is not None:
            missing = max(0, self._width(source) - values.shape[1])
            values = np.pad(values, ((0, 0), (0, missing)), constant_values=PADDED[source.operation])
        return values, bits

    def _width(self, source: Source) -> int:
        """Return how many features a padded operation's widest row has."""
        key = (source.native, source.operation)
        if key not in self._widths:
            count, step = self.stored_rows(source), max(1, BLOCK_VALUES // max(1, self.features(source)))
            self._widths[key] = 0  # nothing is filled up while it is found out
            starts = range(0, count, step)
            blocks = (self.read(source, np.arange(start, min(start + step, count))) for start in starts)
            self._widths[key] = max((block.shape[1] for block in blocks), default=0)
        return self._widths[key]

    def features(self, source: Source) -> int:
        """Return how many numbers of a row are read for a source, at most."""
        infos = (self.side.dump.tensors[self.side.natives[label]] for label in source.native)
        return max((math.prod(info.feature_shape) for info in infos), default=1)

    def measure(self, source: Source, rows: int, ulp_dtype: str) -> Any:
        """Return what takes the rows of a pair in and gives its figures."""
        return PairMeasure(rows, ulp_dtype)

    def stored_rows(self, source: Source) -> int:
        """Return how many rows are stored of a source."""
        return self.side.dump.tensors[self.side.natives[source.native[0]]].rows

    def rows(self, source: Source) -> np.ndarray:
        """Return the row table of a source; raise CompareError when its native tensors disagree about rows."""
        tables = [self.side.dump.rows(*self.side.natives[label]) for label in source.native]
        if any(not np.array_equal(tables[0], other) for other in tables[1:]):
            labels = " and ".join(self.side.native_labels(source))
            raise CompareError(f"{labels} of {self.side.dump.path} hold different rows", "dump again")
        return tables[0]

    def _native(self, label: str, rows: np.ndarray | None, *, raw: bool) -> Shards:
        """Return a native tensor's shards as [rows, features]."""
        key = (label, raw)
        if key in self._recent and rows is None:
            return self._recent[key]
        shards = self.side.dump.read_shards(*self.side.natives[label], rows, raw=raw)
        shards = [shard.reshape(len(shard), math.prod(shard.shape[1:])) for shard in shards]
        if rows is None and sum(shard.nbytes for shard in shards) <= KEPT_BYTES:
            while len(self._recent) >= self.keep:
                self._recent.pop(next(iter(self._recent)))
            self._recent[key] = shards
        return shards
