"""Bring tensors from a device to host memory without blocking the model: cpu, cuda and npu behind one interface.

A tensor handed to :class:`HostTransfer` is already the capture's own copy (nothing else writes to it). On an
accelerator it travels to pinned memory on a side stream; ``arrive`` waits for the side stream, never for the model's.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from probe.errors import EngineError

_RAW_VIEW = {
    torch.bfloat16: (torch.int16, np.uint16),
    torch.float8_e4m3fn: (torch.uint8, np.uint8),
    torch.float8_e5m2: (torch.uint8, np.uint8),
    torch.bool: (torch.uint8, np.uint8),
}
_UNINDEXABLE = {getattr(torch, "float4_e2m1fn_x2", None)}
"""Dtypes for which torch has no indexing: their rows are gathered as bytes, of the same shape."""
INSTALL = {
    "cuda": "install a CUDA build of torch, or use --device cpu",
    "npu": "pip install 'probe-rl[npu]', source CANN's set_env.sh, or use --device cpu",
}


def dtype_name(tensor: torch.Tensor) -> str:
    """Return the dtype's name as the dump records it, for instance ``bfloat16``."""
    return str(tensor.dtype).removeprefix("torch.")


def indexable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose rows torch can gather: the same one, or a view of its bytes."""
    return tensor.view(torch.uint8) if tensor.dtype in _UNINDEXABLE else tensor


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return a CPU tensor's bits in the numpy carrier of its dtype (bf16 as uint16, fp8 and bool as uint8)."""
    if tensor.dtype in _RAW_VIEW:
        view, carrier = _RAW_VIEW[tensor.dtype]
        return tensor.contiguous().view(view).numpy().view(carrier)
    return tensor.contiguous().numpy()


def device_module(kind: str) -> Any:
    """Return ``torch.cuda`` or ``torch.npu``; raise EngineError with the fix when that device cannot be used."""
    module = _runtime(kind)
    if module is None or not module.is_available():
        raise EngineError(f"device {kind!r} is not available to torch {torch.__version__}", INSTALL.get(kind, ""))
    return module


def _runtime(kind: str) -> Any:
    """Return ``torch.cuda`` or ``torch.npu``, or None; torch before 2.5 does not load torch_npu by itself."""
    if kind == "npu" and not hasattr(torch, kind) and importlib.util.find_spec("torch_npu") is not None:
        try:
            importlib.import_module("torch_npu")
        except (ImportError, RuntimeError, OSError) as error:  # CANN is missing or its set_env.sh was not sourced
            raise EngineError(f"torch_npu cannot be imported ({error})", INSTALL[kind]) from error
    return getattr(torch, kind, None)


def pick_device(requested: str = "auto") -> str:
    """Return ``cpu``, ``cuda`` or ``npu``: the requested device if usable, else an error; ``auto`` takes the best."""
    if requested == "auto":
        for kind in ("cuda", "npu"):
            module = _runtime(kind)
            if module is not None and module.is_available():
                return kind
        return "cpu"
    if requested not in ("cpu", *INSTALL):
        raise EngineError(f"unknown device {requested!r}", "use cpu, cuda, npu or auto")
    if requested != "cpu":
        device_module(requested)
    return requested


@dataclass
class _Arrival:
    host: torch.Tensor
    event: Any = None


class HostTransfer:
    """Move the capture's own tensors to the host; one object per capture, for tensors of any device."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    def send(self, tensor: torch.Tensor) -> _Arrival:
        """Start moving ``tensor`` and return a handle for :meth:`arrive`."""
        if tensor.device.type not in INSTALL:
            return _Arrival(tensor if tensor.device.type == "cpu" else tensor.cpu())
        module = getattr(torch, tensor.device.type)
        if not all(hasattr(module, name) for name in ("Stream", "stream", "current_stream")):
            return _Arrival(tensor.cpu())  # a runtime without streams: the copy is synchronous
        return self._send_on_side_stream(module, tensor)

    def _send_on_side_stream(self, module: Any, tensor: torch.Tensor) -> _Arrival:
        stream = self._streams.get(tensor.device)
        if stream is None:
            stream = self._streams[tensor.device] = module.Stream(device=tensor.device)
        stream.wait_stream(module.current_stream(tensor.device))
        with module.stream(stream):
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor, non_blocking=True)
            event = stream.record_event()
        tensor.record_stream(stream)  # keeps the allocator from handing the memory out before the copy is done
        return _Arrival(host, event)

    def arrive(self, arrival: _Arrival) -> np.ndarray:
        """Wait for one transfer and return its bits."""
        if arrival.event is not None:
            arrival.event.synchronize()
        return to_numpy(arrival.host)
