"""``probe tokens``: compare log-probs alone, from dumps or files, and say what they do to the PPO update. No torch."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from probe.cli import common
from probe.cli.forms import choose_forms, report_options
from probe.errors import OutputExistsError, UsageError

source_group = common.option("Sources")
update_group = common.option("PPO update")
grid_group = common.option("Grid")

UPDATE = ("clip_epsilon", "kl_coef", "cliprange_value", "vf_coef", "early_stop_kl", "accumulation_steps")
"""Options that are the fields of probe.compare.ppo.PPOConfig, which holds their defaults and checks them."""
REPEATED = ("step", "ppo", *UPDATE, "temperature", "top_p", "trust", "loose", "samples", "positions", "tokenizer")
"""Options that a command to run next repeats where they were given."""


@click.command(
    cls=common.Command,
    examples="""
    probe tokens d/rollout d/actor
    probe tokens job --step 20
    probe tokens job --worst 4 -o seqs.jsonl
    probe tokens rollout.npz actor.npz --report html
    probe tokens rollout.npz actor.npz --ppo advantages.npz --clip-epsilon 0.2
    probe tokens prob_diff/ --json | jq '.tokens.by_step[].mean_prob_diff'
    """,
)
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("source2", required=False, type=click.Path(path_type=Path))
@report_options
@source_group(
    "--step",
    metavar="N",
    type=click.IntRange(min=0),
    help="The training step of dumps.  [default: the first that is there]",
)
@click.option(
    "--worst",
    metavar="N",
    type=click.IntRange(min=1),
    cls=common.GroupedOption,
    help="Write the N sequences that differ most to -o, a file for 'probe dump --from'.",
)
@source_group("--temperature", metavar="X", type=float, help="Temperature that the rollout of files sampled with.")
@source_group("--top-p", metavar="X", type=float, help="Top-p that the rollout of files sampled with.")
@source_group(
    "--tokenizer",
    metavar="PATH",
    type=click.Path(path_type=Path),
    help="tokenizer.json, or a folder with one: spells the ids of files out.",
)
@source_group("--trust", is_flag=True, help="Unpickle verl's gen_batch.dp: that can run any code that is in the file.")
@source_group("--loose", is_flag=True, help="Ranges of mixture-of-experts models and quantised rollouts.")
@update_group(
    "--ppo",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="File or dump with advantages, values, returns, reference log-probs where the sources do not hold them.",
)
@update_group("--clip-epsilon", metavar="X", type=float, help="The ratio is clipped to 1 -+ X.  [default: 0.2]")
@update_group("--kl-coef", metavar="X", type=float, help="Weight of the reference KL.  [default: 0.02]")
@update_group("--cliprange-value", metavar="X", type=float, help="How far a value may move.  [default: 0.2]")
@update_group("--vf-coef", metavar="X", type=float, help="Weight of the value loss.  [default: 0.5]")
@update_group("--early-stop-kl", metavar="X", type=float, help="A KL above it stops the update.  [default: 0.25]")
@update_group("--accumulation-steps", metavar="N", type=int, help="Micro-batches of one update.  [default: 1]")
@grid_group("--samples", metavar="N", type=click.IntRange(1, 64), help="Rows of the grid.  [default: 8]")
@grid_group("--positions", metavar="N", type=click.IntRange(1, 64), help="Columns of the grid.  [default: 10]")
@click.pass_context
def tokens(
    context: click.Context,
    source: Path,
    source2: Path | None,
    forms: str | None,
    output: Path | None,
    as_json: bool,
    no_text: bool,
    force: bool,
    **options: Any,
) -> None:
    """Compare log-probs token by token, and what they do to a PPO update.

    SOURCE is a dump, the folder of a job (DUMP_ON=1), a folder of verl's per-token monitor (prob_diff_step_N.npy), or
    an npz, parquet or jsonl file with log-probs of both sides. With SOURCE2 the first is the rollout's, the second the
    actor's. Exit status: 0 consistent, 1 suspect or divergent, 2 incomparable or trouble.
    """
    from probe.compare.ppo import PPOConfig
    from probe.compare.report.tokens import TOKEN_FORMS
    from probe.compare.run import exit_status
    from probe.compare.tokens.run import compare_token_sources

    worst_file = sequences_file(options["worst"], forms, output, force)
    wanted = choose_forms(TOKEN_FORMS, forms, None if worst_file else output, as_json, no_text, force)
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    words = repeated(given)
    config = PPOConfig(**{name: given.pop(name) for name in UPDATE if name in given})
    paths = [path for path in (source, source2) if path is not None]
    if len(paths) == 2 and paths[0].absolute() == paths[1].absolute():
        raise UsageError(f"{paths[0]} is given twice", "give it once where it holds both sides")
    given |= {"worst_file": worst_file, "text": not no_text, "words": words}
    report = compare_token_sources(paths, config=config, **given)
    wanted.give(report)
    if worst_file is not None:
        common.note(f"wrote {worst_file}: run these sequences again with 'probe dump --from {worst_file}'")
    context.exit(exit_status(report))


def sequences_file(worst: int | None, forms: str | None, output: Path | None, force: bool) -> Path | None:
    """Return the file that ``--worst`` writes, or None without it; raise where -o cannot be that file."""
    if worst is None:
        return None
    if output is None:
        raise UsageError("--worst writes a file", "add -o FILE.jsonl")
    if forms is not None:
        raise UsageError(
            "with --worst, -o is the file of the sequences, and no report is written", "leave out --report"
        )
    if output.is_dir() or not output.absolute().parent.is_dir():
        what = "is a folder" if output.is_dir() else "would lie in a folder that is not there"
        raise UsageError(f"{output} {what}", "name a file, such as seqs.jsonl")
    if output.exists() and not force:
        raise OutputExistsError(f"{output} already exists", "choose another -o or add --force")
    try:
        with tempfile.TemporaryFile(dir=output.absolute().parent):
            return output
    except OSError as error:
        raise UsageError(f"{output} cannot be written ({error.strerror or error})", "choose another -o") from None


def repeated(given: Mapping[str, Any]) -> str:
    """Return the options that were given as a command line repeats them."""
    words = []
    for name in REPEATED:
        if name in given:
            value = given[name]
            words.append(f"--{name.replace('_', '-')}" + ("" if value is True else f" {shlex.quote(str(value))}"))
    return " ".join(words)
