"""The report of ``probe tokens`` as tokens.csv: one row per group of tokens, for a spreadsheet or pandas."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from typing import Any

from probe.compare.report.csv import cell
from probe.compare.report.model import Report

#: Lists of the section ``tokens`` -> the word in the column ``group`` and the keys of the group's name.
GROUPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "by_step": ("step", ("step",)),
    "sequences": ("sequence", ("sequence",)),
    "by_position": ("position", ("position", "last")),
    "by_probability": ("probability", ("low", "high")),
    "by_token": ("token", ("token", "text")),
    "worst": ("worst token", ("sequence", "position")),
}
COLUMNS: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in ("group", "name", "name_to", "step")},
    "tokens": ("compared", "count"),
    "mean_abs_logprob_diff": ("mean_abs", "mean_abs_logprob_diff"),
    "max_abs_logprob_diff": ("max_abs", "max_abs_logprob_diff"),
    **{name: (name,) for name in ("mean_prob_diff", "max_prob_diff", "std_prob_diff", "share", "pearson", "k3")},
    **{name: (name,) for name in ("log_ppl_a", "log_ppl_b", "token", "text", "logprob_a", "logprob_b", "diff")},
    "prob_diff": ("prob_diff",),
}
"""Column -> the keys that may hold it in an entry, the first one that does."""


def render(report: Report) -> str:
    """Return CSV text: a header, one row for all tokens, then one per group in the order of GROUPS."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for entry in _entries(report["tokens"]):
        writer.writerow([cell(next((entry[key] for key in keys if key in entry), None)) for keys in COLUMNS.values()])
    return out.getvalue()


def _entries(tokens: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    scalars = {key: value for key, value in tokens.items() if not isinstance(value, (dict, list)) and key != "text"}
    yield {"group": "all", "name": "", **scalars}
    for key, (word, names) in GROUPS.items():
        for entry in tokens.get(key) or []:
            name, *rest = (entry.get(part) for part in names)
            yield {**entry, "group": word, "name": name, "name_to": rest[0] if rest else None}
