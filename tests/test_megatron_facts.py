"""A Megatron model that a script built says by itself how it is configured, rope included."""

from __future__ import annotations

import pytest
from checkpoints import make_checkpoint

from probe.checkpoint import Checkpoint
from probe.compare.replay.rope import rotation
from probe.compare.settings_gates import flat_config
from probe.hooks.engines.megatron_facts import config_of
from probe.hooks.runners.megatron_model import build_model

pytestmark = pytest.mark.slow

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
ROPES = {
    "plain": {"rope_type": "default", "rope_theta": 12345.0},
    "llama3": LLAMA3,
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
}


@pytest.mark.parametrize("name", ROPES)
def test_the_rope_that_a_model_states_is_the_one_of_its_checkpoint(tmp_path, name):
    # GIVEN a GPTModel of a checkpoint with this rope
    folder = make_checkpoint(tmp_path / "model", "llama", rope_parameters=ROPES[name])
    model = build_model(Checkpoint(folder), dtype="float32")

    # WHEN it is asked
    stated = config_of(model)

    # THEN its words give the frequencies that it turns positions by (a table of float32, of which llama3 blends
    # some entries in a handful of roundings: 2.6e-7 seen)
    assert stated["rope_parameters"]["rope_type"] == ROPES[name]["rope_type"]
    assert stated["rope_parameters"]["rope_theta"] == ROPES[name]["rope_theta"]
    found = rotation(flat_config({"model": {"config": stated}}), stated["head_dim"])
    turned = model.rotary_pos_emb.inv_freq.double().numpy() / (ROPES[name]["factor"] if name == "linear" else 1)
    assert found.inverse == pytest.approx(turned, rel=2**-20)


def test_words_are_those_of_the_checkpoint(tmp_path):
    folder = make_checkpoint(tmp_path / "model", "qwen2", tied=True)
    model, wanted = build_model(Checkpoint(folder), dtype="float32"), Checkpoint(folder).config
    stated = config_of(model)
    same = ("hidden_size", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings")
    assert {name: stated[name] for name in same} == {name: wanted[name] for name in same}
