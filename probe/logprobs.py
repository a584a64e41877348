"""Formulas of two sides' log-probabilities of the same tokens: numpy in, plain numbers out.

Shared by the functions that run in training and by the offline comparison. Throughout, a is the rollout's log-prob of a
token, b the actor's, D = b - a, and the importance ratio rho = exp(D).
"""

from __future__ import annotations

import numpy as np


def token_metrics(logprob_a: np.ndarray, logprob_b: np.ndarray) -> dict[str, float]:
    """Return the divergence of two log-prob vectors of the same tokens, a the rollout's and b the actor's.

    float [tokens] each, finite. With D = b - a, p = exp(a), q = exp(b):

    * ``mean_abs_logprob_diff``, ``max_abs_logprob_diff`` of |D|;
    * ``mean_prob_diff``, ``max_prob_diff``, ``std_prob_diff`` of |p - q|, std with n - 1 (verl's
      ``training/rollout_probs_diff_{mean,max,std}``); ``pearson`` = corr(p, q)
      (``training/rollout_actor_probs_pearson_corr``);
    * ``k1`` = -mean D, ``k2`` = mean D^2 / 2, ``k3`` = mean(exp(D) - D - 1): estimators of KL(rollout || actor) on
      tokens the rollout sampled (J. Schulman, "Approximating KL divergence", 2020).

    A figure that needs more tokens than there are is NaN.
    """
    a, b = np.asarray(logprob_a, np.float64), np.asarray(logprob_b, np.float64)
    if not a.size:
        return dict.fromkeys(TOKEN_METRICS, float("nan"))
    difference = b - a
    p, q = np.exp(a), np.exp(b)
    gap = np.abs(p - q)
    with np.errstate(over="ignore"):
        k3 = float(np.mean(np.expm1(difference) - difference))
    return {
        "mean_abs_logprob_diff": float(np.abs(difference).mean()),
        "max_abs_logprob_diff": float(np.abs(difference).max()),
        "mean_prob_diff": float(gap.mean()),
        "max_prob_diff": float(gap.max()),
        "std_prob_diff": float(gap.std(ddof=1)) if gap.size > 1 else float("nan"),
        "pearson": pearson(p, q),
        "k1": float(-difference.mean()),
        "k2": float(0.5 * np.mean(difference**2)),
        "k3": k3,
    }


TOKEN_METRICS = (
    *("mean_abs_logprob_diff", "max_abs_logprob_diff", "mean_prob_diff", "max_prob_diff", "std_prob_diff"),
    *("pearson", "k1", "k2", "k3"),
)


def pearson(x: np.ndarray, y: np.ndarray) -> float:
    """Return the correlation coefficient of two vectors; NaN below two values or when one is constant."""
    if x.size < 2:
        return float("nan")
    dx, dy = x - x.mean(), y - y.mean()
    scale = float(np.sqrt((dx @ dx) * (dy @ dy)))
    return float(dx @ dy) / scale if scale else float("nan")


RATIO_METRICS = ("tme", "mean_ratio", "ess", "chi2")


def ratio_metrics(logprob_a: np.ndarray, logprob_b: np.ndarray) -> dict[str, float]:
    """Return what the importance ratios rho = exp(b - a) of response tokens say, float [tokens] each, finite.

    ``tme`` = mean exp(|b - a|) (NeMo-RL's token multiplicative error); ``mean_ratio`` = mean rho; ``ess`` = effective
    sample size as a share of the tokens, 1 / mean((rho / mean rho)^2), and ``chi2`` = mean rho^2 - 1 (both as in verl's
    rollout correction). NaN without tokens, infinite where a ratio overflows.
    """
    if not logprob_a.size:
        return dict.fromkeys(RATIO_METRICS, float("nan"))
    difference = np.asarray(logprob_b, np.float64) - np.asarray(logprob_a, np.float64)
    with np.errstate(over="ignore"):
        ratio, squares = np.exp(difference), np.exp(2 * difference)
        weights = np.exp(difference - difference.max())  # any common factor cancels
        return {
            "tme": float(np.exp(np.abs(difference)).mean()),
            "mean_ratio": float(ratio.mean()),
            "ess": float(weights.mean() ** 2 / np.mean(weights**2)),
            "chi2": float(squares.mean() - 1),
        }
