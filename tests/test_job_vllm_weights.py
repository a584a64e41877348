"""Sketches of weights that an engine repacks after loading them, with stand-ins for vLLM's loaders."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from probe.hooks.engines import vllm_weights
from probe.hooks.weights import sketch


class Repacks:
    """Stands in for a quantisation method: leaves the layer's weight empty, as vLLM does on a CPU."""

    def process_weights_after_loading(self, layer):
        layer.weight = nn.Parameter(torch.zeros(0), requires_grad=False)


class Model(nn.Module):
    """A norm, which stays as it was loaded, and a linear, which does not."""

    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.norm, self.linear = nn.LayerNorm(4, bias=False), nn.Linear(4, 3, bias=False)
        for parameter in self.parameters():
            parameter.requires_grad_(False).copy_(torch.randn(parameter.shape, generator=generator))
        self.linear.quant_method = Repacks()


@pytest.fixture(autouse=True)
def wanted(monkeypatch):
    """Whether sketches are wanted: a list whose last entry counts."""
    entries = [True]
    monkeypatch.setattr(vllm_weights, "_wanted", lambda: entries[-1])
    return entries


@vllm_weights._sketching
def load(model):
    """Stands in for what follows a load, or a trainer's update, of a whole model."""
    model.linear.quant_method.process_weights_after_loading(model.linear)


@vllm_weights._sketching_layer
def reload(layer, values):
    """Stands in for the reload of one layer: it is whole for a moment, then repacked."""
    layer.weight = nn.Parameter(values.clone(), requires_grad=False)
    if hasattr(layer, "quant_method"):
        layer.quant_method.process_weights_after_loading(layer)


def assert_are(model, **expected):
    """Assert that the sketches are those of these values; of None, that the parameter is listed as unavailable."""
    found = {weight.name: weight for weight in vllm_weights.loaded_sketches(model)}
    assert found.keys() == {f"{name}.weight" for name in expected}
    for name, values in expected.items():
        rows = found[f"{name}.weight"].rows
        assert not rows.size if values is None else np.array_equal(rows, sketch("", values).rows), name


def test_sketches_are_of_what_was_loaded():
    model = Model(0)
    norm, linear = model.norm.weight.clone(), model.linear.weight.clone()
    load(model)
    assert model.linear.weight.numel() == 0
    for _ in range(2):
        assert_are(model, norm=norm, linear=linear)


def test_weights_written_behind_the_loaders_back_are_never_taken_for_the_loaded_ones():
    model = Model(0)
    load(model)
    vllm_weights.mark_outdated(model)
    model.norm.weight.fill_(2)
    assert_are(model, norm=model.norm.weight, linear=None)


def test_a_trainers_update_is_sketched_as_it_arrives():
    model, newer = Model(0), Model(1)
    load(model)
    vllm_weights.mark_outdated(model)
    norm, linear = newer.norm.weight.clone(), newer.linear.weight.clone()
    model.norm.weight.copy_(norm)
    model.linear.weight = newer.linear.weight
    load(model)
    assert_are(model, norm=norm, linear=linear)


def test_reloaded_layers_are_sketched_one_by_one():
    model, newer = Model(0), Model(1)
    load(model)
    vllm_weights.mark_outdated(model)
    reload(model.linear, newer.linear.weight)
    reload(model.norm, newer.norm.weight)
    assert vars(model.linear.quant_method) == {}  # as it was
    assert_are(model, norm=newer.norm.weight, linear=newer.linear.weight)


def test_what_nobody_wanted_is_unavailable_later(wanted):
    model = Model(0)
    load(model)
    wanted.append(False)
    newer = Model(1)
    model.linear.weight = newer.linear.weight
    load(model)
    wanted.append(True)
    assert_are(model, norm=model.norm.weight, linear=None)


def test_weights_load_all_the_same_where_they_cannot_be_sketched(monkeypatch, caplog):
    def broken(*args):
        raise RuntimeError("no such device")

    monkeypatch.setattr(vllm_weights, "sketches", broken)
    model = Model(0)
    load(model)
    assert model.linear.weight.numel() == 0
    assert "no such device" in caplog.text
