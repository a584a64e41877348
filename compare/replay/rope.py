"""Rotary position embedding in float64: angles from the model's configuration, and the replay of rotated q and k."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from probe.compare.names.common import ROPE
from probe.compare.replay.bands import ROPE as ROPE_BANDS
from probe.compare.replay.base import Compute, Context, Hypothesis, Recipe, Unreplayable
from probe.compare.replay.search import BASES, STRETCHES, searched
from probe.metrics import MANTISSA_BITS
from probe.store.dtypes import round_to

ATTENTION = "layers.{i}.self_attn"
INTERLEAVED = frozenset({"gptj", "codegen", "cohere", "cohere2", "glm", "glm4", "glm4_moe_lite", "ernie4_5", "helium"})
"""Model types that rotate features 2j and 2j + 1 together (GPT-J's way); others pair j with j + half (GPT-NeoX's)."""
LATENT_INTERLEAVED = frozenset({"deepseek_v2", "deepseek_v3", "kimi_k2", "longcat_flash"})
"""Model types with latent attention whose rope part is interleaved unless ``rope_interleave`` says otherwise."""
LOCAL_BASES = {"sliding_attention": "rope_local_base_freq", "full_attention": "rope_theta"}
"""Gemma 3 before transformers 5: the base of each kind of layer; its scaling belongs to full attention only."""
NORMED = frozenset({"qwen3", "qwen3_moe", "gemma3", "gemma3_text", "olmo2", "olmo3"})
"""Model types with a norm on queries and keys, which must be stored: without it the replay would be another model."""
UNKNOWN_ROPE = frozenset({"mrope_section", "use_fope", "dual_chunk_attention_config"})
"""Settings of rotary embeddings that the replay does not know."""


@dataclass(frozen=True)
class Rotation:
    """How a layer rotates: ``inverse`` frequencies float64 [pairs], ``factor`` on cosine and sine, and the pairing."""

    inverse: np.ndarray
    factor: float = 1.0
    interleaved: bool = False


# -- inverse frequencies, as transformers' modeling_rope_utils defines them --------------------------------------------


def _plain(base: float, size: int) -> np.ndarray:
    return np.asarray(base ** -(np.arange(0, size, 2) / size), np.float64)


def _default(rope: Mapping[str, Any], size: int, length: int) -> tuple[np.ndarray, float]:
    return _plain(rope["rope_theta"], size), 1.0


def _linear(rope: Mapping[str, Any], size: int, length: int) -> tuple[np.ndarray, float]:
    return _plain(rope["rope_theta"], size) / rope["factor"], 1.0


def _dynamic(rope: Mapping[str, Any], size: int, length: int) -> tuple[np.ndarray, float]:
    """NTK-aware scaling: the base grows once sequences exceed the trained length."""
    trained, factor = rope["max_position_embeddings"], rope["factor"]
    longest = max(length, trained)
    growth = (factor * longest / trained - (factor - 1)) ** (size / (size - 2))
    return _plain(rope["rope_theta"] * growth, size), 1.0


def _llama3(rope: Mapping[str, Any], size: int, length: int) -> tuple[np.ndarray, float]:
    plain, factor = _plain(rope["rope_theta"], size), rope["factor"]
    low, high, trained = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    turns = trained * plain / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - smooth) * plain / factor + smooth * plain, 1.0


def _mscale(scale: float, mscale: Any = 1.0) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def _yarn(rope: Mapping[str, Any], size: int, length: int) -> tuple[np.ndarray, float]:
    """YaRN (B. Peng and others, arXiv 2309.00071)."""
    base, trained = rope["rope_theta"], rope["original_max_position_embeddings"]
    factor = rope.get("factor") or rope["max_position_embeddings"] / trained
    attention, scales = rope.get("attention_factor"), (rope.get("mscale"), rope.get("mscale_all_dim"))
    if attention is None:
        attention = _mscale(factor, scales[0]) / _mscale(factor, scales[1]) if all(scales) else _mscale(factor)

    def dimension(turns: float) -> float:
        return size * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    high += 0.001 if low == high else 0
    ramp = np.clip((np.arange(size // 2) - low) / (high - low), 0, 1)
    plain = _plain(base, size)
    return plain / factor * ramp + plain * (1 - ramp), float(attention)


def _longrope(rope: Mapping[str, Any], size: int, length: int) -> tuple[np.ndarray, float]:
    trained = rope["original_max_position_embeddings"]
    factor, attention = rope.get("factor") or rope["max_position_embeddings"] / trained, rope.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    stretch = np.asarray(rope["long_factor" if length > trained else "short_factor"], np.float64)
    return _plain(rope["rope_theta"], size) / stretch, float(attention)


TYPES = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "deepseek_yarn": _yarn,
    "longrope": _longrope,
}
"""rope_type -> (settings, rotated features, longest sequence) -> (inverse frequencies, factor on cosine and sine)."""


def rope_settings(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the rope's settings for layers of one ``kind`` (an entry of layer_types), nested ones lifted.

    ``rope_theta`` is 10,000 where nothing states it (transformers' default).
    """
    own = config.get(kind)
    rope = {**config, **own} if isinstance(own, Mapping) else dict(config)
    if "rope_local_base_freq" in config and not isinstance(own, Mapping):
        rope["rope_theta"] = config.get(LOCAL_BASES.get(kind, "rope_theta"), 10000.0)
        rope["rope_type"] = rope.get("rope_type", "default") if kind == "full_attention" else "default"
    rope["rope_theta"] = float(next((rope[k] for k in ("rope_theta", "rotary_base") if rope.get(k)), 10000.0))
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    return rope


