"""The figures of the ``tokens`` and ``ppo`` sections in the words that every form uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from probe.compare.report.model import counted, number

#: Group -> figures of the section ``tokens``: key, name on the page, short name for a terminal, formula. a and b are
#: the log-probs of rollout and actor, p and q their probabilities, D = b - a, rho = exp(D).
FIGURES: dict[str, tuple[tuple[str, str, str, str], ...]] = {
    "Difference": (
        ("mean_abs_logprob_diff", "mean |Δ log-prob|", "mean |dlogp|", "mean |D|, nats"),
        ("max_abs_logprob_diff", "max |Δ log-prob|", "max |dlogp|", "max |D|, nats"),
        ("mean_prob_diff", "mean |Δ prob|", "mean |dp|", "mean |p - q|"),
        ("max_prob_diff", "max |Δ prob|", "max |dp|", "max |p - q|"),
        ("std_prob_diff", "std |Δ prob|", "std |dp|", "standard deviation of |p - q|, with n - 1"),
        ("pearson", "Pearson, prob", "Pearson", "correlation of p and q"),
    ),
    "KL divergence, estimated": (
        ("k1", "k1", "k1", "-mean D"),
        ("k2", "k2", "k2", "mean D² / 2"),
        ("k3", "k3", "k3", "mean (rho - D - 1)"),
    ),
    "Importance ratios": (
        ("tme", "TME", "TME", "token-multiplicative error: mean exp |D|"),
        ("tme_sequence_max", "TME, worst sequence", "worst TME", "the largest TME of a sequence"),
        ("mean_ratio", "mean rho", "mean rho", "mean rho: the bias of importance sampling"),
        ("ess", "ESS", "ESS", "effective sample size as a share: 1 / mean (rho / mean rho)²"),
        ("chi2_token", "χ² token", "chi2 token", "mean rho² - 1"),
        ("chi2_sequence", "χ² sequence", "chi2 seq", "verl: mean over sequences of (product of rho)² - 1"),
        ("chi2_sequence_geometric", "χ² sequence, geometric", "chi2 geo", "ms-swift: the same with geometric means"),
    ),
    "Perplexity of the sequences": (
        ("log_ppl_a", "log ppl A", "log ppl A", "mean over sequences of -mean a"),
        ("log_ppl_b", "log ppl B", "log ppl B", "mean over sequences of -mean b"),
        ("ppl_a", "ppl A", "ppl A", "mean over sequences of exp(-mean a)"),
        ("ppl_b", "ppl B", "ppl B", "mean over sequences of exp(-mean b)"),
        ("log_ppl_diff", "Δ log ppl", "diff", "mean over sequences of mean a - mean b"),
        ("log_ppl_abs_diff", "|Δ log ppl|", "|diff|", "its absolute value, mean over sequences"),
        ("log_ppl_diff_min", "Δ log ppl, least", "least", "the least of a sequence"),
        ("log_ppl_diff_max", "Δ log ppl, most", "most", "the largest of a sequence"),
        ("ppl_ratio", "ppl B / ppl A", "ppl B/A", "mean over sequences of exp(mean a - mean b)"),
    ),
}

QUANTILES = (("p50", "median"), ("p90", "90 %"), ("p99", "99 %"), ("p999", "99.9 %"), ("max", "max"))
QUANTITIES = {"abs_logprob_diff": ("|Δ log-prob|", "|dlogp|"), "prob_diff": ("|Δ prob|", "|dp|")}
"""Quantity -> its name on the page, its short name for a terminal."""

#: What a correction does to what lies outside its bounds.
CORRECTIONS = {"clamp": "clamped", "mask": "masked", "veto": "vetoed"}

#: Figures of the PPO update: key in ``ppo.scalars``, name, formula; the figure with recomputed old log-probs is beside
#: each that has one (KEY_recomputed). r is exp(new - old), A the advantage.
UPDATE: tuple[tuple[str, str, str], ...] = (
    ("policy_loss", "policy loss", "policy clip loss + KL coefficient x reference KL"),
    ("policy_clip_loss", "policy clip loss", "mean max(-A r, -A clip(r, 1 - eps, 1 + eps))"),
    ("policy_loss_mismatch", "policy loss, from the mismatch", "the difference of the two clip losses"),
    ("kl_ref_penalty", "reference KL", "mean (exp(ref - new) - (ref - new) - 1)"),
    ("value_loss", "value loss", "half the mean of the larger squared error, clipped or not"),
    ("loss", "loss", "(policy + value coefficient x value) / accumulation steps; 0 after an early stop"),
    ("approx_kl", "approx KL", "mean (new - old)² / 2"),
    ("ppo_kl_verl", "ppo_kl (verl)", "mean (old - new)"),
    ("clipfrac", "clipped share", "share of |r - 1| > eps"),
    ("clipfrac_verl", "clipped share (verl)", "share where the clipped term wins"),
    ("clipfrac_lower_verl", "clipped share, lower (verl)", "share of A < 0 and r above the dual clip, 3"),
    ("value_clipfrac_verl", "clipped share of values (verl)", "share where the clipped error wins"),
    ("ref_max_abs_diff", "max |actor - reference|", "0 before the first update: both are then one model"),
)

#: Numbers that the PPO section was computed with -> words.
CONFIG = {
    "clip_epsilon": "clip epsilon",
    "kl_coef": "KL coefficient",
    "cliprange_value": "clip range of values",
    "vf_coef": "value coefficient",
    "early_stop_kl": "early stop above KL",
    "accumulation_steps": "accumulation steps",
}

#: |p - q| from which a cell of the grid has the next darker colour.
LEVELS = (0.001, 0.01, 0.03, 0.1, 0.3)


def figure_name(key: str) -> str:
    """Return the name of a figure on the page, the key itself where it has none."""
    return next((name for figures in FIGURES.values() for known, name, _, _ in figures if known == key), key)


#: Columns of the figures by training step: key, name on the page, short name for a terminal.
STEP_FIGURES = (
    ("mean_prob_diff", "mean |Δ prob|", "mean |dp|"),
    ("max_prob_diff", "max |Δ prob|", "max |dp|"),
    ("std_prob_diff", "std |Δ prob|", "std |dp|"),
    ("pearson", "Pearson", "Pearson"),
    ("mean_abs_logprob_diff", "mean |Δ log-prob|", "mean |dlogp|"),
    ("k3", "k3", "k3"),
)


def step_figures(tokens: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return those of STEP_FIGURES that some step has."""
    entries = tokens.get("by_step") or []
    return [figure for figure in STEP_FIGURES if any(entry.get(figure[0]) is not None for entry in entries)]


