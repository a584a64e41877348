"""The report of ``probe tokens`` on a terminal: readable at 80 columns, plain text when piped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from probe.compare.report.findings import SIDES
from probe.compare.report.model import Report, details, number, visible
from probe.compare.report.shared import terminal as blocks
from probe.compare.report.shared.terminal import STYLES, grid, row, say, title
from probe.compare.report.shared.words import counts_words, origin_words, step_figures

if TYPE_CHECKING:
    from rich.console import Console

_WORST, _CARRIERS, _STEPS = 8, 5, 10
_CONTEXT = 24
_WORST_FIGURES = (
    ("token", "token"),
    ("logprob_a", "logp A"),
    ("logprob_b", "logp B"),
    ("diff", "diff"),
    ("prob_diff", "|dp|"),
)


def render(report: Report, console: Console) -> None:
    """Print the report to ``console``; the console decides on width and colour (rich obeys NO_COLOR)."""
    for part in PARTS:
        part(report, console)


def _head(report: Report, console: Console) -> None:
    verdict = report["verdict"]
    say(console, ("verdict: ", "bold"), (verdict, STYLES[verdict]), report["headline"].removeprefix(verdict))
    for side, name in (("a", "rollout"), ("b", "actor")):
        origin = report[side]
        say(console, (f"{side.upper()} {name}: {origin['key']} of {origin['path']}, {origin_words(origin)}", "dim"))
    say(console, details(report))
    for sentence in report["not_compared"]:
        say(console, ("not compared: ", "yellow"), sentence)
    for sentence in report["notes"]:
        say(console, ("note: ", "dim"), sentence)


def _findings(report: Report, console: Console) -> None:
    """Print what is known to be wrong with the log-probs themselves."""
    if not report["findings"]:
        return
    title(console, "Findings")
    for found in report["findings"]:
        side = f" on {SIDES[found['side']]}" if found["side"] in ("a", "b", "both") else ""
        say(console, (found["cause"], "bold"), f"{side}: {found['text']}")


def _figures(report: Report, console: Console) -> None:
    title(console, "Figures", counts_words(report["counts"]))
    blocks.figures(report["tokens"], console)
    blocks.tails(report["tokens"], console)
    if not report["figures"]:
        return
    table = grid([("figure", ""), ("value", "right"), ("", ""), ("healthy", ""), ("source of the range", "")])
    for figure in report["figures"]:
        mark = "pass" if figure["ok"] else "warn"
        row(console, table, figure["name"], number(figure["value"]), mark, figure["healthy"], figure["source"] or "")
    console.print(table)


def _samples(report: Report, console: Console) -> None:
    blocks.samples(report["tokens"], console)


def _probabilities(report: Report, console: Console) -> None:
    blocks.probabilities(report["tokens"], console)


def _steps(report: Report, console: Console) -> None:
    entries = report["tokens"].get("by_step") or []
    if len(entries) < 2:
        return
    title(console, "By training step", f"the last {_STEPS} of {len(entries)}" if len(entries) > _STEPS else "")
    known = step_figures(report["tokens"])
    table = grid([(name, "right") for name in ("step", "tokens", *(short for _, _, short in known))])
    for entry in entries[-_STEPS:]:
        row(console, table, entry["step"], entry["compared"], *(number(entry[key]) for key, _, _ in known))
    console.print(table)


def _worst(report: Report, console: Console) -> None:
    worst = [token for token in report["tokens"].get("worst") or [] if token["prob_diff"] or token["diff"]][:_WORST]
    if not worst:
        return
    title(console, "Worst tokens")
    known = [(key, name) for key, name in _WORST_FIGURES if any(token[key] is not None for token in worst)]
    texts = [("text in context", "")] if report["tokens"]["text"] else []
    table = grid([("sequence", ""), ("position", "right"), *((name, "right") for _, name in known), *texts])
    for token in worst:
        text = [_in_context(token)] if texts else []
        row(console, table, token["sequence"], token["position"], *(number(token[key]) for key, _ in known), *text)
    console.print(table)


def _in_context(token: dict[str, Any]) -> str:
    before, after = (visible(token.get(key) or "") for key in ("context", "after"))
    return f"{before[-_CONTEXT:]}[{visible(token.get('text') or '', 16)}]{after[:_CONTEXT]}"


def _corrections(report: Report, console: Console) -> None:
    blocks.corrections(report["tokens"], console)


def _update(report: Report, console: Console) -> None:
    blocks.update(report["ppo"], console, _CARRIERS)


def _next(report: Report, console: Console) -> None:
    if not report["next_commands"]:
        return
    title(console, "Next")
    for command in report["next_commands"]:
        # A command must be copied as it is: no wrapping.
        console.print("  " + visible(command), markup=False, highlight=False, soft_wrap=True)


PARTS = (_head, _findings, _samples, _figures, _probabilities, _steps, _worst, _corrections, _update, _next)
"""The parts of the report in the order in which they are printed."""
