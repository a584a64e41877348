"""Small models whose attention is captured, and faults to put into one of their layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
import transformers.models.qwen2.modeling_qwen2 as qwen2
from replay_tools import ATTENTION_MODULES, Captured, in_dtype, run_model

from probe.compare.replay import attention
from probe.compare.replay.base import Context
from probe.compare.replay.explain import Reading, bands_of, explain, read_best

LAYERS, LENGTH, FAULTY = 3, 80, 1
RECIPE = attention.RECIPES[0]
DTYPES = ("float32", "bfloat16")
turn = qwen2.apply_rotary_pos_emb


@cache
def model(family: str = "Qwen2", **config: Any) -> Any:
    """Return a small random model whose attention is neither flat nor saturated."""
    sizes = {"vocab_size": 200, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": LAYERS}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096}
    settings = {key: dict(value) if isinstance(value, tuple) else value for key, value in config.items()}
    name = "Gemma3Text" if family == "Gemma3" else family
    made = getattr(transformers, f"{name}Config")(**{**sizes, **settings})
    built = getattr(transformers, f"{family}ForCausalLM")(made).float().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in built.named_parameters():
            if "norm" in key:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                spread = 1.0 if "embed" in key else 0.3 if key.endswith("bias") else parameter.shape[-1] ** -0.5
                parameter.normal_(0, spread, generator=generator)
    return built


def run(
    built: Any, dtype: str, *, length: int = LENGTH, kernel: str = "eager", batch: int = 1, copied: bool = True
) -> Captured:
    """Run a model, or its copy in a dtype, on random tokens and capture what attention reads and gives."""
    other = in_dtype(built, dtype) if copied else built
    other.set_attn_implementation(kernel)  # type: ignore[operator]
    ids = torch.randint(0, 200, (batch, length), generator=torch.Generator().manual_seed(1))
    found = run_model(other, ids, ATTENTION_MODULES)
    weights = {name.removeprefix("model."): values for name, values in other.named_parameters()}
    found.parameters = {name: values.detach().float().numpy() for name, values in weights.items() if "kv_b" in name}
    return found


def replay(found: Captured, layer: int, rows: int = 48) -> tuple[Context, Reading]:
    """Replay one layer's attention at a spread of rows."""
    keys = np.array([divmod(i, found.length) for i in np.linspace(0, found.count() - 1, rows).astype(int)], np.int64)
    context = found.context(RECIPE, layer, keys)
    reading = read_best(RECIPE, context)
    assert reading is not None
    return context, reading


def excesses(found: Captured) -> list[float]:
    """Return by how many times each layer's attention reaches its bands."""
    return [replay(found, layer)[1].figures.excess(bands_of(RECIPE, found.computed_in)) for layer in range(LAYERS)]


def named(found: Captured, layer: int = FAULTY) -> tuple[str, str]:
    """Return the cause and the words of the best explanation of a layer."""
    context, reading = replay(found, layer)
    first = next(iter(explain(RECIPE, context, reading)), None)
    return (first.cause, first.text) if first else ("", "")


# -- faults -----------------------------------------------------------------------------------------------------------

Wrap = Callable[[Any], Callable[[], None]]
"""Make a layer's attention module faulty; the function returned undoes it."""


def rotates(function: Callable[..., Any]) -> Wrap:
    """Return a fault by which one layer rotates q and k by ``function``(q, k, cos, sin)."""

    def wrap(module: Any) -> Callable[[], None]:
        forward = module.forward

        def faulty(*args: Any, **kwargs: Any) -> Any:
            qwen2.apply_rotary_pos_emb = lambda q, k, cos, sin, *_a, **_k: function(q, k, cos, sin)
            try:
                return forward(*args, **kwargs)
            finally:
                qwen2.apply_rotary_pos_emb = turn

        module.forward = faulty
        return lambda: setattr(module, "forward", forward)

    return wrap


