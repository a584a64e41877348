"""The config and environment gates: differences in what the model is, and in what it ran on."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from probe.compare.gates import SHOWN, Gate
from probe.compare.names.base import key_of
from probe.compare.side import Side, vocab_is_padded
from probe.store.reader import Dump

SEMANTIC = frozenset(
    {
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        *("head_dim", "vocab_size", "hidden_act", "rms_norm_eps", "layer_norm_eps", "rope_theta", "rope_scaling"),
        *("rope_type", "partial_rotary_factor", "attention_bias", "mlp_bias", "qkv_bias", "tie_word_embeddings"),
        *("sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "query_pre_attn_scalar"),
        *("attn_logit_softcapping", "final_logit_softcapping", "num_experts", "num_local_experts", "attention_scale"),
        *("num_experts_per_tok", "norm_topk_prob", "routed_scaling_factor", "scoring_func", "n_group", "topk_group"),
        *("moe_intermediate_size", "first_k_dense_replace", "attention_multiplier", "residual_multiplier"),
    }
)
"""Config keys that change what the model computes: a difference fails. Others only warn."""

IGNORED = frozenset(
    {
        *("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "auto_map", "model_type"),
        *("initializer_range", "attention_dropout", "architectures", "eos_token_id", "bos_token_id", "pad_token_id"),
        *("_attn_implementation", "attn_implementation", "return_dict", "output_attentions", "output_hidden_states"),
    }
)
"""Config keys without influence on a forward pass, or that the environment gate reports."""

SCALARS = {
    "eps": ("eps", "variance_epsilon"),
    "attention scale": ("scaling", "scale", "softmax_scale"),
    "rope base": ("base", "rotary_base"),
    "rope pairing (is_neox_style)": ("is_neox_style",),
    "rotary dimension": ("rotary_dim",),
    "sliding window": ("sliding_window",),
}
"""What a module scalar means -> the attribute names that engines give it."""

SAME_SCALAR = 1e-6
"""Relative difference of equal scalars: 1e-6 as a float32 is 9.99999997e-7."""

NUMERIC = re.compile(
    r"torch|torch[_-]npu|cuda|cudnn|cann|triton|flash[_-]attn|transformer[_-]engine|mindspeed|vllm|megatron[_-]core"
    r"|env\.(VLLM|NVTE|NCCL|HCCL|LCCL|CUBLAS|CUDA|NVIDIA|TORCH|PYTORCH|ASCEND|ACL|MKL|ONEDNN|TASK|INF_NAN)\w*"
    r"|dtype|device|tf32|deterministic.*|matmul.*",
    re.IGNORECASE,
)
"""Environment keys that can change numbers: a difference warns; others are only listed."""


def config_gate(a: Side, b: Side) -> Gate:
    """Compare the models' configs and the scalars of matched modules; what changes the function fails."""
    configs = [flat_config(side.dump.manifest) for side in (a, b)]
    if vocab_is_padded(a.dump) or vocab_is_padded(b.dump):
        configs = [{key: value for key, value in config.items() if key != "vocab_size"} for config in configs]
    keys, alone = sorted(configs[0] | configs[1]), list[str]()
    if any(_from_object(side.dump.manifest) for side in (a, b)):
        alone = sorted((configs[0].keys() ^ configs[1].keys()) & SEMANTIC)
        keys = sorted(configs[0].keys() & configs[1].keys())
    differing = [key for key in keys if not _equal(*(config.get(key) for config in configs))]
    said = {key: f"{key} is {configs[0].get(key)} in a, {configs[1].get(key)} in b" for key in differing}
    semantic = [said[key] for key in differing if key in SEMANTIC] + module_scalars(a, b)
    others = [said[key] for key in differing if key not in SEMANTIC]
    if semantic:
        return Gate("config", "fail", _sentence(semantic))
    if not configs[0] or not configs[1]:
        return Gate("config", "skipped", "a side's manifest holds no model config")
    if others:
        return Gate("config", "warn", _sentence(others))
    unsaid = f"; stated by one side only: {', '.join(alone)}" if alone else ""
    return Gate("config", "pass", f"model configs and module scalars agree{unsaid}")


def _from_object(manifest: Mapping[str, Any]) -> bool:
    """Tell whether a config was read off a live model, which states every default, or only what the engine keeps.

    Against such a config, an entry that one side lacks says nothing; between two config.json files it does.
    """
    return (manifest.get("model") or {}).get("config_source") == "object"


def _sentence(items: list[str]) -> str:
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return "; ".join(items[:SHOWN]) + more


