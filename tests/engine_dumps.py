"""Make vLLM dumps for engine tests, all in one process: ``python engine_dumps.py MODEL FOLDER [NAME ...]``.

``--parallel`` instead of names makes those of :func:`parallel_jobs`, for which MODEL is not needed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from checkpoints import make_checkpoint

from probe.hooks.demo_model import DEMO_PROMPTS
from probe.hooks.runners.job import PROCESSED, DumpJob, Parallel, Sampling
from probe.hooks.runners.run import run_dump

FAMILIES = {"qwen3": {"tied": True}, "llama": {"tied": False}}
"""Random checkpoints without a tokenizer, prompted by token ids: family -> arguments of make_checkpoint."""


def jobs(model: Path, folder: Path) -> list[DumpJob]:
    """Return the jobs in the order in which they can run (some rescore the tokens of an earlier one)."""
    prompts, one = folder / "prompts.txt", folder / "one.txt"
    prompts.write_text("\n".join(DEMO_PROMPTS) + "\n")
    one.write_text(DEMO_PROMPTS[0] + "\n")
    forever = Sampling(max_tokens=2000, ignore_eos=True, seed=5)
    base = DumpJob("rollout", "vllm", model, folder / "fp32", prompts=prompts, dtype="float32")
    base.sampling = Sampling(max_tokens=24, seed=1)
    fp32 = folder / "fp32"
    ids = folder / "ids.jsonl"
    ids.write_text('{"token_ids": [5, 6, 7, 8, 9]}\n{"id": "short", "token_ids": [11, 12]}\n')
    families = [
        replace(base, output=folder / name, model=folder / f"{name}-model", prompts=ids, sampling=Sampling(n=2))
        for name in FAMILIES
    ]
    sampled = Sampling(n=2, max_tokens=24, seed=1, temperature=0.7, top_p=0.9)
    processed = replace(sampled, logprobs_mode=PROCESSED)
    follow = replace(base, prompts=None, source=folder / "processed", sampling=Sampling(logprobs_mode=PROCESSED))
    small_passes = {"max_num_batched_tokens": 16, "max_num_seqs": 8, "enable_chunked_prefill": True}
    return [
        *families,
        base,
        replace(base, output=folder / "bf16", dtype="bfloat16"),
        replace(base, output=folder / "prompts-only", prompts_only=True),
        replace(base, output=folder / "rescored", prompts=None, source=fp32),
        replace(base, output=folder / "chunked", prompts=None, source=fp32, engine_args=small_passes),
        replace(base, output=folder / "decoded", prompts=None, source=fp32, force_decode=True),
        replace(base, output=folder / "sampled", sampling=sampled),
        replace(base, output=folder / "processed", sampling=processed),
        replace(follow, output=folder / "processed-again"),
        replace(follow, output=folder / "processed-decoded", force_decode=True),
        replace(base, output=folder / "steps-10", prompts=one, sampling=replace(forever, max_tokens=10)),
        replace(base, output=folder / "steps-300", prompts=one, sampling=replace(forever, max_tokens=300)),
        replace(base, output=folder / "steps-2000", prompts=one, sampling=forever),
    ]


SHARED = {
    "dense": {"family": "qwen2", "eos_token_id": list(range(100, 110))},
    "one-kv-head": {"family": "qwen3", "kv_heads": 1, "tied": True},
    "experts": {"family": "qwen2_moe"},
    "latent": {"family": "deepseek_v3", "kv_lora_rank": 64},
}
"""Checkpoints that two ranks share: biases, and texts that end early; q/k norms, and fewer key-value heads than ranks;
experts with a shared one; latent attention."""
ENGINE_ARGS = {"latent": {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}}
"""vLLM's CPU kernel of the rotary embedding takes the heads of DeepSeek's queries for tokens: torch's instead."""
BLOCK = 32
PREFIX = [3 + i % 90 for i in range(2 * BLOCK + 7)]
"""Tokens that several prompts begin with: two blocks of the cache and some more."""
PROMPTS = [[*PREFIX, 5, 6, 7], [11, 12, 13], [*PREFIX, 8, 9], [*PREFIX, 8, 9], [21], list(range(20, 60))]


def parallel_jobs(folder: Path) -> list[DumpJob]:
    """Return jobs that run the same tokens on one rank, on two, and with every batching vLLM knows.

    The reference of each model generates; the others feed its tokens through decode steps.
    """
    prompts = folder / "shared.jsonl"
    prompts.write_text("".join(json.dumps({"token_ids": ids}) + "\n" for ids in PROMPTS))
    jobs = []
    for name in SHARED:
        base = DumpJob("rollout", "vllm", folder / f"{name}-model", folder / name, prompts=prompts, dtype="float32")
        base.sampling = Sampling(max_tokens=40, seed=3, ignore_eos=True)
        base.engine_args = ENGINE_ARGS.get(name, {})
        again = replace(base, prompts=None, source=folder / name, force_decode=True)
        jobs += [base, replace(again, output=folder / f"{name}-tp2", parallel=Parallel(tp=2))]
    dense = jobs[0]
    again = replace(dense, prompts=None, source=dense.output, force_decode=True)
    small = {"max_num_batched_tokens": 32, "enable_chunked_prefill": True, "block_size": BLOCK}
    few_blocks = {"num_gpu_blocks_override": 9, "max_model_len": 4 * BLOCK, "max_num_seqs": 6, "block_size": BLOCK}
    cache = {"enable_prefix_caching": True}
    return [
        *jobs,
        replace(again, output=folder / "pp2", parallel=Parallel(pp=2)),
        replace(again, output=folder / "chunked", engine_args=small),
        replace(again, output=folder / "cached", engine_args={**small, **cache}),
        replace(again, output=folder / "preempted", engine_args=few_blocks),
        replace(again, output=folder / "preempted-cached", engine_args={**few_blocks, **cache}),
        replace(dense, output=folder / "samples", sampling=Sampling(n=3, max_tokens=40, seed=7), engine_args=small),
        replace(again, output=folder / "samples-again", source=folder / "samples", force_decode=False),
    ]


def main() -> None:
    """Run every job and print how long each took."""
    model, folder, only = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    parallel = only == ["--parallel"]
    if parallel:
        os.environ["VLLM_MLA_DISABLE"] = "1"  # its kernels for latent attention want bf16 and a head size of 576
    for name, arguments in (SHARED if parallel else FAMILIES).items():
        sizes = {"hidden": 128, "intermediate": 256, **({} if name == "latent" else {"head_dim": 32})}
        make_checkpoint(folder / f"{name}-model", **{"family": name, **sizes, **arguments})
    for job in parallel_jobs(folder) if parallel else jobs(model, folder):
        if parallel or not only or job.output.name in only:
            start = time.monotonic()
            run_dump(job)
            print(f"{job.output.name} {time.monotonic() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
