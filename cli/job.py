"""``probe dump -- COMMAND``: run somebody's own program with capture on, then say what it recorded, or why nothing."""

from __future__ import annotations

import collections
import os
import shlex
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from probe.cli import common
from probe.errors import EmptyDumpError, ProbeError, UsageError
from probe.settings import ENVIRONMENT, STAGES
from probe.store.reader import Dump, open_dump, step_files, step_of, steps_in
from probe.store.schema import PARTIAL_SUFFIX

ALL = "all"
"""``--stage all``: each process finds out by itself which stages it is part of."""
SETTINGS = {
    "task": "task",
    "steps": "step",
    "seqs": "seqs",
    "rows": "rows",
    "layers": "layers",
    "max_bytes": "max_bytes",
}
"""Option -> the setting whose variable carries it."""
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
FROM_TERMINAL = 0x80
"""``si_code`` of a signal that the kernel sent (SI_KERNEL): the program, in the same group, has got it too."""
SETTLING = 3.0
"""Seconds for processes that outlive the command a little (engines, Ray workers) to complete their files."""
SHOWN_STEPS, SHOWN_REASONS = 4, 8


def run_job(command: Sequence[str], options: Mapping[str, Any]) -> int:
    """Run a program under ``DUMP_ON=1`` and return its exit status; what it recorded is summed up afterwards.

    Raises UsageError where it cannot be run, OutputExistsError, and EmptyDumpError with the reason where it ended well
    and nothing was recorded.
    """
    from probe.hooks.runners.run import output_folder

    if not command:
        raise UsageError("there is no command after --", "add the program to run, for instance -- python train.py")
    output: Path = options["output"]
    with output_folder(output, options["force"]):
        status = execute(command, environment(options, os.environ))
        _settle(output)
        if status:
            common.note(f"the command {_ending(status)}")
        found = captured(output)
        if not found and not status:
            raise nothing_recorded(output)
    if found:
        _sum_up(output, found)
    else:
        common.note(str(nothing_recorded(output)))
    return status


