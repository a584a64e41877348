"""Attention in float64, from a dump's own queries, keys and values; rope inside where no rotated tensors are stored."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from probe.compare.names.common import MLA, O_INPUT, ROPE, Q, V
from probe.compare.replay.bands import ATTENTION, FINE_FACTOR, rounding
from probe.compare.replay.base import Context, Hypothesis, Recipe, Unreplayable
from probe.compare.replay.faults import GENERIC
from probe.compare.replay.rope import (
    Rotation,
    assumed,
    before_rope,
    heads_of,
    kind_of_layer,
    rope_hypotheses,
    rotate,
    rotation,
    turned,
)
from probe.compare.replay.scores import Core, Precision, Rows, attend, quantised
from probe.compare.replay.search import SCALES, searched

SINKS = frozenset({"gpt_oss", "granitemoehybrid", "llama4", "qwen3_next", "mimo_v2_flash"})
"""Model types whose attention has parts that the replay does not know: sinks, temperature by position, output gates."""
TRIED = 1 << 20
"""Scores that one trial of a hypothesis computes: some 30 ms of one core."""
NOISE = "noise of the attention's outputs"


# -- what the model computes -------------------------------------------------------------------------------------------


def core_of(context: Context, head: int) -> Core:
    """Return the layer's attention core by its configuration, under the context's hypothesis."""
    config = context.config
    if config.get("model_type") in SINKS:
        raise Unreplayable(f"the attention of {config['model_type']} is not known to the replay")
    window = int(config.get("sliding_window") or 0) if kind_of_layer(context) == "sliding_attention" else 0
    core = Core(scale_of(context, head), window, float(config.get("attn_logit_softcapping") or 0.0))
    changes = {key: context.assumptions[key] for key in ("ahead", "tile", "cap") if key in context.assumptions}
    window = _window(context, window)
    return replace(core, scale=core.scale * context.assume("scale_factor", 1.0), window=window, **changes)


def scale_of(context: Context, head: int) -> float:
    """Return the factor on the scores: head^-1/2, unless the model states a scale of its own.

    Gemma: query_pre_attn_scalar^-1/2; Granite: attention_multiplier; Megatron: softmax_scale; DeepSeek with YaRN: times
    (0.1 mscale_all_dim ln factor + 1)^2.
    """
    config = context.config
    if config.get("query_pre_attn_scalar"):
        return float(config["query_pre_attn_scalar"]) ** -0.5
    stated = config.get("attention_multiplier") or config.get("softmax_scale")
    scale = float(stated) if stated else head**-0.5
    latent, factor = config.get("mscale_all_dim"), float(config.get("factor") or 1.0)
    if context.shape.kv_lora_rank and latent and factor > 1:
        scale *= (0.1 * latent * math.log(factor) + 1.0) ** 2
    return scale


def _window(context: Context, window: int) -> int:
    if "window" in context.assumptions:
        return round(context.assumptions["window"])
    return max(1, window + context.assume("window_step", 0)) if window else 0


# -- queries, keys, values ---------------------------------------------------------------------------------------------


def _ordered(context: Context, values: np.ndarray) -> Rows:
    return Rows(values, context.keys[:, 0], context.keys[:, 1])


def _plain(context: Context, rounded: bool) -> tuple[Rows, Rows, Rows]:
    """Return q, k, v with rope on q and k: stored rotated ones, else rotated here (``rounded`` as kernels round)."""
    head = context.shape.head_dim
    values = context.history(V)
    v = Rows(heads_of(values.values, head, "v"), values.sequence, values.position)
    if _rotated(context):
        q, keys = context.value(ROPE[0]), context.history(ROPE[1])
        k = Rows(heads_of(keys.values, head, "k"), keys.sequence, keys.position)
        rows = _ordered(context, heads_of(q, head, "q"))
    else:
        keys = context.history(before_rope(context, "k"))
        length = int(keys.position.max(initial=0)) + 1
        q = heads_of(context.value(before_rope(context, "q")), head, "q")
        q = turned(context, "q", q, context.keys[:, 1], length=length, rounded=rounded)
        k_heads = heads_of(keys.values, head, "k")
        turned_k = turned(context, "k", k_heads, keys.position, length=length, rounded=rounded)
        k, rows = Rows(turned_k, keys.sequence, keys.position), _ordered(context, q)
    if not (np.array_equal(k.sequence, v.sequence) and np.array_equal(k.position, v.position)):
        raise Unreplayable("keys and values were stored for different tokens")
    return rows, k, v


def _rotated(context: Context) -> bool:
    return not context.shape.kv_lora_rank and all(context.has(label) for label in ROPE)


def _latent(context: Context, rounded: bool) -> tuple[Rows, Rows, Rows]:
    """Return q, k, v of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values from the latent.

    Needs the weights of kv_b_proj: engines expand the latent in a layout without token rows, or not at all.
    """
    sizes = [context.setting(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
    if not all(isinstance(size, int) for size in sizes):
        raise Unreplayable("the config does not state the head sizes of latent attention")
    nope, rope, value = sizes
    latent, compressed = context.history(MLA[4]), context.history(MLA[3])
    expanded = latent.values @ context.parameter("layers.{i}.self_attn.kv_b_proj.weight").T
    expanded = heads_of(context.rounded(expanded) if rounded else expanded, nope + value, "kv_b_proj")
    length = int(latent.position.max(initial=0)) + 1
    turn = rotation(context.config, rope, length=length)
    one = compressed.values[:, None, -rope:]
    q = heads_of(context.value(MLA[2] if context.has(MLA[2]) else Q), nope + rope, "q")
    parts = {"q": (q[..., nope:], context.keys[:, 1]), "k": (one, compressed.position)}
    done = {name: _latent_turn(context, name, part, turn, rounded) for name, part in parts.items()}
    heads = np.broadcast_to(done["k"], (len(one), expanded.shape[1], rope))
    k = np.concatenate([expanded[..., :nope], heads], axis=-1)
    where = latent.sequence, latent.position
    return (
        _ordered(context, np.concatenate([q[..., :nope], done["q"]], -1)),
        Rows(k, *where),
        Rows(expanded[..., nope:], *where),
    )


def _latent_turn(
    context: Context, name: str, part: tuple[np.ndarray, np.ndarray], turn: Rotation, rounded: bool
) -> np.ndarray:
    values, positions = part
    if name in context.assume("rope_missing", ()):
        return values
    turn = assumed(turn, context, values.shape[-1], "full_attention", int(positions.max(initial=0)) + 1)
    moved = positions + context.assume("position_offset", {}).get(name, 0)
    return rotate(values, turn, moved, context if rounded else None)


# -- the recipe --------------------------------------------------------------------------------------------------------


READINGS = ((True, ""), (True, "twice"), (True, "once"), (False, ""))
"""Whether the rope is rounded as outside of fused kernels, and the scores: not in a fused kernel, before and after they
are scaled in eager torch, after it alone in Megatron (torch.baddbmm)."""


def _compute(context: Context) -> Iterator[np.ndarray]:
    """Yield the attention's output as a fused kernel rounds it, as eager torch does, and without rounding inside."""
    latent = bool(context.shape.kv_lora_rank)
    inside = latent or not _rotated(context)
    coarse = context.dtype not in ("float32", "float64")
    found = 0
    for rounded, eager in READINGS:
        if (eager and not coarse) or (not rounded and (not inside or context.assumptions)):
            continue
        q, k, v = (_latent if latent else _plain)(context, rounded)
        q, k, v = _faulty(context, q, k, v)
        turns = _turns(context, q, k) if inside else None
        quiet = bool(context.assumptions or found)
        step = _step(context, bool(eager))
        precision = Precision(context.dtype, step, None if quiet else turns, quiet, eager == "once")
        values, noise = attend(
            _few(q, k) if context.assumptions else q, k, v, core_of(context, q.values.shape[-1]), precision
        )
        if np.isnan(values).all():
            raise Unreplayable("the keys before these rows were not stored (a prefix-cache hit, or rows left out)")
        if not quiet:
            context.memory[NOISE] = noise
        found += 1
        yield values.reshape(len(values), -1)


