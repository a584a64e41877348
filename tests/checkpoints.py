"""Make tiny random Hugging Face checkpoints for tests.

The weights are large enough that every parameter matters: transformers zero-initialises biases and sets norm weights
to one, and a converter that drops or permutes those would go unnoticed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

FAMILIES = {
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM"),
    "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM"),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM"),
}
"""Family -> names of its configuration and model classes in transformers."""

EXPERTS = 4
SETTINGS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None, "num_local_experts": EXPERTS, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    },
    "qwen3_moe": {
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    },
    # the cap on attention scores is left out: transformers' sdpa kernel, its default, does not apply it
    "gemma2": {"sliding_window": 64, "query_pre_attn_scalar": 16, "attn_logit_softcapping": None},
    "gemma3": {"sliding_window": 64, "query_pre_attn_scalar": 16},
    # one dense layer and one of experts, queries through a low-rank projection
    "deepseek_v3": {
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
        "head_dim": 32,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 0,
    },
}
"""What a family's configuration needs beyond the common sizes."""


def make_checkpoint(
    path: str | Path,
    family: str = "qwen2",
    *,
    tied: bool = False,
    dtype: str = "float32",
    vocab: int = 197,
    layers: int = 2,
    hidden: int = 64,
    intermediate: int = 96,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    rope_theta: float = 1_000_000.0,
    max_shard_size: str = "5GB",
    seed: int = 0,
    **config: Any,
) -> Path:
    """Save a tiny random causal language model of ``family`` under ``path`` and return the path.

    ``config`` overrides entries of the transformers configuration; ``max_shard_size`` forces shards when small.
    """
    import torch
    import transformers

    config_class, model_class = (getattr(transformers, name) for name in FAMILIES[family])
    settings: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim or hidden // heads,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if family == "gemma3":  # one rope for each kind of layer, both at their defaults
        del settings["rope_parameters"]
    model = model_class(config_class(**{**settings, **SETTINGS.get(family, {}), **config})).float()
    _randomise(model, torch.Generator().manual_seed(seed))
    model.to(getattr(torch, dtype)).save_pretrained(path, max_shard_size=max_shard_size)
    return Path(path)


def _randomise(model: Any, generator: Any) -> None:
    """Draw every parameter: biases N(0, 0.1), norm weights U(0.5, 1.5), matrices N(0, 0.15)."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1, generator=generator)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0, 0.15, generator=generator)
