"""Run a rollout on real vLLM: generate, or rescore another dump's tokens by prefill or through decode steps."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from probe.checkpoint import Checkpoint
from probe.errors import CaptureError, EngineError, ProbeError
from probe.hooks.device import pick_device
from probe.hooks.runners.job import (
    ENGINES,
    RAW,
    DumpJob,
    Observer,
    TokenSequence,
    positions_needed,
    rescores_processed,
    step_folder,
)
from probe.hooks.runners.tokens import recompute_logprobs
from probe.manifest import environment
from probe.sampling import Semantics, engine_semantics
from probe.store.reader import open_files

log = logging.getLogger("probe")

EXTENSION = "probe.hooks.engines.vllm_worker.ProbeWorker"
FORCED_TOKENS = "probe.hooks.engines.vllm_forced:ForcedTokens"
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}
"""Defaults for a dump, each overridable by the caller's environment: one process unless asked, and the first-generation
model runner, whose batch bookkeeping is what rows are read from."""
CPU_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
"""On a CPU, torch.compile of the sampler alone costs a minute and a half; 1 GiB of KV cache is plenty for a dump."""
RANKS = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size"}
"""Field of the job's ``parallel`` -> vLLM's argument."""
ONLY = {
    "enforce_eager": (True, "vLLM would compile the model, and hooks would never fire"),
    "speculative_config": (None, "speculative decoding runs rows of tokens that it then rejects"),
    "data_parallel_size": (1, "vllm.LLM runs no data-parallel ranks by itself"),
}
"""Argument -> (the one value that a dump can work with, why)."""


def run(
    job: DumpJob, checkpoint: Checkpoint, sequences: list[TokenSequence], manifest: dict[str, Any], observer: Observer
) -> list[TokenSequence]:
    """Run the job and return its sequences with tokens and log-probs; ``manifest`` gains what only the engine knows."""
    arguments = llm_arguments(job, sequences, manifest["dtype"])
    with _environment(job, arguments):
        manifest["environment"] |= environment()
        observer("starting vLLM", 0, 1)
        llm = _start(job, arguments)
        try:
            return _run(llm, job, sequences, manifest, observer)
        except ProbeError:
            raise
        except Exception as error:  # whatever a foreign engine raises
            raise EngineError(f"vLLM could not run {job.model} ({_reason(error)})", "run it again with -v") from error
        finally:
            _shut_down(llm)


def _run(
    llm: Any, job: DumpJob, sequences: list[TokenSequence], manifest: dict[str, Any], observer: Observer
) -> list[TokenSequence]:
    import vllm

    manifest["engine"]["version"] = vllm.__version__
    manifest["device"] = vllm.platforms.current_platform.device_type
    manifest["environment"]["vllm"] = vllm.__version__
    options = {
        "folder": str(step_folder(job)),
        "manifest": manifest,
        "block_bytes": job.block_bytes,
        "prompts_only": job.prompts_only,
        "noise": job.noise,
        "prompt_lens": {str(i): s.prompt_len for i, s in enumerate(sequences)},
    }
    started = [json.loads(r) for r in llm.collective_rpc("probe_start", args=(json.dumps(options),))]
    manifest |= {name: started[0][name] for name in ("backends", "topology", "world_size")}
    outputs = _generate(llm, job, sequences, observer)
    stopped = [json.loads(r) for r in llm.collective_rpc("probe_stop")]
    _check_capture(started, stopped)
    results = [_result(job, sequence, output) for sequence, output in zip(sequences, outputs)]
    if rescores_processed(job):
        _process(step_folder(job), results, engine_semantics(manifest))
    return results


def _process(folder: Path, done: list[TokenSequence], meaning: Semantics) -> None:
    """Give sequences the processed log-probs of the logits that were stored: vLLM processes only what it draws from."""
    import torch

    from probe.hooks.runners.inprocess import processed_scores

    def score(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        values = torch.from_numpy(logits.astype(np.float32))
        return np.asarray(processed_scores(values, torch.from_numpy(tokens), meaning).double().numpy())

    with open_files(folder, sorted(folder.glob("*.h5"))) as dump:
        scored = recompute_logprobs(dump, ENGINES["vllm"].logits, done, score)
    for sequence in done:
        sequence.logprobs = scored[sequence.uid]


def _shut_down(llm: Any) -> None:
    """End the engine and its processes, so that nothing is killed at exit and another engine can start here."""
    from vllm.distributed import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


@contextlib.contextmanager
def _environment(job: DumpJob, arguments: dict[str, Any]) -> Iterator[None]:
    """Set what vLLM reads from the environment and the user has not set, for as long as the engine runs."""
    wanted = dict(ENVIRONMENT)
    if pick_device(job.device) == "cpu":
        wanted |= CPU_ENVIRONMENT
        ranks = math.prod(int(arguments.get(name, 1)) for name in RANKS.values())
        if ranks > 1:
            wanted["VLLM_CPU_OMP_THREADS_BIND"] = cpu_binding(sorted(os.sched_getaffinity(0)), ranks)
    new = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)


def cpu_binding(cpus: list[int], ranks: int) -> str:
    """Return vLLM's list of CPUs per rank: even shares, where its default wants one NUMA node per rank."""
    share = len(cpus) // ranks
    groups = (cpus[rank * share : (rank + 1) * share] for rank in range(ranks))
    return "|".join(",".join(map(str, group)) for group in groups) if share else "nobind"


