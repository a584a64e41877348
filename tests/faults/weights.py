"""Faults of parameters: what a run loads is not the checkpoint that it names. Their sketches are of what was loaded."""

from __future__ import annotations

from collections.abc import Callable

import torch

from faults.base import Inject, Run

Change = Callable[[torch.Tensor], torch.Tensor]


def of_block(path: str, change: Change, name: str = "weight") -> Inject:
    """Return the fault that changes one parameter of the layer (``path`` as in ``mlp.down_proj``)."""

    def inject(run: Run) -> None:
        parameter = getattr(run.block.get_submodule(path), name)
        parameter.data = change(parameter.data.clone()).to(parameter.dtype).contiguous()

    return inject


def of_model(path: str, change: Change) -> Inject:
    """Return the fault that changes one parameter outside the layers."""

    def inject(run: Run) -> None:
        module = run.model.get_submodule(path)
        module.weight = torch.nn.Parameter(change(module.weight.data.clone()).to(module.weight.dtype))

    return inject


def drift(weight: torch.Tensor, size: float = 0.05, seed: int = 11) -> torch.Tensor:
    """Return the weight of an earlier step: each value off by a share ``size`` of the weight's RMS."""
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
    return weight.float() + size * weight.float().square().mean().sqrt() * noise


def stale_block(run: Run) -> None:
    """Give one layer the parameters of an earlier step: a weight update that missed it."""
    for number, parameter in enumerate(run.block.parameters()):
        parameter.data = drift(parameter.data, seed=number).to(parameter.dtype)


def stale_model(run: Run) -> None:
    """Give the whole model the parameters of an earlier step."""
    for number, parameter in enumerate(run.model.parameters()):
        parameter.data = drift(parameter.data, seed=number).to(parameter.dtype)


def lagged_model(run: Run) -> None:
    """Do the same where the run says that it has other weight versions than the other side."""
    stale_model(run)
    run.weight_version = 3


def version_two(run: Run) -> None:
    """Say that the weights of this side have had two updates."""
    run.weight_version = 2


def permuted_heads(weight: torch.Tensor, heads: int = 4) -> torch.Tensor:
    """Return rows in the order of a converter that takes [heads, dim] for [dim, heads]."""
    parts = weight.reshape(heads, -1, *weight.shape[1:])
    return parts.transpose(0, 1).reshape(weight.shape)


def interleaved_qkv(run: Run) -> None:
    """Split a fused [q q k v] of each group as if it were all q, then all k, then all v."""
    attention = run.block.self_attn
    for name in ("weight", "bias"):
        parts = [getattr(getattr(attention, f"{letter}_proj"), name) for letter in "qkv"]
        groups = [part.data.chunk(run.model.config.num_key_value_heads) for part in parts]
        fused = torch.cat([piece for group in zip(*groups) for piece in group])
        for part, piece in zip(parts, fused.split([len(part) for part in parts])):
            part.data = piece.clone()


def swapped(one: str, other: str, names: tuple[str, ...] = ("weight",)) -> Inject:
    """Return the fault that exchanges the parameters of two modules of the layer."""

    def inject(run: Run) -> None:
        first, second = (run.block.get_submodule(path) for path in (one, other))
        for name in names:
            x, y = getattr(first, name), getattr(second, name)
            x.data, y.data = y.data.clone(), x.data.clone()

    return inject


def halves_swapped(axis: int) -> Change:
    """Return the change that puts the shards of two tensor-parallel ranks in the wrong order."""
    return lambda weight: torch.cat(weight.chunk(2, axis)[::-1], axis)


def half_zero(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight of which the second rank's shard was never loaded."""
    weight[len(weight) // 2 :] = 0
    return weight


def through(dtype: torch.dtype) -> Change:
    """Return the change that passes a weight through a coarser dtype, with one scale for all of it."""

    def change(weight: torch.Tensor) -> torch.Tensor:
        if dtype == torch.float8_e4m3fn:
            scale = weight.abs().max().float() / 448
            return (weight.float() / scale).to(dtype).float() * scale
        return weight.to(dtype).to(weight.dtype)

    return change


def block_through_bf16(run: Run) -> None:
    """Pass every parameter of the layer through bfloat16."""
    for parameter in run.block.parameters():
        parameter.data = parameter.data.bfloat16().to(parameter.dtype)


def rows_scaled(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight with one row 5 % too large."""
    weight[5] *= 1.05
    return weight


def experts_swapped(run: Run) -> None:
    """Exchange the weights of experts 1 and 2, as a wrong expert map does."""
    order = [0, 2, 1, *range(3, run.model.config.num_experts)]
    for name in ("gate_up_proj", "down_proj"):
        parameter = getattr(run.block.mlp.experts, name)
        parameter.data = parameter.data[order].clone()


def untied_head(run: Run) -> None:
    """Give the head a copy of the embedding of an earlier step."""
    run.model.lm_head.weight = torch.nn.Parameter(
        drift(run.model.model.embed_tokens.weight.data).to(run.model.lm_head.weight.dtype)
    )
