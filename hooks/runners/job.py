"""What one ``probe dump`` was asked for, and which engines can do it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from probe.errors import EngineError, UsageError

STAGES = ("rollout", "actor", "reference")
Observer = Callable[[str, int, int], None]
"""Called with (what is going on, done, total) while a dump runs; only the command line draws it."""


@dataclass
class Sampling:
    """How a rollout generates; ``logprobs_mode`` is vLLM's (raw_logprobs, processed_logprobs)."""

    n: int = 1
    max_tokens: int = 32
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    logprobs_mode: str = "raw_logprobs"


@dataclass
class DumpJob:
    """Everything that one ``probe dump`` was asked for."""

    stage: str
    engine: str
    model: Path
    output: Path
    prompts: Path | None = None
    source: Path | None = None
    dtype: str = "auto"
    device: str = "auto"
    prompts_only: bool = False
    sampling: Sampling = field(default_factory=Sampling)
    force_decode: bool = False
    micro_batch_size: int = 4
    layout: str = "padded"
    engine_args: dict[str, Any] = field(default_factory=dict)
    block_bytes: int = 8 << 20
    force: bool = False


@dataclass
class TokenSequence:
    """One sequence before, while and after the engine runs it.

    ``logprobs`` is float64 [length]: entry p scores token p as the engine returned it, NaN where it returned none.
    """

    uid: str
    tokens: list[int]
    prompt_len: int
    sample: int = 0
    trajectory: str = ""
    request_id: str = ""
    logprobs: np.ndarray | None = None


@dataclass(frozen=True)
class Engine:
    """One engine ``probe dump`` can run: where its runner is, what it needs and where its logits are."""

    runner: str
    stages: tuple[str, ...]
    package: str
    install: str
    logits: tuple[str, str]


ENGINES = {
    "vllm": Engine(
        "probe.hooks.runners.vllm",
        ("rollout",),
        "vllm",
        "pip install 'probe-rl[rollout]' (GPU) or 'probe-rl[rollout-cpu]' (CPU)",
        ("logits_processor", "output.0"),
    ),
    "megatron": Engine(
        "probe.hooks.runners.megatron",
        ("actor", "reference"),
        "megatron.core",
        "pip install 'probe-rl[actor]'",
        ("output_layer", "output.0"),
    ),
    "transformers": Engine(
        "probe.hooks.runners.transformers",
        STAGES,
        "transformers",
        "pip install 'probe-rl[actor]'",
        ("lm_head", "output.0"),
    ),
}
DEFAULT_ENGINE = {"rollout": "vllm", "actor": "megatron", "reference": "megatron"}


def check_job(job: DumpJob) -> Engine:
    """Refuse a job that cannot work before anything is loaded or written; return its engine."""
    if job.engine not in ENGINES:
        raise EngineError(f"unknown engine {job.engine!r}", f"use one of {', '.join(ENGINES)}")
    engine = ENGINES[job.engine]
    if job.stage not in engine.stages:
        fitting = ", ".join(name for name, other in ENGINES.items() if job.stage in other.stages)
        raise EngineError(f"engine {job.engine} cannot run stage {job.stage!r}", f"use one of {fitting}")
    if (job.prompts is None) == (job.source is None):
        raise UsageError("a dump needs its tokens from exactly one place", "give --prompts FILE or --from DUMP")
    if job.stage != "rollout" and job.source is None:
        raise UsageError(f"stage {job.stage} recomputes the tokens of another dump", "give --from ROLLOUT_DUMP")
    _check_numbers(job)
    if job.source is not None and job.source.resolve() == job.output.resolve():
        raise UsageError(f"{job.output} is both the source and the output", "choose another -o")
    if job.force_decode and (job.source is None or job.engine != "vllm"):
        raise UsageError("--force-decode feeds another dump's tokens through vLLM's decode", "give --from and vllm")
    try:
        missing = importlib.util.find_spec(engine.package) is None
    except ModuleNotFoundError:
        missing = True
    if missing:
        raise EngineError(f"engine {job.engine} is not installed", engine.install)
    return engine


def _check_numbers(job: DumpJob) -> None:
    wanted = job.sampling
    for name, value, fits in (
        ("n", wanted.n, wanted.n >= 1),
        ("max_tokens", wanted.max_tokens, wanted.max_tokens >= 1),
        ("temperature", wanted.temperature, wanted.temperature >= 0),
        ("top_p", wanted.top_p, 0 < wanted.top_p <= 1),
        ("micro_batch_size", job.micro_batch_size, job.micro_batch_size >= 1),
    ):
        if not fits:
            raise UsageError(f"{name} {value!r} cannot work", "n, max_tokens, micro_batch_size >= 1; 0 < top_p <= 1")


def resolve_dtype(requested: str, config: dict[str, Any]) -> str:
    """Return the dtype to run in: the requested one, or with ``auto`` the checkpoint's own."""
    if requested != "auto":
        return requested
    return str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")


def step_folder(job: DumpJob) -> Path:
    """Return the folder that holds the files of this dump."""
    return job.output / job.stage / "step0"
