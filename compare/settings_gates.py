"""The config gate: differences in what the model is, in its config and in the scalars of its modules."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from probe.compare.floors.quantised import declared
from probe.compare.gates import SHOWN, Gate, GateFinding
from probe.compare.names.base import key_of
from probe.compare.side import Side, vocab_is_padded
from probe.store.schema import ModuleInfo

SEMANTIC = frozenset(
    {
        *(
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
        ),
        *("mscale", "mscale_all_dim", "attention_factor", "layernorm_zero_centered_gamma", "qkv_bias"),
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        *("head_dim", "vocab_size", "hidden_act", "rms_norm_eps", "layer_norm_eps", "rope_theta", "rope_scaling"),
        *("rope_type", "partial_rotary_factor", "attention_bias", "mlp_bias", "tie_word_embeddings"),
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

CAUSES = {
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps"), "norm-eps"),
    **dict.fromkeys(("rope_theta", "rope_local_base_freq"), "rope-base"),
    **dict.fromkeys(
        (
            *("rope_scaling", "rope_type", "partial_rotary_factor", "factor", "low_freq_factor", "high_freq_factor"),
            *("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
            "attention_factor",
        ),
        "rope-scaling",
    ),
    **dict.fromkeys(("attention_scale", "query_pre_attn_scalar", "attention_multiplier"), "attention-scale"),
    **dict.fromkeys(("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"), "sliding-window"),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), "softcap"),
    **dict.fromkeys(("attention_bias", "mlp_bias", "qkv_bias"), "wrong-bias"),
    "hidden_act": "activation",
    "norm_topk_prob": "norm-topk",
    "routed_scaling_factor": "router-scale",
    "residual_multiplier": "scale",
    "tie_word_embeddings": "untied-head",
    "layernorm_zero_centered_gamma": "norm-weight-offset",
}
"""Config key -> the cause that a difference in it is; any other is ``other-config``."""


@dataclass(frozen=True)
class Scalar:
    """A number that a module holds: in words, its attribute in different engines, the cause that a difference is, and
    the config key that should say the same."""

    words: str
    attributes: tuple[str, ...]
    cause: str
    key: str = ""


SCALARS = (
    Scalar("eps", ("eps", "variance_epsilon"), "norm-eps", "rms_norm_eps"),
    Scalar("attention scale", ("scaling", "scale", "softmax_scale"), "attention-scale"),
    Scalar("rope base", ("base", "rotary_base"), "rope-base", "rope_theta"),
    Scalar("rope pairing (is_neox_style)", ("is_neox_style",), "rope-pairing"),
    Scalar("rotary dimension", ("rotary_dim",), "rope-scaling"),
    Scalar("sliding window", ("sliding_window",), "sliding-window", "sliding_window"),
)
"""What modules hold that a config gives for the whole model, or not at all."""

ALONE = re.compile(r"(^|layers\.\d+\.\w+_layer)norm$")
"""Norms whose eps is the config's in every model: another one is a difference though only one side shows it. (Norms of
latent projections have a constant of their own.)"""

ATTENTION = re.compile(r"(layers\.\d+\.self_att(?:n|ention))(?:\.attn|\.core_attention)?")
"""Native paths of modules that hold the attention's scale and window; they give no output of a canonical name."""

SAME_SCALAR = 1e-6
"""Relative difference of equal scalars: 1e-6 as a float32 is 9.99999997e-7."""


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
    said = [_key_finding(key, *(config.get(key) for config in configs)) for key in differing]
    semantic = [f for key, f in zip(differing, said) if key in SEMANTIC] + module_scalars(a, b)
    declared = _declared(a, b)
    others = [f.text for key, f in zip(differing, said) if key not in SEMANTIC] + [f.text for f in declared]
    if semantic:
        return Gate("config", "fail", _sentence([f.text for f in semantic]), (*semantic, *declared))
    if not configs[0] or not configs[1]:
        return Gate("config", "skipped", "a side's manifest holds no model config", tuple(declared))
    if others:
        return Gate("config", "warn", _sentence(others), tuple(declared))
    unsaid = f"; stated by one side only: {', '.join(alone)}" if alone else ""
    return Gate("config", "pass", f"model configs and module scalars agree{unsaid}")


