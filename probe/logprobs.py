"""Formulas of two sides' log-probabilities of the same tokens: numpy in, plain numbers out.

Shared by the functions that run in training and by the offline comparison. Throughout, a is the rollout's log-prob of a
token, b the actor's, D = b - a, and the importance ratio rho = exp(D). Vectors hold the response tokens inside the mask
and nothing else, so a mask with holes (the tool turns of a dialogue) needs no thought here. All is computed in float64.
Without tokens every figure is NaN; with one token so are those that need two (std, Pearson); a log-prob that is NaN
makes the figures NaN that use it; ratios beyond float64 are infinite. Nothing raises, nothing warns.
"""

from __future__ import annotations

import numpy as np

PROB_METRICS = ("mean_prob_diff", "max_prob_diff", "std_prob_diff")

TOKEN_METRICS = ("mean_abs_logprob_diff", "max_abs_logprob_diff", *PROB_METRICS, "pearson", "k1", "k2", "k3")


def prob_diff_metrics(prob_diff: np.ndarray) -> dict[str, float]:
    """Return the PROB_METRICS of |exp(a) - exp(b)|, float [tokens]: mean, maximum, and std with n - 1.

    These are verl's ``training/rollout_probs_diff_{mean,max,std}`` (verl/utils/debug/metrics.py).
    """
    gap = np.asarray(prob_diff, np.float64)
    if not gap.size:
        return dict.fromkeys(PROB_METRICS, float("nan"))
    with np.errstate(invalid="ignore"):
        spread = float(gap.std(ddof=1)) if gap.size > 1 else float("nan")
    return dict(zip(PROB_METRICS, (float(gap.mean()), float(gap.max()), spread)))


