"""Hugging Face transformers, and any plain torch module: rows from the arguments of the model's forward."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch

from probe.hooks.engines.base import EngineRows
from probe.hooks.engines.sequences import SequenceBook
from probe.hooks.rows import Announced, CallRows, grid_of

IGNORED_LABEL = -100
"""Label of tokens that carry no loss: torch.nn.CrossEntropyLoss's ignore_index, which HF uses for prompts."""
HEAD = "lm_head"


class BatchAdapter(EngineRows):
    """Rows of models that take one batch [batch, position] per call, padded on either side.

    The caller may announce the sequences of the next call; else each batch row is a new sequence whose padding comes
    from ``attention_mask`` and whose positions come from ``position_ids``.
    """

    name = "transformers"

    def __init__(self, book: SequenceBook, *, prompts_only: bool = False) -> None:
        super().__init__(book, prompts_only=prompts_only)
        self.announced: list[Announced] = []
        self._last: list[Announced] = []
        self._shape = (0, 0)
        self._logits_to_keep = 0

    def announce(self, sequences: list[Announced]) -> None:
        """Say which sequences the batch rows of the following calls are."""
        self.announced = list(sequences)

    def partial_rows(self, path: str, slot: str, tensor: torch.Tensor) -> np.ndarray | None:
        """Return the last rows of each sequence for a head that was asked for only those (``logits_to_keep``)."""
        batch, length = self._shape
        if path != HEAD or not 0 < self._logits_to_keep < length or tensor.shape[1:2] != (self._logits_to_keep,):
            return None
        cells = np.arange(batch * length).reshape(batch, length)
        return cells[:, length - self._logits_to_keep :].reshape(-1)

    def begin_call(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallRows | None:
        """Return the rows of this forward, read off its arguments."""
        named = bind_arguments(module, args, kwargs)
        grid = self._grid(named)
        kept = named.get("logits_to_keep", 0)
        self._shape, self._logits_to_keep = grid.shape, kept if isinstance(kept, int) else 0
        return self.rows_of_call(grid)

    def _grid(self, named: dict[str, Any]) -> np.ndarray:
        token = first_tensor(named, "input_ids")
        if token is None:  # not a language model's forward: rows are the leading axis, tokens unknown
            values = next((v for v in named.values() if isinstance(v, torch.Tensor) and v.dim()), torch.zeros(1))
            token = torch.full((1, values.shape[0]), -1)
        token = token[None] if token.dim() == 1 else token
        ids = token.detach().cpu().numpy()
        real = self._real_cells(named, ids.shape)
        position = self._positions(named, real)
        sequence = np.full(ids.shape, -1, np.int64)
        continues = bool((position.max(initial=-1, axis=1) >= np.maximum(real.sum(1), 1)).all())
        for row, announced in enumerate(self._sequences(named, real, continues)):
            length = int(position[row][real[row]].max(initial=-1)) + 1
            sequence[row] = self.book.number(announced, length=length)
        sequence[~real] = -1
        return grid_of(sequence, position, ids)

    def _sequences(self, named: dict[str, Any], real: np.ndarray, continues: bool) -> list[Announced]:
        """Return who the batch rows are: announced, or those of the last call when this one goes on after it."""
        if self.announced:
            return self.announced
        if continues and len(self._last) == len(real):
            return self._last
        labels = first_tensor(named, "labels")
        first = len(self.book.sequences)
        prompt_len: list[int | None] = [None] * len(real)
        if labels is not None and labels.shape == real.shape:
            has_loss = (labels.detach().cpu().numpy() != IGNORED_LABEL) & real
            prompt_len = [int(real[r][: row.argmax()].sum()) if row.any() else None for r, row in enumerate(has_loss)]
        self._last = [Announced(uid=f"s{first + row}", prompt_len=prompt_len[row]) for row in range(len(real))]
        return self._last

    def _real_cells(self, named: dict[str, Any], shape: tuple[int, ...]) -> np.ndarray:
        batch, length = shape
        mask = first_tensor(named, "attention_mask")
        if mask is not None and mask.dim() == 2 and mask.shape[0] == batch and mask.shape[1] >= length:
            return mask[:, -length:].detach().cpu().numpy().astype(bool)
        lengths = [length if a.length is None else a.length for a in self.announced] or [length] * batch
        return np.arange(length)[None] < np.array(lengths)[:, None]

    def _positions(self, named: dict[str, Any], real: np.ndarray) -> np.ndarray:
        given = first_tensor(named, "position_ids")
        if given is not None:
            given = given[0] if given.dim() == 3 else given  # M-RoPE passes 3 or 4 rows; the first is the text position
            if given.shape[-1] == real.shape[1]:
                return np.broadcast_to(given.detach().cpu().numpy(), real.shape).copy()
        mask = first_tensor(named, "attention_mask")
        start = np.array([a.start for a in self.announced] or [0] * len(real))[:, None]
        if mask is not None and mask.dim() == 2 and mask.shape[1] > real.shape[1]:  # a decode step over a KV cache
            start = mask[:, : -real.shape[1]].sum(1).cpu().numpy()[:, None]
        return start + np.cumsum(real, axis=1) - 1


def bind_arguments(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a forward call's arguments by name."""
    if not args:
        return kwargs
    try:
        return dict(inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments)
    except (TypeError, ValueError):  # a forward whose signature cannot be read: keep what has a name
        return {f"input{i}": value for i, value in enumerate(args)} | kwargs


def first_tensor(named: dict[str, Any], name: str) -> torch.Tensor | None:
    """Return the argument ``name`` if it is a tensor."""
    value = named.get(name)
    return value if isinstance(value, torch.Tensor) else None
