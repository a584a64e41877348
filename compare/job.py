"""The folder of one job: which of its stages and steps are compared with each other.

A job that dumps by environment (docs/jobs.md) leaves ``JOB/rollout/stepN``, ``JOB/logprob/stepN`` and so on. One run is
compared with itself: what the rollout engine computed of its tokens with what the trainer recomputed of them.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from probe.compare.tokens.rl import mask_responses
from probe.errors import UsageError
from probe.settings import STAGES
from probe.store.reader import Dump, open_dump, roots_of, step_files, step_of, steps_in

PAIRS = (("rollout", "logprob"), ("rollout", "actor"))
"""Stages that are compared with each other, the first pair of which a job holds both."""
TRAINER = "update"
"""The stage whose dump holds what the trainer knows of each token (advantages, returns, ...)."""

Steps = dict[int, list[Path]]
"""Step -> its folders, one of each root that has it."""


@dataclass(frozen=True)
class JobPair:
    """The two sides of a job's comparison: ``a`` and ``b`` are paths for open_dump, each of one step of one stage.

    ``stages``: of ``a`` and ``b``; ``later``: the other steps that both hold; ``update``: the step's :data:`TRAINER`
    dump, where there is one; ``operands``: what a command line repeats to compare the same.
    """

    folder: Path
    stages: tuple[str, str]
    step: int
    a: Path
    b: Path
    update: Path | None
    later: tuple[int, ...]
    chosen: bool

    @property
    def operands(self) -> str:
        """Return the arguments that a command needs to compare this pair again."""
        return f"{shlex.quote(str(self.folder))} --step {self.step}"


@dataclass(frozen=True)
class OpenPair:
    """The dumps of a :class:`JobPair`, open."""

    pair: JobPair
    a: Dump
    b: Dump
    update: Dump | None


def stages_of(path: str | Path) -> dict[str, Steps]:
    """Return stage -> step -> folders that hold dump files, of a job's folder or of several (``JOB1,JOB2``).

    A stage's steps lie in ``JOB/STAGE/stepN``, or in ``JOB/STAGE/STAGE/stepN`` where the stages are dumps of their own.
    Raises UsageError where some of several folders hold stages and another one holds none.
    """
    found: dict[str, Steps] = {}
    empty = []
    for root in roots_of(path):
        held = {stage: _steps_of(root / stage) or _steps_of(root / stage / stage) for stage in STAGES}
        empty += [] if any(held.values()) else [root]
        for stage, folders in held.items():
            for folder in folders:
                found.setdefault(stage, {}).setdefault(step_of(folder), []).append(folder)
    if found and empty:
        what = "holds no stage of a job (STAGE/stepN/*.h5)" if empty[0].is_dir() else "is no folder"
        raise UsageError(f"{empty[0]}, one of {path}, {what}", "name the job's folder of each node")
    return {stage: dict(sorted(steps.items())) for stage, steps in found.items()}


def _steps_of(stage: Path) -> list[Path]:
    return [folder for folder in steps_in(stage) if step_files(folder)]


def _in_all(stage: str, steps: Steps, wanted: int | None) -> Steps:
    """Return the steps that each of the folders holds which hold the stage; UsageError where ``wanted`` is in some."""
    places = dict.fromkeys(folder.parent for folders in steps.values() for folder in folders)
    whole = {step: folders for step, folders in steps.items() if len(folders) == len(places)}
    if (wanted in steps and wanted not in whole) or not whole:
        said = ", ".join(f"{place} ({_listed([*map(step_of, _steps_of(place))])})" for place in places)
        which = f"step {wanted} of {stage}" if whole else f"no step of {stage}"
        raise UsageError(
            f"{which} is {'not ' if whole else ''}in all of {said}", "name folders that hold the same steps"
        )
    return whole


def is_job(path: str | Path) -> bool:
    """Tell whether a path is a job's folder: one that holds several stages."""
    return len(stages_of(path)) > 1


def pair_of(path: str | Path, step: int | None = None) -> JobPair:
    """Return which dumps of a job's folder are compared: of ``step``, else of the first step that both sides hold.

    Raises UsageError where the folder is no job's, holds no two stages that belong together, or not that step of both.
    """
    folder = Path(path)
    stages = stages_of(folder)
    found = next((pair for pair in PAIRS if all(stage in stages for stage in pair)), None)
    if found is None:
        raise _no_pair(folder, stages)
    a, b = (_in_all(stage, stages[stage], step) for stage in found)
    common = sorted(a.keys() & b.keys())
    if not common:
        said = f"{found[0]} of {_listed(a)} and {found[1]} of {_listed(b)}, no step of both"
        raise UsageError(f"{folder} holds {said}", "record the same steps of each stage (PROBE_STEPS)")
    if step is not None and step not in common:
        raise UsageError(
            f"{folder} does not hold step {step} of both {' and '.join(found)}", f"it holds {_listed(common)}"
        )
    chosen = common[0] if step is None else step
    update = stages.get(TRAINER, {}).get(chosen)
    return JobPair(
        folder,
        found,
        chosen,
        _path(a[chosen]),
        _path(b[chosen]),
        None if update is None else _path(update),
        tuple(number for number in common if number != chosen),
        step is not None,
    )


