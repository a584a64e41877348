"""Stand-ins with the module trees, tensor layouts and names of engines, over one set of weights. No engine runs here.

They are doubles for what cannot exist on this machine: TransformerEngine's fused norms need its CUDA kernels, MindSpeed
and vllm-ascend an NPU. The real vLLM and Megatron-core are compared in the tests marked slow.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

LAYERS, HIDDEN, HEADS, GROUPS, DIM, FFN, VOCAB, EPS = 4, 32, 4, 2, 8, 48, 64, 1e-5
Weights = dict[str, torch.Tensor]


def make_weights(seed: int = 0) -> Weights:
    """Return random weights by canonical name, shared by every stand-in."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    weights = {"embed_tokens": matrix(VOCAB, HIDDEN), "lm_head": matrix(VOCAB, HIDDEN), "norm": 1 + matrix(HIDDEN)}
    shapes = {"q": (HEADS * DIM, HIDDEN), "k": (GROUPS * DIM, HIDDEN), "v": (GROUPS * DIM, HIDDEN)}
    shapes |= {"o": (HIDDEN, HEADS * DIM), "gate": (FFN, HIDDEN), "up": (FFN, HIDDEN), "down": (HIDDEN, FFN)}
    for layer in range(LAYERS):
        weights |= {f"{layer}.{name}": matrix(*shape) for name, shape in shapes.items()}
        weights |= {f"{layer}.{name}": 1 + matrix(HIDDEN) for name in ("input_norm", "post_norm")}
    return weights


