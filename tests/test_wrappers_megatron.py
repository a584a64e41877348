"""Megatron's real wrappers and recomputation: Float16Module, its DDP, and activations that backward computes again."""

from __future__ import annotations

import functools

import pytest
import torch
from capture_tools import captured, hook_count
from checkpoints import make_checkpoint

from probe.checkpoint import Checkpoint
from probe.hooks.engines.megatron import MegatronAdapter
from probe.hooks.engines.sequences import SequenceBook
from probe.hooks.runners import megatron_batch
from probe.hooks.runners.megatron_model import build_model
from probe.hooks.weights import named_sketches
from probe.hooks.wrappers import entries, unwrap

pytestmark = pytest.mark.slow

SEQUENCES = [[5, 6, 7], [8, 9, 10, 11]]
RECOMPUTE = {
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
}


@pytest.fixture
def model(tmp_path):
    """A small GPTModel in bfloat16, as Float16Module wants it."""
    model = build_model(Checkpoint(make_checkpoint(tmp_path / "model")), dtype="bfloat16")
    model.config.bf16, model.config.params_dtype = True, torch.bfloat16
    return model


@pytest.fixture
def wrapped(model):
    """The model as Megatron-LM's training holds it."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    return DistributedDataParallel(model.config, DistributedDataParallelConfig(), Float16Module(model.config, model))


def run(model, rows=None):
    batch = megatron_batch.padded(SEQUENCES)
    return model(
        input_ids=batch.input_ids, position_ids=batch.position_ids, attention_mask=batch.attention_mask
    ).float()


def train(model, rows):
    """Run two micro-batches before the backward of the first, as a pipeline's schedule does."""
    with torch.enable_grad():
        for logits in [run(model) for _ in range(2)]:
            logits.square().mean().backward()


def assert_same(found, expected):
    assert list(found.tensors) == list(expected.tensors) and len(expected.tensors) > 60
    for key in expected.tensors:
        if key[0]:  # Float16Module hands the model's own output on as fp32
            assert found.read_raw(*key).tobytes() == expected.read_raw(*key).tobytes(), key


def test_names_and_tensors_are_those_of_the_model_inside(tmp_path, model, wrapped):
    assert unwrap(wrapped) is model and entries(wrapped) == [model]
    expected = captured(tmp_path / "a", model, functools.partial(run, model), adapter=MegatronAdapter)
    found = captured(tmp_path / "b", wrapped, functools.partial(run, wrapped), adapter=MegatronAdapter)
    assert_same(found, expected)
    names = [s.name for s in named_sketches(unwrap(wrapped), MegatronAdapter(SequenceBook(None)))]
    assert "decoder.layers.1.mlp.linear_fc2.weight" in names and not [n for n in names if n.startswith("module")]
    assert hook_count(wrapped) == 0


@pytest.mark.parametrize("granularity", RECOMPUTE)
def test_recomputed_activations_are_not_dumped(tmp_path, model, wrapped, monkeypatch, granularity):
    from megatron.core.tensor_parallel import random

    # the recomputation saves and restores CUDA's random state; a CPU has none
    monkeypatch.setattr(random, "_get_cuda_rng_state", lambda *args, **kwargs: torch.get_rng_state())
    monkeypatch.setattr(random, "_set_cuda_rng_state", lambda *args, **kwargs: None)
    model.train()
    expected = captured(tmp_path / "a", wrapped, functools.partial(train, wrapped), adapter=MegatronAdapter)
    for name, value in RECOMPUTE[granularity].items():
        setattr(model.config, name, value)
    for layer in model.decoder.layers:
        layer.self_attention.checkpoint_core_attention = granularity == "selective"
    ran = []
    inner = model.decoder.layers[0].self_attention.core_attention.register_forward_hook(lambda *_: ran.append(1))
    found = captured(tmp_path / "b", wrapped, functools.partial(train, wrapped), adapter=MegatronAdapter)
    inner.remove()
    assert len(ran) == 4  # two forwards, and each again in backward
    assert not [name for name in found.modules if "#" in name]
    assert_same(found, expected)
