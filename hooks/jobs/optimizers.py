"""Count the optimizer steps of a process: the step of jobs whose trainer does not say it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.utils.weak import WeakIdKeyDictionary


class OptimizerSteps:
    """Tells when a step of training is over: an optimizer steps that has already stepped in it.

    Of several optimizers that each step once (a critic's, one per layer) only one counts, whichever the order. One that
    is made anew for the parameters of one that is gone takes its place.
    """

    def __init__(self, count: Callable[[], Any]) -> None:
        self._count = count
        self._stepped: weakref.WeakSet[Any] = weakref.WeakSet()
        self._of: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """First parameter -> weak reference to the optimizer that has stepped it."""

    def stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Note a step of an optimizer (a post hook of torch's)."""
        first = next((p for group in optimizer.param_groups for p in group["params"]), None)
        before = None if first is None else self._of.get(first)
        replaces = before is not None and before() is None
        if optimizer in self._stepped or replaces or not len(self._stepped):
            self._stepped.clear()
            self._of.clear()
            self._count()
        self._stepped.add(optimizer)
        if first is not None:
            self._of[first] = weakref.ref(optimizer)
