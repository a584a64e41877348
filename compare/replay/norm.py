"""RMSNorm and LayerNorm, of the residual stream and of each head's queries and keys."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice, product
from typing import Any

import numpy as np

from probe.compare.names.canonical import EMBEDDING, FINAL_NORM
from probe.compare.replay.bands import NORM
from probe.compare.replay.base import Context, Hypothesis, Recipe, Unreplayable
from probe.compare.replay.faults import FEW_ONLY, OFFSET, OUTPUT, TINY
from probe.compare.replay.places import ATTENTION, MLP, form_of, module_of
from probe.store.dtypes import round_to

PLUS_ONE = frozenset({"gemma", "gemma2", "gemma3", "gemma3_text"})
"""Families whose norm multiplies with weight + 1."""

LAYER_EPS = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
RMS_EPS = ("rms_norm_eps", "layernorm_epsilon")

O_PROJ, DOWN = f"{ATTENTION}.o_proj:output.0", f"{MLP}.down_proj:output.0"


def has_output_norms(context: Context) -> bool:
    """Tell whether a layer norms what attention and MLP return before it is added (Gemma 2 and 3)."""
    return context.setting("model_type") in ("gemma2", "gemma3", "gemma3_text")


# -- the residual stream ----------------------------------------------------------------------------------------------


def stream_before(context: Context) -> np.ndarray:
    """Return the residual stream that enters the context's layer."""
    layer = context.layer or 0
    label = EMBEDDING if layer == 0 else f"layers.{layer - 1}:output.0"
    return context.value(label)


def added_by_attention(context: Context) -> np.ndarray:
    """Return what the attention adds to the residual stream."""
    label = "layers.{i}.post_attention_layernorm:output.0" if has_output_norms(context) else O_PROJ
    return context.value(label)


def middle(context: Context) -> Iterator[np.ndarray]:
    """Yield the residual stream between attention and MLP: as summed, and rounded to the dtype."""
    attention = added_by_attention(context)
    terms = context.assume("attention", 1.0) * attention
    total = context.assume("stream", 1.0) * stream_before(context) + terms
    yield total
    yield context.rounded(total)


def added_by_mlp(context: Context) -> np.ndarray:
    """Return what the MLP adds to the residual stream."""
    if has_output_norms(context):
        return context.value("layers.{i}.post_feedforward_layernorm:output.0")
    return context.value(f"{MLP}:output.0" if context.has(f"{MLP}:output.0") else DOWN)


def leaving(context: Context, layer: int) -> Iterator[np.ndarray]:
    """Yield the residual stream after a layer: as stored, and not rounded, as a kernel sees it that adds and norms."""
    yield context.value(f"layers.{layer}:output.0")
    before = replace(context, layer=layer)
    try:
        yield next(islice(middle(before), 1, None)) + added_by_mlp(before)
    except Unreplayable:
        return


def _at_layer(context: Context) -> Iterator[np.ndarray]:
    return leaving(context, context.layer - 1) if context.layer else iter([stream_before(context)])


def _mlp_output(context: Context) -> Iterator[np.ndarray]:
    yield context.value(f"{MLP}:output.0" if context.has(f"{MLP}:output.0") else DOWN)


def _last(context: Context) -> Iterator[np.ndarray]:
    yield from leaving(context, context.shape.layers - 1)


def _attention_output(context: Context) -> Iterator[np.ndarray]:
    yield context.value(O_PROJ)


def _after_attention(context: Context) -> Iterator[np.ndarray]:
    return _attention_output(context) if has_output_norms(context) else middle(context)


def _latent_keys(context: Context) -> Iterator[np.ndarray]:
    values = context.value(f"{ATTENTION}.kv_a_proj_with_mqa:output.0")
    yield values[:, : context.shape.kv_lora_rank or None]


def _of(label: str) -> Any:
    def inputs(context: Context) -> Iterator[np.ndarray]:
        yield context.value(label)

    return inputs


INPUTS = {
    "layers.{i}.input_layernorm": _at_layer,
    "layers.{i}.post_attention_layernorm": _after_attention,
    "layers.{i}.pre_feedforward_layernorm": middle,
    "layers.{i}.post_feedforward_layernorm": _mlp_output,
    f"{ATTENTION}.q_norm": _of(f"{ATTENTION}.q_proj:output.0"),
    f"{ATTENTION}.k_norm": _of(f"{ATTENTION}.k_proj:output.0"),
    f"{ATTENTION}.q_a_layernorm": _of(f"{ATTENTION}.q_a_proj:output.0"),
    f"{ATTENTION}.kv_a_layernorm": _latent_keys,
    "norm": _last,
}
"""Norm module -> what enters it, in one or several readings."""


# -- the norm ---------------------------------------------------------------------------------------------------------


def compute(context: Context) -> Iterable[np.ndarray]:
    """Yield the norm of each reading of its input: rounded at the end only, and between the norm and the weight too."""
    return norm_outputs(context, form_of(context))


def norm_outputs(context: Context, form: str) -> Iterator[np.ndarray]:
    """Yield the outputs of the norm module ``form`` (with ``{i}``) of the context's layer."""
    module = context.name(form)
    weight, bias = context.optional(f"{module}.weight"), context.optional(f"{module}.bias")
    if weight is None and context.parameter_shape("embed_tokens.weight") is None:
        raise Unreplayable(f"the weights at hand hold no {module}.weight")
    weights = _assumed_weights(context, np.ones(1) if weight is None else weight)
    for x, weight in product(INPUTS[form](context), weights):
        whole = x.shape
        heads = x.reshape(len(x), -1, len(weight)) if len(weight) > 1 else x
        for normed in _normed(context, heads):
            result = normed * weight if bias is None else normed * weight + bias
            low = context.assume("low", "")
            yield (round_to(result, low).astype(np.float64) if low else result).reshape(whole)


