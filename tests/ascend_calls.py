"""The calls of vllm-ascend's ``dump_config`` on a CPU: ``python ascend_calls.py VERSION CHECKPOINT CONFIG``.

vllm-ascend itself runs on NPUs only. :class:`StandInForNPUModelRunner` is not its runner but vLLM's for CPUs, which
makes the calls that vllm-ascend 0.23.0 and its main branch of August 2026 (``vllm_ascend/worker/model_runner_v1.py``)
make of msProbe's PrecisionDebugger, at the same points of a pass. Prints what vLLM returned as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_USE_V2_MODEL_RUNNER="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    TORCHDYNAMO_DISABLE="1",
    VLLM_LOGGING_LEVEL="WARNING",
)

from vllm import LLM, SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker import cpu_worker

VERSION, CHECKPOINT, CONFIG = sys.argv[1:]
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2], [11]]


class StandInForNPUModelRunner(cpu_worker.CPUModelRunner):
    """vLLM's runner with the calls of vllm-ascend's in eager mode."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._debugger_started = self.idled = False
        from msprobe.pytorch import PrecisionDebugger

        self.debugger = PrecisionDebugger(CONFIG)

    def _start_dump_data(self, **kwargs: Any) -> None:
        if self.debugger is None or self._debugger_started:
            return
        self.debugger.start(self.model, **kwargs)
        self._debugger_started = True

    def _finalize_dump_data(self, **kwargs: Any) -> None:
        if self.debugger is None or not self._debugger_started:
            return
        if hasattr(self.debugger, "stop"):
            self.debugger.stop()
            self._debugger_started = False
        self.debugger.step(**kwargs)

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """Start first, also in a pass that then has nothing to run, as 0.23.0 does.

        Before its first request the runner once has none, as a data-parallel rank that waits for the others, and makes
        the pass of its own that they need.
        """
        if not self.idled:
            self.idled = True
            self.execute_model(SchedulerOutput.make_empty())
            self._dummy_run(1)
        if VERSION == "0.23.0":
            self._start_dump_data()
        return super().execute_model(*args, **kwargs)

    def _update_states(self, scheduler_output: Any) -> Any:
        """Start once the scheduler's orders are taken, as main does."""
        result = super()._update_states(scheduler_output)
        if VERSION == "main" and scheduler_output.total_num_scheduled_tokens:
            self._start_dump_data(scheduled_tokens=scheduler_output.num_scheduled_tokens)
        return result

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        result = super().sample_tokens(*args, **kwargs)
        self._finalize_dump_data()
        return result

    def _dummy_run(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._dummy_run(*args, **kwargs)
        self._finalize_dump_data(dump=False)
        return result


def main() -> None:
    cpu_worker.CPUModelRunner = StandInForNPUModelRunner
    llm = LLM(
        CHECKPOINT,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        block_size=32,
        skip_tokenizer_init=True,
    )
    greedy = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], greedy, use_tqdm=False)
    print("RETURNED", json.dumps([p + list(o.outputs[0].token_ids) for p, o in zip(PROMPTS, outputs)]))


if __name__ == "__main__":
    main()
