"""``PROBE_AS_MSPROBE=1``: programs that import msProbe's PrecisionDebugger get the one of this package.

verl's profiler (``tool: precision_debugger``) and vllm-ascend (``dump_config``) do; so neither needs msProbe installed
nor a line changed. A finder, first in line, answers for ``msprobe`` and ``msprobe.pytorch``; nothing heavy is imported
before somebody imports those.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

SWITCH = "PROBE_AS_MSPROBE"
PACKAGE, PYTORCH = "msprobe", "msprobe.pytorch"
STAGES = {
    "actor_compute_log_prob": "logprob",
    "ref_compute_log_prob": "reference",
    "actor_update": "update",
    "compute_values": "actor",
    "critic_update": "actor",
    "compute_rm_score": "actor",
}
"""What verl's profiler calls a stage -> the stage of a dump; other models than the policy are a trainer's forwards."""


def offer(module: ModuleType | None = None) -> None:
    """Answer for msProbe from now on, where :data:`SWITCH` asks for it; calling it again does nothing."""
    wanted = os.environ.get(SWITCH, "").strip().lower() in ("1", "true", "yes", "on")
    if wanted and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in (PACKAGE, PYTORCH):
            return None
        return importlib.machinery.ModuleSpec(fullname, _Loader(), is_package=fullname == PACKAGE)


class _Loader(importlib.abc.Loader):
    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = f"probe in place of msProbe, because {SWITCH} is set"
        if module.__name__ == PYTORCH:
            import probe

            module.PrecisionDebugger = debugger_class()  # type: ignore[attr-defined]
            module.seed_all, module.save = probe.seed_all, probe.save  # type: ignore[attr-defined]


def debugger_class() -> type:
    """Return our PrecisionDebugger with what verl's profiler touches of msProbe's: ``service``."""
    from probe import PrecisionDebugger as Ours

    class PrecisionDebugger(Ours):
        """Ours, switched on by whoever makes it: msProbe knows no DUMP_ON."""

        def __init__(self, config_path: str | Path | None = None, **keywords: Any) -> None:
            path = keywords.pop("dump_path", None)
            super().__init__(config_path, **{"enabled": True, **keywords})
            self.service = _Service(self)
            if path is not None:
                self.service.config.dump_path = path

    return PrecisionDebugger


class _Config:
    """The part of msProbe's settings that verl's profiler sets: where the next start() writes."""

    def __init__(self, debugger: Any) -> None:
        self._debugger = debugger

    @property
    def dump_path(self) -> str:
        return str(self._debugger.settings.dump_path)

    @dump_path.setter
    def dump_path(self, path: str | Path) -> None:
        """Take verl's ``SAVE_PATH/step_N/STAGE`` as stage and step of one dump ``SAVE_PATH``; any other as it is."""
        given, debugger = Path(path), self._debugger
        stage, number = STAGES.get(given.name), given.parent.name.removeprefix("step_")
        if stage is None or not given.parent.name.startswith("step_"):
            debugger.settings = replace(debugger.settings, dump_path=str(path))
            return
        debugger.settings = replace(debugger.settings, dump_path=str(given.parents[1]), stage=stage, step=())
        debugger.current_step = int(number) if number.isdecimal() else 0


class _Service:
    """What verl's profiler calls ``service`` of a debugger."""

    def __init__(self, debugger: Any) -> None:
        self.config, self._debugger = _Config(debugger), debugger

    def reset_status(self) -> None:
        """Complete the dump of the stage that has ended: verl starts the next one elsewhere."""
        step = self._debugger.current_step
        self._debugger.step()
        self._debugger.current_step = step
