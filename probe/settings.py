"""One settings object for capture: keyword over ``PROBE_*`` environment over config file over default."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from probe.errors import UsageError

STAGES = ("rollout", "actor", "reference", "logprob", "update")
"""The stages that a dump can be of (probe.store.schema.STAGES): defined here, where reading them imports no numpy.

``actor`` is a trainer's forward as a whole; a job that recomputes log-probs before it updates has both as stages of
their own, ``logprob`` and ``update``."""
TASKS = TOKENS, STATISTICS, TENSOR = ("tokens", "statistics", "tensor")
"""What is recorded, by detail: ids and log-probs; also statistics of each row of each tensor; also their values."""
LEVELS = ("L0",)
DATA_MODES = ("all", "forward", "input", "output")
WEIGHTS = ("sketch", "layers")
"""What of the parameters is stored: sketches, or also the values of the modules that are recorded."""
_LAYER = re.compile(r"\b(?:layers|h|blocks)\.(\d+)\b")
"""The number of the layer in a module's path; what is in no layer (embedding, final norm, head) has none."""
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


@dataclass
class Settings:
    """What a :class:`probe.PrecisionDebugger` records and where.

    ``dump_path`` is the dump's folder; ``task`` is one of :data:`TASKS`. ``enabled`` is DUMP_ON; ``prompts_only`` is
    PROMPTS_ONLY: store prompt rows only (the model still sees the whole batch). ``step`` and ``rank`` list what to
    record, empty for all. ``list`` keeps the modules whose path contains one of its entries. ``data_mode`` picks
    inputs, outputs or both. ``stage`` names the stage, one of :data:`STAGES`, and thereby a folder of the dump; empty
    takes the engine's usual one. ``weights`` (``sketch`` or ``layers``) says whether the values of the recorded
    modules' parameters are stored too, at most ``weights_bytes`` of them per file. ``layers``, ``seqs``, ``rows`` and
    ``max_bytes`` are the budget: numbers of the layers, how many sequences, how many rows of each, and bytes of tensors
    per file; empty or 0 for all. Raises UsageError for a task, level, stage, weights or data_mode that is none of those
    listed.
    """

    dump_path: str = "probe-dump"
    task: str = TENSOR
    level: str = "L0"
    step: tuple[int, ...] = ()
    rank: tuple[int, ...] = ()
    list: tuple[str, ...] = ()
    data_mode: tuple[str, ...] = ("all",)
    stage: str = ""
    prompts_only: bool = False
    enabled: bool = False
    block_bytes: int = 8 << 20
    weights: str = "sketch"
    weights_bytes: int = 2 << 30
    layers: tuple[int, ...] = ()
    seqs: int = 0
    rows: int = 0
    max_bytes: int = 0

    def __post_init__(self) -> None:
        for name, allowed in (("task", TASKS), ("level", LEVELS), ("stage", ("", *STAGES)), ("weights", WEIGHTS)):
            if getattr(self, name) not in allowed:
                words = ", ".join(filter(None, allowed))
                raise UsageError(f"{name} {getattr(self, name)!r} is not supported", f"use {words}")
        unknown = set(self.data_mode) - set(DATA_MODES)
        if unknown:
            raise UsageError(f"data_mode {sorted(unknown)[0]!r} is not supported", f"use {', '.join(DATA_MODES)}")

    def wants_module(self, path: str) -> bool:
        """Tell whether a module (or a parameter of it) is recorded under ``list`` and ``layers``."""
        layer = _LAYER.search(path) if self.layers else None
        if layer is not None and int(layer[1]) not in self.layers:
            return False
        return not self.list or any(entry in path for entry in self.list)

    def wants(self, path: str, slot: str) -> bool:
        """Tell whether a module's slot is recorded under ``list`` and ``data_mode``."""
        if not self.wants_module(path):
            return False
        kind = "output" if slot.startswith("output") else "input"
        return not {"all", "forward", kind}.isdisjoint(self.data_mode)


ENVIRONMENT = {
    "enabled": "DUMP_ON",
    "prompts_only": "PROMPTS_ONLY",
    "dump_path": "PROBE_DUMP_DIR",
    "task": "PROBE_TASK",
    "stage": "PROBE_STAGE",
    "step": "PROBE_STEPS",
    "weights": "PROBE_WEIGHTS",
    "weights_bytes": "PROBE_WEIGHTS_BYTES",
    "layers": "PROBE_LAYERS",
    "seqs": "PROBE_SEQS",
    "rows": "PROBE_ROWS",
    "max_bytes": "PROBE_MAX_BYTES",
}
JOB_DEFAULTS: dict[str, Any] = {"seqs": 4, "rows": 256, "max_bytes": 2 << 30}
"""Budget of a job that the environment alone switched on, where it says nothing else (design: a 7B model writes some
5 MB per token, so that 4 x 256 rows are 5 GB without the limit of bytes)."""


MSPROBE_FILTERS = ("scope", "tensor_list", "backward_input")
"""Keys of an msProbe config.json that would change what is recorded: accepted only while they are empty."""
MSPROBE_IGNORED = ("summary_mode", "file_format", "async_dump", "enable_dataloader", "extra_info", "precision")
"""Keys of an msProbe config.json that have no counterpart and change nothing about what is recorded."""


