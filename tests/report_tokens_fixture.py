"""Reports of ``probe tokens`` for the tests of its forms: made of drawn numbers, deterministic, no file is read."""

from __future__ import annotations

import math
import random
from statistics import fmean
from typing import Any

from report_blocks import by_probability, corrections, group, no_update, quantiles, update
from report_fixture import HOSTILE_TEXTS

Report = dict[str, Any]

PROMPT, SAMPLES, POSITIONS = 4, 8, 10
_WORDS = (
    " the",
    " answer",
    " is",
    " 42",
    ",",
    " because",
    " both",
    " sides",
    ".",
    "\n",
    " 答案",
    " step",
    " remaining",
)


def _token(rng: random.Random, position: int, noise: float) -> dict[str, Any]:
    a = -abs(rng.gauss(0.5, 1.0))
    b = min(0.0, a + rng.gauss(0, noise) * math.exp(rng.gauss(0, 1)))
    gap = abs(math.exp(a) - math.exp(b))
    number = rng.randrange(len(_WORDS))
    return {
        "position": position, "token": 100 + number, "text": _WORDS[number], "logprob_a": a, "logprob_b": b,
        "diff": b - a, "prob_diff": gap, "response": True,
    }  # fmt: skip


def _prompt(position: int) -> dict[str, Any]:
    blank = dict.fromkeys(("logprob_a", "logprob_b", "diff", "prob_diff"))
    return {"position": position, "token": 7 + position, "text": " Q", **blank, "response": False}


def _sequence(name: str, step: int | None, tokens: list[dict[str, Any]]) -> dict[str, Any]:
    own, diffs = group(tokens), [t["diff"] for t in tokens]
    perplexities = {f"log_ppl_{side}": -fmean(t[f"logprob_{side}"] for t in tokens) for side in "ab"}
    return {
        "sequence": name, "step": step, "prompt_len": PROMPT, "length": PROMPT + len(tokens), "compared": len(tokens),
        **{key: own[key] for key in ("mean_abs", "max_abs", "mean_prob_diff", "max_prob_diff")}, **perplexities,
        "log_ppl_diff": perplexities["log_ppl_b"] - perplexities["log_ppl_a"], "ratio": math.exp(sum(diffs)),
        "ratio_geometric": math.exp(fmean(diffs)), "tme": fmean(math.exp(abs(d)) for d in diffs),
        "k3": fmean(math.exp(d) - d - 1 for d in diffs),
        "strip": [*map(_prompt, range(PROMPT)), *tokens],
    }  # fmt: skip


def _metrics(tokens: list[dict[str, Any]]) -> dict[str, float]:
    diffs, own = [t["diff"] for t in tokens], group(tokens)
    rho = [math.exp(d) for d in diffs]
    return {
        "mean_abs_logprob_diff": own["mean_abs"], "max_abs_logprob_diff": own["max_abs"],
        "mean_prob_diff": own["mean_prob_diff"], "max_prob_diff": own["max_prob_diff"], "std_prob_diff": 0.004,
        "pearson": 0.9993, "k1": -fmean(diffs), "k2": fmean(d * d for d in diffs) / 2,
        "k3": fmean(r - d - 1 for r, d in zip(rho, diffs)), "tme": fmean(math.exp(abs(d)) for d in diffs),
        "mean_ratio": fmean(rho), "ess": 0.98, "chi2_token": fmean(r * r for r in rho) - 1, "log_ppl_a": 0.71,
        "log_ppl_b": 0.72, "ppl_a": 2.1, "ppl_b": 2.11, "log_ppl_diff": -0.01, "log_ppl_abs_diff": 0.012,
        "log_ppl_diff_min": -0.05,
        "log_ppl_diff_max": 0.03, "ppl_ratio": 1.01, "chi2_sequence": 0.8, "chi2_sequence_geometric": 0.002,
        "tme_sequence_max": 1.2,
    }  # fmt: skip


