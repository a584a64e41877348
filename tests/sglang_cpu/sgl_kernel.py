"""Stand-in for what SGLang imports and a CPU cannot have: its compiled kernels, triton, torchvision's decoders.

No wheel of ``sgl_kernel`` runs without a CUDA driver, and SGLang imports it whether a kernel is used or not. Here every
name of these packages is there; a call of one fails, unless it is what wraps functions and constants as a module
is imported, which returns them as they were. SGLang pins memory where it takes prompts' log-probs; here it does not.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import torch
import torch._inductor.runtime.triton_helpers
import torch.utils.flop_counter  # torch must not find a triton of which it would want more

STANDS_FOR = ("sgl_kernel", "triton", "torchvision", "IPython")
__path__: list[str] = []


class Missing:
    """Any name of such a package."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Any:
        return _missing(f"{self.name}.{name}", name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and not isinstance(args[0], dict):
            return args[0]  # a decorated function, a constant
        if args[1:] or not (args or kwargs):
            raise NotImplementedError(f"{self.name} has no build for a CPU: {__name__} stands in for it")
        return self  # the options of a decorator


def _missing(path: str, name: str) -> Missing:
    if name.startswith("__"):
        raise AttributeError(name)
    return Missing(path)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name.partition(".")[0] not in STANDS_FOR:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__version__ = "0"  # type: ignore[attr-defined]
        module.__getattr__ = lambda name: _missing(f"{module.__name__}.{name}", name)  # type: ignore[method-assign]


def _unpinned(original: Any) -> Any:
    @functools.wraps(original)
    def tensor(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    return tensor


sys.meta_path.insert(0, _Finder())
torch.tensor = _unpinned(torch.tensor)
