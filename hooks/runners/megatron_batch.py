"""Turn token sequences into Megatron model inputs, padded or packed, and run the forward.

Padded: ``[b, s]`` right-padded, explicit causal mask. Packed (THD): one row ``[1, t]`` and ``PackedSeqParams``; each
sequence is padded on its own to the multiple, as verl packs. Padding holds token 0 and is never read by a real
position: attention is causal and padding follows the tokens of its sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from probe.errors import EngineError, UsageError

if TYPE_CHECKING:
    import torch

PADDED, PACKED = "padded", "packed"


@dataclass(frozen=True)
class Batch:
    """Model inputs and where each sequence lies in them.

    ``input_ids`` and ``position_ids`` are int64 ``[b, s]`` (packed: ``[1, t]``). ``attention_mask`` is bool
    ``[1, 1, s, s]``, True = masked (packed: None). ``lengths`` are the real lengths. ``starts`` are the packed offsets
    of the sequences, or zeros when padded, where sequence ``i`` is row ``i`` of the batch.
    """

    layout: str
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    packed_seq_params: Any
    lengths: tuple[int, ...]
    starts: tuple[int, ...]

    def rows(self, index: int) -> tuple[int, slice]:
        """Return (batch row, slice of positions) of sequence ``index``, for tensors ``[b, s, ...]``."""
        start = self.starts[index]
        return (0 if self.layout == PACKED else index), slice(start, start + self.lengths[index])


def padded(sequences: Sequence[Sequence[int]], multiple: int = 1, device: str = "cpu") -> Batch:
    """Right-pad token sequences to the longest one, rounded up to ``multiple`` positions.

    Raises UsageError when there is no sequence, an empty one, or the multiple is not positive.
    """
    import torch

    lengths = _lengths(sequences, multiple)
    width = _round_up(max(lengths), multiple)
    input_ids = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, sequence in zip(input_ids, sequences):
        row[: len(sequence)] = torch.as_tensor(sequence, dtype=torch.long)
    position_ids = torch.arange(width).expand(len(lengths), -1)
    mask = torch.ones(width, width, dtype=torch.bool).triu(1)[None, None]
    starts = (0,) * len(lengths)
    return Batch(PADDED, input_ids.to(device), position_ids.to(device), mask.to(device), None, lengths, starts)


def packed(sequences: Sequence[Sequence[int]], multiple: int = 1, device: str = "cpu") -> Batch:
    """Concatenate token sequences into one row, each padded to ``multiple`` positions.

    Raises UsageError when there is no sequence, an empty one, or the multiple is not positive.
    """
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    lengths = _lengths(sequences, multiple)
    widths = [_round_up(length, multiple) for length in lengths]
    ends = torch.tensor(widths).cumsum(0)
    starts = tuple((ends - torch.tensor(widths)).tolist())
    input_ids = torch.zeros(1, int(ends[-1]), dtype=torch.long)
    for start, sequence in zip(starts, sequences):
        input_ids[0, start : start + len(sequence)] = torch.as_tensor(sequence, dtype=torch.long)
    position_ids = torch.cat([torch.arange(width) for width in widths])[None]
    bounds = torch.cat([torch.zeros(1, dtype=torch.long), ends]).to(device=device, dtype=torch.int32)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=bounds,
        cu_seqlens_kv_padded=bounds,
        max_seqlen_q=max(widths),
        max_seqlen_kv=max(widths),
    )
    return Batch(PACKED, input_ids.to(device), position_ids.to(device), None, params, lengths, starts)


def forward(model: Any, batch: Batch) -> list[torch.Tensor]:
    """Run the model without gradients and return the logits of each sequence.

    Each result is ``[length, padded vocabulary]`` in the model's dtype; padding positions are cut, padding of the
    vocabulary is not. Raises EngineError for a token outside the vocabulary and for packed sequences on a layer
    specification that refuses them.
    """
    import torch

    largest = int(batch.input_ids.max())
    if int(batch.input_ids.min()) < 0 or largest >= model.vocab_size:
        raise EngineError(
            f"a token id lies outside the model's vocabulary of {model.vocab_size} (largest: {largest})",
            "replay the tokens on the checkpoint that produced them",
        )
    if batch.layout == PACKED:
        _require_packing(model)
    with torch.no_grad():
        logits = model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=batch.attention_mask,
            packed_seq_params=batch.packed_seq_params,
        )
    return [logits[batch.rows(index)] for index in range(len(batch.lengths))]


def _require_packing(model: Any) -> None:
    """Refuse packed sequences where Megatron's own local core attention would fail an assertion."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    if type(model.decoder.layers[0].self_attention.core_attention) is DotProductAttention:
        raise EngineError(
            "packed sequences on CUDA need TransformerEngine, which is not installed",
            "install transformer_engine or use padded batches",
        )


def _lengths(sequences: Sequence[Sequence[int]], multiple: int) -> tuple[int, ...]:
    """Return the length of every sequence after checking that a batch can be made of them."""
    lengths = tuple(len(sequence) for sequence in sequences)
    if not lengths or min(lengths) < 1 or multiple < 1:
        raise UsageError(
            f"cannot make a batch of sequences of lengths {list(lengths)} with the multiple {multiple}",
            "give at least one token per sequence and a positive multiple",
        )
    return lengths


def _round_up(length: int, multiple: int) -> int:
    """Return the least multiple that holds the length."""
    return -(-length // multiple) * multiple
