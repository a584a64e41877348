"""Faults of the other modules while they run: their parameters are right, what they compute is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import gelu, linear, silu

from faults.base import Inject, Run, patch

Tensor = torch.Tensor
OutputChange = Callable[..., Tensor]


def output(path: str, change: OutputChange) -> Inject:
    """Return the fault that changes the output of a module of the layer: ``change(output, input, module)``."""

    def inject(run: Run) -> None:
        module = run.block.get_submodule(path)
        patch(module, lambda result, *inputs: change(result, inputs[0], module))

    return inject


def model_output(path: str, change: OutputChange) -> Inject:
    """Return the fault that changes the output of a module outside the layers."""

    def inject(run: Run) -> None:
        module = run.model.get_submodule(path)
        patch(module, lambda result, *inputs: change(result, inputs[0], module))

    return inject


def attribute(path: str, name: str, change: Callable[[Any], Any]) -> Inject:
    """Return the fault that sets an attribute of a module of the layer, which a dump records."""

    def inject(run: Run) -> None:
        module = run.block.get_submodule(path)
        setattr(module, name, change(getattr(module, name)))

    return inject


def scaled(factor: float) -> OutputChange:
    """Multiply the output."""
    return lambda result, x, module: result * factor


# -- linear layers ----------------------------------------------------------------------------------------------------


def first_shard_only(result: Tensor, x: Tensor, module: Any) -> Tensor:
    """Return what the first of two tensor-parallel ranks has before the all-reduce."""
    half = module.in_features // 2
    return linear(x[..., :half], module.weight[:, :half])


def bf16_partial_sums(result: Tensor, x: Tensor, module: Any) -> Tensor:
    """Sum over 16 inputs at a time and round each running sum to bf16."""
    total = torch.zeros_like(result, dtype=torch.bfloat16)
    for start in range(0, module.in_features, 16):
        part = slice(start, start + 16)
        total = total + linear(x[..., part].float(), module.weight[:, part].float()).bfloat16()
    return total.to(result.dtype)


def fp8_weight(result: Tensor, x: Tensor, module: Any) -> Tensor:
    """Multiply with the weight in fp8, as a kernel does that quantises on its own."""
    scale = module.weight.abs().max().float() / 448
    weight = ((module.weight.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)
    return linear(x, weight, module.bias)


def bf16_inputs(result: Tensor, x: Tensor, module: Any) -> Tensor:
    """Multiply in bf16 and return what the output's dtype makes of it."""
    bias = None if module.bias is None else module.bias.bfloat16()
    return linear(x.bfloat16(), module.weight.bfloat16(), bias).to(result.dtype)


def twice_biased(result: Tensor, x: Tensor, module: Any) -> Tensor:
    """Add the bias once more: a fused kernel and its caller both do."""
    return result + module.bias


def without_bias(result: Tensor, x: Tensor, module: Any) -> Tensor:
    """Leave the bias out."""
    return linear(x, module.weight)


def dead_columns(result: Tensor, x: Tensor, module: Any) -> Tensor:
    """Set two of the output's features to zero."""
    result[..., [7, 300 % result.shape[-1]]] = 0
    return result


def random_row(result: Tensor, x: Tensor, module: Any) -> Tensor:
    """Fill one row with noise of the output's own size."""
    row = result[0, 11]
    noise = torch.randn(row.shape, generator=torch.Generator().manual_seed(5))
    result[0, 11] = (noise * row.float().square().mean().sqrt()).to(row.dtype)
    return result


def at_one_place(value: float) -> OutputChange:
    """Set one feature of one row."""

    def change(result: Tensor, x: Tensor, module: Any) -> Tensor:
        result[0, 10, 3] = value
        return result

    return change


def lone_sequences(result: Tensor, x: Tensor, module: Any) -> Tensor:
    """Take another kernel for the last micro-batch (the one whose longest sequence is short), 1 % off."""
    return result * 1.01 if x.shape[1] < 40 else result


# -- norms, activation, residual, embedding, head ---------------------------------------------------------------------


def norm_with_eps(eps: float) -> OutputChange:
    """Normalise with an eps that the kernel has built in."""

    def change(result: Tensor, x: Tensor, module: Any) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return module.weight * normed.to(x.dtype)

    return change


def bf16_norm(result: Tensor, x: Tensor, module: Any) -> Tensor:
    """Normalise in bf16 throughout: squares, mean, root and products."""
    low = x.bfloat16()
    mean = low.square().mean(-1, keepdim=True)
    return (module.weight.bfloat16() * (low * torch.rsqrt(mean + module.variance_epsilon))).to(result.dtype)


def offset_norm(result: Tensor, x: Tensor, module: Any) -> Tensor:
    """Multiply with weight + 1, as Gemma's kernel does."""
    return result / module.weight * (module.weight + 1)


def activation(change: Callable[[Tensor], Tensor]) -> Inject:
    """Return the fault that takes another activation function in the layer's MLP."""

    def inject(run: Run) -> None:
        patch(run.block.mlp.act_fn, lambda result, x: change(x))

    return inject


def gelu_tanh(x: Tensor) -> Tensor:
    """Return the approximate gelu."""
    return gelu(x, approximate="tanh")


def quick_silu(x: Tensor) -> Tensor:
    """Return silu from a hard sigmoid."""
    return torch.nn.functional.hardswish(x)


ACTIVATIONS = {"gelu": gelu, "gelu_tanh": gelu_tanh, "silu": silu, "hardswish": quick_silu}


def residual(attention: float, mlp: float) -> Inject:
    """Return the fault that adds these multiples of the residual stream after attention and after the MLP."""

    def inject(run: Run) -> None:
        block = run.block

        def forward(hidden_states: Tensor, **more: Any) -> Tensor:
            x = block.self_attn(hidden_states=block.input_layernorm(hidden_states), **more)[0]
            middle = attention * hidden_states + x
            return mlp * middle + block.mlp(block.post_attention_layernorm(middle))

        block.forward = forward

    return inject


def embedding_offset(run: Run) -> None:
    """Look up the row after the token's: a vocabulary-parallel rank whose range starts one too early."""
    embedding = run.model.model.embed_tokens
    embedding.forward = lambda ids: torch.nn.functional.embedding((ids + 1) % len(embedding.weight), embedding.weight)


def embedding_shard_missing(run: Run) -> None:
    """Give zeros for tokens of the second rank's half of the vocabulary: their all-reduce is missing."""
    embedding = run.model.model.embed_tokens
    half = len(embedding.weight) // 2
    patch(embedding, lambda result, ids: result * (ids < half)[..., None])


def head_offset(run: Run) -> None:
    """Return logits one column late: the head's shards are gathered in an order that is off by one."""
    patch(run.model.lm_head, lambda result, x: result.roll(1, -1))


def without_final_cap(run: Run) -> None:
    """Do not cap the logits (in the code: the config says that they are)."""
    forward = run.model.forward
    config = run.model.config

    def uncapped(*args: Any, **kwargs: Any) -> Any:
        cap, config.final_logit_softcapping = config.final_logit_softcapping, None
        try:
            return forward(*args, **kwargs)
        finally:
            config.final_logit_softcapping = cap

    run.model.forward = uncapped


def autocast(run: Run) -> None:
    """Run every linear layer of the model in bf16, as under autocast: the manifest says float32."""
    for module in run.model.modules():
        if isinstance(module, torch.nn.Linear):
            patch(module, lambda result, x, module=module: bf16_inputs(result, x, module))
