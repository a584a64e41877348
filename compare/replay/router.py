"""The router of a mixture of experts in float64: which experts a token's logits choose, and with what weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from probe.compare.moe.routing import NORMALISES, SIGMOID
from probe.compare.names.common import CORRECTION, ROUTER, ROUTER_IDS, ROUTER_WEIGHTS
from probe.compare.replay.bands import FINE_DTYPES, ROUTING
from probe.compare.replay.base import Context, Hypothesis, Recipe, Unreplayable
from probe.compare.side import Side
from probe.metrics import MANTISSA_BITS


@dataclass(frozen=True)
class Choice:
    """How a model chooses: the ``top_k`` largest of the scores, plus a bias where there is one.

    Only experts of the ``top_groups`` best of ``groups`` groups count. Weights are the scores, normalised over the
    chosen where ``normalise``, times ``scale``. Source: DeepSeek-V3 (arXiv 2412.19437), of which others are cases.
    """

    top_k: int
    sigmoid: bool = False
    normalise: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1


def choice_of(context: Context) -> Choice:
    """Return the rule of the context's model under its hypothesis; raise Unreplayable for unknown families."""
    config = context.config
    kind, top_k = config.get("model_type"), config.get("num_experts_per_tok")
    if not isinstance(top_k, int) or (kind not in NORMALISES and kind not in SIGMOID):
        raise Unreplayable(f"how a {kind or 'model of unknown type'} picks its experts is not known to the replay")
    always = NORMALISES.get(str(kind))
    normalise = bool(config.get("norm_topk_prob", kind in SIGMOID)) if always is None else always
    rule = Choice(top_k, kind in SIGMOID, normalise)
    if rule.sigmoid:
        groups, best = int(config.get("n_group") or 1), int(config.get("topk_group") or 1)
        rule = replace(rule, scale=float(config.get("routed_scaling_factor") or 1.0), groups=groups, top_groups=best)
    changes = {name: context.assumptions[name] for name in ("normalise", "scale", "sigmoid", "groups", "top_k")
               if name in context.assumptions}  # fmt: skip
    return replace(rule, **changes)


def scores_of(logits: np.ndarray, rule: Choice) -> np.ndarray:
    """Return the scores float64 [n, experts] of logits [n, experts]: their sigmoid, or softmax over all experts."""
    if rule.sigmoid:
        return np.asarray(np.exp(-np.logaddexp(0.0, -logits)))
    scores = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(scores / scores.sum(axis=1, keepdims=True))


def _biased(context: Context, scores: np.ndarray, rule: Choice) -> np.ndarray:
    """Return what is compared to choose: scores plus the correction bias, outside of the best groups -inf."""
    factor = context.assume("bias", 1.0)
    bias = context.optional(CORRECTION) if rule.sigmoid and factor else None
    chosen = scores if bias is None else scores + factor * bias
    if rule.groups > 1:
        inside = chosen.reshape(len(chosen), rule.groups, -1)
        best = np.sort(inside, axis=2)[:, :, -2:].sum(axis=2)
        bound = np.sort(best, axis=1)[:, -rule.top_groups]
        chosen = np.where((best >= bound[:, None])[:, :, None], inside, -np.inf).reshape(chosen.shape)
    return chosen


def weights_at(logits: np.ndarray, ids: np.ndarray, rule: Choice) -> np.ndarray:
    """Return the weights float64 [n, k] of the experts ``ids`` int [n, k]; 0 where an id is -1."""
    scores = np.take_along_axis(scores_of(logits, rule), np.maximum(ids, 0), axis=1)
    scores = np.where(ids >= 0, scores, 0.0)
    if rule.normalise:
        scores = scores / np.maximum(scores.sum(axis=1, keepdims=True), 1e-20)
    return np.asarray(rule.scale * scores)


# -- ids ---------------------------------------------------------------------------------------------------------------

TIE = 4.0
"""Roundings by which two experts' logits may differ from those that the router compared: each is rounded once when it
is stored, and moved once more where the engine computed its scores in the dump's dtype."""


def chosen_ids(context: Context) -> Iterator[np.ndarray]:
    """Yield the ids [n, k] in the places that the engine gave them; experts that rounding may exchange count as chosen.

    An expert that the rule did not choose is accepted where its score lies within :data:`TIE` roundings of the last
    chosen one's: such a swap is the engine's right.
    """
    _need_own(context, ROUTER_IDS)
    logits, rule = context.value(ROUTER), choice_of(context)
    stored = context.value(ROUTER_IDS)
    missing = np.isnan(logits).any(axis=1) | np.isnan(stored).any(axis=1)
    ids = np.where(missing[:, None], -1, stored).astype(np.int64)
    scores = scores_of(np.where(missing[:, None], 0.0, logits), rule)
    compared = _biased(context, scores, rule)
    if rule.top_k != ids.shape[1]:
        ids = np.pad(ids, ((0, 0), (0, max(0, rule.top_k - ids.shape[1]))), constant_values=-1)[:, : ids.shape[1]]
    unit = 2.0 ** -(MANTISSA_BITS.get(context.dtype, 23) + 1)
    slope = scores * (1 - scores) if rule.sigmoid else scores
    slack = TIE * unit * (slope * np.abs(np.where(missing[:, None], 0.0, logits)) + scores)
    result = _placed(ids, compared, slack, min(rule.top_k, compared.shape[1])).astype(np.float64)
    result[missing] = np.nan
    yield result


