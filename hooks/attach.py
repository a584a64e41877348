"""Find out what a user's model is, and open or complete the dump file that records it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from probe.errors import CaptureError
from probe.hooks.capture import Capture, unwrap
from probe.hooks.engines.megatron import MegatronAdapter
from probe.hooks.engines.sequences import SequenceBook
from probe.hooks.engines.transformers import BatchAdapter
from probe.hooks.engines.vllm import VllmAdapter, find_runner, record_schedule
from probe.hooks.runners.tokens import write_tokens
from probe.hooks.weights import sketches
from probe.manifest import make_manifest, package_versions, write_manifest
from probe.settings import Settings
from probe.store.writer import DumpWriter

log = logging.getLogger("probe")


@dataclass(frozen=True)
class Kind:
    """One kind of model a script may hand over: how it is recognised and described."""

    engine: str
    stage: str
    package: str
    prefixes: tuple[str, ...]


KINDS = (
    Kind("vllm", "rollout", "vllm", ("vllm.", "vllm_ascend.")),
    Kind("megatron", "actor", "megatron-core", ("megatron.core.", "mindspeed.")),
    Kind("transformers", "actor", "transformers", ("transformers.",)),
    Kind("module", "actor", "torch", ("",)),
)


@dataclass
class Attached:
    """A running capture and what completes it."""

    writer: DumpWriter
    adapter: Any
    capture: Capture
    manifest: dict[str, Any]
    undo: Callable[[], None] | None


def attach(model: Any, settings: Settings, step: int, rank: int, writer: DumpWriter | None, adapter: Any) -> Attached:
    """Hook a model and return the running capture; ``writer`` and ``adapter`` continue those of the same step."""
    runner = find_runner(model)
    chunks = [runner.model] if runner is not None else list(model) if isinstance(model, list | tuple) else [model]
    for chunk in chunks:
        if not isinstance(chunk, torch.nn.Module):
            raise CaptureError(f"cannot capture a {type(chunk).__name__}", "pass a torch.nn.Module or a list of them")
    kind = kind_of(chunks[0])
    if kind.engine == "vllm" and runner is None:
        raise CaptureError("this vLLM model has no model runner in this process", "pass the LLM, or use 'probe dump'")
    stage = settings.stage or kind.stage
    manifest = _manifest(kind, stage, unwrap(chunks[0]), runner, settings)
    if writer is None:
        folder = Path(settings.dump_path)
        path = folder / stage / f"step{step}" / f"rank{rank}.h5"
        writer = DumpWriter(path, manifest, block_bytes=settings.block_bytes)
        write_manifest(folder, manifest)
        for chunk in chunks:
            for weight in sketches(unwrap(chunk)):
                writer.add_weight(weight)
    if adapter is None:
        adapter = make_adapter(kind, writer, runner, settings)
    capture = Capture(writer, adapter, settings)
    capture.attach(chunks)
    undo = record_schedule(runner, adapter) if runner is not None else None
    return Attached(writer, adapter, capture, manifest, undo)


def kind_of(model: torch.nn.Module) -> Kind:
    """Return the kind of a model, from where the classes of its modules come."""
    homes = {type(module).__module__ + "." for module in model.modules()}
    return next(kind for kind in KINDS if any(home.startswith(kind.prefixes) for home in homes))


def make_adapter(kind: Kind, writer: DumpWriter, runner: Any, settings: Settings) -> Any:
    """Return the adapter that reads rows off this kind of model."""
    book = SequenceBook(writer)
    if kind.engine == "vllm":
        return VllmAdapter(book, runner, prompts_only=settings.prompts_only)
    adapter = MegatronAdapter if kind.engine == "megatron" else BatchAdapter
    return adapter(book, prompts_only=settings.prompts_only)


def complete(writer: DumpWriter, adapter: Any, manifest: dict[str, Any]) -> None:
    """Close a step's file and, where this process saw whole sequences, add ids and log-probs beside it."""
    if not writer.tensor_rows:
        writer.abandon()
        writer.partial.unlink()
        for folder in writer.partial.parents[:3]:
            with contextlib.suppress(OSError):
                (folder / "manifest.json").unlink(missing_ok=True) if folder == writer.partial.parents[2] else None
                folder.rmdir()
        return
    path = writer.close()
    if int(manifest["topology"].get("world_size", 1)) == 1 and adapter.book.sequences:
        write_tokens(path.parent, manifest, adapter.logits)


def _manifest(kind: Kind, stage: str, model: torch.nn.Module, runner: Any, settings: Settings) -> dict[str, Any]:
    config, path = _config(model, runner)
    architecture = (config.get("architectures") or [type(model).__name__])[0]
    version = package_versions().get(kind.package, torch.__version__ if kind.engine == "module" else "")
    parameter = next(model.parameters(), torch.zeros(()))
    return make_manifest(
        stage,
        kind.engine,
        version,
        {"path": path, "architecture": architecture, "config": config},
        dtype=str(parameter.dtype).removeprefix("torch."),
        device=parameter.device.type,
        prompts_only=settings.prompts_only,
        task=settings.task,
        sampling={},
        source_dump=None,
        backends={},
    )


def _config(model: torch.nn.Module, runner: Any) -> tuple[dict[str, Any], str]:
    """Return the model's configuration in Hugging Face's words, and where its checkpoint is if the model knows."""
    if runner is not None:
        return runner.model_config.hf_config.to_dict(), str(runner.model_config.model)
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        return config.to_dict(), str(getattr(config, "_name_or_path", ""))
    if hasattr(config, "num_query_groups"):
        found = {hf: getattr(config, name, None) for hf, name in _MEGATRON_CONFIG.items()}
        return found | {"vocab_size": getattr(model, "vocab_size", 0)}, ""
    return {}, ""


_MEGATRON_CONFIG = {
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "rms_norm_eps": "layernorm_epsilon",
}
