"""Everything a CPU run of Megatron-core takes, in one place.

Megatron-core assumes CUDA in a few spots of its forward. On a CPU run, and only there, this module replaces them for
the whole process and says so: in one line, and with -v which they are. It also holds the core attention for packed
sequences and shares of them that Megatron's local layer specification lacks.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch

from probe.hooks.engines.megatron_parallel import ranks, zigzag

REPLACED = (
    "torch.cuda.current_device (returns the CPU)",
    "megatron.core.fusions.fused_softmax.get_default_causal_mask (builds the mask on the CPU)",
    "the Megatron RNG tracker (its public inference variant, which draws nothing)",
    "core attention of packed sequences and with context parallelism (probe's own, not TransformerEngine's kernel)",
    "torch.cuda.synchronize and the counters of the pipeline schedules (on the CPU there is nothing to wait for)",
    "the rotary frequencies of a context-parallel rank (taken from the whole without pinned memory)",
    "the start-up copy of tied embeddings between pipeline stages (each stage loads them from the checkpoint)",
    "megatron.core.transformer.moe.moe_utils.te_general_gemm (absent: the router multiplies with torch)",
)
"""What a CPU run replaces, in the words of the log."""

_state = {"applied": False}


def apply_cpu_support(log: logging.Logger | None = None) -> None:
    """Replace what Megatron-core's forward takes from CUDA, once per process, and log what that is.

    Call before building a model for the CPU. Later calls do nothing. The replacements last for the whole process, so
    a process that ran Megatron on the CPU cannot run it on CUDA afterwards; see :func:`cpu_support_applied`.
    """
    if _state["applied"]:
        return
    from megatron.core.fusions import fused_softmax
    from megatron.core.models.common.embeddings import rope_utils, rotary_pos_embedding
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron.core.transformer.moe import moe_utils

    torch.cuda.current_device = _cpu_device
    torch.cuda.synchronize = _nothing
    schedules.torch = _TorchOnCpu()
    for module in (rope_utils, rotary_pos_embedding):
        module.get_pos_emb_on_this_cp_rank = _rotary_share
    LanguageModule._is_in_embd_group = _nothing
    fused_softmax.get_default_causal_mask = _causal_mask
    # without TransformerEngine the name is not even bound, and with it the kernel needs CUDA
    moe_utils.te_general_gemm = None
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    _state["applied"] = True
    log = log or logging.getLogger("probe")
    log.warning("Megatron-core runs on the CPU, with probe's own attention for packed sequences and split ones")
    log.info("replaced in Megatron-core: %s", "; ".join(REPLACED))


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
        """Megatron's local core attention for packed query, key, value ``[tokens, heads, dim]`` and shares of them."""

        def __init__(self, config: Any, *args: Any, cp_comm_type: Any = None, **kwargs: Any) -> None:
            """Build Megatron's attention, which refuses context parallelism, as if there were none."""
            size, config.context_parallel_size = config.context_parallel_size, 1
            try:
                super().__init__(config, *args, **kwargs)
            finally:
                config.context_parallel_size = size

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
            here = ranks()
            if packed_seq_params is None and here.cp_size == 1:
                return super().forward(query, key, value, attention_mask, attn_mask_type, attention_bias)
            places = [_places(packed_seq_params, query, here.cp_size, rank) for rank in range(here.cp_size)]
            whole = [_whole(part, places) for part in (query, key, value)]
            context = super().forward(*whole, _causal_mask(whole[0].shape[0], query.device)[None, None])
            return context[places[here.cp]]

    return PackedDotProductAttention


def _places(packed_seq_params: Any, query: Any, size: int, rank: int) -> tuple[Any, Any]:
    """Return where a context-parallel rank's tokens belong: (position, number of the sequence), each as its query.

    Packed: ``[tokens]``; padded: ``[positions, batch]``. Padding at the end of a sequence counts as part of it: causal
    attention keeps it from the real tokens.
    """
    if packed_seq_params is None:
        length, batch = query.shape[0] * size, query.shape[1]
        rows = torch.from_numpy(zigzag(length, size, rank)).to(query.device)
        return rows[:, None].expand(-1, batch), torch.arange(batch, device=query.device).expand(len(rows), -1)
    bounds = packed_seq_params.cu_seqlens_q_padded
    bounds = packed_seq_params.cu_seqlens_q if bounds is None else bounds
    lengths = (bounds[1:] - bounds[:-1]).tolist()
    rows = torch.cat([torch.from_numpy(zigzag(length, size, rank)) for length in lengths])
    columns = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths) // size)
    return rows.to(query.device), columns.to(query.device)


def _whole(share: Any, places: list[tuple[Any, Any]]) -> Any:
    """Gather ``[..., heads, dim]`` from all context-parallel ranks and spread it over ``[longest, sequences, ...]``."""
    from megatron.core import parallel_state

    shares = [share]
    if len(places) > 1:
        shares = [torch.empty_like(share) for _ in places]
        torch.distributed.all_gather(shares, share.contiguous(), group=parallel_state.get_context_parallel_group())
    longest, sequences = (1 + max(int(place[axis].max()) for place in places) for axis in (0, 1))
    whole = share.new_zeros((longest, sequences, *share.shape[-2:]))
    for part, place in zip(shares, places):
        whole[place] = part
    return whole


class LocalNorm:
    """Makes torch's RMSNorm, as Megatron's local layer specification does where it does not refuse.

    It refuses sequence parallelism because a backward has to reduce the gradient over the ranks; a forward of the rows
    that a rank holds is the same. A class because Megatron calls no function of a specification.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> Any:
        """Return the module."""
        return torch.nn.RMSNorm(hidden_size, eps=eps)


def _causal_mask(length: int, device: Any = "cpu") -> Any:
    """Return the boolean causal mask ``[length, length]``; True hides a position."""
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)


def _rotary_share(frequencies: Any, seq_dim: int, cp_group: Any) -> Any:
    """Return the rotary frequencies of the positions that this context-parallel rank holds."""
    positions = zigzag(frequencies.shape[seq_dim], cp_group.size(), cp_group.rank())
    return frequencies.index_select(seq_dim, torch.from_numpy(positions).to(frequencies.device))


class _TorchOnCpu:
    """The torch that Megatron's pipeline schedules see: their counters are made where the run is."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *size: Any, **options: Any) -> Any:
        """Return zeros on the CPU."""
        return torch.zeros(*size, **{**options, "device": "cpu"})


def _nothing(*arguments: Any) -> None:
    """Do nothing."""


def _cpu_device() -> Any:
    """Stand in for ``torch.cuda.current_device``."""
    return torch.device("cpu")
