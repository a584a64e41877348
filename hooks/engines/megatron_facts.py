"""What a Megatron model is, in the words of a Hugging Face configuration: from its own objects, for want of a file."""

from __future__ import annotations

from typing import Any

CONFIG = {
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "rms_norm_eps": "layernorm_epsilon",
    "normalization": "normalization",
    "layernorm_zero_centered_gamma": "layernorm_zero_centered_gamma",
    "num_experts": "num_moe_experts",
    "num_experts_per_tok": "moe_router_topk",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
}
"""Hugging Face's word for a setting -> Megatron's attribute; those that a configuration lacks are left out."""
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What Megatron's ``rope_scaling`` means beside its factor (RotaryEmbedding._apply_scaling, megatron-core 0.16.1)."""


def config_of(model: Any) -> dict[str, Any]:
    """Return the configuration of a GPTModel (or of a pipeline stage of one) as Hugging Face would write it."""
    found = {hf: getattr(model.config, name, None) for hf, name in CONFIG.items()}
    found["tie_word_embeddings"] = getattr(model, "share_embeddings_and_output_weights", None)
    found["rope_parameters"] = _rope(model)
    known = {hf: value for hf, value in found.items() if value is not None}
    return known | {"vocab_size": getattr(model, "vocab_size", 0)}


def _rope(model: Any) -> dict[str, Any] | None:
    """Return how positions are rotated, None where the model does not say it or rotates none."""
    kind = getattr(model, "position_embedding_type", "")
    if kind == "yarn":
        return {"rope_type": kind}  # without its settings, so that nobody takes another base for granted
    rotary, base = getattr(model, "rotary_pos_emb", None), getattr(model, "rotary_base", None)
    frequencies = getattr(rotary, "inv_freq", None)
    if base is None or frequencies is None or kind not in ("rope", "mrope"):
        return None
    stretch = getattr(rotary, "seq_len_interpolation_factor", None)
    if getattr(model, "rotary_scaling", False):
        slowest = float(base) ** (1 / len(frequencies) - 1)  # the model does not keep the factor, its table does
        return {"rope_type": "llama3", "rope_theta": float(base), "factor": slowest / float(frequencies[-1]), **LLAMA3}
    if stretch is not None:
        return {"rope_type": "linear", "rope_theta": float(base), "factor": float(stretch)}
    return {"rope_type": "default", "rope_theta": float(base)}
