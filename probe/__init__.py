"""Find where and why two runs of the same language model disagree.

Public names: ``PrecisionDebugger``, ``save``, ``seed_all`` (these need torch and are imported on first use),
``open_dump`` (needs no torch) and ``__version__``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from probe._version import __version__

if TYPE_CHECKING:
    from probe.hooks.debugger import PrecisionDebugger, save, seed_all
    from probe.store.reader import open_dump

__all__ = ["PrecisionDebugger", "__version__", "open_dump", "save", "seed_all"]

_LAZY = {
    "PrecisionDebugger": "probe.hooks.debugger",
    "save": "probe.hooks.debugger",
    "seed_all": "probe.hooks.debugger",
    "open_dump": "probe.store.reader",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'probe' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