def rotation(config: Mapping[str, Any], head: int, kind: str = "full_attention", length: int = 0) -> Rotation:
    """Return the rotation of heads of ``head`` features in sequences of up to ``length`` tokens.

    Raises Unreplayable for a type of rope that is not in :data:`TYPES` or whose settings are incomplete.
    """
    rope = rope_settings(config, kind)
    name = str(rope["rope_type"])
    odd = sorted(key for key in UNKNOWN_ROPE if rope.get(key))
    if name not in TYPES or odd:
        raise Unreplayable(f"rope of type {' with '.join([name, *odd])} is not known to the replay")
    share = rope.get("partial_rotary_factor", rope.get("rotary_percent", 1.0))
    size = int(rope.get("rotary_dim") or head * float(share))
    try:
        inverse, factor = TYPES[name](rope, size, length)
    except (KeyError, TypeError) as missing:
        raise Unreplayable(f"the config's rope of type {name} lacks {missing}") from None
    latent = config.get("rope_interleave", config.get("model_type") in LATENT_INTERLEAVED)
    interleaved = bool(config.get("rotary_interleaved", config.get("model_type") in INTERLEAVED) or latent)
    return Rotation(inverse, factor, interleaved)


# -- the rotation ------------------------------------------------------------------------------------------------------


def angles(turn: Rotation, positions: np.ndarray) -> np.ndarray:
    """Return the angles float64 [n, pairs] as every engine forms them: a float32 product of float32 factors.

    In float32 the angle of position p is off by up to p 2^-24 radians, alike in all engines: part of the definition.
    """
    products = positions.astype(np.float32)[:, None] * turn.inverse.astype(np.float32)[None, :]
    return np.asarray(products, np.float64)


ANGLE = 1.0
"""Variance of a rotated feature per squared radian of its angle, in squared float32 roundings: engines form float32
frequencies with errors of an ulp, which the position multiplies."""


def fineness(dtype: str) -> float:
    """Return the size of a float32 rounding in roundings of ``dtype``."""
    return float(2.0 ** (MANTISSA_BITS.get(dtype, 23) - 23))


def rotate(
    x: np.ndarray, turn: Rotation, positions: np.ndarray, context: Context | None = None, *, fused: bool = False
) -> np.ndarray:
    """Return heads x [n, heads, features] turned by their positions int64 [n]; features beyond the pairs stay.

    ``context``: round cosine, sine, products and sums to its dtype, as transformers, Megatron and vLLM do outside of
    fused kernels; a ``fused`` one reads a table of that dtype and rounds nothing but its result.
    """
    table = context.rounded if context is not None else np.asarray
    step = np.asarray if fused else table
    angle = angles(turn, positions)[:, None, :]
    cos, sin = table(np.cos(angle) * turn.factor), table(np.sin(angle) * turn.factor)
    pairs = turn.inverse.size
    rotated = x[..., : 2 * pairs]
    if turn.interleaved:
        left, right = rotated[..., 0::2], rotated[..., 1::2]
    else:
        left, right = rotated[..., :pairs], rotated[..., pairs:]
    turned = np.empty_like(rotated)
    halves = step(step(left * cos) - step(right * sin)), step(step(right * cos) + step(left * sin))
    if turn.interleaved:
        turned[..., 0::2], turned[..., 1::2] = halves
    else:
        turned[..., :pairs], turned[..., pairs:] = halves
    return np.concatenate([turned, x[..., 2 * pairs :]], axis=-1)


