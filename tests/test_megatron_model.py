"""Megatron built from Hugging Face checkpoints against transformers' eager forward on the same weights."""

from __future__ import annotations

import json
import logging

import pytest
import torch
import transformers
from checkpoints import make_checkpoint

from probe.checkpoint import Checkpoint
from probe.errors import CheckpointError, EngineError, UsageError
from probe.hooks.runners import megatron_batch, megatron_cpu, megatron_model, megatron_weights

pytestmark = pytest.mark.slow

# The last one is long enough for the scaled rotary frequencies to show.
SEQUENCES = [[5, 9, 33, 101, 7], [150, 2, 2, 88, 61, 30, 12, 190, 4], [17, 42], [(7 * i) % 197 for i in range(60)]]

# fp32 logits of these models reach about 6, where one rounding step is 5e-7. Two correct implementations add up the
# same products in another order and differ by a few such steps (2e-6 to 5e-6 seen). A wrong layout differs by several
# units (7 seen), rotary frequencies left unscaled by 0.16. 2e-5 lies between.
TOLERANCE = 2e-5
WRONG = 0.5

CASES = {
    "qwen2": {"family": "qwen2"},
    "qwen2 tied": {"family": "qwen2", "tied": True},
    "qwen2 vocabulary 256": {"family": "qwen2", "vocab": 256},
    "qwen2 sharded": {"family": "qwen2", "max_shard_size": "30KB"},
    "qwen3": {"family": "qwen3", "head_dim": 32},
    "llama": {"family": "llama"},
    "llama one group": {"family": "llama", "kv_heads": 1, "rope_theta": 10000.0},
    "llama no grouping": {"family": "llama", "kv_heads": 4},
    "llama3 rope": {
        "family": "llama",
        "max_position_embeddings": 16384,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "linear rope": {
        "family": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    },
    "mistral": {"family": "mistral"},
}

BATCHES = {
    "padded": lambda: megatron_batch.padded(SEQUENCES),
    "padded to 8": lambda: megatron_batch.padded(SEQUENCES, 8),
    "packed": lambda: megatron_batch.packed(SEQUENCES),
    "packed to 4": lambda: megatron_batch.packed(SEQUENCES, 4),
    "packed, one sequence": lambda: megatron_batch.packed(SEQUENCES[:1]),
}


def reference_logits(path):
    """Return transformers' fp32 logits of each sequence on its own."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return [model.eval()(torch.tensor([sequence])).logits[0] for sequence in SEQUENCES]


def run(model, batch):
    """Return the logits of each sequence of a batch, without its padding."""
    logits = megatron_batch.forward(model, batch)
    return [logits[batch.rows(index)] for index in range(batch.sequence.max() + 1)]


def worst_error(logits, reference):
    """Return the largest absolute difference over all sequences and the real vocabulary."""
    pairs = zip(logits, reference)
    return max((ours[:, : theirs.shape[-1]] - theirs).abs().max().item() for ours, theirs in pairs)


def edit_config(path, **entries):
    """Change entries of a checkpoint's config.json; None deletes one."""
    file = path / "config.json"
    config = {**json.loads(file.read_text()), **entries}
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def rewrite_weights(path, change):
    """Apply ``change`` to the checkpoint's state dict and save it."""
    from safetensors.torch import load_file, save_file

    state = load_file(path / "model.safetensors")
    change(state)
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory):
    """Return an untied Qwen2 checkpoint and its reference logits."""
    path = make_checkpoint(tmp_path_factory.mktemp("qwen2"))
    return path, reference_logits(path)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_logits_match_transformers(tmp_path, case):
    make_checkpoint(tmp_path, **case)
    reference = reference_logits(tmp_path)
    model = megatron_model.build_model(Checkpoint(tmp_path), dtype="float32")
    assert not model.training
    for name, batch in BATCHES.items():
        logits = run(model, batch())
        assert [tuple(tensor.shape) for tensor in logits] == [
            (length, 256) for length in map(len, SEQUENCES[: len(logits)])
        ], name
        assert worst_error(logits, reference) <= TOLERANCE, name


