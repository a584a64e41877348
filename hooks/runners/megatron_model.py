"""Build a Megatron GPTModel from a Hugging Face checkpoint.

Only architectures that Megatron computes exactly as transformers does are accepted, and only the configuration
features this module checks; anything else is refused by name rather than approximated. One process, no model
parallelism. Fusions (bias+SwiGLU, bias+dropout, masked softmax, rotary) stay off, which is Megatron-core's default.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from probe.checkpoint import Checkpoint
from probe.errors import CheckpointError, EngineError
from probe.hooks.runners.megatron_cpu import apply_cpu_support, cpu_support_applied, packed_core_attention
from probe.hooks.runners.megatron_weights import load_weights
from probe.layout import padded_vocab_size

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

INSTALL = 'pip install "probe-rl[actor]"'
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Family:
    """What sets an architecture apart, and what transformers assumes where config.json is silent.

    ``head_dim`` None means hidden_size / num_attention_heads. ``refused_flags`` change the computation when true in
    ways Megatron's options do not express (an output-projection bias without MLP biases, for one).
    ``sliding_window`` names the rule by which the architecture uses its sliding window.
    """

    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    refused_flags: tuple[str, ...] = ()
    sliding_window: str = "never"


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(refused_flags=("attention_bias", "mlp_bias")),
    "MistralForCausalLM": Family(sliding_window="all layers"),
    "Qwen2ForCausalLM": Family(qkv_bias=True, sliding_window="upper layers"),
    "Qwen3ForCausalLM": Family(
        qk_norm=True, head_dim=128, refused_flags=("attention_bias",), sliding_window="upper layers"
    ),
}

# RotaryEmbedding._apply_scaling of Megatron-core has these of Llama 3 written in; only the factor is an argument.
LLAMA3_CONSTANTS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

# What transformers assumes for the architectures above where config.json is silent.
DEFAULT_ROPE_THETA, DEFAULT_RMS_EPS, DEFAULT_WINDOW, DEFAULT_WINDOW_LAYERS = 10_000.0, 1e-6, 4096, 28


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

    def dimension(self, name: str) -> int:
        """Return the size of a named weight dimension: a field, or ``query`` and ``key_value`` head features."""
        products = {"query": self.heads * self.head_dim, "key_value": self.groups * self.head_dim}
        return products[name] if name in products else int(getattr(self, name))


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
        rms_eps=_number(checkpoint, config, "rms_norm_eps", DEFAULT_RMS_EPS),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        rope=_rope(checkpoint),
    )


def build_model(
    checkpoint: Checkpoint,
    *,
    dtype: str = "bfloat16",
    device: str = "cpu",
    vocab_multiple: int = 128,
    log: logging.Logger | None = None,
) -> GPTModel:
    """Build the GPTModel of a checkpoint, load its weights and put it into eval mode.

    ``dtype`` is one of float32, bfloat16, float16; ``device`` is ``cpu``, ``cuda`` or ``cuda:N``. On CUDA the
    TransformerEngine layer specification is used when transformer_engine is installed, else Megatron's local one.
    On the CPU see :mod:`probe.hooks.runners.megatron_cpu`. Initialises torch.distributed and Megatron's model
    parallel state of size one when nobody has. Raises CheckpointError and EngineError.
    """
    shape = model_shape(checkpoint, vocab_multiple)
    torch = require_megatron()
    if dtype not in DTYPES:
        raise EngineError(f"Megatron cannot run in dtype {dtype!r}", f"choose one of {', '.join(DTYPES)}")
    _prepare_device(device, log)
    _ensure_parallel_state(device)
    from megatron.core.models.gpt import GPTModel

    with _without_noise():
        model = GPTModel(
            _transformer_config(shape, getattr(torch, dtype), device),
            _layer_spec(shape, device),
            vocab_size=shape.padded_vocab,
            max_sequence_length=shape.max_positions,
            share_embeddings_and_output_weights=shape.tied,
            parallel_output=True,
            **shape.rope.arguments(),
        )
    # torch's RMSNorm ignores params_dtype; Megatron's Float16Module casts the whole model likewise.
    model.to(device=device, dtype=getattr(torch, dtype))
    load_weights(model, checkpoint, shape)
    return model.eval()


def require_megatron() -> Any:
    """Import torch and Megatron-core and return torch; raise EngineError with the install command when one fails."""
    try:
        with _without_noise():
            torch = import_module("torch")
            for module in ("megatron.core.models.gpt", "megatron.core.models.gpt.gpt_layer_specs"):
                import_module(module)
    except ImportError as error:
        raise EngineError(f"Megatron-core cannot be imported ({error})", INSTALL) from error
    return torch


@contextmanager
def _without_noise() -> Iterator[None]:
    """Hide Megatron's warnings that optional packages are absent and that its own default is deprecated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine|full scope is deprecated)")
        yield


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
    if _uses_window(checkpoint, family):
        raise _unsupported(checkpoint, "sliding-window attention")


