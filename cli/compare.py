"""``probe compare``: compare two dumps, print or write the report, and exit with the verdict. Never imports torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from probe.cli import common
from probe.errors import OutputExistsError, UsageError

DEFAULT_FOLDER = Path("probe-report")
FORMS_WITH_FOLDER = "terminal,json,html"
"""What -o alone asks for: a folder that nothing is written to helps nobody."""

report_group = common.option("Report")
judge_group = common.option("Judgement")
names_group = common.option("Names")
replay_group = common.option("Replay")


@click.command(
    cls=common.Command,
    examples="""
    probe compare d/rollout d/actor
    probe compare d/rollout d/actor --report terminal,html -o report
    probe compare d/rollout d/actor --json | jq .verdict
    probe compare d/gpu d/npu --weights Qwen2.5-0.5B --golden d/reference
    probe compare d/rollout d/actor --explain layers.0.self_attn.q_proj
    """,
)
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@report_group(
    "--report",
    "forms",
    metavar="FORM[,FORM...]",
    help=f"terminal, json, html, csv, markdown.  [default: terminal; {FORMS_WITH_FOLDER} with -o]",
)
@report_group(
    "-o", "--output", type=click.Path(path_type=Path), help=f"Folder of the report files.  [default: {DEFAULT_FOLDER}]"
)
@report_group("--json", "as_json", is_flag=True, help="Print the report as JSON on standard output, nothing else.")
@report_group("--no-text", is_flag=True, help="Leave the text of tokens out of every form.")
@report_group("--force", is_flag=True, help="Replace report files that are already there.")
@judge_group(
    "--min-coverage",
    metavar="X",
    type=common.FiniteRange(0, 1),
    default=0.9,
    show_default=True,
    help="Share of tensors and of rows below which the verdict is 'incomparable'.",
)
@judge_group("--across-versions", is_flag=True, help="Join rows of different weight versions too.")
@judge_group(
    "--floor",
    metavar="DUMP",
    type=click.Path(path_type=Path),
    help="A or B run again (another batch size or TP, or dump --noise): what it differs by is noise.",
)
@judge_group(
    "--golden",
    metavar="DUMP",
    type=click.Path(path_type=Path),
    help="The same tokens in a higher precision (dump --stage reference): says which side is off.",
)
@judge_group(
    "--jobs", metavar="N", type=click.IntRange(min=0), default=0, help="Tensors at a time.  [default: one per core]"
)
@replay_group(
    "--weights",
    metavar="CHECKPOINT",
    type=click.Path(path_type=Path),
    help="Recompute each module with these weights.  [default: the dump's own, where its weights match]",
)
@replay_group("--no-replay", is_flag=True, help="Recompute no module from its stored inputs.")
@names_group(
    "--map",
    "mapping",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Names that go before the tables, as json or yaml (docs/names.md).",
)
@names_group(
    "--explain",
    "explained",
    metavar="NAME",
    help="Say how one tensor was matched, merged and aligned; compare nothing.",
)
@click.pass_context
def compare(
    context: click.Context,
    a: Path,
    b: Path,
    forms: str | None,
    output: Path | None,
    as_json: bool,
    no_text: bool,
    force: bool,
    explained: str | None,
    **options: Any,
) -> None:
    """Compare two dumps and say where they first disagree.

    A and B are folders that 'probe dump -o' wrote. Exit status: 0 consistent, 1 suspect or divergent, 2 incomparable
    or trouble.
    """
    from probe.cli.progress import observing
    from probe.compare.run import compare_dumps, exit_status

    if explained is not None:
        chosen = {name: options[name] for name in ("mapping", "across_versions")}
        print_explanation(a, b, explained, as_json, **chosen)
        return
    wanted = _forms(forms, output)
    folder = output or DEFAULT_FOLDER
    refuse_existing(folder, wanted, force)
    options["replay"] = not options.pop("no_replay")
    with observing() as observer:
        report = compare_dumps(a, b, observer=observer, text=not no_text, **options)
    written = write_forms(report, wanted, folder, text=not no_text)
    if as_json:
        sys.stdout.write(_json(report, text=not no_text))
    elif "terminal" in wanted:
        print_report(report, text=not no_text)
    else:
        common.say(f"verdict: {report['headline']}", "bold")
    for path in written.values():
        common.note(f"wrote {path}")
    context.exit(exit_status(report))


def print_explanation(a: Path, b: Path, name: str, as_json: bool, **options: Any) -> None:
    """Print how the tensors called ``name`` are compared; raise UsageError for a name that neither dump has."""
    from probe.compare.explain import explain, in_words
    from probe.compare.report.model import dumps

    found = explain(a, b, name, **options)
    if as_json:
        sys.stdout.write(dumps(found) + "\n")
        return
    for line in in_words(found):
        common.say(line)


def _forms(forms: str | None, output: Path | None) -> list[str]:
    """Return the names of the forms to make; raise UsageError for a name that no form has."""
    from probe.compare.report import FORMS

    text = forms or (FORMS_WITH_FOLDER if output else "terminal")
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in FORMS:
            raise common.unknown_name("report form", name, list(FORMS), f"choose from {', '.join(FORMS)}")
    if not names:
        raise UsageError("--report names no form", f"choose from {', '.join(FORMS)}")
    if output is not None and not any(FORMS[name].file_name for name in names):
        raise UsageError(f"nothing would be written to {output}", "add json, html, csv or markdown to --report")
    return names


def refuse_existing(folder: Path, forms: list[str], force: bool) -> None:
    """Raise OutputExistsError, before anything is compared, where a report file would be overwritten."""
    from probe.compare.report import FORMS

    nearest = next(path for path in (folder, *folder.parents) if path.exists() or path == path.parent)
    if not nearest.is_dir() and any(FORMS[name].file_name for name in forms):
        raise OutputExistsError(f"{folder} cannot be a folder: {nearest} is a file", "choose another -o")
    for name in forms:
        path = folder / (FORMS[name].file_name or "")
        if FORMS[name].file_name and path.exists() and not force:
            raise OutputExistsError(f"{path} already exists", "choose another -o or add --force")


def write_forms(report: dict[str, Any], forms: list[str], folder: Path, *, text: bool) -> dict[str, Path]:
    """Write the forms that are files; return form name -> path."""
    from probe.compare.report import FORMS, write_report

    files = [name for name in forms if FORMS[name].file_name]
    return write_report(report, files, folder, text=text) if files else {}


def _json(report: dict[str, Any], *, text: bool) -> str:
    from probe.compare.report import FORMS
    from probe.compare.report.model import without_text

    rendered: str = FORMS["json"].render(report if text else without_text(report))
    return rendered


def print_report(report: dict[str, Any], *, text: bool) -> None:
    """Print the terminal form to standard output."""
    from probe.compare.report import FORMS
    from probe.compare.report.model import without_text

    FORMS["terminal"].render(report if text else without_text(report), common.stdout())
