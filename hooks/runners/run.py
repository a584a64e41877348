"""A dump from start to end: check, read sequences, run the engine, add tokens and log-probs, complete the dump."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import logging
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from probe.checkpoint import Checkpoint
from probe.errors import OutputExistsError, UsageError
from probe.hooks.causality import declared, prompt_facts
from probe.hooks.jobs.log import NAME as ACTIVATION_LOG
from probe.hooks.jobs.log import read_lines
from probe.hooks.runners.job import (
    PROCESSED,
    DumpJob,
    Observer,
    TokenSequence,
    batching,
    check_job,
    check_positions,
    resolve_dtype,
    step_folder,
)
from probe.hooks.runners.parallel import check_parallel, completed
from probe.hooks.runners.tokens import write_tokens
from probe.manifest import make_manifest, write_manifest
from probe.settings import STAGES
from probe.store.journal import JOURNAL_SUFFIX
from probe.store.reader import open_dump
from probe.store.schema import MANIFEST_NAME, PARTIAL_SUFFIX, Sequence

log = logging.getLogger("probe")

ASIDE = ".replaced-"
DUMP_SUFFIXES = (".h5", ".h5" + PARTIAL_SUFFIX, JOURNAL_SUFFIX)
_ASIDE_NAME = re.compile(re.escape(ASIDE) + r"\w+")
_TEMPORARY_NAME = re.compile(rf"\.({re.escape(MANIFEST_NAME)}|step)\.\d+")
_STEP_NAME = re.compile(r"step\d+")
JOB_FILES, JOB_FOLDERS = ("step", ACTIVATION_LOG), ("chosen",)
"""What the dump of a job that somebody else wrote holds beside its stages (probe.hooks.jobs)."""


def run_dump(job: DumpJob, observer: Observer = lambda what, done, total: None) -> Path:
    """Run one dump and return its folder; on an error nothing half-written is left and a replaced dump is restored."""
    engine = check_job(job)
    checkpoint = Checkpoint(job.model)
    job = replace(job, parallel=completed(job.engine, job.parallel))
    check_parallel(job, engine, checkpoint.config)
    with output_folder(job.output, job.force):
        sequences, sampling = _sequences(job, checkpoint)
        check_positions(job, sequences, checkpoint.config)
        manifest = make_manifest(
            job.stage,
            job.engine,
            "",
            {"path": str(job.model.resolve()), "architecture": checkpoint.architecture, "config": checkpoint.config},
            dtype=resolve_dtype(job.dtype, checkpoint.config),
            prompts_only=job.prompts_only,
            task=job.task,
            sampling=sampling,
            logprobs_mode=job.sampling.logprobs_mode,
            source_dump=None if job.source is None else str(job.source.resolve()),
            forced="decode" if job.force_decode else "prefill" if job.source and job.stage == "rollout" else None,
            world_size=job.parallel.world,
            topology=job.parallel.sizes(),
            driver=True,
            **prompt_facts(declared(checkpoint.config), job.prompts_only),
            **batching(job),
            **({"budget": {"listed": len(sequences)}} if job.source is not None and job.source.is_file() else {}),
            **({} if job.noise is None else {"noise": {"seed": job.noise}}),
        )
        runner = importlib.import_module(engine.runner)
        done = runner.run(job, checkpoint, sequences, manifest, observer)
        write_manifest(job.output, manifest)
        write_tokens(step_folder(job), manifest, engine.logits, done)
    return job.output


@contextlib.contextmanager
def output_folder(path: Path, force: bool) -> Iterator[None]:
    """Make an output folder, or fill an empty one; on failure delete what is new in it and the folders made for it.

    With ``force`` the dump that is there is set aside inside its folder, deleted on success and restored on failure.
    Links are followed and stay. Raises OutputExistsError, UsageError.
    """
    folder = _resolved(path)
    if not folder.is_dir() and folder.exists():
        raise _occupied(path, force, f"{path} is not a dump, so --force does not delete it")
    occupied = folder.is_dir() and any(folder.iterdir())
    if occupied:
        _check_replaceable(path, folder, force)
    made = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    aside = _set_aside(folder) if occupied else None
    try:
        _make(path, folder)
        yield
    except BaseException:
        _delete(entry for entry in _entries(folder) if entry != aside)
        if aside is not None:
            _put_back(aside)
        for parent in made:
            with contextlib.suppress(OSError):  # not made yet, or another run has put something into it
                parent.rmdir()
        raise
    if aside is not None:
        _delete([aside])


def _resolved(path: Path) -> Path:
    if path.is_symlink() and not path.exists():
        raise UsageError(f"{path} is a link to {os.readlink(path)}, which is not there", "make it or choose another -o")
    try:
        return path.resolve()
    except (OSError, RuntimeError):  # a loop of links: RuntimeError before Python 3.13
        raise UsageError(f"the output folder {path} cannot be found", "choose another -o") from None


def _occupied(path: Path, force: bool, problem: str) -> OutputExistsError:
    if force:
        return OutputExistsError(problem, "choose another -o")
    return OutputExistsError(f"{path} already exists", "choose another -o or add --force")


def _check_replaceable(path: Path, folder: Path, force: bool) -> None:
    if force and is_dump_folder(folder):
        return
    foreign = foreign_entry(folder) if _has_dump(folder) else None
    found = "is not a dump" if foreign is None else f"also holds {foreign.relative_to(folder)}"
    raise _occupied(path, force, f"{path} {found}, so --force does not delete it")


def _make(path: Path, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"the output folder {path} cannot be made ({error.strerror})", "choose another -o") from None


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _set_aside(folder: Path) -> Path:
    """Move what a folder holds into a new folder inside it: the same file system, and no working directory moves."""
    old = _entries(folder)
    aside = Path(tempfile.mkdtemp(prefix=ASIDE, dir=folder))
    try:
        for entry in old:
            entry.rename(aside / entry.name)
    except BaseException:
        _put_back(aside)
        raise
    return aside


def _put_back(aside: Path) -> None:
    try:
        for entry in _entries(aside):
            entry.rename(aside.parent / entry.name)
        aside.rmdir()
    except OSError as error:
        log.warning("the dump that was to be replaced is in %s (%s): move it back yourself", aside, error.strerror)


def _delete(paths: Iterable[Path]) -> None:
    """Delete files and folders; warn about one that cannot be deleted."""
    for path in paths:
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        except OSError as error:
            log.warning("%s could not be deleted (%s): delete it yourself", path, error.strerror or error)


# -- what --force may replace ------------------------------------------------------------------------------------------


def is_dump_folder(path: Path) -> bool:
    """Tell whether a folder is a dump and nothing but a dump (so that --force may replace it)."""
    return path.is_dir() and _has_dump(path) and foreign_entry(path) is None


def foreign_entry(folder: Path) -> Path | None:
    """Return the first file, link or folder in a dump's folder that no dump consists of, or None."""
    for entry in _entries(folder):
        if entry.is_symlink():
            return entry
        if entry.is_dir():
            found = foreign_entry(entry) if _ASIDE_NAME.fullmatch(entry.name) else _foreign_below(entry)
            if found is not None:
                return found
        elif entry.name not in JOB_FILES and not _TEMPORARY_NAME.fullmatch(entry.name) and not _is_manifest(entry):
            return entry
    return None