def _uses_window(checkpoint: Checkpoint, family: Family) -> bool:
    """Tell whether any layer's sliding window is shorter than the longest sequence."""
    config = checkpoint.config
    window = config.get("sliding_window", DEFAULT_WINDOW)
    longest = config.get("max_position_embeddings")
    unreached = isinstance(window, int) and isinstance(longest, int) and window >= longest
    if family.sliding_window == "never" or window is None or unreached:
        return False
    if family.sliding_window == "all layers":
        return True
    if not config.get("use_sliding_window", False):
        return False
    kinds = config.get("layer_types")
    if kinds is not None:
        return any(kind != "full_attention" for kind in kinds)
    return config.get("max_window_layers", DEFAULT_WINDOW_LAYERS) < _count(checkpoint, "num_hidden_layers")


def _rope(checkpoint: Checkpoint) -> Rope:
    """Read the rotary embedding of transformers 5 (rope_parameters) or 4 (rope_theta and rope_scaling, which wins)."""
    config = checkpoint.config
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise _unsupported(checkpoint, "rope parameters that are not one table for all layers")
    theta = _number(checkpoint, {**config, **rope}, "rope_theta", DEFAULT_ROPE_THETA)
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


def _prepare_device(device: str, log: logging.Logger | None) -> None:
    """Select the device, with CPU support where it is the CPU."""
    import torch

    if device == "cpu":
        apply_cpu_support(log)
        return
    if not torch.cuda.is_available():
        raise EngineError(f"device {device!r} is not available to Megatron", "use the device cpu, or a CUDA machine")
    if cpu_support_applied():
        raise EngineError("this process already runs Megatron on the CPU", f"use a new process for {device}")
    torch.cuda.set_device(torch.device(device))


def _ensure_parallel_state(device: str) -> None:
    """Initialise torch.distributed, Megatron's parallel state and its RNG where they are not, all of size one.

    An in-process store needs no port, so that runs on one machine cannot collide.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    if not dist.is_initialized():
        backend = "gloo" if device == "cpu" else "nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
        if device != "cpu":
            # A forward forks the tracker's state even with dropout 0; the seed draws nothing.
            tensor_parallel.model_parallel_cuda_manual_seed(0)
    sizes = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
    )
    if sizes != (1, 1, 1):
        raise EngineError(
            f"Megatron is initialised with tensor, pipeline, context parallel sizes {sizes}", "run with size 1 each"
        )


def _transformer_config(shape: ModelShape, dtype: Any, device: str) -> Any:
    """Build the TransformerConfig of a shape."""
    import torch
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.rms_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        use_cpu_initialization=device == "cpu",
        perform_initialization=False,
    )


def _layer_spec(shape: ModelShape, device: str) -> Any:
    """Return TransformerEngine's layer specification where it can run, else Megatron's local one for the block.

    The local block names its final norm, because the default is TransformerEngine's wherever that is installed.
    """
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    if device != "cpu" and gpt_layer_specs.HAVE_TE:
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=shape.qk_norm)
    spec = gpt_layer_specs.get_gpt_layer_local_spec(qk_layernorm=shape.qk_norm, normalization="RMSNorm")
    if device == "cpu":
        spec.submodules.self_attention.submodules.core_attention = packed_core_attention()
    return TransformerBlockSubmodules(layer_specs=[spec] * shape.layers, layer_norm=WrappedTorchNorm)
