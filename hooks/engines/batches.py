"""Read off a forward's arguments which cell of its batch is which token of which sequence: numpy in, numpy out.

A row's identity is the token's index in its sequence. Rope positions are not that: the tokens of an image share them,
and padding shifts them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

MASKED = -1e4
"""An additive mask hides a key with -inf, the dtype's minimum, or -10000, the weakest value in use; biases that only
weaken a key (ALiBi) stay above it."""
MROPE_ROWS, TEXT_AND_MROPE_ROWS = 3, 4
"""Leading axis of position_ids in vision-language models: time, height and width; or the text index before these."""


@dataclass
class Cells:
    """The cells of a batch [batch, position]: their sequence of the call (-1: padding) and index in that sequence.

    ``count`` sequences: one per batch row, or as many as are packed into the rows.
    """

    owner: np.ndarray
    position: np.ndarray
    count: int

    def of(self, number: int) -> np.ndarray:
        """Return which cells are of one sequence of the call."""
        return self.owner == number


@dataclass
class Positions:
    """What ``position_ids`` say: values [batch, position], and whether they are the tokens' indices.

    Rope positions of M-RoPE are not; of them only ``restart`` is known, the cells where a sequence begins.
    """

    values: np.ndarray
    are_indices: bool
    restart: np.ndarray


def numpy_of(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor's values; bfloat16, which numpy lacks, as float32."""
    tensor = tensor.detach()
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).cpu().numpy()


def read_positions(given: torch.Tensor | None, shape: tuple[int, ...]) -> Positions | None:
    """Return what ``position_ids`` of any form ([s], [b, s], [3 or 4, b, s]) say about a batch of ``shape``."""
    if given is None or not given.dim() or given.shape[-1] != shape[1] or given.dim() > 3:
        return None
    values = numpy_of(given)
    if values.ndim == 3 and len(values) == MROPE_ROWS:
        # time, height and width are all 0 at the first token of a sequence and never again
        starts = np.broadcast_to((values == 0).all(axis=0), shape)
        return Positions(np.broadcast_to(values[0], shape), False, starts)
    values = np.broadcast_to(values[0] if values.ndim == 3 else values, shape)
    before = np.concatenate([np.full((shape[0], 1), -1), values[:, :-1]], axis=1)
    return Positions(values, True, (values < before) | ((values == before) & (values == 0)))


def read_mask(mask: torch.Tensor | None, shape: tuple[int, ...], *, true_hides: bool = False) -> np.ndarray | None:
    """Return an ``attention_mask`` as int64 [batch, keys], 0 where a key is padding, or None for one of another form.

    The keys end with the batch's own positions; a KV cache's come before. [b, keys] may be bool, int (other values than
    0 and 1 number the packed sequences), float, or additive. [b, 1, queries, keys] is boolean (``true_hides`` says what
    True means) or additive.
    """
    if mask is None or mask.dim() not in (2, 3, 4) or not mask.numel():
        return None
    values = numpy_of(mask)
    if values.dtype.kind == "f":
        added = values.min() < 0 or (values.ndim > 2 and not values.any())
        values = values > MASKED if added else values != 0
    elif values.ndim > 2 and true_hides:
        values = values == 0
    if values.ndim > 2:
        if values.shape[-2] != shape[1] or values.shape[-1] < shape[1]:
            return None
        values = _attended(values.reshape(len(values), -1, *values.shape[-2:])[:, 0] != 0)
        if not values[:, -shape[1] :].any():
            return None  # its keys do not end with this batch: a cache of fixed size
    if (
        len(values) not in (1, shape[0])
        or values.shape[1] < shape[1]
        or (len(values) == 1 < shape[0] and mask.dim() == 2)
    ):
        return None
    return np.broadcast_to(values, (shape[0], values.shape[1])).astype(np.int64)


def _attended(allowed: np.ndarray) -> np.ndarray:
    """Return which keys are tokens, from a square mask [batch, queries, keys] that says who may see whom.

    A token sees itself. Padding does not, except where a row that would see nothing was opened to every key (torch's
    kernels give NaN else): then later rows do not see every key.
    """
    past = allowed.shape[2] - allowed.shape[1]
    sees_itself = np.diagonal(allowed, offset=past, axis1=1, axis2=2)
    sees_all: np.ndarray = np.all(allowed, axis=2)
    later_sees_less = np.zeros_like(sees_all)
    later_sees_less[:, :-1] = np.logical_or.accumulate(~sees_all[:, :0:-1], axis=1)[:, ::-1]
    own = sees_itself & ~(sees_all & later_sees_less)
    return np.concatenate([(allowed & own[:, :, None]).any(axis=1)[:, :past], own], axis=1)


def read_cells(
    real: np.ndarray,
    positions: Positions | None,
    *,
    segments: np.ndarray | None = None,
    bounds: np.ndarray | None = None,
    first: np.ndarray | None = None,
    split_rows: bool = True,
) -> Cells:
    """Return the sequences of a batch and each token's index.

    ``real`` says which cells are tokens; ``segments`` (numbers from the mask) and ``bounds`` (offsets of packed
    sequences in the flattened batch) where sequences meet, beside what ``positions`` say. ``first`` is the index of
    each row's first token where something else than the positions knows it. Without ``split_rows`` each row is one
    sequence whatever the positions do.
    """
    begins = np.zeros(real.shape, bool)
    if split_rows:
        begins = _begins(real, positions, segments, bounds)
    owner, count = np.broadcast_to(np.arange(len(real))[:, None], real.shape), len(real)
    if begins.any():
        at_start = real & (np.cumsum(real, axis=1) == 1)
        owner = (np.cumsum((begins | at_start).reshape(-1)) - 1).reshape(real.shape)
        count = int(owner.max()) + 1
    owner = np.where(real, owner, -1)
    position = np.full(real.shape, -1, np.int64)
    cells = np.argwhere(real)
    for row, number in np.unique(np.stack([cells[:, 0], owner[real]], axis=1), axis=0):
        mine = owner[row] == number
        known = None if first is None or begins[row][mine].any() else int(first[row])
        position[row, mine] = _indices(int(mine.sum()), known, positions, row, mine)
    return Cells(owner, position, count)


def _begins(
    real: np.ndarray, positions: Positions | None, segments: np.ndarray | None, bounds: np.ndarray | None
) -> np.ndarray:
    """Return the tokens at which a sequence begins in the middle of a row."""
    begins = np.zeros(real.shape, bool)
    if positions is not None:
        begins |= positions.restart
    if segments is not None:
        begins[:, 1:] |= segments[:, 1:] != segments[:, :-1]
    if bounds is not None:
        begins.reshape(-1)[bounds[(bounds > 0) & (bounds < begins.size)]] = True
    return begins & real & (np.cumsum(real, axis=1) > 1)


def _indices(count: int, known: int | None, positions: Positions | None, row: int, mine: np.ndarray) -> np.ndarray:
    """Return the indices of a sequence's tokens in a row: as given where they can be indices, else counted."""
    if positions is None or not positions.are_indices:
        return (known or 0) + np.arange(count)
    values = positions.values[row, mine]
    start = int(values[0]) if known is None else known
    if values[0] == start and (np.diff(values) > 0).all():
        return values.astype(np.int64)
    return start + np.arange(count)
