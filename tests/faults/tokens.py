"""Faults of what surrounds the model: log-probs, sampling semantics, token ids, padding, positions, caches."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

from faults.base import Inject, LogProbs, Run
from faults.models import TOP_K_TOKENS, TOP_P
from faults.weights import stale_model
from probe.hooks.runners.inprocess import token_logprobs

TEMPERATURE = 0.7
Tensor = torch.Tensor


def with_logprobs(logprobs: LogProbs, **said: Any) -> Inject:
    """Return the fault of an engine that computes its log-probs so; ``said`` goes into the manifest."""

    def inject(run: Run) -> None:
        run.logprobs = logprobs
        run.said |= said

    return inject


def tempered(logits: Tensor, tokens: list[int]) -> np.ndarray:
    """Return log-probs of the logits over the temperature."""
    return token_logprobs(logits.float() / TEMPERATURE, tokens)


def kept(logits: Tensor, tokens: list[int], mass: float = TOP_P, count: int = 0) -> np.ndarray:
    """Return log-probs renormalised over the smallest set of tokens with ``mass`` (or over the ``count`` best).

    The texts were sampled from such a set (models.make_texts).
    """
    logits = logits.float().clone()
    order = logits.sort(-1, descending=True)
    probabilities = order.values.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    outside = before >= mass if not count else (torch.arange(logits.shape[-1]) >= count).expand(logits.shape)
    mask = torch.zeros_like(outside).scatter(-1, order.indices, outside)
    targets = torch.tensor([*tokens[1:], 0][: len(logits)])
    mask.scatter_(-1, targets[:, None], False)  # in bf16 a token at the edge of the set may fall outside
    return token_logprobs(logits.masked_fill(mask, -torch.inf), tokens)


def top_k(logits: Tensor, tokens: list[int]) -> np.ndarray:
    """Return log-probs renormalised over the likeliest tokens."""
    return kept(logits, tokens, count=TOP_K_TOKENS)


def shifted(logits: Tensor, tokens: list[int]) -> np.ndarray:
    """Return each token's log-prob at the place of the one before it."""
    right = token_logprobs(logits, tokens)
    return np.append(right[1:], np.nan)


def zeroed(share: float) -> LogProbs:
    """Return log-probs of which the last ``share`` of each sequence is zero: a buffer that was never filled."""

    def logprobs(logits: Tensor, tokens: list[int]) -> np.ndarray:
        right = token_logprobs(logits, tokens)
        right[int(len(tokens) * (1 - share)) :] = 0.0
        return right

    return logprobs


def of_other_pass(logits: Tensor, tokens: list[int]) -> np.ndarray:
    """Return log-probs of a pass that rounded the logits to 6 bits: not those of the logits that the model gave."""
    scale = logits.abs().max() / 20
    return token_logprobs((logits.float() / scale).round() * scale, tokens)


def retokenised(run: Run) -> None:
    """Change a token of one prompt, as a chat template applied twice does."""
    run.sequences[1].tokens[4] = (run.sequences[1].tokens[4] + 1) % run.config["vocab_size"]


def retokenised_response(run: Run) -> None:
    """Change a token in the middle of one response: text was decoded and encoded again."""
    run.sequences[0].tokens[60] = (run.sequences[0].tokens[60] + 1) % run.config["vocab_size"]


def positions_from_one(run: Run) -> None:
    """Feed position ids that start at 1."""
    forward = run.model.forward

    def moved(input_ids: Tensor, **more: Any) -> Any:
        count = input_ids.shape[1]
        return forward(input_ids=input_ids, position_ids=torch.arange(1, count + 1)[None], **more)

    run.model.forward = moved


def padding_seen(run: Run) -> None:
    """Let the layer's attention see the padding on the left of a sequence: its mask is the causal one alone."""
    run.eager()
    attention = run.block.self_attn
    forward = attention.forward

    def leaking(*args: Any, attention_mask: Tensor, **more: Any) -> Any:
        length = attention_mask.shape[-1]
        hidden = torch.full((1, 1, length, length), float(torch.finfo(attention_mask.dtype).min)).triu(1)
        return forward(*args, attention_mask=hidden.to(attention_mask.dtype), **more)

    attention.forward = leaking


def stale_prefix(run: Run) -> None:
    """Let the weights of an earlier step make the cached prefix: the cache was kept through a weight update."""
    old = Run(copy.deepcopy(run.model), run.family, run.dtype, run.path, run.config, [])
    stale_model(old)
    run.cache_model = old.model
