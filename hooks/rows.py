"""Which sequence, position and token each row of a call is, and where rows lie in a tensor of that call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from probe.errors import CaptureError
from probe.store.schema import FOREIGN, ROW, RowSegment

LAYOUTS = ("bs", "sb", "flat")
"""bs: [batch, position, ...]; sb: [position, batch, ...] (Megatron); flat: [batch * position, ...] (vLLM, packed);
flat_sb: [position * batch, ...] (Megatron's experts); bhs: [batch, heads, position, ...] (norms of some families)."""


@dataclass(frozen=True)
class Place:
    """Where the rows of a tensor of a call lie.

    Either in a ``layout``, or as the ``flat_rows`` (row numbers in the call's flattened grid, -1 for a row that is not
    stored, or :func:`foreign_rows`) that its first ``leading`` axes hold; with neither, no axis runs along tokens.
    """

    layout: str = ""
    flat_rows: np.ndarray | None = None
    leading: int = 1

    @property
    def has_rows(self) -> bool:
        """Return whether the tensor has rows of tokens."""
        return bool(self.layout) or self.flat_rows is not None


@dataclass
class CallRows:
    """The rows of one forward call as a grid [batch, position] of :data:`probe.store.schema.ROW`.

    ``sequence`` is -1 where a cell is padding. ``keep`` says which rows are stored (all real ones by default).
    A call of ``company`` only serves other ranks' tokens: whatever has no rows is not stored either.
    A call of packed or concatenated tokens is a grid of one batch row.
    """

    grid: np.ndarray
    call: int
    layouts: tuple[str, ...] = LAYOUTS
    keep: np.ndarray | None = None
    company: bool = False
    segment: RowSegment = field(init=False)
    whole: RowSegment = field(init=False)

    def __post_init__(self) -> None:
        keep = self.grid["sequence"] >= 0
        if self.keep is not None:
            keep &= self.keep
        self.grid["call"] = self.call
        self._batch, self._position = (torch.from_numpy(axis) for axis in np.nonzero(keep))
        self._flat = self._batch * self.grid.shape[1] + self._position
        self.segment = RowSegment(self.grid[keep])
        self.whole = RowSegment(np.array([(-1, -1, -1, self.call)], ROW))
        self._subsets: dict[bytes, tuple[np.ndarray, RowSegment]] = {}
        self._on_device: dict[torch.device, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def layout_of(self, shape: torch.Size | tuple[int, ...], preferred: tuple[str, ...] = ()) -> str | None:
        """Return where rows lie in a tensor of ``shape``, or None when no axis runs along this call's tokens."""
        batch, length = self.grid.shape
        shapes = {"bs": (batch, length), "sb": (length, batch)}
        for layout in (*preferred, *self.layouts):
            if layout == "bhs":
                if len(shape) >= 4 and (shape[0], shape[2]) == (batch, length):
                    return layout
                continue
            expected = shapes.get(layout, (batch * length,))
            if tuple(shape[: len(expected)]) == expected:
                return layout
        return None

    def place_of(
        self, shape: torch.Size | tuple[int, ...], preferred: tuple[str, ...] = (), flat_rows: np.ndarray | None = None
    ) -> Place | None:
        """Return where rows lie in a tensor of ``shape``, which holds only ``flat_rows`` of the call if they are given.

        None when the tensor does not have as many rows as were given.
        """
        if flat_rows is None:
            return Place(self.layout_of(shape, preferred) or "")
        for leading in range(1, len(shape) + 1):
            if math.prod(shape[:leading]) == len(flat_rows):
                while leading + 1 < len(shape) and shape[leading] == 1:
                    leading += 1  # a batch or a chunk of one, whose axis is no feature
                return Place("", flat_rows, leading)
        return None

    def take(self, tensor: torch.Tensor, place: Place) -> tuple[torch.Tensor, RowSegment]:
        """Return a copy of the stored rows of ``tensor`` and which they are; without token rows, of all of it."""
        if place.flat_rows is not None:
            chosen, segment = self.subset(place.flat_rows)
            rows = tensor.reshape(len(place.flat_rows), *tensor.shape[place.leading :])
            return rows[torch.from_numpy(chosen).to(tensor.device)], segment
        if place.layout:
            return self.gather(tensor, place.layout), self.segment
        return tensor.clone()[None], self.whole

    def gather(self, tensor: torch.Tensor, layout: str) -> torch.Tensor:
        """Return the stored rows of ``tensor`` as a new tensor [rows, *features], without padding."""
        batch, position, flat = self._indices(tensor.device)
        if layout == "bs":
            return tensor[batch, position]
        if layout == "sb":
            return tensor[position, batch]
        if layout == "bhs":
            return tensor[batch, :, position]
        return tensor[flat if layout == "flat" else position * self.grid.shape[0] + batch]

    def subset(self, flat_rows: np.ndarray) -> tuple[np.ndarray, RowSegment]:
        """Return, for a tensor that holds only some rows of the call, which of them are stored and as which rows.

        ``flat_rows`` are row numbers in the flattened grid, one per row of the tensor. The same numbers give the same
        segment, so that tensors of one split share a row table.
        """
        key = np.ascontiguousarray(flat_rows, np.int64).tobytes()
        if key not in self._subsets:
            foreign = flat_rows <= FOREIGN
            stored = np.nonzero(np.isin(flat_rows, self._flat.numpy()) | foreign)[0]
            rows = self.grid.reshape(-1)[np.maximum(flat_rows[stored], 0)]
            _name_foreign(rows, flat_rows[stored], foreign[stored])
            rows["call"] = self.call
            self._subsets[key] = stored, RowSegment(rows)
        return self._subsets[key]

    def _indices(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if device not in self._on_device:
            indices = (self._batch, self._position, self._flat)
            self._on_device[device] = (
                indices
                if device.type == "cpu"
                else (indices[0].to(device), indices[1].to(device), indices[2].to(device))
            )
        return self._on_device[device]


def foreign_rows(rank: np.ndarray, cell: np.ndarray) -> np.ndarray:
    """Return what stands in ``flat_rows`` for tokens of other ranks: numbers from FOREIGN down, int64.

    ``rank`` is a global rank, ``cell`` the number of the token among those that it gave to the experts in this call.
    """
    return FOREIGN - (rank.astype(np.int64) << 32 | cell)


def _name_foreign(rows: np.ndarray, flat_rows: np.ndarray, foreign: np.ndarray) -> None:
    """Name the rows of other ranks' tokens by rank and cell."""
    code = FOREIGN - flat_rows[foreign]
    rows["sequence"][foreign] = FOREIGN - (code >> 32)
    rows["position"][foreign] = code & 0xFFFFFFFF
    rows["token"][foreign] = -1


def grid_of(sequence: np.ndarray, position: np.ndarray, token: np.ndarray) -> np.ndarray:
    """Return a row grid from three arrays of one shape [batch, position] (sequence -1 marks padding)."""
    if not sequence.shape == position.shape == token.shape:
        raise CaptureError(f"row grids disagree: {sequence.shape}, {position.shape}, {token.shape}")
    grid = np.zeros(sequence.shape, ROW)
    grid["sequence"], grid["position"], grid["token"] = sequence, position, token
    padding = sequence < 0
    grid["position"][padding] = -1
    grid["token"][padding] = -1
    return grid


@dataclass
class Announced:
    """What the caller knows about one sequence of the next call: identity, prompt length, real length, first position.

    ``prompt_len`` None means unknown; ``length`` None means every cell of the batch row is real. ``tokens`` are the
    ids of the whole sequence, for a forward that is not given any. ``weight_version`` counts the weight updates that
    the model had received.
    """

    uid: str
    prompt_len: int | None = None
    length: int | None = None
    sample: int = 0
    trajectory: str = ""
    start: int = 0
    tokens: Sequence[int] | None = None
    weight_version: int = 0
