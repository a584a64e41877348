"""Split and fuse the axes that inference and training engines store fused.

Every function takes ``axis``: the last axis for activations ``[..., features]``, axis 0 for weights
``[out, in]`` and for biases ``[out]``. Arrays may be numpy arrays or torch tensors: only shapes, slices and integer
index arrays are used, so torch is never imported here, and the result is of the kind and dtype that came in. Splits
into slices may be views; splits through indices are copies.

Layouts:

* Megatron ``linear_qkv``: one block per query group, each ``[queries of the group | key | value]``, as
  ``SelfAttention.get_query_key_value_tensors`` reads it.
* vLLM ``qkv_proj`` and ``gate_up_proj``: plain concatenation ``[q | k | v]`` and ``[gate | up]``.
* Megatron ``linear_fc1`` of a gated MLP: ``[gate | up]``, as ``MLP.forward`` chunks it.
* Vocabulary: rows beyond the real vocabulary are padding and come last.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from probe.errors import ProbeError

Array = TypeVar("Array")
"""A numpy array or a torch tensor."""


def qkv_group_indices(heads: int, groups: int, dim: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return where q, k and v sit in a Megatron fused QKV axis.

    ``heads`` query heads share ``groups`` key/value heads of ``dim`` features each. The three int64 arrays have
    ``heads * dim``, ``groups * dim`` and ``groups * dim`` entries; together they are a permutation of the fused axis,
    and reading the fused axis in their order gives q, k and v in Hugging Face head order.
    Raises ProbeError when a count is not positive or the heads do not divide into the groups.
    """
    _require_heads(heads, groups, dim)
    per_group = heads // groups
    blocks = np.arange((heads + 2 * groups) * dim, dtype=np.int64).reshape(groups, per_group + 2, dim)
    return blocks[:, :per_group].reshape(-1), blocks[:, per_group].reshape(-1), blocks[:, per_group + 1].reshape(-1)


def split_qkv_groups(fused: Array, heads: int, groups: int, dim: int, axis: int = -1) -> tuple[Array, Array, Array]:
    """Split a Megatron fused QKV axis into (q, k, v).

    The axis has ``(heads + 2 * groups) * dim`` entries; the results have ``heads * dim``, ``groups * dim`` and
    ``groups * dim``. Raises ProbeError when the axis has another size.
    """
    _require_size(fused, axis, (heads + 2 * groups) * dim, f"QKV axis of {heads} heads, {groups} groups, dim {dim}")
    query, key, value = qkv_group_indices(heads, groups, dim)
    return _at(fused, axis, query), _at(fused, axis, key), _at(fused, axis, value)


def fuse_qkv_groups(query: Array, key: Array, value: Array, heads: int, groups: int, dim: int, axis: int = -1) -> Array:
    """Fuse q, k and v into the Megatron group-interleaved QKV axis; the inverse of :func:`split_qkv_groups`.

    Raises ProbeError when a part has the wrong size on ``axis`` or the parts differ elsewhere.
    """
    indices = qkv_group_indices(heads, groups, dim)
    for part, index, name in zip((query, key, value), indices, ("query", "key", "value")):
        _require_size(part, axis, len(index), f"{name} axis")
    return _fuse((query, key, value), indices, axis)


def split_sizes(fused: Array, sizes: Sequence[int], axis: int = -1) -> tuple[Array, ...]:
    """Split an axis that concatenates parts of the given sizes, e.g. vLLM's ``[q | k | v]``.

    Returns one part per size, in order. Raises ProbeError when the sizes do not add up to the axis.
    """
    if any(size < 0 for size in sizes):
        raise ProbeError(f"sizes {list(sizes)} include a negative one", "give one non-negative size per part")
    _require_size(fused, axis, sum(sizes), f"axis of parts {list(sizes)}")
    bounds = np.cumsum([0, *sizes]).tolist()
    return tuple(_at(fused, axis, slice(start, stop)) for start, stop in pairwise(bounds))


