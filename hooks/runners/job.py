"""What one ``probe dump`` was asked for, and which engines can do it."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from probe.errors import EngineError, UsageError
from probe.settings import STATISTICS, TENSOR

RUN_STAGES = ("rollout", "actor", "reference")
"""The stages that a runner makes; log-prob passes and updates are those of a job (probe.hooks.jobs)."""
DTYPES = ("float32", "bfloat16", "float16", "float64")
"""What a forward can run in."""
MAX_SEED = 2**32 - 1 - 2**20
"""NumPy takes seeds below 2**32, and sequence number i is sampled with seed + i."""
Observer = Callable[[str, int, int], None]
"""Called with (what is going on, done, total) while a dump runs; only the command line draws it."""


RAW, PROCESSED = "raw_logprobs", "processed_logprobs"
"""What log-probs are of, in vLLM's words: the untouched logits, or those that the tokens are drawn from."""


@dataclass
class Sampling:
    """How a rollout generates, and what its log-probs are of: ``logprobs_mode`` is RAW or PROCESSED.

    A run over another dump's tokens takes from it only the mode: temperature and top-p are then that dump's own.
    """

    n: int = 1
    max_tokens: int = 32
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    logprobs_mode: str = RAW


@dataclass(frozen=True)
class Parallel:
    """How many ways a run is split: sizes of the tensor, pipeline, context, expert and data parallel groups.

    ``vpp`` counts the model chunks of each pipeline rank (1: not interleaved); ``sp`` splits the positions between the
    tensor-parallel ranks outside attention and MLP (sequence parallelism).
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    sp: bool = False

    @property
    def world(self) -> int:
        """Return the number of processes: experts are spread over ranks that exist for another reason."""
        return self.tp * self.pp * self.cp * self.dp

    def sizes(self) -> dict[str, Any]:
        """Return the manifest's ``topology``."""
        return asdict(self)


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
    parallel: Parallel = field(default_factory=Parallel)
    engine_args: dict[str, Any] = field(default_factory=dict)
    block_bytes: int = 8 << 20
    force: bool = False
    task: str = TENSOR
    """``tensor`` or ``statistics`` (probe.settings.TASKS)."""
    noise: int | None = None
    """Seed of the random re-rounding of every leaf module's output (probe.hooks.noise); None for none."""


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
    """One engine ``probe dump`` can run: where its runner is, what it needs and where its logits are.

    ``parallel`` names the fields of :class:`Parallel` that it honours; ``dp`` is the number of data-parallel ranks
    where the user gives none.
    """

    runner: str
    stages: tuple[str, ...]
    package: str
    install: str
    logits: tuple[str, str]
    parallel: tuple[str, ...] = ()
    dp: int = 1


FSDP = Engine(
    "probe.hooks.runners.fsdp",
    ("actor", "reference"),
    "transformers",
    "pip install 'probe-rl[actor]'",
    ("lm_head", "output.0"),
    ("dp",),
    dp=2,
)


