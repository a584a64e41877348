"""The report on a terminal: readable at 80 columns, plain text when piped, words as well as colours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from probe.compare.report.findings import (
    SIDES,
    action_title,
    against_band,
    explained,
    first_words,
    floor_words,
    located_words,
    no_suspect,
    own_share,
    percent,
    replay_words,
    replays_to_read,
    sides_known,
)
from probe.compare.report.model import (
    ROUTING_MARGINS,
    Report,
    details,
    differing_environment,
    focus,
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
from probe.compare.report.shared import terminal as blocks
from probe.compare.report.shared.terminal import STYLES, grid, row, say, title

if TYPE_CHECKING:
    from rich.console import Console

_ACTION_STYLES = {"continue": "green", "correct": "yellow", "stop": "bold red"}
_MODULE_FIGURES = ("rel_l2", "ratio")
_MODULE_HEADERS = (("relL2", "right"), ("/ floor", "right"), ("own", "right"))
_SHORT_SIDES = {"a": "A", "b": "B", "both": "A+B"}
_SUSPECTS = 5


def render(report: Report, console: Console) -> None:
    """Print the report to ``console``; the console decides on width and colour (rich obeys NO_COLOR)."""
    for part in PARTS:
        part(report, console)


def _head(report: Report, console: Console) -> None:
    verdict = report["verdict"]
    say(console, ("verdict: ", "bold"), (verdict, STYLES[verdict]), report["headline"].removeprefix(verdict))
    say(console, (f"{_side(report['a'])} vs {_side(report['b'])}", "dim"))
    say(console, details(report))
    first = report["first_divergence"]
    if first:
        place = f" at position {first.get('position')} of {first.get('sequence')}" if first.get("sequence") else ""
        say(console, ("first divergence: ", "bold"), (label(first), STYLES["divergent"]), place)
    for sentence in report["not_compared"]:
        say(console, ("not compared: ", "yellow"), sentence)


def _side(side: dict[str, Any]) -> str:
    return f"{side.get('stage')} ({side.get('engine')} {side.get('engine_version') or ''}".rstrip() + ")"


def _gates(report: Report, console: Console) -> None:
    if not report["gates"]:
        return
    title(console, "Gates")
    table = grid([("gate", ""), ("status", ""), ("detail", "")])
    for gate in report["gates"]:
        row(console, table, gate["name"], gate["status"], gate["detail"])
    console.print(table)


def _action(report: Report, console: Console) -> None:
    """Print the recommended action and the figures that it rests on."""
    action = report["action"]
    console.print()
    say(
        console,
        ("action: ", "bold"),
        (action_title(report), _ACTION_STYLES.get(action["word"], "")),
        ". ",
        action["text"],
    )
    if not action["figures"]:
        return
    table = grid([("figure", ""), ("value", "right"), ("", ""), ("healthy", "")])
    for figure in action["figures"]:
        mark = "pass" if figure["ok"] else "warn"
        row(console, table, figure["name"], number(figure["value"]), mark, number(figure["healthy"]))
    console.print(table)


def _suspects(report: Report, console: Console) -> None:
    """Print the suspects, the likeliest first, or one sentence that there is none."""
    suspects = report["suspects"]
    if not suspects:
        console.print()
        say(console, no_suspect(report))
        return
    title(console, "Suspects", "the likeliest first")
    for number_, suspect in enumerate(suspects[:_SUSPECTS], 1):
        side = f" on {SIDES[suspect['side']]}" if suspect["side"] in ("a", "b", "both") else ", side unknown"
        confidence = f"  {percent(suspect['confidence'])}"
        say(console, f"{number_}. ", (suspect["cause"], "bold"), f" in {suspect['name']}{side}", (confidence, "dim"))
        for sentence in suspect["evidence"]:
            say(console, f"   - {sentence}")
        say(console, ("   next: ", "dim"), suspect["next_check"])
    if len(suspects) > _SUSPECTS:
        say(console, (f"{len(suspects) - _SUSPECTS} more are in report.json.", "dim"))


def _located(report: Report, console: Console) -> None:
    sentences = located_words(report)
    if sentences:
        title(console, "Where")
    for sentence in sentences:
        say(console, sentence)


def _replay(report: Report, console: Console) -> None:
    """Print what was replayed and, of the worst modules, each side's roundings against its band."""
    sentences, modules = replay_words(report), replays_to_read(report)
    if not sentences:
        return
    title(console, "Replay", "each module recomputed in float64 from its own stored input")
    for sentence in sentences:
        say(console, sentence)
    if not modules:
        return
    table = grid([("module", ""), ("A, roundings", ""), ("B, roundings", "")])
    for entry in modules:
        row(console, table, label(entry), *(against_band(entry.get(side)) for side in ("a", "b")))
    console.print(table)
    for entry in modules:
        if explained(entry):
            say(console, f"{label(entry)}: {explained(entry)}.")


