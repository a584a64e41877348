"""Put a comparison of tokens into words: the headline, the summary, what was not compared, and what to run next."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from typing import Any

from probe.compare.diagnose.causes import CAUSES
from probe.compare.report.model import counted, headline_sentence, number
from probe.compare.sampling_gate import OTHER_DISTRIBUTION
from probe.compare.tokens.batch import TokenBatch
from probe.compare.tokens.meaning import SOURCES

Report = Mapping[str, Any]

SHOWN = 2
"""Findings and figures that the headline names; the summary names all."""

LOW_PROBABILITY = 0.1
"""Upper edge of the bins (groups.PROBABILITY_EDGES) that the summary calls improbable tokens."""

NOT_FINITE = {
    "nan": "a token that was sampled has a log-prob: look for padding inside the mask, and for logits that overflow",
    "inf": "a token that was sampled has a likelihood above 0: look for a mask over logits that took the token out",
    "+inf": "no likelihood exceeds 1: look for a sum of probabilities that is 0, and for logits that overflow",
}
"""What to check where log-probs are not finite; CAUSES speaks of tensors there."""

UNRELATED = {"pearson": 0.5, "ess": 0.1}
"""Figures below which two sides' tokens do not belong together: 0.13 was measured with wrong inputs, where engines that
compute the same tokens reach 0.97; no mismatch of engines leaves a tenth of the samples."""

CARRIED = 2.0
"""Times their share of the tokens that improbable tokens must carry of the summed difference to be worth a sentence."""

ADVICE = {
    "consistent": "Nothing here needs correcting.",
    "suspect": "Find the reason before training long on these ratios; until then correct them (see the corrections).",
    "divergent": "Repair this before training on these log-probs: importance sampling would only hide it.",
    "incomparable": "Nothing follows from this for training: compare two sides that were computed apart.",
}


def headline(report: Report) -> str:
    """Return the verdict line: the verdict word, what it rests on, and in a few words what was not compared."""
    lone = sum(report["tokens"]["lone"].values())
    gaps = [f"{counted(lone, 'log-prob')} on one side only"] if lone else []
    gaps += ["probability differences only"] if _monitored(report) else []
    return "; ".join([f"{report['verdict']}{_basis(report)}", *gaps])


def _basis(report: Report) -> str:
    compared = report["counts"]["compared"]
    if not compared:
        return ": no token was compared"
    over = f"on {counted(compared, 'token')} of {counted(report['counts']['sequences'], 'sequence')}"
    broken = sum(entry["count"] for entry in report["counts"]["not_finite"])
    reasons = [f"{counted(broken, 'log-prob')} not finite"] if broken else []
    reasons += [cause for cause in dict.fromkeys(f["cause"] for f in report["findings"]) if cause not in NOT_FINITE]
    reasons += [f"{figure['name']} {_value(figure)} ({figure['healthy']})" for figure in _off(report)]
    more = f" and {len(reasons) - SHOWN} more" if len(reasons) > SHOWN else ""
    return f": {', '.join(reasons[:SHOWN])}{more}, {over}" if reasons else f" {over}"


def summary(report: Report) -> str:
    """Return one paragraph: the headline, what differs by how much, what was found, where it sits, and what to do."""
    parts = [headline_sentence(report["headline"]), *_difference(report)]
    parts += [f"{_sentence(finding['text'])} Next: {_check(report, finding)}." for finding in report["findings"]]
    off = [f"{figure['name']} is {_value(figure)} ({figure['healthy']})" for figure in _off(report)]
    parts += [f"Outside the healthy range: {', '.join(off)}."] if off else []
    if report["verdict"] in ("suspect", "divergent"):
        parts += [*_where(report), *([] if _unrelated(report) else _corrected(report))]
    return " ".join([*parts, *_update(report), *_advice(report)])


def _advice(report: Report) -> list[str]:
    if report["verdict"] == "consistent" and _monitored(report):
        return ["Nothing in these files needs correcting; how far improbable tokens' log-probs part they do not say."]
    if report["verdict"] == "suspect" and _unrelated(report):
        return [
            "The tokens of the two sides do not seem to belong together, which no correction mends: check that both "
            "hold the same token ids in the same order, and that neither is shifted."
        ]
    return [ADVICE[report["verdict"]]]


def _unrelated(report: Report) -> bool:
    """Tell whether figures say that the log-probs are of different tokens, while no other distribution was found."""
    low = [figure for figure in _off(report) if figure["value"] < UNRELATED.get(figure["name"], -math.inf)]
    return bool(low) and not any(finding["cause"] in OTHER_DISTRIBUTION for finding in report["findings"])


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def _off(report: Report) -> list[Mapping[str, Any]]:
    return [figure for figure in report["figures"] if not figure["ok"]]


def _value(figure: Mapping[str, Any]) -> str:
    return number(figure["value"]) if math.isfinite(figure["value"]) else "beyond float64"


def _monitored(report: Report) -> bool:
    return bool(report["tokens"]["compared"]) and report["tokens"]["mean_abs_logprob_diff"] is None


def _check(report: Report, finding: Mapping[str, Any]) -> str:
    """Return what to check next for a finding."""
    if finding["cause"] in NOT_FINITE:
        return NOT_FINITE["+inf" if " +inf " in finding["text"] else finding["cause"]]
    known = CAUSES.get(finding["cause"], CAUSES["unknown"])
    a, b = (shlex.quote(report[side]["path"]) for side in "ab")
    return known.check.format(module=finding["subject"], a=a, b=b, show=f"probe show {a}")


def _difference(report: Report) -> list[str]:
    tokens = report["tokens"]
    if not tokens["compared"]:
        return []
    if _monitored(report):
        mean, worst = tokens["mean_prob_diff"], tokens["max_prob_diff"]
        return [f"Probabilities differ by {number(mean)} on average and {number(worst)} at most."]
    mean, worst = tokens["mean_abs_logprob_diff"], tokens["max_abs_logprob_diff"]
    if not worst:
        return ["All log-probs are equal to the last bit."]
    tail = tokens["quantiles"]["abs_logprob_diff"]["p99"]
    likely = tokens["mean_prob_diff"]
    more = f"; probabilities by {number(likely)} on average" if likely is not None and math.isfinite(likely) else ""
    return [
        f"Log-probs differ by {number(mean)} nats on average, by at least {number(tail)} in the worst 1% and by "
        f"{number(worst)} at most{more}."
    ]


def _where(report: Report) -> list[str]:
    """Say which share of the mismatch improbable tokens carry."""
    bins = [entry for entry in report["tokens"]["by_probability"] if entry["high"] <= LOW_PROBABILITY]
    share = sum(entry["share"] or 0.0 for entry in bins)
    count = sum(entry["count"] for entry in bins) / max(1, report["tokens"]["compared"])
    if not share or share < CARRIED * count:
        return []
    return [
        f"Tokens that the rollout gave less than {LOW_PROBABILITY:g} are {count:.1%} of all and carry {share:.1%} of "
        "the summed difference."
    ]


def _corrected(report: Report) -> list[str]:
    """Say what the two common corrections of single tokens would touch, where they touch any."""
    touched = [
        f"{entry['share']:.2%} of the tokens by {entry['name']} ({entry['bound']})"
        for entry in report["tokens"]["corrections"]
        if entry["level"] == "token" and entry["share"]
    ]
    return [f"Corrections would touch {', '.join(touched)}."] if touched else []


def _update(report: Report) -> list[str]:
    """Say what the mismatch does to the update: in full where its inputs were given, else what it clips alone."""
    ppo = report["ppo"]
    if ppo["given"]:
        return [ppo["detail"]]
    clipped = (ppo["clipped"] or {}).get("share_tokens")
    if not clipped:
        return []
    return [
        f"Before any update, PPO's clip at {ppo['config']['clip_epsilon']:g} already meets {clipped:.2%} of the tokens."
    ]


def not_compared(batch: TokenBatch) -> list[str]:
    """Return one sentence per kind of thing that this comparison did not see."""
    sentences = []
    if batch.a is None and len(batch):
        sentences.append(
            "log-probs: the monitor's files hold |p - q| only, so that ratios, KL and the differences of improbable "
            "tokens are unseen"
        )
    for side, count in zip("ab", batch.lone):
        sentences += [f"{counted(count, 'response token')}: only {side} has a log-prob of it"] if count else []
    sentences += [f"{entry.subject}: {entry.kind} ({entry.first})" for entry in batch.not_finite]
    empty = int((batch.valid == 0).sum())
    sentences += [f"{counted(empty, 'sequence')} without a token inside the mask"] if empty else []
    return sentences


def next_commands(report: Report, paths: list[str], words: str) -> list[str]:
    """Return commands to paste, the most useful one first."""
    sources = " ".join(map(shlex.quote, paths))
    again = f"probe tokens {sources} {words}".rstrip()
    dumps = [report[side]["path"] for side in "ab" if report[side]["kind"] == "dump" and report[side]["key"] in SOURCES]
    both = [f"probe compare {' '.join(map(shlex.quote, dumps))}"] if len(set(dumps)) == 2 else []
    if both and len(paths) == 1:  # a job's folder
        step = next((word for word in words.split("--") if word.startswith("step ")), "")
        both = [f"probe compare {sources}{step and f' --{step}'}".rstrip()]
        both += [f"{again} --worst 4 -o seqs.jsonl"] if report["verdict"] != "consistent" else []
    return [*both, f"{again} --report html --force"]
