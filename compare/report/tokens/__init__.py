"""Forms of the report of ``probe tokens``: the table that write_report takes."""

from __future__ import annotations

from probe.compare.report import Form

TOKEN_FORMS: dict[str, Form] = {
    form.name: form
    for form in (
        Form("terminal", None, "probe.compare.report.tokens.terminal"),
        Form("json", "tokens.json", "probe.compare.report.json"),
        Form("html", "tokens.html", "probe.compare.report.tokens.html"),
        Form("csv", "tokens.csv", "probe.compare.report.tokens.csv"),
        Form("markdown", "tokens.md", "probe.compare.report.tokens.markdown"),
    )
}
