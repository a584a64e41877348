"""Forms of a report: plain data first, then one file per form.

The submodules ``json``, ``html`` and ``csv`` become attributes of this package when they are imported, so this file
must not import the standard library's modules of those names.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probe.compare.report.model import Report, clean_floats, without_text
from probe.errors import UsageError
from probe.files import replace_all

__all__ = ["FORMS", "Form", "check_forms", "write_report"]


@dataclass(frozen=True)
class Form:
    """One way to show a report: the file it fills (None for the terminal) and the module whose ``render`` does it."""

    name: str
    file_name: str | None
    module: str

    @property
    def render(self) -> Callable[..., Any]:
        """Import the form on first use and return its ``render``.

        File forms take the report and return text; the terminal takes the report and a rich console.
        """
        render: Callable[..., Any] = importlib.import_module(self.module).render
        return render


FORMS: dict[str, Form] = {
    form.name: form
    for form in (
        Form("terminal", None, "probe.compare.report.terminal"),
        Form("json", "report.json", "probe.compare.report.json"),
        Form("html", "report.html", "probe.compare.report.html"),
        Form("csv", "report.csv", "probe.compare.report.csv"),
        Form("markdown", "report.md", "probe.compare.report.markdown"),
    )
}


def check_forms(forms: Iterable[str], table: Mapping[str, Form]) -> list[Form]:
    """Return the named forms of a table, each once, in the order given.

    Raises UsageError for a name that the table does not have.
    """
    names = list(dict.fromkeys(forms))
    unknown = [name for name in names if name not in table]
    if unknown:
        raise UsageError(f"unknown report form {', '.join(map(repr, unknown))}", f"choose from {', '.join(table)}")
    return [table[name] for name in names]


def write_report(
    report: Report, forms: list[str], out_dir: Path, *, text: bool = True, table: Mapping[str, Form] = FORMS
) -> dict[str, Path]:
    """Write one file per form into ``out_dir`` and return form name -> path; ``table``: the forms that there are.

    All forms are rendered before the first file is touched and every file is renamed into place, so a failure leaves
    earlier reports as they were. ``terminal`` has no file and is passed over. ``text=False`` leaves token text out of
    every form. Raises UsageError for an unknown form or a folder that cannot be written.
    """
    chosen = [form for form in check_forms(forms, table) if form.file_name]
    data = clean_floats(report if text else without_text(report))
    contents = {form: form.render(data).encode("utf-8", "replace") for form in chosen}
    paths = {form: out_dir / str(form.file_name) for form in chosen}
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        replace_all({paths[form]: content for form, content in contents.items()})
    except OSError as error:
        raise UsageError(
            f"cannot write the report to {out_dir} ({error.strerror or error})", "choose another folder with -o"
        ) from error
    return {form.name: path for form, path in paths.items()}