def flat_config(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config's keys that matter, nested ones lifted (``rope_parameters.rope_theta`` is ``rope_theta``)."""
    config = (manifest.get("model") or {}).get("config") or {}
    flat: dict[str, Any] = {}
    for key, value in {**config, **(config.get("text_config") or {})}.items():
        if key in ("rope_parameters", "rope_scaling") and isinstance(value, Mapping):
            for name, item in value.items():
                flat.setdefault("rope_type" if name == "type" else name, item)
        elif not isinstance(value, Mapping) and key not in IGNORED and value is not None:
            flat[key] = value
    return _without_defaults(flat)


def _without_defaults(flat: dict[str, Any]) -> dict[str, Any]:
    """Drop entries that say what their absence says: a config.json is short, a config object states every default."""
    absent: list[tuple[str, Any]] = [("rope_type", "default")]
    if flat.get("use_sliding_window") is False:
        absent += [(key, flat.get(key)) for key in ("sliding_window", "max_window_layers", "use_sliding_window")]
    layers = flat.get("layer_types")
    if isinstance(layers, list) and all(kind == "full_attention" for kind in layers):
        absent += [("layer_types", layers)]
    hidden, heads = flat.get("hidden_size"), flat.get("num_attention_heads")
    if isinstance(hidden, int) and isinstance(heads, int) and heads:
        flat.setdefault("head_dim", hidden // heads)
    return {key: value for key, value in flat.items() if (key, value) not in absent}


def module_scalars(a: Side, b: Side) -> list[str]:
    """Return a sentence per module scalar (eps, scale, rope base, ...) that differs between matched modules."""
    scalars = [_scalars_by_module(side) for side in (a, b)]
    found = []
    for module, left in scalars[0].items():
        right = scalars[1].get(module, {})
        for meaning, value in left.items():
            if meaning in right and not _equal(value, right[meaning]):
                found.append(f"{meaning} of {module} is {value!r} in a, {right[meaning]!r} in b")
    return found


def _scalars_by_module(side: Side) -> dict[str, dict[str, Any]]:
    """Return canonical module -> meaning -> value, for outputs that one native module gives whole."""
    result: dict[str, dict[str, Any]] = {}
    for label, source in side.resolution.sources.items():
        module, slot = key_of(label)
        path = side.natives[source.native[0]][0]
        info = side.dump.modules.get(path)
        if info is None or not slot.startswith("output."):
            continue
        for meaning, names in SCALARS.items():
            value = next((info.info[name] for name in names if name in info.info), None)
            if value is not None:
                result.setdefault(module, {})[meaning] = value
    return result


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, int | float) and isinstance(right, int | float):
        return math.isclose(left, right, rel_tol=SAME_SCALAR)
    return bool(left == right)


# -- environment ------------------------------------------------------------------------------------------------------


def environment_entries(a: Dump, b: Dump) -> list[dict[str, Any]]:
    """Return every known fact about both runs; differences that can change numbers have severity ``warn``.

    A fact that only one side states counts between runs of one engine; another engine has switches of its own.
    """
    facts = [_environment(dump) for dump in (a, b)]
    entries = []
    for key in {**facts[0], **facts[1]}:
        left, right = facts[0].get(key), facts[1].get(key)
        comparable = a.engine == b.engine or None not in (left, right)
        warn = left != right and comparable and bool(NUMERIC.fullmatch(key))
        entries.append({"key": key, "a": left, "b": right, "severity": "warn" if warn else "info"})
    return sorted(entries, key=lambda entry: entry["severity"] != "warn")


def _environment(dump: Dump) -> dict[str, str | None]:
    engine = dump.manifest.get("engine") or {}
    facts: dict[str, Any] = {name: dump.manifest.get(name) for name in ("dtype", "device")}
    facts |= {str(engine.get("name") or "engine"): engine.get("version")} if engine else {}
    facts |= {f"topology.{key}": value for key, value in (dump.manifest.get("topology") or {}).items()}
    facts |= dump.manifest.get("environment") or {}
    return {key: None if value is None else str(value) for key, value in facts.items()}


def environment_gate(entries: list[dict[str, Any]]) -> Gate:
    """Warn about differences that can change numbers."""
    relevant = [f"{e['key']} is {e['a']} in a, {e['b']} in b" for e in entries if e["severity"] == "warn"]
    if not relevant:
        return Gate("environment", "pass", "nothing that is known to change numbers differs")
    return Gate("environment", "warn", _sentence(relevant))
