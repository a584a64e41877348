"""``probe dump``: run an engine on prompts or on another dump's tokens and store everything that was captured."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from probe.cli import common
from probe.cli.job import ALL, holdings, run_job
from probe.cli.next import next_command
from probe.cli.progress import observing
from probe.errors import UsageError
from probe.hooks.runners.job import (
    DEFAULT_ENGINE,
    DTYPES,
    ENGINES,
    MAX_SEED,
    PROCESSED,
    RAW,
    DumpJob,
    Parallel,
    Sampling,
    check_job,
)
from probe.hooks.runners.parallel import listed
from probe.hooks.runners.prompts import model_of_sequences
from probe.settings import ENVIRONMENT, STATISTICS, TASKS, TENSOR, TOKENS
from probe.store.reader import Dump, open_dump

DEVICES = ("auto", "cpu", "cuda", "npu")
LAYOUTS = ("padded", "packed")
PRECISE = "transformers"
"""The engine that can run in float64."""

run_group = common.option("What to run")
token_group = common.option("Which tokens")
sampling_group = common.option("Sampling (with --prompts)")
engine_group = common.option("How the engine runs")
parallel_group = common.option("How many processes share the model")
job_group = common.option("What a program of your own records (with -- COMMAND)")
output_group = common.option("Output")

PARALLEL_OPTIONS = tuple(field.name for field in fields(Parallel))
SAMPLING_OPTIONS = ("n", "max_tokens", "temperature", "top_p", "ignore_eos")
ENGINE_OPTIONS = {
    "out_of_process": ("vllm",),
    "layout": ("megatron",),
    "micro_batch_size": ("megatron", "transformers", "fsdp", "fsdp1"),
    "engine_arg": ("vllm", "transformers"),
}
"""Options that only some engines can honour; with another engine they are refused rather than ignored."""


JOB_OPTIONS = ("steps", "seqs", "rows", "layers", "max_bytes")
"""Options that only say something about ``-- COMMAND``."""
SHARED_OPTIONS = ("stage", "prompts_only", "task", "output", "force")
"""Options that mean the same with and without ``-- COMMAND``; every other one is refused beside it."""
COMMAND = "probe.command"
"""Key of the words after ``--`` in click's context."""


class DumpCommand(common.Command):
    """A command that keeps everything after ``--`` as it is typed."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Set the words after the first ``--`` aside and read the options before it."""
        if "--" in args:
            at = args.index("--")
            args, context.meta[COMMAND] = args[:at], args[at + 1 :]
        return super().parse_args(context, args)

    def collect_usage_pieces(self, context: click.Context) -> list[str]:
        """Return the words of the usage line."""
        return [*super().collect_usage_pieces(context), "[-- COMMAND...]"]


class Numbers(click.ParamType):
    """Whole numbers with commas between them, for instance 0,10,20."""

    name = "N,..."

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> str:
        """Return the numbers as one word."""
        words = str(value).replace(" ", "").split(",")
        if not all(word.isdecimal() for word in words):
            self.fail(f"{value!r} is not a list of whole numbers such as 0,10,20", parameter, context)
        return ",".join(words)


class EngineArgument(click.ParamType):
    """KEY=VALUE: the value is read as JSON where it is JSON, else as text."""

    name = "KEY=VALUE"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> tuple[str, Any]:
        """Return (key, value); dashes in the key become underscores."""
        if isinstance(value, tuple):
            return value
        key, equals, text = value.partition("=")
        key = key.strip().removeprefix("--").replace("-", "_")
        if not equals or not key.isidentifier():
            self.fail(f"{value!r} is not KEY=VALUE", parameter, context)
        try:
            return key, json.loads(text)
        except ValueError:
            return key, text


