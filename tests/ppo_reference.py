"""A straight torch implementation of MiniMind's PPO update block, for the tests: formulas in order, autograd for the
gradient. Padding is cleared before anything is computed, as a NaN there would outlive any multiplication by 0."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from probe.compare.ppo import PPOConfig


def reference_update(arrays: dict[str, np.ndarray], config: PPOConfig, aux_loss: float) -> dict[str, Any]:
    """Return the block's quantities as floats, and the gradients by the new log-prob and the new value as arrays."""
    mask = torch.from_numpy(arrays["mask"])
    kept = {name: torch.from_numpy(np.where(arrays["mask"], x, 0.0)) for name, x in arrays.items() if name != "mask"}
    new, value = kept["new"].requires_grad_(), kept["values"].requires_grad_()
    advantages, epsilon, reach = kept["advantages"], config.clip_epsilon, config.cliprange_value

    def mean(x: torch.Tensor) -> torch.Tensor:
        return (x * mask).sum() / mask.sum().clamp(min=1)

    log_ratio = new - kept["old"]
    ratio = torch.exp(log_ratio)
    approx_kl = mean(0.5 * log_ratio**2)
    clipfrac = mean(((ratio - 1.0).abs() > epsilon).double())
    gap = kept["reference"] - new
    kl_ref_penalty = mean(torch.exp(gap) - gap - 1.0)
    bounded = torch.clamp(ratio, 1.0 - epsilon, 1.0 + epsilon)
    policy_loss = mean(torch.max(-advantages * ratio, -advantages * bounded)) + config.kl_coef * kl_ref_penalty
    near = torch.clamp(value, kept["old_values"] - reach, kept["old_values"] + reach)
    errors = (value - kept["returns"]) ** 2, (near - kept["returns"]) ** 2
    value_loss = 0.5 * mean(torch.max(*errors))
    stop = bool(approx_kl > config.early_stop_kl)
    whole = policy_loss + config.vf_coef * value_loss + aux_loss
    loss = whole * 0.0 if stop else whole / config.accumulation_steps
    loss.backward()
    assert new.grad is not None and value.grad is not None
    named = {"approx_kl": approx_kl, "clipfrac": clipfrac, "kl_ref_penalty": kl_ref_penalty, "loss": loss}
    named |= {"policy_loss": policy_loss, "value_loss": value_loss}
    scalars = {name: x.item() for name, x in named.items()}
    return scalars | {"early_stop": stop, "gradient": new.grad.numpy(), "value_gradient": value.grad.numpy()}
