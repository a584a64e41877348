"""The report as report.md: a short form to paste into an upstream issue.

Token text and the folders of local paths are left out, because an issue is public.
"""

from __future__ import annotations

from pathlib import PurePath

from probe.compare.report.findings import (
    SIDES,
    action_title,
    against_band,
    explained,
    first_words,
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
    worst_tokens,
)
from probe.compare.report.shared.markdown import bullets, code, commands, figures, plain, table, update, without_folders

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
_WORST, _WORST_KEYS = 5, ("logprob_a", "logprob_b", "diff")
_SENTENCES = ("summary", "headline", "not_compared", "gates", "suspects", "action", "replay", "environment")
"""Keys whose sentences may name a local path; the commands keep theirs, because they are to be pasted."""


def render(report: Report) -> str:
    """Return GitHub-flavoured Markdown: verdict, suspects, where, both sides, gates, modules, tokens, commands."""
    report = _public(report)
    a, b = report["a"], report["b"]
    title = f"### probe compare, {plain(a.get('engine'))} vs {plain(b.get('engine'))}: {plain(report['headline'])}"
    blocks = [title, _suspects(report), plain(details(report)), _first(report), _action(report)]
    blocks += [bullets("Where", located_words(report)), _replay(report)]
    blocks += [bullets("Not compared", report["not_compared"]), _sides(report), _gates(report), _modules(report)]
    blocks += [
        _experts(report),
        _rows(report),
        figures(report["tokens"]),
        _worst(report),
        update(report["ppo"]),
        _environment(report),
        commands(report["next_commands"]),
    ]
    return "\n\n".join([block for block in blocks if block] + [f"<sub>probe {plain(report['probe'])}</sub>"]) + "\n"


def _worst(report: Report) -> str:
    """Return the worst tokens by their places: ids would tell the text."""
    tokens = [token for token in worst_tokens(report)[:_WORST] if "lies_in" in token]
    rows = [
        (
            code(token["sequence"]),
            plain(first_words(token)),
            *(number(token[key]) for key in ("position", *_WORST_KEYS)),
        )
        for token in tokens
    ]
    headers = ("worst tokens of", "first at", "position", "log-prob A", "log-prob B", "difference")
    return table(headers, rows, right=4) if rows else ""


def _first(report: Report) -> str:
    first = report["first_divergence"]
    if not first:
        return ""
    place = f", position {first.get('position')} of {code(first['sequence'])}" if first.get("sequence") else ""
    return f"**First divergence:** {code(label(first))}{place}"


def _suspects(report: Report) -> str:
    if not report["suspects"]:
        return plain(no_suspect(report))
    lines = ["**Suspects**", ""]
    for rank, suspect in enumerate(report["suspects"][:_SUSPECTS], 1):
        side = f" on {SIDES[suspect['side']]}" if suspect["side"] in ("a", "b", "both") else ", side unknown"
        head = f"**{plain(suspect['cause'])}** in {code(suspect['name'])}{side}"
        lines.append(f"{rank}. {head}, confidence {percent(suspect['confidence'])}")
        lines += [f"   - {plain(sentence)}" for sentence in suspect["evidence"]]
        lines.append(f"   - next: {plain(suspect['next_check'])}")
    return "\n".join(lines)


def _public(report: Report) -> Report:
    """Return the report with the folders of the dumps and models cut off wherever its sentences name them."""
    paths = {str(report[side].get(key) or "") for side in ("a", "b") for key in ("path", "model")}
    return {**report, **{key: without_folders(report[key], paths) for key in _SENTENCES}}


def _action(report: Report) -> str:
    action = report["action"]
    rows = [
        (plain(figure["name"]), number(figure["value"]), plain(figure["healthy"]), plain(figure["source"] or ""))
        for figure in action["figures"]
    ]
    sentence = f"**Action:** {action_title(report)}. {plain(action['text'])}"
    return f"{sentence}\n\n{table(('figure', 'value', 'healthy', 'source'), rows)}" if rows else sentence


def _replay(report: Report) -> str:
    modules = replays_to_read(report)
    if not modules:
        return ""
    rows = [
        (code(label(entry)), *(plain(against_band(entry.get(side))) for side in ("a", "b")), plain(explained(entry)))
        for entry in modules
    ]
    title = "Replayed in float64 from each side's own stored input; roundings of the output's dtype, of those allowed:"
    return f"{title}\n\n{table(('module', 'A', 'B', 'explained by'), rows)}"


def _sides(report: Report) -> str:
    rows = []
    for title, key in _SIDE_ROWS:
        values = [report[side].get(key) for side in ("a", "b")]
        shown = [PurePath(str(value)).name if key == "model" else value for value in values]
        rows.append((title, *(plain(value) for value in shown)))
    kinds = dict.fromkeys(key for side in ("a", "b") for key in report["backends"].get(side) or {})
    for kind in kinds:
        values = [(report["backends"].get(side) or {}).get(kind) for side in ("a", "b")]
        rows.append((f"{plain(kind)} backend", *(plain(value) for value in values)))
    return table(("", "A", "B"), rows)


def _gates(report: Report) -> str:
    rows = [(plain(gate["name"]), gate["status"], plain(gate["detail"])) for gate in report["gates"]]
    return table(("gate", "status", "detail"), rows) if rows else ""


def _modules(report: Report) -> str:
    if not report["layers"]:
        return ""
    counts = ", ".join(f"{count} {word}" for word, count in verdict_counts(report["layers"]).items())
    rows = [
        (
            *(code(label(layer)), layer["verdict"], SIDES.get(layer["side"], "")),
            *(number(layer.get(key)) for key in _FIGURES),
        )
        for layer in focus(report, limit=12)
    ]
    if not rows:
        return f"Modules: {counts}"
    modules = table(_MODULE_HEADERS, rows, right=len(_FIGURES))
    return f"Modules: {counts}; noise floor {plain(floor_words(report))}\n\n{modules}"


def _experts(report: Report) -> str:
    return f"Experts: {plain(routing_words(report['moe']))}" if report["moe"] else ""


def _rows(report: Report) -> str:
    reasons = row_reasons(report)
    if not reasons:
        return ""
    lines = [(s.upper(), plain(w), str(n)) for s, w, n in reasons]
    joined = report["coverage"]["rows"]["joined"]
    return f"Rows: {joined} joined\n\n{table(('of', 'not joined because', 'rows'), lines, right=1)}"


def _environment(report: Report) -> str:
    rows = [(code(entry["key"]), plain(entry["a"]), plain(entry["b"])) for entry in differing_environment(report)]
    if not rows:
        return ""
    return "<details><summary>Environment differences</summary>\n\n" + table(("", "A", "B"), rows) + "\n\n</details>"
