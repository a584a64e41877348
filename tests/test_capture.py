"""Capture on real torch modules: copied before it is overwritten, the right row for every token, no trace left."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from capture_tools import by_row, captured, hook_count
from torch import nn

from probe.errors import CaptureError
from probe.hooks import capture as capture_module
from probe.hooks.engines.megatron import MegatronAdapter
from probe.hooks.engines.transformers import BatchAdapter
from probe.hooks.rows import CallRows

# One fp32 forward of two layers, batched or not: matrix kernels sum in another order for another number of rows.
TOLERANCE = 2e-5
SEQUENCES = [[5, 6, 7, 8, 9], [11, 12, 13, 14, 15, 16, 17, 18], [21, 22, 23]]


# -- engines that overwrite what was captured --------------------------------------------------------------------------


class FusedNorm(nn.Module):
    """vLLM's fused add + RMSNorm on CUDA: the input becomes the norm and the residual the sum, both in place."""

    def __init__(self, in_place):
        super().__init__()
        self.in_place, self.weight = in_place, nn.Parameter(torch.linspace(0.5, 1.5, 16))

    def forward(self, x, residual):
        total = residual.add_(x) if self.in_place else residual + x
        normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        return (x.copy_(normed) if self.in_place else normed), total


class Rotary(nn.Module):
    """vLLM's rotary embedding: query and key are views of the fused projection, rotated in place."""

    def __init__(self, in_place):
        super().__init__()
        self.in_place = in_place

    def forward(self, query, key):
        if not self.in_place:
            return -query, -key
        return query.neg_(), key.neg_()


class FusedBlock(nn.Module):
    """One layer in vLLM's way (fused norm, rotary) and in Megatron's (bias_dropout_add adds into the output)."""

    def __init__(self, in_place):
        super().__init__()
        self.in_place = in_place
        self.norm, self.rotary = FusedNorm(in_place), Rotary(in_place)
        self.qkv, self.proj = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, hidden, residual):
        hidden, residual = self.norm(hidden, residual)
        fused = self.qkv(hidden)
        query, key, value = fused.split(8, -1)
        query, key = self.rotary(query, key)
        out = self.proj(torch.cat([query, key, value], -1))
        out = out.add_(residual) if self.in_place else out + residual
        return out, residual


class FusedModel(nn.Module):
    """Embedding, two blocks, and logits that the trainer divides in place."""

    def __init__(self, in_place):
        super().__init__()
        self.in_place = in_place
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.layers = nn.ModuleList([FusedBlock(in_place) for _ in range(2)])

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        residual = torch.zeros_like(hidden)
        for layer in self.layers:
            hidden, residual = layer(hidden, residual)
        logits = self.head(hidden)
        return logits.div_(0.7) if self.in_place else logits / 0.7


def call(model, ids, rows):
    return model(ids)


def fused_dumps(tmp_path):
    """Return the dumps of the same forward, computed in place and out of place."""
    dumps = []
    for in_place in (True, False):
        torch.manual_seed(0)
        model = FusedModel(in_place).eval()
        ids = torch.arange(12).reshape(2, 6)
        dumps.append(captured(tmp_path / str(in_place), model, functools.partial(call, model, ids)))
    return dumps


def overwritten(in_place, out_of_place):
    """Return the tensors whose dump differs between the two."""
    assert list(in_place.tensors) == list(out_of_place.tensors)
    return [key for key in in_place.tensors if not np.array_equal(in_place.read(*key), out_of_place.read(*key))]


def test_tensors_are_copied_before_they_are_overwritten(tmp_path):
    assert overwritten(*fused_dumps(tmp_path)) == []


def test_the_check_above_notices_a_missing_copy(tmp_path, monkeypatch):
    monkeypatch.setattr(CallRows, "gather", lambda self, tensor, layout: tensor.reshape(-1, *tensor.shape[2:]))
    broken = set(overwritten(*fused_dumps(tmp_path)))
    expected = {
        ("embed", "output.0"),  # overwritten by the fused norm
        ("layers.0.norm", "input.0"),
        ("layers.0.norm", "input.1"),
        ("layers.0.qkv", "output.0"),  # by the rotary embedding
        ("layers.0.rotary", "input.0"),
        ("layers.1.proj", "output.0"),  # by the residual
        ("head", "output.0"),  # by the temperature
    }
    assert expected <= broken


