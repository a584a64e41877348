"""Routing of tokens to experts, in numpy: who was used, by which rule, how much two choices overlap, by what margin.

Experts are numbered globally. A choice is a set: the ids of a token have no order, and -1 marks an unused place
(a token that an expert's capacity turned away).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class RoutingRule:
    """How a model picks a token's experts: the ``top_k`` largest of a softmax over all experts' logits.

    ``normalise``: the weights of the experts picked are divided by their sum.
    """

    top_k: int
    normalise: bool


NORMALISES: dict[str, bool | None] = {
    "mixtral": True,
    "qwen2_moe": None,
    "qwen3_moe": None,
    "olmoe": None,
}
"""Model type -> whether weights are normalised; None: ``norm_topk_prob`` says so, and false where it is absent. Only
families whose ids follow from the logits alone: a bias that corrects the choice (DeepSeek) is no part of them."""


SIGMOID = frozenset({"deepseek_v3", "glm4_moe", "glm4_moe_lite", "dots1", "kimi_k2", "longcat_flash", "minimax_m2"})
"""Model types that choose by a sigmoid of each logit plus a bias, within the best groups (DeepSeek-V3)."""


def routing_rule(config: Mapping[str, Any]) -> RoutingRule | None:
    """Return the rule of a Hugging Face configuration, None for a family that is not in :data:`NORMALISES`."""
    kind, top_k = config.get("model_type"), config.get("num_experts_per_tok")
    if kind not in NORMALISES or not isinstance(top_k, int) or top_k < 1:
        return None
    always = NORMALISES[kind]
    return RoutingRule(top_k, bool(config.get("norm_topk_prob", False)) if always is None else always)


def route(logits: np.ndarray, rule: RoutingRule) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids int32 [tokens, k] and weights float32 [tokens, k] that follow from logits [tokens, experts].

    The largest weight comes first, and of equal logits the lower expert: ties may fall otherwise in an engine.
    """
    wide = logits.astype(np.float64)
    ids = np.argsort(-wide, axis=1, kind="stable")[:, : rule.top_k]
    scores = np.exp(wide - wide.max(axis=1, keepdims=True, initial=-np.inf))
    weights = np.take_along_axis(scores, ids, axis=1)
    weights /= (weights if rule.normalise else scores).sum(axis=1, keepdims=True)
    return ids.astype(np.int32), weights.astype(np.float32)


def chosen_experts(used: np.ndarray) -> np.ndarray:
    """Return the ids int32 [tokens, k] of a map [tokens, experts] of the experts used; k is the most of any token."""
    used = used.astype(bool)
    k = int(used.sum(axis=1).max(initial=0))
    ids = np.argsort(~used, axis=1, kind="stable")[:, :k].astype(np.int32)
    return np.where(np.take_along_axis(used, ids, axis=1), ids, np.int32(-1))


def chosen_weights(weights: np.ndarray, used: np.ndarray) -> np.ndarray:
    """Return the weights [tokens, k] of the experts that :func:`chosen_experts` names, 0 where it names none."""
    ids = chosen_experts(used)
    return np.where(ids >= 0, np.take_along_axis(weights, np.maximum(ids, 0), axis=1), weights.dtype.type(0))


def membership(ids: np.ndarray, experts: int) -> np.ndarray:
    """Return bool [tokens, experts]: who is in each token's set of ids [tokens, k]."""
    return spread(np.ones(ids.shape, bool), ids, experts)


def spread(values: np.ndarray, ids: np.ndarray, experts: int) -> np.ndarray:
    """Return values [tokens, k] in the columns [tokens, experts] of their ids, zero elsewhere."""
    wide = np.zeros((len(ids), experts + 1), values.dtype)
    np.put_along_axis(wide, np.where(ids < 0, experts, ids).astype(np.int64), values, axis=1)
    return wide[:, :experts]


def overlap(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return |A and B| / k for each token of two memberships [tokens, experts]; k is the size of the larger set.

    float64 [tokens]; 1 where both sets are empty. Source: the overlap of top-k sets that routing-replay work reports.
    """
    size = np.maximum(a.sum(axis=1), b.sum(axis=1))
    return np.divide((a & b).sum(axis=1), size, out=np.ones(len(a)), where=size > 0)


def margin(logits: np.ndarray, k: int) -> np.ndarray:
    """Return how far the k-th largest logit of each token [tokens, experts] lies above the next one, float64 [tokens].

    Infinite where every expert is used.
    """
    if not 0 < k < logits.shape[1]:
        return np.full(len(logits), np.inf)
    ordered = np.sort(logits.astype(np.float64), axis=1)
    return ordered[:, -k] - ordered[:, -k - 1]


def swap_distance(logits: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return how far apart the logits of two choices [tokens, experts] lie where they differ, float64 [tokens].

    The largest |logit(e) - logit(f)| over e only in one choice and f only in the other; 0 where the choices agree,
    infinite where one is larger. An
    engine that follows its own logits swaps two experts only where rounding moves their logits past each other, so
    that the distance is at most twice the largest difference between the two engines' logits of that token.
    """
    wide = logits.astype(np.float64)

    def bounds(members: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        low = np.where(members, wide, np.inf).min(axis=1, initial=np.inf)
        return low, np.where(members, wide, -np.inf).max(axis=1, initial=-np.inf)

    (low_a, high_a), (low_b, high_b) = bounds(a & ~b), bounds(b & ~a)
    distance = np.where(a.sum(axis=1) == b.sum(axis=1), np.maximum(high_a - low_b, high_b - low_a), np.inf)
    return np.where((a != b).any(axis=1), distance, 0.0)
