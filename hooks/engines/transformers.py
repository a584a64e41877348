"""Hugging Face transformers, and any plain torch module: rows from the arguments of the model's forward."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch

from probe.errors import CaptureError
from probe.hooks.engines.base import EngineRows
from probe.hooks.engines.sequences import SequenceBook
from probe.hooks.rows import Announced, CallRows, grid_of

IGNORED_LABEL = -100
"""Label of tokens that carry no loss: torch.nn.CrossEntropyLoss's ignore_index, which HF uses for prompts."""
HEAD = "lm_head"


class BatchAdapter(EngineRows):
    """Rows of models that take one batch [batch, position] per call, padded on either side or packed.

    The caller may announce the sequences of the next call; else each batch row is a new sequence, or the last call's
    where a KV cache goes on. Padding comes from ``attention_mask``, positions from it or ``position_ids``; one row
    whose ``position_ids`` start again is several packed sequences.
    """

    name = "transformers"

    def __init__(self, book: SequenceBook, *, prompts_only: bool = False) -> None:
        super().__init__(book, prompts_only=prompts_only)
        self.announced: list[Announced] = []
        self._last: list[Announced] = []
        self._forwards: dict[int, int] = {}
        self._batches: list[tuple[np.ndarray, list[Announced]]] = []
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
        grid = self._grid(module, named)
        kept = named.get("logits_to_keep", 0)
        self._shape, self._logits_to_keep = grid.shape, kept if isinstance(kept, int) else 0
        return self.rows_of_call(grid)

    def _grid(self, module: torch.nn.Module, named: dict[str, Any]) -> np.ndarray:
        ids = _token_ids(named)
        real = self._real_cells(named, ids.shape)
        position = self._positions(named, real)
        owner = _owners(position, real)
        count = max(int(owner.max(initial=-1)) + 1, 1 if ids.shape[0] == 1 else ids.shape[0])
        cells = [owner == number for number in range(count)]
        starts = [int(position[mine].min()) if mine.any() else 0 for mine in cells]
        sequence = np.full(ids.shape, -1, np.int64)
        for announced, mine in zip(self.sequences_of_call(module, ids, starts, _prompt_lens(named, cells)), cells):
            length = int(position[mine].max(initial=-1)) + 1
            sequence[mine] = self.book.number(announced, length=length)
        return grid_of(sequence, position, ids)

    def sequences_of_call(
        self, module: torch.nn.Module, ids: np.ndarray, starts: list[int], prompt_lens: list[int | None]
    ) -> list[Announced]:
        """Return who the sequences of a forward are, whose first positions are ``starts``.

        Those announced; else those that the same forward had in an earlier chunk of a pipeline; else the last call's,
        if this one goes on exactly where it ended; else new ones.
        """
        turn = self._forwards[id(module)] = self._forwards.get(id(module), -1) + 1
        if self.announced:
            if len(self.announced) != len(starts):
                raise CaptureError(
                    f"{len(self.announced)} sequences were announced but the forward has {len(starts)}",
                    "announce one per batch row (or packed sequence), or none",
                )
            return self.announced
        if turn < len(self._batches) and np.array_equal(self._batches[turn][0], ids):
            return self._batches[turn][1]
        goes_on = any(starts) and [self.book.length(last.uid) for last in self._last] == starts
        if not goes_on:
            first = len(self.book.sequences)
            self._last = [Announced(uid=f"s{first + n}", prompt_len=known) for n, known in enumerate(prompt_lens)]
        self._batches.append((ids, self._last))
        return self._last

    def _real_cells(self, named: dict[str, Any], shape: tuple[int, ...]) -> np.ndarray:
        batch, length = shape
        mask = _mask(named)
        if mask is not None and mask.shape[0] == batch and mask.shape[1] >= length:
            return mask[:, -length:]
        known = self.announced if len(self.announced) == batch else []
        lengths = [length if a.length is None else a.length for a in known] or [length] * batch
        return np.arange(length)[None] < np.array(lengths)[:, None]

    def _positions(self, named: dict[str, Any], real: np.ndarray) -> np.ndarray:
        """Return each cell's index in its sequence; position_ids say it unless padding could have shifted them."""
        mask = _mask(named)
        given = first_tensor(named, "position_ids")
        if given is not None and (mask is None or mask.all()):
            given = given[0] if given.dim() == 3 else given  # M-RoPE passes 3 or 4 rows; the first is the text position
            if given.shape[-1] == real.shape[1]:
                return np.broadcast_to(given.detach().cpu().numpy(), real.shape).copy()
        known = self.announced if len(self.announced) == len(real) else []
        start = np.array([a.start for a in known] or [0] * len(real))[:, None]
        if mask is not None and mask.shape[1] > real.shape[1]:  # a decode step over a KV cache
            start = mask[:, : -real.shape[1]].sum(1)[:, None]
        elif not start.any():
            start = start + _cached_tokens(named.get("past_key_values"))
        return start + np.cumsum(real, axis=1) - 1


def _token_ids(named: dict[str, Any]) -> np.ndarray:
    """Return the token ids [batch, position] of a forward, -1 where only embeddings were given.

    A module that is no language model gets one row per entry of its first tensor's leading axis.
    """
    token, embedded = first_tensor(named, "input_ids"), first_tensor(named, "inputs_embeds")
    if token is not None:
        return (token[None] if token.dim() == 1 else token).detach().cpu().numpy()
    if embedded is not None and embedded.dim() == 3:
        return np.full(embedded.shape[:2], -1)
    values = next((v for v in named.values() if isinstance(v, torch.Tensor) and v.dim()), torch.zeros(1))
    return np.full((1, values.shape[0]), -1)


def _mask(named: dict[str, Any]) -> np.ndarray | None:
    mask = first_tensor(named, "attention_mask")
    return None if mask is None or mask.dim() != 2 else mask.detach().cpu().numpy().astype(bool)


def _owners(position: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Return the number of each cell's sequence, -1 for padding: its batch row, or its part of a packed row."""
    owner = np.broadcast_to(np.arange(len(real))[:, None], real.shape)
    if len(real) == 1 and real.all():
        owner = np.cumsum(np.diff(position, axis=1, prepend=-1) <= 0, axis=1)
    return np.where(real, owner, -1)


def _prompt_lens(named: dict[str, Any], cells: list[np.ndarray]) -> list[int | None]:
    """Return how many tokens of each sequence come before its first label, None where no label says it."""
    labels = first_tensor(named, "labels")
    if labels is None or labels.shape != cells[0].shape:
        return [None] * len(cells)
    has_loss = labels.detach().cpu().numpy() != IGNORED_LABEL
    return [int(has_loss[mine].argmax()) if has_loss[mine].any() else None for mine in cells]


def _cached_tokens(cache: Any) -> int:
    """Return how many tokens a KV cache holds: a transformers ``Cache``, or the older tuple of (key, value) pairs."""
    if hasattr(cache, "get_seq_length"):
        return int(cache.get_seq_length())
    if isinstance(cache, tuple) and cache and isinstance(cache[0], tuple):
        return int(cache[0][0].shape[-2])
    return 0


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
