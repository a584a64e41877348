"""A dump from start to end: check, read sequences, run the engine, add tokens and log-probs, complete the dump."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from probe.checkpoint import Checkpoint
from probe.errors import OutputExistsError, UsageError
from probe.hooks.runners.job import DumpJob, Observer, TokenSequence, check_job, resolve_dtype, step_folder
from probe.hooks.runners.tokens import write_tokens
from probe.manifest import make_manifest, write_manifest
from probe.store.reader import open_dump
from probe.store.schema import MANIFEST_NAME, Sequence


def run_dump(job: DumpJob, observer: Observer = lambda what, done, total: None) -> Path:
    """Run one dump and return its folder; on an error nothing half-written is left and a replaced dump is restored."""
    engine = check_job(job)
    checkpoint = Checkpoint(job.model)
    with output_folder(job.output, job.force):
        sequences = _sequences(job, checkpoint)
        manifest = make_manifest(
            job.stage,
            job.engine,
            "",
            {"path": str(job.model.resolve()), "architecture": checkpoint.architecture, "config": checkpoint.config},
            dtype=resolve_dtype(job.dtype, checkpoint.config),
            prompts_only=job.prompts_only,
            task="tensor",
            sampling=vars(job.sampling) if job.stage == "rollout" and job.source is None else {},
            logprobs_mode=job.sampling.logprobs_mode if job.engine == "vllm" else "raw_logprobs",
            source_dump=None if job.source is None else str(job.source.resolve()),
            forced="decode" if job.force_decode else "prefill" if job.source and job.stage == "rollout" else None,
            batching={"micro_batch_size": job.micro_batch_size, "layout": job.layout},
        )
        runner = importlib.import_module(engine.runner)
        done = runner.run(job, checkpoint, sequences, manifest, observer)
        write_manifest(job.output, manifest)
        write_tokens(step_folder(job), manifest, engine.logits, done)
    return job.output


@contextlib.contextmanager
def output_folder(path: Path, force: bool) -> Iterator[None]:
    """Make an output folder; with ``force`` an old dump is set aside, deleted on success and restored on failure."""
    path = path.absolute()
    aside = path.with_name(f".{path.name}.replaced-{os.getpid()}")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        if not force:
            raise OutputExistsError(f"{path} already exists", "choose another -o or add --force")
        if not is_dump_folder(path):
            raise OutputExistsError(f"{path} is not a dump, so --force does not delete it", "choose another -o")
        path.rename(aside)
    made = next((folder for folder in [*reversed(path.parents), path] if not folder.exists()), path)
    try:
        _make(path)
        yield
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        if aside.exists():
            aside.rename(path)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"the output folder {path} cannot be made ({error.strerror})", "choose another -o") from None


def is_dump_folder(path: Path) -> bool:
    """Tell whether a folder is a dump (so that --force may replace it)."""
    return path.is_dir() and ((path / MANIFEST_NAME).is_file() or any(path.glob("*/step*/*.h5*")))


def _sequences(job: DumpJob, checkpoint: Checkpoint) -> list[TokenSequence]:
    vocab_size = int(checkpoint.config.get("vocab_size") or 0)
    if job.source is None:
        from probe.hooks.runners.prompts import read_prompts, tokenize

        assert job.prompts is not None
        prompts = read_prompts(job.prompts)
        tokenize(prompts, job.model, vocab_size)
        return [
            TokenSequence(f"{p.uid}.s{k}", list(p.tokens), len(p.tokens), sample=k, trajectory=p.uid)
            for p in prompts
            for k in range(job.sampling.n)
        ]
    with open_dump(job.source) as source:
        taken = [_taken(s) for s in source.sequences]
    if not taken or not all(s.tokens and min(s.tokens) >= 0 for s in taken):
        raise UsageError(f"{job.source} does not hold the token ids of its sequences", "give a rollout's dump")
    highest = max(max(s.tokens) for s in taken)
    if highest >= vocab_size:
        raise UsageError(
            f"{job.source} holds token {highest} but {job.model} has a vocabulary of {vocab_size}",
            "use the model that made the dump, or one with the same tokenizer",
        )
    return taken


def _taken(sequence: Sequence) -> TokenSequence:
    tokens = [int(t) for t in sequence.tokens]
    return TokenSequence(sequence.uid, tokens, sequence.prompt_len, sequence.sample, sequence.trajectory)
