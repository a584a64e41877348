"""``PROBE_AS_MSPROBE=1``: programs that import msProbe's PrecisionDebugger get the one of this package.

verl's profiler (``tool: precision_debugger``) and vllm-ascend (``dump_config``) do; so neither needs msProbe installed
nor a line changed. A finder, first in line, answers for ``msprobe`` and ``msprobe.pytorch``; nothing heavy is imported
before somebody imports those.

vllm-ascend starts and stops the debugger within each pass of its model runner, and calls ``step`` after it: msProbe's
steps are passes there. Here all passes of a runner make one dump, ``rollout/stepN`` of the first pass recorded, because
a sequence is compared as a whole; a ``step`` of the configuration still names passes.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
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
            module.__getattr__ = _refuse_graphs  # type: ignore[method-assign]


def _refuse_graphs(name: str) -> Any:
    """Say what to do where vllm-ascend asks for the dumper of graph mode, whose graphs hide the modules."""
    if name == "AclGraphDumper":
        raise ImportError(
            f"{SWITCH}=1 records modules, which a graph hides: run vLLM with enforce_eager=True, or unset the variable"
        )
    raise AttributeError(f"module {PYTORCH!r}, which is probe's here, has no {name!r}")


def debugger_class() -> type:
    """Return our PrecisionDebugger with what verl, vllm-ascend and SGLang touch of msProbe's."""
    from probe import PrecisionDebugger as Ours

    class PrecisionDebugger(Ours):
        """Ours, switched on by whoever makes it: msProbe knows no DUMP_ON."""

        def __init__(self, config_path: str | Path | None = None, **keywords: Any) -> None:
            path = keywords.pop("dump_path", None)
            super().__init__(config_path, **{"enabled": True, **keywords})
            self.service = _Service(self)
            if path is not None:
                self.service.config.dump_path = path

        def start(
            self,
            model: Any = None,
            token_range: tuple[int, int] | None = None,
            rank_id: int | None = None,
            scheduled_tokens: dict[str, int] | None = None,
            **keywords: Any,
        ) -> Any:
            """Hook ``model``; ``rank_id`` is not needed, ranks are known here.

            ``scheduled_tokens``: how many tokens of each request the pass runs that is under way (vllm-ascend after
            0.23, from within the pass); without it they are read where the runner takes its scheduler's orders.
            """
            super().start(model, token_range, **keywords)
            if self._capture is not None and self._adapter.name == "vllm":
                _enter_pass(self, scheduled_tokens or {})
            return self

        def stop(self) -> None:
            """Remove every hook: the pass is over, whatever the runner runs until the next one."""
            if self._capture is not None and self._adapter.name == "vllm":
                self._adapter.end_pass()
            super().stop()

        def step(self, *, dump: bool = True) -> None:
            """Complete the dump of this step; of an engine, whose steps are passes, once no more is wanted.

            ``dump=False`` says that the pass was vllm-ascend's own, of no request: it is not counted.
            """
            if dump and not _goes_on(self):
                super().step()

    return PrecisionDebugger


def _enter_pass(debugger: Any, scheduled: dict[str, int]) -> None:
    """Tell the adapter which requests the running pass serves, now or as soon as the runner takes its orders."""
    from probe.hooks.taps import wrap_method

    adapter, undo = debugger._adapter, debugger._undo
    if scheduled:
        adapter.begin_pass(dict(scheduled), _first_seen(adapter, scheduled))
    restore = wrap_method(adapter.runner, "_update_states", functools.partial(_announcing, adapter))

    def both() -> None:
        restore()
        undo()

    debugger._undo = both


def _goes_on(debugger: Any) -> bool:
    """Tell, and count, that the dump of an engine's passes is not complete with this one."""
    if debugger._writer is None or debugger._adapter.name != "vllm":
        return False
    if debugger.settings.step and debugger.current_step >= max(debugger.settings.step):
        return False
    debugger.current_step += 1
    return True


def _first_seen(adapter: Any, scheduled: dict[str, int]) -> dict[str, int]:
    """Return the requests of a pass that no earlier one ran, with how many of their tokens the prefix cache held."""
    batch = adapter.runner.input_batch
    fresh = [name for name in scheduled if name not in adapter.tokens]
    return {name: int(batch.num_computed_tokens_cpu[batch.req_id_to_index[name]]) for name in fresh}


def _announcing(adapter: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the runner's method that takes the scheduler's orders, which are those of the pass that begins."""

    @functools.wraps(original)
    def _update_states(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        started = {new.req_id: int(new.num_computed_tokens) for new in scheduler_output.scheduled_new_reqs}
        adapter.begin_pass(dict(scheduler_output.num_scheduled_tokens), started)
        return original(scheduler_output, *args, **kwargs)

    return _update_states


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
