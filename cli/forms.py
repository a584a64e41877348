"""What the commands that make a report share: choosing its forms, writing them, printing it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from probe.cli import common
from probe.errors import OutputExistsError, UsageError

if TYPE_CHECKING:
    from probe.compare.report import Form

DEFAULT_FOLDER = Path("probe-report")
FORMS_WITH_FOLDER = "terminal,json,html"
"""What -o alone asks for: a folder that nothing is written to helps nobody."""

report_group = common.option("Report")


def report_options(command: common.Decorated) -> common.Decorated:
    """Add the options about a report to a command; their values are the arguments of :func:`choose_forms`."""
    options: tuple[Callable[[Any], Any], ...] = (
        report_group(
            "--report",
            "forms",
            metavar="FORM[,FORM...]",
            help=f"terminal, json, html, csv, markdown.  [default: terminal; {FORMS_WITH_FOLDER} with -o]",
        ),
        report_group(
            "-o",
            "--output",
            type=click.Path(path_type=Path),
            help=f"Folder of the report files.  [default: {DEFAULT_FOLDER}]",
        ),
        report_group(
            "--json", "as_json", is_flag=True, help="Print the report as JSON on standard output, nothing else."
        ),
        report_group("--no-text", is_flag=True, help="Leave the text of tokens out of every form."),
        report_group("--force", is_flag=True, help="Replace report files that are already there."),
    )
    for option in reversed(options):
        command = option(command)
    return command


@dataclass(frozen=True)
class Wanted:
    """What a user wants of a report: the names of its ``forms``, all in ``table``, and the ``folder`` of their files.

    ``as_json``: print the report as JSON and nothing else; ``text``: show the text of tokens.
    """

    forms: list[str]
    folder: Path
    table: Mapping[str, Form]
    as_json: bool
    text: bool

    def give(self, report: dict[str, Any]) -> None:
        """Write the forms that are files, then print the report, or its headline where nothing else is printed."""
        from probe.compare.report import write_report
        from probe.compare.report.model import without_text

        files = [name for name in self.forms if self.table[name].file_name]
        written = write_report(report, files, self.folder, text=self.text, table=self.table) if files else {}
        shown = report if self.text else without_text(report)
        if self.as_json:
            sys.stdout.write(self.table["json"].render(shown))
        elif "terminal" in self.forms:
            self.table["terminal"].render(shown, common.stdout())
        else:
            common.say(f"verdict: {report['headline']}", "bold")
        for path in written.values():
            common.note(f"wrote {path}")


def choose_forms(
    table: Mapping[str, Form], forms: str | None, output: Path | None, as_json: bool, no_text: bool, force: bool
) -> Wanted:
    """Return what the options ask for.

    Raises UsageError for a name that no form has, OutputExistsError where a file would be overwritten: both before
    anything is compared.
    """
    text = forms or (FORMS_WITH_FOLDER if output else "terminal")
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in table:
            raise common.unknown_name("report form", name, list(table), f"choose from {', '.join(table)}")
    if not names:
        raise UsageError("--report names no form", f"choose from {', '.join(table)}")
    if output is not None and not any(table[name].file_name for name in names):
        raise UsageError(f"nothing would be written to {output}", "add json, html, csv or markdown to --report")
    folder = output or DEFAULT_FOLDER
    _refuse_existing(folder, [file for name in names if (file := table[name].file_name)], force)
    return Wanted(names, folder, table, as_json, not no_text)


def _refuse_existing(folder: Path, files: list[str], force: bool) -> None:
    nearest = next(path for path in (folder, *folder.parents) if path.exists() or path == path.parent)
    if not nearest.is_dir() and files:
        raise OutputExistsError(f"{folder} cannot be a folder: {nearest} is a file", "choose another -o")
    for name in files:
        if (folder / name).exists() and not force:
            raise OutputExistsError(f"{folder / name} already exists", "choose another -o or add --force")
