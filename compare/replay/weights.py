"""Where a replay takes parameters from: a checkpoint, or what the dump itself stores of some layers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from probe.checkpoint import Checkpoint
from probe.compare.replay.base import Parameters, Unreplayable
from probe.compare.settings_gates import flat_config
from probe.compare.side import Side
from probe.compare.weights.agreement import Agreement, agreement
from probe.compare.weights.canonical import canonical_parameter, canonical_weights
from probe.compare.weights.changes import agree
from probe.compare.weights.checkpoint import CheckpointWeights
from probe.errors import CheckpointError
from probe.metrics import MANTISSA_BITS
from probe.store.dtypes import round_to

SAMPLE, SAMPLE_VALUES = 32, 30_000_000
"""Parameters, and numbers in them, whose sketches decide whether the manifest's checkpoint is what ran: sketching takes
a second."""

ROWS_AT_ONCE = ("whole", "cut_vocabulary")
"""Operations under which an output row of a canonical parameter is a row of one tensor of the checkpoint."""


@dataclass
class Found:
    """A side's parameters: ``parameters`` None and ``why_not`` in words where there are none; ``words``: their origin;
    ``config``: the configuration that the model should have, flat; ``foreign``: why a checkpoint that was given cannot
    be what ran, in words."""

    parameters: Parameters | None
    words: str = ""
    why_not: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    foreign: str = ""


class CheckpointParameters:
    """A checkpoint's parameters as the side holds them: rounded to its dtype where that is coarser."""

    def __init__(self, known: CheckpointWeights, side: Side) -> None:
        self.known = known
        self._held = {name: weight.dtype for name, weight in canonical_weights(side).items()}
        self._model = str(side.dump.manifest.get("dtype") or "")
        self._last: tuple[str, np.ndarray] | None = None

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return a parameter's shape, None where the checkpoint has none of that name."""
        source = self.known.sources.get(name)
        if source is None:
            return None
        if source.operation in ROWS_AT_ONCE:
            return self.known.checkpoint.shape(source.native[0])
        return self._whole(name).shape

    def dtype(self, name: str) -> str:
        """Return the dtype in which the side holds a parameter: its own, but none coarser than the model's."""
        held = self._held.get(name, self._model)
        finer = MANTISSA_BITS.get(held, 0) >= MANTISSA_BITS.get(self._model, 0)
        return held if finer else self._model

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return output rows ``start`` to ``stop`` as float64."""
        source = self.known.sources[name]
        if self.known.quantised(name):
            raise Unreplayable(f"the checkpoint holds {name} as codes of a quantised weight")
        if source.operation in ROWS_AT_ONCE:
            native = source.native[0]
            length = self.known.checkpoint.shape(native)[0]
            values = self.known.checkpoint.rows(native, start, length if stop is None else min(stop, length))
        else:
            values = self._whole(name)[start:stop]
        dtype = self.dtype(name)
        stored = self.known.checkpoint.dtype(source.native[0])
        coarser = MANTISSA_BITS.get(dtype, 99) < MANTISSA_BITS.get(stored, 0)
        return (round_to(values, dtype) if coarser else values).astype(np.float64)

    def _whole(self, name: str) -> np.ndarray:
        """Return a parameter that is a part of a larger tensor; the last one is kept."""
        if self._last is None or self._last[0] != name:
            values = self.known.values(name)
            if values is None:
                raise Unreplayable(f"the checkpoint holds no {name}")
            self._last = name, values
        return self._last[1]


class StoredParameters:
    """The parameters that a dump stores of its own layers."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self._last: tuple[str, np.ndarray | None] = ("", None)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return a parameter's shape, None where the dump does not store it."""
        found = self._whole(name)
        return None if found is None else found.shape

    def dtype(self, name: str) -> str:
        """Return the model's dtype: stored values are as the module held them."""
        return str(self.side.dump.manifest.get("dtype") or "float32")

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return output rows ``start`` to ``stop`` as float64."""
        found = self._whole(name)
        if found is None:
            raise Unreplayable(f"the dump does not store {name}")
        return found[start:stop]

    def _whole(self, name: str) -> np.ndarray | None:
        if self._last[0] != name:
            self._last = name, canonical_parameter(self.side, name)
        return self._last[1]


def find_parameters(side: Side, weights: str | Path | None) -> Found:
    """Return a side's parameters: of ``weights``, else of the manifest's checkpoint where the sketches match it, else
    those stored with the dump.

    Raises CheckpointError for ``weights`` that cannot be read.
    """
    own = flat_config(side.dump.manifest) | _model_type(side.dump.manifest)
    if weights is not None:
        checkpoint = Checkpoint(weights)
        agreed = agreement(side, checkpoint, _sample(side))
        found = _from_checkpoint(side, checkpoint, own, "the checkpoint given", overrides=True)
        return replace(found, foreign=_foreign(agreed))
    found = _from_manifest(side, own)
    if found.parameters is None and getattr(side.dump, "parameters", None):
        return Found(StoredParameters(side), "stored with the dump", config=own)
    return found


def _foreign(agreed: Agreement) -> str:
    """Say in what way a side's weights differ from a checkpoint, where more of them differ than agree."""
    if not agreed.different or agreed.mostly:
        return ""
    name, detail = next(iter(agreed.different.items()))
    total = len(agreed.different) + len(agreed.same)
    return f"{len(agreed.different)} of {total} parameters looked at differ (first {name}: {detail})"


