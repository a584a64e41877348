"""Faults of a mixture of experts (Qwen2-MoE of transformers 5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear, sigmoid

from faults.base import Inject, Run

Tensor = torch.Tensor


def routed(run: Run, logits_of: Callable[[Tensor, Any], Tensor], **how: Any) -> None:
    """Let the layer's router compute other logits, or choose and weight otherwise.

    ``how``: ``choice`` (logits the experts are chosen by), ``normalise`` (default: the module's), ``scale``.
    """
    gate = run.block.mlp.gate
    normalise = how.get("normalise", gate.norm_topk_prob)

    def forward(hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = hidden_states.reshape(-1, gate.hidden_dim)
        logits = logits_of(x, gate)
        scores = logits.float().softmax(-1)
        chosen = how["choice"](scores) if "choice" in how else scores.topk(gate.top_k, -1).indices
        weights = scores.gather(-1, chosen)
        if normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, (weights * how.get("scale", 1.0)).to(logits.dtype), chosen

    gate.forward = forward


def plain_logits(x: Tensor, gate: Any) -> Tensor:
    """Return the router's logits as they should be."""
    return linear(x, gate.weight)


def with_router(logits_of: Callable[[Tensor, Any], Tensor] = plain_logits, **how: Any) -> Inject:
    """Return the fault of :func:`routed`."""
    return lambda run: routed(run, logits_of, **how)


def biased_logits(x: Tensor, gate: Any) -> Tensor:
    """Add a bias that the model does not have (one for balancing the load, left from training)."""
    bias = torch.linspace(-0.3, 0.3, gate.num_experts).to(x.dtype)
    return linear(x, gate.weight) + bias


def scaled_logits(x: Tensor, gate: Any) -> Tensor:
    """Multiply the logits by 1.2: a temperature of the router."""
    return linear(x, gate.weight) * 1.2


def bf16_logits(x: Tensor, gate: Any) -> Tensor:
    """Compute the logits in bf16."""
    return linear(x.bfloat16(), gate.weight.bfloat16()).to(x.dtype)


def runner_up(scores: Tensor) -> Tensor:
    """Choose the third expert instead of the second for every fifth token, whatever the margin."""
    order = scores.topk(3, -1).indices
    swapped = torch.arange(len(scores)) % 5 == 0
    return torch.stack([order[:, 0], torch.where(swapped, order[:, 2], order[:, 1])], -1)


def ties_swapped(scores: Tensor) -> Tensor:
    """Choose the third expert where it ties with the second: topk may take either."""
    order = scores.topk(3, -1)
    ids = order.indices
    tied = torch.isclose(order.values[:, 1], order.values[:, 2], rtol=1e-6)
    return torch.stack([ids[:, 0], torch.where(tied, ids[:, 2], ids[:, 1])], -1)


def block_with(**changes: Any) -> Inject:
    """Return the fault of a block that leaves the shared expert out, or its gate: ``shared`` and ``gated`` factors."""

    def inject(run: Run) -> None:
        block = run.block.mlp

        def forward(hidden_states: Tensor) -> Tensor:
            x = hidden_states.reshape(-1, hidden_states.shape[-1])
            shared = block.shared_expert(x)
            gate = block.shared_expert_gate(x)
            _, weights, ids = block.gate(x)
            result = block.experts(x, ids, weights)
            if changes.get("shared", True):
                result = result + (sigmoid(gate) * shared if changes.get("gated", True) else shared)
            return result.reshape(hidden_states.shape)

        block.forward = forward

    return inject


def expert_scaled(run: Run) -> None:
    """Multiply what expert 1 adds by 1.1: its weight in a fused kernel is another."""
    experts = run.block.mlp.experts
    forward = experts.forward

    def faulty(hidden_states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return forward(hidden_states, ids, torch.where(ids == 1, weights * 1.1, weights))

    experts.forward = faulty


def permuted_ids(run: Run) -> None:
    """Send the tokens of experts 1 and 2 to each other: the dispatch map is wrong, weights and router are right."""
    experts = run.block.mlp.experts
    forward = experts.forward

    def faulty(hidden_states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return forward(hidden_states, torch.where(ids == 1, 2, torch.where(ids == 2, 1, ids)), weights)

    experts.forward = faulty