def _section(sequences: list[dict[str, Any]], noise: float) -> dict[str, Any]:
    tokens = [token for sequence in sequences for token in sequence["strip"] if token["response"]]
    placed = [(s["sequence"], t) for s in sequences for t in s["strip"] if t["response"]]
    total = sum(abs(t["diff"]) for t in tokens)
    positions: dict[int, list[dict[str, Any]]] = {}
    ids: dict[int, list[dict[str, Any]]] = {}
    for token in tokens:
        positions.setdefault(token["position"] - PROMPT, []).append(token)
        ids.setdefault(token["token"], []).append(token)
    steps = sorted({s["step"] or 0 for s in sequences})
    return {
        "compared": len(tokens), "lone": {"a": 0, "b": 0}, "source_a": "rollout_log_probs", "source_b": "old_log_probs",
        **_metrics(tokens), "text": True, "not_finite": [],
        "quantiles": {"abs_logprob_diff": quantiles([abs(t["diff"]) for t in tokens]),
                      "prob_diff": quantiles([t["prob_diff"] for t in tokens])},
        "by_position": [{"position": p, "last": p, **group(mine)} for p, mine in sorted(positions.items())],
        "by_probability": by_probability(tokens),
        "by_token": [
            {"token": number, "text": mine[0]["text"], **group(mine), "sum_abs": sum(abs(t["diff"]) for t in mine),
             "share": sum(abs(t["diff"]) for t in mine) / total} for number, mine in sorted(ids.items())
        ],
        "by_step": [
            {"step": step, "sequences": len(mine), "compared": sum(s["compared"] for s in mine),
             "mean_abs_logprob_diff": fmean(s["mean_abs"] for s in mine), "pearson": 0.9993, "k3": 1e-4,
             "max_prob_diff": max(s["max_prob_diff"] for s in mine), "std_prob_diff": 0.004,
             "mean_prob_diff": fmean(s["mean_prob_diff"] for s in mine)}
            for step in steps for mine in [[s for s in sequences if s["step"] == step]]
        ] if len(steps) > 1 else [],
        "corrections": corrections(noise),
        "grid": {"labels": [s["sequence"] for s in sequences[:SAMPLES]], "positions": list(range(POSITIONS)),
                 "values": [[None if row == 1 and at in (3, 4) else s["strip"][PROMPT + at]["prob_diff"]
                             for at in range(POSITIONS)] for row, s in enumerate(sequences[:SAMPLES])]},
        "worst": [
            {"sequence": name, **{key: value for key, value in token.items() if key != "response"},
             "context": " we add both sides", "after": " and see"}
            for name, token in sorted(placed, key=lambda pair: -abs(pair[1]["diff"]))[:20]
        ],
        "sequences": sequences, "sequences_left_out": 0, "strip_truncated": 0,
        "left_out": {"token_ids": 0, "steps": 0, "positions_per_bin": 1},
    }  # fmt: skip


def _origin(key: str) -> dict[str, Any]:
    meaning = {"temperature": 1.0, "top_p": 1.0} if key == "rollout_log_probs" else None
    return {"path": "runs/batch.npz", "kind": "npz", "key": key, "meaning": meaning, "sampled_at": meaning}


def make_sequences(
    noise: float = 0.01, sequences: int = 12, length: int = 40, steps: int = 1, seed: int = 5
) -> list[dict[str, Any]]:
    """Return the entries of ``sequences`` with their strips."""
    rng = random.Random(seed)
    return [
        _sequence(f"p{i // 2}.s{i % 2}" if steps == 1 else f"step {step} s{i}", step if steps > 1 else None,
                  [_token(rng, PROMPT + at, noise) for at in range(length)])
        for step in range(steps) for i in range(sequences)
    ]  # fmt: skip


def make(*, noise: float = 0.01, sequences: int = 12, length: int = 40, steps: int = 1, seed: int = 5) -> Report:
    """Build a report of ``sequences`` per step with ``length`` response tokens, differing by about ``noise``."""
    entries = make_sequences(noise, sequences, length, steps, seed)
    section = _section(entries, noise)
    high = section["mean_abs_logprob_diff"] > 0.03
    verdict = "suspect" if high else "consistent"
    headline = f"{verdict} on {section['compared']} tokens of {len(entries)} sequences"
    figures = [
        ("mean_abs_logprob_diff", "at most 0.03", "CI limits of Miles and slime", not high),
        ("k3", "at most 0.001", "NeMo-RL", section["k3"] <= 1e-3),
        ("pearson", "at least 0.97", "0.9996 between two prefills", True),
    ]
    return {
        "schema": 1, "kind": "tokens", "probe": "0.1.0", "created": "2026-03-04T05:06:07+00:00",
        "a": _origin("rollout_log_probs"), "b": _origin("old_log_probs"), "verdict": verdict, "headline": headline,
        "summary": f"{headline[0].upper()}{headline[1:]}. What differs is noise of bfloat16.",
        "not_compared": ["2 tokens have no log-prob on one side."], "notes": ["Rows are joined by uid."],
        "findings": [],
        "counts": {"sequences": len(entries), "empty_sequences": 0, "tokens": section["compared"],
                   "compared": section["compared"], "masked_out": 17, "width": length, "steps": steps,
                   "not_finite": []},
        "figures": [{"name": n, "value": section[n], "healthy": words, "source": source, "ok": ok}
                    for n, words, source, ok in figures],
        "tokens": section, "ppo": update(entries), "next_commands": ["probe tokens runs/batch.npz --report html"],
    }  # fmt: skip