def _few(q: Rows, k: Rows) -> Rows:
    """Return q with NaN but in the rows that a hypothesis is tried on: a spread of TRIED scores, 16 at least."""
    n = max(16, TRIED // (q.values.shape[1] * max(1, len(k.values))))
    if n >= len(q.values):
        return q
    values = np.full_like(q.values, np.nan)
    some = np.linspace(0, len(values) - 1, n).astype(np.int64)
    values[some] = q.values[some]
    return replace(q, values=values)


def _turns(context: Context, q: Rows, k: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Return the angles by which the features of q and k are turned, as the configuration has it."""
    features, kind = q.values.shape[-1], kind_of_layer(context)
    part = context.setting("qk_rope_head_dim") if context.shape.kv_lora_rank else features
    turn = rotation(context.config, part, kind, int(k.position.max(initial=0)) + 1)
    still = np.zeros(features)
    still[features - part : features - part + 2 * turn.inverse.size] = np.tile(turn.inverse, 2)
    return q.position[:, None] * still, k.position[:, None] * still


def _step(context: Context, eager: bool) -> Any:
    coarse = context.assume("softmax_dtype", "")
    return (lambda x: quantised(x, coarse)) if coarse else context.rounded if eager else None


def _faulty(context: Context, q: Rows, k: Rows, v: Rows) -> tuple[Rows, Rows, Rows]:
    """Return q, k, v under the hypothesis about the cache."""
    dtype, order = context.assume("kv_dtype", ""), context.assume("kv_order", "")
    k, v = (replace(rows, values=quantised(rows.values, dtype)) for rows in (k, v))
    if order == "reversed":
        k, v = (replace(rows, values=rows.values[:, ::-1]) for rows in (k, v))
    return q, k, v


def _size(context: Context, computed: np.ndarray) -> np.ndarray:
    """Return the magnitude [n, features] that errors are relative to: the output's own, and the noise to expect."""
    noise = context.memory[NOISE].reshape(computed.shape)
    return np.asarray(np.sqrt(np.square(computed) + np.square(noise)))


# -- what may be wrong -------------------------------------------------------------------------------------------------


def _windowed(context: Context) -> bool:
    return kind_of_layer(context) == "sliding_attention"


def _capped(context: Context) -> bool:
    return bool(context.config.get("attn_logit_softcapping"))


def _grouped(context: Context) -> bool:
    return 1 < context.shape.kv_heads < context.shape.heads


def _only_inside(hypothesis: Hypothesis) -> Hypothesis:
    """Return a hypothesis about rope that applies only where no rotated tensors were stored."""
    inner = hypothesis.when

    def when(context: Context) -> bool:
        return not _rotated(context) and (inner is None or inner(context))

    return replace(hypothesis, when=when)


def _row_errors(context: Context, stored: np.ndarray) -> np.ndarray:
    """Return each row's error in roundings."""
    size = np.linalg.norm(_size(context, context.plain()), axis=1)
    error = np.linalg.norm(stored - context.plain(), axis=1)
    return np.asarray(error / np.maximum(size, 1e-300) / rounding(context.dtype, 1))


def _only_late(context: Context, stored: np.ndarray) -> dict[str, Any] | None:
    """Find the position from which on all rows are wrong, where none before it is."""
    position, wrong = context.keys[:, 1], _row_errors(context, stored) > bands_in(context)[1]
    first = int(position[wrong].min(initial=1 << 60))
    late = position >= first
    if not late.any() or (~late).mean() < BEFORE or wrong[late].mean() < MOST:
        return None
    return {"replaced": np.where(late[:, None], stored, context.plain()), "value": float(first)}


def _only_decode(context: Context, stored: np.ndarray) -> dict[str, Any] | None:
    """Tell whether rows of generated tokens are wrong and no row of a prompt is."""
    sequences = context.side.dump.sequences
    prompt = np.array([sequences[number].prompt_len for number in context.keys[:, 0]])
    decode, wrong = context.keys[:, 1] >= prompt, _row_errors(context, stored) > bands_in(context)[1]
    if not decode.any() or decode.all() or wrong[~decode].any() or wrong[decode].mean() < MOST:
        return None
    return {"replaced": np.where(decode[:, None], stored, context.plain()), "value": float(wrong[decode].mean())}


LEAK_STEPS = 60


def _leaked(context: Context, stored: np.ndarray) -> dict[str, Any] | None:
    """Find one vector v of each head so that stored = (1 - a) plain + a v with a share a in [0, 1] of each row.

    Keys of padding that are not masked add such a share: padding rows are alike, so that all have one value v.
    Alternating least squares over a and v, from the largest singular vector of stored - plain.
    """
    heads = context.memory[NOISE].shape[1]
    plain, given = (values.reshape(len(stored), heads, -1) for values in (context.plain(), stored))
    there = np.isfinite(plain).all(axis=(1, 2))
    if there.sum() < 8:
        return None
    result, shares = given.copy(), np.zeros(len(stored))
    for head in range(heads):
        x, y = plain[there, head], given[there, head]
        v = y[np.argmax(np.linalg.norm(y - x, axis=1))]
        for _ in range(LEAK_STEPS):
            away = v - x
            share = np.clip((away * (y - x)).sum(1) / np.maximum(np.square(away).sum(1), 1e-300), 0, 1)[:, None]
            v = (share * (y - (1 - share) * x)).sum(0) / max(float(np.square(share).sum()), 1e-300)
        result[there, head] = (1 - share) * x + share * v
        shares[there] = np.maximum(shares[there], share[:, 0])
    return {"replaced": result.reshape(stored.shape), "value": float(shares.max())}


def _dropped(context: Context, stored: np.ndarray) -> dict[str, Any] | None:
    """Tell whether probabilities were dropped: of a first token, which has one, each head is then 0 or 1 / (1 - p)."""
    first = np.flatnonzero(context.keys[:, 1] == 0)
    heads = context.memory[NOISE].shape[1]
    x, y = (values[first].reshape(len(first), heads, -1) for values in (context.plain(), stored))
    factors = (x * y).sum(-1) / np.maximum(np.square(x).sum(-1), 1e-300)
    left = np.linalg.norm(y - factors[..., None] * x, axis=-1) / np.maximum(np.linalg.norm(x, axis=-1), 1e-300)
    kept = factors[factors > 0.5]
    alike = kept.size > 0 and np.ptp(kept) < DROPPED and (left < DROPPED).all()
    if not alike or not (np.abs(factors[factors <= 0.5]) < DROPPED).all() or kept.mean() < 1 + DROPPED:
        return None
    return {"replaced": stored, "value": float(kept.mean())}


DROPPED = 0.02
"""Relative error of a dropped or kept head's factor: twice the largest rounding of bfloat16, several times over."""


def bands_in(context: Context) -> tuple[float, float, float]:
    """Return the bands of attention in the context's dtype."""
    factor = FINE_FACTOR if context.dtype in ("float32", "float64") else 1.0
    return ATTENTION[0] * factor, ATTENTION[1] * factor, ATTENTION[2] * factor


BEFORE = 0.1
"""Share of the rows that must be right before that position: the first tokens attend to little that may be wrong."""
MOST = 0.8
"""Share of the late or decode rows that must be wrong: some attend to a few tokens that the fault does not touch."""
WINDOWS = tuple(float(size) for size in (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096))

HYPOTHESES = (
    *(_only_inside(hypothesis) for hypothesis in rope_hypotheses("qk", _compute)),
    Hypothesis(
        "attention-scale",
        {},
        "scores are {value:.4g} times what they should be",
        solve=searched(_compute, "scale_factor", SCALES),
    ),
    Hypothesis("causal-mask", {"ahead": 1}, "each token also sees the one after it"),
    Hypothesis("causal-mask", {"ahead": -1}, "a token does not see itself"),
    Hypothesis("causal-mask", {"ahead": None}, "there is no causal mask"),
    Hypothesis("sliding-window", {"window": 0}, "the layer's sliding window is off", when=_windowed),
    Hypothesis("sliding-window", {"window_step": 1}, "the sliding window is one token longer", when=_windowed),
    Hypothesis("sliding-window", {"window_step": -1}, "the sliding window is one token shorter", when=_windowed),
    Hypothesis("sliding-window", {}, "the layer has a window of {value:.0f} tokens", fit=("window", WINDOWS)),
    Hypothesis("softcap", {"cap": 0.0}, "scores are not capped", when=_capped),
    Hypothesis("permuted-qkv", {"tile": True}, "query head h reads key head h mod groups", when=_grouped),
    Hypothesis("permuted-qkv", {"kv_order": "reversed"}, "key and value heads are in reverse order", when=_grouped),
    Hypothesis("kv-cache-dtype", {"kv_dtype": "float8_e4m3fn"}, "keys and values passed through fp8 (e4m3)"),
    Hypothesis("kv-cache-dtype", {"kv_dtype": "float8_e5m2"}, "keys and values passed through fp8 (e5m2)"),
    Hypothesis("softmax-precision", {"softmax_dtype": "bfloat16"}, "scores and probabilities are rounded to bfloat16"),
    Hypothesis("softmax-precision", {"softmax_dtype": "float16"}, "scores and probabilities are rounded to float16"),
    Hypothesis("padding-leak", {}, "up to a share {value:.2g} of it is one vector that no token has", solve=_leaked),
    Hypothesis("dropout-on", {}, "first tokens' heads are zero or {value:.3g} times their value", solve=_dropped),
    Hypothesis("decode-kernel", {}, "only rows of generated tokens are wrong", solve=_only_decode),
    Hypothesis("position-range", {}, "all rows from position {value:.0f} on are wrong", solve=_only_late),
    *GENERIC,
)

RECIPES = (Recipe("attention", O_INPUT, _compute, *ATTENTION, HYPOTHESES, sequences=4, size=_size),)
