"""What a Hugging Face checkpoint's configuration says about the Megatron model that computes the same.

Only architectures and configuration features that Megatron computes exactly as transformers does are accepted;
anything else is refused by name rather than approximated. Pure: needs neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from probe.checkpoint import Checkpoint
from probe.errors import CheckpointError
from probe.layout import padded_vocab_size


@dataclass(frozen=True)
class MoeFamily:
    """How an architecture with routed experts writes them into config.json.

    ``ffn_key`` names the size of one expert. ``normalises`` says whether the weights of a token's experts add up to
    one: always (True), or by ``norm_topk_prob`` (None), which transformers takes as false where it is absent.
    ``sparse_step`` tells that ``decoder_sparse_step`` and ``mlp_only_layers`` may leave layers without experts.
    """

    ffn_key: str = "moe_intermediate_size"
    normalises: bool | None = None
    sparse_step: bool = True
    shared_expert: bool = False


@dataclass(frozen=True)
class Family:
    """What sets an architecture apart, and what transformers assumes where config.json is silent.

    ``head_dim`` None means hidden_size / num_attention_heads. ``refused_flags`` change the computation when true in
    ways Megatron's options do not express (an output-projection bias without MLP biases, for one).
    ``sliding_window`` names the rule by which the architecture uses its sliding window, ``window`` is its length
    where config.json is silent.
    """

    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    refused_flags: tuple[str, ...] = ()
    sliding_window: str = "never"
    window: int | None = 4096
    rope_theta: float = 10_000.0
    rms_eps: float = 1e-6
    moe: MoeFamily | None = None


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(refused_flags=("attention_bias", "mlp_bias")),
    "MistralForCausalLM": Family(sliding_window="all layers"),
    "Qwen2ForCausalLM": Family(qkv_bias=True, sliding_window="upper layers"),
    "Qwen3ForCausalLM": Family(
        qk_norm=True, head_dim=128, refused_flags=("attention_bias",), sliding_window="upper layers"
    ),
    "MixtralForCausalLM": Family(
        sliding_window="all layers",
        window=None,
        rope_theta=1_000_000.0,
        rms_eps=1e-5,
        moe=MoeFamily("intermediate_size", normalises=True, sparse_step=False),
    ),
    "Qwen2MoeForCausalLM": Family(qkv_bias=True, sliding_window="on request", moe=MoeFamily(shared_expert=True)),
    "Qwen3MoeForCausalLM": Family(
        qk_norm=True, refused_flags=("attention_bias",), sliding_window="on request", moe=MoeFamily()
    ),
}

# RotaryEmbedding._apply_scaling of Megatron-core has these of Llama 3 written in; only the factor is an argument.
LLAMA3_CONSTANTS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

DEFAULT_WINDOW_LAYERS = 28
"""What transformers assumes for ``max_window_layers`` where config.json is silent."""


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: base ``theta``, and the scaling ``factor`` of kind ``default``, ``linear`` or ``llama3``."""

    theta: float
    kind: str = "default"
    factor: float = 1.0

    def arguments(self) -> dict[str, Any]:
        """Return the GPTModel arguments that express it."""
        scaling: dict[str, dict[str, Any]] = {
            "default": {},
            "linear": {"seq_len_interpolation_factor": self.factor},
            "llama3": {"rope_scaling": True, "rope_scaling_factor": self.factor},
        }
        return {"position_embedding_type": "rope", "rotary_base": self.theta, **scaling[self.kind]}


@dataclass(frozen=True)
class Moe:
    """Routed experts: how many there are, how many serve a token, their size, and in which layers they are.

    The router takes the softmax over all experts and keeps the ``top_k`` largest; ``normalise`` divides their weights
    by their sum. ``shared_ffn`` is the size of an expert that serves every token, weighted by a sigmoid gate; 0: none.
    """

    experts: int
    top_k: int
    ffn: int
    normalise: bool
    layers: tuple[bool, ...]
    shared_ffn: int = 0

    def arguments(self) -> dict[str, Any]:
        """Return the TransformerConfig arguments that express it, on the dispatcher that needs no CUDA.

        Softmax over the top-k logits equals the softmax over all, kept and normalised: ``moe_router_pre_softmax``
        False. No auxiliary loss, no token dropping and no fusion: the forward is transformers'.
        """
        shared = {"moe_shared_expert_intermediate_size": self.shared_ffn, "moe_shared_expert_gate": True}
        return {
            "num_moe_experts": self.experts,
            "moe_layer_freq": [int(sparse) for sparse in self.layers],
            "moe_ffn_hidden_size": self.ffn,
            "moe_router_topk": self.top_k,
            "moe_router_pre_softmax": not self.normalise,
            "moe_router_score_function": "softmax",
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather",
            "moe_grouped_gemm": False,
            "moe_permute_fusion": False,
            **(shared if self.shared_ffn else {}),
        }


