"""Fused layouts: round trips on random shapes, the literal order of features, refusals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from probe import layout
from probe.errors import ProbeError

HEADS = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5)).map(lambda t: (t[0] * t[1], t[1], t[2]))


def place_axis(size: int, axis: int, others: tuple[int, ...] = (2, 3)) -> np.ndarray:
    """Return distinct values in an array that has ``size`` entries on ``axis`` (0, 1, 2 or -1)."""
    shape = list(others)
    shape.insert(axis % 3, size)
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@given(HEADS, st.sampled_from([0, 1, -1]))
def test_qkv_round_trip(sizes, axis):
    heads, groups, dim = sizes
    fused = place_axis((heads + 2 * groups) * dim, axis)
    query, key, value = layout.split_qkv_groups(fused, *sizes, axis=axis)
    assert query.shape[axis] == heads * dim
    assert key.shape[axis] == value.shape[axis] == groups * dim
    assert np.array_equal(layout.fuse_qkv_groups(query, key, value, *sizes, axis=axis), fused)


@given(HEADS)
def test_qkv_indices_are_a_permutation(sizes):
    heads, groups, dim = sizes
    indices = np.concatenate(layout.qkv_group_indices(*sizes))
    assert np.array_equal(np.sort(indices), np.arange((heads + 2 * groups) * dim))


def test_qkv_group_order_by_hand():
    # 4 query heads, 2 groups, dim 1: Megatron stores q0 q1 k0 v0 | q2 q3 k1 v1.
    fused = np.array(["q0", "q1", "k0", "v0", "q2", "q3", "k1", "v1"])
    query, key, value = layout.split_qkv_groups(fused, 4, 2, 1)
    assert query.tolist() == ["q0", "q1", "q2", "q3"]
    assert key.tolist() == ["k0", "k1"]
    assert value.tolist() == ["v0", "v1"]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.sampled_from([0, 1, -1]))
def test_split_sizes_concatenates_back(sizes, axis):
    fused = place_axis(sum(sizes), axis)
    parts = layout.split_sizes(fused, sizes, axis=axis)
    assert [part.shape[axis] for part in parts] == sizes
    assert np.array_equal(np.concatenate(parts, axis), fused)


@given(st.integers(1, 6), st.sampled_from([0, 1, -1]))
def test_gate_up_round_trip(half, axis):
    fused = place_axis(2 * half, axis)
    gate, up = layout.split_gate_up(fused, axis)
    assert np.array_equal(gate, np.take(fused, range(half), axis))
    assert np.array_equal(layout.fuse_gate_up(gate, up, axis), fused)


@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([0, 1, -1]))
def test_vocabulary_pads_with_zeros_and_cuts_back(vocab, multiple, axis):
    values = place_axis(vocab, axis) + 1
    size = layout.padded_vocab_size(vocab, multiple)
    assert size % multiple == 0 and 0 <= size - vocab < multiple
    padded = layout.pad_vocabulary(values, size, axis)
    assert padded.shape[axis] == size
    assert padded.sum() == values.sum()
    assert np.array_equal(layout.cut_vocabulary(padded, vocab, axis), values)


def test_padded_vocab_size_of_megatron():
    assert layout.padded_vocab_size(197) == 256
    assert layout.padded_vocab_size(256) == 256
    assert layout.padded_vocab_size(151936) == 151936


def test_biases_are_one_dimensional():
    parts = np.arange(8.0), np.arange(8.0, 12.0), np.arange(12.0, 16.0)
    fused = layout.fuse_qkv_groups(*parts, 4, 2, 2, axis=0)
    assert fused.tolist() == [0, 1, 2, 3, 8, 9, 12, 13, 4, 5, 6, 7, 10, 11, 14, 15]


def test_torch_tensors_stay_tensors_of_their_dtype():
    import torch

    fused = torch.arange(2 * 16, dtype=torch.bfloat16).reshape(2, 16)
    parts = layout.split_qkv_groups(fused, 4, 2, 2)
    expected = layout.split_qkv_groups(fused.float().numpy(), 4, 2, 2)
    for part, array in zip(parts, expected):
        assert part.dtype == torch.bfloat16
        assert np.array_equal(part.float().numpy(), array)
    assert torch.equal(layout.fuse_qkv_groups(*parts, 4, 2, 2), fused)
    assert torch.equal(layout.fuse_gate_up(*layout.split_gate_up(fused)), fused)
    assert torch.equal(layout.cut_vocabulary(layout.pad_vocabulary(fused, 5), 2, axis=0), fused)


@pytest.mark.parametrize(
    "call",
    [
        lambda: layout.qkv_group_indices(4, 3, 2),
        lambda: layout.qkv_group_indices(0, 1, 2),
        lambda: layout.split_qkv_groups(np.zeros(15), 4, 2, 2),
        lambda: layout.fuse_qkv_groups(np.zeros(8), np.zeros(4), np.zeros(5), 4, 2, 2),
        lambda: layout.fuse_qkv_groups(np.zeros((8, 3)), np.zeros((4, 3)), np.zeros((4, 1)), 4, 2, 2, axis=0),
        lambda: layout.split_sizes(np.zeros(5), (2, 2)),
        lambda: layout.split_sizes(np.zeros(0), (2, -2)),
        lambda: layout.split_gate_up(np.zeros(5)),
        lambda: layout.fuse_gate_up(np.zeros((2, 3)), np.zeros((2, 4)), axis=0),
        lambda: layout.fuse_gate_up(np.zeros(3), np.zeros(4)),
        lambda: layout.cut_vocabulary(np.zeros(4), 5),
        lambda: layout.cut_vocabulary(np.zeros((4, 2)), 2, axis=2),
        lambda: layout.pad_vocabulary(np.zeros(4), 3),
        lambda: layout.padded_vocab_size(0),
    ],
)
def test_sizes_that_do_not_fit_are_refused(call):
    with pytest.raises(ProbeError):
        call()
