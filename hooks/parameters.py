"""Store parameters beside the tensors that they made (``PROBE_WEIGHTS=layers``), so that modules can be replayed.

Values are taken where the sketches are: before an engine repacks them, and again for each step of a training run, whose
weights no checkpoint holds. Each process stores what it holds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from probe.hooks.device import dtype_name, to_numpy
from probe.hooks.weights import Split, held_parameters, renamer
from probe.settings import Settings
from probe.store.dtypes import DTYPES
from probe.store.schema import StoredParameter
from probe.store.writer import DumpWriter

log = logging.getLogger("probe")

Values = Iterator[tuple[StoredParameter, np.ndarray]]


def parameter_values(model: torch.nn.Module, split: Split, settings: Settings, version: int = 0) -> Values:
    """Yield the parameters of the modules that ``settings.list`` keeps, within ``settings.weights_bytes``.

    Nothing unless ``settings.weights`` is ``layers``. Parameters that share memory are yielded once; those that this
    process holds in another way than whole, as a tensor-parallel shard or as FSDP2's slice are left out.
    """
    if settings.weights != "layers":
        return
    left, skipped = settings.weights_bytes, 0
    for held in held_parameters(model, split):
        if not settings.wants_module(held.name) or dtype_name(held.values) not in DTYPES:
            continue
        if held.values.nbytes > left:
            skipped += 1
            continue
        left -= held.values.nbytes
        about = StoredParameter(
            held.name, tuple(held.values.shape), dtype_name(held.values), held.axis, held.start, held.whole, version
        )
        yield about, to_numpy(held.values.to("cpu")).copy()
    used = settings.weights_bytes - left
    log.info("stored %.1f MB of parameters (PROBE_WEIGHTS=layers)", used / 1e6)
    if skipped:
        fix = "raise PROBE_WEIGHTS_BYTES or name fewer modules in 'list'"
        log.warning("%d parameters were not stored: more than %d bytes; %s", skipped, settings.weights_bytes, fix)


def store_parameters(
    writer: DumpWriter, values: Iterable[tuple[StoredParameter, np.ndarray]], named: Callable[[str], str] = str
) -> None:
    """Write parameters to a dump file under the names that the dump gives them."""
    for about, array in values:
        writer.add_parameter(StoredParameter(**{**vars(about), "name": named(about.name)}), array)


def store_model(writer: DumpWriter, model: torch.nn.Module, adapter: Any, settings: Settings) -> None:
    """Store a model's parameters as ``settings`` ask, named after their modules as the dump names those."""
    store_parameters(writer, parameter_values(model, adapter.weight_split, settings), renamer(model, adapter))
