"""verl's trainers (0.9): which step of training the job is at, said by the driver to every process.

Both trainers of verl 0.9 (``RayPPOTrainer`` and those of ``trainer.ppo.v1``) tell their ``SkipManager`` each training
step when it begins, after they have set it up; that is before they validate. Validation rolls out too, and nothing of
it is recorded: the step is then negative.

Trainers of ``verl.experimental`` whose rollouts have devices of their own keep no SkipManager informed, but begin each
step with ``_fit_start_profile``. The fully asynchronous one has its rollouter set up a SkipManager: what that generates
before the first training step is for that step.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

from probe.hooks.jobs.log import trouble
from probe.hooks.jobs.session import session
from probe.hooks.jobs.verl import wrap

NOT_TRAINING, FIRST = -1, 1
ROLLOUTER = "fully_async_rollouter"
LAGS = (
    "verl's fully asynchronous trainer: sequences are generated before the step that trains on them, so rollout and "
    "logprob of one step may share few; name several steps (PROBE_STEPS=1,2,3), or record all with PROBE_TASK=tokens"
)


def patch_steps(module: ModuleType) -> None:
    """Wrap the SkipManager of ``verl.utils.skip.skip_manager``, which every trainer keeps informed."""
    manager = module.SkipManager
    for name in ("init", "set_step"):
        original = vars(manager)[name].__func__
        if not getattr(original, "_probe_wraps", False):
            setattr(manager, name, classmethod(_saying(original, name)))


def patch_validation(module: ModuleType) -> None:
    """Wrap ``_validate`` of the trainers in a module: while it runs the job is at no training step."""
    for cls in vars(module).values():
        if isinstance(cls, type) and cls.__module__ == module.__name__:
            wrap(cls, "_validate", _in_validation)


def patch_separate(module: ModuleType) -> None:
    """Wrap how each step begins in the trainers that derive from ``SeparateRayPPOTrainer``."""
    if not wrap(module.SeparateRayPPOTrainer, "_fit_start_profile", _in_step):
        trouble(f"{module.__name__} begins its steps in another way: the recording does not know them; tell us")


def _in_step(original: Any) -> Any:
    def _fit_start_profile(self: Any, *args: Any, **kwargs: Any) -> Any:
        _advance(getattr(self, "global_steps", None))
        return original(self, *args, **kwargs)

    return _fit_start_profile


def _saying(original: Any, name: str) -> Any:
    @functools.wraps(original)
    def said(cls: type, *args: Any, **kwargs: Any) -> Any:
        found = original(cls, *args, **kwargs)
        step = args[0] if args else kwargs.get("step")
        if name == "init":
            ahead = sys._getframe(1).f_globals.get("__name__", "").endswith(ROLLOUTER)
            step = FIRST if ahead else NOT_TRAINING
            if ahead:
                trouble(LAGS)
        _advance(step)
        return found

    said._probe_wraps = True  # type: ignore[attr-defined]
    return said


def _in_validation(original: Any) -> Any:
    def _validate(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = session().step
        _advance(NOT_TRAINING)
        try:
            return original(self, *args, **kwargs)
        finally:
            _advance(before)

    return _validate


def _advance(step: Any) -> None:
    try:
        session().clock.advance_to(int(step))
    except Exception as error:
        trouble(f"the trainer's step {step!r} is not known to the recording ({type(error).__name__}: {error})")
