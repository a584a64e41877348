"""verl's Megatron engine on CPU, as far as it goes: ``verl_megatron.py MODEL FORMAT RESULT [SIZES [LAST]]``.

FORMAT is thd or bshd, SIZES are of the parallel axes (json; ranks from torchrun), LAST is logprob or update.

verl's own: the engine's passes, micro-batches and schedule, ``forward_step``, the model's forward with its thd and bshd
preprocessing, vocabulary-parallel log-probs, the PPO loss and the backward pass. Not verl's: who builds the model (its
bridges want packages and kernels of GPUs; here it is the model of ``probe dump --engine megatron``), the optimizer
(plain SGD), and the device. In bshd verl's mask is the one that it makes for Ascend: Megatron's own attention takes
no mask of keys alone, as TransformerEngine's does.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from verl_worker import Rolled, batch_of


def make_engine(model: str, data_format: str, sizes: dict[str, int]) -> Any:
    """Return an engine whose model was built by probe; its passes are verl's."""
    import verl.models.mcore.util
    from verl.workers.config import McoreEngineConfig
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    from probe.checkpoint import Checkpoint
    from probe.hooks.runners.job import Parallel
    from probe.hooks.runners.megatron_model import build_chunks

    verl.models.mcore.util.is_npu_available = data_format == "bshd"

    class Engine(MegatronEngineWithLMHead):
        def __init__(self) -> None:  # verl's own builds the model through a bridge
            config = {"strategy": "megatron", "use_remove_padding": data_format == "thd", "use_fused_kernels": False}
            self.engine_config = McoreEngineConfig(**config, sequence_parallel=False, use_dynamic_bsz=False)
            self.module = list(build_chunks(Checkpoint(model), Parallel(**sizes), dtype="float32"))
            for chunk in self.module:
                chunk.config.variable_seq_lengths = True  # as verl sets it: micro-batches differ in length
            self.tf_config, self.enable_routing_replay = self.module[0].config, False
            hf_config = SimpleNamespace(architectures=["Qwen2ForCausalLM"], model_type="qwen2")
            mtp = SimpleNamespace(enable=False, enable_train=False)
            tokenizer = SimpleNamespace(pad_token_id=0)
            self.model_config = SimpleNamespace(
                hf_config=hf_config, mtp=mtp, tokenizer=tokenizer, model_type="language_model"
            )
            self.optimizer = torch.optim.SGD(self._parameters(), lr=1e-3)

        def _parameters(self) -> list[torch.nn.Parameter]:
            return [parameter for chunk in self.module for parameter in chunk.parameters()]

        def optimizer_zero_grad(self) -> None:
            self.optimizer.zero_grad()

        def optimizer_step(self) -> float:
            norm = torch.nn.utils.clip_grad_norm_(self._parameters(), 1.0)
            self.optimizer.step()
            return float(norm)

    return Engine()


def main(model: str, data_format: str, result: str, sizes: str = "{}", last: str = "update") -> None:
    """Run a log-prob pass and, unless that is ``last``, an update; write what came of them where the engine has it."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import McoreActorConfig
    from verl.workers.utils.losses import ppo_loss
    from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

    from probe.hooks.jobs.session import session

    prompts = [[10, 11, 12, 13, 14, 15], [20, 21, 22, 23], [30, 31, 32], [40, 41, 42, 43, 44]]
    rolled = [
        Rolled(p, [50 + i, 60 + i, 70 + i][: 3 - i % 2], [-1.0] * (3 - i % 2), f"p{i}") for i, p in enumerate(prompts)
    ]
    batch = batch_of(rolled, 0.8)
    engine = make_engine(model, data_format, json.loads(sizes))

    def nested() -> Any:
        data = left_right_2_no_padding(batch.to_tensordict())
        tu.assign_non_tensor(
            data, use_dynamic_bsz=False, micro_batch_size_per_gpu=2, calculate_entropy=False, global_batch_size=4
        )
        return data

    data, found = nested(), {}
    output = engine.infer_batch(data)
    if engine.is_mp_src_rank_with_outputs():
        found["old_log_probs"] = no_padding_2_padding(output["model_output"]["log_probs"], data).tolist()
    old = torch.tensor(found.get("old_log_probs", torch.zeros_like(batch.batch["rollout_log_probs"]).tolist()))
    batch.batch["old_log_probs"] = old
    batch.batch["advantages"] = torch.ones_like(old) * batch.batch["response_mask"]
    actor = McoreActorConfig(strategy="megatron", rollout_n=1, ppo_mini_batch_size=4, ppo_micro_batch_size_per_gpu=2)
    trained = engine.train_batch(nested(), partial(ppo_loss, config=actor)) if last == "update" else None
    if engine.is_mp_src_rank_with_outputs():
        if trained is not None:
            found |= {"loss": trained["loss"], "norm": trained["metrics"]["grad_norm"]}
        Path(result).write_text(json.dumps(found))
    session().close()


if __name__ == "__main__":
    main(*sys.argv[1:])