def consistent() -> Report:
    """A healthy batch of one step."""
    return make()


def suspect() -> Report:
    """A batch whose log-probs are of another temperature."""
    report = make(noise=0.2)
    report["findings"] = [
        {"cause": "temperature-semantics", "subject": "log-probs", "side": "a", "figures": {"temperature": 0.7},
         "text": "log-probs of a are of temperature 0.7, those of b of 1"}
    ]  # fmt: skip
    report["headline"] = report["headline"].replace("suspect", "divergent")
    return {**report, "verdict": "divergent"}


def steps() -> Report:
    """Five steps of one run."""
    return make(noise=0.03, sequences=6, steps=5)


def monitor() -> Report:
    """The files of a monitor: only differences of probabilities are known."""
    report = steps()
    tokens = report["tokens"]
    known = ("mean_prob_diff", "max_prob_diff", "std_prob_diff")
    tokens |= {key: None for key in _metrics([_token(random.Random(1), 0, 0.1)]) if key not in known}
    tokens |= {"by_probability": [], "by_token": [], "corrections": [], "text": False, "source_a": "", "source_b": ""}
    tokens["quantiles"]["abs_logprob_diff"] = None
    unknown = (
        "mean_abs",
        "max_abs",
        "log_ppl_a",
        "log_ppl_b",
        "log_ppl_diff",
        "ratio",
        "ratio_geometric",
        "tme",
        "k3",
        "diff",
        "logprob_a",
        "logprob_b",
    )
    unknown += ("token", "text", "context", "after", "mean_abs_logprob_diff", "pearson")
    for entry in (*tokens["by_position"], *tokens["sequences"], *tokens["worst"], *tokens["by_step"]):
        entry |= {key: None for key in unknown if key in entry}
        entry |= {"strip": [], "prompt_len": 0} if "strip" in entry else {}
    report |= {"figures": [], "ppo": no_update()}
    for side in "ab":
        report[side] = {**report[side], "path": "runs/diffs", "kind": "monitor", "key": "prob_diff", "meaning": None}
    return report


def incomparable() -> Report:
    """Files of which nothing could be compared."""
    report = make(sequences=1)
    tokens = {key: [] if isinstance(value, list) else None for key, value in report["tokens"].items()}
    tokens |= {"compared": 0, "text": False, "grid": {"labels": [], "positions": [], "values": []}, "left_out": {}}
    headline = "incomparable: every token is masked out"
    report |= {
        "verdict": "incomparable",
        "headline": headline,
        "summary": headline.capitalize() + ".",
        "tokens": tokens,
    }
    return report | {"figures": [], "not_compared": [], "next_commands": [], "ppo": no_update(), "notes": []}


def hostile() -> Report:
    """A report whose names and texts try to escape from every form."""
    report = suspect()
    bad = HOSTILE_TEXTS[0]
    report |= {"summary": report["summary"] + bad, "notes": [bad], "next_commands": [f"probe tokens '{bad}'"]}
    report["a"]["path"] = report["findings"][0]["text"] = report["findings"][0]["subject"] = bad
    tokens = report["tokens"]
    tokens["grid"]["labels"][0] = tokens["sequences"][0]["sequence"] = bad
    tokens["corrections"][0]["bound"] = bad
    for entries in (tokens["worst"], tokens["by_token"], tokens["sequences"][0]["strip"][PROMPT:]):
        for entry, text in zip(entries, HOSTILE_TEXTS):
            entry.update(text=text)
            entry.update({key: text * 2 for key in ("context", "after") if key in entry})
    tokens["not_finite"] = report["counts"]["not_finite"] = [
        {"side": "b", "kind": "nan", "count": 3, "sequence": bad, "position": 2}
    ]
    return report


def large() -> Report:
    """As many sequences, positions and tokens as a section keeps."""
    report = make(noise=0.05, sequences=500, length=40)
    report["tokens"] |= {"sequences_left_out": 24_500, "strip_truncated": 24_000}
    report["tokens"]["left_out"] |= {"token_ids": 130_000, "positions_per_bin": 4}
    report["counts"] |= {"sequences": 25_000, "tokens": 1_000_000, "compared": 1_000_000}
    return report
