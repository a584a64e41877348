"""verl's trainers (0.9): which step of training the job is at, said by the driver to every process.

Both trainers of verl 0.9 (``RayPPOTrainer`` and those of ``trainer.ppo.v1``) tell their ``SkipManager`` each training
step when it begins, after they have set it up; that is before they validate. Validation rolls out too, and nothing of
it is recorded: the step is then negative.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from probe.hooks.jobs.log import trouble
from probe.hooks.jobs.session import session
from probe.hooks.jobs.verl import wrap

NOT_TRAINING = -1


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


def _saying(original: Any, name: str) -> Any:
    @functools.wraps(original)
    def said(cls: type, *args: Any, **kwargs: Any) -> Any:
        found = original(cls, *args, **kwargs)
        _advance(NOT_TRAINING if name == "init" else args[0] if args else kwargs.get("step"))
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