def test_a_causal_mask_is_megatrons_default(qwen2):
    model = megatron_model.build_model(Checkpoint(qwen2[0]), dtype="float32")
    batch = megatron_batch.padded(SEQUENCES)
    with torch.no_grad():
        explicit = model(batch.input_ids, batch.position_ids, batch.attention_mask)
        default = model(batch.input_ids, batch.position_ids, None)
    assert torch.equal(explicit, default)


def test_permuted_query_heads_are_noticed(tmp_path, qwen2):
    make_checkpoint(tmp_path)

    def swap_heads(state):
        name = "model.layers.0.self_attn.q_proj.weight"
        state[name] = state[name].roll(16, 0)

    rewrite_weights(tmp_path, swap_heads)
    model = megatron_model.build_model(Checkpoint(tmp_path), dtype="float32")
    assert worst_error(run(model, megatron_batch.padded(SEQUENCES)), qwen2[1]) > WRONG


def test_uninterleaved_qkv_is_noticed(monkeypatch, qwen2):
    def concatenate(query, key, value, heads, groups, dim, axis):
        import numpy as np

        return np.concatenate([query, key, value], axis)

    monkeypatch.setattr(megatron_weights.layout, "fuse_qkv_groups", concatenate)
    model = megatron_model.build_model(Checkpoint(qwen2[0]), dtype="float32")
    assert worst_error(run(model, megatron_batch.packed(SEQUENCES)), qwen2[1]) > WRONG


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs(tmp_path, dtype):
    make_checkpoint(tmp_path, "qwen3", dtype=dtype)
    reference = reference_logits(tmp_path)
    model = megatron_model.build_model(Checkpoint(tmp_path), dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}
    for batch in BATCHES.values():
        logits = run(model, batch())
        assert all(tensor.dtype == getattr(torch, dtype) for tensor in logits)
        # Relative error of a forward of depth 2: some tens of roundings of 2^-9 (bf16) or 2^-12 (fp16) each.
        bound = {"bfloat16": 0.05, "float16": 0.01}[dtype]
        for ours, theirs in zip(logits, reference):
            assert (ours[:, :197].float() - theirs).norm() / theirs.norm() < bound


def test_bfloat16_parameters_are_the_stored_bits(tmp_path):
    make_checkpoint(tmp_path, dtype="bfloat16")
    checkpoint = Checkpoint(tmp_path)
    model = megatron_model.build_model(checkpoint, dtype="bfloat16")
    stored = torch.from_numpy(checkpoint.tensor("model.embed_tokens.weight"))
    weight = model.embedding.word_embeddings.weight
    assert torch.equal(weight[:197].float(), stored)
    assert not weight[197:].any()


def test_cpu_support_is_announced_once(monkeypatch, caplog):
    monkeypatch.setitem(megatron_cpu._state, "applied", False)
    with caplog.at_level(logging.INFO, logger="probe"):
        megatron_cpu.apply_cpu_support(logging.getLogger("probe"))
        megatron_cpu.apply_cpu_support(logging.getLogger("probe"))
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "packed" in caplog.messages[0] and "current_device" in caplog.messages[1]
    assert megatron_cpu.cpu_support_applied()


