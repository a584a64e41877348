"""The report as report.md: a short form to paste into an upstream issue.

Token text and the folders of local paths are left out, because an issue is public.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import Any

from probe.compare.report.findings import (
    SIDES,
    action_title,
    against_band,
    explained,
    floor_words,
    located_words,
    no_suspect,
    percent,
    replays_to_read,
)
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
_FIGURES = ("rel_l2", "floor", "ratio", "inherited_error", "own_error", "max_abs")
_MODULE_HEADERS = (
    *("module", "verdict", "which side", "relL2", "noise floor", "ratio", "inherited error", "own error", "max abs"),
)
_SUSPECTS = 5
_SENTENCES = ("summary", "headline", "not_compared", "gates", "suspects", "action", "replay", "environment")
"""Keys whose sentences may name a local path; the commands keep theirs, because they are to be pasted."""


def render(report: Report) -> str:
    """Return GitHub-flavoured Markdown: verdict, suspects, where, both sides, gates, modules, tokens, commands."""
    report = _public(report)
    a, b = report["a"], report["b"]
    title = f"### probe compare, {_plain(a.get('engine'))} vs {_plain(b.get('engine'))}: {_plain(report['headline'])}"
    blocks = [title, _suspects(report), _plain(details(report)), _first(report), _action(report)]
    blocks += [_bullets("Where", located_words(report)), _replay(report)]
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


def _suspects(report: Report) -> str:
    if not report["suspects"]:
        return _plain(no_suspect(report))
    lines = ["**Suspects**", ""]
    for rank, suspect in enumerate(report["suspects"][:_SUSPECTS], 1):
        side = f" on {SIDES[suspect['side']]}" if suspect["side"] in ("a", "b", "both") else ", side unknown"
        head = f"**{_plain(suspect['cause'])}** in {_code(suspect['name'])}{side}"
        lines.append(f"{rank}. {head}, confidence {percent(suspect['confidence'])}")
        lines += [f"   - {_plain(sentence)}" for sentence in suspect["evidence"]]
        lines.append(f"   - next: {_plain(suspect['next_check'])}")
    return "\n".join(lines)


def _public(report: Report) -> Report:
    """Return the report with the folders of the dumps and models cut off wherever its sentences name them."""
    paths = {str(report[side].get(key) or "") for side in ("a", "b") for key in ("path", "model")}
    absolute = sorted((path for path in paths if path.startswith("/")), key=len, reverse=True)

    def cut(value: Any) -> Any:
        if isinstance(value, str):
            for path in absolute:
                value = value.replace(path, PurePath(path).name)
            return value
        if isinstance(value, dict):
            return {key: cut(item) for key, item in value.items()}
        return [cut(item) for item in value] if isinstance(value, list) else value

    return {**report, **{key: cut(report[key]) for key in _SENTENCES}}


def _action(report: Report) -> str:
    action = report["action"]
    rows = [
        (_plain(figure["name"]), number(figure["value"]), _plain(figure["healthy"]), _plain(figure["source"] or ""))
        for figure in action["figures"]
    ]
    sentence = f"**Action:** {action_title(report)}. {_plain(action['text'])}"
    return f"{sentence}\n\n{_table(('figure', 'value', 'healthy', 'source'), rows)}" if rows else sentence


def _replay(report: Report) -> str:
    modules = replays_to_read(report)
    if not modules:
        return ""
    rows = [
        (_code(label(entry)), *(_plain(against_band(entry.get(side))) for side in ("a", "b")), _plain(explained(entry)))
        for entry in modules
    ]
    title = "Replayed in float64 from each side's own stored input; roundings of the output's dtype, of those allowed:"
    return f"{title}\n\n{_table(('module', 'A', 'B', 'explained by'), rows)}"


def _sides(report: Report) -> str:
    rows = []
    for title, key in _SIDE_ROWS:
        values = [report[side].get(key) for side in ("a", "b")]
        shown = [PurePath(str(value)).name if key == "model" else value for value in values]
        rows.append((title, *(_plain(value) for value in shown)))
    kinds = dict.fromkeys(key for side in ("a", "b") for key in report["backends"].get(side) or {})
    for kind in kinds:
        values = [(report["backends"].get(side) or {}).get(kind) for side in ("a", "b")]
        rows.append((f"{_plain(kind)} backend", *(_plain(value) for value in values)))
    return _table(("", "A", "B"), rows)


def _gates(report: Report) -> str:
    rows = [(_plain(gate["name"]), gate["status"], _plain(gate["detail"])) for gate in report["gates"]]
    return _table(("gate", "status", "detail"), rows) if rows else ""


def _modules(report: Report) -> str:
    if not report["layers"]:
        return ""
    counts = ", ".join(f"{count} {word}" for word, count in verdict_counts(report["layers"]).items())
    rows = [
        (
            *(_code(label(layer)), layer["verdict"], SIDES.get(layer["side"], "")),
            *(number(layer.get(key)) for key in _FIGURES),
        )
        for layer in focus(report, limit=12)
    ]
    if not rows:
        return f"Modules: {counts}"
    table = _table(_MODULE_HEADERS, rows, right=len(_FIGURES))
    return f"Modules: {counts}; noise floor {_plain(floor_words(report))}\n\n{table}"


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
