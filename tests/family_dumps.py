"""Roll out small checkpoints of many model families on vLLM, in one process: ``python family_dumps.py FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from checkpoints import make_checkpoint

from probe.hooks.runners.job import DumpJob, Sampling
from probe.hooks.runners.run import run_dump

FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "gemma2": {"tied": True},
    "gemma3": {"tied": True},
    # one head: vLLM's CPU kernel for rope does not honour the stride between heads of a part of each head
    "deepseek_v3": {"heads": 1, "num_key_value_heads": 1},
}
"""Family -> arguments of make_checkpoint."""


def main() -> None:
    """Make each checkpoint and its rollout."""
    folder = Path(sys.argv[1])
    ids = folder / "ids.jsonl"
    ids.write_text('{"token_ids": [5, 6, 7, 8, 9]}\n{"id": "short", "token_ids": [11, 12]}\n')
    for name in sys.argv[2:] or FAMILIES:
        model = make_checkpoint(folder / f"{name}-model", family=name, hidden=128, **FAMILIES[name])
        job = DumpJob("rollout", "vllm", model, folder / name, prompts=ids, dtype="float32")
        job.sampling = Sampling(n=2, max_tokens=6, seed=1)
        run_dump(job)
        print(f"{name} done", flush=True)


if __name__ == "__main__":
    main()
