"""Turn token sequences into Megatron model inputs, padded or packed, and run the forward.

Padded: ``[b, s]`` right-padded, explicit causal mask. Packed (THD): one row ``[1, t]`` and ``PackedSeqParams``; each
sequence is padded on its own to the multiple, as verl packs. Padding holds token 0 and is never read by a real
position: attention is causal and padding follows the tokens of its sequence. A context-parallel rank takes its chunks
of every sequence (:func:`probe.hooks.engines.megatron_parallel.zigzag`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from probe.errors import EngineError, UsageError
from probe.hooks.engines.megatron_parallel import zigzag

PADDED, PACKED = "padded", "packed"


@dataclass(frozen=True)
class Form:
    """How batches are laid out.

    Sequences are padded to ``multiple`` positions. ``rows`` and ``width`` give every batch one shape where ranks depend
    on each other's: [rows, width] when padded, [1, width] when packed; 0 takes what a batch needs. The batch is that of
    rank ``cp`` of ``cp_size`` context-parallel ones.
    """

    layout: str = PADDED
    multiple: int = 1
    rows: int = 0
    width: int = 0
    cp: int = 0
    cp_size: int = 1

    def lengths(self, sequences: Sequence[Sequence[int]]) -> list[int]:
        """Return the padded length of each sequence."""
        return [-(-len(sequence) // self.multiple) * self.multiple for sequence in sequences]


@dataclass(frozen=True)
class Batch:
    """Model inputs and where each sequence lies in them.

    ``input_ids`` and ``position_ids`` are int64 ``[b, s]`` (packed: ``[1, t]``). ``attention_mask`` is bool
    ``[1, 1, s, s]``, True = masked (packed, or a share of the positions: None). ``sequence`` and ``position``, int64 of
    the same shape as ``input_ids``, say which sequence of the batch a cell belongs to (-1: padding) and where in it.
    """

    layout: str
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    packed_seq_params: Any
    sequence: np.ndarray
    position: np.ndarray

    def rows(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the cells (batch row, column) that hold tokens of sequence ``index``, in the order of the batch."""
        return np.nonzero(self.sequence == index)  # type: ignore[return-value]  # one array per axis, and there are two


def make_batch(sequences: Sequence[Sequence[int]], form: Form, device: str = "cpu") -> Batch:
    """Lay token sequences out as ``form`` says.

    Raises UsageError when there is no sequence, an empty one, or the multiple is not positive.
    """
    if not sequences or min(map(len, sequences)) < 1 or form.multiple < 1:
        raise UsageError(
            f"cannot make a batch of sequences of lengths {list(map(len, sequences))} with the multiple "
            f"{form.multiple}",
            "give at least one token per sequence and a positive multiple",
        )
    return (_packed if form.layout == PACKED else _padded)(sequences, form, device)


def padded(sequences: Sequence[Sequence[int]], multiple: int = 1, device: str = "cpu") -> Batch:
    """Right-pad token sequences to the longest one, rounded up to ``multiple`` positions."""
    return make_batch(sequences, Form(PADDED, multiple), device)


def packed(sequences: Sequence[Sequence[int]], multiple: int = 1, device: str = "cpu") -> Batch:
    """Concatenate token sequences into one row, each padded to ``multiple`` positions."""
    return make_batch(sequences, Form(PACKED, multiple), device)


def _padded(sequences: Sequence[Sequence[int]], form: Form, device: str) -> Batch:
    width = form.width or max(form.lengths(sequences))
    positions = zigzag(width, form.cp_size, form.cp)
    cells = np.broadcast_to(positions, (form.rows or len(sequences), len(positions)))
    lengths = np.array([*map(len, sequences), *[0] * (len(cells) - len(sequences))])
    sequence = np.where(cells < lengths[:, None], np.arange(len(cells))[:, None], -1)
    mask = None
    if form.cp_size == 1:
        mask = torch.ones(width, width, dtype=torch.bool).triu(1)[None, None].to(device)
    return _batch(form, sequences, sequence, cells, mask, None, device)


def _packed(sequences: Sequence[Sequence[int]], form: Form, device: str) -> Batch:
    from megatron.core.packed_seq_params import PackedSeqParams

    widths = form.lengths(sequences)
    widths[-1] += max(0, form.width - sum(widths))
    position = np.concatenate([zigzag(width, form.cp_size, form.cp) for width in widths])
    sequence = np.repeat(np.arange(len(widths)), np.array(widths) // form.cp_size)
    real = position < np.array([*map(len, sequences)])[sequence]
    bounds = torch.tensor(np.concatenate([[0], np.cumsum(widths)]), device=device, dtype=torch.int32)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=bounds,
        cu_seqlens_kv_padded=bounds,
        max_seqlen_q=max(widths),
        max_seqlen_kv=max(widths),
    )
    return _batch(form, sequences, np.where(real, sequence, -1)[None], position[None], None, params, device)


def _batch(
    form: Form,
    sequences: Sequence[Sequence[int]],
    sequence: np.ndarray,
    position: np.ndarray,
    mask: torch.Tensor | None,
    params: Any,
    device: str,
) -> Batch:
    ids = np.zeros(sequence.shape, np.int64)
    for index, tokens in enumerate(sequences):
        mine = sequence == index
        ids[mine] = np.asarray(tokens, np.int64)[position[mine]]
    places = torch.tensor(position, device=device)
    return Batch(form.layout, torch.from_numpy(ids).to(device), places, mask, params, sequence, position)


def forward(model: Any, batch: Batch) -> torch.Tensor:
    """Run one model chunk without gradients and return what it returns: logits ``[b, s, vocabulary]`` at the end.

    Raises EngineError for a token outside the vocabulary and for packed sequences on a layer specification that
    refuses them.
    """
    largest = int(batch.input_ids.max())
    if int(batch.input_ids.min()) < 0 or largest >= model.vocab_size:
        raise EngineError(
            f"a token id lies outside the model's vocabulary of {model.vocab_size} (largest: {largest})",
            "replay the tokens on the checkpoint that produced them",
        )
    if batch.layout == PACKED:
        _require_packing(model)
    with torch.no_grad():
        return model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=batch.attention_mask,
            packed_seq_params=batch.packed_seq_params,
        )


def _require_packing(model: Any) -> None:
    """Refuse packed sequences where Megatron's own local core attention would fail an assertion."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    if type(model.decoder.layers[0].self_attention.core_attention) is DotProductAttention:
        raise EngineError(
            "packed sequences on CUDA need TransformerEngine, which is not installed",
            "install transformer_engine or use padded batches",
        )