# -- module shapes of any kind -----------------------------------------------------------------------------------------


class Leaf(nn.Module):
    """Return whatever it was made to return."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x, **extra):
        return self.make(x)


class Holder(nn.Module):
    """Run a leaf on [batch, position, 4] features of the ids, ``times`` times."""

    def __init__(self, make, times=1):
        super().__init__()
        self.leaf, self.times = Leaf(make), times

    def forward(self, input_ids):
        x = torch.stack([input_ids.float() + n for n in range(4)], -1)
        for n in range(self.times):
            out = self.leaf(x + n)
        return out


def dump_leaf(tmp_path, make, ids=((1, 2, 3), (4, 5, 6)), **arguments):
    holder = Holder(make, **arguments)
    return captured(tmp_path, holder, lambda rows: holder(torch.tensor(ids)))


def test_views_are_stored_as_they_look(tmp_path):
    dump = dump_leaf(tmp_path, lambda x: (x.transpose(0, 1).contiguous().transpose(0, 1)[..., ::2], x.expand(2, 3, 4)))
    assert dump.read("leaf", "output.0").tolist() == [[n, n + 2] for n in range(1, 7)]
    assert dump.read("leaf", "output.1")[:, 3].tolist() == [4, 5, 6, 7, 8, 9]


def test_nested_outputs(tmp_path):
    dump = dump_leaf(tmp_path, lambda x: (x, None, [x + 1, {"a": x + 2}], 3, "text"))
    slots = [slot for module, slot in dump.tensors if module == "leaf"]
    assert slots == ["input.0", "output.0", "output.2.0", "output.2.1.a"]
    dump = dump_leaf(tmp_path / "dict", lambda x: {"hidden": x, "none": None})
    assert [slot for module, slot in dump.tensors if module == "leaf"] == ["input.0", "output.hidden"]
    dump = dump_leaf(tmp_path / "none", lambda x: None)
    assert [slot for module, slot in dump.tensors if module == "leaf"] == ["input.0"]


def test_a_module_that_runs_twice_in_a_forward(tmp_path):
    dump = dump_leaf(tmp_path, lambda x: x * 10, times=3)
    for number, name in enumerate(("leaf", "leaf#1", "leaf#2")):
        assert dump.read(name, "input.0")[:, 0].tolist() == [n + number for n in range(1, 7)]
        assert dump.read(name, "output.0")[:, 0].tolist() == [10 * (n + number) for n in range(1, 7)]
        rows = dump.rows(name, "output.0")
        assert rows["position"].tolist() == [0, 1, 2] * 2 and set(rows["call"]) == {0}
    order = [dump.modules[name].order for name in ("", "leaf", "leaf#1", "leaf#2")]
    assert order == sorted(order) and dump.modules["leaf#2"].cls == "Leaf"


def test_scalars_masks_and_what_is_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr(capture_module, "ROWLESS_BYTES", 1000)
    dump = dump_leaf(tmp_path, lambda x: (x.sum(), torch.ones(7, 5), torch.ones(7, 500), torch.zeros(0)))
    assert dump.read("leaf", "output.0").shape == (1,) and not dump.tensors[("leaf", "output.0")].has_rows
    assert dump.read("leaf", "output.1").shape == (1, 7, 5)
    assert dump.modules["leaf"].info["left_out"] == {"output.2": [7, 500]}
    assert dump.read("leaf", "output.3").shape == (1, 0)


def test_dtypes_that_a_dump_cannot_hold_are_listed(tmp_path):
    dump = dump_leaf(tmp_path, lambda x: (x.to(torch.complex64), x.to(torch.float8_e4m3fn), x > 3, x.bfloat16()))
    assert dump.modules["leaf"].info["left_out"] == {"output.0": [2, 3, 4]}
    kept = {slot: dump.tensors[("leaf", slot)].dtype for slot in ("output.1", "output.2", "output.3")}
    assert kept == {"output.1": "float8_e4m3fn", "output.2": "bool", "output.3": "bfloat16"}
    assert dump.read("leaf", "output.1")[0].tolist() == [1, 2, 3, 4]


def test_bytes_of_four_bit_floats(tmp_path):
    packed = torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4).view(torch.float4_e2m1fn_x2)
    dump = dump_leaf(tmp_path, lambda x: packed)
    assert dump.tensors[("leaf", "output.0")].dtype == "float4_e2m1fn_x2"
    assert dump.read("leaf", "output.0").tolist() == np.arange(24).reshape(6, 4).tolist()


class Tied(nn.Module):
    """Hand a parameter and a buffer to a module, as Megatron's output layer gets the shared weight."""

    def __init__(self):
        super().__init__()
        self.weight, self.leaf = nn.Parameter(torch.ones(3, 4)), Leaf(lambda x: x)

    def forward(self, input_ids):
        return self.leaf(input_ids[..., None].float(), weight=self.weight, bias=self.weight[0].detach())


