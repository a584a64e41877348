"""What a checkpoint's configuration says about the Megatron model, and what is refused."""

from __future__ import annotations

import json

import pytest

from probe.checkpoint import Checkpoint
from probe.errors import CheckpointError
from probe.hooks.runners import megatron_config, megatron_weights

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 197,
}


@pytest.fixture
def checkpoint(tmp_path):
    """Return a Qwen2 checkpoint whose configuration a test may replace; its weights are never read."""
    import numpy as np
    from safetensors.numpy import save_file

    (tmp_path / "config.json").write_text(json.dumps(QWEN2))
    save_file({"model.norm.weight": np.ones(64, np.float32)}, tmp_path / "model.safetensors")
    return Checkpoint(tmp_path)


def test_transformers_4_configuration(checkpoint):
    # transformers 4 wrote rope_theta at the top level and rope_scaling beside it.
    config = {**checkpoint.config}
    rope = config.pop("rope_parameters")
    checkpoint.config = {**config, "rope_theta": rope["rope_theta"]}
    assert megatron_config.model_shape(checkpoint).rope == megatron_config.Rope(1_000_000.0)
    checkpoint.config = {**config, "rope_theta": 5.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert megatron_config.model_shape(checkpoint).rope == megatron_config.Rope(5.0, "linear", 2.0)


@pytest.mark.parametrize(
    ("architecture", "entries", "match"),
    [
        ("LlamaForCausalLM", {"attention_bias": True}, "attention_bias"),
        ("LlamaForCausalLM", {"mlp_bias": True}, "mlp_bias"),
        ("Qwen3ForCausalLM", {"attention_bias": True}, "attention_bias"),
        ("MistralForCausalLM", {"sliding_window": 16}, "sliding-window"),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, "sliding"),
    ],
)
def test_family_features_are_refused(checkpoint, architecture, entries, match):
    kept = {key: value for key, value in checkpoint.config.items() if key != "layer_types"}
    checkpoint.config = {**kept, "architectures": [architecture], **entries}
    with pytest.raises(CheckpointError, match=match):
        megatron_config.model_shape(checkpoint)


def test_a_window_no_sequence_reaches_is_accepted(checkpoint):
    checkpoint.config = {**checkpoint.config, "architectures": ["MistralForCausalLM"], "sliding_window": 128}
    assert megatron_config.model_shape(checkpoint).max_positions == 128


MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({}, megatron_config.Moe(8, 2, 32, True, (True, True))),
        ({"norm_topk_prob": None}, megatron_config.Moe(8, 2, 32, False, (True, True))),
        # transformers 5 renamed the key, and both may be there
        ({"num_experts": None, "num_local_experts": 4}, megatron_config.Moe(4, 2, 32, True, (True, True))),
        ({"decoder_sparse_step": 2}, megatron_config.Moe(8, 2, 32, True, (False, True))),
        ({"mlp_only_layers": [1]}, megatron_config.Moe(8, 2, 32, True, (True, False))),
        (
            {"architectures": ["Qwen2MoeForCausalLM"], "shared_expert_intermediate_size": 48},
            megatron_config.Moe(8, 2, 32, True, (True, True), 48),
        ),
        # Mixtral always normalises, and its experts have the size of the MLP
        (
            {"architectures": ["MixtralForCausalLM"], "norm_topk_prob": False},
            megatron_config.Moe(8, 2, 96, True, (True, True)),
        ),
    ],
)
def test_experts_are_read_from_the_configuration(checkpoint, entries, expected):
    config = {**checkpoint.config, **MOE, **entries}
    checkpoint.config = {key: value for key, value in config.items() if value is not None}
    shape = megatron_config.model_shape(checkpoint)
    assert shape.moe == expected
    assert shape.dimension("expert_gate_up") == 2 * shape.dimension("expert_ffn") == 2 * expected.ffn
    arguments = expected.arguments()
    assert arguments["moe_router_pre_softmax"] is not expected.normalise
    assert arguments["moe_layer_freq"] == [int(sparse) for sparse in expected.layers]


@pytest.mark.parametrize(
    ("entries", "match"),
    [
        ({"num_experts_per_tok": 9}, "exceeds the 8 experts"),
        ({"num_experts_per_tok": 1}, "normalised router weights with one expert per token"),
        ({"num_experts_per_tok": "2"}, "no usable num_experts_per_tok"),
        ({"moe_intermediate_size": 0}, "no usable moe_intermediate_size"),
        ({"mlp_only_layers": [0, 1]}, "experts in no layer"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True, "sliding_window": 16}, "sliding-window"),
        ({"architectures": ["Qwen2MoeForCausalLM"]}, "no usable shared_expert_intermediate_size"),
        (
            {"architectures": ["Qwen2MoeForCausalLM"], "shared_expert_intermediate_size": 8, "qkv_bias": False},
            "qkv_bias: false",
        ),
        ({"architectures": ["MixtralForCausalLM"], "sliding_window": 16}, "sliding-window"),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "DeepseekV3ForCausalLM"),
    ],
)
def test_experts_that_megatron_would_not_compute_alike_are_refused(checkpoint, entries, match):
    checkpoint.config = {**checkpoint.config, **MOE, **entries}
    with pytest.raises(CheckpointError, match=match):
        megatron_config.model_shape(checkpoint)


def test_mixtral_without_a_window_in_its_configuration_has_none(checkpoint):
    config = {key: value for key, value in checkpoint.config.items() if key not in ("sliding_window", "rms_norm_eps")}
    checkpoint.config = {**config, **MOE, "architectures": ["MixtralForCausalLM"], "max_position_embeddings": 32768}
    assert megatron_config.model_shape(checkpoint).rms_eps == 1e-5


def test_expert_parameters_are_found_under_their_global_numbers():
    name = "decoder.layers.3.mlp.experts.local_experts.1.linear_fc1.weight"
    stored = {
        "per expert": {f"model.layers.3.mlp.experts.5.{kind}_proj.weight" for kind in ("gate", "up")},
        "mixtral": {f"model.layers.3.block_sparse_moe.experts.5.{kind}.weight" for kind in ("w1", "w3")},
        "stacked": {"model.layers.3.mlp.experts.gate_up_proj"},
    }
    for known in stored.values():
        rule = megatron_weights._rule(name, known, first_expert=4)
        assert {source for source, _ in rule.sources} == known
        assert rule.expert == 5
