"""Make every vLLM dump that the engine tests need, in one process: ``python engine_dumps.py MODEL FOLDER``."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

from checkpoints import make_checkpoint

from probe.hooks.demo_model import DEMO_PROMPTS
from probe.hooks.runners.job import DumpJob, Sampling
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
    small_passes = {"max_num_batched_tokens": 16, "max_num_seqs": 8, "enable_chunked_prefill": True}
    return [
        *families,
        base,
        replace(base, output=folder / "bf16", dtype="bfloat16"),
        replace(base, output=folder / "prompts-only", prompts_only=True),
        replace(base, output=folder / "rescored", prompts=None, source=fp32),
        replace(base, output=folder / "chunked", prompts=None, source=fp32, engine_args=small_passes),
        replace(base, output=folder / "decoded", prompts=None, source=fp32, force_decode=True),
        replace(base, output=folder / "steps-10", prompts=one, sampling=replace(forever, max_tokens=10)),
        replace(base, output=folder / "steps-300", prompts=one, sampling=replace(forever, max_tokens=300)),
        replace(base, output=folder / "steps-2000", prompts=one, sampling=forever),
    ]


def main() -> None:
    """Run every job and print how long each took."""
    model, folder = Path(sys.argv[1]), Path(sys.argv[2])
    only = sys.argv[3:]
    for name, arguments in FAMILIES.items():
        make_checkpoint(folder / f"{name}-model", family=name, hidden=128, **arguments)
    for job in jobs(model, folder):
        if not only or job.output.name in only:
            start = time.monotonic()
            run_dump(job)
            print(f"{job.output.name} {time.monotonic() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