def _modules(report: Report, console: Console) -> None:
    layers = report["layers"]
    if not layers:
        title(console, "Modules", "none compared")
        return
    shown = focus(report)
    counts = ", ".join(f"{count} {word}" for word, count in verdict_counts(layers).items())
    if not shown:
        title(console, "Modules", counts)
        return
    which = "nearest to their noise floor"
    if report["first_divergence"]:
        which = "around the first divergence"
    elif any(layer.get("ratio") is None for layer in shown):
        which = "not compared or nearest to their noise floor"
    title(console, "Modules", f"{counts}; {len(shown)} of {len(layers)}, {which}")
    sided = sides_known(shown)
    table = grid([("module", ""), ("verdict", ""), *_MODULE_HEADERS, *([("by", "")] if sided else [])])
    for layer in shown:
        mark = "> " if is_first_divergence(report, layer) else "~ " if layer.get("proposed") else "  "
        figures = [*(number(layer.get(key), 2) for key in _MODULE_FIGURES), own_share(layer)]
        side = [_SHORT_SIDES.get(layer["side"], "")] if sided else []
        row(console, table, mark + label(layer), layer["verdict"], *figures, *side)
    console.print(table)
    say(
        console,
        (f"floor: {floor_words(report)}; own: share of the squared error that the inputs do not explain", "dim"),
    )


def _experts(report: Report, console: Console) -> None:
    """Print the routing of a model with experts; its layers only where tokens were routed otherwise."""
    moe = report["moe"]
    if not moe:
        return
    title(console, "Experts", routing_words(moe))
    layers = [layer for layer in moe["layers"] if layer["flips"]]
    if not layers:
        return
    headers = ["layer", "flips", "unexplained", "overlap", "margin A", "margin B", "all tokens"]
    table = grid([(name, "right") for name in headers])
    for layer in layers:
        margins = [(layer[key][side] or {}).get("median") for key, side in ROUTING_MARGINS]
        counts = layer["layer"], layer["flips"], layer["unexplained"], number(layer["overlap"])
        row(console, table, *counts, *(number(value, 2) for value in margins))
    console.print(table)


def _coverage(report: Report, console: Console) -> None:
    coverage = report["coverage"]
    unmatched = [len(coverage.get(key) or []) for key in ("only_a", "only_b", "unavailable")]
    joined = (coverage.get("rows") or {}).get("joined", 0)
    title(console, "Coverage")
    say(
        console,
        f"{coverage.get('matched', 0)} tensors matched; {unmatched[0]} only in A, {unmatched[1]} only in B, "
        f"{unmatched[2]} unavailable. {joined} rows joined.",
    )
    if coverage.get("proposed"):
        say(console, f"{coverage['proposed']} of the pairs (marked ~) are only proposed: confirm them with --map.")
    reasons = row_reasons(report)
    if reasons:
        table = grid([("rows", "right"), ("of", ""), ("not joined because", "")])
        for side, words, count in reasons:
            row(console, table, count, side.upper(), words)
        console.print(table)


def _tokens(report: Report, console: Console) -> None:
    tokens = report["tokens"]
    if not tokens.get("compared"):
        title(console, "Tokens", tokens.get("detail") or "no log-probs compared")
        return
    title(console, "Tokens", f"{tokens['compared']} compared; {logprob_sources(tokens)}")
    names = {"mean_abs_logprob_diff": "mean |dlogp|", "max_abs_logprob_diff": "max |dlogp|", "pearson": "Pearson"}
    names |= {"k3": "k3"}
    say(console, ", ".join(f"{name} {number(tokens.get(key), 4)}" for key, name in names.items()))
    blocks.tails(tokens, console)
    _worst(worst_tokens(report)[:5], console)


def _worst(worst: list[dict[str, Any]], console: Console) -> None:
    """Print the worst tokens and, where layers were joined, the first tensor that the row that scores them leaves."""
    if not worst:
        return
    joined = "lies_in" in worst[0]
    headers = [("sequence", ""), ("pos", "right"), ("token", "")]
    headers += [(name, "right") for name in ("logp A", "logp B", "diff")] + ([("first at", "")] if joined else [])
    table = grid(headers)
    for token in worst:
        figures = [number(token.get(key)) for key in ("logprob_a", "logprob_b", "diff")]
        text = number(token["token"]) if token.get("text") is None else visible(token["text"], 12)
        first = [first_words(token)] if joined else []
        row(console, table, token["sequence"], token["position"], text, *figures, *first)
    console.print(table)


def _update(report: Report, console: Console) -> None:
    """Print what the differences of the log-probs do: by probability, to corrections, to the PPO update.

    Only where some token figure is out of its healthy range; the other forms show it in any case.
    """
    if all(figure["ok"] for figure in report["action"]["figures"]):
        return
    blocks.probabilities(report["tokens"], console)
    blocks.corrections(report["tokens"], console)
    blocks.update(report["ppo"], console)


def _environment(report: Report, console: Console) -> None:
    entries = differing_environment(report)
    if not entries:
        return
    title(console, "Environment", f"{len(entries)} of {len(report['environment'])} entries differ")
    table = grid([("key", ""), ("A", ""), ("B", ""), ("", "")])
    for entry in entries:
        row(console, table, entry["key"], number(entry["a"]), number(entry["b"]), entry["severity"])
    console.print(table)


def _next(report: Report, console: Console) -> None:
    if not report["next_commands"]:
        return
    title(console, "Next")
    for command in report["next_commands"]:
        # A command must be copied as it is: no wrapping.
        console.print("  " + visible(command), markup=False, highlight=False, soft_wrap=True)


PARTS = (
    *(_head, _action, _suspects, _gates, _modules, _located, _replay, _experts, _coverage, _tokens),
    *(_update, _environment, _next),
)
"""The parts of the report in the order in which they are printed."""
