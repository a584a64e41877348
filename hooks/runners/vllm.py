"""Run a rollout on real vLLM: generate, or rescore another dump's tokens by prefill or through decode steps."""

from __future__ import annotations

import io
import json
import logging
import os
from typing import Any

import numpy as np

from probe.checkpoint import Checkpoint
from probe.errors import CaptureError, EngineError
from probe.hooks.device import pick_device
from probe.hooks.runners.job import DumpJob, Observer, TokenSequence, positions_needed, step_folder

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


def run(
    job: DumpJob, checkpoint: Checkpoint, sequences: list[TokenSequence], manifest: dict[str, Any], observer: Observer
) -> list[TokenSequence]:
    """Run the job and return its sequences with tokens and log-probs; ``manifest`` gains what only the engine knows."""
    _set_environment(job)
    observer("starting vLLM", 0, 1)
    llm = _start(job, sequences, manifest["dtype"])
    try:
        return _run(llm, job, sequences, manifest, observer)
    except (RuntimeError, ValueError, NotImplementedError) as error:
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
        "prompt_lens": {str(i): s.prompt_len for i, s in enumerate(sequences)},
    }
    started = [json.loads(r) for r in llm.collective_rpc("probe_start", args=(json.dumps(options),))]
    manifest["backends"] = started[0]["backends"]
    outputs = _generate(llm, job, sequences, observer)
    stopped = [json.loads(r) for r in llm.collective_rpc("probe_stop")]
    _check_capture(started, stopped)
    return [_result(job, sequence, output) for sequence, output in zip(sequences, outputs)]


def _shut_down(llm: Any) -> None:
    """End the engine and its processes, so that nothing is killed at exit and another engine can start here."""
    from vllm.distributed import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


def _set_environment(job: DumpJob) -> None:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if pick_device(job.device) == "cpu":
        for name, value in CPU_ENVIRONMENT.items():
            os.environ.setdefault(name, value)


def _start(job: DumpJob, sequences: list[TokenSequence], dtype: str) -> Any:
    from vllm import LLM
    from vllm.platforms import current_platform

    if job.device not in ("auto", current_platform.device_type):
        raise EngineError(
            f"this vLLM runs on {current_platform.device_type}, not on {job.device}",
            f"install the vLLM build for {job.device}, or leave out --device",
        )
    arguments = {
        "model": str(job.model),
        "dtype": dtype,
        "enforce_eager": True,  # compiled or graph-replayed modules never call their hooks
        "enable_prefix_caching": False,  # a cache hit would leave out the rows of the shared prefix
        "max_model_len": positions_needed(job, sequences),
        "max_num_seqs": max(8, min(64, len(sequences))),
        "seed": job.sampling.seed,
        "logprobs_mode": job.sampling.logprobs_mode,
        "worker_extension_cls": EXTENSION,
        "skip_tokenizer_init": not any(job.model.glob("tokenizer*")),
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        **({"logits_processors": [FORCED_TOKENS]} if job.force_decode else {}),
        **job.engine_args,
    }
    if arguments["enforce_eager"] is not True:
        raise CaptureError("vLLM would compile the model, and hooks would never fire", "drop enforce_eager=False")
    try:
        return LLM(**arguments)
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        raise EngineError(
            f"vLLM could not start on {job.model} ({_reason(error)})", "run it again with -v to see its log"
        ) from error


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:400]


def _generate(llm: Any, job: DumpJob, sequences: list[TokenSequence], observer: Observer) -> list[Any]:
    prompts = [{"prompt_token_ids": s.tokens[: s.prompt_len] if job.force_decode else s.tokens} for s in sequences]
    what = "generating" if job.source is None else "rescoring"
    observer(what, 0, len(sequences))
    progress = _progress_class(what, observer)
    return llm.generate(prompts, [_params(job, i, s) for i, s in enumerate(sequences)], use_tqdm=progress)


def _params(job: DumpJob, index: int, sequence: TokenSequence) -> Any:
    from vllm import SamplingParams

    response = len(sequence.tokens) - sequence.prompt_len
    common = {"logprobs": 0, "prompt_logprobs": 0, "detokenize": False}
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
        seed=wanted.seed + index,
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


def _check_capture(started: list[dict[str, Any]], stopped: list[dict[str, Any]]) -> None:
    for start, stop in zip(started, stopped):
        if not stop["fired"]:
            raise CaptureError(
                f"none of the {start['hooked']} hooked modules of vLLM rank {start['rank']} ran through its hook",
                "the model was compiled or replayed from a graph: use enforce_eager",
            )
        if stop["logits_rows_unknown"]:
            log.warning("%d logits rows could not be assigned and were not stored", stop["logits_rows_unknown"])


def _result(job: DumpJob, sequence: TokenSequence, output: Any) -> TokenSequence:
    """Return the sequence with what vLLM generated and the log-prob it gave each token."""
    generated = list(output.outputs[0].token_ids)
    rescored = job.source is not None
    tokens = list(sequence.tokens) if rescored else sequence.tokens + generated
    logprobs = np.full(len(tokens), np.nan)
    for position, entry in enumerate(output.prompt_logprobs or []):
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