def figure_groups(tokens: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str, str, str]]]]:
    """Return the groups of FIGURES with the figures that are known."""
    groups = [(title, [f for f in figures if tokens.get(f[0]) is not None]) for title, figures in FIGURES.items()]
    return [(title, figures) for title, figures in groups if figures]


def quantile_rows(tokens: Mapping[str, Any]) -> list[tuple[str, str, list[Any]]]:
    """Return (name, short name, quantiles) of the quantities that are known."""
    known = tokens.get("quantiles") or {}
    return [
        (*names, [known[key].get(quantile) for quantile, _ in QUANTILES])
        for key, names in QUANTITIES.items()
        if known.get(key) and known[key].get("max") is not None
    ]


def probability_bins(tokens: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return (range of the rollout's probability in words, entry) of the bins that hold tokens."""
    return [(_range(entry), entry) for entry in tokens.get("by_probability") or [] if entry["count"]]


def _range(entry: Mapping[str, Any]) -> str:
    low, high = entry["low"], entry["high"]
    if not low:
        return f"below {high:g}"
    return f"{low:g} and more" if high >= 1 else f"{low:g} to {high:g}"


def share(value: Any) -> str:
    """Return a share (0 to 1) in percent, a dash for None."""
    return "-" if value is None else f"{number(100.0 * value)} %"


def correction_words(entry: Mapping[str, Any]) -> str:
    """Return what a correction would do to this batch: ``TIS, token: 1.2 % of the tokens clamped``."""
    what = "tokens" if entry["level"] == "token" and entry["kind"] != "veto" else "sequences"
    value = entry["share"] if what == "tokens" else entry["sequences_share"]
    return f"{share(value)} of the {what} {CORRECTIONS.get(entry['kind'], entry['kind'])}"


def place_words(entry: Mapping[str, Any]) -> str:
    """Return the places of an entry of ``by_position``: one, or from first to last."""
    first, last = entry["position"], entry.get("last", entry["position"])
    return str(first) if first == last else f"{first} to {last}"


def counts_words(counts: Mapping[str, Any]) -> str:
    """Return what a batch holds in one line."""
    steps = f" of {counts['steps']} steps" if counts.get("steps", 1) > 1 else ""
    parts = [
        f"{counts['compared']:,} of {_many(counts['tokens'], 'response token')} compared in "
        f"{_many(counts['sequences'], 'sequence')}{steps}"
    ]
    if counts.get("empty_sequences"):
        parts.append(f"{_many(counts['empty_sequences'], 'sequence')} without a token")
    if counts.get("masked_out"):
        parts.append(f"{_many(counts['masked_out'], 'place')} masked out")
    return "; ".join(parts)


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def origin_words(origin: Mapping[str, Any]) -> str:
    """Return what one side's log-probs are: the column, of which kind of source, of which distribution."""
    meaning, drawn = origin.get("meaning"), origin.get("sampled_at")
    if not meaning and drawn:
        sampled = f"temperature {number(drawn['temperature'])}, top-p {number(drawn['top_p'])}"
        return f"sampled at {sampled}; raw or processed is not declared"
    if not meaning:
        return "distribution not declared"
    if meaning["temperature"] == 1 and meaning["top_p"] == 1:
        return "of the model's own distribution"
    return f"at temperature {number(meaning['temperature'])}, top-p {number(meaning['top_p'])}"


def update_rows(ppo: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return (figure, value, value with recomputed old log-probs, formula) of the known figures of the update."""
    scalars = ppo.get("scalars") or {}
    return [
        (name, number(scalars[key], 4), _again(scalars, key), formula)
        for key, name, formula in UPDATE
        if scalars.get(key) is not None
    ]


def _again(scalars: Mapping[str, Any], key: str) -> str:
    value = scalars.get(f"{key}_recomputed")
    return "" if value is None else number(value, 4)


def split_words(ppo: Mapping[str, Any]) -> list[str]:
    """Return in sentences how much of the update the mismatch makes, and what the ratio alone clips."""
    gradient, clipped = ppo.get("gradient") or {}, ppo.get("clipped") or {}
    sentences = []
    if gradient.get("share") is not None:
        sentences.append(
            f"{share(gradient['share'])} of the gradient weight of the policy loss comes from the mismatch: per token "
            f"it is {number(gradient['weight_recomputed'])} with recomputed log-probs, the mismatch adds "
            f"{number(gradient['gained'])} and takes {number(gradient['lost'])}."
        )
    if gradient.get("half") is not None:
        sentences.append(
            f"{counted(gradient['half'], 'token')} of the {gradient['tokens']} that it changes make half of the change."
        )
    if clipped.get("tokens"):
        sides = ", ".join(f"{share(clipped[f'share_{side}'])} {side}" for side in ("above", "below"))
        sentences.append(
            "Before any update the ratio actor / rollout is outside the clip range on "
            f"{share(clipped['share_tokens'])} of the tokens ({sides}), in {share(clipped['share_sequences'])} of the "
            "sequences."
        )
    elif clipped:
        sentences.append("Before any update no ratio actor / rollout is outside the clip range.")
    if clipped.get("share_gradient"):
        sentences.append(f"That stops {share(clipped['share_gradient'])} of the advantage weight from any gradient.")
    return sentences


def config_words(config: Mapping[str, Any]) -> str:
    """Return the numbers that the update was computed with."""
    return "Computed with " + ", ".join(f"{CONFIG.get(key, key)} {number(value)}" for key, value in config.items())


def level(value: float) -> int:
    """Return how dark a cell of the grid is, from 0 to 5."""
    return sum(value >= bound for bound in LEVELS)


def grid_cell(value: float | None) -> str:
    """Return a cell of the grid in at most six characters; a dash outside the mask."""
    if value is None:
        return "-"
    return "0" if value == 0 else "<1e-4" if value < 1e-4 else f"{value:.4f}"
