"""A synthetic model: a tiny numpy transformer that keeps every canonical tensor of its forward. No engine runs here.

The forward is Qwen2's (Qwen3's with ``qk_norm``) in float64 with every result rounded to the dump's dtype once, as by
kernels that accumulate in float32. ``noise`` stands for one engine's kernels: each result but a copy or one addition is
off by up to one float32 rounding first, and each kind of module rounds midway or does not (a norm before its weight, a
linear before its bias, rope's products, an activation before the product, attention's scores and probabilities).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from probe.metrics import MANTISSA_BITS
from probe.store.dtypes import round_to

Tensors = dict[str, np.ndarray]
Fault = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Tiny:
    """Sizes of the synthetic model, and the two things that Qwen2 and Qwen3 do differently."""

    layers: int = 3
    hidden: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    ffn: int = 48
    vocab: int = 50
    padded_vocab: int = 64
    qk_norm: bool = False
    eps: float = 1e-6
    rope_theta: float = 10000.0

    def config(self) -> dict[str, Any]:
        """Return the Hugging Face config of the model."""
        return {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.ffn,
            "vocab_size": self.vocab,
            "rms_norm_eps": self.eps,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": False,
        }


def make_weights(model: Tiny, seed: int = 0) -> Tensors:
    """Return random weights by canonical parameter name, exactly representable in bfloat16."""
    rng = np.random.default_rng(seed)
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    shapes = {"embed_tokens.weight": (model.vocab, model.hidden)}
    for i in range(model.layers):
        at = f"layers.{i}"
        shapes |= {f"{at}.input_layernorm.weight": (model.hidden,)}
        for name, size in (("q", q), ("k", kv), ("v", kv)):
            shapes |= {f"{at}.self_attn.{name}_proj.weight": (size, model.hidden)}
            shapes |= {f"{at}.self_attn.{name}_proj.bias": (size,)}
        if model.qk_norm:
            shapes |= {f"{at}.self_attn.{name}_norm.weight": (model.head_dim,) for name in "qk"}
        shapes |= {f"{at}.self_attn.o_proj.weight": (model.hidden, q)}
        shapes |= {f"{at}.post_attention_layernorm.weight": (model.hidden,)}
        shapes |= {f"{at}.mlp.{name}_proj.weight": (model.ffn, model.hidden) for name in ("gate", "up")}
        shapes |= {f"{at}.mlp.down_proj.weight": (model.hidden, model.ffn)}
    shapes |= {"norm.weight": (model.hidden,), "lm_head.weight": (model.vocab, model.hidden)}
    weights = {}
    for name, shape in shapes.items():
        values = rng.normal(size=shape) * (1.2 / np.sqrt(shape[-1]) if len(shape) == 2 else 0.3)
        weights[name] = round_to(values + ("norm.weight" in name), "bfloat16").astype(np.float64)
    return weights


class Forward:
    """Run the model on one sequence and keep every canonical tensor [tokens, features].

    ``faults``: canonical label -> function applied to that tensor before anything reads it. ``noise``: the engine's
    kernels; ``sequence``: a number by which float32 sums of one engine differ from call to call.
    """

    def __init__(
        self,
        model: Tiny,
        weights: Tensors,
        dtype: str = "float32",
        *,
        noise: int | None = None,
        sequence: int = 0,
        faults: dict[str, Fault] | None = None,
    ) -> None:
        self.model, self.weights, self.dtype, self.faults = model, weights, dtype, faults or {}
        self.noise = noise
        self.rng = None if noise is None else np.random.default_rng((noise, sequence))
        self.out: Tensors = {}

    def run(self, ids: np.ndarray) -> Tensors:
        """Return canonical label -> tensor; ``delta`` labels hold a layer's MLP output and residual apart."""
        self.out = {}
        stream = self._keep("embed_tokens:output.0", self.weights["embed_tokens.weight"][ids], exact=True)
        for layer in range(self.model.layers):
            stream = self._layer(f"layers.{layer}", stream)
        final = self._norm("norm", stream)
        self._keep("lm_head:output.0", final @ self.weights["lm_head.weight"].T)
        return self.out

    def _keep(self, label: str, values: np.ndarray, *, exact: bool = False) -> np.ndarray:
        if self.rng is not None and not exact:
            unit = 2.0 ** -(max(MANTISSA_BITS[self.dtype], MANTISSA_BITS["float32"]) + 1)
            values = values * (1 + unit * self.rng.uniform(-1, 1, values.shape))
        rounded = round_to(values, self.dtype).astype(np.float64)
        if label in self.faults:
            rounded = round_to(self.faults[label](rounded.copy()), self.dtype).astype(np.float64)
        self.out[label] = rounded
        return rounded

    def _midway(self, kind: str, values: np.ndarray) -> np.ndarray:
        """Round a result that is not the last of its module, where this engine's kernels of that kind do so."""
        rounds = self.noise is not None and zlib.crc32(f"{self.noise} {kind}".encode()) % 2
        return round_to(values, self.dtype).astype(np.float64) if rounds else values

    def _norm(self, name: str, x: np.ndarray) -> np.ndarray:
        scale = np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + self.model.eps)
        return self._keep(f"{name}:output.0", self._midway("norm", x / scale) * self.weights[f"{name}.weight"])

    def _linear(self, name: str, x: np.ndarray) -> np.ndarray:
        bias = self.weights.get(f"{name}.bias", 0.0)
        return self._keep(f"{name}:output.0", self._midway("linear", x @ self.weights[f"{name}.weight"].T) + bias)

    def _layer(self, at: str, stream: np.ndarray) -> np.ndarray:
        attention = self._attention(f"{at}.self_attn", self._norm(f"{at}.input_layernorm", stream))
        residual = self._keep(f"{at}.residual", stream + attention, exact=True)
        x = self._norm(f"{at}.post_attention_layernorm", residual)
        gate, up = (self._linear(f"{at}.mlp.{name}_proj", x) for name in ("gate", "up"))
        active = self._midway("activation", gate / (1 + np.exp(-gate)))
        activation = self._keep(f"{at}.mlp.down_proj:input.0", active * up)
        delta = self._linear(f"{at}.mlp.down_proj", activation)
        return self._keep(f"{at}:output.0", residual + delta, exact=True)

    def _attention(self, at: str, x: np.ndarray) -> np.ndarray:
        m, tokens = self.model, len(x)
        heads = {}
        for name, count in (("q", m.heads), ("k", m.kv_heads), ("v", m.kv_heads)):
            heads[name] = self._linear(f"{at}.{name}_proj", x).reshape(tokens, count, m.head_dim)
        if m.qk_norm:
            for name in "qk":
                heads[name] = self._norm(f"{at}.{name}_norm", heads[name])
        for slot, name in enumerate("qk"):
            heads[name] = self._keep(f"{at}.rotary_emb:output.{slot}", self._rope(heads[name]))
        group = m.heads // m.kv_heads
        k, v = (np.repeat(heads[name], group, axis=1) for name in "kv")
        scores = self._midway("attention", np.einsum("qhd,khd->hqk", heads["q"], k) / np.sqrt(m.head_dim))
        scores = np.where(np.tri(tokens, dtype=bool), scores, -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        context = np.einsum("hqk,khd->qhd", self._midway("attention", scores / scores.sum(-1, keepdims=True)), v)
        return self._linear(f"{at}.o_proj", self._keep(f"{at}.o_proj:input.0", context.reshape(tokens, -1)))

    def _rope(self, x: np.ndarray) -> np.ndarray:
        half = x.shape[-1] // 2
        angle = np.arange(len(x))[:, None] / self.model.rope_theta ** (np.arange(half) / half)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        left, right = x[..., :half], x[..., half:]
        part = [(left, cos), (right, sin), (right, cos), (left, sin)]
        a, b, c, d = (self._midway("rope", x * turn) for x, turn in part)
        return np.concatenate([a - b, c + d], axis=-1)
