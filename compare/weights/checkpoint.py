"""The parameters of a Hugging Face checkpoint under canonical names: their values, and the sketches a dump has of them.

Each is read when it is asked for, and sketched some rows at a time, so that memory stays bounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from probe.checkpoint import Checkpoint
from probe.compare.merge import OPERATIONS
from probe.compare.names import TABLES
from probe.compare.names.base import ModelShape, Source, resolve, strip_native
from probe.compare.weights.canonical import EMBEDDING, HEAD, Weight, canonical_weight
from probe.store.schema import WeightSketch
from probe.store.sketches import JoinedSketch, sketch_rows

CHUNK_VALUES = 4 << 20
"""Values of a parameter that are widened to float64 at once: 32 MiB."""

SCALES = ("_scale_inv", "_scale", "_qzeros", "_packed")
"""What the name of a parameter beside a quantised one ends in: its values are codes, so that it is not sketched."""


class CheckpointWeights:
    """A checkpoint's parameters by canonical name; ``shape`` gives the cut of the vocabulary, config.json the rest."""

    def __init__(self, checkpoint: Checkpoint, shape: ModelShape) -> None:
        own = ModelShape.of({"model": {"config": checkpoint.config}})
        self.checkpoint, self.shape = checkpoint, replace(own, vocab=shape.vocab or own.vocab)
        self._sketches: dict[str, JoinedSketch] = {}

    @cached_property
    def sources(self) -> Mapping[str, Source]:
        """Return canonical name -> which tensors of the checkpoint it is made of (natives are the file's own names)."""
        table = TABLES["transformers"]
        natives = {strip_native(name, table.prefixes): name for name in self.checkpoint.names()}
        shapes = {label: self.checkpoint.shape(name) for label, name in natives.items()}
        experts = {label: shape[0] for label, shape in shapes.items() if len(shape) == 3}
        found = resolve(table.parameters, natives, natives, experts).sources
        found = {label: replace(source, native=(natives[source.native[0]],)) for label, source in found.items()}
        if HEAD not in found and EMBEDDING in found:
            found[HEAD] = found[EMBEDDING]
        return found

    @property
    def tied(self) -> bool:
        """Tell whether the head is the embedding: the checkpoint holds one tensor for both."""
        return HEAD in self.sources and self.sources[HEAD] == self.sources.get(EMBEDDING)

    def quantised(self, name: str) -> bool:
        """Tell whether a parameter is stored as codes with a scale beside it."""
        native, known = self.sources[name].native[0], set(self.checkpoint.names())
        return any(
            native + ending in known or native.removesuffix("weight") + "weight" + ending in known for ending in SCALES
        )

    def values(self, name: str) -> np.ndarray | None:
        """Return a canonical parameter as float64, or None where the checkpoint has none of that name."""
        source = self.sources.get(name)
        if source is None:
            return None
        native, part = source.native[0], source.part
        if "split_experts" in source.operation:  # one expert is read, not all
            pairs = source.operation.endswith("gate_up")
            expert = self.checkpoint.tensor(native, part // 2 if pairs else part)
            source, stored = replace(source, part=part % 2 if pairs else 0), expert[None]
        else:
            stored = self.checkpoint.tensor(native)
        wide = stored.astype(np.float64)
        return OPERATIONS[source.operation]([[wide]], source.part, self.shape, 0)

    def weight(self, name: str) -> Weight | None:
        """Return the sketch of a canonical parameter, or None where the checkpoint has none or holds it as codes."""
        source = self.sources.get(name)
        if source is None or self.quantised(name):
            return None
        native = source.native[0]
        if native not in self._sketches:
            self._sketches = {native: self._sketch(native)}  # the last one only: q, k and v follow each other
        return canonical_weight(name, source, self._sketches[native], self.shape)

    def _sketch(self, native: str) -> JoinedSketch:
        shape, dtype = self.checkpoint.shape(native), self.checkpoint.dtype(native)
        rows = np.concatenate([*self._tables(native, shape), np.zeros((0, 3 if len(shape) > 1 else 1))])
        sketch = WeightSketch(native, shape, dtype, rows)
        return JoinedSketch(sketch, [sketch])

    def _tables(self, native: str, shape: tuple[int, ...]) -> Iterable[np.ndarray]:
        if len(shape) < 2:
            yield self.checkpoint.tensor(native).astype(np.float64).reshape(-1, 1)
            return
        step = max(1, CHUNK_VALUES // max(1, math.prod(shape[1:])))
        for first in range(0, shape[0], step):
            block = self.checkpoint.rows(native, first, min(first + step, shape[0]))
            yield sketch_rows(block.reshape(-1, shape[-1]) if len(shape) == 3 else block.reshape(len(block), -1))


def open_checkpoint(path: Any, shape: ModelShape) -> CheckpointWeights:
    """Open a checkpoint directory; raises CheckpointError."""
    return CheckpointWeights(Checkpoint(path), shape)