def _parameter(value: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(value.clone(), requires_grad=False)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return causal attention of [batch, heads, tokens, dim] tensors whose key heads are shared by groups."""
    k, v = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class Linear(nn.Module):
    """A linear that returns (output, bias), as the parallel linears of both engines do."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = _parameter(weight)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return functional.linear(x, self.weight), None


class Embedding(nn.Module):
    """A lookup of token ids."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = _parameter(weight)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids, self.weight)


class Norm(nn.Module):
    """An RMS norm that adds a residual first where it is given one, and then returns both."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = _parameter(weight)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is not None:
            x = x + residual
        normed = functional.rms_norm(x, (HIDDEN,), self.weight, EPS)
        return normed if residual is None else (normed, x)


class SiluAndMul(nn.Module):
    """The activation of [gate | up]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return functional.silu(gate) * up


# -- vLLM: [tokens, hidden], fused projections, residual passed along -------------------------------------------------


class FlatAttention(nn.Module):
    """Attention over flat tokens of one sequence."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.view(1, len(x), -1, DIM).transpose(1, 2) for x in (q, k, v))
        return _attend(q, k, v).transpose(1, 2).reshape(q.shape[2], -1)


class VllmAttention(nn.Module):
    def __init__(self, w: Weights, layer: int) -> None:
        super().__init__()
        self.qkv_proj = Linear(torch.cat([w[f"{layer}.{name}"] for name in "qkv"]))
        self.attn, self.o_proj = FlatAttention(), Linear(w[f"{layer}.o"])

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        parts = self.qkv_proj(hidden_states)[0].split([HEADS * DIM, GROUPS * DIM, GROUPS * DIM], -1)
        return self.o_proj(self.attn(*parts))[0]


class VllmMlp(nn.Module):
    def __init__(self, w: Weights, layer: int) -> None:
        super().__init__()
        self.gate_up_proj = Linear(torch.cat([w[f"{layer}.gate"], w[f"{layer}.up"]]))
        self.act_fn, self.down_proj = SiluAndMul(), Linear(w[f"{layer}.down"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(x)[0]))[0]


class VllmLayer(nn.Module):
    def __init__(self, w: Weights, layer: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = VllmAttention(w, layer), VllmMlp(w, layer)
        self.input_layernorm, self.post_attention_layernorm = (
            Norm(w[f"{layer}.{name}_norm"]) for name in ("input", "post")
        )

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual, hidden = hidden, self.input_layernorm(hidden)
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        hidden, residual = self.post_attention_layernorm(self.self_attn(hidden_states=hidden), residual)
        return self.mlp(hidden), residual


class VllmModel(nn.Module):
    def __init__(self, w: Weights) -> None:
        super().__init__()
        self.embed_tokens, self.norm = Embedding(w["embed_tokens"]), Norm(w["norm"])
        self.layers = nn.ModuleList(VllmLayer(w, layer) for layer in range(LAYERS))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden, residual = self.embed_tokens(ids), None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual)
        return self.norm(hidden, residual)[0]


class VllmStandIn(nn.Module):
    """A stand-in for vLLM's Qwen2 layout: called with flat ids and positions, returns logits."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.model, self.lm_head = VllmModel(weights), Linear(weights["lm_head"])

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.model(ids))[0]


class RMSNorm(Norm):
    """The name that vLLM gives its norm."""


class AscendRMSNorm(RMSNorm):
    """The name that vllm-ascend gives it: same path, other class."""


# -- Megatron: [tokens, batch, hidden], query groups interleaved with their keys and values ---------------------------


def interleave(w: Weights, layer: int) -> torch.Tensor:
    """Return linear_qkv's weight: the queries of each group, then its key, then its value."""
    q, k, v = (w[f"{layer}.{name}"].view(GROUPS, -1, DIM, HIDDEN) for name in "qkv")
    return torch.cat([q, k, v], 1).reshape(-1, HIDDEN)


class IdentityOp(nn.Module):
    """Megatron's placeholder for a module that a spec leaves out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class FusedLinear(Linear):
    """A stand-in for TransformerEngine's LayerNormLinear: a norm and a linear in one module."""

    def __init__(self, weight: torch.Tensor, norm: torch.Tensor) -> None:
        super().__init__(weight)
        self.layer_norm_weight = _parameter(norm)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return super().forward(functional.rms_norm(x, (HIDDEN,), self.layer_norm_weight, EPS))


class CoreAttention(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        out = _attend(q, k, v).permute(2, 0, 1, 3)
        return out.reshape(*out.shape[:2], -1)


class MegatronAttention(nn.Module):
    def __init__(self, w: Weights, layer: int, fused: bool) -> None:
        super().__init__()
        qkv = interleave(w, layer)
        self.linear_qkv = FusedLinear(qkv, w[f"{layer}.input_norm"]) if fused else Linear(qkv)
        self.core_attention, self.linear_proj = CoreAttention(), Linear(w[f"{layer}.o"])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        mixed = self.linear_qkv(x)[0]
        mixed = mixed.view(*mixed.shape[:2], GROUPS, -1)
        q, k, v = mixed.split([HEADS // GROUPS * DIM, DIM, DIM], -1)
        return self.linear_proj(self.core_attention(q.reshape(*q.shape[:2], HEADS, DIM), k, v))


class MegatronMlp(nn.Module):
    def __init__(self, w: Weights, layer: int, fused: bool) -> None:
        super().__init__()
        both = torch.cat([w[f"{layer}.gate"], w[f"{layer}.up"]])
        self.linear_fc1 = FusedLinear(both, w[f"{layer}.post_norm"]) if fused else Linear(both)
        self.linear_fc2 = Linear(w[f"{layer}.down"])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        gate, up = self.linear_fc1(x)[0].chunk(2, -1)
        return self.linear_fc2(functional.silu(gate) * up)


class MegatronLayer(nn.Module):
    def __init__(self, w: Weights, layer: int, norm: type[nn.Module], *, fused: bool, numbered: bool) -> None:
        super().__init__()
        self.input_layernorm = IdentityOp() if fused else norm(w[f"{layer}.input_norm"])
        self.self_attention = MegatronAttention(w, layer, fused)
        self.pre_mlp_layernorm = IdentityOp() if fused else norm(w[f"{layer}.post_norm"])
        self.mlp = MegatronMlp(w, layer, fused)
        if numbered:
            self.layer_number = layer + 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attention(self.input_layernorm(x))[0]
        return x + self.mlp(self.pre_mlp_layernorm(x))[0]


class MegatronBlock(nn.Module):
    def __init__(self, layers: list[MegatronLayer], final: nn.Module | None) -> None:
        super().__init__()
        self.layers, self.final_layernorm = nn.ModuleList(layers), final

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x if self.final_layernorm is None else self.final_layernorm(x)


class MegatronEmbedding(nn.Module):
    def __init__(self, w: Weights) -> None:
        super().__init__()
        self.word_embeddings = Embedding(w["embed_tokens"])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.word_embeddings(ids).transpose(0, 1).contiguous()


class MegatronStandIn(nn.Module):
    """A stand-in for a GPTModel, or one pipeline stage of it, whose layers count from 0 as Megatron's do.

    ``fused``: the TransformerEngine spec; ``norm``: the class of norms (MindSpeed's PTNorm has another name);
    ``numbered``: layers know their ``layer_number`` in the whole model.
    """

    def __init__(
        self,
        w: Weights,
        layers: range = range(LAYERS),
        *,
        fused: bool = False,
        numbered: bool = True,
        norm: type[nn.Module] = Norm,
    ) -> None:
        super().__init__()
        first, last = layers.start == 0, layers.stop == LAYERS
        self.config = SimpleNamespace(num_query_groups=GROUPS, num_attention_heads=HEADS, kv_channels=DIM)
        self.config.hidden_size, self.config.layernorm_epsilon = HIDDEN, EPS
        self.embedding = MegatronEmbedding(w) if first else None
        built = [MegatronLayer(w, layer, norm, fused=fused, numbered=numbered) for layer in layers]
        self.decoder = MegatronBlock(built, norm(w["norm"]) if last else None)
        self.output_layer = Linear(w["lm_head"]) if last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.decoder(x if self.embedding is None else self.embedding(x))
        return x if self.output_layer is None else self.output_layer(x)[0]


class PTNorm(Norm):
    """The name of MindSpeed's norm."""


class Float16Module(nn.Module):
    """A stand-in for Megatron's wrapper of the same name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


class DistributedDataParallel(Float16Module):
    """A stand-in for Megatron's wrapper of the same name."""
