"""Everything a CPU run of Megatron-core takes, in one place.

Megatron-core assumes CUDA in a few spots of its forward. On a CPU run, and only there, this module replaces them for
the whole process and says so in one log line. It also holds the packed core attention that Megatron's local layer
specification lacks.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

REPLACED = (
    "torch.cuda.current_device (returns the CPU)",
    "megatron.core.fusions.fused_softmax.get_default_causal_mask (builds the mask on the CPU)",
    "the Megatron RNG tracker (its public inference variant, which draws nothing)",
    "core attention of packed sequences (probe's own, not TransformerEngine's kernel)",
)
"""What a CPU run replaces, in the words of the log line."""

_state = {"applied": False}


def apply_cpu_support(log: logging.Logger | None = None) -> None:
    """Replace what Megatron-core's forward takes from CUDA, once per process, and log one line naming it.

    Call before building a model for the CPU. Later calls do nothing. The replacements last for the whole process, so
    a process that ran Megatron on the CPU cannot run it on CUDA afterwards; see :func:`cpu_support_applied`.
    """
    if _state["applied"]:
        return
    import torch
    from megatron.core.fusions import fused_softmax
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    torch.cuda.current_device = _cpu_device
    fused_softmax.get_default_causal_mask = _causal_mask
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    _state["applied"] = True
    (log or logging.getLogger("probe")).warning("Megatron-core runs on the CPU; replaced: %s", "; ".join(REPLACED))


def cpu_support_applied() -> bool:
    """Tell whether this process has replaced Megatron-core's CUDA calls."""
    return _state["applied"]


@cache
def packed_core_attention() -> type:
    """Return the core attention class for packed (THD) sequences under Megatron's local layer specification.

    This is probe's replacement: Megatron's ``DotProductAttention`` refuses packed sequences and leaves them to
    TransformerEngine, which needs CUDA. Packed results on a CPU therefore validate the packed layout, the rotary
    positions and all Megatron code around the attention; they say nothing about TransformerEngine's kernel.
    The class is made on first use, so that importing this module needs no Megatron.
    """
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class PackedDotProductAttention(DotProductAttention):
        """Megatron's local core attention that also takes packed query, key, value ``[tokens, heads, dim]``."""

        def forward(
            self,
            query: Any,
            key: Any,
            value: Any,
            attention_mask: Any,
            attn_mask_type: Any = None,
            attention_bias: Any = None,
            packed_seq_params: Any = None,
        ) -> Any:
            """Attend within each sequence; packed input gives ``[tokens, heads * dim]``, as TransformerEngine does."""
            if packed_seq_params is None:
                return super().forward(query, key, value, attention_mask, attn_mask_type, attention_bias)
            rows, columns = _places(packed_seq_params, query.device)
            unpacked = [_unpack(part, rows, columns) for part in (query, key, value)]
            context = super().forward(*unpacked, _causal_mask(unpacked[0].shape[0], query.device)[None, None])
            return context[rows, columns]

    return PackedDotProductAttention


def _places(packed_seq_params: Any, device: Any) -> tuple[Any, Any]:
    """Return the position in its sequence and the number of the sequence, each ``[tokens]``, of every packed token.

    Padding at the end of a sequence counts as part of it: causal attention keeps it from the real tokens.
    """
    import torch

    bounds = packed_seq_params.cu_seqlens_q_padded
    bounds = packed_seq_params.cu_seqlens_q if bounds is None else bounds
    lengths = (bounds[1:] - bounds[:-1]).tolist()
    rows = torch.cat([torch.arange(length, device=device) for length in lengths])
    columns = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
    return rows, columns


def _unpack(packed: Any, rows: Any, columns: Any) -> Any:
    """Spread packed ``[tokens, heads, dim]`` over zero-padded ``[longest, sequences, heads, dim]``."""
    shape = (int(rows.max()) + 1, int(columns.max()) + 1, *packed.shape[1:])
    padded = packed.new_zeros(shape)
    padded[rows, columns] = packed
    return padded


def _causal_mask(length: int, device: Any = "cpu") -> Any:
    """Return the boolean causal mask ``[length, length]``; True hides a position."""
    import torch

    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)


def _cpu_device() -> Any:
    """Stand in for ``torch.cuda.current_device``."""
    import torch

    return torch.device("cpu")
