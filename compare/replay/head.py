"""The end of the model: logits from the final norm, and log-probs from the logits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from probe.compare.names.canonical import FINAL_NORM, LOGITS
from probe.compare.replay.bands import HEAD, LOGPROBS
from probe.compare.replay.base import Context, Hypothesis, Recipe, Unreplayable
from probe.compare.replay.faults import CHANNELS, FEW_ONLY, OFFSET, OUTPUT, TINY, WEIGHT_CASTS
from probe.compare.replay.inputs import LOG_PROBS
from probe.compare.replay.linear import product
from probe.sampling import engine_semantics
from probe.store.dtypes import round_to

TIED, UNTIED = "embed_tokens", "lm_head"


def head_module(context: Context) -> str:
    """Return the module whose weight makes the logits: the embedding where the model ties them."""
    tied = context.setting("tie_word_embeddings", default=context.shape.tied)
    names = (TIED, UNTIED) if tied else (UNTIED, TIED)
    if context.assume("other_head", False):
        names = names[::-1]
    if context.parameter_shape(f"{names[0]}.weight") is None:
        raise Unreplayable(f"the weights at hand hold no {names[0]}.weight")
    return names[0]


def logits(context: Context) -> Iterator[np.ndarray]:
    """Yield x W' + b, scaled or capped as the configuration says, of the vocabulary that was stored."""
    x, stored = context.value(FINAL_NORM), context.value(LOGITS)
    cast = context.assume("head_dtype", "")
    if cast:
        x = round_to(x, cast).astype(np.float64)
        context = context.assuming({"weight": cast})
    found = product(context, x, head_module(context), stored.shape[1])
    if found.shape[1] < stored.shape[1]:
        raise Unreplayable(f"the head has {found.shape[1]} outputs, {stored.shape[1]} logits were stored")
    bias = context.optional("lm_head.bias")
    found = found if bias is None else found + bias[: stored.shape[1]]
    found = np.roll(found, context.assume("shift", 0), axis=1)
    found = found * context.setting("logit_scale", default=1.0) / context.setting("logits_scaling", default=1.0)
    if cast:
        found = round_to(found, cast).astype(np.float64)
    yield from _capped(context, found)


def _capped(context: Context, found: np.ndarray) -> Iterator[np.ndarray]:
    """Yield cap tanh(x / cap): rounded at the end only, after the product, and after every step."""
    cap = context.assume("cap", context.setting("final_logit_softcapping"))
    if not cap:
        yield found
        return
    yield cap * np.tanh(found / cap)
    once = context.rounded(found)
    yield cap * np.tanh(once / cap)
    yield cap * context.rounded(np.tanh(context.rounded(once / cap)))


def _length(context: Context) -> int:
    return max(context.shape.hidden, 1)


def _is_tied(context: Context) -> bool:
    return context.parameter_shape("lm_head.weight") is not None


def _is_capped(context: Context) -> bool:
    return bool(context.setting("final_logit_softcapping"))


HEAD_FAULTS = (
    Hypothesis(
        "untied-head", {"other_head": True}, "its weight is that of the other of embedding and head", when=_is_tied
    ),
    Hypothesis("vocab-offset", {"shift": 1}, "each token has the logit of the previous id"),
    Hypothesis("vocab-offset", {"shift": -1}, "each token has the logit of the next id"),
    Hypothesis("softcap", {"cap": 0.0}, "its logits are not capped", when=_is_capped),
    Hypothesis("head-precision", {"head_dtype": "bfloat16"}, "it is computed in bfloat16"),
    *(Hypothesis("weight-precision", {"weight": key}, cast.text) for key, cast in WEIGHT_CASTS.items()),
    *OUTPUT,
    *CHANNELS,
    OFFSET,
    *FEW_ONLY,
)


# -- log-probs --------------------------------------------------------------------------------------------------------


def _scored_logits(context: Context, shift: int = 0) -> np.ndarray:
    """Return the logits that score the tokens at the context's keys: those of the position before."""
    key = f"scored {shift}"
    if key not in context.memory:
        keys = context.keys - np.array([0, 1 + shift])
        context.memory[key] = context.tensors.rows(LOGITS, keys)
    return np.asarray(context.memory[key])


