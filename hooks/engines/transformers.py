"""Hugging Face transformers, and any plain torch module: rows from the arguments of the model's forward."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch

from probe.errors import CaptureError
from probe.hooks.engines.base import EngineAdapter
from probe.hooks.engines.batches import Cells, numpy_of, read_cells, read_mask, read_positions
from probe.hooks.engines.sequences import SequenceBook
from probe.hooks.rows import Announced, CallRows, grid_of
from probe.hooks.wrappers import unwrap

IGNORED_LABEL = -100
"""Label of tokens that carry no loss: torch.nn.CrossEntropyLoss's ignore_index, which HF uses for prompts."""
HEAD = "lm_head"


HEADS_FIRST = {
    **{
        f"{family}Attention": ("q_norm", "k_norm")
        for family in (
            "Gemma3",
            "Exaone4",
            "ExaoneMoe",
            "Apertus",
            "HYV3",
            "NanoChat",
            "T5Gemma2Self",
            "T5Gemma2Merged",
        )
    },
    **{f"Deepseek{version}Attention": ("kv_b_proj",) for version in ("V2", "V3", "V32")},
}
"""Classes of attention in transformers -> children that it calls with [batch, heads, position, features]."""


class BatchAdapter(EngineAdapter):
    """Rows of models that take one batch [batch, position] per call, padded on either side or packed.

    The caller may announce the sequences of the next call, and in ``told`` which cells are theirs where the arguments
    do not show it; else each batch row is a new sequence, or the last call's where a KV cache goes on. Padding comes
    from ``attention_mask``, positions from it or ``position_ids``; one row whose ``position_ids`` start again is
    several packed sequences. ``known`` are the rows of the next call where its caller has read them already.
    """

    name = "transformers"
    true_hides = False
    """What True means in a square boolean mask: Hugging Face (and torch) let the key be seen, Megatron hides it."""

    def __init__(self, book: SequenceBook, *, prompts_only: bool = False) -> None:
        super().__init__(book, prompts_only=prompts_only)
        self.announced: list[Announced] = []
        self.told: Cells | None = None
        self.known: CallRows | None = None
        self.stops: frozenset[int] = frozenset()
        self._ended: set[str] = set()
        self._last: list[Announced] = []
        self._heads_first: set[str] = set()
        self._forwards: dict[int, int] = {}
        self._batches: dict[int, tuple[np.ndarray, list[Announced]]] = {}
        self._shape = (0, 0)
        self._logits_to_keep = 0

    def module_path(self, path: str, module: torch.nn.Module) -> str | None:
        """Return the module's path, and note which of its children see heads before positions."""
        self._heads_first |= {f"{path}.{leaf}" for leaf in HEADS_FIRST.get(type(module).__name__, ())}
        return super().module_path(path, module)

    def preferred_layouts(self, path: str, slot: str) -> tuple[str, ...]:
        """Return heads before positions for the modules that are called so."""
        return ("bhs",) if path in self._heads_first else ()

    def announce(self, sequences: list[Announced]) -> None:
        """Say which sequences the batch rows of the following calls are."""
        self.announced, self.told, self.known = list(sequences), None, None

    def partial_rows(self, path: str, slot: str, tensor: torch.Tensor) -> np.ndarray | None:
        """Return the last rows of each sequence for a head that was asked for only those (``logits_to_keep``)."""
        batch, length = self._shape
        if path != HEAD or not 0 < self._logits_to_keep < length or tensor.shape[1:2] != (self._logits_to_keep,):
            return None
        cells = np.arange(batch * length).reshape(batch, length)
        return cells[:, length - self._logits_to_keep :].reshape(-1)

    def begin_call(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallRows | None:
        """Return the rows of this forward, read off its arguments; None while paused."""
        if self.paused:
            return None
        named = bind_arguments(module, args, kwargs)
        rows = self.known or self.rows_of_call(self._grid(module, named))
        kept = named.get("logits_to_keep", 0)
        self._shape, self._logits_to_keep = rows.grid.shape, kept if isinstance(kept, int) else 0
        return rows

    def _grid(self, module: torch.nn.Module, named: dict[str, Any]) -> np.ndarray:
        ids = _token_ids(named)
        cells = self._cells(named, ids.shape)
        owned = [cells.of(number) for number in range(cells.count)]
        starts = [int(cells.position[mine].min()) if mine.any() else 0 for mine in owned]
        sequence = np.full(ids.shape, -1, np.int64)
        for announced, mine in zip(self.sequences_of_call(module, ids, starts, _prompt_lens(named, owned)), owned):
            if mine.any() and announced.uid not in self._ended:
                length = int(cells.position[mine].max()) + 1
                sequence[mine] = number = self.book.number(announced, length=length)
                own = mine & (cells.position >= self.book.sequences[number].prompt_len)
                if self.stops and np.isin(ids[own], list(self.stops)).any():
                    self._ended.add(announced.uid)
        return grid_of(sequence, cells.position, ids)

    def _cells(self, named: dict[str, Any], shape: tuple[int, ...]) -> Cells:
        """Return which cell is which token of which sequence, from masks, positions, bounds and the announcement."""
        batch, length = shape
        if self.told is not None and self.told.owner.shape == shape:
            return self.told
        known = self.announced if len(self.announced) == batch else []
        mask = read_mask(_mask(named, length), shape, true_hides=self.true_hides)
        segments = None if mask is None else mask[:, -length:]
        if segments is not None and not segments.all():  # a mask that hides no token says nothing of padding
            real = segments != 0
        else:
            lengths = [length if a.length is None else a.length for a in known] or [length] * batch
            real = np.arange(length)[None] < np.array(lengths)[:, None]
        return read_cells(
            real,
            read_positions(first_tensor(named, "position_ids"), shape),
            segments=segments,
            bounds=_bounds(named),
            first=self._first_indices(named, mask, shape, known),
            split_rows=batch == 1 or not known,
        )

    def _first_indices(
        self, named: dict[str, Any], mask: np.ndarray | None, shape: tuple[int, ...], known: list[Announced]
    ) -> np.ndarray | None:
        """Return the index of each row's first token, or None where only position_ids can say it."""
        starts = np.array([a.start for a in known])
        if mask is not None and mask.shape[1] > shape[1]:  # a decode step over a KV cache
            return (mask[:, : -shape[1]] != 0).sum(1)
        if starts.any():
            return starts
        cached = _cached_tokens(named.get("past_key_values"))
        padded = mask is not None and not mask.all()  # then positions may count the padding
        return np.full(shape[0], cached) if cached or padded else None

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
        earlier = self._batches.get(turn)
        if self.chunks and len(self._forwards) == self.chunks:  # a job never ends: what all have seen is over
            for over in [number for number in self._batches if number <= min(self._forwards.values())]:
                del self._batches[over]
        if earlier is not None and _may_be_equal(earlier[0], ids):
            return earlier[1]
        ends = [
            start if last.uid in self._ended else self.book.length(last.uid) for last, start in zip(self._last, starts)
        ]
        goes_on = any(starts) and len(self._last) == len(starts) and ends == starts
        if not goes_on:
            first = len(self.book.sequences)
            self._last = [
                Announced(uid=f"{self.sequence_prefix}s{first + n}", prompt_len=known)
                for n, known in enumerate(prompt_lens)
            ]
        if self.chunks != 1 and earlier is None:
            self._batches[turn] = (ids, self._last)
        return self._last


def _may_be_equal(one: np.ndarray, other: np.ndarray) -> bool:
    """Tell whether two batches have the same ids wherever both know them: later chunks of a pipeline may see none."""
    return one.shape == other.shape and bool(((one == other) | (one < 0) | (other < 0)).all())


def _token_ids(named: dict[str, Any]) -> np.ndarray:
    """Return the token ids [batch, position] of a forward, -1 where only embeddings were given.

    Where no argument has the usual name, a first tensor of whole numbers holds the ids; a module that is no language
    model gets one row per entry of its first tensor's leading axis.
    """
    token, embedded = first_tensor(named, "input_ids"), first_tensor(named, "inputs_embeds")
    if token is None and embedded is None:
        token = _unnamed_ids(named)
    if token is not None:
        return (token[None] if token.dim() == 1 else token).detach().cpu().numpy()
    if embedded is not None and embedded.dim() == 3:
        return np.full(embedded.shape[:2], -1)
    values = next((v for v in named.values() if isinstance(v, torch.Tensor) and v.dim()), torch.zeros(1))
    return np.full((1, values.shape[0]), -1)


_NO_IDS = ("position", "mask", "label", "seq", "type", "index")
"""Parts of the names of arguments that hold whole numbers and no token ids."""


def _unnamed_ids(named: dict[str, Any]) -> torch.Tensor | None:
    name, value = next(((n, v) for n, v in named.items() if isinstance(v, torch.Tensor) and v.dim()), ("", None))
    if value is None or value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        return None
    return value if value.dim() in (1, 2) and not any(part in name for part in _NO_IDS) else None


def _bounds(named: dict[str, Any]) -> np.ndarray | None:
    """Return where packed sequences begin in the flattened batch, as Hugging Face's flash attention is told."""
    bounds = first_tensor(named, "cu_seq_lens_q")
    return None if bounds is None else numpy_of(bounds).astype(np.int64)


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
        signature = inspect.signature(module.forward)
        if any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values()):  # a wrapper that hands all on
            signature = inspect.signature(unwrap(module).forward)
        bound = signature.bind_partial(*args, **kwargs)
        return {name: value for name, value in bound.arguments.items() if name not in kwargs} | kwargs
    except (TypeError, ValueError):  # a forward whose signature cannot be read: keep what has a name
        return {f"input{i}": value for i, value in enumerate(args)} | kwargs


def _mask(named: dict[str, Any], length: int) -> torch.Tensor | None:
    """Return the attention mask of a forward of so many positions, up to their own keys.

    One of several masks (by kind of attention) is that of full attention where there is one; one that covers a cache
    of fixed size goes on over keys that are not there yet.
    """
    mask = named.get("attention_mask")
    if isinstance(mask, dict):
        mask = mask.get("full_attention", next(iter(mask.values()), None))
    cache = named.get("past_key_values")
    if (
        isinstance(mask, torch.Tensor)
        and mask.dim() == 4
        and mask.shape[2] == length
        and hasattr(cache, "get_seq_length")
    ):
        return mask[..., : _cached_tokens(cache) + length]
    return mask if isinstance(mask, torch.Tensor) else None


def first_tensor(named: dict[str, Any], name: str) -> torch.Tensor | None:
    """Return the argument ``name`` if it is a tensor."""
    value = named.get(name)
    return value if isinstance(value, torch.Tensor) else None
