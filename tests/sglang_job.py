"""A job with SGLang that knows nothing of probe: generate, receive other weights, generate again.

``python sglang_job.py CHECKPOINT OPTIONS``: the engine's options as JSON, beside those that a CPU needs; prints what it
returned as JSON.
"""

import sgl_kernel  # noqa: F401  isort: skip  the stand-in, before SGLang looks for the kernels
import json
import sys
import time

import sglang
import torch
from safetensors.torch import load_file

PROMPTS = [[5, 6, 7, 8, 9, 20, 21], [10, 11, 12], [40]]
CPU = {
    **{"device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch", "dtype": "float32"},
    **{"disable_cuda_graph": True, "grammar_backend": "none", "skip_tokenizer_init": True, "random_seed": 0},
    **{"max_total_tokens": 512, "context_length": 128, "max_running_requests": 8, "log_level": "warning"},
}
SAMPLING = {"max_new_tokens": 4, "temperature": 0.7, "ignore_eos": True}
SETTLED = 0.5
"""Seconds after which no batch is on its way any more: SGLang takes no weights before."""
PATIENCE = 3.0
"""Seconds after which what an idle engine has recorded is complete."""


def returned(outputs):
    return [
        {
            "prompt": prompt,
            "ids": out["output_ids"],
            "logprobs": [p for p, *_ in out["meta_info"]["output_token_logprobs"]],
        }
        for prompt, out in zip(PROMPTS, outputs)
    ]


def main(checkpoint, options):
    engine = sglang.Engine(model_path=checkpoint, **CPU | options)
    found = [returned(engine.generate(input_ids=PROMPTS, sampling_params=SAMPLING, return_logprob=True))]
    time.sleep(SETTLED)
    weights = load_file(f"{checkpoint}/model.safetensors")
    for name in ("model.norm.weight", "model.embed_tokens.weight"):  # two calls, as trainers send buckets: one update
        engine.update_weights_from_tensor([(name, weights[name] * torch.tensor(1.5))])
    found.append(returned(engine.generate(input_ids=PROMPTS, sampling_params=SAMPLING, return_logprob=True)))
    print("RETURNED", json.dumps(found), flush=True)
    time.sleep(PATIENCE)
    engine.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
