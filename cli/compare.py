"""``probe compare``: compare two dumps, or the stages of one job, and exit with the verdict. Never imports torch."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import click

from probe.cli import common
from probe.cli.forms import choose_forms, report_options

judge_group = common.option("Judgement")
names_group = common.option("Names")
replay_group = common.option("Replay")


@click.command(
    cls=common.Command,
    examples="""
    probe compare d/rollout d/actor
    probe compare job --step 20
    probe compare node1/rollout,node2/rollout node1/logprob,node2/logprob
    probe compare d/rollout d/actor --report terminal,html -o report
    probe compare d/rollout d/actor --json | jq .verdict
    probe compare d/gpu d/npu --weights Qwen2.5-0.5B --golden d/reference
    probe compare d/rollout d/actor --explain layers.0.self_attn.q_proj
    """,
)
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", required=False, type=click.Path(path_type=Path))
@report_options
@click.option(
    "--step",
    metavar="N",
    type=click.IntRange(min=0),
    cls=common.GroupedOption,
    help="The training step to compare.  [default: the first that is there]",
)
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
@judge_group("--ray", metavar="ADDRESS", help="Measure tensors on this Ray cluster; auto: the one of this machine.")
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
    b: Path | None,
    forms: str | None,
    output: Path | None,
    as_json: bool,
    no_text: bool,
    force: bool,
    explained: str | None,
    **options: Any,
) -> None:
    """Compare two dumps and say where they first disagree.

    A and B are folders that 'probe dump -o' wrote. A alone is the folder of a job (DUMP_ON=1), whose rollout is
    compared with its logprob stage, or its actor. Each may be several folders with commas between: those of the nodes
    of one run. Exit status: 0 consistent, 1 suspect or divergent, 2 incomparable
    or trouble.
    """
    common.one_blas_thread()
    gc.set_threshold(50_000)  # a report is many objects and few cycles: looking for these costs more than it frees
    from probe.cli.progress import observing
    from probe.compare.report import FORMS
    from probe.compare.run import compare_dumps, exit_status

    if explained is not None:
        chosen = {name: options[name] for name in ("mapping", "across_versions", "step")}
        print_explanation(a, b, explained, as_json, **chosen)
        return
    wanted = choose_forms(FORMS, forms, output, as_json, no_text, force)
    options["replay"] = not options.pop("no_replay")
    with observing() as observer:
        report = compare_dumps(a, b, observer=observer, text=not no_text, **options)
    wanted.give(report)
    context.exit(exit_status(report))


def print_explanation(a: Path, b: Path | None, name: str, as_json: bool, **options: Any) -> None:
    """Print how the tensors called ``name`` are compared; raise UsageError for a name that neither dump has."""
    from probe.compare.explain import explain, in_words
    from probe.compare.report.model import dumps

    found = explain(a, b, name, **options)
    if as_json:
        sys.stdout.write(dumps(found) + "\n")
        return
    for line in in_words(found):
        common.say(line)
