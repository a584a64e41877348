"""vLLM's experts: the ids and weights that its router picks, and the routed output apart from the shared expert's.

Both exist only between the calls of one module, the fused experts, so that its methods are tapped. Attributes tell the
module, never its class: ``MoERunner`` in 0.32, ``FusedMoE`` before, ``AscendFusedMoE`` in vllm-ascend.
"""

from __future__ import annotations

from typing import Any

import torch

from probe.store.schema import PARTIAL

PICKS = "weights ids"
"""The slots of what ``select_experts`` returns: the weights [T, k] and the ids [T, k] of each token's experts."""
ROUTED = "routed"
"""The slot of the routed experts' sum [T, hidden], before the shared expert's output is added."""


def taps(module: torch.nn.Module) -> dict[str, str]:
    """Return the methods of a module of fused experts to record, and their slots; nothing for any other module.

    Kernels that pick the experts themselves (``is_monolithic``) never call the router. With expert load balancing
    (EPLB) the router returns numbers of physical replicas instead of experts, which no other engine knows. In both
    cases a comparison derives the ids from the logits.
    """
    found, router = {}, getattr(module, "router", None)
    balanced = getattr(router, "eplb_state", None) is not None
    if hasattr(router, "select_experts") and not getattr(module, "is_monolithic", False) and not balanced:
        found["router.select_experts"] = PICKS
    if getattr(module, "_shared_experts", None) is not None and hasattr(module, "apply_routed_output_transform"):
        found["apply_routed_output_transform"] = ROUTED
    return found


def shard_of(module: Any, slot: str) -> str | None:
    """Return how a tapped tensor lies over the tensor-parallel ranks, None where it lies as the module's output does.

    Each rank sums its own part of the experts; the sum over the ranks comes after the shared expert is added.
    """
    if slot != ROUTED or getattr(module, "_fused_output_is_reduced", False):
        return None
    return PARTIAL
