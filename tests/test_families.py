"""Model families: every output of a real model is compared or listed, and engines agree tensor by tensor.

The models are real transformers (and, marked slow, real vLLM) at random weights; tolerance as in test_engines.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from family_dumps import FAMILIES
from transformers import AutoModelForCausalLM

from probe import PrecisionDebugger
from probe.compare.match import match_tensors
from probe.compare.run import compare_dumps
from probe.compare.side import read_side
from probe.compare.weights import canonical_weights
from probe.hooks.runners.job import DumpJob
from probe.hooks.runners.megatron_cpu import LocalNorm, apply_cpu_support
from probe.hooks.runners.megatron_model import require_megatron
from probe.hooks.runners.run import run_dump
from probe.store.reader import open_dump

DENSE = {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
ATTENTION = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"}
NORMS = {"input_layernorm", "post_attention_layernorm"}
GEMMA = {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
EXPERTS = {"mlp.router", "mlp.experts", "mlp"}
SHARED = {"mlp.shared_expert", "mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"}
LATENT = {
    *("self_attn.q_a_proj", "self_attn.q_a_layernorm", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa"),
    *("self_attn.kv_a_layernorm", "self_attn.kv_b_proj", "self_attn.o_proj"),
}
QK_NORMS = {"self_attn.q_norm", "self_attn.k_norm"}
LAYER_1 = {
    "llama": NORMS | ATTENTION | DENSE,
    "mistral": NORMS | ATTENTION | DENSE,
    "qwen2": NORMS | ATTENTION | DENSE,
    "qwen3": NORMS | ATTENTION | QK_NORMS | DENSE,
    "gemma2": NORMS | GEMMA | ATTENTION | DENSE,
    "gemma3": NORMS | GEMMA | ATTENTION | QK_NORMS | DENSE,
    "mixtral": NORMS | ATTENTION | EXPERTS,
    "qwen3_moe": NORMS | ATTENTION | QK_NORMS | EXPERTS,
    "qwen2_moe": NORMS | ATTENTION | EXPERTS | SHARED | {"mlp.shared_expert_gate"},
    "deepseek_v3": NORMS | LATENT | EXPERTS | SHARED,
}
"""Modules of a family's second layer whose outputs are canonical."""


def dump(folder: Path, stage: str, model: Any, *batches: list[int]) -> Path:
    with torch.no_grad(), PrecisionDebugger(dump_path=folder, stage=stage, enabled=True).start(model):
        for ids in batches:
            model(torch.tensor([ids]), use_cache=False)
    return folder


@pytest.mark.parametrize("family", LAYER_1)
def test_every_output_of_a_transformers_model_is_canonical_or_listed(tmp_path, family):
    path = make_checkpoint(tmp_path / "model", family)
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    four = [5, 6, 7, 8]  # as many tokens as heads, so that only the names tell heads from positions
    a = dump(tmp_path / "a", "rollout", model, [*four, 9, 10], four)
    b = dump(tmp_path / "b", "actor", model, four, [*four, 9, 10])
    with open_dump(a) as opened:
        side = read_side(opened)
        matching = match_tensors(side, side)
        assert not [entry for entry in matching.auxiliary_a if "not in the" in entry.reason or not entry.reason]
    labels = {m.label for m in (*matching.matched, *matching.routing)}
    outputs = {m.label.removesuffix(":output.0").removeprefix("layers.1.") for m in matching.matched}
    assert LAYER_1[family] <= outputs, LAYER_1[family] - outputs
    unknown = {label for label in labels if label.startswith("layers.1.")} - {
        f"layers.1.{name}:{slot}" for name in LAYER_1[family] for slot in ("output.0", "input.0", "ids", "weights")
    }
    assert unknown <= {"layers.1.mlp.shared_expert.down_proj:input.0"}
    report = compare_dumps(a, b)
    assert report["verdict"] == "consistent" and not report["coverage"]["proposed"]
    assert not report["coverage"]["only_a"] and not report["coverage"]["only_b"]