def job_option(setting: str, type: click.ParamType | None = None) -> dict[str, Any]:
    """Return what click gets for an option that is a setting's variable (probe.settings.ENVIRONMENT)."""
    metavar = {} if type else {"metavar": "N"}
    return {"type": type or click.IntRange(min=0), "envvar": ENVIRONMENT[setting], "show_envvar": True, **metavar}


@click.command(
    cls=DumpCommand,
    examples="""
    probe dump --stage rollout --model Qwen2.5-0.5B --prompts prompts.txt -o d/rollout
    probe dump --stage actor --from d/rollout -o d/actor
    probe dump --stage actor --from d/rollout --engine transformers --dtype float32 -o d/reference
    probe dump --stage actor --from d/rollout --tp 2 --sp -o d/actor-tp2
    probe dump --stage rollout --from d/rollout --force-decode -o d/again
    probe dump --stage actor --from d/rollout --noise -o d/noise
    probe dump --stage reference --from d/rollout --dtype float64 -o d/golden
    probe dump --stage all -o d -- python train.py
    """,
)
@run_group(
    "--stage",
    type=click.Choice((*DEFAULT_ENGINE, ALL)),
    help="Which side of the training this is; all (with -- COMMAND): as each process finds out.  [default with "
    "-- COMMAND: all]",
)
@run_group(
    "--engine",
    metavar="|".join(ENGINES),
    help="What runs the model.  [default: vllm for rollout, megatron for actor and reference, transformers in float64]",
)
@run_group(
    "--model",
    type=click.Path(path_type=Path),
    help="Hugging Face checkpoint directory.  [default: the model of --from]",
)
@token_group("--prompts", type=click.Path(path_type=Path), help="Prompts: a .txt (one a line) or .jsonl file.")
@token_group(
    "--from",
    "source",
    type=click.Path(path_type=Path),
    help="Dump whose tokens are run again, or a file of 'probe tokens --worst'.",
)
@token_group(
    "--force-decode",
    is_flag=True,
    help="With --from and vllm: feed the response through decode steps instead of one prefill.",
)
@token_group(
    "--prompts-only",
    is_flag=True,
    envvar="PROMPTS_ONLY",
    show_envvar=True,
    help="Store the rows of prompt tokens only.",
)
@sampling_group(
    "--n", metavar="N", type=click.IntRange(min=1), default=1, show_default=True, help="Responses per prompt."
)
@sampling_group(
    "--max-tokens", metavar="N", type=click.IntRange(min=1), default=32, show_default=True, help="Longest response."
)
@sampling_group(
    "--temperature", metavar="X", type=common.FiniteRange(min=0), default=1.0, show_default=True, help="0 is greedy."
)
@sampling_group(
    "--top-p",
    metavar="X",
    type=common.FiniteRange(0, 1, min_open=True),
    default=1.0,
    show_default=True,
    help="Nucleus sampling; 1 is off.",
)
@sampling_group("--ignore-eos", is_flag=True, help="Generate --max-tokens even past an end-of-text token.")
@sampling_group(
    "--seed",
    metavar="N",
    type=click.IntRange(0, MAX_SEED),
    default=0,
    show_default=True,
    help="Seed of the sampling, and of --noise.",
)
@engine_group(
    "--dtype", type=click.Choice(("auto", *DTYPES)), default="auto", show_default=True, help="auto: the checkpoint's."
)
@engine_group("--device", type=click.Choice(DEVICES), default="auto", show_default=True, help="auto: the best here.")
@engine_group(
    "--logprobs-mode",
    type=click.Choice((RAW, PROCESSED)),
    default=RAW,
    show_default=True,
    help="Log-probs before or after temperature and top-p (with --from: those of the rollout).",
)
@engine_group(
    "--micro-batch-size",
    metavar="N",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    help="megatron, transformers, fsdp: sequences per forward.",
)
@engine_group(
    "--layout",
    type=click.Choice(LAYOUTS),
    default="padded",
    show_default=True,
    help="megatron: pad the sequences of a micro-batch, or pack them end to end.",
)
@engine_group(
    "--engine-arg",
    "engine_arg",
    type=EngineArgument(),
    multiple=True,
    help="vllm, transformers: any further argument of the engine; may be repeated.",
)
@engine_group(
    "--noise",
    is_flag=True,
    help="With --from: re-round every module's output at random, to measure what rounding does (compare --floor).",
)
@engine_group("--out-of-process", is_flag=True, help="vllm: let it use processes of its own, as in production.")
@parallel_group("--tp", metavar="N", type=click.IntRange(min=1), help="megatron, vllm: tensor-parallel ranks.")
@parallel_group("--pp", metavar="N", type=click.IntRange(min=1), help="megatron, vllm: pipeline stages.")
@parallel_group("--vpp", metavar="N", type=click.IntRange(min=1), help="megatron: interleaved chunks per stage.")
@parallel_group("--cp", metavar="N", type=click.IntRange(min=1), help="megatron: context-parallel ranks.")
@parallel_group(
    "--ep",
    metavar="N",
    type=click.IntRange(min=1),
    help="megatron: ranks that share the experts (each is a data-parallel rank); vllm: as --tp.",
)
@parallel_group(
    "--dp",
    metavar="N",
    type=click.IntRange(min=1),
    help="megatron, fsdp, fsdp1: data-parallel ranks.  [default: as --ep; 2 for fsdp and fsdp1]",
)
@parallel_group("--sp", is_flag=True, help="megatron: sequence parallelism between the tensor-parallel ranks.")
@job_group(
    "--steps",
    **job_option("step", type=Numbers()),
    help="Steps to record.  [default: the first; with --task tokens every one]",
)
@job_group("--seqs", **job_option("seqs"), help="Sequences whose tensors are stored, 0 for all.  [default: 4]")
@job_group("--rows", **job_option("rows"), help="Tokens of each whose tensors are stored, 0 for all.  [default: 256]")
@job_group("--layers", **job_option("layers", type=Numbers()), help="Layers whose tensors are stored.  [default: all]")
@job_group("--max-bytes", **job_option("max_bytes"), help="Bytes of tensors per file, 0 for all.  [default: 2 GB]")
@output_group(
    "--task",
    **job_option("task", type=click.Choice(TASKS)),
    help="statistics: of each row of each tensor, in place of its values; tokens (with -- COMMAND): no tensors, at "
    "full speed.  [default: tensor]",
)
@output_group("-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder of the new dump.")
@output_group("--force", is_flag=True, help="Replace a dump that is already there.")
@click.pass_context
def dump(context: click.Context, **options: Any) -> None:
    """Run a model on an engine and store its tensors, rows and log-probs.

    A rollout generates from --prompts; an actor or a reference recomputes the tokens of another dump, given with
    --from, so that the two can be compared row by row. With -- COMMAND a program of your own is run unchanged, and
    what its engines and trainers do is stored: its processes are reached through the environment.
    """
    command = context.meta.get(COMMAND)
    _refuse_ignored(context, command)
    if command is not None:
        context.exit(run_job(command, options))
    if options["stage"] is None:
        raise click.MissingParameter(ctx=context, param=next(p for p in context.command.params if p.name == "stage"))
    job = make_job(options)
    check_job(job)
    _refuse_of_other_engines(context, job)
    if options["out_of_process"]:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    _tame_engines(job)
    from probe.hooks.runners.run import run_dump

    with observing() as observer:
        path = run_dump(job, observer)
    with open_dump(path) as done:
        common.say(f"wrote {describe(done)}")
        common.say(f"next: {next_command(done, job)}")


