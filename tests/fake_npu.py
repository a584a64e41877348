"""A pretend ``npu`` device, standing in for Ascend hardware and torch_npu, which cannot exist where these tests run.

Tensors report ``device.type == "npu"`` and hold a host tensor, on which every operator runs: results equal the CPU's
bit for bit. There are no streams and no pinned memory. Registering the device lasts for the process, so that tests use
it in a subprocess: ``import fake_npu; fake_npu.install()``.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "npu"


class FakeRuntime(types.ModuleType):
    """What torch expects of ``torch.npu``: one device without streams."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        """Do nothing: there is one device."""

    def synchronize(self, device: Any = None) -> None:
        """Do nothing: every operator has finished when it returns."""

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing: operators draw from the host's generator."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def _is_in_bad_fork(self) -> bool:
        return False


class NpuTensor(torch.Tensor):
    """A tensor that says it is on the device and keeps its values in ``host``."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> NpuTensor:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=torch.device(NAME, 0),
            requires_grad=host.requires_grad,
        )
        tensor.host = host
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    def __repr__(self) -> str:
        return f"NpuTensor({self.host!r})"


def _to_host(value: Any) -> Any:
    if isinstance(value, NpuTensor):
        return value.host
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == NAME else value


def run(operator: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator on the host tensors; results live on the device unless the operator names another one."""
    target = kwargs.get("device")
    known = {id(leaf.host): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, NpuTensor)}
    result = operator(*tree_map(_to_host, args), **tree_map(_to_host, kwargs))
    if operator._schema.name == "aten::copy_":
        return args[0]
    if target is not None and torch.device(target).type != NAME:
        return result

    def placed(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return known[id(value)] if id(value) in known else NpuTensor(value)

    return tree_map(placed, result)


def install() -> None:
    """Register the device with torch for the rest of the process."""
    runtime = FakeRuntime(f"torch.{NAME}")
    _setup_privateuseone_for_python_backend(NAME, backend_module=runtime)
    sys.modules[runtime.__name__] = runtime
    install.library = torch.library.Library("_", "IMPL")  # type: ignore[attr-defined]  # kept alive with the module
    install.library.fallback(run_fallback, "PrivateUse1")  # type: ignore[attr-defined]


def run_fallback(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator that makes a tensor on the device out of nothing."""
    return run(operator, args, kwargs)
