"""The report as report.md: a short form to paste into an upstream issue.

Token text and the folders of local paths are left out, because an issue is public.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import Any

from probe.compare.report.model import (
    Report,
    details,
    differing_environment,
    focus,
    label,
    number,
    routing_words,
    row_reasons,
    verdict_counts,
    visible,
)

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~$@!&])")
_SIDE_ROWS = (
    ("engine", "engine"),
    ("version", "engine_version"),
    ("stage", "stage"),
    ("model", "model"),
    ("dtype", "dtype"),
    ("device", "device"),
    ("sequences", "sequences"),
    ("prompt tokens", "prompt_tokens"),
    ("response tokens", "response_tokens"),
)
_FIGURES = ("rel_l2", "floor", "ratio", "max_abs")


def render(report: Report) -> str:
    """Return GitHub-flavoured Markdown: verdict, both sides, gates, first divergent modules, tokens, commands."""
    a, b = report["a"], report["b"]
    title = f"### probe compare, {_plain(a.get('engine'))} vs {_plain(b.get('engine'))}: {_plain(report['headline'])}"
    blocks = [title, _plain(details(report)), _first(report)]
    blocks += [_bullets("Not compared", report["not_compared"]), _sides(report), _gates(report), _modules(report)]
    blocks += [
        _experts(report),
        _rows(report),
        _tokens(report["tokens"]),
        _environment(report),
        _commands(report["next_commands"]),
    ]
    return "\n\n".join([block for block in blocks if block] + [f"<sub>probe {_plain(report['probe'])}</sub>"]) + "\n"


def _plain(value: Any) -> str:
    """Return text that Markdown shows as it is, on one line."""
    return _SPECIAL.sub(r"\\\1", visible(number(value) if not isinstance(value, str) else value))


def _code(value: Any) -> str:
    """Return an inline code span whatever backticks the text holds; a pipe is escaped for tables."""
    text = visible(value).replace("|", r"\|")
    fence = "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    return f"{fence} {text} {fence}" if "`" in text else f"`{text}`"


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]], right: int = 0) -> str:
    """Return a table whose last ``right`` columns are right-aligned."""
    rule = ["---"] * (len(headers) - right) + ["--:"] * right
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (headers, rule, *rows))


def _bullets(title: str, items: Sequence[str]) -> str:
    return f"**{title}**\n\n" + "\n".join(f"- {_plain(item)}" for item in items) if items else ""


def _first(report: Report) -> str:
    first = report["first_divergence"]
    if not first:
        return ""
    place = f", position {first.get('position')} of {_code(first['sequence'])}" if first.get("sequence") else ""
    return f"**First divergence:** {_code(label(first))}{place}"


def _sides(report: Report) -> str:
    rows = []
    for title, key in _SIDE_ROWS:
        values = [report[side].get(key) for side in ("a", "b")]
        shown = [PurePath(str(value)).name if key == "model" else value for value in values]
        rows.append((title, *(_plain(value) for value in shown)))
    return _table(("", "A", "B"), rows)


def _gates(report: Report) -> str:
    rows = [(_plain(gate["name"]), gate["status"], _plain(gate["detail"])) for gate in report["gates"]]
    return _table(("gate", "status", "detail"), rows) if rows else ""


def _modules(report: Report) -> str:
    if not report["layers"]:
        return ""
    counts = ", ".join(f"{count} {word}" for word, count in verdict_counts(report["layers"]).items())
    rows = [
        (_code(label(layer)), layer["verdict"], *(number(layer.get(key)) for key in _FIGURES))
        for layer in focus(report, limit=12)
    ]
    if not rows:
        return f"Modules: {counts}"
    table = _table(("module", "verdict", "relL2", "noise floor", "ratio", "max abs"), rows, right=len(_FIGURES))
    return f"Modules: {counts}\n\n{table}"


def _experts(report: Report) -> str:
    return f"Experts: {_plain(routing_words(report['moe']))}" if report["moe"] else ""


def _rows(report: Report) -> str:
    reasons = row_reasons(report)
    if not reasons:
        return ""
    table = _table(
        ("of", "not joined because", "rows"), [(s.upper(), _plain(w), str(n)) for s, w, n in reasons], right=1
    )
    return f"Rows: {report['coverage']['rows']['joined']} joined\n\n{table}"


def _tokens(tokens: dict[str, Any]) -> str:
    if not tokens.get("compared"):
        return ""
    keys = ("mean_abs_logprob_diff", "max_abs_logprob_diff", "pearson", "k3")
    figures = ", ".join(f"{key.replace('_', ' ')} {number(tokens.get(key), 4)}" for key in keys)
    return f"Log-probs of {tokens['compared']} response tokens: {figures}"


def _environment(report: Report) -> str:
    rows = [(_code(entry["key"]), _plain(entry["a"]), _plain(entry["b"])) for entry in differing_environment(report)]
    if not rows:
        return ""
    return "<details><summary>Environment differences</summary>\n\n" + _table(("", "A", "B"), rows) + "\n\n</details>"


def _commands(commands: Sequence[str]) -> str:
    if not commands:
        return ""
    lines = [visible(command) for command in commands]
    fence = "`" * max(3, *(len(run) + 1 for line in lines for run in re.findall("`+", line) or [""]))
    return "\n".join(["**Next**", "", f"{fence}sh", *lines, fence])
