"""verl 0.9.1's own TrainingWorkers on CPU, as its trainer uses them, and a batch for them: shared by tests of verl."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

TEMPERATURE = 0.8


@dataclass(frozen=True)
class Rolled:
    """One response: ids of prompt and response, and the rollout's log-prob of each response token."""

    prompt: list[int]
    response: list[int]
    logprobs: list[float]
    uid: str


def batch_of(rolled: list[Rolled], temperature: float = TEMPERATURE) -> Any:
    """Return the DataProto that verl's trainer would make: left-padded prompts, right-padded responses."""
    from verl import DataProto

    rows, width, length = len(rolled), max(len(r.prompt) for r in rolled), max(len(r.response) for r in rolled)
    prompts, responses = torch.zeros(rows, width, dtype=torch.long), torch.zeros(rows, length, dtype=torch.long)
    mask = torch.zeros(rows, width + length, dtype=torch.long)
    logprobs = torch.zeros(rows, length)
    for i, one in enumerate(rolled):
        prompts[i, width - len(one.prompt) :] = torch.tensor(one.prompt)
        responses[i, : len(one.response)] = torch.tensor(one.response)
        logprobs[i, : len(one.response)] = torch.tensor(one.logprobs)
        mask[i, width - len(one.prompt) : width + len(one.response)] = 1
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], 1),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0) * mask,
        "response_mask": mask[:, width:].clone(),
        "rollout_log_probs": logprobs,
    }
    uids = np.array([r.uid for r in rolled], dtype=object)
    return DataProto.from_dict(
        tensors=tensors,
        non_tensors={"uid": uids},
        meta_info={"temperature": temperature, "global_token_num": mask.sum(-1).tolist()},
    )


def training_worker(
    model: Path, *, ranks: int = 1, strategy: str = "fsdp2", remove_padding: bool = False, dynamic: bool = False
) -> Any:
    """Return a RayWorkerGroup of verl's TrainingWorker with its PPO loss, in fp32; Ray is initialised already."""
    import ray
    from verl.single_controller.ray.base import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import (
        FSDPActorConfig,
        FSDPEngineConfig,
        FSDPOptimizerConfig,
        HFModelConfig,
        TrainingWorkerConfig,
    )
    from verl.workers.utils.losses import ppo_loss

    config = TrainingWorkerConfig(
        model_type="language_model",
        model_config=HFModelConfig(
            path=str(model),
            use_remove_padding=remove_padding,
            override_config={"attn_implementation": "sdpa"},
            enable_gradient_checkpointing=False,
        ),
        engine_config=FSDPEngineConfig(
            strategy=strategy,
            forward_only=False,
            model_dtype="fp32",
            dtype="float32",
            use_dynamic_bsz=dynamic,
            infer_micro_batch_size_per_gpu=2,
            micro_batch_size_per_gpu=1,
            max_token_len_per_gpu=24,
            infer_max_token_len_per_gpu=24,
            use_torch_compile=False,
            mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        ),
        optimizer_config=FSDPOptimizerConfig(lr=1e-2, total_training_steps=2, lr_warmup_steps=0),
        checkpoint_config=CheckpointConfig(),
    )
    workers = RayWorkerGroup(
        resource_pool=RayResourcePool(process_on_nodes=[ranks], use_gpu=False, max_colocate_count=1),
        ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(_syncing_worker()), config=config),
        device_name="cpu",
    )
    workers.reset()
    actor = FSDPActorConfig(strategy=strategy, rollout_n=1, ppo_mini_batch_size=4, ppo_micro_batch_size_per_gpu=1)
    workers.set_loss_fn(partial(ppo_loss, config=actor))
    return workers


def _syncing_worker() -> type:
    """Return verl's TrainingWorker with the weight sync of its ActorRolloutRefWorker, to one that receives nothing."""
    import asyncio
    from types import SimpleNamespace

    from verl.single_controller.base.decorator import Dispatch, register
    from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

    class Receiver:
        async def send_weights(self, engine: Any, global_steps: int) -> None:
            pass

    class SyncingWorker(TrainingWorker):  # type: ignore[misc]
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def sync(self, version: int) -> None:
            """Send the weights as verl does, under a number."""
            whole = SimpleNamespace(actor=self, checkpoint_engine=Receiver(), config=None)
            asyncio.run(ActorRolloutRefWorker.update_weights(whole, global_steps=version, mode="delta_sharded"))

    return SyncingWorker


def log_prob_pass(workers: Any, batch: Any) -> torch.Tensor:
    """Return old_log_probs [batch, response] as verl's RayPPOTrainer._compute_old_log_prob has them computed."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

    data = left_right_2_no_padding(batch.to_tensordict())
    tu.assign_non_tensor(data, calculate_entropy=True, compute_loss=False)
    output = workers.infer_batch(data)
    output = output.get() if hasattr(output, "get") and not hasattr(output, "keys") else output
    return no_padding_2_padding(tu.get(output, "log_probs"), data).float()


def update_pass(
    workers: Any, batch: Any, *, mini_batch_size: int = 4, epochs: int = 1, shuffle: bool = False
) -> dict[str, Any]:
    """Return the metrics of one update of the actor, as verl's RayPPOTrainer._update_actor has it done."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    data = left_right_2_no_padding(batch.to_tensordict())
    tu.assign_non_tensor(
        data,
        calculate_entropy=False,
        distillation_use_topk=False,
        distillation_only=False,
        global_batch_size=mini_batch_size,
        mini_batch_size=mini_batch_size,
        epochs=epochs,
        seed=42,
        dataloader_kwargs={"shuffle": shuffle},
        compute_loss=True,
    )
    output = workers.train_mini_batch(data)
    output = output.get() if hasattr(output, "get") and not hasattr(output, "keys") else output
    return dict(tu.get(output, "metrics"))