def _assumed_weights(context: Context, weight: np.ndarray) -> list[np.ndarray]:
    """Return the weight under the context's assumptions: exact, and rounded where it was changed in the dtype."""
    offset = 1.0 if context.setting("model_type") in PLUS_ONE else 0.0
    changed = context.assume("weight_factor", 1.0) * (weight + offset) + context.assume("weight_offset", 0.0)
    cast = context.assume("weight", "")
    if cast:
        return [round_to(changed, cast).astype(np.float64)]
    return [changed, context.rounded(changed)] if "weight_offset" in context.assumptions else [changed]


def _normed(context: Context, x: np.ndarray) -> Iterator[np.ndarray]:
    """Yield (x - mean) / deviation or x / RMS over the last axis, not rounded and rounded to the dtype.

    RMSNorm: B. Zhang and R. Sennrich, 2019. LayerNorm: J. Ba, J. Kiros and G. Hinton, 2016. The assumption ``low``
    names a dtype in which the square, its mean and the root are rounded.
    """
    centred, eps = kind_and_eps(context)
    eps *= context.assume("eps_factor", 1.0)
    if centred != context.assume("centred", False):
        x = x - x.mean(axis=-1, keepdims=True)
    low = context.assume("low", "")
    if low:
        x = round_to(x, low).astype(np.float64)
        square = round_to(round_to(x * x, low).mean(axis=-1, keepdims=True), low)
        root = round_to(1 / np.sqrt(round_to(square + eps, low)), low).astype(np.float64)
        yield round_to(x * root, low).astype(np.float64)
        return
    normed = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)
    yield normed
    yield context.rounded(normed)


def kind_and_eps(context: Context) -> tuple[bool, float]:
    """Return whether the model's norms subtract the mean, and their epsilon, by the configuration."""
    eps = context.setting(*LAYER_EPS)
    if eps is not None and context.setting("rms_norm_eps") is None:
        return True, float(eps)
    eps = context.setting(*RMS_EPS, default=context.shape.eps or None)
    if eps is None:
        raise Unreplayable("the model's norm epsilon is not known")
    return context.setting("normalization") == "LayerNorm", float(eps)


def reduction(context: Context) -> int:
    """Return the square root of the features that one mean is taken over: a sum of squares has no cancellation, and
    what its order changes is one factor for the whole row."""
    shape = context.parameter_shape(f"{module_of(context)}.weight")
    return math.isqrt(shape[0] if shape else max(context.shape.hidden, 1))


# -- hypotheses -------------------------------------------------------------------------------------------------------


def _other_weight(context: Context, stored: np.ndarray) -> Mapping[str, Any] | None:
    """Fit a weight to all rows: each feature's own least-squares factor."""
    plain = context.plain()
    shape = context.parameter_shape(f"{module_of(context)}.weight")
    if shape is None or len(stored) < 4:
        return None
    x, y = (values.reshape(-1, shape[0]) for values in (plain, stored))
    factors = (x * y).sum(0) / np.maximum((x * x).sum(0), TINY)
    return {"replaced": (x * factors).reshape(plain.shape), "value": float(np.std(factors))}


def _in_middle(context: Context) -> bool:
    return "post_attention" in context.label or "pre_feedforward" in context.label


FAULTS = (
    Hypothesis(
        "norm-eps",
        {},
        "its eps is {value:.3g} times the configured one",
        fit=("eps_factor", (0.0, 1e-3, 1e-2, 0.1, 0.5, 2.0, 5.0, 10.0, 1e2, 1e3, 1e4, 1e5, 1e6)),
    ),
    Hypothesis("norm-weight-offset", {"weight_offset": 1.0}, "one is added to its weight"),
    Hypothesis("norm-weight-offset", {"weight_offset": -1.0}, "one is taken from its weight"),
    Hypothesis("norm-weight-offset", {"weight_factor": 0.0, "weight_offset": 1.0}, "it has no weight"),
    Hypothesis("other-config", {"centred": True}, "it is an RMSNorm where the model has a LayerNorm, or the reverse"),
    Hypothesis("missing-residual", {"stream": 0.0}, "the residual stream is not added to its input", when=_in_middle),
    Hypothesis("missing-residual", {"attention": 0.0}, "the attention is not added to its input", when=_in_middle),
    Hypothesis("norm-precision", {"low": "bfloat16"}, "it is computed in bfloat16 throughout", typical=True),
    Hypothesis("norm-precision", {"low": "float16"}, "it is computed in float16 throughout", typical=True),
    Hypothesis("weight-precision", {"weight": "bfloat16"}, "its weight passed through bfloat16"),
    *OUTPUT,
    Hypothesis(
        "stale-weights", {}, "another weight fits all rows (its features differ by factors)", solve=_other_weight
    ),
    OFFSET,
    *FEW_ONLY,
)

RECIPES = tuple(
    Recipe("norm", f"{module}:output.0", compute, *NORM, hypotheses=FAULTS, length=reduction) for module in INPUTS
)
assert FINAL_NORM in {recipe.output for recipe in RECIPES}