def _foreign_below(folder: Path) -> Path | None:
    if folder.name in JOB_FOLDERS:
        return _foreign_in_steps(folder, "")
    return _foreign_in_steps(folder, DUMP_SUFFIXES) if folder.name in STAGES else folder


def _foreign_in_steps(folder: Path, suffixes: str | tuple[str, ...]) -> Path | None:
    for step in _entries(folder):
        if step.is_symlink() or not step.is_dir() or not _STEP_NAME.fullmatch(step.name):
            return step
        for file in _entries(step):
            if file.is_symlink() or not file.is_file() or not file.name.endswith(suffixes):
                return file
    return None


def _has_dump(folder: Path) -> bool:
    if _is_manifest(folder / MANIFEST_NAME) or read_lines(folder):
        return True
    files = (file for stage in STAGES for file in folder.glob(f"{stage}/step*/*.h5*"))
    return any(_STEP_NAME.fullmatch(file.parent.name) for file in files)


def _is_manifest(path: Path) -> bool:
    """Tell whether a file is a dump's manifest.json; other programs call files of theirs by the same name."""
    if path.name != MANIFEST_NAME or not path.is_file():
        return False
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(manifest, dict) and {"schema", "probe", "stage"} <= manifest.keys()


# -- which sequences ---------------------------------------------------------------------------------------------------