def test_parameters_are_not_stored(tmp_path):
    tied = Tied()
    dump = captured(tmp_path, tied, lambda rows: tied(torch.tensor([[1, 2, 3]])))
    assert [key for key in dump.tensors if "weight" in key[1]] == []
    assert ("leaf", "kwargs.bias") in dump.tensors
    assert dump.modules[""].info["parameters"] == {"weight": [3, 4]}


class Shared(nn.Module):
    """Two layers that share one rotary module, as every vLLM model does."""

    def __init__(self):
        super().__init__()
        rotary = Leaf(lambda x: x + 1)
        self.layers = nn.ModuleList([nn.ModuleDict({"rotary": rotary}) for _ in range(3)])
        for number, layer in enumerate(self.layers):
            layer.forward = lambda x, n=number, r=rotary: r(x * (n + 2))

    def forward(self, input_ids):
        x = input_ids[..., None].float()
        for layer in self.layers:
            x = layer(x)
        return x


class SharedAdapter(BatchAdapter):
    """Hook ModuleDicts too: those of the model above run."""

    def module_path(self, path, module):
        return None if isinstance(module, nn.ModuleList) else path


def test_a_shared_module_is_named_after_the_parent_that_runs(tmp_path):
    model = Shared()
    dump = captured(tmp_path, model, lambda rows: model(torch.tensor([[1, 2]])), adapter=SharedAdapter)
    assert [dump.read(f"layers.{n}.rotary", "output.0")[:, 0].tolist() for n in range(3)] == [
        [3, 5],
        [10, 16],
        [41, 65],
    ]
    assert dump.modules["layers.1.rotary"].order < dump.modules["layers.2"].order  # order of execution


class Chunk(nn.Module):
    """A pipeline chunk whose layers are numbered from 0, with Megatron's global ``layer_number`` from 1."""

    def __init__(self, first, count):
        super().__init__()
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(count)])
        for number, layer in enumerate(self.decoder.layers):
            layer.layer_number = first + number + 1
        self.hidden = None

    def forward(self, input_ids):
        hidden = self.hidden if self.hidden is not None else torch.ones(*input_ids.T.shape, 4) * input_ids.T[..., None]
        for layer in self.decoder.layers:
            hidden = layer(hidden)
        return hidden


def test_chunks_of_a_pipeline_are_one_model(tmp_path):
    chunks = [Chunk(0, 2), Chunk(2, 2)]
    batches = [torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[7, 8, 9], [10, 11, 12]])]

    def run(rows):
        outputs = [chunks[0](ids) for ids in batches]  # the interleaved schedule: both micro-batches, chunk by chunk
        for ids, output in zip(batches, outputs):
            chunks[1].hidden = output
            chunks[1](ids)

    dump = captured(tmp_path, chunks, run, adapter=MegatronAdapter)
    assert [s.tokens.tolist() for s in dump.sequences] == [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]]
    names = [module for module, slot in dump.tensors if slot == "output.0"]
    assert names == ["decoder.layers.0", "decoder.layers.1", "", "decoder.layers.2", "decoder.layers.3", "chunk1"]
    first, last = by_row(dump, "decoder.layers.0", "input.0"), by_row(dump, "decoder.layers.3", "output.0")
    assert set(first) == set(last) and len(first) == 12
    with torch.no_grad():
        expected = torch.tensor(first[("s2", 1)])
        for layer in [*chunks[0].decoder.layers, *chunks[1].decoder.layers]:
            expected = layer(expected)
    assert np.allclose(last[("s2", 1)], expected, atol=1e-6)  # four fp32 products of size 4


