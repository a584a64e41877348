"""A user's training script in several processes: ``torchrun ... fsdp_debugger.py MODEL FOLDER``, a dump per wrapper.

Each rank runs its own sequences forward and backward, as data-parallel training does, without telling probe anything.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from probe import PrecisionDebugger

SEQUENCES = [[5, 6, 7, 8, 9], [11, 12, 13], [21, 22, 23, 24], [31, 32]]
CPU = torch.device("cpu")


def load(folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def ddp(model: Any) -> Any:
    return torch.nn.parallel.DistributedDataParallel(model)


def fsdp1(model: Any, use_orig_params: bool = False) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({type(model.model.layers[0])})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=use_orig_params, device_id=CPU)


def fsdp1_with_original_parameters(model: Any) -> Any:
    return fsdp1(model, use_orig_params=True)


def fsdp2(model: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp2_recomputing(model: Any) -> Any:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return fsdp2(model.train())


def fsdp1_recomputing(model: Any) -> Any:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    kind, wrapped = type(model.model.layers[0]), fsdp1(model)
    apply_activation_checkpointing(wrapped, check_fn=lambda module: isinstance(module, kind))
    return wrapped


def by_hand(model: Any) -> Any:
    """Return the bare model: gradients would be averaged by hand, and nothing says what the ranks share."""
    return model


MODES = (ddp, fsdp1, fsdp1_with_original_parameters, fsdp1_recomputing, fsdp2, fsdp2_recomputing, by_hand)


def main() -> None:
    """Train two micro-batches per rank under every wrapper."""
    model, folder = sys.argv[1], Path(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for mode in MODES:
        wrapped = mode(load(model))
        with PrecisionDebugger(enabled=True, dump_path=str(folder / mode.__name__)).start(wrapped):
            for tokens in SEQUENCES[rank::2]:
                wrapped(input_ids=torch.tensor([tokens]), use_cache=False).logits.square().mean().backward()
        left = sum(len(m._forward_hooks) for m in wrapped.modules() if type(m).__name__ in ("Linear", "Qwen2RMSNorm"))
        assert not left, (mode.__name__, left)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
