"""Switch capture on in a process of somebody else's job: nothing is imported now, modules are patched as they load.

The start-up line ``zz_probe_rl.pth`` calls :func:`start` in every Python process of the environment where ``DUMP_ON``
is set: drivers, Ray workers and daemons, engine processes, pip. So this module imports next to nothing, prints nothing
where nothing is patched, and no failure of it reaches the job.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from types import ModuleType
from typing import Any

PATCHES = {
    "ray": "probe.hooks.jobs.ray:patch",
    "transformers.modeling_utils": "probe.hooks.jobs.models:patch_transformers",
    "transformers.generation.utils": "probe.hooks.jobs.models:patch_generation",
    "peft.peft_model": "probe.hooks.jobs.models:patch_peft",
    "megatron.core.models.common.language_module.language_module": "probe.hooks.jobs.models:patch_megatron",
    "torch._dynamo.eval_frame": "probe.hooks.jobs.models:patch_compiled",
    "vllm.v1.worker.worker_base": "probe.hooks.jobs.vllm:patch_worker",
    "sglang.srt.managers.scheduler": "probe.hooks.jobs.sglang:patch_scheduler",
    "verl.workers.engine_workers": "probe.hooks.jobs.verl:patch_workers",
    "verl.workers.engine.base": "probe.hooks.jobs.verl:patch_passes",
    "verl.workers.engine.fsdp.transformer_impl": "probe.hooks.jobs.verl:patch_engine",
    "verl.workers.engine.megatron.transformer_impl": "probe.hooks.jobs.verl:patch_engine",
    "verl.workers.engine.veomni.transformer_impl": "probe.hooks.jobs.verl:patch_engine",
    "verl.workers.engine.torchtitan.transformer_impl": "probe.hooks.jobs.verl:patch_engine",
    "verl.workers.engine.automodel.transformer_impl": "probe.hooks.jobs.verl:patch_engine",
    "verl.utils.skip.skip_manager": "probe.hooks.jobs.verl_trainer:patch_steps",
    "verl.experimental.separation.ray_trainer": "probe.hooks.jobs.verl_trainer:patch_separate",
    "verl.trainer.ppo.ray_trainer": "probe.hooks.jobs.verl_trainer:patch_validation",
    "verl.trainer.ppo.v1.trainer_base": "probe.hooks.jobs.verl_trainer:patch_validation",
}
"""Module -> the function that gets it once it is imported, as ``module:function``: what makes a job record itself."""
SILENT = ("ray", "torch")
"""Libraries that daemons load too, and others that run no model: patching them is no news."""

ON, OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")
"""Values of DUMP_ON; start.pth holds OFF too, because it may import nothing to find out."""


class State:
    """What this process has done so far; one per process."""

    started = False
    standing_down = False


def start() -> None:
    """Have the modules of :data:`PATCHES` patched when they are imported (now, where they are), if DUMP_ON says so.

    Calling it again does nothing: start-up lines run several times per process, and engines load it as their plugin
    too. Never raises: what goes wrong is one line of the job's activation.log.
    """
    switch = os.environ.get("DUMP_ON", "").strip().lower()
    if State.started or State.standing_down or switch in OFF:
        return
    State.started = True
    try:
        if switch not in ON:
            _report(f"DUMP_ON is {os.environ['DUMP_ON']!r}: use 1 or 0; nothing is recorded")
            return
        _settle_paths()
        _name_run()
        _register()
    except Exception as error:
        _report(f"capture is not switched on in this process ({_words(error)})")


def stand_down() -> None:
    """Patch nothing from now on, here and in new children: for the ``probe`` command, which records by itself."""
    State.standing_down = True
    os.environ.pop("DUMP_ON", None)


def _settle_paths() -> None:
    """Make the paths of the environment absolute, so that children in other folders mean the same ones."""
    for name, default in (
        ("PROBE_CONFIG", ""),
        ("PROBE_DUMP_DIR", "" if os.environ.get("PROBE_CONFIG") else "probe-dump"),
    ):
        path = os.environ.get(name) or default
        if path:
            os.environ[name] = os.path.abspath(path)


def _name_run() -> None:
    """Name the run in the environment of its first process; ``ray start`` begins a cluster, not a run."""
    if not os.environ.get("PROBE_RUN") and os.path.basename(sys.argv[0] if sys.argv else "") != "ray":
        os.environ["PROBE_RUN"] = f"{time.time():.3f}-{os.urandom(4).hex()}"


def _register() -> None:
    try:
        from wrapt.importer import register_post_import_hook
    except ImportError:
        State.started = False  # a later call may find it: lines that follow this one make more importable
        _report("capture is not switched on: the package wrapt is missing (pip install wrapt)")
        return
    for name, target in PATCHES.items():
        register_post_import_hook(_patcher(target), name)


def _patcher(target: str) -> Any:
    def patch(module: ModuleType) -> None:
        if not State.standing_down:
            _apply(target, module)

    return patch


def _apply(target: str, module: ModuleType) -> None:
    """Run one patch on its module; a failure is a line of the log, and the job goes on unrecorded."""
    try:
        silent = module.__name__.partition(".")[0] in SILENT
        if not silent:
            _check_settings()
        path, _, function = target.partition(":")
        getattr(importlib.import_module(path), function)(module)
        if not silent:
            from probe.hooks.jobs.log import hooked

            hooked(module)
    except Exception as error:
        if _is_users(error):
            State.standing_down = True  # a setting that cannot work is said once, not for each module
            _report(f"nothing is recorded: {error}")
        else:
            _report(f"{module.__name__} is not recorded ({_words(error)})")


def _check_settings() -> None:
    from probe.settings import job_settings

    job_settings()


def _is_users(error: Exception) -> bool:
    from probe.errors import ProbeError

    return isinstance(error, ProbeError)


def _words(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _report(text: str) -> None:
    try:
        from probe.hooks.jobs.log import trouble

        trouble(text)
    except Exception as error:  # a broken install: one line is all that is left
        print(f"probe: {text} ({_words(error)})", file=sys.stderr)