def make_job(options: dict[str, Any]) -> DumpJob:
    """Return the job that the options describe; the model defaults to that of the dump given with --from."""
    stage, source = options["stage"], options["source"]
    if options["prompts"] is not None and source is not None:
        raise UsageError("--prompts and --from exclude each other", "give one of them")
    model = options["model"]
    if model is None and source is None:
        raise UsageError("no model was given", "add --model PATH, or --from DUMP to use the model of that dump")
    if model is None:
        model = _model_of(source)
    sampling = {name: options[name] for name in (*SAMPLING_OPTIONS, "seed", "logprobs_mode")}
    engine = options["engine"] or (PRECISE if options["dtype"] == "float64" and source else DEFAULT_ENGINE[stage])
    sizes = {name: options[name] for name in PARALLEL_OPTIONS if options[name]}
    if engine in ENGINES:
        sizes.setdefault("dp", ENGINES[engine].dp)
    same = ("prompts", "source", "dtype", "device", "prompts_only", "force_decode", "micro_batch_size", "layout")
    return DumpJob(
        stage=stage,
        engine=engine,
        model=model,
        output=options["output"],
        sampling=Sampling(**sampling),
        parallel=Parallel(**sizes),
        engine_args=dict(options["engine_arg"]),
        force=options["force"],
        task=STATISTICS if options["task"] == STATISTICS else TENSOR,
        noise=options["seed"] if options["noise"] else None,
        **{name: options[name] for name in same},
    )