def _key_finding(key: str, left: Any, right: Any) -> GateFinding:
    figures: dict[str, float | int | str] = {"key": key, "a": _plain(left), "b": _plain(right)}
    text = f"{key} is {left} in a, {right} in b"
    return GateFinding(CAUSES.get(key, "other-config"), "config", "unknown", text, figures)


def _plain(value: Any) -> float | int | str:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _declared(a: Side, b: Side) -> list[GateFinding]:
    """Return the quantisation and the dtype of the KV cache that one side declares and the other does not."""
    found = []
    words = [declared(side.dump.manifest) for side in (a, b)]
    for what, cause, key in (("weights", "weight-precision", "linear"), ("KV cache", "kv-cache-dtype", "attention")):
        errors = [float(getattr(quantised, key)) for quantised in words]
        if errors[0] != errors[1]:
            side = "a" if errors[0] > errors[1] else "b"
            text = (
                f"{side} declares {(words[0] if side == 'a' else words[1]).words}, coarser {what} than the other side's"
            )
            found.append(GateFinding(cause, "config", side, text, dict(zip("ab", errors))))
    return found


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


def module_scalars(a: Side, b: Side) -> list[GateFinding]:
    """Return a finding per module scalar (eps, scale, rope base, ...) that differs between matched modules.

    The side whose scalar is not what its own config says is named, and so is one that no other side contradicts.
    """
    scalars = [_scalars_by_module(side) for side in (a, b)]
    configs = [flat_config(side.dump.manifest) for side in (a, b)]
    found = []
    for module in {**scalars[0], **scalars[1]}:
        for scalar in SCALARS:
            values = [known.get(module, {}).get(scalar.words) for known in scalars]
            own = [_is_own(value, config.get(scalar.key)) for value, config in zip(values, configs)]
            text = f"{scalar.words} of {module} is {values[0]!r} in a, {values[1]!r} in b"
            if None in values:
                text = "".join(
                    f"{scalar.words} of {module} is {value!r} in {name}, whose config says {config.get(scalar.key)!r}"
                    for name, value, config in zip("ab", values, configs)
                    if value is not None
                )
            alone = None in values and False in own and scalar.cause == "norm-eps" and ALONE.search(module)
            if alone or (None not in values and not _equal(*values)):
                side = {(True, False): "b", (False, True): "a", (None, False): "b", (False, None): "a"}
                figures: dict[str, float | int | str] = {n: _plain(v) for n, v in zip("ab", values)}
                found.append(GateFinding(scalar.cause, module, side.get((own[0], own[1]), "unknown"), text, figures))
    return found


def _is_own(value: Any, configured: Any) -> bool | None:
    """Tell whether a module's scalar is what the config says; None where either is unknown."""
    if value is None or not isinstance(configured, int | float):
        return None
    return _equal(value, configured)


def _scalars_by_module(side: Side) -> dict[str, dict[str, Any]]:
    """Return canonical module -> meaning -> value, for outputs that one native module gives whole, and attentions."""
    homes: dict[str, str] = {}
    for label, source in side.resolution.sources.items():
        module, slot = key_of(label)
        if slot.startswith("output."):
            homes[module] = side.natives[source.native[0]][0]
    result: dict[str, dict[str, Any]] = {}
    for module, path in homes.items():
        _note(result, module, side.dump.modules.get(path))
    for path, info in side.dump.modules.items():
        inside = ATTENTION.fullmatch(side.strip(path).removeprefix("decoder."))
        if inside:
            _note(result, inside[1].replace("self_attention", "self_attn"), info)
    return result


def _note(result: dict[str, dict[str, Any]], module: str, info: ModuleInfo | None) -> None:
    """Add the scalars that a module holds."""
    for scalar in SCALARS if info is not None else ():
        value = next((info.info[name] for name in scalar.attributes if info and name in info.info), None)
        if value is not None:
            result.setdefault(module, {}).setdefault(scalar.words, value)


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, int | float) and isinstance(right, int | float):
        return math.isclose(left, right, rel_tol=SAME_SCALAR)
    return bool(left == right)
