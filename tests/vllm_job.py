"""A user's vLLM program, which knows nothing of probe: ``python vllm_job.py SCENARIO MODEL OUTPUT.json [ARGUMENTS]``.

Writes what vLLM returned as JSON: per sequence its prompt, its tokens and the log-prob of each. ``generate`` samples
two responses to each prompt; ``updates`` replaces the weights, within requests too, and aborts one. ARGUMENTS are those
of ``LLM`` as JSON; MODEL is two checkpoints, with a comma between, for ``updates``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

PROMPTS = [[5, 6, 7, 8, 9], [11, 12, 13, 14, 15, 16, 17, 18], [21, 22, 23], [31], [41, 42]]
DEFAULTS = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 128,
    "enforce_eager": True,
    "enable_prefix_caching": False,
}


def sampling(**more: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        **{"temperature": 0.8, "max_tokens": 12, "logprobs": 0, "seed": 3, "detokenize": False, **more}
    )


def told(output: Any) -> list[Any]:
    """Return what vLLM's answer to one request says, one entry per response."""
    return [
        [
            list(output.prompt_token_ids),
            list(o.token_ids),
            [entry[token].logprob for token, entry in zip(o.token_ids, o.logprobs)],
        ]
        for o in output.outputs
    ]


def generate(llm: Any, prompts: list[list[int]], **more: Any) -> list[Any]:
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling(**more), use_tqdm=False)
    return [entry for output in outputs for entry in told(output)]


def interrupted(llm: Any, prompts: list[list[int]], steps: int, meanwhile: Any) -> list[Any]:
    """Run requests, call ``meanwhile(names)`` after some steps of the engine, and run them to their end."""
    engine, names = llm.llm_engine, [f"r{number}" for number in range(len(prompts))]
    for name, ids in zip(names, prompts):
        engine.add_request(name, {"prompt_token_ids": ids}, sampling())
    for _ in range(steps):
        engine.step()
    meanwhile(names)
    found = []
    while engine.has_unfinished_requests():
        found += [entry for output in engine.step() if output.finished for entry in told(output)]
    return found


def updates(llm: Any, first: str, second: str) -> dict[str, Any]:
    def reload(path: str) -> None:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": path})

    found = {"0": generate(llm, PROMPTS[:2])}
    reload(second)
    found["1"] = generate(llm, PROMPTS[:2])
    found["1-2"] = interrupted(llm, PROMPTS[2:4], 4, lambda names: reload(first))
    found["aborted"] = interrupted(llm, PROMPTS[3:], 4, lambda names: llm.llm_engine.abort_request(names[:1]))
    Path(os.environ.get("PROBE_DUMP_DIR", "."), "step").write_text("1\n")
    found["later"] = generate(llm, PROMPTS[4:])
    return found


def main() -> None:
    scenario, models, output, *arguments = sys.argv[1:]
    paths = models.split(",")
    from vllm import LLM

    llm = LLM(model=paths[0], **{**DEFAULTS, **(json.loads(arguments[0]) if arguments else {})})
    found = updates(llm, *paths) if scenario == "updates" else generate(llm, PROMPTS, n=2)
    Path(output).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
