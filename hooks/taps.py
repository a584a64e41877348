"""Taps: record what a method of a module returns where no module of its own does (a router's ``gating``)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def tap(module: torch.nn.Module, method: str, record: Callable[[Any], None]) -> Callable[[], None]:
    """Call ``record`` with every result of ``module.method``; return the function that puts the method back.

    A dotted ``method`` is one of an object that the module holds (``router.select_experts``).
    """
    *attributes, method = method.split(".")
    owner: Any = functools.reduce(getattr, attributes, module)
    original = getattr(owner, method)
    own = owner.__dict__.get(method)

    @functools.wraps(original)
    def tapped(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        record(result)
        return result

    owner.__dict__[method] = tapped

    def undo() -> None:
        if own is None:
            owner.__dict__.pop(method, None)
        else:
            owner.__dict__[method] = own

    return undo
