"""Printing on a terminal: text without markup, titles, tables, and the blocks about tokens of both reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from probe.compare.report.model import number, visible
from probe.compare.report.shared.words import (
    QUANTILES,
    config_words,
    correction_words,
    figure_groups,
    grid_cell,
    probability_bins,
    quantile_rows,
    share,
    split_words,
    update_rows,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

STYLES = {
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


def say(console: Console, *parts: tuple[str, str] | str) -> None:
    """Print text as it is: no markup, no highlighting, no control characters; wrapped at words."""
    from rich.text import Text

    ascii_only = console.options.ascii_only
    text = Text()
    for part in parts:
        words, style = (part, "") if isinstance(part, str) else part
        shown = visible(words)
        text.append(shown.encode("ascii", "backslashreplace").decode() if ascii_only else shown, style)
    console.print(text)


def title(console: Console, words: str, note: str = "") -> None:
    """Print a blank line, a title and what stands behind it."""
    console.print()
    say(console, (words, "bold"), (f"  {note}" if note else "", "dim"))


def grid(headers: Iterable[tuple[str, str]]) -> Table:
    """Return an empty table without lines; ``headers``: (heading, "right" or "")."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name, justify in headers:
        table.add_column(name, justify="right" if justify == "right" else "left", overflow="fold")
    return table


def row(console: Console, table: Table, *cells: Any) -> None:
    """Add a row of cells as they are; verdict words and statuses get their colour."""
    from rich.text import Text

    shown = [visible(cell) for cell in cells]
    if console.options.ascii_only:
        shown = [cell.encode("ascii", "backslashreplace").decode() for cell in shown]
    table.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in shown))


# -- blocks about tokens ----------------------------------------------------------------------------------------------


def figures(tokens: Mapping[str, Any], console: Console) -> None:
    """Print the figures of all tokens, one line per group."""
    for _, entries in figure_groups(tokens):
        say(console, ", ".join(f"{name} {number(tokens[key], 4)}" for key, _, name, _ in entries))


def tails(tokens: Mapping[str, Any], console: Console) -> None:
    """Print the quantiles of the differences, one line per quantity."""
    for _, name, values in quantile_rows(tokens):
        words = ", ".join(f"{words} {number(value)}" for (_, words), value in zip(QUANTILES, values))
        say(console, f"{name}: {words}")


def probabilities(tokens: Mapping[str, Any], console: Console) -> None:
    """Print the differences by the rollout's probability."""
    bins = probability_bins(tokens)
    if not bins:
        return
    title(console, "By the rollout's probability", "share: of the summed |dlogp|")
    headers = ("tokens", "mean |dlogp|", "max |dlogp|", "mean |dp|", "share")
    table = grid([("probability", ""), *((name, "right") for name in headers)])
    for words, entry in bins:
        values = [number(entry[key]) for key in ("mean_abs", "max_abs", "mean_prob_diff")]
        row(console, table, words, entry["count"], *values, share(entry["share"]))
    console.print(table)


def corrections(tokens: Mapping[str, Any], console: Console) -> None:
    """Print what corrections of the policy ratio would touch."""
    if not tokens.get("corrections"):
        return
    title(console, "What corrections would touch")
    table = grid([("correction", ""), ("where", ""), ("touches", "")])
    for entry in tokens["corrections"]:
        row(console, table, entry["name"], entry["bound"], correction_words(entry))
    console.print(table)


def update(ppo: Mapping[str, Any], console: Console, tokens: int = 0) -> None:
    """Print the effect on the PPO update; ``tokens``: how many of those that carry it to list."""
    rows = update_rows(ppo)
    if not rows:
        return
    title(console, "PPO update")
    say(console, ppo["detail"])
    table = grid([("figure", ""), ("rollout's as old", "right"), ("actor's as old", "right")])
    for name, value, again, _ in rows:
        row(console, table, name, value, again)
    console.print(table)
    for sentence in split_words(ppo):
        say(console, sentence)
    _carriers((ppo.get("carriers") or [])[:tokens], console)
    say(console, (config_words(ppo["config"]), "dim"))


def _carriers(entries: list[Mapping[str, Any]], console: Console) -> None:
    if not entries:
        return
    headers = ("position", "token", "dlogp", "ratio", "advantage", "share")
    table = grid([("carried by", ""), *((name, "right") for name in headers), ("text", "")])
    for entry in entries:
        place = entry["sequence"], entry["position"], number(entry["token"])
        text = "" if entry.get("text") is None else visible(entry["text"], 16)
        values = [number(entry[key]) for key in ("diff", "ratio", "advantage")]
        row(console, table, *place, *values, share(entry["share"]), text)
    console.print(table)


def samples(tokens: Mapping[str, Any], console: Console) -> None:
    """Print the grid of samples and positions as a monitor in training does."""
    cells = tokens.get("grid") or {}
    if not cells.get("labels") or not cells.get("positions"):
        return
    title(console, "First samples", "|dp| by position in the response, - outside the mask")
    table = grid([("sample", ""), *((str(position), "right") for position in cells["positions"])])
    table.padding = (0, 1, 0, 0)
    for column in table.columns[1:]:
        column.no_wrap = True
    for name, values in zip(cells["labels"], cells["values"]):
        row(console, table, visible(name, 24), *map(grid_cell, values))
    console.print(table)
