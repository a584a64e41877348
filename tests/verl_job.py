"""A job as a user of verl has it: one Ray job that rolls out, computes log-probs and updates, unaware of any capture.

    python verl_job.py OPTIONS.json

where the options are the arguments of :func:`main`; what training came to goes to ``result`` (json), for comparing jobs
bit by bit.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

TEMPERATURE = 0.8


class Rollout:
    """A Ray actor with a real vLLM in processes of its own, as a verl server has one."""

    def __init__(self, model: str, dtype: str) -> None:
        os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        from vllm import LLM

        self.llm = LLM(
            model,
            dtype=dtype,
            enforce_eager=True,
            enable_prefix_caching=False,
            async_scheduling=False,
            logprobs_mode="processed_logprobs",
            max_model_len=128,
            seed=0,
            skip_tokenizer_init=True,
        )

    def generate(self, prompts: list[list[int]], length: int) -> list[dict[str, Any]]:
        """Return ids and log-probs of one response per prompt, of different lengths."""
        from vllm import SamplingParams

        wanted = [
            SamplingParams(
                temperature=TEMPERATURE, max_tokens=length - i, logprobs=0, seed=i, ignore_eos=True, detokenize=False
            )
            for i in range(len(prompts))
        ]
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], wanted, use_tqdm=False)
        made = [output.outputs[0] for output in outputs]
        return [
            {
                "response": list(one.token_ids),
                "logprobs": [scores[token].logprob for token, scores in zip(one.token_ids, one.logprobs or [])],
            }
            for one in made
        ]

    def stop(self) -> None:
        """End the engine as a server does at the end of a job."""
        self.llm.llm_engine.engine_core.shutdown()


def random_responses(prompts: list[list[int]], length: int) -> list[dict[str, Any]]:
    """Return one response per prompt that no engine generated, where a test needs none."""
    import torch

    seed = torch.Generator().manual_seed(0)
    return [
        {"response": torch.randint(5, 200, (length - i,), generator=seed).tolist(), "logprobs": [-1.0] * (length - i)}
        for i in range(len(prompts))
    ]


def main(
    model: str,
    prompts: list[list[int]],
    result: str,
    *,
    rollout_model: str = "",
    length: int = 8,
    steps: int = 1,
    update: dict[str, Any] | None = None,
    trained: int | None = None,
    versions: list[int] | None = None,
    **worker: Any,
) -> None:
    """Run the job; with ``rollout_model`` vLLM makes the responses. ``worker`` and ``update``: see verl_worker.py.

    ``trained``: of how many prompts the responses are trained on, all by default; ``versions``: the first and the last
    version of the weights that verl declares of each response, and the version that the trainer sent last.
    """
    import numpy as np
    import ray
    import torch
    from verl_worker import Rolled, batch_of, log_prob_pass, training_worker, update_pass

    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100_000_000)
    responses = random_responses(prompts, length)
    if rollout_model:
        server = ray.remote(num_cpus=0)(Rollout).remote(rollout_model, "float32")
        responses = ray.get(server.generate.remote(prompts, length))
        ray.get(server.stop.remote())
    workers = training_worker(Path(model), **worker)
    if versions:
        workers.sync(versions[2])
    found = []
    for _ in range(steps):
        rolled = [
            Rolled(prompt, made["response"], made["logprobs"], f"prompt{i}")
            for i, (prompt, made) in enumerate(zip(prompts[:trained], responses))
        ]
        batch = batch_of(rolled, TEMPERATURE)
        for name, version in zip(("min_global_steps", "max_global_steps"), versions or ()):
            batch.non_tensor_batch[name] = np.array([version] * len(rolled), dtype=object)
        old = log_prob_pass(workers, batch)
        batch.batch["old_log_probs"] = old
        signs = torch.tensor([1.0 if i % 2 else -1.0 for i in range(len(rolled))])
        batch.batch["advantages"] = signs[:, None] * batch.batch["response_mask"]
        batch.batch["returns"] = batch.batch["advantages"].clone()
        metrics = update_pass(workers, batch, **(update or {}))
        losses = {k: str(v) for k, v in metrics.items() if not k.startswith(("perf", "mfu"))}
        found.append({"old_log_probs": old.tolist(), "metrics": losses, "responses": responses})
    Path(result).write_text(json.dumps(found))
    ray.shutdown()


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))
    main(**json.loads(Path(sys.argv[1]).read_text()))
