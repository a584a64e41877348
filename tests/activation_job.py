"""A job that knows nothing of probe: a tiny model continues a prompt, in whichever process the first word says.

    python activation_job.py plain|spawn|ray [ADDRESS]

Prints the ids and the sum of the logits of every process that ran the model, as JSON. Also run by torchrun (``plain``).
"""

from __future__ import annotations

import json
import sys
from typing import Any


def work() -> dict[str, Any]:
    """Make a model from a fixed seed, continue two prompts, and run one forward of the whole."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = Qwen2ForCausalLM(
        Qwen2Config(vocab_size=64, num_hidden_layers=2, pad_token_id=0, eos_token_id=None, **sizes)
    )
    model = model.eval()
    prompts = torch.tensor([[3, 5, 7, 9], [4, 6, 8, 10]])
    with torch.no_grad():
        made = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=3, do_sample=True)
        logits = model(input_ids=made, attention_mask=torch.ones_like(made)).logits
    return {"ids": made.tolist(), "sum": logits.double().sum().item(), "after": torch.rand(1).item()}


def spawned() -> list[dict[str, Any]]:
    """Run the model in a process of multiprocessing, started afresh."""
    import concurrent.futures
    import multiprocessing

    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return [pool.submit(work).result()]


def on_ray(address: str | None) -> list[dict[str, Any]]:
    """Run the model in an actor that an actor started, on a new cluster or on the one at ``address``."""
    import ray

    new = {} if address else {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 100_000_000}
    ray.init(address=address, runtime_env={"env_vars": {"MINE": "kept"}}, **new)

    class Worker:
        def go(self) -> dict[str, Any]:
            import os

            assert os.environ["MINE"] == "kept"
            return work()

    @ray.remote(num_cpus=0)
    class Runner:
        def run(self) -> dict[str, Any]:
            worker = ray.remote(num_cpus=0)(Worker).options(runtime_env={"env_vars": {"RANK": "0"}}).remote()
            return ray.get(worker.go.remote())

    done = [ray.get(Runner.remote().run.remote())]
    ray.shutdown()
    return done


if __name__ == "__main__":
    how, address = sys.argv[1], (sys.argv[2:] or [None])[0]
    done = {"plain": lambda: [work()], "spawn": spawned, "ray": lambda: on_ray(address)}[how]()
    print("RESULT", json.dumps(done))
