"""Models in which a row depends on later rows: known from what their configuration and modules declare, never guessed.

In such a model the rows of a prompt are other rows once a response follows it, so that a trainer's forward of both says
nothing of what a rollout engine's prefill of the prompt alone should have computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

CONFIG: dict[str, tuple[Any, ...]] = {
    "is_causal": (False,),
    "use_bidirectional_attention": (True, "all"),
    "prefix_lm": (True,),
    "causal": (False,),
    "attn_type": ("bi",),
}
"""Field of a Hugging Face configuration -> values with which text sees later text (transformers 5.19).

``is_causal``: any decoder (masking_utils); ``use_bidirectional_attention``: the Gemma families, PaliGemma, Step 3
("vision" joins image tokens only, which are all of the prompt); ``prefix_lm``: HRM-Text, whose caller draws the prefix;
``causal``: XLM and FlauBERT; ``attn_type``: XLNet."""
MODEL_TYPES = ("llada", "dream", "diffusion_gemma", "cpmant")
"""``model_type``, in lower case, of models whose own code attends to both sides: diffusion language models, CPM-Ant."""
ENCODERS = ("big_bird", "megatron-bert", "rembert", "roformer")
"""``model_type`` of models that attend to both sides unless ``is_decoder``, and whose modules do not say so."""
CAPACITY = ("moe_expert_capacity_factor", "expert_capacity")
"""Field that makes experts drop tokens over their capacity, so that the rows of a batch compete (Megatron's, null
without it; Switch's and NLLB's)."""
MASKS = ("no_mask", "padding")
"""Megatron's ``attn_mask_type`` of attention to both sides; what ``arbitrary`` hides only a batch's mask says."""
OTHER_PARTS = (
    *("vision", "visual", "image", "audio", "video", "speech", "protein"),
    *("cross", "encoder_attn", "encoder_decoder"),
)
"""Parts of a module's path whose attention is to something else than the text."""
MASKED_BY_ARGUMENT = ("BigBirdPegasusDecoderAttention",)
"""Classes of attention that say ``is_causal = False`` and are given a causal mask."""


def not_causal(model: torch.nn.Module) -> str:
    """Return what declares that rows of a model depend on later ones, empty where nothing does.

    An encoder-decoder's encoder sees the prompt alone, and its decoder is causal.
    """
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        return ""
    configs = [c for c in (config, text_config(model)) if hasattr(c, "__dict__")]
    fields = [{"model_type": getattr(c, "model_type", None)} | vars(c) for c in configs]  # which is the class's
    return next((said for f in fields if (said := declared(f))), "") or _in_modules(model)


def declared(config: Mapping[str, Any]) -> str:
    """Return what a configuration's fields (a ``config.json``, or Megatron's) declare, empty where nothing."""
    text = config.get("text_config")
    for fields in (config, text) if isinstance(text, Mapping) else (config,):
        for name, values in CONFIG.items():
            if any(type(fields.get(name)) is type(value) and fields[name] == value for value in values):
                return f"config.{name}={fields[name]}"
        kind = str(fields.get("model_type")).lower()
        if kind in MODEL_TYPES or (kind in ENCODERS and not fields.get("is_decoder")):
            return f"config.model_type={fields['model_type']}"
        found = next((name for name in CAPACITY if fields.get(name) is not None), None)
        if found is not None and not config.get("is_encoder_decoder"):
            return f"config.{found}={fields[found]}"
    return ""


def prompt_facts(said: str, prompts_only: bool) -> dict[str, Any]:
    """Return what a manifest says of rows that depend on later ones: ``not_causal``, which is what was ``said`` of the
    model, and under PROMPTS_ONLY ``prompts``: their rows are cut out of whole sequences unless somebody knows better.
    """
    return ({"not_causal": said} if said else {}) | ({"prompts": "slice"} if prompts_only else {})


def text_config(model: torch.nn.Module) -> Any:
    """Return the configuration of a model's text, its whole configuration where it names no other, None without any."""
    config = getattr(model, "config", None)
    return _asked(config, "get_text_config") or config


def _asked(owner: Any, name: str) -> Any:
    """Return what a method of Hugging Face's says, None where an object has none like it."""
    try:
        return getattr(owner, name)()
    except Exception:  # another library's method of this name, or a model of several texts
        return None


def _in_modules(model: torch.nn.Module) -> str:
    """Return which module's attention says that it is not causal."""
    decoder = _asked(model, "get_decoder")
    for path, module in (decoder if isinstance(decoder, torch.nn.Module) else model).named_modules():
        words = f"{path}.{type(module).__name__}".lower()
        if any(part in words for part in OTHER_PARTS) or type(module).__name__ in MASKED_BY_ARGUMENT:
            continue
        if "attention" in words and getattr(module, "is_causal", None) is False:
            return f"{type(module).__name__}.is_causal=False"
        if getattr(getattr(module, "attn_mask_type", None), "name", None) in MASKS:
            return f"{type(module).__name__}.attn_mask_type={module.attn_mask_type.name}"
    return ""
