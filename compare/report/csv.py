"""The report as report.csv: one row per compared tensor, flat columns, for a spreadsheet or pandas."""

from __future__ import annotations

import csv
import io
from typing import Any

from probe.compare.report.model import Layer, Report, in_order, visible

#: Column name -> the keys that lead to it in an entry of ``layers``.
COLUMNS: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in ("order", "name", "slot", "verdict", "side", "rel_l2", "floor", "floor_source")},
    **{name: (name,) for name in ("ratio", "inherited_error", "own_error", "rmse")},
    "golden_ratio": ("golden", "ratio"),
    "golden_error_a": ("golden", "error_a"),
    "golden_error_b": ("golden", "error_b"),
    "max_abs": ("max_abs",),
    "max_abs_sequence": ("max_abs_at", "sequence"),
    "max_abs_position": ("max_abs_at", "position"),
    "max_abs_feature": ("max_abs_at", "feature"),
    **{name: (name,) for name in ("one_minus_cos", "ulp_p50", "ulp_p99", "norm_ratio")},
    "worst_row_sequence": ("worst_row", "sequence"),
    "worst_row_position": ("worst_row", "position"),
    "worst_row_rel_l2": ("worst_row", "rel_l2"),
    **{name: (name,) for name in ("nan_a", "nan_b", "inf_a", "inf_b", "rows")},
    "a_tensors": ("a", "tensors"),
    "a_dtype": ("a", "dtype"),
    "a_norm": ("a", "norm"),
    "b_tensors": ("b", "tensors"),
    "b_dtype": ("b", "dtype"),
    "b_norm": ("b", "norm"),
    "reason": ("reason",),
}

# A spreadsheet runs a text cell that begins with one of these as a formula (OWASP, "CSV Injection").
_FORMULA_STARTS = ("=", "+", "-", "@")


def render(report: Report) -> str:
    """Return CSV text with a header line and one line per entry of ``layers``, in execution order."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for layer in in_order(report["layers"]):
        writer.writerow([cell(_follow(layer, keys)) for keys in COLUMNS.values()])
    return out.getvalue()


def _follow(layer: Layer, keys: tuple[str, ...]) -> Any:
    value: Any = layer
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def cell(value: Any) -> Any:
    """Return what a cell holds: nothing for None, text that no spreadsheet runs as a formula."""
    if value is None:
        return ""
    if isinstance(value, list):
        value = " ".join(map(str, value))
    if not isinstance(value, str):
        return value
    text = visible(value)  # tabs and line breaks are spelled out: they too would start a formula or a new row
    return "'" + text if text.startswith(_FORMULA_STARTS) else text
