"""Make vLLM decode given tokens: rescoring through decode steps, the way a rollout really ran."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality


class ForcedTokens(LogitsProcessor):
    """Leave each request only the next of its ``forced_tokens`` (given in ``SamplingParams.extra_args``).

    Raw log-probs are taken before logits processors run, so they stay those of the model.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.requests: dict[int, tuple[list[int], list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        """Return False: the argmax becomes the forced token."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Follow requests as they enter, leave and move within the batch."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.requests.pop(index, None)
        for index, params, _, output_ids in batch_update.added:
            self.requests.pop(index, None)
            forced = (params.extra_args or {}).get("forced_tokens")
            if forced:
                self.requests[index] = (forced, output_ids)
        for source, target, direction in batch_update.moved:
            moved, displaced = self.requests.pop(source, None), self.requests.pop(target, None)
            if moved is not None:
                self.requests[target] = moved
            if displaced is not None and direction == MoveDirectionality.SWAP:
                self.requests[source] = displaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Set every other token's logit to minus infinity."""
        for index, (forced, output_ids) in self.requests.items():
            step = len(output_ids)
            if step < len(forced):
                kept = logits[index, forced[step]].clone()
                logits[index] = float("-inf")
                logits[index, forced[step]] = kept
        return logits
