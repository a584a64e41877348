"""Weight sketches: the same on every rank, additive over shards, and different for every kind of wrong weight."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from probe.hooks import weights
from probe.hooks.engines.base import EngineAdapter
from probe.hooks.engines.sequences import SequenceBook
from probe.hooks.weights import named_sketches, sketch, sketches
from probe.store.sketches import column_vector

# float64 sums of some hundred products of size about 1, in another order
EXACT = 1e-12


@pytest.fixture
def matrix():
    """A random square matrix."""
    return torch.randn(24, 24, generator=torch.Generator().manual_seed(0))


def close(found, expected):
    return np.allclose(found, expected, rtol=EXACT, atol=EXACT)


def table(weight):
    return sketch("w", weight).rows


@given(st.integers(0, 10**12), st.integers(1, 50), st.integers(0, 49))
def test_the_column_vector_depends_on_the_global_column_only(start, count, split):
    split = min(split, count)
    whole = column_vector(count, start)
    assert np.array_equal(
        whole, np.concatenate([column_vector(split, start), column_vector(count - split, start + split)])
    )
    assert (np.abs(whole) < 1).all()


def test_the_column_vector_is_spread_over_the_interval():
    r = column_vector(100_000)
    assert len(np.unique(r)) == len(r)  # equal entries would hide a swap of two columns
    # uniform in (-1, 1): mean 0 and variance 1/3; 5 standard errors of 100,000 draws
    assert abs(r.mean()) < 5 * np.sqrt(1 / 3 / len(r)) and abs(r.var() - 1 / 3) < 5 * np.sqrt(4 / 45 / len(r))


@given(st.integers(1, 6), st.integers(2, 40), st.data())
@settings(deadline=None, max_examples=30)
def test_sketches_add_up_over_input_shards(out, columns, data):
    cut = data.draw(st.integers(1, columns - 1))
    weight = torch.randn(out, columns, generator=torch.Generator().manual_seed(out * columns), dtype=torch.float64)
    parts = []
    for start, shard in ((0, weight[:, :cut]), (cut, weight[:, cut:])):
        values = shard.numpy()
        parts.append(np.stack([values @ column_vector(shard.shape[1], start), values.sum(1), (values**2).sum(1)], 1))
    assert close(table(weight), sum(parts))


def test_a_sketch_is_its_formula(matrix):
    found = sketch("w", matrix)
    values, r = matrix.double().numpy(), column_vector(24)
    assert found.shape == (24, 24) and found.dtype == "float32" and found.name == "w"
    assert close(found.rows, np.stack([values @ r, values.sum(1), (values**2).sum(1)], 1))
    assert found.quad == pytest.approx(r @ values @ r, rel=1e-12)
    assert np.isnan(sketch("w", matrix[:5]).quad)


def test_memory_is_bounded_without_changing_the_result(matrix, monkeypatch):
    whole = table(matrix)
    monkeypatch.setattr(weights, "_CHUNK", 50)  # two rows at a time
    assert close(table(matrix), whole)


def swapped(matrix, axis):
    order = list(range(24))
    order[3], order[17] = 17, 3
    return matrix[order] if axis == 0 else matrix[:, order]


def test_every_kind_of_wrong_weight_shows(matrix):
    """Each wrong copy differs where the report looks, by far more than a rounding to bfloat16 (2^-9) would."""
    right = sketch("w", matrix)
    scale = np.abs(right.rows[:, 0]).max()

    def off(other):
        return np.abs(sketch("w", other).rows - right.rows).max(0)

    stale = matrix + 0.01 * torch.randn(24, 24, generator=torch.Generator().manual_seed(1))
    assert off(stale)[0] > 1e-3 * scale
    assert close(sketch("w", matrix * 2).rows, right.rows * [2, 2, 4])
    rows = sketch("w", swapped(matrix, 0)).rows  # rows moved: the same set of rows, two of them elsewhere
    assert close(np.sort(rows, 0), np.sort(right.rows, 0))
    assert (np.abs(rows - right.rows).max(1) > 1e-3).sum() == 2
    columns = off(swapped(matrix, 1))  # columns moved: sums stay, the product with r does not
    assert columns[0] > 0.05 * scale and columns[1] < 1e-6 and columns[2] < 1e-6
    transposed = sketch("w", matrix.t())  # r' W r is the same for the transpose, the rows are not
    assert transposed.quad == pytest.approx(right.quad, rel=1e-12) and off(matrix.t())[0] > 0.05 * scale
    one = matrix.clone()
    one[5, 7] += 0.1
    assert (np.abs(sketch("w", one).rows - right.rows).max(1) > 1e-3).nonzero()[0].tolist() == [5]


def test_two_dtypes_of_one_weight_agree_within_rounding(matrix):
    narrow = matrix.to(torch.bfloat16)
    fine, coarse = sketch("w", matrix), sketch("w", narrow)
    assert (fine.dtype, coarse.dtype) == ("float32", "bfloat16")
    # bfloat16 keeps 8 bits: each entry is off by at most 2^-9 of itself, so each product by 2^-9 of |W| |r|
    size = matrix.double().abs().numpy()
    bound = 2.0**-9 * np.stack([size @ np.abs(column_vector(24)), size.sum(1), 2.01 * (size**2).sum(1)], 1)
    assert (np.abs(fine.rows - coarse.rows) <= bound).all() and not np.array_equal(fine.rows, coarse.rows)
    assert np.array_equal(sketch("w", narrow.float()).rows, coarse.rows)  # widening changes nothing


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn, torch.int8, torch.float64])
def test_other_dtypes(dtype):
    weight = torch.tensor([[1.0, -2.0], [0.5, 3.0]]).to(dtype)
    values = weight.double().numpy()
    assert close(table(weight)[:, 1], values.sum(1))


def test_vectors_are_kept_whole_and_experts_by_expert():
    bias = sketch("b", torch.tensor([1.0, -0.5], dtype=torch.bfloat16))
    assert bias.rows.tolist() == [[1.0], [-0.5]] and bias.shape == (2,)
    assert sketch("s", torch.tensor(3.0)).rows.tolist() == [[3.0]]
    experts = torch.randn(3, 4, 5)
    assert close(table(experts), np.concatenate([table(expert) for expert in experts]))
    assert sketch("e", experts).shape == (3, 4, 5) and sketch("e", experts).whole == 3
    convolution = torch.randn(3, 4, 5, 2)
    assert close(table(convolution), table(convolution.reshape(3, 40)))


class Model(nn.Module):
    """Tied head, a view of the same memory, empty parameters (as vLLM leaves them) and one on meta."""

    def __init__(self):
        super().__init__()
        self.embed, self.head, self.square = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False), nn.Linear(4, 4)
        self.head.weight = self.embed.weight
        self.transposed = nn.Parameter(self.square.weight.data.t())
        self.repacked = nn.Parameter(torch.empty(0))
        self.elsewhere = nn.Parameter(torch.empty(3, 3, device="meta"))


def test_aliases_and_what_cannot_be_sketched():
    model = Model()
    found = {s.name: s for s in sketches(model)}
    assert set(found) == {"embed.weight", "head.weight", "square.weight", "square.bias", "transposed"}
    assert found["head.weight"].alias == "embed.weight" and not len(found["head.weight"].rows)
    assert found["head.weight"].shape == (6, 4)
    assert found["embed.weight"].alias == "" and found["transposed"].alias == ""  # the same memory read another way
    assert close(found["transposed"].rows, table(model.square.weight.t()))


@given(st.integers(1, 6), st.integers(2, 40), st.data())
@settings(deadline=None, max_examples=20)
def test_sketches_of_tensor_parallel_shards_add_up(out, columns, data):
    cut = data.draw(st.integers(1, columns - 1))
    weight = torch.randn(2, out, columns, generator=torch.Generator().manual_seed(out * columns), dtype=torch.float64)
    for whole in (weight[0], weight):  # a matrix, and experts
        parts = [sketch("w", whole[..., :cut], 1, 0), sketch("w", whole[..., cut:], 1, cut)]
        assert close(parts[0].rows + parts[1].rows, table(whole))
        assert {(p.axis, p.start, p.whole) for p in parts} == {(1, 0, len(whole))}
        assert all(np.isnan(p.quad) for p in parts)
    parts = [sketch("w", weight[0, :1], 0), sketch("w", weight[0, 1:], 0)]
    assert close(np.concatenate([p.rows for p in parts]), table(weight[0]))


class TwoRanks(EngineAdapter):
    """An adapter whose square weights are split by input columns, as on the second of two ranks."""

    def module_path(self, path, module):
        return path.replace("square", "renamed")

    def weight_split(self, name, parameter, module):
        return (1, 4) if name == "square.weight" and isinstance(module, nn.Linear) else (-1, 0)


def test_adapters_say_how_parameters_are_split():
    model = Model()
    found = {s.name: s for s in named_sketches(model, TwoRanks(SequenceBook(None)))}
    assert set(found) == {"embed.weight", "head.weight", "renamed.weight", "renamed.bias", "transposed"}
    assert found["renamed.weight"].axis == 1 and found["renamed.bias"].axis == -1
    expected = model.square.weight.detach().double().numpy() @ column_vector(4, 4)
    assert close(found["renamed.weight"].rows[:, 0], expected)
    assert EngineAdapter(SequenceBook(None)).weight_split("w", model.square.weight, model.square) == (-1, 0)