# -- what can go wrong -------------------------------------------------------------------------------------------------


class Fragile(nn.Module):
    """A child that may raise inside a parent that may catch it, and a sibling that runs afterwards."""

    def __init__(self):
        super().__init__()
        self.child, self.after = Leaf(self.work), Leaf(lambda x: x + 1)
        self.fail, self.catch = False, False

    def work(self, x):
        if self.fail:
            raise ValueError("broken")
        return x

    def forward(self, input_ids):
        x = input_ids[..., None].float()
        try:
            x = self.child(x)
        except ValueError:
            if not self.catch:
                raise
        return self.after(x)


def test_an_exception_leaves_the_next_call_clean(tmp_path):
    model = Fragile()

    def run(rows):
        model.fail = True
        with pytest.raises(ValueError, match="broken"):
            model(torch.tensor([[9, 9]]))
        model.after(torch.full((1, 2, 1), 99.0))  # outside any forward: no row can be told
        model.fail = False
        model(torch.tensor([[1, 2]]))

    dump = captured(tmp_path, model, run)
    assert dump.read("after", "output.0")[:, 0].tolist() == [2, 3]
    assert dump.read("", "output.0")[:, 0].tolist() == [2, 3]


def test_an_exception_that_the_model_catches(tmp_path):
    model = Fragile()
    model.fail = model.catch = True
    dump = captured(tmp_path, model, lambda rows: model(torch.tensor([[1, 2]])))
    assert dump.read("after", "output.0")[:, 0].tolist() == [2, 3]
    assert dump.read("", "output.0")[:, 0].tolist() == [2, 3]
    assert ("child", "output.0") not in dump.tensors and "child" not in dump.modules


def test_nothing_is_left_after_detach_and_nothing_changes_before(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 8), nn.Dropout(0.5), nn.GELU(), nn.Linear(8, 20))

    def step():
        torch.manual_seed(1)
        model.zero_grad()
        out = model(torch.arange(10).reshape(2, 5))
        out.square().mean().backward()
        return [out.detach().clone()] + [p.grad.clone() for p in model.parameters()]

    plain = step()
    during = []
    with torch.enable_grad():
        dump = captured(tmp_path, model, lambda rows: during.extend(torch.enable_grad()(step)()))
    assert hook_count(model) == 0
    after = step()
    for a, b, c in zip(plain, during, after):
        assert torch.equal(a, b) and torch.equal(a, c)
    assert len(dump.tensors) > 8


def test_long_forwards_are_handed_over_in_parts(tmp_path, monkeypatch):
    whole = dump_leaf(tmp_path / "whole", lambda x: x * 3, times=5)
    monkeypatch.setattr(capture_module, "PENDING_BYTES", 100)
    parts = dump_leaf(tmp_path / "parts", lambda x: x * 3, times=5)
    for key in whole.tensors:
        assert np.array_equal(whole.read(*key), parts.read(*key))


@pytest.mark.parametrize("where", ["the model", "0"])
def test_compiled_models_are_refused_before_anything_is_hooked(tmp_path, where):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    (model if where == "the model" else model[0]).compile()
    with pytest.raises(CaptureError, match=f"{where} is compiled"):
        captured(tmp_path, model, lambda rows: None)
    assert hook_count(model) == 0
    wrapped = torch.compile(nn.Linear(2, 2))
    with pytest.raises(CaptureError, match="the model is compiled"):
        captured(tmp_path / "w", [nn.Linear(2, 2), wrapped], lambda rows: None)
