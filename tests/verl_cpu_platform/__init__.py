"""A stand-in that lets verl's training workers run on a CPU: verl itself knows cuda and npu only.

Loaded by ``VERL_USE_EXTERNAL_MODULES=verl_cpu_platform`` in every process that imports verl, chosen by
``VERL_PLATFORM=probe_cpu``. It only says which device there is; the workers, engines and losses that run are verl's
own. ``VERL_ENGINE_DEVICE=cuda`` makes verl find its FSDP engine, which it registers for cuda and npu.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed
import verl.utils.import_utils
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry

ENVIRONMENT = {
    "VERL_PLATFORM": "probe_cpu",
    "VERL_ENGINE_DEVICE": "cuda",
    "VERL_USE_EXTERNAL_MODULES": "verl_cpu_platform",
}
GIB = 1 << 30


class _CpuModule:
    """What ``torch.cuda`` is to verl; questions that a CPU cannot answer are answered with 0."""

    __name__ = "torch.cpu"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _ANSWERS.get(name, getattr(torch.cpu, name, lambda *args, **kwargs: 0))


_ANSWERS: dict[str, Any] = {
    "mem_get_info": lambda *args: (8 * GIB, 16 * GIB),
    "get_device_name": lambda *args: "CPU",
    "is_available": lambda: False,
    "current_device": lambda: "cpu",
}
_MODULE = _CpuModule()


@PlatformRegistry.register(platform="probe_cpu")
class PlatformCPU(PlatformCUDA):
    """verl's description of a device, for a CPU."""

    device_name = property(lambda self: "cpu")
    vendor_name = property(lambda self: "cpu")
    device_module = property(lambda self: _MODULE)

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: Any) -> None:
        pass

    def synchronize(self, device_index: Any = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_cpus": 0}

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def rollout_env_vars(self) -> dict[str, str]:
        return {}

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def cudart(self) -> None:
        return None


def _let_gloo_serve_once() -> None:
    """Make the backend that verl names, one for the CPU and one for the device, valid where both are the CPU."""
    original = torch.distributed.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        original("cpu:gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)

    torch.distributed.init_process_group = init_process_group


def _hide_trl() -> None:
    """Say that trl is not there: verl 0.9.1 wants value heads of it that later versions do not have."""
    verl.utils.import_utils.is_trl_available = lambda: False


_let_gloo_serve_once()
_hide_trl()
