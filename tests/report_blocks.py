"""Blocks of a report that both fixtures have: what differences do by probability, to corrections, to the PPO update."""

from __future__ import annotations

import itertools
import math
from statistics import fmean
from typing import Any

_TOKEN = ("position", "token", "text", "logprob_a", "logprob_b", "diff")
_BINS = (0.0, 1e-4, 1e-3, 0.01, 0.1, 0.5, 0.9, 0.99, 1.0)


def group(tokens: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of a group of tokens."""
    gaps, probs = [abs(t["diff"]) for t in tokens], [_prob_diff(t) for t in tokens]
    return {
        "count": len(tokens), "mean_abs": fmean(gaps), "max_abs": max(gaps),
        "mean_prob_diff": fmean(probs), "max_prob_diff": max(probs),
    }  # fmt: skip


def _prob_diff(token: dict[str, Any]) -> float:
    return abs(math.exp(token["logprob_a"]) - math.exp(token["logprob_b"]))


def by_probability(tokens: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one entry per range of the rollout's probability."""
    total = sum(abs(t["diff"]) for t in tokens)
    blank = {"count": 0, "share": 0.0, **dict.fromkeys(("mean_abs", "max_abs", "mean_prob_diff", "max_prob_diff"))}
    entries = []
    for low, high in itertools.pairwise(_BINS):
        mine = [t for t in tokens if low <= min(math.exp(t["logprob_a"]), 0.999) < high]
        known = {**group(mine), "share": sum(abs(t["diff"]) for t in mine) / total} if mine else {}
        entries.append({"low": low, "high": high, **blank, **known})
    return entries


def quantiles(values: list[float]) -> dict[str, float]:
    """Return the quantiles of a quantity."""
    ordered = sorted(values)
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999, "max": 1.0}
    return {name: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for name, share in shares.items()}


def corrections(noise: float) -> list[dict[str, Any]]:
    """Return what corrections would touch; the shares follow ``noise``."""
    rows = (
        ("TIS, token", "token", "clamp", None, 2.0, "rho above 2", "verl, rollout_is_threshold"),
        ("TIS, sequence", "sequence", "clamp", None, 10.0, "product of rho above 10", "verl, rollout_is_threshold"),
        ("IcePop", "token", "mask", 0.5, 5.0, "rho outside 0.5 to 5", "IcePop, Ring-1T"),
        ("veto", "sequence", "veto", 1e-4, None, "any rho below 0.0001", "verl, rollout_token_veto_threshold"),
    )
    return [
        {"name": name, "level": level, "kind": kind, "low": low, "high": high, "bound": bound, "share": noise / 10,
         "sequences_share": noise / 2, "source": source}
        for name, level, kind, low, high, bound, source in rows
    ]  # fmt: skip


def update(sequences: list[dict[str, Any]], epsilon: float = 0.2) -> dict[str, Any]:
    """Return a section on the PPO update whose advantages are 1 in every other sequence and -1 in the rest."""
    placed = [
        (s["sequence"], 1.0 if at % 2 else -1.0, t)
        for at, s in enumerate(sequences)
        for t in s["strip"]
        if t["response"]
    ]
    outside = [t for _, _, t in placed if abs(math.exp(t["diff"]) - 1) > epsilon]
    above = sum(t["diff"] > 0 for t in outside) / len(placed)
    change = sum(abs(math.exp(t["diff"]) - 1) for _, _, t in placed)
    worst = sorted(placed, key=lambda entry: -abs(math.exp(entry[2]["diff"]) - 1))[:20]
    whole = change / len(placed)
    return {
        "config": {"clip_epsilon": epsilon, "kl_coef": 0.02, "cliprange_value": 0.2, "vf_coef": 0.5,
                   "early_stop_kl": 0.25, "accumulation_steps": 1},
        "scalars": {
            "approx_kl": fmean(t["diff"] ** 2 / 2 for _, _, t in placed), "approx_kl_recomputed": 0.0,
            "ppo_kl_verl": -fmean(t["diff"] for _, _, t in placed), "clipfrac": len(outside) / len(placed),
            "clipfrac_recomputed": 0.0, "clipfrac_verl": above, "clipfrac_verl_recomputed": 0.0,
            "clipfrac_lower_verl": 0.0, "policy_clip_loss": 0.0123, "kl_ref_penalty": None, "policy_loss": 0.0123,
            "policy_loss_recomputed": 0.0101, "policy_loss_mismatch": 0.0022, "value_loss": None,
            "value_clipfrac_verl": None, "loss": 0.0123, "early_stop": False, "early_stop_recomputed": False,
            "ref_max_abs_diff": None, "overflows": 0,
        },
        "gradient": {"weight_total": 1.0 + whole / 3, "weight_recomputed": 1.0, "weight_mismatch": whole,
                     "gained": 2 * whole / 3, "lost": whole / 3, "share": whole / (1 + whole), "tokens": len(placed),
                     "half": len(placed) // 6, "carriers_share": 0.4},
        "clipped": {"tokens": len(outside), "share_tokens": len(outside) / len(placed), "share_above": above,
                    "share_below": len(outside) / len(placed) - above, "sequences": 3, "share_sequences": 0.25,
                    "share_gradient": 0.01},
        "carriers": [
            {"sequence": name, **{key: token[key] for key in _TOKEN}, "prob_diff": _prob_diff(token),
             "context": " we add both sides", "after": " and see",
             "ratio": math.exp(token["diff"]), "advantage": advantage, "slope": -advantage * math.exp(token["diff"]),
             "slope_recomputed": -advantage, "clipped": token in outside,
             "share": abs(math.exp(token["diff"]) - 1) / change}
            for name, advantage, token in worst
        ],
        "given": ["advantages"],
        "detail": "Old log-probs are the rollout's (a), recomputed ones the actor's (b). New log-probs were not given "
                  "and are the actor's: no update has happened yet.",
    }  # fmt: skip


def no_update() -> dict[str, Any]:
    """Return the section on an update of which nothing is known."""
    token = {"position": 0, "token": 1, "text": None, "logprob_a": -1.0, "logprob_b": -0.9, "diff": 0.1}
    section = update([{"sequence": "s0", "strip": [{**token, "response": True}]}])
    detail = "No token has a log-prob on both sides: nothing of the update is known."
    return (
        section
        | {"scalars": dict.fromkeys(section["scalars"]), "gradient": None, "clipped": None, "detail": detail}
        | {
            "carriers": [],
            "given": [],
        }
    )