ENGINES = {
    "vllm": Engine(
        "probe.hooks.runners.vllm",
        ("rollout",),
        "vllm",
        "pip install 'probe-rl[rollout]' (GPU) or 'probe-rl[rollout-cpu]' (CPU)",
        ("logits_processor", "output.0"),
        ("tp", "pp", "ep"),
    ),
    "megatron": Engine(
        "probe.hooks.runners.megatron",
        ("actor", "reference"),
        "megatron.core",
        "pip install 'probe-rl[actor]'",
        ("output_layer", "output.0"),
        ("tp", "pp", "vpp", "cp", "ep", "dp", "sp"),
    ),
    "transformers": Engine(
        "probe.hooks.runners.transformers",
        RUN_STAGES,
        "transformers",
        "pip install 'probe-rl[actor]'",
        ("lm_head", "output.0"),
    ),
    "fsdp": FSDP,
    "fsdp1": FSDP,
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
    if job.source is not None and os.path.realpath(job.source) == os.path.realpath(job.output):
        raise UsageError(f"{job.output} is both the source and the output", "choose another -o")
    if job.noise is not None and job.source is None:
        raise UsageError("--noise measures a run that is already there", "give its dump with --from")
    if job.task == STATISTICS and rescores_processed(job):
        problem = "processed log-probs of given tokens come from stored logits, and task statistics stores none"
        raise UsageError(problem, "leave --logprobs-mode or --task out")
    if job.force_decode and (job.source is None or job.engine != "vllm"):
        raise UsageError("--force-decode feeds another dump's tokens through vLLM's decode", "give --from and vllm")
    if rescores_processed(job) and job.prompts_only:
        problem = (
            "vLLM's processed log-probs of given tokens come from the stored logits, which --prompts-only leaves out"
        )
        raise UsageError(problem, "leave out one of --prompts-only and --logprobs-mode")
    try:
        missing = importlib.util.find_spec(engine.package) is None
    except ModuleNotFoundError:
        missing = True
    if missing:
        raise EngineError(f"engine {job.engine} is not installed", engine.install)
    return engine


def rescores_processed(job: DumpJob) -> bool:
    """Tell whether vLLM is to give processed log-probs of given tokens: it has them of tokens that it draws alone."""
    return job.engine == "vllm" and job.source is not None and job.sampling.logprobs_mode == PROCESSED


def _check_numbers(job: DumpJob) -> None:
    wanted = job.sampling
    for name, value, fits in (
        ("n", wanted.n, wanted.n >= 1),
        ("max_tokens", wanted.max_tokens, wanted.max_tokens >= 1),
        ("temperature", wanted.temperature, 0 <= wanted.temperature < math.inf),
        ("top_p", wanted.top_p, 0 < wanted.top_p <= 1),
        ("seed", wanted.seed, 0 <= wanted.seed <= MAX_SEED),
        ("micro_batch_size", job.micro_batch_size, job.micro_batch_size >= 1),
    ):
        if not fits:
            raise UsageError(
                f"{name} {value!r} cannot work",
                f"n, max_tokens, micro_batch_size >= 1; temperature >= 0; 0 < top_p <= 1; 0 <= seed <= {MAX_SEED}",
            )


def resolve_dtype(requested: str, config: dict[str, Any]) -> str:
    """Return the dtype to run in: the requested one, or with ``auto`` the checkpoint's own."""
    if requested != "auto":
        return requested
    return str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")


def batching(job: DumpJob) -> dict[str, Any]:
    """Return the manifest's ``batching`` entry, or nothing for a run whose batches the options do not decide."""
    if job.engine == "megatron":
        return {"batching": {"micro_batch_size": job.micro_batch_size, "layout": job.layout}}
    if job.engine in ("transformers", "fsdp", "fsdp1") and job.source is not None:
        return {"batching": {"micro_batch_size": job.micro_batch_size}}
    return {}


def positions_needed(job: DumpJob, sequences: list[TokenSequence]) -> int:
    """Return the positions that the longest sequence takes, with those that the engine generates."""
    return max(len(s.tokens) + _generated(job, s) for s in sequences)


def _generated(job: DumpJob, sequence: TokenSequence) -> int:
    if job.source is None:
        return job.sampling.max_tokens
    forced = job.force_decode and len(sequence.tokens) > sequence.prompt_len
    return 1 if job.engine == "vllm" and not forced else 0  # vLLM samples a token even where only a prefill is wanted


def check_positions(job: DumpJob, sequences: list[TokenSequence], config: dict[str, Any]) -> None:
    """Raise EngineError where a sequence is longer than the model's ``max_position_embeddings``."""
    needed = positions_needed(job, sequences)
    limit = int(config.get("max_position_embeddings") or needed)
    if needed > limit:
        fix = "shorten the prompts or lower --max-tokens" if job.source is None else "use a model with more positions"
        raise EngineError(f"the longest sequence needs {needed} positions, but {job.model} has {limit}", fix)


def step_folder(job: DumpJob) -> Path:
    """Return the folder that holds the files of this dump."""
    return job.output / job.stage / "step0"