def _model_of(source: Path) -> Path:
    if source.is_file():
        path: Any = model_of_sequences(source)
    else:
        with open_dump(source) as dump:
            path = (dump.manifest.get("model") or {}).get("path")
    if not path:
        raise UsageError(f"{source} does not say which model made it", "add --model PATH")
    return Path(path)


def _typed(context: click.Context) -> dict[str, str]:
    """Return the options on the command line: parameter -> as it is typed."""
    return {
        p.name: p.opts[0]
        for p in context.command.params
        if p.name and context.get_parameter_source(p.name) is ParameterSource.COMMANDLINE
    }


def _refuse_ignored(context: click.Context, command: Sequence[str] | None) -> None:
    """Refuse options that belong to the other form of the command: with, or without, a program of one's own."""
    for name, option in _typed(context).items():
        if command is None and name in JOB_OPTIONS:
            raise UsageError(f"{option} has no effect without a program", "add -- COMMAND..., or leave it out")
        if command is None and name == "task" and context.params["task"] == TOKENS:
            raise UsageError(f"{option} {TOKENS} has no effect without a program", "add -- COMMAND..., or leave it out")
        if command is not None and name not in (*JOB_OPTIONS, *SHARED_OPTIONS):
            raise UsageError(f"{option} has no effect on a program of your own (-- COMMAND)", "leave it out")
    if command is None and context.params.get("stage") == ALL:
        raise UsageError("--stage all records a program of your own", "add -- COMMAND...")


def _refuse_of_other_engines(context: click.Context, job: DumpJob) -> None:
    """Refuse options that were typed but could have no effect on this job."""
    typed = _typed(context)
    for name, engines in ENGINE_OPTIONS.items():
        if name in typed and job.engine not in engines:
            raise UsageError(f"{typed[name]} has no effect on engine {job.engine}", f"it is for {listed(engines)}")
    for name in SAMPLING_OPTIONS:
        if name in typed and job.source is not None:
            raise UsageError(f"{typed[name]} has no effect with --from, which samples nothing", "leave it out")


def _tame_engines(job: DumpJob) -> None:
    """Keep engines off standard output, and without -v keep their advice about speed off standard error too."""
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    if common.State.verbosity >= common.VERBOSE:
        return
    if common.State.verbosity <= common.QUIET:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers reads it when it is imported
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_LOGS", "-all")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # for the processes that an engine starts
    warnings.simplefilter("ignore")
    if job.engine == "vllm":
        job.engine_args.setdefault("use_tqdm_on_load", False)


def describe(dump: Dump) -> str:
    """Return one line: where a dump is and how much it holds."""
    return f"{dump.path}: {holdings(dump, dump.path)}"
