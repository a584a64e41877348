"""Faults inside the attention: a plain implementation of it with one step replaced."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from faults.base import Inject, Run

Tensor = torch.Tensor


@dataclass(frozen=True)
class Call:
    """One call of an attention.

    ``cos``, ``sin``: the angles of rope [batch, position, head_dim]; ``positions`` [batch, position]; ``past``: how
    many keys come before those of this call.
    """

    module: Any
    cos: Tensor
    sin: Tensor
    positions: Tensor
    past: int = 0


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return heads [batch, heads, position, dim] rotated, the two halves of a head being the pairs (NeoX)."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * cos[:, None] + turned * sin[:, None]


def plain_rope(call: Call, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys as the model should."""
    return rotate(q, call.cos, call.sin), rotate(k, call.cos, call.sin)


def plain_softmax(scores: Tensor, values: Tensor) -> Tensor:
    """Return the probabilities, computed in float32."""
    return torch.softmax(scores, -1, dtype=torch.float32).to(values.dtype)


def same_mask(call: Call, mask: Tensor) -> Tensor:
    """Return the mask as it is."""
    return mask


def same_cache(call: Call, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values as they are."""
    return k, v


@dataclass(frozen=True)
class Steps:
    """The steps of an attention; a fault replaces one.

    ``scale`` multiplies the scores; ``cap``: whether they are capped where the model does; ``context`` edits the
    result.
    """

    rope: Callable[[Call, Tensor, Tensor], tuple[Tensor, Tensor]] = plain_rope
    mask: Callable[[Call, Tensor], Tensor] = same_mask
    softmax: Callable[[Tensor, Tensor], Tensor] = plain_softmax
    cache: Callable[[Call, Tensor, Tensor], tuple[Tensor, Tensor]] = same_cache
    scale: float = 1.0
    cap: bool = True
    context: Callable[[Call, Tensor], Tensor] | None = None


def with_steps(**steps: Any) -> Inject:
    """Return the fault that runs the layer's attention with some steps replaced."""
    return lambda run: install(run, run.block.self_attn, Steps(**steps))


def install(run: Run, module: Any, steps: Steps) -> None:
    """Let an attention module run :class:`Steps`; its projections and norms run, and are hooked, as ever."""
    run.eager()

    def forward(
        hidden_states: Tensor,
        position_embeddings: Any,
        attention_mask: Any = None,
        past_key_values: Any = None,
        **more: Any,
    ) -> tuple[Tensor, None]:
        batch, length = hidden_states.shape[:2]
        heads = (batch, length, -1, module.head_dim)
        q, k, v = (getattr(module, f"{name}_proj")(hidden_states).view(heads) for name in "qkv")
        if hasattr(module, "q_norm"):
            q, k = module.q_norm(q), module.k_norm(k)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        past = past_key_values.get_seq_length(module.layer_idx) if past_key_values is not None else 0
        positions = more.get("position_ids")
        positions = torch.arange(past, past + length)[None] if positions is None else positions
        call = Call(module, *position_embeddings, positions, past)
        q, k = steps.rope(call, q, k)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, module.layer_idx)
        k, v = steps.cache(call, k, v)
        context = _attend(steps, call, q, k, v, attention_mask)
        if steps.context is not None:
            context = steps.context(call, context)
        return module.o_proj(context), None

    module.forward = forward