def environment(options: Mapping[str, Any], inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the program's environment: the inherited one, with capture on and what the options say."""
    made = {**inherited, "DUMP_ON": "1", "PROBE_DUMP_DIR": str(options["output"].resolve())}
    if options["prompts_only"]:
        made["PROMPTS_ONLY"] = "1"
    if options["stage"] == ALL:
        made.pop(ENVIRONMENT["stage"], None)
    elif options["stage"] is not None:
        made[ENVIRONMENT["stage"]] = options["stage"]
    given = {ENVIRONMENT[key]: options[name] for name, key in SETTINGS.items() if options[name] is not None}
    return made | {name: str(value) for name, value in given.items()}


# -- the program -------------------------------------------------------------------------------------------------------


def execute(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a program on this terminal, pass signals on to it, and return its exit status as a shell reports it.

    Raises UsageError where the program cannot be started.
    """
    watched = {signal.SIGCHLD, *FORWARDED}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    try:
        defaults = (signal.SIGPIPE, signal.SIGXFSZ)  # Python ignores them, a program expects them
        try:
            child = os.posix_spawnp(command[0], [*command], environ, setsigmask=before, setsigdef=defaults)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"{command[0]} cannot be run ({reason})", "check the command after --") from None
        return _awaited(child, watched)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _awaited(child: int, watched: set[signal.Signals]) -> int:
    while True:
        heard = signal.sigwaitinfo(watched)
        if heard.si_signo != signal.SIGCHLD:
            if heard.si_code != FROM_TERMINAL:
                os.kill(child, heard.si_signo)
            continue
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _ending(status: int) -> str:
    names = {int(number): number.name for number in signal.Signals}
    how = f" ({names[status - 128]})" if status - 128 in names else ""
    return f"ended with status {status}{how}"


def _settle(output: Path) -> None:
    deadline = time.monotonic() + SETTLING
    while time.monotonic() < deadline and any(output.glob(f"*/step*/*{PARTIAL_SUFFIX}")):
        time.sleep(0.1)


# -- what it recorded --------------------------------------------------------------------------------------------------


def captured(output: Path) -> dict[str, list[int]]:
    """Return the steps of each stage of which a job's folder holds files, in order."""
    found: dict[str, list[int]] = {}
    for stage in STAGES:
        steps = [step_of(folder) for folder in steps_in(output / stage) if step_files(folder)]
        readable = [step for step in steps if _holds_something(output / stage, step)]
        if readable:
            found[stage] = readable
    return found


def _holds_something(stage: Path, step: int) -> bool:
    try:
        with open_dump(stage, step=step):
            return True
    except EmptyDumpError:
        return False
    except ProbeError:
        return True  # said where it is summed up


def _sum_up(output: Path, found: Mapping[str, Sequence[int]]) -> None:
    for stage, steps in found.items():
        for step in steps[:SHOWN_STEPS]:
            common.note(f"{stage} step {step}: {_summary(output / stage, step)}")
        if len(steps) > SHOWN_STEPS:
            common.note(f"{stage}: {common.count(len(steps) - SHOWN_STEPS, 'more step')}, up to step {steps[-1]}")
    for reason in reasons(output):
        common.note(reason)
    common.note(f"next: {next_command(output, found)}")


def _summary(stage: Path, step: int) -> str:
    try:
        with open_dump(stage, step=step) as dump:
            incomplete = "; not complete: a process ended before it could close its file" if not dump.complete else ""
            return holdings(dump, stage / f"step{step}") + incomplete
    except ProbeError as error:
        return f"cannot be read: {error}"


def holdings(dump: Dump, folder: Path) -> str:
    """Return in words how much a dump holds whose files lie in ``folder``."""
    prompt = sum(s.prompt_len for s in dump.sequences)
    response = sum(max(0, s.length - s.prompt_len) for s in dump.sequences)
    rows = max((t.rows for t in dump.tensors.values() if t.has_rows), default=0)
    held = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    sequences = f"{common.count(len(dump.sequences), 'sequence')} ({prompt} prompt + {response} response tokens)"
    counts = (sequences, common.count(rows, "row"), common.count(len(dump.tensors), "tensor"), common.size(held))
    return ", ".join(counts)


def next_command(output: Path, found: Mapping[str, Sequence[int]]) -> str:
    """Return the command that a person will want next."""
    from probe.compare.job import compare_command

    first, comparison = next(iter(found)), compare_command(output, found)
    if comparison is not None:
        return comparison
    if "rollout" in found:
        other = shlex.quote(str(output.with_name(f"{output.name}-actor")))
        return f"probe dump --stage actor --from {shlex.quote(str(output / 'rollout'))} -o {other}"
    return f"probe show {shlex.quote(str(output / first))}"


def reasons(output: Path) -> list[str]:
    """Return what processes of the job said is not recorded and why: each sentence once, the most frequent first."""
    from probe.hooks.jobs.log import TROUBLE, read_lines

    said = collections.Counter(line.text for line in read_lines(output) if line.kind == TROUBLE)
    counted = [f"{text} ({count} processes)" if count > 1 else text for text, count in said.most_common()]
    left_out = [f"and {len(counted) - SHOWN_REASONS} more reasons"] if len(counted) > SHOWN_REASONS else []
    return counted[:SHOWN_REASONS] + left_out


def nothing_recorded(output: Path) -> EmptyDumpError:
    """Return the error for a program that recorded nothing, with the reason as far as its processes said one."""
    from probe.hooks.jobs.log import HOOKED, read_lines

    known = reasons(output)
    if known:
        return EmptyDumpError("the command recorded nothing", "; ".join(known))
    hooked = sorted({line.text for line in read_lines(output) if line.kind == HOOKED})
    if hooked:
        problem = f"the command recorded nothing: it imported {', '.join(hooked)}, but no forward of a model was seen"
        return EmptyDumpError(problem, "check that it runs a model, at a step that is recorded (PROBE_STEPS)")
    return EmptyDumpError(
        "the command recorded nothing: none of its processes imported an engine or trainer (transformers, megatron, "
        "vllm, verl) in a Python where probe-rl is installed",
        "install probe-rl into the Python that the command runs",
    )
