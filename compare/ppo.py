"""One PPO update of given log-probs: every quantity per token, as masked mean, and the loss's gradient. numpy alone.

The block is MiniMind's (jingyaogong/minimind, trainer/train_ppo.py, ppo_train_epoch), in float64; what verl 0.9.1
defines otherwise (verl/trainer/ppo/core_algos.py, compute_policy_loss and compute_value_loss) stands beside it as
``*_verl``. docs/ppo.md has every formula.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np

from probe.errors import UsageError
from probe.logprobs import kl_terms

VERL_LOG_RATIO = 20.0
"""verl clamps log-ratios to this on either side before it forms ppo_kl (core_algos.compute_policy_loss)."""
VERL_DUAL_CLIP = 3.0
"""verl's ``clip_ratio_c``: a token with a negative advantage loses its gradient above this ratio, which MiniMind lets
grow without end (dual clip, https://arxiv.org/abs/1912.09729)."""


@dataclass(frozen=True)
class PPOConfig:
    """The numbers of an update; the defaults are those of MiniMind's argument parser (train_ppo.py, commit d65ef2c).

    ``clip_epsilon``: the ratio is clipped to 1 - eps ... 1 + eps; ``kl_coef``: weight of the reference KL;
    ``cliprange_value``: how far a value may move from its old one; ``vf_coef``: weight of the value loss;
    ``early_stop_kl``: an approx_kl above it multiplies the loss by 0; ``accumulation_steps`` divides the loss. All are
    at least 0, ``early_stop_kl`` may be infinite, ``accumulation_steps`` is at least 1. Raises UsageError.
    """

    clip_epsilon: float = 0.2
    kl_coef: float = 0.02
    cliprange_value: float = 0.2
    vf_coef: float = 0.5
    early_stop_kl: float = 0.25
    accumulation_steps: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 1 if field.name == "accumulation_steps" else 0
            if not value >= least or (math.isinf(value) and field.name != "early_stop_kl"):
                option = f"--{field.name.replace('_', '-')}"
                raise UsageError(f"{option} is {value}", f"give a number of at least {least}")


@dataclass(frozen=True)
class Term:
    """One term of a loss at each token: its ``value``, and its ``slope``, the derivative of that value.

    The slope is by the new log-prob, that of the value loss by the new value.
    ``clipped`` (bool): the clipped part wins.
    """

    value: np.ndarray
    slope: np.ndarray
    clipped: np.ndarray


@dataclass(frozen=True)
class Update:
    """What one update computes; arrays have the shape of the inputs and are 0 (``ratio``: 1) outside the mask.

    ``log_ratio``, ``ratio``, ``approx_kl`` and ``outside`` (bool: |ratio - 1| > eps) are of each token. ``policy``,
    ``reference`` and ``value`` are the terms before the mean, None where their inputs are missing. ``scalars`` (names:
    SCALARS) are the masked means and the loss, None where inputs are missing. ``gradient`` and ``value_gradient`` are
    d loss / d new log-prob and d loss / d new value, None as the terms.
    """

    log_ratio: np.ndarray
    ratio: np.ndarray
    approx_kl: np.ndarray
    outside: np.ndarray
    policy: Term | None
    reference: Term | None
    value: Term | None
    scalars: dict[str, float | bool | None]
    gradient: np.ndarray | None
    value_gradient: np.ndarray | None


SCALARS = (
    *("approx_kl", "ppo_kl_verl", "clipfrac", "clipfrac_verl", "clipfrac_lower_verl", "policy_clip_loss"),
    *("kl_ref_penalty", "policy_loss", "value_loss", "value_clipfrac_verl", "loss", "early_stop"),
)


def masked_mean(values: np.ndarray, mask: np.ndarray) -> float:
    """Return the mean of ``values`` where ``mask`` (bool, same shape) holds; 0 for an empty mask, as in MiniMind."""
    return float(np.sum(values, where=mask) / max(int(mask.sum()), 1))


def policy_term(log_ratio: np.ndarray, advantages: np.ndarray, clip_epsilon: float) -> Term:
    """Return the clipped surrogate max(-A r, -A clip(r, 1 - eps, 1 + eps)) of each token, r = exp(log-ratio).

    float64 arrays of one shape, finite. The slope by the new log-prob is -A r where the unclipped part counts (the ends
    of the range included), 0 where the clipped one wins, and as in torch half of -A r where two different ratios give
    one product. A ratio that overflows is infinite; a zero advantage takes nothing from it.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        ratio = np.exp(log_ratio)
        bounded = np.clip(ratio, 1 - clip_epsilon, 1 + clip_epsilon)
        raw, clipped = np.where(advantages == 0, 0.0, -advantages * ratio), -advantages * bounded
    whole = (ratio == bounded) | (raw > clipped)
    slope = np.where(whole, raw, np.where(raw == clipped, raw / 2, 0.0))
    return Term(np.maximum(raw, clipped), slope, clipped > raw)


def reference_term(new: np.ndarray, reference: np.ndarray) -> Term:
    """Return the reference penalty exp(d) - d - 1 of each token, d = reference - new log-prob; float64, finite.

    J. Schulman's k3 ("Approximating KL divergence", 2020) of KL(actor || reference); verl's kl_penalty "k3" clamps d to
    +-20 and the result to +-10, MiniMind neither.
    """
    with np.errstate(over="ignore"):
        slope = -np.expm1(reference - new)
    return Term(kl_terms(new, reference)["k3"], slope, np.zeros(new.shape, bool))


def value_term(values: np.ndarray, old: np.ndarray, returns: np.ndarray, cliprange: float) -> Term:
    """Return half of max((V - G)^2, (clip(V, Vold - c, Vold + c) - G)^2) of each token; float64 arrays, finite."""
    bounded = np.clip(values, old - cliprange, old + cliprange)
    raw, clipped = values - returns, bounded - returns
    with np.errstate(over="ignore"):
        errors = raw**2, clipped**2
    moving = np.where(bounded == values, clipped, 0.0)
    slope = np.where(errors[0] > errors[1], raw, np.where(errors[0] == errors[1], (raw + moving) / 2, moving))
    return Term(0.5 * np.maximum(*errors), slope, errors[1] > errors[0])


def ppo_update(
    new: np.ndarray,
    old: np.ndarray,
    config: PPOConfig,
    *,
    mask: np.ndarray | None = None,
    advantages: np.ndarray | None = None,
    reference: np.ndarray | None = None,
    values: np.ndarray | None = None,
    old_values: np.ndarray | None = None,
    returns: np.ndarray | None = None,
    value_mask: np.ndarray | None = None,
    aux_loss: float = 0.0,
) -> Update:
    """Compute one update of response tokens: MiniMind's whole block.

    ``new``, ``old``, ``reference``: log-probs; all arrays of one shape, float, any dtype. ``mask`` (bool, or numbers of
    which 0 is outside; None: all) chooses the tokens, ``value_mask`` (None: the same) those of the value loss; outside
    it anything may stand. Inside, numbers are finite. The value loss needs ``values``, ``old_values`` and ``returns``.
    A term without its inputs is left out of the loss; without ``advantages`` there is none. With D = new - old:

    * ``approx_kl`` = mean D^2 / 2 (above ``early_stop_kl`` the loss is 0 x itself: its backward still runs, so that
      distributed ranks stay in step); ``ppo_kl_verl`` = mean of -D within +-20;
    * ``clipfrac`` = share of |exp(D) - 1| > eps; ``clipfrac_verl`` = share where the clipped part wins;
      ``clipfrac_lower_verl`` = share of A < 0 with a ratio above 3; ``value_clipfrac_verl`` likewise of values;
    * ``policy_loss`` = ``policy_clip_loss`` + kl_coef x ``kl_ref_penalty``;
    * ``loss`` = (policy_loss + vf_coef x ``value_loss`` + ``aux_loss``) / accumulation_steps.
    """
    inside = np.ones(np.shape(new), bool) if mask is None else np.asarray(mask) != 0
    inside_value = inside if value_mask is None else np.asarray(value_mask) != 0
    new, old = _kept(new, inside), _kept(old, inside)
    log_ratio = new - old
    with np.errstate(over="ignore"):
        ratio, approx_kl = np.exp(log_ratio), kl_terms(old, new)["k2"]
    outside, mean_kl = np.abs(ratio - 1) > config.clip_epsilon, masked_mean(approx_kl, inside)
    advantage = None if advantages is None else _kept(advantages, inside)
    policy = None if advantage is None else policy_term(log_ratio, advantage, config.clip_epsilon)
    penalty = None if reference is None else reference_term(new, _kept(reference, inside))
    before, after, target = (None if x is None else _kept(x, inside_value) for x in (old_values, values, returns))
    value = _value_term(after, before, target, config.cliprange_value)
    scalars: dict[str, float | bool | None] = dict.fromkeys(SCALARS) | {
        "approx_kl": mean_kl,
        "ppo_kl_verl": masked_mean(np.clip(-log_ratio, -VERL_LOG_RATIO, VERL_LOG_RATIO), inside),
        "clipfrac": masked_mean(outside, inside),
        "value_clipfrac_verl": None if value is None else masked_mean(value.clipped, inside_value),
    }
    stop = mean_kl > config.early_stop_kl
    scale = 0.0 if stop else 1 / config.accumulation_steps
    weights = {"policy_clip_loss": 1.0, "kl_ref_penalty": config.kl_coef, "value_loss": config.vf_coef}
    parts = [_Part(*part) for part in zip((policy, penalty, value), (inside, inside, inside_value), weights.values())]
    scalars |= {name: part.mean() for name, part in zip(weights, parts)} | {"early_stop": stop}
    if policy is not None and advantage is not None:
        scalars["clipfrac_verl"] = masked_mean(policy.clipped, inside)
        scalars["clipfrac_lower_verl"] = masked_mean((advantage < 0) & (ratio > VERL_DUAL_CLIP), inside)
        clip_loss, reference_loss, value_loss = (part.weighted() for part in parts)
        policy_loss = clip_loss + reference_loss
        scalars |= {"policy_loss": policy_loss, "loss": _times(policy_loss + value_loss + aux_loss, scale)}
    slopes = [part.gradient(scale) for part in parts]
    gradient = slopes[0] if slopes[0] is None or slopes[1] is None else slopes[0] + slopes[1]
    return Update(log_ratio, ratio, approx_kl, outside, policy, penalty, value, scalars, gradient, slopes[2])


def _value_term(
    values: np.ndarray | None, old: np.ndarray | None, returns: np.ndarray | None, cliprange: float
) -> Term | None:
    if values is None or old is None or returns is None:
        return None
    return value_term(values, old, returns, cliprange)


@dataclass(frozen=True)
class _Part:
    """One term of the loss with its mask and its weight; a weight of 0 also silences a term that is infinite."""

    term: Term | None
    mask: np.ndarray
    weight: float

    def mean(self) -> float | None:
        return None if self.term is None else masked_mean(self.term.value, self.mask)

    def weighted(self) -> float:
        return 0.0 if self.term is None else _times(masked_mean(self.term.value, self.mask), self.weight)

    def gradient(self, scale: float) -> np.ndarray | None:
        """Return the derivative of the weighted mean, times ``scale``, at each token."""
        if self.term is None:
            return None
        factor = self.weight * scale / max(int(self.mask.sum()), 1)
        return np.where(self.mask, self.term.slope, 0.0) * factor if factor else np.zeros(self.mask.shape)


def _times(value: float, weight: float) -> float:
    return value * weight if weight else 0.0


def _kept(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return float64 values with 0 outside the mask, where NaN and infinities may stand."""
    return np.where(mask, np.asarray(values, np.float64), 0.0)
