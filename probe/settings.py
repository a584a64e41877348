"""One settings object for capture: keyword over ``PROBE_*`` environment over config file over default."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from probe.errors import UsageError

TASKS = ("tensor",)
LEVELS = ("L0",)
DATA_MODES = ("all", "forward", "input", "output")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


@dataclass
class Settings:
    """What a :class:`probe.PrecisionDebugger` records and where.

    ``dump_path`` is the dump's folder. ``enabled`` is DUMP_ON; ``prompts_only`` is PROMPTS_ONLY: store prompt rows only
    (the model still sees the whole batch). ``step`` and ``rank`` list what to record, empty for all. ``list`` keeps the
    modules whose path contains one of its entries. ``data_mode`` picks inputs, outputs or both. ``stage`` names the
    stage (rollout, actor, reference); empty takes the engine's usual one.
    """

    dump_path: str = "probe-dump"
    task: str = "tensor"
    level: str = "L0"
    step: tuple[int, ...] = ()
    rank: tuple[int, ...] = ()
    list: tuple[str, ...] = ()
    data_mode: tuple[str, ...] = ("all",)
    stage: str = ""
    prompts_only: bool = False
    enabled: bool = False
    block_bytes: int = 8 << 20

    def __post_init__(self) -> None:
        for name, allowed in (("task", TASKS), ("level", LEVELS)):
            if getattr(self, name) not in allowed:
                raise UsageError(f"{name} {getattr(self, name)!r} is not supported", f"use {', '.join(allowed)}")
        unknown = set(self.data_mode) - set(DATA_MODES)
        if unknown:
            raise UsageError(f"data_mode {sorted(unknown)[0]!r} is not supported", f"use {', '.join(DATA_MODES)}")

    def wants(self, path: str, slot: str) -> bool:
        """Tell whether a module's slot is recorded under ``list`` and ``data_mode``."""
        if self.list and not any(entry in path for entry in self.list):
            return False
        kind = "output" if slot.startswith("output") else "input"
        return not {"all", "forward", kind}.isdisjoint(self.data_mode)


ENVIRONMENT = {
    "enabled": "DUMP_ON",
    "prompts_only": "PROMPTS_ONLY",
    "dump_path": "PROBE_DUMP_PATH",
    "task": "PROBE_TASK",
    "stage": "PROBE_STAGE",
    "step": "PROBE_STEPS",
}


def load_settings(
    config_path: str | Path | None, keywords: Mapping[str, Any], environ: Mapping[str, str] = os.environ
) -> Settings:
    """Return settings from keywords, the environment and a json or yaml file, in this order of precedence.

    Raises UsageError naming an unknown key, an unsupported value, or a file that cannot be read.
    """
    values = _from_file(Path(config_path)) if config_path else {}
    if "enabled" not in values:
        values["enabled"] = environ.get("DUMP_ON", "0")
    values |= {key: environ[name] for key, name in ENVIRONMENT.items() if name in environ and key != "enabled"}
    values |= {key: value for key, value in keywords.items() if value is not None}
    known = {field.name: field for field in fields(Settings)}
    for key in values:
        if key not in known:
            raise UsageError(f"unknown setting {key!r}", f"use one of {', '.join(known)}")
    return Settings(**{key: _convert(key, value) for key, value in values.items()})


def _from_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"the config file {path} cannot be read ({error.strerror})", "check its path") from None
    try:
        if path.suffix in (".yaml", ".yml"):
            import yaml

            values = yaml.safe_load(text)
        else:
            values = json.loads(text)
    except ValueError as error:
        raise UsageError(f"the config file {path} is not valid JSON ({error})", "correct it") from None
    except Exception as error:  # yaml.YAMLError, whose class is only known once yaml is imported
        raise UsageError(f"the config file {path} is not valid YAML ({' '.join(str(error).split())})") from None
    if not isinstance(values, dict):
        raise UsageError(f"the config file {path} does not hold an object", 'write {"dump_path": "..."}')
    # msProbe's files keep the options of each task under the task's own name
    return {k: v for k, v in values.items() if not isinstance(v, dict)} | values.get(values.get("task", ""), {})


def _convert(key: str, value: Any) -> Any:
    if key in ("enabled", "prompts_only"):
        return _flag(key, value)
    if key == "block_bytes":
        return int(value)
    if key in ("step", "rank"):
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