def _sequences(job: DumpJob, checkpoint: Checkpoint) -> tuple[list[TokenSequence], dict[str, Any]]:
    """Return the sequences to run and the manifest's ``sampling``."""
    vocab_size = int(checkpoint.config.get("vocab_size") or 0)
    if job.source is None:
        from probe.hooks.runners.prompts import read_prompts, tokenize

        assert job.prompts is not None
        prompts = read_prompts(job.prompts)
        tokenize(prompts, job.model, vocab_size)
        fresh = [
            TokenSequence(f"{p.uid}.s{k}", list(p.tokens), len(p.tokens), sample=k, trajectory=p.uid)
            for p in prompts
            for k in range(job.sampling.n)
        ]
        return fresh, dict(vars(job.sampling))
    if job.source.is_file():
        taken, sampling = _listed(job, job.source)
    else:
        with open_dump(job.source) as source:
            stated = source.manifest.get("sampling") or {}
            taken, sampling = [_taken(s) for s in source.sequences], _followed(job, stated)
    taken = told_apart(taken)
    if not taken or not all(s.tokens and min(s.tokens) >= 0 for s in taken):
        raise UsageError(f"{job.source} does not hold the token ids of its sequences", "give a rollout's dump")
    highest = max(max(s.tokens) for s in taken)
    if highest >= vocab_size:
        raise UsageError(
            f"{job.source} holds token {highest} but {job.model} has a vocabulary of {vocab_size}",
            "use the model that made the dump, or one with the same tokenizer",
        )
    return taken, sampling


def _listed(job: DumpJob, path: Path) -> tuple[list[TokenSequence], dict[str, Any]]:
    """Return the sequences that a file of ``probe tokens --worst`` lists, and the manifest's ``sampling``."""
    from probe.hooks.runners.prompts import read_sequences

    listed = read_sequences(path)
    sampled = [entry.sampling for entry in listed]
    if job.sampling.logprobs_mode == PROCESSED and any(entry != sampled[0] for entry in sampled):
        raise UsageError(f"the sequences of {path} were drawn in different ways", "leave out --logprobs-mode")
    return [entry.sequence for entry in listed], _followed(job, sampled[0])


def _followed(job: DumpJob, stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the temperature and top-p of the rollout that processed log-probs follow; nothing for raw ones.

    ``stated``: how the source says that its tokens were drawn. Raises UsageError where it does not.
    """
    if job.sampling.logprobs_mode != PROCESSED:
        return {}
    if "temperature" not in stated or "top_p" not in stated:
        raise UsageError(
            f"{job.source} does not say with which temperature and top-p its tokens were drawn, as {PROCESSED} need",
            "give the rollout's own dump with --from, or leave out --logprobs-mode",
        )
    return {name: stated[name] for name in ("temperature", "top_p")}


def _taken(sequence: Sequence) -> TokenSequence:
    tokens = [int(t) for t in sequence.tokens]
    uid = sequence.uid or sequence.request_id or f"s{sequence.index}"
    return TokenSequence(uid, tokens, sequence.prompt_len, sequence.sample, sequence.trajectory)


def told_apart(sequences: list[TokenSequence]) -> list[TokenSequence]:
    """Return the sequences, those of one uid (a job's samples of one prompt) named by their samples too.

    The uid stays their trajectory, by which they join those of the source.
    """
    taken = {uid for uid, count in Counter(s.uid for s in sequences).items() if count == 1}
    counts = Counter(sequence.uid for sequence in sequences)
    found = []
    for sequence in sequences:
        uid, name = sequence.uid, sequence.uid
        if counts[uid] > 1:
            name = f"{uid}.s{sequence.sample}"
            again = (f"{name}.{number}" for number in itertools.count(1))
            name = name if name not in taken else next(tried for tried in again if tried not in taken)
        taken.add(name)
        found.append(replace(sequence, uid=name, trajectory=sequence.trajectory or uid))
    return found