def load_settings(
    config_path: str | Path | None, keywords: Mapping[str, Any], environ: Mapping[str, str] = os.environ
) -> Settings:
    """Return settings from keywords, the environment and a json or yaml file, in this order of precedence.

    An environment variable that is empty counts as unset. A file's ``"enabled": true`` needs no DUMP_ON beside it.
    Raises UsageError naming an unknown key, an unsupported value, or a file that cannot be read.
    """
    values = _from_file(Path(config_path), keywords.get("task") or environ.get("PROBE_TASK")) if config_path else {}
    switched_on = _flag("enabled", values.pop("enabled", False))  # a file that says so needs no DUMP_ON
    values |= {key: environ[name] for key, name in ENVIRONMENT.items() if environ.get(name)}
    values["enabled"] = switched_on or values.get("enabled", False)
    values |= {key: value for key, value in keywords.items() if value is not None}
    known = {field.name: field for field in fields(Settings)}
    for key in values:
        if key not in known:
            raise UsageError(f"unknown setting {key!r}", f"use one of {', '.join(known)}")
    return Settings(**{key: _convert(key, value) for key, value in values.items()})


def job_settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings of a job that the environment alone switched on: :data:`JOB_DEFAULTS` where nothing is said.

    ``PROBE_CONFIG`` names a json or yaml file; ``PROBE_SEQS=0`` and alike take a limit away. Without steps, which are
    recorded follows from the task (:class:`probe.hooks.jobs.session.Session`). Raises UsageError as
    :func:`load_settings`.
    """
    config = environ.get("PROBE_CONFIG") or None
    settings = load_settings(config, {}, environ)
    stated = {key for key in JOB_DEFAULTS if environ.get(ENVIRONMENT[key])}
    if config:
        stated |= _from_file(Path(config), environ.get("PROBE_TASK")).keys()
    return replace(settings, **{key: value for key, value in JOB_DEFAULTS.items() if key not in stated})


def weights_settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """Return default settings with what the environment says about storing parameters, for runs that probe starts."""
    given = {key: environ[ENVIRONMENT[key]] for key in ("weights", "weights_bytes") if environ.get(ENVIRONMENT[key])}
    return Settings(**{key: _convert(key, value) for key, value in given.items()})


def read_object(path: Path, kind: str, example: str) -> dict[str, Any]:
    """Return the object in a json or yaml file; raise UsageError, naming the ``kind`` of file, where it holds none."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"the {kind} file {path} cannot be read ({error.strerror})", "check its path") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"the {kind} file {path} is not UTF-8 text ({error.reason})", "save it as UTF-8") from None
    values = _parse_yaml(path, kind, text) if path.suffix in (".yaml", ".yml") else _parse_json(path, kind, text)
    if not isinstance(values, dict):
        raise UsageError(f"the {kind} file {path} does not hold an object", f"write {example}")
    return values


def _from_file(path: Path, task: Any) -> dict[str, Any]:
    values = read_object(path, "config", '{"dump_path": "..."}')
    # msProbe's files keep the options of each task under the task's own name
    options = values.get(str(task or values.get("task") or Settings.task))
    merged = {k: v for k, v in values.items() if not isinstance(v, dict) and k not in MSPROBE_IGNORED}
    if isinstance(options, dict):
        merged |= {k: v for k, v in options.items() if k not in MSPROBE_IGNORED}
    for key in MSPROBE_FILTERS:
        if merged.pop(key, None):
            raise UsageError(f"the config file {path} sets {key!r}, which probe does not have", "use 'list', or none")
    return merged


def _parse_json(path: Path, kind: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the {kind} file {path} is not valid JSON ({error})", "correct it") from None


def _parse_yaml(path: Path, kind: str, text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise UsageError(f"reading {path} needs PyYAML", "pip install pyyaml, or write it as JSON") from None
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"the {kind} file {path} is not valid YAML ({reason})", "correct it") from None


def _convert(key: str, value: Any) -> Any:
    if key in ("enabled", "prompts_only"):
        return _flag(key, value)
    if key in ("block_bytes", "weights_bytes", "seqs", "rows", "max_bytes"):
        return _number(key, value)
    if key in ("step", "rank", "layers"):
        return tuple(_number(key, v) for v in _many(value))
    if key in ("list", "data_mode"):
        return tuple(str(v) for v in _many(value))
    return str(value)


def _flag(key: str, value: Any) -> bool:
    text = str(value).strip().lower()
    if text not in (*_TRUE, *_FALSE):
        raise UsageError(f"{ENVIRONMENT.get(key, key)} is {value!r}", "use 1 or 0")
    return text in _TRUE


def _many(value: Any) -> list[Any]:
    if isinstance(value, str):
        return [part for part in value.replace(" ", "").split(",") if part]
    return [*value] if isinstance(value, list | tuple | set) else [value]


def _number(key: str, value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise UsageError(f"{key} holds {value!r}, which is not a whole number", "use for instance 0,1,2") from None