def split_gate_up(fused: Array, axis: int = -1) -> tuple[Array, Array]:
    """Split a ``[gate | up]`` axis of ``2 * n`` entries into its two halves of ``n``.

    Raises ProbeError when the axis is odd.
    """
    size = _size(fused, axis)
    if size % 2:
        raise ProbeError(f"gate|up axis has the odd size {size}", "check the feature size of the fused MLP projection")
    gate, up = split_sizes(fused, (size // 2, size // 2), axis)
    return gate, up


def fuse_gate_up(gate: Array, up: Array, axis: int = -1) -> Array:
    """Concatenate gate and up on ``axis``; the inverse of :func:`split_gate_up`.

    Raises ProbeError when the two shapes differ.
    """
    size = _size(gate, axis)
    return _fuse((gate, up), (slice(0, size), slice(size, 2 * size)), axis)


def cut_vocabulary(values: Array, vocab_size: int, axis: int = -1) -> Array:
    """Keep the first ``vocab_size`` entries of a padded vocabulary axis.

    Raises ProbeError when the axis is shorter than the vocabulary.
    """
    size = _size(values, axis)
    if not 0 < vocab_size <= size:
        raise ProbeError(f"vocabulary axis has {size} entries, which cannot hold a vocabulary of {vocab_size}")
    return _at(values, axis, slice(0, vocab_size))


def pad_vocabulary(values: Array, padded_size: int, axis: int = 0) -> Array:
    """Append zeros until the vocabulary axis has ``padded_size`` entries; :func:`cut_vocabulary` undoes it.

    Raises ProbeError when the axis is already longer.
    """
    size = _size(values, axis)
    if size > padded_size:
        raise ProbeError(f"vocabulary axis has {size} entries, more than the padded size {padded_size}")
    padded = _new(values, axis, padded_size)
    padded[_index(padded, axis, slice(0, size))] = values
    padded[_index(padded, axis, slice(size, padded_size))] = 0
    return padded


def padded_vocab_size(vocab_size: int, multiple: int = 128) -> int:
    """Return the vocabulary size rounded up to ``multiple``.

    128 is Megatron's ``make_vocab_size_divisible_by`` default (per tensor-parallel rank). Raises ProbeError when an
    argument is not positive.
    """
    if vocab_size <= 0 or multiple <= 0:
        raise ProbeError(f"vocabulary size {vocab_size} and multiple {multiple} must both be positive")
    return -(-vocab_size // multiple) * multiple


def _fuse(parts: Sequence[Any], places: Sequence[Any], axis: int) -> Any:
    """Write each part to its place on the fused axis."""
    first = parts[0]
    for part in parts[1:]:
        same = len(part.shape) == len(first.shape) and _without(part, axis) == _without(first, axis)
        if not same:
            raise ProbeError(f"parts of shapes {[tuple(p.shape) for p in parts]} differ outside axis {axis}")
    fused = _new(first, axis, sum(_size(part, axis) for part in parts))
    for part, place in zip(parts, places):
        target = _index(fused, axis, place)
        if tuple(fused[target].shape) != tuple(part.shape):
            raise ProbeError(f"parts of shapes {[tuple(p.shape) for p in parts]} do not fuse on axis {axis}")
        fused[target] = part
    return fused


def _new(like: Any, axis: int, size: int) -> Any:
    """Return an uninitialised array of the same kind and dtype with ``size`` entries on ``axis``."""
    shape = list(like.shape)
    shape[axis] = size
    return like.new_empty(shape) if hasattr(like, "new_empty") else np.empty(shape, like.dtype)


def _at(values: Any, axis: int, where: Any) -> Any:
    """Take the entries ``where`` (a slice or an index array) of one axis."""
    return values[_index(values, axis, where)]


def _index(values: Any, axis: int, where: Any) -> tuple[Any, ...]:
    """Return the full index that applies ``where`` to ``axis`` and keeps every other axis."""
    _size(values, axis)
    return (slice(None),) * (axis % len(values.shape)) + (where,)


def _without(values: Any, axis: int) -> tuple[int, ...]:
    """Return the shape without one axis."""
    shape = list(values.shape)
    del shape[axis]
    return tuple(shape)


def _size(values: Any, axis: int) -> int:
    """Return the length of one axis, refusing an axis the array does not have."""
    dims = len(values.shape)
    if not -dims <= axis < dims:
        raise ProbeError(f"array of shape {tuple(values.shape)} has no axis {axis}")
    return int(values.shape[axis])


def _require_size(values: Any, axis: int, expected: int, what: str) -> None:
    """Refuse an axis of another length."""
    size = _size(values, axis)
    if size != expected:
        raise ProbeError(
            f"{what} must have {expected} entries, but axis {axis} of shape {tuple(values.shape)} has {size}",
            "check the head counts, the head dimension and the tensor-parallel merge",
        )


def _require_heads(heads: int, groups: int, dim: int) -> None:
    """Refuse head counts that do not describe grouped-query attention."""
    if min(heads, groups, dim) <= 0 or heads % groups:
        raise ProbeError(
            f"{heads} heads in {groups} groups of dimension {dim} is not a grouped-query layout",
            "give positive counts whose heads divide into the groups",
        )
