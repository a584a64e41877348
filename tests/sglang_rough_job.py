"""A program that is rough with SGLang: ``python sglang_rough_job.py CHECKPOINT OPTIONS``, as ``sglang_job.py``.

Several samples of a prompt, requests that generate nothing, that SGLang refuses or that are aborted, more tokens than
the cache holds, and a trainer that takes its requests back, sends weights, goes on to step 1 and lets them continue.
"""

import sgl_kernel  # noqa: F401  isort: skip  the stand-in, before SGLang looks for the kernels
import asyncio
import json
import os
import sys
import time
from pathlib import Path

import sglang
from safetensors.torch import load_file
from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.utils import MultiprocessingSerializer
from sglang_job import CPU, PATIENCE, SAMPLING

LONG = {**SAMPLING, "max_new_tokens": 40}
ENDLESS = {**SAMPLING, "max_new_tokens": 110}
NORM = "model.norm.weight"


def said(prompts, outputs):
    return [
        {
            "prompt": prompt,
            "ids": out["output_ids"],
            "logprobs": [p for p, *_ in out["meta_info"].get("output_token_logprobs") or ()],
            "reason": out["meta_info"]["finish_reason"]["type"],
        }
        for prompt, out in zip(prompts, outputs)
    ]


async def refused(engine):
    try:
        await engine.async_generate(
            input_ids=[80, 81], sampling_params=SAMPLING, return_logprob=True, logprob_start_len=9
        )
    except ValueError:
        return True
    return False


async def begin(engine, prompts):
    """Return the tasks of requests that have generated something, with far more ahead of them."""
    asked = [
        engine.async_generate(input_ids=p, sampling_params=ENDLESS, return_logprob=True, stream=True) for p in prompts
    ]
    streams = [await one for one in asked]
    for stream in streams:
        await anext(stream)
    return [asyncio.ensure_future(last(stream)) for stream in streams]


async def last(stream):
    return [answer async for answer in stream][-1]


async def aborted(engine, prompts):
    tasks = await begin(engine, prompts)
    engine.tokenizer_manager.abort_request(abort_all=True)
    return said(prompts, await asyncio.gather(*tasks))


async def updated(engine, prompts, norm):
    tasks, manager = await begin(engine, prompts), engine.tokenizer_manager
    await manager.pause_generation(PauseGenerationReqInput(mode="retract"))
    packed = MultiprocessingSerializer.serialize([(NORM, norm * 1.5)])
    await manager.update_weights_from_tensor(
        UpdateWeightsFromTensorReqInput(serialized_named_tensors=[packed], flush_cache=False), None
    )
    Path(os.environ["PROBE_DUMP_DIR"], "step").write_text(f"1 {os.environ.get('PROBE_RUN', '')}\n")
    await manager.continue_generation(ContinueGenerationReqInput())
    return said(prompts, await asyncio.gather(*tasks))


def main(checkpoint, options):
    engine, norm = sglang.Engine(model_path=checkpoint, **CPU | options), load_file(f"{checkpoint}/model.safetensors")
    twice = [[5, 6, 7, 8, 9], [10, 11, 12]]
    found = {"samples": engine.generate(input_ids=twice, sampling_params={**SAMPLING, "n": 2}, return_logprob=True)}
    found["samples"] = said([prompt for prompt in twice for _ in range(2)], found["samples"])
    mixed = [[40, 41, 42, 43], [50, 51], [60, 61, 62]]
    kinds = [
        {**SAMPLING, "max_new_tokens": 0},
        {**SAMPLING, "temperature": 0},
        {**SAMPLING, "stop_token_ids": [*range(90)], "ignore_eos": False},
    ]
    outputs = engine.generate(input_ids=mixed, sampling_params=kinds, return_logprob=[True, True, False])
    found["mixed"] = said(mixed, outputs)
    many = [[20 + n, 6, 7, 8, 30 + n] for n in range(6)]
    found["many"] = said(many, engine.generate(input_ids=many, sampling_params=LONG, return_logprob=True))
    found["refused"] = engine.loop.run_until_complete(refused(engine))
    found["aborted"] = engine.loop.run_until_complete(aborted(engine, [[70, 31, 32], [71, 31, 32]]))
    time.sleep(PATIENCE)
    found["updated"] = engine.loop.run_until_complete(updated(engine, [[72, 31, 32]], norm[NORM]))
    print("RETURNED", json.dumps(found), flush=True)
    time.sleep(PATIENCE)
    engine.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