@dataclass(frozen=True)
class ModelShape:
    """The facts of a checkpoint's configuration that decide the Megatron model; sizes are feature counts."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    head_dim: int
    vocab: int
    padded_vocab: int
    max_positions: int
    rms_eps: float
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    rope: Rope
    moe: Moe | None = None

    def dimension(self, name: str) -> int:
        """Return the size of a named weight dimension.

        A field; ``query`` and ``key_value`` head features; ``one``; of a model with experts also ``experts``,
        ``expert_ffn``, ``expert_gate_up`` and ``shared_ffn``.
        """
        sizes = {"query": self.heads * self.head_dim, "key_value": self.groups * self.head_dim, "one": 1}
        if self.moe is not None:
            sizes |= {"experts": self.moe.experts, "expert_ffn": self.moe.ffn, "expert_gate_up": 2 * self.moe.ffn}
            sizes["shared_ffn"] = self.moe.shared_ffn
        return sizes[name] if name in sizes else int(getattr(self, name))


def model_shape(checkpoint: Checkpoint, vocab_multiple: int = 128) -> ModelShape:
    """Read the model's shape from config.json; needs no torch.

    The vocabulary is padded to ``vocab_multiple``. Raises CheckpointError for an architecture or a feature that
    Megatron does not compute exactly.
    """
    config = checkpoint.config
    family = FAMILIES.get(checkpoint.architecture)
    if family is None:
        raise _unsupported(checkpoint, f"architecture {checkpoint.architecture}")
    _check_features(checkpoint, family)
    heads = _count(checkpoint, "num_attention_heads")
    hidden, vocab = _count(checkpoint, "hidden_size"), _count(checkpoint, "vocab_size")
    groups = heads if config.get("num_key_value_heads") is None else _count(checkpoint, "num_key_value_heads")
    head_dim = _count(checkpoint, "head_dim") if config.get("head_dim") else (family.head_dim or hidden // heads)
    if heads % groups:
        raise CheckpointError(f"{checkpoint.path}: {heads} attention heads do not divide into {groups} groups")
    return ModelShape(
        layers=_count(checkpoint, "num_hidden_layers"),
        hidden=hidden,
        ffn=_count(checkpoint, "intermediate_size"),
        heads=heads,
        groups=groups,
        head_dim=head_dim,
        vocab=vocab,
        padded_vocab=padded_vocab_size(vocab, vocab_multiple),
        max_positions=_count(checkpoint, "max_position_embeddings"),
        rms_eps=_number(checkpoint, config, "rms_norm_eps", family.rms_eps),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        rope=_rope(checkpoint, family),
        moe=_moe(checkpoint, family.moe) if family.moe else None,
    )


def _check_features(checkpoint: Checkpoint, family: Family) -> None:
    """Refuse configuration features that change the computation."""
    config = checkpoint.config
    if config.get("quantization_config"):
        raise _unsupported(checkpoint, "a quantised checkpoint (quantization_config)")
    if config.get("hidden_act", "silu") != "silu":
        raise _unsupported(checkpoint, f"hidden_act {config['hidden_act']!r}")
    for flag in family.refused_flags:
        if config.get(flag):
            raise _unsupported(checkpoint, f"{flag}: true")
    if family.qkv_bias and config.get("qkv_bias") is False:
        raise _unsupported(checkpoint, "qkv_bias: false")
    if _uses_window(checkpoint, family):
        raise _unsupported(checkpoint, "sliding-window attention")


def _uses_window(checkpoint: Checkpoint, family: Family) -> bool:
    """Tell whether any layer's sliding window is shorter than the longest sequence."""
    config = checkpoint.config
    window = config.get("sliding_window", family.window)
    longest = config.get("max_position_embeddings")
    unreached = isinstance(window, int) and isinstance(longest, int) and window >= longest
    if family.sliding_window == "never" or window is None or unreached:
        return False
    if family.sliding_window == "all layers":
        return True
    if not config.get("use_sliding_window", False):
        return False
    if family.sliding_window == "on request":
        return True
    kinds = config.get("layer_types")
    if kinds is not None:
        return any(kind != "full_attention" for kind in kinds)
    return config.get("max_window_layers", DEFAULT_WINDOW_LAYERS) < _count(checkpoint, "num_hidden_layers")


