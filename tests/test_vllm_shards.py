"""How vLLM's ranks share a model, on doubles of its module tree, and what vllm.LLM is given (no engine is started)."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn

from probe.errors import CaptureError
from probe.hooks.engines.vllm_parallel import ShardMap, weight_split
from probe.hooks.runners.job import DumpJob, Parallel, TokenSequence
from probe.hooks.runners.vllm import cpu_binding, llm_arguments


def double(name, **attributes):
    """Return a module of a made-up class in vllm-ascend's package: a double, as that package needs an NPU."""
    made = type(name, (nn.Module,), {"__module__": "vllm_ascend.ops"})()
    for key, value in attributes.items():
        setattr(made, key, value)
    return made


def ascend_layer(tp=2, reduce_results=True):
    """Return the module tree of one decoder layer as vllm-ascend builds it, keyed by path."""
    column = {"gather_output": False, "tp_size": tp, "tp_rank": tp - 1}
    row = {"input_is_parallel": True, "reduce_results": reduce_results, "tp_size": tp, "tp_rank": tp - 1}
    norm = double("AscendRMSNorm")
    norm.weight = nn.Parameter(torch.ones(32))
    layer = "model.layers.0"
    return {
        "model": double("Qwen3Model"),
        "model.embed_tokens": double("AscendVocabParallelEmbedding", num_embeddings_per_partition=50, tp_size=tp),
        layer: double("Qwen3DecoderLayer"),
        f"{layer}.input_layernorm": double("AscendRMSNorm"),
        f"{layer}.self_attn": double("Qwen3Attention"),
        f"{layer}.self_attn.qkv_proj": double("AscendQKVParallelLinear", **column),
        f"{layer}.self_attn.q_norm": norm,
        f"{layer}.self_attn.rotary_emb": double("AscendRotaryEmbedding"),
        f"{layer}.self_attn.attn": double("Attention", head_size=32),
        f"{layer}.self_attn.o_proj": double("AscendRowParallelLinear", **row),
        f"{layer}.mlp": double("Qwen3MLP"),
        f"{layer}.mlp.gate_up_proj": double("AscendMergedColumnParallelLinear", **column),
        f"{layer}.mlp.act_fn": double("AscendSiluAndMul"),
        f"{layer}.mlp.down_proj": double("AscendRowParallelLinear", **row),
        f"{layer}.mlp.gate": double("AscendReplicatedLinear", quant_method=1, output_size=8, tp_size=tp),
        "model.norm": double("AscendRMSNorm"),
        "logits_processor": double("AscendLogitsProcessor"),
        "visual.merger": double("SomethingElse"),
    }


LIES = {
    "": ("replicated", "replicated"),
    "model": ("replicated", "replicated"),
    "model.embed_tokens": ("replicated", "replicated"),
    "model.layers.0": ("replicated", "replicated"),
    "model.layers.0.input_layernorm": ("replicated", "replicated"),
    "model.layers.0.self_attn": ("replicated", "replicated"),
    "model.layers.0.self_attn.qkv_proj": ("replicated", "columns"),
    "model.layers.0.self_attn.q_norm": ("columns", "columns"),
    "model.layers.0.self_attn.rotary_emb": ("replicated", "columns"),
    "model.layers.0.self_attn.attn": ("columns", "columns"),
    "model.layers.0.self_attn.o_proj": ("columns", "replicated"),
    "model.layers.0.mlp": ("replicated", "replicated"),
    "model.layers.0.mlp.gate_up_proj": ("replicated", "columns"),
    "model.layers.0.mlp.act_fn": ("columns", "columns"),
    "model.layers.0.mlp.down_proj": ("columns", "replicated"),
    "model.layers.0.mlp.gate": ("replicated", "replicated"),
    "model.norm": ("replicated", "replicated"),
    "logits_processor": ("replicated", "replicated"),
    "visual.merger": ("", ""),
}
"""Path -> how input.0 and output.0 lie with two tensor-parallel ranks."""


def test_how_the_tensors_of_a_layer_lie():
    shards = ShardMap()
    shards.modules.update(ascend_layer())
    assert {path: (shards.lies(path, "input.0"), shards.lies(path, "output.0")) for path in LIES} == LIES
    assert shards.lies("model.layers.0.self_attn.rotary_emb", "input.1") == "columns"
    assert shards.lies("model.layers.0.input_layernorm", "output.1") == "replicated"