def assumed(turn: Rotation, context: Context, head: int, kind: str, length: int) -> Rotation:
    """Return the rotation under the hypothesis of ``context``."""
    changes = {key: context.assumptions[key] for key in ("rope_type", "rope_theta") if key in context.assumptions}
    factor = context.assume("rope_base_factor", 1.0)
    if changes or factor != 1.0:
        config = _as_if(context.config, kind, changes, factor)
        turn = rotation(config, head, kind, length)
    coarse = context.assume("rope_frequencies", "")
    if coarse:
        turn = replace(turn, inverse=round_to(turn.inverse, coarse).astype(np.float64))
    turn = replace(turn, inverse=turn.inverse / context.assume("rope_stretch", 1.0))
    return replace(turn, interleaved=turn.interleaved != context.assume("rope_pairing_flipped", False))


def _as_if(config: Mapping[str, Any], kind: str, changes: Mapping[str, Any], factor: float) -> dict[str, Any]:
    rope = {**rope_settings(config, kind), **changes}
    rope["rope_theta"] *= factor
    return {key: value for key, value in rope.items() if key not in (kind, "rope_local_base_freq")}


def kind_of_layer(context: Context) -> str:
    """Return the layer's entry of ``layer_types``, by the pattern of older configs where that is absent."""
    kinds, layer = context.config.get("layer_types"), context.layer or 0
    if isinstance(kinds, list) and layer < len(kinds):
        return str(kinds[layer])
    sliding = context.config.get("sliding_window")
    if not sliding:
        return "full_attention"
    pattern = PATTERNS.get(str(context.config.get("model_type")))
    return "sliding_attention" if pattern is not None and pattern(context.config, layer) else "full_attention"


PATTERNS = {
    "mistral": lambda config, layer: True,
    "mixtral": lambda config, layer: True,
    "phi3": lambda config, layer: True,
    "starcoder2": lambda config, layer: True,
    "gemma2": lambda config, layer: layer % 2 == 0,
    "gemma3": lambda config, layer: (layer + 1) % int(config.get("sliding_window_pattern") or 6) != 0,
    "gemma3_text": lambda config, layer: (layer + 1) % int(config.get("sliding_window_pattern") or 6) != 0,
    "cohere2": lambda config, layer: (layer + 1) % int(config.get("sliding_window_pattern") or 4) != 0,
    "qwen2": lambda config, layer: _late(config, layer),
    "qwen3": lambda config, layer: _late(config, layer),
    "qwen2_moe": lambda config, layer: _late(config, layer),
    "qwen3_moe": lambda config, layer: bool(config.get("use_sliding_window")),
}
"""Model type -> whether a layer of a config without ``layer_types`` has the sliding window (transformers' configs)."""


def _late(config: Mapping[str, Any], layer: int) -> bool:
    return bool(config.get("use_sliding_window")) and layer >= int(config.get("max_window_layers") or 0)


# -- the replay of rotated queries and keys ----------------------------------------------------------------------------


def before_rope(context: Context, name: str) -> str:
    """Return the label whose rows are rotated: the norm of q or k where the model has one, else the projection.

    Raises Unreplayable where the norm ran and its output was not stored.
    """
    norm = f"{ATTENTION}.{name}_norm:output.0"
    if context.has(norm):
        return norm
    native = context.name(f"{ATTENTION}.{name}_norm")
    ran = {f"module {native}", f"{native}.weight"} & set(context.side.facts)
    if ran or context.config.get("model_type") in NORMED:
        raise Unreplayable(f"the output of {native} was not stored")
    return f"{ATTENTION}.{name}_proj:output.0"


def heads_of(values: np.ndarray, features: int, what: str) -> np.ndarray:
    """Return rows [n, heads * features] as [n, heads, features]; raise Unreplayable where they do not divide."""
    if not features or values.shape[1] % features:
        raise Unreplayable(f"{what} has {values.shape[1]} features, no multiple of the head's {features}")
    return values.reshape(len(values), -1, features)


def turned(
    context: Context,
    name: str,
    values: np.ndarray,
    positions: np.ndarray,
    *,
    length: int,
    rounded: bool,
    fused: bool = False,
) -> np.ndarray:
    """Return q or k (``name``) [n, heads, features] after the model's rope, under the context's hypothesis."""
    if name in context.assume("rope_missing", ()):
        return values
    kind, head = kind_of_layer(context), context.shape.head_dim
    turn = rotation(context.config, head, kind, length)
    turn = assumed(turn, context, head, kind, length)
    offsets = context.assume("position_offset", {})
    return rotate(values, turn, positions + offsets.get(name, 0), context if rounded else None, fused=fused)