def carried_pair(path: str | Path, step: int | None = None) -> tuple[Path, Path] | None:
    """Return the (update, log-prob pass) of one step of a job whose rollout was not recorded, None for any other.

    The rollout's log-probs are then those that the trainer was given and stores with its update. ``step``: by default
    the first that both hold.
    """
    stages = stages_of(path)
    if PAIRS[0][0] in stages or not {TRAINER, PAIRS[0][1]} <= stages.keys():
        return None
    both = [stages[TRAINER], stages[PAIRS[0][1]]]
    common = sorted(both[0].keys() & both[1].keys())
    chosen = step if step is not None else next(iter(common), None)
    if chosen is None or chosen not in common:
        return None
    return _path(both[0][chosen]), _path(both[1][chosen])


def compare_command(path: str | Path, readable: Mapping[str, Collection[int]]) -> str | None:
    """Return the command that compares a job's folder, None where it would be refused.

    ``readable``: stage -> the steps of which something can be read.
    """
    try:
        pair = pair_of(path)
    except UsageError:
        return None
    both = [step for step in (pair.step, *pair.later) if all(step in readable.get(stage, ()) for stage in pair.stages)]
    if not both:
        return None
    return f"probe compare {shlex.quote(str(path))}" + ("" if both[0] == pair.step else f" --step {both[0]}")


def _no_pair(folder: Path, stages: Mapping[str, Steps]) -> UsageError:
    one = "name a job's folder, or two dumps"
    wanted = " or ".join(f"{a} and {b}" for a, b in PAIRS)
    if not stages:
        if not folder.exists() and "," not in str(folder):
            return UsageError(f"there is no {folder}", one)
        what = "is a dump of one stage" if _steps_of(folder) else "holds no dump of a job (STAGE/stepN/*.h5)"
        return UsageError(f"{folder} {what}", one)
    held = " and ".join(stages)
    if len(stages) == 1:
        return UsageError(f"{folder} holds {held} alone, not {wanted}", "give the dump to compare it with as well")
    if TRAINER in stages and PAIRS[0][1] in stages:
        compares = f"'probe tokens {shlex.quote(str(folder))}' compares the log-probs that its rollout gave the trainer"
        return UsageError(f"{folder} holds {held}, not {wanted}", compares)
    firsts = (next(iter(steps.values()))[0].parent for steps in stages.values())
    example = " ".join(shlex.quote(str(stage)) for stage, _ in zip(firsts, range(2)))
    return UsageError(f"{folder} holds {held}, not {wanted}", f"name two dumps, such as 'probe compare {example}'")


def _path(folders: list[Path]) -> Path:
    return Path(",".join(map(str, folders)))


def _listed(steps: Mapping[int, object] | list[int]) -> str:
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"


@contextmanager
def open_pair(path: str | Path, step: int | None = None) -> Iterator[OpenPair]:
    """Open the dumps that are compared of a job's folder (:func:`pair_of`); they are closed when the block ends.

    ``unread`` of both dumps lists the later steps' folders where no step was asked for. Response tokens that the
    update masks (what a tool returned) are none of the two dumps' responses.
    """
    pair = pair_of(path, step)
    with ExitStack() as stack:
        a, b = (stack.enter_context(open_dump(side)) for side in (pair.a, pair.b))
        update = None if pair.update is None else stack.enter_context(open_dump(pair.update))
        if update is not None:
            mask_responses((a, b), update)
        if not pair.chosen:
            for dump in (a, b):
                dump.unread = [dump.roots[0].with_name(f"step{number}") for number in pair.later]
        yield OpenPair(pair, a, b, update)


@contextmanager
def open_sides(
    path_a: str | Path, path_b: str | Path | None, step: int | None = None
) -> Iterator[tuple[Dump, Dump, OpenPair | None]]:
    """Open two dumps, or those of a job where there is no ``path_b``; yield (a, b, the job's pair or None)."""
    if path_b is None:
        with open_pair(path_a, step) as opened:
            yield opened.a, opened.b, opened
        return
    with open_dump(path_a, step) as a, open_dump(path_b, step) as b:
        yield a, b, None