def llm_arguments(job: DumpJob, sequences: list[TokenSequence], dtype: str) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM``: what a dump needs, then what the job asks for, then the user's own.

    Raises CaptureError for an argument with which hooks would not fire or rows would not be certain.
    """
    parallel = {name: getattr(job.parallel, axis) for axis, name in RANKS.items() if getattr(job.parallel, axis) > 1}
    arguments = {
        "model": str(job.model),
        "dtype": dtype,
        "enforce_eager": True,  # compiled or graph-replayed modules never call their hooks
        "enable_prefix_caching": False,  # a cache hit would leave out the rows of the shared prefix
        "async_scheduling": False,  # it feeds a sequence's last token, and a stopped request's next, before it knows
        "max_model_len": positions_needed(job, sequences),
        "max_num_seqs": max(8, min(64, len(sequences))),
        "seed": job.sampling.seed,
        "logprobs_mode": RAW if job.source is not None else job.sampling.logprobs_mode,
        "worker_extension_cls": EXTENSION,
        "skip_tokenizer_init": not any(job.model.glob("tokenizer*")),
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        **parallel,
        **({"enable_expert_parallel": True} if job.parallel.ep > 1 else {}),
        **({"logits_processors": [FORCED_TOKENS]} if job.force_decode else {}),
        **job.engine_args,
    }
    for name, (value, reason) in ONLY.items():
        if arguments.get(name, value) != value:
            raise CaptureError(reason, f"drop {name}={arguments[name]}")
    return arguments


def _start(job: DumpJob, arguments: dict[str, Any]) -> Any:
    from vllm import LLM
    from vllm.platforms import current_platform

    if job.device not in ("auto", current_platform.device_type):
        raise EngineError(
            f"this vLLM runs on {current_platform.device_type}, not on {job.device}",
            f"install the vLLM build for {job.device}, or leave out --device",
        )
    if arguments.get("enable_expert_parallel") and current_platform.device_type == "cpu":
        raise EngineError(
            "vLLM's CPU kernel for experts ignores which experts a rank holds, and crashes on those of other ranks",
            "leave out --ep (with --tp alone each rank holds a part of every expert), or run on a GPU",
        )
    try:
        return LLM(**arguments)
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        raise EngineError(
            f"vLLM could not start on {job.model} ({_reason(error)})", "run it again with -v to see its log"
        ) from error


def _reason(error: Exception) -> str:
    words = " ".join(str(error).split())
    words = re.sub(r"^\d+ validation errors? for \w+ (Value error, )?", "", words)  # pydantic's frame around the cause
    return words.partition(" [type=")[0].rstrip(".")[:400]


def _generate(llm: Any, job: DumpJob, sequences: list[TokenSequence], observer: Observer) -> list[Any]:
    prompts = [{"prompt_token_ids": s.tokens[: s.prompt_len] if job.force_decode else s.tokens} for s in sequences]
    what = "generating" if job.source is None else "rescoring"
    observer(what, 0, len(sequences))
    progress = _progress_class(what, observer)
    seeded = job.source is not None or _can_seed(llm, sequences)
    return llm.generate(prompts, [_params(job, i, s, seeded) for i, s in enumerate(sequences)], use_tqdm=progress)


def _can_seed(llm: Any, sequences: list[TokenSequence]) -> bool:
    """Tell whether requests can have seeds of their own; warn where they cannot.

    For a prompt that it runs in parts vLLM winds the request's generator back, which torch cannot do on a CPU.
    """
    from vllm.platforms import current_platform

    scheduler = llm.llm_engine.vllm_config.scheduler_config
    most = sum(s.prompt_len for s in sequences) + scheduler.max_num_seqs
    if current_platform.device_type != "cpu" or most <= scheduler.max_num_batched_tokens:
        return True
    log.warning("prompts that run in parts cannot be sampled with their own seeds on a CPU: one seed is for all")
    return False


def _params(job: DumpJob, index: int, sequence: TokenSequence, seeded: bool) -> Any:
    from vllm import SamplingParams

    response = len(sequence.tokens) - sequence.prompt_len
    common: dict[str, Any] = {"logprobs": 0, "prompt_logprobs": 0, "detokenize": False}
    if job.engine_args.get("enable_prefix_caching"):
        common["prompt_logprobs"] = None  # with them vLLM would not read its cache
    if job.force_decode and response:
        forced = {"forced_tokens": sequence.tokens[sequence.prompt_len :]}
        return SamplingParams(temperature=0.0, max_tokens=response, ignore_eos=True, extra_args=forced, **common)
    if job.source is not None:
        return SamplingParams(temperature=0.0, max_tokens=1, **common)
    wanted = job.sampling
    return SamplingParams(
        temperature=wanted.temperature,
        top_p=wanted.top_p,
        max_tokens=wanted.max_tokens,
        seed=wanted.seed + index if seeded else None,
        ignore_eos=wanted.ignore_eos,
        **common,
    )


def _progress_class(what: str, observer: Observer) -> Any:
    """Return the tqdm class through which vLLM reports finished requests; it draws nothing itself."""
    from tqdm import tqdm

    class Progress(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "file": io.StringIO()})

        def update(self, n: float | None = 1) -> bool | None:
            shown = super().update(n)
            if "Processed" in str(self.desc):
                observer(what, int(self.n), int(self.total or 0))
            return shown

    return Progress


UNKNOWN = {
    "logits_rows_unknown": "logits rows could not be assigned",
    "passes_unknown": "passes ran other positions than vLLM's scheduler said",
}
"""Count of a worker -> what was left out, because a row is never guessed."""


def _check_capture(started: list[dict[str, Any]], stopped: list[dict[str, Any]]) -> None:
    for start, stop in zip(started, stopped):
        if not stop["fired"]:
            raise CaptureError(
                f"none of the {start['hooked']} hooked modules of vLLM rank {start['rank']} ran through its hook",
                "the model was compiled or replayed from a graph: use enforce_eager",
            )
        for name, what in UNKNOWN.items():
            if stop[name]:
                log.warning("%d %s and were not stored", stop[name], what)


def _result(job: DumpJob, sequence: TokenSequence, output: Any) -> TokenSequence:
    """Return the sequence with what vLLM generated and the log-prob it gave each token.

    Those of a prompt are raw whatever the mode: beside processed ones they would be of another distribution.
    """
    generated = list(output.outputs[0].token_ids)
    rescored = job.source is not None
    tokens = list(sequence.tokens) if rescored else sequence.tokens + generated
    logprobs = np.full(len(tokens), np.nan)
    of_prompt = output.prompt_logprobs if job.sampling.logprobs_mode == RAW else None
    for position, entry in enumerate(of_prompt or []):
        if entry is not None:
            logprobs[position] = entry[tokens[position]].logprob
    if not rescored or job.force_decode:
        start = len(output.prompt_token_ids)
        for offset, entry in enumerate(output.outputs[0].logprobs[: len(tokens) - start]):
            logprobs[start + offset] = entry[tokens[start + offset]].logprob
    return TokenSequence(
        sequence.uid,
        tokens,
        sequence.prompt_len,
        sequence.sample,
        sequence.trajectory,
        request_id=str(output.request_id),
        logprobs=logprobs,
    )