def _placed(ids: np.ndarray, compared: np.ndarray, slack: np.ndarray, k: int) -> np.ndarray:
    """Return the rule's choice with each expert where ``ids`` has it; of experts that tie, those of ``ids``."""
    order = np.argsort(-compared, axis=1, kind="stable")
    last = np.take_along_axis(compared, order[:, k - 1 : k], axis=1)
    room = np.take_along_axis(slack, order[:, k - 1 : k], axis=1)
    taken = np.zeros(compared.shape, bool)
    valid = ids >= 0
    np.put_along_axis(taken, np.where(valid, ids, ids.max(axis=1, keepdims=True)), True, axis=1)
    with np.errstate(invalid="ignore"):
        near = np.abs(compared - last) <= slack + room
    # certain choices first, then ties that the engine took, then the others by score
    bonus = np.where(near, np.where(taken, 1.0, 0.0), np.where(compared > last, 2.0, -1.0))
    rule = np.lexsort((-compared, -bonus), axis=1)[:, :k]
    result = np.full(ids.shape, -1, np.int64)
    for row, (own, wanted) in enumerate(zip(ids, rule)):
        kept = np.isin(own, wanted)
        result[row, kept] = own[kept]
        spare = [expert for expert in wanted if expert not in own[kept]]
        free = np.flatnonzero(~kept)
        result[row, free[: len(spare)]] = spare[: len(free)]
    return result


def _need_own(context: Context, label: str) -> None:
    source = context.side.resolution.sources.get(context.name(label))
    if source is not None and source.operation == "route":
        raise Unreplayable("the engine returns no ids or weights: they were derived from the logits by the same rule")


# -- weights -----------------------------------------------------------------------------------------------------------


def chosen_weights(context: Context) -> Iterator[np.ndarray]:
    """Yield the weights [n, k] that the logits give to the experts that the engine chose."""
    _need_own(context, ROUTER_WEIGHTS)
    yield weights_of(context)


def weights_of(context: Context) -> np.ndarray:
    """Return the weights float64 [n, k] of the stored ids by the model's rule, NaN where logits or ids are missing."""
    logits, ids, rule = context.value(ROUTER), context.value(ROUTER_IDS), choice_of(context)
    missing = np.isnan(logits).any(axis=1) | np.isnan(ids).any(axis=1)
    known = np.where(missing[:, None], 0, ids).astype(np.int64)
    weights = weights_at(np.where(missing[:, None], 0.0, logits), known, rule)
    return np.where(missing[:, None], np.nan, weights)


# -- what may be wrong -------------------------------------------------------------------------------------------------


def _is_biased(context: Context) -> bool:
    return choice_of(context).sigmoid and context.parameter_shape(CORRECTION) is not None


def _is_scaled(context: Context) -> bool:
    return choice_of(context).scale != 1.0


def _normalises(context: Context) -> bool:
    return choice_of(context).normalise


def _not(condition: Callable[[Context], bool]) -> Callable[[Context], bool]:
    return lambda context: not condition(context)


def _is_grouped(context: Context) -> bool:
    return choice_of(context).groups > 1


def _factor(context: Context, stored: np.ndarray) -> Mapping[str, Any] | None:
    """Fit the factor on all weights."""
    plain = context.plain()
    factor = float(np.vdot(plain, stored)) / max(float(np.vdot(plain, plain)), 1e-300)
    return {"replaced": factor * plain, "value": factor}


IDS_FAULTS = (
    Hypothesis("router-bias", {"bias": 0.0}, "experts are chosen without the correction bias", when=_is_biased),
    Hypothesis("router-bias", {"bias": 2.0}, "the correction bias is added twice", when=_is_biased),
    Hypothesis("router-bias", {"bias": -1.0}, "the correction bias is subtracted", when=_is_biased),
    Hypothesis("router-fault", {"groups": 1}, "experts are chosen from all groups", when=_is_grouped),
)
WEIGHT_FAULTS = (
    Hypothesis("norm-topk", {"normalise": False}, "weights are not normalised over the chosen", when=_normalises),
    Hypothesis("norm-topk", {"normalise": True}, "weights are normalised over the chosen", when=_not(_normalises)),
    Hypothesis("router-scale", {"scale": 1.0}, "weights lack the routed scaling factor", when=_is_scaled),
    Hypothesis("router-fault", {"sigmoid": False, "normalise": True}, "scores are a softmax"),
    Hypothesis("router-fault", {"sigmoid": True}, "scores are a sigmoid"),
    Hypothesis("router-scale", {}, "weights are {value:.6g} times what they should be", solve=_factor),
)


def is_moe(side: Side) -> bool:
    """Tell whether a side's model has experts."""
    return side.shape.experts > 0


UNITS = 2.0
"""Units in the last place to which float32 libraries compute exp, as erf."""


def weights_size(context: Context, computed: np.ndarray) -> np.ndarray:
    """Return the magnitudes that errors of weights are relative to: in float32 the errors of exp(l - max) too.

    The subtraction errs by a rounding of l - max, which exp turns into a relative error; exp adds UNITS of its own, and
    over a token's few weights nothing averages. In 16 bits kernels compute the softmax in float32.
    """
    if context.dtype not in FINE_DTYPES:
        return computed
    logits = np.sort(context.value(ROUTER), axis=1)[:, ::-1]
    chosen = min(computed.shape[1], logits.shape[1])
    reach = (logits[:, 0] - logits[:, chosen - 1])[:, None]
    return computed * np.sqrt(1 + UNITS**2 + reach**2)


RECIPES = (
    Recipe("router ids", ROUTER_IDS, chosen_ids, *ROUTING, hypotheses=IDS_FAULTS, applies=is_moe),
    Recipe(
        "router weights",
        ROUTER_WEIGHTS,
        chosen_weights,
        *ROUTING,
        hypotheses=WEIGHT_FAULTS,
        applies=is_moe,
        size=weights_size,
    ),
)
