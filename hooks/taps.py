"""Wrap methods of live objects: to record what one returns where no module does (a router's ``gating``), or when."""

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

    def recording(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def tapped(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            record(result)
            return result

        return tapped

    return wrap_method(functools.reduce(getattr, attributes, module), method, recording)


def wrap_method(
    owner: Any, method: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], None]:
    """Replace ``owner.method`` of this one object by ``wrapper(owner.method)``; return the undo."""
    own = vars(owner).get(method)
    vars(owner)[method] = wrapper(getattr(owner, method))

    def undo() -> None:
        if own is None:
            vars(owner).pop(method, None)
        else:
            vars(owner)[method] = own

    return undo