def kl_terms(logprob_a: np.ndarray, logprob_b: np.ndarray) -> dict[str, np.ndarray]:
    """Return each token's term of the estimators of KL(rollout || actor): k1 = -D, k2 = D^2 / 2, k3 = rho - D - 1.

    float [tokens] each in, float64 out. J. Schulman, "Approximating KL divergence" (2020), for tokens that the rollout
    sampled. verl's ``kl_penalty(a, b, ...)`` has the same three; its k3 takes D within +-20 and ends at 10. The means
    of k1 and k3 are its ``rollout_corr/kl`` and ``rollout_corr/k3_kl``.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        difference = np.asarray(logprob_b, np.float64) - np.asarray(logprob_a, np.float64)
        return {"k1": -difference, "k2": 0.5 * difference**2, "k3": np.expm1(difference) - difference}


def token_metrics(logprob_a: np.ndarray, logprob_b: np.ndarray) -> dict[str, float]:
    """Return the divergence of two log-prob vectors of the same tokens, a the rollout's and b the actor's.

    float [tokens] each, finite. With p = exp(a), q = exp(b):

    * ``mean_abs_logprob_diff``, ``max_abs_logprob_diff`` of |D|;
    * ``mean_prob_diff``, ``max_prob_diff``, ``std_prob_diff`` of |p - q| (prob_diff_metrics); ``pearson`` = corr(p, q)
      (verl's ``training/rollout_actor_probs_pearson_corr``);
    * ``k1``, ``k2``, ``k3``: means of kl_terms.
    """
    a, b = np.asarray(logprob_a, np.float64), np.asarray(logprob_b, np.float64)
    if not a.size:
        return dict.fromkeys(TOKEN_METRICS, float("nan"))
    with np.errstate(over="ignore", invalid="ignore"):
        gap = np.abs(b - a)
        p, q = np.exp(a), np.exp(b)
        prob_diff = np.abs(p - q)
    return {
        "mean_abs_logprob_diff": float(gap.mean()),
        "max_abs_logprob_diff": float(gap.max()),
        **prob_diff_metrics(prob_diff),
        "pearson": pearson(p, q),
        **{name: float(terms.mean()) for name, terms in kl_terms(a, b).items()},
    }


def pearson(x: np.ndarray, y: np.ndarray) -> float:
    """Return the correlation coefficient of two float vectors; NaN below two values or when one is constant."""
    with np.errstate(over="ignore", invalid="ignore"):
        # the mean of equal values is not always that value, and rounding would correlate with rounding
        if x.size < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
            return float("nan")
        dx, dy = x - x.mean(), y - y.mean()
        scale = float(np.sqrt(dx @ dx) * np.sqrt(dy @ dy))
        return float(dx @ dy) / scale if scale else float("nan")


RATIO_METRICS = ("tme", "mean_ratio", "ess", "chi2_token")


def ratio_metrics(logprob_a: np.ndarray, logprob_b: np.ndarray) -> dict[str, float]:
    """Return what the importance ratios rho of response tokens say, float [tokens] each, finite.

    ``tme`` = mean exp(|D|) (NeMo-RL's token multiplicative error); ``mean_ratio`` = mean rho, the bias; ``ess`` =
    effective sample size as a share of the tokens, 1 / mean((rho / mean rho)^2), and ``chi2_token`` = mean rho^2 - 1
    (both as in verl's rollout correction, which cuts D to +-20 first and, for ``ess``, rho to its thresholds).
    """
    if not logprob_a.size:
        return dict.fromkeys(RATIO_METRICS, float("nan"))
    with np.errstate(over="ignore", invalid="ignore"):
        difference = np.asarray(logprob_b, np.float64) - np.asarray(logprob_a, np.float64)
        ratio = np.exp(difference)
        weights = np.exp(difference - difference.max())  # any common factor cancels
        return {
            "tme": float(np.exp(np.abs(difference)).mean()),
            "mean_ratio": float(ratio.mean()),
            "ess": float(weights.mean() ** 2 / np.mean(weights**2)),
            "chi2_token": float(np.mean(ratio**2) - 1),
        }


SEQUENCE_METRICS = (
    *("log_ppl_a", "log_ppl_b", "log_ppl_diff", "log_ppl_abs_diff", "log_ppl_diff_min", "log_ppl_diff_max"),
    *("ppl_a", "ppl_b", "ppl_ratio", "chi2_sequence", "chi2_sequence_geometric", "tme_sequence_max"),
)

SEQUENCE_COLUMNS = ("log_ppl_a", "log_ppl_b", "log_ppl_diff", "ratio", "ratio_geometric", "tme", "k3")


def sequence_metrics(
    logprob_a: np.ndarray, logprob_b: np.ndarray, sequence: np.ndarray, count: int
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Return figures over sequences (SEQUENCE_METRICS), and those of each sequence (SEQUENCE_COLUMNS, float64 [count]).

    ``logprob_a``, ``logprob_b``: float [tokens], finite; ``sequence``: int [tokens] from 0 to ``count`` - 1, in any
    order. The columns of a sequence, means over its tokens: ``log_ppl_a`` = -mean a, ``log_ppl_b`` = -mean b (log
    perplexities), ``log_ppl_diff`` = log_ppl_b - log_ppl_a = -mean D, ``ratio`` = product of rho, ``ratio_geometric`` =
    exp(mean D), ``tme`` = mean exp(|D|), ``k3``. The figures, means over sequences unless named otherwise:

    * ``log_ppl_a``, ``log_ppl_b``, ``log_ppl_diff``, ``log_ppl_abs_diff`` (of its absolute value),
      ``log_ppl_diff_min``, ``log_ppl_diff_max``, ``ppl_a`` and ``ppl_b`` = mean exp(log_ppl), ``ppl_ratio`` = mean
      exp(log_ppl_diff): verl's ``rollout_corr/*`` of the same names, a being its rollout and b its training;
    * ``chi2_sequence`` = mean ratio^2 - 1, which verl calls ``chi2_seq`` (it cuts the log of the ratio to +-20 first);
      ``chi2_sequence_geometric`` = mean ratio_geometric^2 - 1, which ms-swift calls ``chi2_seq``;
    * ``tme_sequence_max``: the largest ``tme`` (NeMo-RL filters sequences by it).

    A sequence without a token inside the mask is NaN in every column and in no figure. verl counts one as perplexity 1
    and ratio 1, so its figures lie nearer to those of equal sides where rows are masked out.
    """
    a, b = np.asarray(logprob_a, np.float64), np.asarray(logprob_b, np.float64)
    tokens = np.bincount(sequence, minlength=count)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):

        def means(values: np.ndarray) -> np.ndarray:
            return np.bincount(sequence, values, count) / tokens

        log_ppl_a, log_ppl_b, lean = -means(a), -means(b), means(b - a)
        columns = {
            "log_ppl_a": log_ppl_a,
            "log_ppl_b": log_ppl_b,
            "log_ppl_diff": -lean,
            "ratio": np.exp(lean * tokens),
            "ratio_geometric": np.exp(lean),
            "tme": means(np.exp(np.abs(b - a))),
            "k3": means(kl_terms(a, b)["k3"]),
        }
        known = {name: column[tokens > 0] for name, column in columns.items()}
        return _over_sequences(known), columns


def _over_sequences(columns: dict[str, np.ndarray]) -> dict[str, float]:
    """Return the SEQUENCE_METRICS of the columns of sequences that have tokens."""
    if not len(columns["ratio"]):
        return dict.fromkeys(SEQUENCE_METRICS, float("nan"))
    gap = columns["log_ppl_diff"]
    figures = {
        "log_ppl_a": columns["log_ppl_a"].mean(),
        "log_ppl_b": columns["log_ppl_b"].mean(),
        "log_ppl_diff": gap.mean(),
        "log_ppl_abs_diff": np.abs(gap).mean(),
        "log_ppl_diff_min": gap.min(),
        "log_ppl_diff_max": gap.max(),
        "ppl_a": np.exp(columns["log_ppl_a"]).mean(),
        "ppl_b": np.exp(columns["log_ppl_b"]).mean(),
        "ppl_ratio": np.exp(gap).mean(),
        "chi2_sequence": np.mean(columns["ratio"] ** 2) - 1,
        "chi2_sequence_geometric": np.mean(columns["ratio_geometric"] ** 2) - 1,
        "tme_sequence_max": columns["tme"].max(),
    }
    return {name: float(value) for name, value in figures.items()}
