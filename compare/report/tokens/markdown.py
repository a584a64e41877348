"""The report of ``probe tokens`` as tokens.md: a short form to paste into an upstream issue.

Token text and the folders of local paths are left out, because an issue is public.
"""

from __future__ import annotations

from probe.compare.report.findings import SIDES
from probe.compare.report.model import Report, details, number
from probe.compare.report.shared.markdown import (
    bullets,
    code,
    commands,
    figures,
    plain,
    table,
    update,
    without_folders,
)
from probe.compare.report.shared.words import (
    counts_words,
    origin_words,
    probability_bins,
    share,
)

_SENTENCES = ("a", "b", "summary", "headline", "not_compared", "notes", "findings")
"""Keys whose sentences may name a local path; the commands keep theirs, because they are to be pasted."""


def render(report: Report) -> str:
    """Return GitHub-flavoured Markdown: verdict, findings, sources, figures, by probability, update, commands."""
    paths = {str(report[side]["path"]) for side in "ab"}
    report = {**report, **{key: without_folders(report[key], paths) for key in _SENTENCES}}
    blocks = [f"### probe tokens: {plain(report['headline'])}", plain(details(report)), _findings(report)]
    blocks += [bullets("Not compared", report["not_compared"]), _sources(report), _healthy(report)]
    blocks += [figures(report["tokens"]), _probabilities(report), update(report["ppo"])]
    blocks += [commands(report["next_commands"]), f"<sub>probe {plain(report['probe'])}</sub>"]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _findings(report: Report) -> str:
    found = [
        f"{entry['cause']}{' on ' + SIDES[entry['side']] if SIDES.get(entry['side']) else ''}: {entry['text']}"
        for entry in report["findings"]
    ]
    return bullets("Findings", found)


def _sources(report: Report) -> str:
    rows = [
        (name, *(code(report[side]["path"]), code(report[side]["key"]), plain(origin_words(report[side]))))
        for name, side in (("A, rollout", "a"), ("B, actor", "b"))
    ]
    return f"{table(('', 'source', 'log-probs', 'distribution'), rows)}\n\n{plain(counts_words(report['counts']))}"


def _healthy(report: Report) -> str:
    rows = [
        (plain(f["name"]), number(f["value"]), "yes" if f["ok"] else "**no**", plain(f["healthy"]), plain(f["source"]))
        for f in report["figures"]
    ]
    return table(("figure", "value", "in range", "healthy", "source"), rows) if rows else ""


def _probabilities(report: Report) -> str:
    rows = [
        (words, str(entry["count"]), *(number(entry[key]) for key in ("mean_abs", "max_abs")), share(entry["share"]))
        for words, entry in probability_bins(report["tokens"])
    ]
    headers = ("probability of the rollout", "tokens", "mean abs diff", "max", "share of the sum")
    return table(headers, rows, right=4) if rows else ""