def log_probs(context: Context) -> Iterable[np.ndarray]:
    """Yield log softmax(logits / T) of each token, over it and the tokens that top-p keeps where the engine says so."""
    meaning = engine_semantics(context.side.dump.manifest)
    temperature = context.assume("temperature", meaning.temperature)
    top_p = context.assume("top_p", meaning.top_p)
    shift = context.assume("shift", 0)
    keys = context.keys - np.array([0, shift])
    scores, tokens = _scored_logits(context, shift) / max(temperature, TINY), context.tensors.tokens(keys)
    inside = (tokens >= 0) & (tokens < scores.shape[1])
    chosen = scores[np.arange(len(scores)), np.where(inside, tokens, 0)]
    yield np.where(inside, chosen - _log_sum(scores, chosen, top_p), np.nan)[:, None]


def _log_sum(scores: np.ndarray, chosen: np.ndarray, top_p: float) -> np.ndarray:
    """Return log sum exp over the smallest set of tokens whose probabilities reach top-p, and over the chosen one.

    A token was drawn from the set: one that lies outside it fell there by rounding.
    """
    peak = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - peak)
    total = weights.sum(axis=1)
    if top_p < 1.0:
        ordered = -np.sort(-weights, axis=1)
        kept = np.cumsum(ordered, axis=1) - ordered < top_p * total[:, None]
        own, least = np.exp(chosen - peak[:, 0]), np.where(kept, ordered, np.inf).min(axis=1)
        total = np.where(kept, ordered, 0.0).sum(axis=1) + np.where(own < least, own, 0.0)
    return np.asarray(peak[:, 0] + np.log(total))


def _size(context: Context, computed: np.ndarray) -> np.ndarray:
    """Return the magnitudes [n, 1] that are rounded: the largest logit over T, and the log-prob itself.

    Rounding of logits moves log-probs by as much, however small they are. Where the logits are small instead, as in a
    model that was not trained, the sum's logarithm is not: ln(vocabulary), which is what the log-prob then is.
    """
    temperature = engine_semantics(context.side.dump.manifest).temperature
    largest = np.abs(_scored_logits(context)).max(axis=1, keepdims=True) / max(temperature, TINY)
    return np.asarray(np.hypot(largest, computed))


def _zeros(context: Context, stored: np.ndarray) -> Mapping[str, Any] | None:
    zero = (stored == 0) & (context.plain() < -0.01)
    return {"replaced": np.where(zero, 0.0, context.plain()), "value": float(zero.sum())} if zero.any() else None


def _is_processed(context: Context) -> bool:
    meaning = engine_semantics(context.side.dump.manifest)
    return (meaning.temperature, meaning.top_p) != (1.0, 1.0)


LOGPROB_FAULTS = (
    Hypothesis("zero-filled-logprobs", {}, "{value:.0f} of them are exactly zero", solve=_zeros),
    Hypothesis("logprob-shift", {"shift": 1}, "each belongs to the token before"),
    Hypothesis("logprob-shift", {"shift": -1}, "each belongs to the next token"),
    Hypothesis(
        "raw-logprobs",
        {"temperature": 1.0, "top_p": 1.0},
        "they are raw, and declared to be processed",
        when=_is_processed,
    ),
    Hypothesis(
        "temperature-semantics",
        {},
        "they are of the logits over a temperature of {value:.4g}",
        fit=("temperature", (0.1, 0.2, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5, 2.0, 3.0)),
    ),
    Hypothesis(
        "renormalised-top-p",
        {},
        "they are renormalised over the tokens of top-p {value:.3g}",
        fit=("top_p", (0.1, 0.3, 0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 0.97, 0.99, 0.999)),
    ),
    *FEW_ONLY[:1],
)

RECIPES = (
    Recipe("lm_head", LOGITS, logits, *HEAD, hypotheses=HEAD_FAULTS, length=_length),
    Recipe("log-probs", LOG_PROBS, log_probs, *LOGPROBS, hypotheses=LOGPROB_FAULTS, size=_size),
)
