"""Megatron-core: global layer numbers, [position, batch, hidden] tensors, rows from masks or packed parameters."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch

from probe.errors import CaptureError
from probe.hooks.engines import megatron_moe, megatron_parallel
from probe.hooks.engines.megatron_parallel import zigzag
from probe.hooks.engines.sequences import SequenceBook
from probe.hooks.engines.transformers import BatchAdapter, bind_arguments, first_tensor
from probe.hooks.rows import Announced, CallRows, grid_of
from probe.store.schema import COLUMNS, WHOLE

_LAYER = re.compile(r"^(.*\blayers\.)(\d+)(.*)$")
_EXPERT = re.compile(r"^(.*\.local_experts)\.(\d+)(.*)$")
_IDENTITIES = ("IdentityOp", "IdentityFuncOp")
"""Placeholders of a spec for modules that the model does not have: their output is their input."""
_BATCH_FIRST = ("", "embedding.word_embeddings", "embedding.position_embeddings")
"""Modules whose tensors are [batch, position, ...]; everything inside the decoder is [position, batch, ...]."""
_WHOLE_MODEL = ("", "decoder")
"""Modules that a pipeline stage has only a part of."""
_PART = re.compile(r"(chunk|stage)\d+(\.|$)")
"""What names a part of the model that another part calls by the same name."""
_NO_ROWS = np.zeros(0, np.int64)
"""The rows of a tensor whose leading axis runs over (token, expert) pairs: none that a row of tokens could name."""


class MegatronAdapter(BatchAdapter):
    """Rows of a GPTModel: a padded batch [b, s], or packed sequences [1, t] described by PackedSeqParams.

    With context parallelism s and t are this rank's share of each sequence, and with pipeline parallelism a stage may
    see no token ids at all. A ``paused`` adapter records nothing: the forward only keeps other ranks company.
    """

    name = "megatron"
    layouts = ("sb", "bs", "flat_sb")
    logits = ("output_layer", "output.0")
    true_hides = True

    def __init__(self, book: SequenceBook, *, prompts_only: bool = False) -> None:
        super().__init__(book, prompts_only=prompts_only)
        self.here = megatron_parallel.ranks()
        self.tp_rank, self.tp_size = self.here.tp, self.here.tp_size
        self.sequence_prefix = f"d{self.here.dp}." if self.here.dp_size > 1 else ""
        self._split_rows = False
        self._own_rows = _NO_ROWS
        self._latent = False
        self._root_shard = WHOLE
        self._global_layer: dict[str, str] = {}
        self._local_experts: dict[str, int] = {}
        self._dispatchers: dict[str, Any] = {}
        self._routers: dict[str, torch.nn.Module] = {}
        self._replayed: set[str] = set()

    # -- names ---------------------------------------------------------------------------------------------------------

    def module_path(self, path: str, module: torch.nn.Module) -> str | None:
        """Return the path with the numbers that the whole model would have.

        Pipeline stages and chunks number their layers locally, expert-parallel ranks their experts. A stage that does
        not end the model has what goes by the whole model's name under its own.
        """
        if path.endswith(".local_experts"):
            self._local_experts[path] = len(module)
        if super().module_path(path, module) is None or type(module).__name__ in _IDENTITIES:
            return None
        self._latent |= path.endswith(megatron_parallel.LATENT)
        if (expert := _EXPERT.match(path)) is not None:
            number = self.here.ep * self._local_experts.get(expert[1], 0) + int(expert[2])
            path = f"{expert[1]}.{number}{expert[3]}"
        match = _LAYER.match(path)
        if match is not None:
            local = match[1] + match[2]
            if not match[3]:
                self._global_layer[local] = f"{match[1]}{getattr(module, 'layer_number', int(match[2]) + 1) - 1}"
            path = self._global_layer.get(local, local) + match[3]
        if hasattr(module, "token_dispatcher"):
            self._dispatchers[path] = module.token_dispatcher
        if path.endswith(megatron_moe.ROUTER):
            self._routers[path] = module
        if path in _WHOLE_MODEL and not getattr(module, "post_process", True):
            stage = (getattr(module, "vp_stage", None) or 0) * self.here.pp_size + self.here.pp
            path = f"stage{stage}.{path}".rstrip(".")
        return path

    def preferred_layouts(self, path: str, slot: str) -> tuple[str, ...]:
        """Return batch-first for the model's own inputs and outputs and for token ids everywhere."""
        return ("bs",) if path in _BATCH_FIRST or slot.endswith(("input_ids", "position_ids")) else ()

    def shard_of(self, path: str, slot: str) -> str:
        """Return what a tensor-parallel rank holds of a tensor, from the table of :mod:`.megatron_parallel`."""
        if not path or _PART.match(path):
            return self._root_shard if not path and slot.startswith("output") else WHOLE
        return megatron_parallel.shard_of(path, slot, self.here, self._split_rows, self._latent)

    def taps(self, path: str, module: torch.nn.Module) -> dict[str, str]:
        """Return methods of the router and the block of experts whose results pass through no module of their own."""
        return megatron_moe.taps(path, module)

    def facts(self, path: str) -> dict[str, Any]:
        """Return whether a router replayed recorded ids."""
        return {megatron_moe.REPLAYED: True} if path in self._replayed else {}

    def weight_split(self, name: str, parameter: torch.Tensor, module: torch.nn.Module) -> tuple[int, int]:
        """Return the axis over which tensor-parallel ranks split a parameter, and the first input column here."""
        return megatron_parallel.parallel_axis(name, parameter)

    # -- rows ----------------------------------------------------------------------------------------------------------

    def begin_call(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallRows | None:
        """Return the rows of this forward, from its packed parameters if it has any.

        A paused forward has none of its own and no number, unless its experts may serve other ranks' tokens.
        """
        if self.paused and not self._shares_experts:
            return None
        named = bind_arguments(module, args, kwargs)
        self._split_rows = megatron_parallel.sequence_parallel(module)
        if self.paused:
            self._note_shape(self._batch_shape(module, named))
            nobody = np.full(self._shape, -1)
            return self.rows_of_call(grid_of(nobody, nobody, nobody))
        has_logits = getattr(module, "post_process", True) and first_tensor(named, "labels") is None
        self._root_shard = COLUMNS if has_logits and not named.get("runtime_gather_output") else WHOLE
        packed = named.get("packed_seq_params")
        if packed is not None:
            grid = self._packed_grid(module, named, packed)
        elif self._needs_cells(named):
            grid = self._padded_grid(module, named)
        else:
            grid = self._grid(module, named)
        self._note_shape(grid.shape)
        return self.rows_of_call(grid)

    def _note_shape(self, shape: tuple[int, int]) -> None:
        self._shape, self._logits_to_keep = shape, 0
        self._own_rows = megatron_parallel.local_rows(shape, self.here, self._split_rows)

    @property
    def _shares_experts(self) -> bool:
        return self.here.ep_size > 1 and bool(self._dispatchers)

    def expert_cells(self) -> np.ndarray | None:
        """Return this rank's rows of the call in the order of its layers, where other ranks' experts serve them."""
        return self._own_rows if self._shares_experts else None

    def _needs_cells(self, named: dict[str, Any]) -> bool:
        """Tell whether ids and masks do not describe the batch: a share of it, a later stage, or a filled-up batch."""
        filled = any(who.length == 0 for who in self.announced)
        return self.here.cp_size > 1 or first_tensor(named, "input_ids") is None or filled

    def partial_rows(self, path: str, slot: str, tensor: torch.Tensor) -> np.ndarray | None:
        """Return the rows that sequence parallelism left this rank, or that an expert was given."""
        if ".mlp.experts" in path:
            return self._expert_rows(path, tensor)
        if path in self._routers and megatron_moe.replays(self._routers[path]):
            self._replayed.add(path)
        if not self._split_rows:
            return None
        batch, length = self._shape
        part = length // self.tp_size
        flat = tensor.dim() == 2 and len(tensor) == part * batch and tuple(tensor.shape) != self._shape
        if tuple(tensor.shape[:2]) != (part, batch) and not flat:
            return None
        return self._own_rows

    def _expert_rows(self, path: str, tensor: torch.Tensor) -> np.ndarray:
        block, _, inside = path.partition(".experts")
        match = re.match(r"\.local_experts\.(\d+)", inside)
        dispatcher = self._dispatchers.get(block)
        if match is None or getattr(dispatcher, "local_map", None) is None:
            return _NO_ROWS
        local = int(match[1]) % dispatcher.local_map.shape[1]  # type: ignore[union-attr]
        rows = megatron_parallel.expert_rows(dispatcher, local, self._shape, self.here, self._split_rows)
        return rows if len(rows) == len(tensor) else _NO_ROWS

    def _padded_grid(self, module: torch.nn.Module, named: dict[str, Any]) -> np.ndarray:
        """Return the grid of a right-padded batch; with context parallelism, of this rank's share of it."""
        ids = _ids_or_unknown(self._batch_shape(module, named), first_tensor(named, "input_ids"))
        batch, share = ids.shape
        positions = zigzag(share * self.here.cp_size, self.here.cp_size, self.here.cp)
        owner = np.broadcast_to(np.arange(batch)[:, None], ids.shape)
        lengths = [share * self.here.cp_size] * batch
        return self._known_grid(module, owner, np.broadcast_to(positions, ids.shape), ids, lengths)

    def _batch_shape(self, module: torch.nn.Module, named: dict[str, Any]) -> tuple[int, int]:
        """Return [batch, position] of a forward that may be given no ids: a later stage sees only hidden states."""
        for name in ("input_ids", "position_ids", "labels"):
            given = first_tensor(named, name)
            if given is not None and given.dim() == 2:
                return given.shape[0], given.shape[1]
        hidden = first_tensor(named, "decoder_input")
        if hidden is None:
            hidden = getattr(getattr(module, "decoder", None), "input_tensor", None)
        if hidden is None:
            raise CaptureError("nothing in this forward says how many tokens it has", "pass input_ids or position_ids")
        return hidden.shape[1], hidden.shape[0] * (self.tp_size if self._split_rows else 1)

    def _packed_grid(self, module: torch.nn.Module, named: dict[str, Any], packed: Any) -> np.ndarray:
        """Return the grid [1, t] of packed sequences; the bounds in ``packed`` are those of the whole sequences."""
        padded = getattr(packed, "cu_seqlens_q_padded", None)
        widths = np.diff(_cumulative(packed.cu_seqlens_q if padded is None else padded))
        real = np.diff(_cumulative(packed.cu_seqlens_q))
        share = widths // self.here.cp_size
        ids = _ids_or_unknown((1, int(share.sum())), first_tensor(named, "input_ids"))
        position = np.concatenate([zigzag(width, self.here.cp_size, self.here.cp) for width in widths])
        owner = np.repeat(np.arange(len(widths)), share)
        return self._known_grid(module, owner[None], position[None], ids, [int(length) for length in real])

    def _known_grid(
        self, module: torch.nn.Module, owner: np.ndarray, position: np.ndarray, token: np.ndarray, lengths: list[int]
    ) -> np.ndarray:
        """Return a grid from each cell's sequence of the call and position, cutting off what pads the sequences.

        ``lengths`` are those that the forward's arguments give; an announced length goes first. A sequence announced
        with length 0 only fills up the batch.
        """
        sequence, position, token = np.full(owner.shape, -1, np.int64), position.copy(), token.copy()
        nobody: list[int | None] = [None] * len(lengths)
        for number, who in enumerate(self.sequences_of_call(module, token, [0] * len(lengths), nobody)):
            length = lengths[number] if who.length is None else who.length
            mine = (owner == number) & (position < length)
            if length:
                position[mine] += who.start
                sequence[mine] = self.book.number(who, length=who.start + length)
                token[mine] = _told_tokens(who, position[mine], token[mine])
        return grid_of(sequence, position, token)


def _told_tokens(who: Announced, position: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Return token ids, taken from the announcement where the forward shows none."""
    if who.tokens is None or (seen >= 0).all():
        return seen
    return np.asarray(who.tokens, np.int64)[position]


def _ids_or_unknown(shape: tuple[int, int], ids: torch.Tensor | None) -> np.ndarray:
    """Return token ids of a shape, -1 where there are none: verl gives later stages its nested batch, for nothing."""
    if ids is None or ids.is_nested or ids.numel() != shape[0] * shape[1]:
        return np.full(shape, -1, np.int64)
    return ids.detach().cpu().numpy().reshape(shape)


def _cumulative(lengths: torch.Tensor) -> np.ndarray:
    return lengths.detach().cpu().numpy().astype(np.int64)
