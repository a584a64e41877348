"""GitHub-flavoured Markdown that shows text as it is, and the blocks about tokens of both reports."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from probe.compare.report.model import number, visible
from probe.compare.report.shared.words import correction_words, quantile_rows, split_words

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~$@!&])")


def plain(value: Any) -> str:
    """Return text that Markdown shows as it is, on one line."""
    return _SPECIAL.sub(r"\\\1", visible(number(value) if not isinstance(value, str) else value))


def code(value: Any) -> str:
    """Return an inline code span whatever backticks the text holds; a pipe is escaped for tables."""
    text = visible(value).replace("|", r"\|")
    fence = "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    return f"{fence} {text} {fence}" if "`" in text else f"`{text}`"


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], right: int = 0) -> str:
    """Return a table whose last ``right`` columns are right-aligned."""
    rule = ["---"] * (len(headers) - right) + ["--:"] * right
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (headers, rule, *rows))


def bullets(title: str, items: Sequence[str]) -> str:
    """Return a list under a bold title, nothing without items."""
    return f"**{title}**\n\n" + "\n".join(f"- {plain(item)}" for item in items) if items else ""


def without_folders(value: Any, paths: Iterable[str]) -> Any:
    """Return plain data with the folders of the absolute ones of ``paths`` cut off wherever a string names them."""
    absolute = sorted((path for path in paths if path.startswith("/")), key=len, reverse=True)

    def cut(value: Any) -> Any:
        if isinstance(value, str):
            for path in absolute:
                value = value.replace(path, PurePath(path).name)
            return value
        if isinstance(value, dict):
            return {key: cut(item) for key, item in value.items()}
        return [cut(item) for item in value] if isinstance(value, list) else value

    return cut(value)


def commands(texts: Sequence[str]) -> str:
    """Return commands to paste in a fence that none of them closes."""
    if not texts:
        return ""
    lines = [visible(command) for command in texts]
    fence = "`" * max(3, *(len(run) + 1 for line in lines for run in re.findall("`+", line) or [""]))
    return "\n".join(["**Next**", "", f"{fence}sh", *lines, fence])


# -- blocks about tokens ----------------------------------------------------------------------------------------------


def figures(tokens: Mapping[str, Any]) -> str:
    """Return the main figures of all tokens, their tails, and what corrections would touch; nothing without tokens."""
    if not tokens.get("compared"):
        return ""
    keys = ("mean_abs_logprob_diff", "max_abs_logprob_diff", "mean_prob_diff", "max_prob_diff", "pearson", "k3")
    known = [key for key in keys if tokens.get(key) is not None]
    lines = [", ".join(f"{key.replace('_', ' ')} {number(tokens[key], 4)}" for key in known)]
    lines += [f"99.9 % of {plain(name)} are below {number(values[3])}" for name, _, values in quantile_rows(tokens)]
    touched = [
        f"{plain(entry['name'])} ({plain(entry['bound'])}): {correction_words(entry)}"
        for entry in tokens.get("corrections") or []
        if entry["share"] or entry["sequences_share"]
    ]
    lines += [f"corrections: {'; '.join(touched)}"] if touched else []
    return f"Log-probs of {tokens['compared']} response tokens: {'. '.join(lines)}"


def update(ppo: Mapping[str, Any]) -> str:
    """Return what the difference does to the PPO update, nothing where nothing is known of it."""
    sentences = split_words(ppo)
    return f"PPO update: {plain(' '.join(sentences))}" if sentences else ""
