"""Megatron's experts: what their router and their block compute between the calls of modules."""

from __future__ import annotations

import inspect
from typing import Any

import torch

ROUTER = ".mlp.router"
LOGITS = "logits.0"
"""The slot of the router's logits [s, b, experts], from its method ``gating``."""
COMBINED = "combined.0"
"""The slot of the routed experts' sum [s * b, hidden], back in token order, before the shared expert is added."""
REPLAYED = "routing_replayed"
"""The fact of a router that took its ids from a recording instead of its logits."""
_REPLAYING = ("replay_forward", "replay_backward")


def taps(path: str, module: torch.nn.Module) -> dict[str, str]:
    """Return the methods of a router or a block of experts to record, and their slots; nothing for any other module.

    The router itself returns dense probabilities and the map of the experts used, both [s * b, experts].
    """
    if path.endswith(ROUTER) and hasattr(module, "gating"):
        return {"gating": LOGITS}
    combine = getattr(module, "combine", None)
    if hasattr(module, "token_dispatcher") and combine is not None and len(inspect.signature(combine).parameters) == 1:
        return {"combine": COMBINED}  # with two parameters it adds the shared expert itself (before 0.15)
    return {}


def replays(router: Any) -> bool:
    """Tell whether a router replays recorded ids now (Megatron's RouterReplay, and verl's R2 and R3 built on it)."""
    action = getattr(getattr(router, "router_replay", None), "router_replay_action", None)
    return str(getattr(action, "value", action)).lower() in _REPLAYING
