"""Models that faults are put into: tiny, but with the statistics of trained ones, and texts that they generated.

Trained-like means: attention that is neither uniform nor one-hot (scores of standard deviation 1 to 3), a residual
stream that every layer adds to, norm weights spread around one with two outlier channels, biases that matter, logits
peaked enough that sampled tokens have log-probs of -1 to -4.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

LAYERS, HIDDEN, FFN, HEADS, KV_HEADS, VOCAB = 4, 128, 512, 4, 2, 320
PLACES = {"early": 0, "middle": LAYERS // 2, "late": LAYERS - 1}
"""Where a fault is put: the first layer, one in the middle, the last."""
EXPERTS, TOP_K, EXPERT_FFN = 8, 2, 64
WINDOW = 24
OUTLIER = 6.0
LENGTHS = ((30, 110), (11, 26), (5, 14))
"""(prompt, whole) lengths of the sequences: one passes position 97, the last micro-batch holds one alone."""
TOP_P, TOP_K_TOKENS = 0.9, 20
"""The texts are sampled from the likeliest tokens only, so that a renormalised log-prob of each is defined."""
LONG = (8, 250)
"""Sequences of 2,000 tokens in all: how many, and how long each."""


@dataclass(frozen=True)
class Family:
    """A model family: transformers' names, and the entries of its config beyond the common ones."""

    config: str
    model: str
    settings: dict[str, Any] = field(default_factory=dict)


transformers.utils.logging.disable_progress_bar()

SPARSE: dict[str, Any] = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "moe_intermediate_size": EXPERT_FFN,
    "shared_expert_intermediate_size": EXPERT_FFN,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}
FAMILIES = {
    "dense": Family("Qwen2Config", "Qwen2ForCausalLM"),
    "tied": Family("Qwen2Config", "Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "normed": Family("Qwen3Config", "Qwen3ForCausalLM"),
    "window": Family("MistralConfig", "MistralForCausalLM", {"sliding_window": WINDOW}),
    "capped": Family(
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            "sliding_window": 64,
            "query_pre_attn_scalar": HIDDEN // HEADS,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 4.0,
            "hidden_activation": "gelu_pytorch_tanh",
        },
    ),
    "experts": Family("Qwen2MoeConfig", "Qwen2MoeForCausalLM", SPARSE),
    "ties": Family("Qwen2MoeConfig", "Qwen2MoeForCausalLM", SPARSE),
}
"""dense: Qwen2 (biases, grouped queries); tied: one matrix for embedding and head; normed: Qwen3 (q and k norms);
window: Mistral with a sliding window; capped: Gemma 2 (soft caps, w + 1 norms, gelu); experts: Qwen2-MoE with a shared
expert; ties: the same, with two experts whose router logits are equal."""


def make_model(path: Path, family: str, dtype: str) -> Path:
    """Save a checkpoint of a family in a dtype under ``path`` and return the path."""
    spec = FAMILIES[family]
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **spec.settings,
    }
    model = getattr(transformers, spec.model)(getattr(transformers, spec.config)(**settings)).float()
    draw_weights(model, torch.Generator().manual_seed(sum(map(ord, family))))
    for block in model.model.layers if family == "ties" else ():
        block.mlp.gate.weight.data[3] = block.mlp.gate.weight.data[2]
    model.to(getattr(torch, dtype)).save_pretrained(path)
    return path


def draw_weights(model: Any, generator: torch.Generator) -> None:
    """Draw every parameter.

    Matrices N(0, 1.2 / sqrt(inputs)), of a block's last projection sqrt(layers) smaller so that the stream grows
    slowly; norm weights log-normal (0.3) with two channels six times as large; biases N(0, 0.2).
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 1, generator=generator)
            if name.endswith("bias"):
                parameter.mul_(0.2)
            elif "norm" in name:
                parameter.mul_(0.3).exp_()
                if "layernorm" in name:
                    parameter[:2] *= OUTLIER
                if "Gemma" in type(model).__name__:  # whose norms multiply with w + 1
                    parameter.sub_(1)
            elif "embed_tokens" not in name:
                last = "o_proj" in name or "down_proj" in name
                parameter.mul_(1.2 / math.sqrt(parameter.shape[-1]) / (math.sqrt(LAYERS) if last else 1))
            elif getattr(model.config, "tie_word_embeddings", False):
                parameter.mul_(2.0 / math.sqrt(parameter.shape[-1]))


def load_model(path: Path, dtype: str) -> Any:
    """Load a checkpoint as ``probe dump --engine transformers`` does."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(path), dtype=getattr(torch, dtype), local_files_only=True
    )
    return model.eval()


def read_config(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's config.json."""
    return dict(json.loads((path / "config.json").read_text()))


def make_texts(model: Any, seed: int = 3) -> list[list[int]]:
    """Return token ids of :data:`LENGTHS`: random prompts, continued by the model's own samples."""
    generator = torch.Generator().manual_seed(seed)
    texts = []
    for prompt, whole in LENGTHS:
        ids = torch.randint(0, VOCAB, (1, prompt), generator=generator)
        cache = None
        fed = ids
        with torch.no_grad():
            for _ in range(whole - prompt):
                output = model(input_ids=fed, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                likely = output.logits[0, -1].float().softmax(-1).sort(descending=True)
                inside = likely.values.cumsum(-1) - likely.values < TOP_P
                inside[TOP_K_TOKENS:] = False
                fed = likely.indices[torch.multinomial(likely.values * inside, 1, generator=generator)][None]
                ids = torch.cat([ids, fed], 1)
        texts.append(ids[0].tolist())
    return texts


def long_texts(seed: int = 4) -> list[list[int]]:
    """Return token ids of :data:`LONG`, drawn at random."""
    return torch.randint(0, VOCAB, LONG, generator=torch.Generator().manual_seed(seed)).tolist()