# -- against the real vLLM --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vllm_dumps(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    script = Path(__file__).parent / "family_dumps.py"
    # without this, vLLM runs DeepSeek through a kernel that takes bfloat16 only
    environment = {**os.environ, "VLLM_MLA_DISABLE": "1"}
    made = subprocess.run([sys.executable, script, folder], capture_output=True, text=True, env=environment)
    assert made.returncode == 0, made.stderr[-4000:]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_vllm_and_transformers_agree_on_every_canonical_tensor(vllm_dumps, tmp_path, family):
    job = DumpJob("actor", "transformers", vllm_dumps / f"{family}-model", tmp_path / "actor", dtype="float32")
    job.source = vllm_dumps / family
    report = compare_dumps(job.source, run_dump(job))
    assert report["verdict"] == "consistent", report["summary"]
    assert max(layer["rel_l2"] for layer in report["layers"]) < 2e-5
    coverage = report["coverage"]
    assert not coverage["only_a"] and not coverage["only_b"] and not coverage["proposed"]
    assert not [e for key in ("auxiliary_a", "auxiliary_b") for e in coverage[key] if "not in the" in e["reason"]]
    modules = {layer["name"].removeprefix("layers.1.") for layer in report["layers"]}
    assert LAYER_1[family] <= modules, LAYER_1[family] - modules


# -- Megatron-core's latent attention ---------------------------------------------------------------------------------


class CoreAttentionStandIn(torch.nn.Module):
    """A stand-in for TransformerEngine's attention kernel, the only one that MLASelfAttention takes; needs CUDA."""

    def __init__(self, config: Any, *args: Any, softmax_scale: float | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        out = out.permute(2, 0, 1, 3)
        return out.reshape(*out.shape[:2], -1)


def latent_model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Build megatron-core's own MLA model on the CPU around the stand-in kernel."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    for name in ("TELinear", "TEColumnParallelLinear"):  # None without TransformerEngine, where isinstance() fails
        monkeypatch.setattr(multi_latent_attention, name, type(name, (), {}))
    fusions = ("bias_activation", "bias_dropout", "masked_softmax", "gradient_accumulation")
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 96}
    latent = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 16}
    config = MLATransformerConfig(
        **sizes,
        **latent,
        **{f"{name}_fusion": False for name in fusions},
        **dict.fromkeys(("persist_layer_norm", "apply_rope_fusion", "add_bias_linear"), False),
        **dict.fromkeys(("use_cpu_initialization", "gated_linear_unit", "multi_latent_attention"), True),
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        rope_type="rope",
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    spec = get_gpt_layer_local_spec(multi_latent_attention=True, normalization="RMSNorm")
    attention = spec.submodules.self_attention.submodules
    attention.core_attention, attention.q_layernorm, attention.kv_layernorm = CoreAttentionStandIn, LocalNorm, LocalNorm
    return GPTModel(config, spec, vocab_size=128, max_sequence_length=64, position_embedding_type="rope").eval()


@pytest.mark.slow
def test_megatrons_latent_attention_has_every_canonical_name(tmp_path, monkeypatch):
    require_megatron()
    apply_cpu_support()
    ensure_parallel_state()
    model = latent_model(monkeypatch)
    ids = torch.arange(9)[None]
    with torch.no_grad(), PrecisionDebugger(dump_path=tmp_path, enabled=True).start(model):
        model(ids, ids, None)
    with open_dump(tmp_path) as opened:
        side = read_side(opened)
        matching = match_tensors(side, side)
        parameters = set(canonical_weights(side))
    labels = {match.label.removeprefix("layers.1.").removesuffix(":output.0") for match in matching.matched}
    assert labels >= NORMS | LATENT | DENSE
    assert not [entry for entry in matching.auxiliary_a if "not in the" in entry.reason]
    assert not any("rotary_emb" in label for label in labels), "rope covers a part of each head only"
    assert {f"layers.0.self_attn.{name}_a_layernorm.weight" for name in ("q", "kv")} <= parameters
    assert not any("q_norm" in name for name in parameters)


def ensure_parallel_state() -> None:
    """Start Megatron's parallel state for one process, unless it runs."""
    from megatron.core import parallel_state

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()


def test_log_probs_of_a_model_that_caps_its_logits_are_of_the_capped_ones(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(make_checkpoint(tmp_path / "model", "gemma2", tied=True)).eval()
    ids = list(range(5, 12))
    with open_dump(dump(tmp_path / "a", "actor", model, ids)) as opened, torch.no_grad():
        got = torch.from_numpy(opened.tokens["logprob_recomputed"][1:].copy())
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1].double()
    want = logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert logits.abs().max() > 3, "so large that the cap shows"
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