def _attend(steps: Steps, call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(2, 3) * call.module.scaling * steps.scale
    cap = getattr(call.module, "attn_logit_softcapping", None)
    if cap is not None and steps.cap:
        scores = torch.tanh(scores / cap) * cap
    if mask is None:
        mask = torch.zeros_like(scores[:1, :1])
    context = steps.softmax(scores + steps.mask(call, mask)[..., : k.shape[2]], v) @ v
    return context.transpose(1, 2).flatten(2)


# -- rope -------------------------------------------------------------------------------------------------------------


def _angles(call: Call, positions: Tensor, base: float | None = None) -> tuple[Tensor, Tensor]:
    dim = call.module.head_dim
    base = base or float(call.module.config.rope_parameters["rope_theta"])
    angles = positions[..., None].float() / base ** (torch.arange(0, dim, 2).float() / dim)
    angles = torch.cat([angles, angles], -1)
    return angles.cos().to(call.cos.dtype), angles.sin().to(call.cos.dtype)


def rope_base(factor: float) -> Callable[[Call, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the rope whose base is ``factor`` times the configured one."""

    def rope(call: Call, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        base = factor * float(call.module.config.rope_parameters["rope_theta"])
        return plain_rope(replace(call, **dict(zip(("cos", "sin"), _angles(call, call.positions, base)))), q, k)

    return rope


def rope_positions(change: Callable[[Tensor], Tensor], of: str = "qk") -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the rope that takes other positions for the queries, the keys or both (``of``)."""

    def rope(call: Call, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        right, moved = (call.cos, call.sin), _angles(call, change(call.positions.float()))
        return rotate(q, *(moved if "q" in of else right)), rotate(k, *(moved if "k" in of else right))

    return rope


def rope_pairing(call: Call, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate neighbouring features (GPT-J) where the model pairs the halves of a head (NeoX)."""
    half = q.shape[-1] // 2

    def rotated(x: Tensor) -> Tensor:
        halves = x.unflatten(-1, (half, 2)).transpose(-1, -2).flatten(-2)
        turned = rotate(halves, call.cos, call.sin)
        return turned.unflatten(-1, (2, half)).transpose(-1, -2).flatten(-2)

    return rotated(q), rotated(k)


# -- masks ------------------------------------------------------------------------------------------------------------


def _hidden(mask: Tensor) -> float:
    return float(torch.finfo(mask.dtype).min)


def sees_next(call: Call, mask: Tensor) -> Tensor:
    """Let every token see the one after it (not into padding, which only follows)."""
    shifted = torch.cat([mask[..., 1:, :], mask[..., -1:, :]], -2)
    return torch.maximum(mask, shifted)


def sees_all(call: Call, mask: Tensor) -> Tensor:
    """Let every token see all tokens of its sequence: no causal mask (padding follows the tokens and stays hidden)."""
    return mask[..., -1:, :].expand_as(mask)


def sees_not_itself(call: Call, mask: Tensor) -> Tensor:
    """Hide each token from itself, except the first."""
    length = mask.shape[-1]
    diagonal = torch.eye(length, dtype=torch.bool)[-mask.shape[-2] :]
    diagonal[0, 0] = diagonal[0, 0] and mask.shape[-2] != length
    return mask.masked_fill(diagonal, _hidden(mask))


def window(width: int | None) -> Callable[[Call, Tensor], Tensor]:
    """Return the mask of another sliding window; None: of none. Right padding stays hidden by causality."""

    def change(call: Call, mask: Tensor) -> Tensor:
        keys = torch.arange(mask.shape[-1])
        queries = torch.arange(mask.shape[-1])[-mask.shape[-2] :, None]
        seen = keys <= queries
        if width is not None:
            seen = seen & (keys > queries - width)
        return torch.zeros_like(mask).masked_fill(~seen, _hidden(mask))

    return change


# -- values and results -----------------------------------------------------------------------------------------------


def bf16_softmax(scores: Tensor, values: Tensor) -> Tensor:
    """Return the probabilities, computed from bf16 scores into bf16 ones."""
    return torch.softmax(scores.bfloat16(), -1).to(values.dtype)


def fp8_cache(call: Call, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Read keys and values back from a cache that holds them in fp8 (e4m3, without scales)."""
    return tuple(x.to(torch.float8_e4m3fn).to(x.dtype) for x in (k, v))  # type: ignore[return-value]


def dropped(probability: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the softmax with dropout on its probabilities, as in training mode."""
    return lambda scores, values: torch.nn.functional.dropout(plain_softmax(scores, values), probability)


def where_rows(rows: Callable[[Call], Tensor], factor: float) -> Callable[[Call, Tensor], Tensor]:
    """Return the edit that multiplies the context [batch, position, features] of some rows."""

    def edit(call: Call, context: Tensor) -> Tensor:
        chosen = rows(call).expand(context.shape[:2])[..., None]
        return torch.where(chosen, context * factor, context)

    return edit


def decoded(call: Call) -> Tensor:
    """Tell which rows are of a decode step: one new token over a cache."""
    return torch.full(call.positions.shape, call.past > 0 and call.positions.shape[-1] == 1)


def from_position(start: int) -> Callable[[Call], Tensor]:
    """Return which rows are at a position of at least ``start``."""
    return lambda call: call.positions >= start


def scrambled_from(start: int) -> Callable[[Call, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the rope whose table ends at ``start``: later positions take the angles of the last entry."""
    return rope_positions(lambda positions: positions.clamp(max=start - 1))


def all_layers(steps: Steps) -> Inject:
    """Return the fault that runs every layer's attention with the steps."""

    def inject(run: Run) -> None:
        for block in run.model.model.layers:
            install(run, block.self_attn, steps)

    return inject


def scaling_attribute(factor: float) -> Inject:
    """Return the fault that sets the module's own scale, which a dump records."""

    def inject(run: Run) -> None:
        run.eager()
        run.block.self_attn.scaling *= factor

    return inject


def without_scale(run: Run) -> None:
    """Leave the scores undivided by sqrt(head_dim)."""
    install(run, run.block.self_attn, Steps(scale=math.sqrt(run.block.self_attn.head_dim)))
