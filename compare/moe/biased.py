"""Flips of a router that adds a bias to its scores (DeepSeek-V3): what the other tokens' choices say about the bias.

The bias is a parameter, which a dump need not hold, but one number per expert for all tokens of both sides. Wherever a
token uses expert e and not f of one group, bias(e) - bias(f) is at least score(f) - score(e). A flip is explained where
the choices of both sides keep to the bounds that all choices give: where one side has another bias, they contradict.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from probe.compare.moe.routing import SIGMOID


def expert_groups(config: Mapping[str, Any], experts: int) -> np.ndarray | None:
    """Return each expert's group int64 [experts] of a Hugging Face config, None for a model without such a bias."""
    if config.get("model_type") not in SIGMOID:
        return None
    count = int(config.get("n_group") or 1)
    return np.arange(experts) * count // max(experts, 1)


def scores_of(logits: np.ndarray) -> np.ndarray:
    """Return the sigmoid of logits, float64."""
    return np.asarray(np.exp(-np.logaddexp(0.0, -logits)))


class BiasBounds:
    """Bounds of the differences of experts' biases: ``least[e, f]`` is the least that bias(e) - bias(f) can be.

    Of experts in different groups nothing is known: the groups are chosen first. There every flip counts as explained,
    and the replay of the ids decides, which has the bias.
    """

    def __init__(self, groups: np.ndarray) -> None:
        self.groups = groups
        self.least = np.full((len(groups), len(groups)), -np.inf)

    def learn(self, scores: np.ndarray, members: np.ndarray) -> None:
        """Take the choices bool [tokens, experts] of tokens whose scores are float64 [tokens, experts]."""
        for own, chosen in zip(scores, members):
            used, left = np.flatnonzero(chosen), np.flatnonzero(~chosen)
            bound = np.where(self.groups[used][:, None] == self.groups[left], own[left] - own[used][:, None], -np.inf)
            at = np.ix_(used, left)
            self.least[at] = np.maximum(self.least[at], bound)

    def distance(self, scores: np.ndarray, kept: np.ndarray, others: np.ndarray) -> np.ndarray:
        """Return by how much each token's choice ``kept`` breaks the bounds where ``others`` differs, float64 [tokens].

        Zero where it does not, infinite where one choice is larger.
        """
        result = np.zeros(len(scores))
        for row in np.flatnonzero((kept != others).any(axis=1)):
            used, left = np.flatnonzero(kept[row] & ~others[row]), np.flatnonzero(others[row] & ~kept[row])
            needed = scores[row, left] - scores[row, used][:, None]  # bias(used) - bias(left) must reach it
            beyond = needed + self.least[np.ix_(left, used)].T
            result[row] = max(0.0, float(beyond.max(initial=0.0))) if len(used) == len(left) else np.inf
        return result