def _model_type(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the kind of model, which the comparison of configurations leaves out."""
    config = (manifest.get("model") or {}).get("config") or {}
    config = {**config, **(config.get("text_config") or {})}
    return {"model_type": config["model_type"]} if config.get("model_type") else {}


def _from_checkpoint(
    side: Side, checkpoint: Checkpoint, own: dict[str, Any], what: str, overrides: bool = False
) -> Found:
    """Return a checkpoint's parameters; its config is what should run (``overrides``), or fills what the run left out.

    A checkpoint that only the manifest names may have been written over since: what ran is in the manifest.
    """
    stated = {"model": {"config": checkpoint.config}}
    theirs = flat_config(stated) | _model_type(stated)
    config = own | theirs if overrides else theirs | own
    known = CheckpointWeights(checkpoint, side.shape)
    return Found(CheckpointParameters(known, side), f"{what}, {checkpoint.path}", config=config)


def _sample(side: Side) -> list[str]:
    """Return some of the sketched parameters, spread over the layers, the smaller ones first where all are large."""
    weights = canonical_weights(side)
    names = list(weights)
    spread = names[:: max(1, len(names) // SAMPLE)]
    sizes = {name: math.prod(weights[name].shape) for name in spread}
    chosen, total = list[str](), 0
    for name in sorted(spread, key=lambda name: sizes[name]):
        total += sizes[name]
        if total <= SAMPLE_VALUES or len(chosen) < 2:
            chosen.append(name)
    return chosen


def _from_manifest(side: Side, own: dict[str, Any]) -> Found:
    path = str((side.dump.manifest.get("model") or {}).get("path") or "")
    if not path:
        return Found(None, why_not="the manifest names no checkpoint: give one with --weights", config=own)
    try:
        checkpoint = Checkpoint(path)
        found = _from_checkpoint(side, checkpoint, own, "the manifest's checkpoint")
        sample = _sample(side)
        agreed = agreement(side, checkpoint, sample)
    except CheckpointError as error:
        return Found(None, why_not=f"the manifest's checkpoint cannot be read: {error}", config=own)
    if not sample:
        return Found(None, why_not="no parameter was sketched: give the checkpoint with --weights", config=own)
    if agreed.mostly:
        return found
    differ = f"{len(agreed.different)} of {len(sample)} parameters differ from {path}"
    return Found(None, why_not=f"{differ}: give the checkpoint that ran with --weights", config=own)


def changed_since(side: Side, other: Side, found: Found, names: Iterable[str]) -> set[str]:
    """Return those of some parameters that both sides hold alike and the checkpoint holds otherwise."""
    if not isinstance(found.parameters, CheckpointParameters):
        return set()
    own, theirs = canonical_weights(side), canonical_weights(other)
    alike = [name for name in names if name in own and name in theirs and agree(own[name], theirs[name])]
    return set(agreement(side, found.parameters.known, alike).different)
