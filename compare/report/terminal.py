"""The report on a terminal: readable at 80 columns, plain text when piped, words as well as colours."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from probe.compare.report.model import (
    OPTIONAL_SECTIONS,
    ROUTING_MARGINS,
    Report,
    details,
    differing_environment,
    focus,
    is_built,
    is_first_divergence,
    label,
    logprob_sources,
    number,
    routing_words,
    row_reasons,
    verdict_counts,
    visible,
    worst_tokens,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_STYLES = {
    "identical": "green",
    "consistent": "green",
    "suspect": "yellow",
    "divergent": "bold red",
    "incomparable": "magenta",
    "missing": "magenta",
    "pass": "green",
    "warn": "yellow",
    "fail": "bold red",
    "skipped": "dim",
    "info": "dim",
}


def render(report: Report, console: Console) -> None:
    """Print the report to ``console``; the console decides on width and colour (rich obeys NO_COLOR)."""
    for part in (_head, _gates, _modules, _experts, _coverage, _tokens, _environment, _not_built, _next):
        part(report, console)


def _say(console: Console, *parts: tuple[str, str] | str) -> None:
    """Print text as it is: no markup, no highlighting, no control characters; wrapped at words."""
    from rich.text import Text

    ascii_only = console.options.ascii_only
    text = Text()
    for part in parts:
        words, style = (part, "") if isinstance(part, str) else part
        shown = visible(words)
        text.append(shown.encode("ascii", "backslashreplace").decode() if ascii_only else shown, style)
    console.print(text)


def _title(console: Console, words: str, note: str = "") -> None:
    console.print()
    _say(console, (words, "bold"), (f"  {note}" if note else "", "dim"))


def _grid(headers: Iterable[tuple[str, str]]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name, justify in headers:
        table.add_column(name, justify="right" if justify == "right" else "left", overflow="fold")
    return table


def _row(console: Console, table: Table, *cells: Any) -> None:
    from rich.text import Text

    shown = [visible(cell) for cell in cells]
    if console.options.ascii_only:
        shown = [cell.encode("ascii", "backslashreplace").decode() for cell in shown]
    table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in shown))


def _head(report: Report, console: Console) -> None:
    verdict = report["verdict"]
    _say(console, ("verdict: ", "bold"), (verdict, _STYLES[verdict]), report["headline"].removeprefix(verdict))
    _say(console, (f"{_side(report['a'])} vs {_side(report['b'])}", "dim"))
    _say(console, details(report))
    first = report["first_divergence"]
    if first:
        place = f" at position {first.get('position')} of {first.get('sequence')}" if first.get("sequence") else ""
        _say(console, ("first divergence: ", "bold"), (label(first), _STYLES["divergent"]), place)
    for sentence in report["not_compared"]:
        _say(console, ("not compared: ", "yellow"), sentence)


def _side(side: dict[str, Any]) -> str:
    return f"{side.get('stage')} ({side.get('engine')} {side.get('engine_version') or ''}".rstrip() + ")"


def _gates(report: Report, console: Console) -> None:
    if not report["gates"]:
        return
    _title(console, "Gates")
    table = _grid([("gate", ""), ("status", ""), ("detail", "")])
    for gate in report["gates"]:
        _row(console, table, gate["name"], gate["status"], gate["detail"])
    console.print(table)


def _modules(report: Report, console: Console) -> None:
    layers = report["layers"]
    if not layers:
        _title(console, "Modules", "none compared")
        return
    shown = focus(report)
    counts = ", ".join(f"{count} {word}" for word, count in verdict_counts(layers).items())
    if not shown:
        _title(console, "Modules", counts)
        return
    which = "nearest to their noise floor"
    if report["first_divergence"]:
        which = "around the first divergence"
    elif any(layer.get("ratio") is None for layer in shown):
        which = "not compared or nearest to their noise floor"
    _title(console, "Modules", f"{counts}; {len(shown)} of {len(layers)}, {which}")
    table = _grid([("module", ""), ("verdict", ""), ("relL2", "right"), ("floor", "right"), ("ratio", "right")])
    for layer in shown:
        mark = "> " if is_first_divergence(report, layer) else "~ " if layer.get("proposed") else "  "
        figures = [number(layer.get(key), 2) for key in ("rel_l2", "floor", "ratio")]
        _row(console, table, mark + label(layer), layer["verdict"], *figures)
    console.print(table)


def _experts(report: Report, console: Console) -> None:
    """Print the routing of a model with experts; its layers only where tokens were routed otherwise."""
    moe = report["moe"]
    if not moe:
        return
    _title(console, "Experts", routing_words(moe))
    layers = [layer for layer in moe["layers"] if layer["flips"]]
    if not layers:
        return
    headers = ["layer", "flips", "unexplained", "overlap", "margin A", "margin B", "all tokens"]
    table = _grid([(name, "right") for name in headers])
    for layer in layers:
        margins = [(layer[key][side] or {}).get("median") for key, side in ROUTING_MARGINS]
        counts = layer["layer"], layer["flips"], layer["unexplained"], number(layer["overlap"])
        _row(console, table, *counts, *(number(value, 2) for value in margins))
    console.print(table)


def _coverage(report: Report, console: Console) -> None:
    coverage = report["coverage"]
    unmatched = [len(coverage.get(key) or []) for key in ("only_a", "only_b", "unavailable")]
    joined = (coverage.get("rows") or {}).get("joined", 0)
    _title(console, "Coverage")
    _say(
        console,
        f"{coverage.get('matched', 0)} tensors matched; {unmatched[0]} only in A, {unmatched[1]} only in B, "
        f"{unmatched[2]} unavailable. {joined} rows joined.",
    )
    if coverage.get("proposed"):
        _say(console, f"{coverage['proposed']} of the pairs (marked ~) are only proposed: confirm them with --map.")
    reasons = row_reasons(report)
    if reasons:
        table = _grid([("rows", "right"), ("of", ""), ("not joined because", "")])
        for side, words, count in reasons:
            _row(console, table, count, side.upper(), words)
        console.print(table)


def _tokens(report: Report, console: Console) -> None:
    tokens = report["tokens"]
    if not tokens.get("compared"):
        _title(console, "Tokens", tokens.get("detail") or "no log-probs compared")
        return
    _title(console, "Tokens", f"{tokens['compared']} compared; {logprob_sources(tokens)}")
    names = {"mean_abs_logprob_diff": "mean |dlogp|", "max_abs_logprob_diff": "max |dlogp|", "pearson": "Pearson"}
    names |= {"k3": "k3"}
    _say(console, ", ".join(f"{name} {number(tokens.get(key), 4)}" for key, name in names.items()))
    worst = worst_tokens(report)[:5]
    if not worst:
        return
    table = _grid([("sequence", ""), ("position", "right"), ("token", "right"), ("text", "")])
    for name in ("logp A", "logp B", "diff"):
        table.add_column(name, justify="right")
    for token in worst:
        figures = [number(token.get(key)) for key in ("logprob_a", "logprob_b", "diff")]
        text = "" if token.get("text") is None else visible(token["text"], 16)
        _row(console, table, token["sequence"], token["position"], token["token"], text, *figures)
    console.print(table)


def _environment(report: Report, console: Console) -> None:
    entries = differing_environment(report)
    if not entries:
        return
    _title(console, "Environment", f"{len(entries)} of {len(report['environment'])} entries differ")
    table = _grid([("key", ""), ("A", ""), ("B", ""), ("", "")])
    for entry in entries:
        _row(console, table, entry["key"], number(entry["a"]), number(entry["b"]), entry["severity"])
    console.print(table)


def _not_built(report: Report, console: Console) -> None:
    absent = [name for key, name in OPTIONAL_SECTIONS.items() if not is_built(report[key])]
    if absent:
        console.print()
        _say(console, (f"not built: {', '.join(absent)}", "dim"))


def _next(report: Report, console: Console) -> None:
    if not report["next_commands"]:
        return
    _title(console, "Next")
    for command in report["next_commands"]:
        # A command must be copied as it is: no wrapping.
        console.print("  " + visible(command), markup=False, highlight=False, soft_wrap=True)