def _moe(checkpoint: Checkpoint, family: MoeFamily) -> Moe:
    """Read the routed experts; transformers 5 writes num_local_experts where transformers 4 wrote num_experts."""
    config = checkpoint.config
    experts = _count(checkpoint, "num_local_experts" if "num_local_experts" in config else "num_experts")
    top_k, layers = _count(checkpoint, "num_experts_per_tok"), _count(checkpoint, "num_hidden_layers")
    normalise = bool(config.get("norm_topk_prob", False)) if family.normalises is None else family.normalises
    if top_k > experts:
        raise CheckpointError(f"{checkpoint.path}: num_experts_per_tok {top_k} exceeds the {experts} experts")
    if top_k == 1 and normalise:
        raise _unsupported(checkpoint, "normalised router weights with one expert per token")
    step = _count(checkpoint, "decoder_sparse_step") if family.sparse_step and "decoder_sparse_step" in config else 1
    dense = (config.get("mlp_only_layers") or []) if family.sparse_step else []
    sparse = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))
    if not any(sparse):
        raise _unsupported(checkpoint, "experts in no layer (decoder_sparse_step, mlp_only_layers)")
    shared = _count(checkpoint, "shared_expert_intermediate_size") if family.shared_expert else 0
    return Moe(experts, top_k, _count(checkpoint, family.ffn_key), normalise, sparse, shared)


def _rope(checkpoint: Checkpoint, family: Family) -> Rope:
    """Read the rotary embedding of transformers 5 (rope_parameters) or 4 (rope_theta and rope_scaling, which wins)."""
    config = checkpoint.config
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise _unsupported(checkpoint, "rope parameters that are not one table for all layers")
    theta = _number(checkpoint, {**config, **rope}, "rope_theta", family.rope_theta)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise _unsupported(checkpoint, "partial_rotary_factor other than 1")
    if kind == "default":
        return Rope(theta)
    if kind not in ("linear", "llama3"):
        raise _unsupported(checkpoint, f"rope scaling type {kind!r}", "supported: default, linear, llama3")
    if kind == "llama3":
        for name, value in LLAMA3_CONSTANTS.items():
            if rope.get(name) != value:
                raise _unsupported(checkpoint, f"llama3 rope scaling with {name} {rope.get(name)}", f"only {value}")
    return Rope(theta, kind, _number(checkpoint, rope, "factor"))


def _count(checkpoint: Checkpoint, key: str) -> int:
    """Return a positive integer of config.json."""
    value = checkpoint.config.get(key)
    if type(value) is not int or value < 1:
        raise CheckpointError(f"{checkpoint.path / 'config.json'} has no usable {key} (found {value!r})")
    return value


def _number(checkpoint: Checkpoint, table: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Return a positive number of config.json, or the default where it is silent."""
    value = default if table.get(key) is None else table[key]
    if not isinstance(value, (int, float)) or value <= 0:
        raise CheckpointError(f"{checkpoint.path / 'config.json'} has no usable {key} (found {value!r})")
    return float(value)


def _unsupported(checkpoint: Checkpoint, what: str, fix: str = "") -> CheckpointError:
    """Build the error for what Megatron would not compute exactly."""
    supported = f"supported: {', '.join(FAMILIES)}, unquantised, silu, full attention"
    return CheckpointError(f"checkpoint {checkpoint.path} uses {what}, not built for Megatron", fix or supported)
