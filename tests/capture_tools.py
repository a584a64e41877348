"""Run a torch model under capture and read back what was dumped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from probe.hooks.capture import Capture
from probe.hooks.engines.sequences import SequenceBook
from probe.hooks.engines.transformers import BatchAdapter
from probe.settings import Settings
from probe.store.reader import Dump, open_dump
from probe.store.writer import DumpWriter

MANIFEST = {"schema": 1, "stage": "actor", "engine": {"name": "module", "version": ""}}


def captured(
    folder: Path,
    model: Any,
    run: Callable[[BatchAdapter], Any],
    *,
    adapter: type[BatchAdapter] = BatchAdapter,
    settings: Settings | None = None,
    prompts_only: bool = False,
) -> Dump:
    """Hook ``model``, call ``run`` with the adapter, and return the dump."""
    writer = DumpWriter(folder / "actor" / "step0" / "rank0.h5", MANIFEST)
    rows = adapter(SequenceBook(writer), prompts_only=prompts_only)
    capture = Capture(writer, rows, settings)
    capture.attach(model)
    try:
        with torch.no_grad():
            run(rows)
    finally:
        capture.detach()
    writer.close()
    return open_dump(folder)


def by_row(dump: Dump, module: str, slot: str) -> dict[tuple[str, int], np.ndarray]:
    """Return the rows of a tensor by (uid, position)."""
    uids = [sequence.uid for sequence in dump.sequences]
    rows = dump.rows(module, slot)
    return {(uids[r["sequence"]], int(r["position"])): v for r, v in zip(rows, dump.read(module, slot))}


def hook_count(model: torch.nn.Module) -> int:
    """Return how many forward hooks of any kind hang on a model."""
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._forward_hooks_always_called)
        for module in model.modules()
    )
