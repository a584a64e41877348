"""``probe replay``: recompute the modules of one dump from their own stored inputs. Never imports torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from probe.cli import common
from probe.errors import CheckpointError, CompareError

if TYPE_CHECKING:
    from probe.compare.evidence import Replayed
    from probe.store.reader import Dump

MAX_MODULES = 40
"""Modules in the table before a note says how many were left out (--all shows them, --json always does)."""

COLOURS = {"fine": "green", "suspect": "yellow", "broken": "red"}


@click.command(
    cls=common.Command,
    examples="""
    probe replay d/rollout
    probe replay d/npu --weights Qwen2.5-0.5B
    probe replay d/actor --json | jq '.modules[] | select(.verdict != "fine") | .label'
    """,
)
@click.argument("dump", metavar="DUMP", type=click.Path(path_type=Path))
@click.option(
    "--weights",
    metavar="CHECKPOINT",
    type=click.Path(path_type=Path),
    cls=common.GroupedOption,
    help="The checkpoint that ran.  [default: the manifest's, where its weights match]",
)
@click.option("--all", "everything", is_flag=True, cls=common.GroupedOption, help="Show every module, fine ones too.")
@click.option("--json", "as_json", is_flag=True, cls=common.GroupedOption, help="Print JSON on standard output.")
@click.pass_context
def replay(context: click.Context, dump: Path, weights: Path | None, everything: bool, as_json: bool) -> None:
    """Recompute each module of one dump in float64 from its own inputs.

    Needs no second run: what a module stored is held against its stored inputs and the checkpoint's weights, in
    roundings of its dtype. Exit status: 0 every module fits, 1 one is broken or suspect, 2 nothing could be replayed
    or trouble.
    """
    common.one_blas_thread()
    from probe.store.reader import open_dump

    with open_dump(dump) as opened:
        data = replay_dump(opened, weights)
    if as_json:
        from probe.compare.report.model import clean_floats, dumps

        sys.stdout.write(dumps(clean_floats(data)) + "\n")
    else:
        print_replay(data, everything)
    context.exit(0 if data["verdict"] == "fine" else 1)


def replay_dump(dump: Dump, weights: Path | None) -> dict[str, Any]:
    """Return what the replay of an open dump found, as plain data.

    Raises CompareError where no module could be replayed, CheckpointError for weights that cannot be read.
    """
    from probe.compare.replay.run import OTHER_CHECKPOINT, replay_side
    from probe.compare.side import read_side

    if dump.reduced:
        problem = f"a replay needs values, and {dump.path} holds statistics of rows (task statistics)"
        raise CompareError(problem, "record it with task tensor")
    done = replay_side(read_side(dump), "", weights)
    if done.found.foreign:
        raise CheckpointError(
            f"{weights} does not hold the weights of {dump.path}: {done.found.foreign}", OTHER_CHECKPOINT
        )
    if not done.modules:
        reason = done.found.why_not or next(iter(done.skipped.values()), "it stores no tensor with a canonical name")
        raise CompareError(f"no module of {dump.path} could be replayed: {reason}", "see docs/replay.md")
    words = [found.verdict for found in done.modules.values()]
    return {
        "dump": str(dump.path),
        "verdict": next(word for word in ("broken", "suspect", "fine") if word in words),
        "weights": done.found.words,
        "why_not": done.found.why_not,
        "modules": [_plain(found) for found in done.modules.values()],
        "skipped": done.skipped,
    }


def _plain(found: Replayed) -> dict[str, Any]:
    """Return a replayed module as plain data, without the errors of its single rows and the side it has none of."""
    from dataclasses import asdict

    return {
        key: value for key, value in asdict(found).items() if key not in ("keys", "each_row", "relative_rows", "side")
    }


# -- tables -----------------------------------------------------------------------------------------------------------


def print_replay(data: Mapping[str, Any], everything: bool) -> None:
    """Print the modules that do not fit (or all), then a line per kind, what was skipped and the verdict."""
    modules = data["modules"]
    shown = modules if everything else [found for found in modules if found["verdict"] != "fine"]
    cut = shown if everything else shown[:MAX_MODULES]
    if cut:
        common.table(
            f"{_how_many(cut, modules)}, error in roundings of the dtype (allowed)",
            {"module": "left", "verdict": "left", "whole": "right", "worst row": "right", "worst feature": "right"},
            [_line(found) for found in cut],
            left_out=len(shown) - len(cut),
        )
        for found in cut:
            if found["verdict"] != "fine":
                common.say(f"  {found['label']}: {found['reason']}")
    _print_kinds(modules)
    _print_skipped(data)
    words = [found["verdict"] for found in modules]
    counted = ", ".join(f"{words.count(word)} {word}" for word in COLOURS if word in words)
    cut_off = sum(found["toward_zero"] for found in modules)
    counted += f"; {common.count(cut_off, 'result')} rounded toward zero, not to the nearest number" if cut_off else ""
    common.say(
        f"{data['verdict']}: {common.count(len(modules), 'module')} replayed, {counted}", COLOURS[data["verdict"]]
    )


def _how_many(shown: list[dict[str, Any]], modules: list[dict[str, Any]]) -> str:
    whole = common.count(len(modules), "module")
    return whole if len(shown) == len(modules) else f"{len(shown)} of {whole}, those that do not fit"


def _line(found: Mapping[str, Any]) -> tuple[str, ...]:
    figures = (("error", "band"), ("worst_row", "row_band"), ("worst_column", "column_band"))
    return found["label"], found["verdict"], *(f"{found[value]:.3g} ({found[band]:.3g})" for value, band in figures)


def _print_kinds(modules: list[dict[str, Any]]) -> None:
    kinds: dict[str, list[dict[str, Any]]] = {}
    for found in modules:
        kinds.setdefault(found["kind"], []).append(found)
    rows = []
    for kind, members in kinds.items():
        errors = sorted(found["error"] for found in members)
        worst = [f"{max(found[name] for found in members):.3g}" for name in ("error", "worst_row", "worst_column")]
        rows.append((kind, str(len(members)), f"{errors[len(errors) // 2]:.3g}", *worst))
    columns = dict.fromkeys(("modules", "median", "largest", "worst row", "worst feature"), "right")
    common.table("by kind, errors in roundings", {"kind": "left", **columns}, rows)


def _print_skipped(data: Mapping[str, Any]) -> None:
    if data["weights"]:
        common.say(f"weights: {data['weights']}")
    if data["why_not"]:
        common.say(f"no weights: {data['why_not']}", "yellow")
    reasons: dict[str, list[str]] = {}
    for label, reason in data["skipped"].items():
        reasons.setdefault(reason, []).append(label)
    for reason, labels in reasons.items():
        more = " and others" if len(labels) > 1 else ""
        common.say(f"not replayed: {common.count(len(labels), 'tensor')} ({labels[0]}{more}): {reason}")