def test_sums_left_open_are_partial():
    shards = ShardMap()
    shards.modules.update(ascend_layer(reduce_results=False))
    for path in ("self_attn.o_proj", "self_attn", "mlp.down_proj", "mlp"):
        assert shards.lies(f"model.layers.0.{path}", "output.0") == "partial", path
    assert shards.lies("model.layers.0.mlp", "input.0") == "replicated"
    assert shards.lies("model.layers.0", "output.0") == "replicated"


@pytest.mark.parametrize("attention", ["self_attn", "self_attn.mla_attn"])
def test_the_one_rotary_key_of_latent_attention_is_on_every_rank(attention):
    shards, path = ShardMap(), f"model.layers.0.{attention}"
    shards.modules.update({f"{path}.{name}": double("X") for name in ("rotary_emb", "kv_a_layernorm")})
    assert [shards.lies(f"{path}.rotary_emb", f"input.{n}") for n in range(3)] == [
        "replicated",
        "columns",
        "replicated",
    ]
    assert [shards.lies(f"{path}.rotary_emb", f"output.{n}") for n in range(2)] == ["columns", "replicated"]


def test_a_norm_over_all_heads_is_not_declared():
    shards = ShardMap()
    shards.modules.update(ascend_layer())
    shards.modules["model.layers.0.self_attn.q_norm"].weight = nn.Parameter(torch.ones(128))
    assert shards.lies("model.layers.0.self_attn.q_norm", "output.0") == ""


def test_how_parameters_are_shared():
    layer, weight, bias = ascend_layer(), torch.zeros(6, 10), torch.zeros(6)

    def split(path, leaf, parameter):
        return weight_split(f"{path}.{leaf}", parameter, layer[path])

    assert split("model.layers.0.self_attn.qkv_proj", "weight", weight) == (0, 0)
    assert split("model.layers.0.self_attn.qkv_proj", "bias", bias) == (0, 0)
    assert split("model.layers.0.self_attn.o_proj", "weight", weight) == (1, 10)
    assert split("model.layers.0.self_attn.o_proj", "bias", bias) == (-1, 0)
    assert split("model.embed_tokens", "weight", weight) == (0, 0)
    assert split("model.norm", "weight", bias) == (-1, 0)
    assert split("model.layers.0.mlp.gate", "weight", weight) == (-1, 0)
    experts = double("FusedMoE", moe_config=types.SimpleNamespace(tp_size=2, tp_rank=1))
    assert weight_split("e.w13_weight", torch.zeros(4, 6, 10), experts) == (0, 0)
    assert weight_split("e.w2_weight", torch.zeros(4, 10, 3), experts) == (1, 3)


@pytest.mark.parametrize(
    ("cpus", "ranks", "bound"),
    [([0, 1], 2, "0|1"), ([0, 1, 2, 3, 7], 2, "0,1|2,3"), ([4], 2, "nobind")],
)
def test_ranks_share_the_cpus(cpus, ranks, bound):
    assert cpu_binding(cpus, ranks) == bound


def arguments(folder, **changes):
    """Return what vllm.LLM would be given for a small job."""
    job = DumpJob("rollout", "vllm", folder, folder / "dump", **changes)
    return llm_arguments(job, [TokenSequence("a", [1, 2, 3], 3)], "float32")


def test_the_ranks_of_a_job_are_vllms_arguments(tmp_path):
    found = arguments(tmp_path, parallel=Parallel(tp=2, pp=3, ep=2))
    assert (found["tensor_parallel_size"], found["pipeline_parallel_size"]) == (2, 3)
    assert found["enable_expert_parallel"] is True
    assert not {"tensor_parallel_size", "enable_expert_parallel"} & arguments(tmp_path).keys()
    assert found["async_scheduling"] is False and found["enable_prefix_caching"] is False
    assert arguments(tmp_path, engine_args={"enable_prefix_caching": True})["enable_prefix_caching"] is True


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"enforce_eager": False}, "hooks would never fire"),
        ({"speculative_config": {"method": "ngram"}}, "speculative decoding"),
        ({"data_parallel_size": 2}, "no data-parallel ranks"),
    ],
    ids=lambda given: str(given)[:20],
)
def test_arguments_that_a_dump_cannot_work_with_are_refused(tmp_path, given, said):
    with pytest.raises(CaptureError, match=said):
        arguments(tmp_path, engine_args=given)
