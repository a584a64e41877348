"""The report of ``probe tokens`` as tokens.html: one self-contained page without a single network request.

``view`` reduces the report to what the page's script shows, as plain data; ``render`` puts it into the template.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from probe.compare.report import charts
from probe.compare.report.findings import SIDES
from probe.compare.report.model import Report, clean_floats, details, number, visible
from probe.compare.report.shared.page import MAX_BYTES, MAX_NAME, render_page, short, strips
from probe.compare.report.shared.words import origin_words
from probe.compare.report.tokens import markdown

#: Columns of the table of sequences: key in an entry of ``tokens.sequences``, heading, what it means.
COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("sequence", "sequence", "label of the sequence"),
    ("step", "step", "training step"),
    ("compared", "tokens", "response tokens compared"),
    ("mean_abs", "mean |Δ log-prob|", "mean absolute difference of the log-probs, nats"),
    ("max_abs", "max", "largest absolute difference of the log-probs, nats"),
    ("mean_prob_diff", "mean |Δ prob|", "mean absolute difference of the probabilities"),
    ("max_prob_diff", "max |Δ prob|", "largest absolute difference of the probabilities"),
    ("log_ppl_a", "log ppl A", "minus the mean log-prob of A"),
    ("log_ppl_b", "log ppl B", "minus the mean log-prob of B"),
    ("ratio", "ratio", "product of the importance ratios of its tokens"),
    ("ratio_geometric", "ratio, geometric", "geometric mean of the importance ratios"),
    ("tme", "TME", "token-multiplicative error: mean exp |D|"),
    ("k3", "k3", "mean (rho - D - 1)"),
)
WORDS = ("sequence",)
"""Columns of words: left-aligned, and sorted from the first on."""


@dataclass(frozen=True)
class Caps:
    """How much a page may hold: rows of the table of sequences, strips, and tokens of a strip."""

    sequences: int = 500
    strips: int = 64
    tokens: int = 512

    def smaller(self) -> Caps:
        """Return the next smaller caps: strips give way first, and with them the sequences."""
        return Caps(self.sequences if self.tokens > 64 else self.sequences // 2, self.strips // 2, self.tokens // 2)


def render(report: Report) -> str:
    """Return the page as text; if it is larger than MAX_BYTES, again with less in it, and the page says so."""
    caps = Caps()
    page = _page(report, caps)
    while len(page.encode("utf-8", "replace")) > MAX_BYTES and caps.tokens > 8:
        caps = caps.smaller()
        page = _page(report, caps)
    return page


def view(report: Report, caps: Caps | None = None) -> dict[str, Any]:
    """Return the data embedded in the page: table of sequences, token strips, and what was left out, strict JSON."""
    caps = caps or Caps()
    tokens = report["tokens"]
    entries = tokens.get("sequences") or []
    kept = sorted(entries, key=_size, reverse=True)[: caps.sequences]
    # Without log-probs and ids a strip would be a row of blanks: the grid and the table say what is known.
    spelled = {**tokens, "sequences": [entry for entry in entries if entry["strip"] and _has_logprobs(tokens)]}
    shown, without = strips(spelled, caps.strips, caps.tokens)
    columns = [key for key, _, _ in COLUMNS if any(entry.get(key) is not None for entry in kept)]
    data = {
        "schema": report["schema"],
        "kind": report["kind"],
        "verdict": report["verdict"],
        "text": bool(tokens.get("text")),
        "words": WORDS,
        "heat": None,
        "sequences": {"columns": columns, "rows": [[_cell(entry, key) for key in columns] for entry in kept]},
        "strips": shown,
        "left_out": {
            "table": len(entries) - len(kept) + (tokens.get("sequences_left_out") or 0),
            "sequences": without + (tokens.get("strip_truncated") or 0),
            "tokens": sum(strip["left_out"] for strip in shown),
        },
    }
    return dict(clean_floats(data))


def _has_logprobs(tokens: Mapping[str, Any]) -> bool:
    return tokens.get("mean_abs_logprob_diff") is not None


def _size(entry: Mapping[str, Any]) -> float:
    return float(entry["mean_prob_diff" if entry.get("mean_abs") is None else "mean_abs"] or 0.0)


def _cell(entry: Mapping[str, Any], key: str) -> Any:
    value = entry.get(key)
    return visible(value, MAX_NAME) if isinstance(value, str) else short(value, 6)


def _page(report: Report, caps: Caps) -> str:
    tokens = report["tokens"]
    data = view(report, caps)
    positions = tokens.get("by_position") or []
    figures = {
        "position-curve": charts.position_curve(positions),
        "step-curve": charts.step_curve(tokens.get("by_step") or []),
    }
    context = {
        "report": report,
        "tokens": tokens,
        "worst": [token for token in tokens.get("worst") or [] if token["diff"] or token["prob_diff"]],
        "positions": positions,
        "columns": [column for column in COLUMNS if column[0] in data["sequences"]["columns"]],
        "words": WORDS,
        "title": f"{report['verdict']}: {' and '.join(dict.fromkeys(_name(report, side) for side in 'ab'))}",
        "headline": report["headline"].removeprefix(report["verdict"]),
        "details": details(report),
        "side_words": SIDES,
        "sources": _sources(report),
        "names": {side: _name(report, side) for side in "ab"},
        "issue": markdown.render(report),
    }
    return render_page("tokens/template.html", "tokens/page.js", data, figures, context, {})


def _name(report: Report, side: str) -> str:
    return visible(PurePath(str(report[side]["path"])).name, 80)


def _sources(report: Report) -> list[tuple[str, str, str]]:
    """Return (what, of A, of B) about the two sources."""
    a, b = report["a"], report["b"]
    rows = [(key, number(a[key]), number(b[key])) for key in ("path", "kind", "key")]
    rows.append(("distribution", origin_words(a), origin_words(b)))
    drawn = [origin_words({"meaning": side.get("sampled_at")}) if side.get("sampled_at") else "-" for side in (a, b)]
    return [*rows, ("sampled", drawn[0], drawn[1])]
