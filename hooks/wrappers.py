"""What stands around a model: data parallelism, precision casts, checkpointing, adapters, compilation, recomputation.

Names and hooks belong to the model inside, so that a dump looks the same with and without its wrappers.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import torch

from probe.errors import CaptureError

WRAPPED = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Attribute in which a wrapper anywhere inside a model holds the one module it stands for: FSDP1, activation
checkpointing (torch.distributed.algorithms)."""
OUTER = ("module", *WRAPPED)
"""Attribute in which a wrapper around a whole model holds it, alone: DDP, DataParallel, Megatron's DDP and
Float16Module keep it in ``module``."""
_INNER = re.compile(r"(?:^|(?<=\.))(?:" + "|".join(WRAPPED) + r")(?:\.|$)")
_BASE_LAYER = re.compile(r"\.base_layer(?=\.[^.]+$)")


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside every wrapper around it."""
    return entries(model)[-1]


def entries(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules whose call is a forward of the model, outermost first; the last one is the model itself.

    Wrappers that call what they hold as a module are not among them. PEFT's are: PeftModel's tuner runs the model's
    ``forward`` without its hooks, while ``generate`` calls the model directly.
    """
    found = []
    while True:
        children = dict(model.named_children())
        held = next((name for name in OUTER if list(children) == [name]), None)
        if held is None and _is_tuner(model):
            held = "model"
            found.append(model)
        elif held is None and hasattr(model, "peft_config") and "base_model" in children:
            held = "base_model"
            if _is_tuner(children[held]):
                found.append(model)
        if held is None:
            return [*found, model]
        model = children[held]


def _is_tuner(module: torch.nn.Module) -> bool:
    """Tell whether a module is what PEFT puts around a model to adapt its layers (LoraModel and others)."""
    return hasattr(module, "peft_config") and [name for name, _ in module.named_children()] == ["model"]


def is_wrapper(module: torch.nn.Module) -> bool:
    """Tell whether a module inside a model only stands for the one that it holds."""
    return any(name in module._modules for name in WRAPPED)


def strip_wrappers(path: str) -> str:
    """Return a module's path without the wrappers inside the model."""
    return _INNER.sub("", path).rstrip(".")


def parameter_path(path: str) -> str:
    """Return a parameter's path without wrappers; a layer that PEFT or vLLM adapts keeps its weight's own name."""
    return _BASE_LAYER.sub("", strip_wrappers(path))


def is_data_parallel(model: torch.nn.Module, world_size: int) -> bool:
    """Tell whether DDP, FSDP1 or FSDP2 spreads batches over all of the processes, each of which runs the whole model.

    No where they cover only some: what the others share is then not known from the wrapper.
    """
    return any(_replicas(module) == world_size for module in model.modules())


def _replicas(module: Any) -> int:
    """Return over how many processes a data-parallel wrapper spreads batches, 0 for any other module."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        return int(module.process_group.size())
    if fsdp is None:
        return 0
    if isinstance(module, fsdp.FullyShardedDataParallel):
        replicas = getattr(module, "_inter_node_pg", None)  # hybrid sharding: copies of the sharding group
        return int(module.process_group.size()) * (int(replicas.size()) if replicas is not None else 1)
    if isinstance(module, getattr(fsdp, "FSDPModule", ())):  # torch before 2.6 has none
        state: Any = module
        group = state._get_fsdp_state()._fsdp_param_group
        return int(group.mesh_info.mesh.size()) if group is not None else 0
    return 0


def recomputing() -> bool:
    """Tell whether this thread runs a backward: a forward inside it recomputes what a checkpoint did not keep.

    Holds for torch.utils.checkpoint, reentrant or not, for whatever builds on it (Hugging Face, FSDP's wrapper) and
    for Megatron's own recomputation, since all of them run the forward again from within the autograd engine.
    """
    return torch._C._current_graph_task_id() != -1


def refuse_compiled(chunks: list[torch.nn.Module]) -> None:
    """Raise CaptureError when a model, or any module in it, is compiled: hooks inside it would never fire.

    Under TORCHDYNAMO_DISABLE=1 nothing is: torch.compile then leaves modules as they are.
    """
    for chunk in chunks:
        for path, module in chunk.named_modules():
            if type(module).__name__ == "OptimizedModule" or _compiled_in_place(module):
                where = f"module {path}" if path else "the model"
                raise CaptureError(
                    f"{where} is compiled, so hooks inside it would never fire",
                    "dump it uncompiled, for instance with TORCHDYNAMO_DISABLE=1",
                )


def _compiled_in_place(module: torch.nn.Module) -> bool:
    call = getattr(module, "_compiled_call_impl", None)
    return call is not None and getattr(call, "__func__", None) is not torch.nn.Module._call_impl
