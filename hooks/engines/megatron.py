"""Megatron-core: global layer numbers, [position, batch, hidden] tensors, rows from masks or packed parameters."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch

from probe.hooks.engines.sequences import SequenceBook
from probe.hooks.engines.transformers import BatchAdapter, bind_arguments, first_tensor
from probe.hooks.rows import CallRows, grid_of

_LAYER = re.compile(r"^(.*\blayers\.)(\d+)(.*)$")
_IDENTITIES = ("IdentityOp", "IdentityFuncOp")
"""Placeholders of a spec for modules that the model does not have: their output is their input."""
_BATCH_FIRST = ("", "embedding.word_embeddings", "embedding.position_embeddings")
"""Modules whose tensors are [batch, position, ...]; everything inside the decoder is [position, batch, ...]."""


class MegatronAdapter(BatchAdapter):
    """Rows of a GPTModel: a padded batch [b, s], or packed sequences [1, t] described by PackedSeqParams."""

    name = "megatron"
    layouts = ("sb", "bs", "flat")
    logits = ("output_layer", "output.0")

    def __init__(self, book: SequenceBook, *, prompts_only: bool = False) -> None:
        super().__init__(book, prompts_only=prompts_only)
        self._global_layer: dict[str, str] = {}

    def module_path(self, path: str, module: torch.nn.Module) -> str | None:
        """Return the path with the global 0-based layer number, which pipeline stages and chunks number locally."""
        if super().module_path(path, module) is None or type(module).__name__ in _IDENTITIES:
            return None
        match = _LAYER.match(path)
        if match is None:
            return path
        local = match[1] + match[2]
        if not match[3]:
            self._global_layer[local] = f"{match[1]}{getattr(module, 'layer_number', int(match[2]) + 1) - 1}"
        return self._global_layer.get(local, local) + match[3]

    def preferred_layouts(self, path: str, slot: str) -> tuple[str, ...]:
        """Return batch-first for the model's own inputs and outputs and for token ids everywhere."""
        return ("bs",) if path in _BATCH_FIRST or slot.endswith(("input_ids", "position_ids")) else ()

    def begin_call(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallRows | None:
        """Return the rows of this forward, from its packed parameters if it has any."""
        named = bind_arguments(module, args, kwargs)
        packed = named.get("packed_seq_params")
        if packed is None:
            return super().begin_call(module, args, kwargs)
        return self.rows_of_call(self._packed_grid(module, named, packed))

    def _packed_grid(self, module: torch.nn.Module, named: dict[str, Any], packed: Any) -> np.ndarray:
        padded = getattr(packed, "cu_seqlens_q_padded", None)
        starts = _cumulative(packed.cu_seqlens_q if padded is None else padded)
        real = np.diff(_cumulative(packed.cu_seqlens_q))
        ids = first_tensor(named, "input_ids")
        token = np.full(starts[-1], -1) if ids is None else ids.detach().cpu().numpy().reshape(-1)
        sequence, position = np.full(token.shape, -1, np.int64), np.full(token.shape, -1, np.int64)
        nobody: list[int | None] = [None] * len(real)
        for number, who in enumerate(self.sequences_of_call(module, token, [0] * len(real), nobody)):
            length = int(real[number]) if who.length is None else who.length
            rows = slice(starts[number], starts[number] + length)
            sequence[rows] = self.book.number(who, length=who.start + length)
            position[rows] = who.start + np.arange(length)
        return grid_of(sequence[None], position[None], token[None])


def _cumulative(lengths: torch.Tensor) -> np.ndarray:
    return lengths.detach().cpu().numpy().astype(np.int64)
