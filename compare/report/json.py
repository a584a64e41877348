"""The report as report.json: the model itself."""

from __future__ import annotations

from probe.compare.report.model import Report, dumps


def render(report: Report) -> str:
    """Return the report as indented strict JSON with a final newline."""
    return dumps(report) + "\n"
