"""Make one canonical tensor [rows, features] out of native ones: join shards, split, de-interleave, sum, cut."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from probe.compare.moe.routing import chosen_experts, chosen_weights, route
from probe.compare.names.base import ModelShape, Source
from probe.compare.side import Side
from probe.errors import CompareError
from probe.layout import cut_vocabulary, split_gate_up, split_qkv_groups, split_sizes
from probe.store.dtypes import round_to

Shards = list[np.ndarray]
"""One native tensor: an array per tensor-parallel (TP) rank where ranks share its features, else the only entry."""
Operation = Callable[[list[Shards], int, ModelShape, int], np.ndarray]
"""(shards of each native tensor of the rule, part, model's sizes, axis of the features or output rows) -> the part."""

ROUNDED = frozenset({"sum", "rms_norm"})
"""Operations that compute: their float32 result is rounded to the dump's dtype, as an engine would."""


def _joined(shards: Shards, axis: int) -> np.ndarray:
    return shards[0] if len(shards) == 1 else np.concatenate(shards, axis)


def _whole(arrays: list[Shards], part: int, shape: ModelShape, axis: int) -> np.ndarray:
    return _joined(arrays[0], axis)


def _kv_heads(arrays: list[Shards], part: int, shape: ModelShape, axis: int) -> np.ndarray:
    return _joined(_without_copies(arrays[0], shape), axis)


def _without_copies(shards: Shards, shape: ModelShape) -> Shards:
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
    return _joined(parts if part == 0 else _without_copies(parts, shape), axis)


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


class CanonicalReader:
    """Read canonical tensors of one side as [rows, features].

    The native tensors read last are kept (``keep`` of them), because q, k and v, or gate and up, come from one.
    """

    def __init__(self, side: Side, keep: int = 2) -> None:
        self.side, self.keep = side, keep
        self._recent: dict[str, Shards] = {}

    def read(self, source: Source) -> np.ndarray:
        """Return all stored rows; what is computed from several tensors is rounded to the dump's dtype."""
        arrays = [self._native(label) for label in source.native]
        arrays += [[self.side.parameter(name).rows] for name in source.parameters]
        values = OPERATIONS[source.operation](arrays, source.part, self.side.shape, -1)
        return round_to(values, self.side.dtype_of(source)) if source.operation in ROUNDED else values

    def rows(self, source: Source) -> np.ndarray:
        """Return the row table of a source; raise CompareError when its native tensors disagree about rows."""
        tables = [self.side.dump.rows(*self.side.natives[label]) for label in source.native]
        if any(not np.array_equal(tables[0], other) for other in tables[1:]):
            labels = " and ".join(self.side.native_labels(source))
            raise CompareError(f"{labels} of {self.side.dump.path} hold different rows", "dump again")
        return tables[0]

    def _native(self, label: str) -> Shards:
        if label not in self._recent:
            shards = self.side.dump.read_shards(*self.side.natives[label])
            while len(self._recent) >= self.keep:
                self._recent.pop(next(iter(self._recent)))
            self._recent[label] = [shard.reshape(len(shard), -1) for shard in shards]
        return self._recent[label]
