"""A plain vLLM script: MODEL OUT.jsonl -> what it generated, as ids. Nothing in it knows of probe."""

import json
import sys

from vllm import LLM, SamplingParams

PROMPTS = ["the cat sat on", "a dog ran to the", "one two three four", "red green blue"]


def main() -> None:
    model, output = sys.argv[1:3]
    # eager and uncached, so that each module runs for each token; the tokens tier (PROBE_TASK=tokens) needs neither
    llm = LLM(model, enforce_eager=True, enable_prefix_caching=False, max_model_len=128, dtype="float32", seed=0)
    answers = llm.generate(PROMPTS, SamplingParams(max_tokens=12, logprobs=0, seed=0, ignore_eos=True))
    with open(output, "w", encoding="utf-8") as file:
        for answer in answers:
            row = {"prompt": list(answer.prompt_token_ids), "response": list(answer.outputs[0].token_ids)}
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":  # vLLM starts processes that import this file again
    main()