def masks(change: Callable[[Any, int], Any]) -> Wrap:
    """Return a fault by which one layer has another mask: ``change``(mask of True where hidden, length)."""

    def wrap(module: Any) -> Callable[[], None]:
        forward = module.forward

        def faulty(hidden_states: Any, position_embeddings: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
            length = hidden_states.shape[1]
            hidden = change(torch.ones(length, length).triu(1).bool(), length)
            least = torch.finfo(hidden_states.dtype).min
            mask = torch.zeros(1, 1, length, length).masked_fill(hidden, least).to(hidden_states.dtype)
            return forward(hidden_states, position_embeddings=position_embeddings, attention_mask=mask, **kwargs)

        module.forward = faulty
        return lambda: setattr(module, "forward", forward)

    return wrap


def attends(change: Callable[..., tuple[Any, Any, Any, dict[str, Any]]]) -> Wrap:
    """Return a fault by which one layer attends with ``change``(module, q, k, v) -> q, k, v, other arguments."""

    def wrap(module: Any) -> Callable[[], None]:
        plain = qwen2.eager_attention_forward

        def faulty(self: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **kwargs: Any) -> Any:
            if self is module:
                q, k, v, others = change(self, q, k, v)
                scaling *= others.get("scale", 1.0)
                if "coarse" in others:
                    return in_bfloat16(self, q, k, v, mask, scaling)
                if "groups" in others:
                    self = SimpleNamespace(num_key_value_groups=others["groups"], training=False)
            return plain(self, q, k, v, mask, scaling=scaling, **kwargs)

        qwen2.eager_attention_forward = faulty
        return lambda: setattr(qwen2, "eager_attention_forward", plain)

    return wrap


def at_base(q: Any, k: Any, cos: Any, sin: Any, factor: float, offset: int = 0, frequencies: Any = None) -> Any:
    """Rotate with another base than the model's 10,000, at other positions, or with coarser frequencies."""
    size = cos.shape[-1]
    inverse = 1 / (1e4 * factor) ** (torch.arange(0, size, 2).float() / size)
    inverse = inverse.to(frequencies or torch.float32).float()
    angle = torch.outer(torch.arange(q.shape[-2]).float() + offset, inverse)
    both = torch.cat([angle, angle], -1)[None]
    return turn(q, k, both.cos().to(q.dtype), both.sin().to(q.dtype))


def interleaved(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    """Rotate neighbouring features."""

    def apart(x: Any) -> Any:
        return torch.cat([x[..., 0::2], x[..., 1::2]], -1)

    def together(x: Any) -> Any:
        return torch.stack(x.chunk(2, -1), -1).flatten(-2)

    return tuple(together(x) for x in turn(apart(q), apart(k), cos, sin))


def in_bfloat16(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float) -> Any:
    """Attend with scores and probabilities in bfloat16."""
    repeated = [qwen2.repeat_kv(x, module.num_key_value_groups).float() for x in (k, v)]
    scores = ((q.float() @ repeated[0].transpose(2, 3)).bfloat16() * scaling).bfloat16() + mask
    weights = scores.float().softmax(-1).bfloat16()
    return (weights.float() @ repeated[1]).transpose(1, 2).contiguous().to(q.dtype), weights


def tiled(x: Any) -> Any:
    """Give query head h the key head h mod 2."""
    return x.repeat(1, 2, 1, 1)


def fp8(x: Any) -> Any:
    """Pass through fp8."""
    return x.to(torch.float8_e4m3fn).to(x.dtype)


FAULTS: dict[str, tuple[str, Wrap]] = {
    "q one earlier": ("position-offset", rotates(lambda *qkcs: (at_base(*qkcs, 1, -1)[0], turn(*qkcs)[1]))),
    "k one later": ("position-offset", rotates(lambda *qkcs: (turn(*qkcs)[0], at_base(*qkcs, 1, 1)[1]))),
    "bf16 frequencies": ("rope-base", rotates(lambda *qkcs: at_base(*qkcs, 1, 0, torch.bfloat16))),
    "k not rotated": ("position-offset", rotates(lambda q, k, c, s: (turn(q, k, c, s)[0], k))),
    "base +5 %": ("rope-base", rotates(lambda q, k, c, s: at_base(q, k, c, s, 1.05))),
    "base x 100": ("rope-base", rotates(lambda q, k, c, s: at_base(q, k, c, s, 100.0))),
    "pairing": ("rope-pairing", rotates(interleaved)),
    "scale +2 %": ("attention-scale", attends(lambda m, q, k, v: (q, k, v, {"scale": 1.02}))),
    "scale 1/d": ("attention-scale", attends(lambda m, q, k, v: (q, k, v, {"scale": 0.25}))),
    "one future key": ("causal-mask", masks(lambda hidden, n: torch.ones(n, n).triu(2).bool())),
    "not itself": ("causal-mask", masks(lambda hidden, n: torch.ones(n, n).triu(0).bool())),
    "no mask": ("causal-mask", masks(lambda hidden, n: torch.zeros(n, n).bool())),
    "fp8 cache": ("kv-cache-dtype", attends(lambda m, q, k, v: (q, fp8(k), fp8(v), {}))),
    "kv heads reversed": ("permuted-qkv", attends(lambda m, q, k, v: (q, k.flip(1), v.flip(1), {}))),
    "kv heads tiled": ("permuted-qkv", attends(lambda m, q, k, v: (q, tiled(k), tiled(v), {"groups": 1}))),
    "softmax in bf16": ("softmax-precision", attends(lambda m, q, k, v: (q, k, v, {"coarse": True}))),
}  # fmt: skip


@contextmanager
def fault(built: Any, wrap: Wrap) -> Iterator[None]:
    """Make the middle layer faulty for a while."""
    undo = wrap(built.model.layers[FAULTY].self_attn)
    try:
        yield
    finally:
        undo()


def run_faulty(built: Any, dtype: str, wrap: Wrap, **kwargs: Any) -> Captured:
    """Run a model in a dtype with a faulty layer."""
    other = in_dtype(built, dtype)
    with fault(other, wrap):
        return run(other, dtype, copied=False, **kwargs)
