"""Run PrecisionDebugger inside a process that holds a vLLM engine: ``python vllm_debugger.py MODEL FOLDER``.

The engine's RMSNorm is first replaced by the in-place operator that CUDA uses: on a CPU vLLM's own is out of place, so
that a capture without copies would go unnoticed.
"""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_USE_V2_MODEL_RUNNER="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    TORCHDYNAMO_DISABLE="1",
    VLLM_LOGGING_LEVEL="WARNING",
)

import torch
from vllm import LLM, SamplingParams
from vllm.model_executor.layers.layernorm import RMSNorm

from probe import PrecisionDebugger
from probe.errors import UsageError

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2], [11]]
BLOCK = 32
SHARED = [[*range(20, 20 + BLOCK + 5), 3], [*range(20, 20 + BLOCK + 5), 4, 5]]
"""Prompts of which the second finds its first block in the cache."""


def in_place(self, x, residual=None):
    """Overwrite the input with the norm and the residual with the sum."""
    if residual is None:
        return RMSNorm.forward_native(self, x)
    torch.ops._C.fused_add_rms_norm(x, residual, self.weight.data, self.variance_epsilon)
    return x, residual


def generate_with_a_weight_sync(llm: LLM, model: Any, folder: Path, params: SamplingParams) -> list[int]:
    """Generate one response whose engine receives (the same) weights after two steps; return all its tokens."""
    engine, output = llm.llm_engine, None
    with PrecisionDebugger(enabled=True, dump_path=str(folder)).start(llm):
        engine.add_request("again", {"prompt_token_ids": PROMPTS[1]}, params)
        for step in range(100):
            if step == 2:
                model.load_weights(iter(()))
            if not engine.has_unfinished_requests():
                break
            output = next(iter(engine.step()), output)
    assert output is not None
    return PROMPTS[1] + list(output.outputs[0].token_ids)


def main() -> None:
    """Dump a generation with the LLM handed over, then one with the bare model."""
    model, folder = sys.argv[1], Path(sys.argv[2])
    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        block_size=BLOCK,
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
    )
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    for module in runner.model.modules():
        if isinstance(module, RMSNorm):
            module._forward_method = types.MethodType(in_place, module)
    greedy = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, detokenize=False)
    facts: dict[str, Any] = {}
    for name, handed in (("llm", llm), ("bare", runner.model)):
        debugger = PrecisionDebugger(enabled=True, dump_path=str(folder / name), prompts_only=name == "bare")
        with debugger.start(handed):
            outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], greedy, use_tqdm=False)
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in runner.model.modules())
        facts[name] = {"tokens": [p + list(o.outputs[0].token_ids) for p, o in zip(PROMPTS, outputs)], "hooks": hooks}
    with PrecisionDebugger(enabled=True, dump_path=str(folder / "cached")).start(llm):
        outputs = llm.generate([{"prompt_token_ids": p} for p in SHARED], greedy, use_tqdm=False)
    facts["cached"] = {"tokens": [p + list(o.outputs[0].token_ids) for p, o in zip(SHARED, outputs)]}
    facts["cached"]["hits"] = [o.num_cached_tokens for o in outputs]
    facts["synced"] = {"tokens": generate_with_a_weight_sync(llm, runner.model, folder / "synced", greedy)}
    try:
        PrecisionDebugger(enabled=True, dump_path=str(folder / "no")).start(llm, uids=["a"])
    except UsageError as error:
        facts["announced"] = str(error)
    (folder / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