@pytest.mark.parametrize(
    ("entries", "match"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*LlamaForCausalLM, MistralForCausalLM, Qwen2"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention"]}, "sliding-window"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "rope scaling type 'yarn'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0}}, "low_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "not one table"),
        ({"rope_parameters": [1]}, "not one table"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "no usable factor"),
        ({"rope_parameters": {"rope_theta": "1e4"}}, "no usable rope_theta"),
        ({"rms_norm_eps": "1e-6"}, "no usable rms_norm_eps"),
        ({"num_hidden_layers": "2"}, "no usable num_hidden_layers"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"vocab_size": 196}, "embed_tokens"),
        ({"num_hidden_layers": 3}, "lacks the parameter model.layers.2"),
        ({"num_hidden_layers": 1}, "unexpected parameters, e.g. model.layers.1"),
        ({"tie_word_embeddings": True}, "unexpected parameters, e.g. lm_head"),
        ({"architectures": ["LlamaForCausalLM"]}, "unexpected parameters.*k_proj.bias"),
        ({"architectures": ["Qwen3ForCausalLM"], "head_dim": 16}, "lacks the parameter .*q_norm"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_not_be_exact_is_refused(tmp_path, qwen2, entries, match):
    for file in qwen2[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    edit_config(tmp_path, **entries)
    with pytest.raises(CheckpointError, match=match):
        megatron_model.build_model(Checkpoint(tmp_path), dtype="float32")


def test_wrongly_shaped_parameter_is_named(tmp_path):
    make_checkpoint(tmp_path)

    def widen(state):
        state["model.layers.1.mlp.up_proj.weight"] = torch.zeros(97, 64)

    rewrite_weights(tmp_path, widen)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight .*\(97, 64\).*\(96, 64\)"):
        megatron_model.build_model(Checkpoint(tmp_path), dtype="float32")


def test_a_stored_copy_of_the_tied_head_is_accepted(tmp_path):
    make_checkpoint(tmp_path, tied=True)
    reference = reference_logits(tmp_path)

    def store_head(state):
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
        state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    rewrite_weights(tmp_path, store_head)
    model = megatron_model.build_model(Checkpoint(tmp_path), dtype="float32")
    assert worst_error(run(model, megatron_batch.padded(SEQUENCES)), reference) <= TOLERANCE


def test_transformer_engine_names_have_rules():
    for name in ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"):
        sources = megatron_weights._rule(f"decoder.layers.7.{name}").sources
        assert sources[0][0].startswith("model.layers.7.")
    with pytest.raises(CheckpointError, match=r"linear_fc1\.bias has no counterpart"):
        megatron_weights._rule("decoder.layers.0.mlp.linear_fc1.bias")


def test_batch_inputs():
    batch = megatron_batch.packed(SEQUENCES[:3], 4)
    assert batch.input_ids.shape == (1, 24)
    assert batch.packed_seq_params.cu_seqlens_q.tolist() == [0, 8, 20, 24]
    assert batch.position_ids[0, 7:10].tolist() == [7, 0, 1]
    assert batch.input_ids[batch.rows(1)].tolist() == SEQUENCES[1]
    batch = megatron_batch.padded(SEQUENCES[:3], 4)
    assert batch.input_ids.shape == batch.position_ids.shape == (3, 12)
    assert batch.attention_mask.shape == (1, 1, 12, 12)
    assert batch.attention_mask[0, 0, 3].tolist() == [False] * 4 + [True] * 8
    assert batch.input_ids[batch.rows(2)].tolist() == SEQUENCES[2]


@pytest.mark.parametrize("make", [megatron_batch.padded, megatron_batch.packed])
@pytest.mark.parametrize(("sequences", "multiple"), [([], 1), ([[1], []], 1), ([[1]], 0)])
def test_impossible_batches(make, sequences, multiple):
    with pytest.raises(UsageError, match="cannot make a batch"):
        make(sequences, multiple)


def test_engine_errors(qwen2, monkeypatch):
    checkpoint = Checkpoint(qwen2[0])
    with pytest.raises(EngineError, match="int8"):
        megatron_model.build_model(checkpoint, dtype="int8")
    model = megatron_model.build_model(checkpoint, dtype="float32")
    with pytest.raises(EngineError, match="outside the model's vocabulary"):
        run(model, megatron_batch.padded([[1, 256]]))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EngineError, match="not available"):
        megatron_model.build_model(checkpoint, device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(EngineError, match="already runs Megatron on the CPU"):
        megatron_model.build_model(checkpoint, device="cuda")


def test_missing_megatron_names_the_install_command(qwen2, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "megatron.core.models.gpt", None)
    with pytest.raises(EngineError, match=r'pip install "probe-rl\[actor\]"'):
        megatron_model.build_model(Checkpoint(qwen2[0]))