def _replay(name: str) -> Any:
    def compute(context: Context) -> Iterable[np.ndarray]:
        values = heads_of(context.value(before_rope(context, name)), context.shape.head_dim, f"{name} before rope")
        positions = context.keys[:, 1]
        length = int(positions.max(initial=0)) + 1
        for rounded, fused in ((True, False), (True, True), (False, True)):
            turned_heads = turned(context, name, values, positions, length=length, rounded=rounded, fused=fused)
            yield turned_heads.reshape(len(values), -1)

    return compute


def _size(context: Context, computed: np.ndarray) -> np.ndarray:
    """Return the magnitude [n, features] that errors are relative to.

    Of a pair (l, r), both products are rounded and then their sum, so that l and r count alike; and the angle is off
    (see :data:`ANGLE`).
    """
    head = context.shape.head_dim
    turn = rotation(context.config, head, kind_of_layer(context), int(context.keys[:, 1].max(initial=0)) + 1)
    heads, pairs = heads_of(computed, head, "rope"), turn.inverse.size
    errors = 1 + 2 * ANGLE * np.square(fineness(context.dtype) * context.keys[:, 1:2] * turn.inverse)
    part = heads[..., : 2 * pairs].reshape(*heads.shape[:2], *((pairs, 2) if turn.interleaved else (2, pairs)))
    axis = -1 if turn.interleaved else -2
    norms = np.square(part).mean(axis=axis, keepdims=True) * np.expand_dims(errors[:, None, :], axis)
    size = heads.copy()
    size[..., : 2 * pairs] = np.sqrt(np.square(part) / 2 + norms / 2).reshape(*heads.shape[:2], 2 * pairs)
    return size.reshape(computed.shape)


def _scaled(context: Context) -> bool:
    return rope_settings(context.config, kind_of_layer(context))["rope_type"] != "default"


def _unscaled(context: Context) -> bool:
    return not _scaled(context) and isinstance(context.config.get("factor"), int | float)


def _offsets(name: str, other: str) -> tuple[Hypothesis, ...]:
    """Return the offsets of q or k; in the scores only that against the other one's shows (``other``)."""
    who, others = {"q": ("queries", "keys"), "k": ("keys", "queries")}[name]
    against = {1: f" (or {others} one earlier)", -1: f" (or {others} one later)"} if other else {1: "", -1: ""}
    return tuple(
        Hypothesis("position-offset", {"position_offset": {name: step}}, f"{who} are rotated {how}{against[step]}")
        for step, how in ((1, "as one position later"), (-1, "as one position earlier"))
    )


_TOGETHER = (
    Hypothesis("position-offset", {"rope_missing": ("q", "k")}, "rope is missing"),
    # scores keep their distances: only the rounding of the table's other entries shows
    *(
        Hypothesis("position-offset", {"position_offset": {"q": step, "k": step}}, f"both are rotated as {how}")
        for step, how in ((1, "one position later"), (-1, "one position earlier"))
    ),
)


def rope_hypotheses(names: str, compute: Compute) -> tuple[Hypothesis, ...]:
    """Return the faults of rope that show in q, in k, or in the scores of both (``names``: q, k or qk)."""
    parts = ("q", "k") if names == "qk" else (names,)
    who = {"q": "queries are", "k": "keys are"}
    return (
        *_offsets(parts[0], "".join(parts[1:])),
        Hypothesis(
            "rope-pairing",
            {"rope_pairing_flipped": True},
            "features are paired the other way (neighbours against halves)",
        ),
        Hypothesis("rope-scaling", {"rope_type": "default"}, "the rope is not scaled", when=_scaled),
        Hypothesis(
            *("rope-base", {}, "the rope's base is {value:.4g} times the config's"),
            solve=searched(compute, "rope_base_factor", BASES),
        ),
        Hypothesis(
            *("rope-scaling", {}, "the rope's positions are divided by {value:.4g}"),
            solve=searched(compute, "rope_stretch", STRETCHES),
        ),
        Hypothesis("rope-base", {"rope_frequencies": "bfloat16"}, "the rope's frequencies are rounded to bfloat16"),
        *(Hypothesis("position-offset", {"rope_missing": (part,)}, f"{who[part]} not rotated") for part in parts),
        *(_TOGETHER if names == "qk" else ()),
    )


def _has_rope(side: Any) -> bool:
    return not side.shape.kv_lora_rank


RECIPES = tuple(
    Recipe("rope", label, replay, *ROPE_BANDS, rope_hypotheses(name, replay), applies=_has_rope, size=_size)
    for name, label, replay in zip("qk", ROPE, map(_replay, "qk"))
)
