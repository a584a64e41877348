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
}


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
    if family == "mistral":
        settings["sliding_window"] = None
    model = model_class(config_class(**{**settings, **config})).float()
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
