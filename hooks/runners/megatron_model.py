"""Build a Megatron GPTModel from a Hugging Face checkpoint.

The checkpoint's configuration is read by :mod:`probe.hooks.runners.megatron_config`, which refuses what Megatron would
not compute exactly. Fusions (bias+SwiGLU, bias+dropout, masked softmax, rotary)
stay off, which is Megatron-core's default.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from probe.checkpoint import Checkpoint
from probe.errors import EngineError
from probe.hooks.engines.megatron_parallel import ranks
from probe.hooks.runners.job import Parallel
from probe.hooks.runners.megatron_config import ModelShape, model_shape
from probe.hooks.runners.megatron_cpu import LocalNorm, apply_cpu_support, cpu_support_applied, packed_core_attention
from probe.hooks.runners.megatron_weights import load_weights

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

INSTALL = 'pip install "probe-rl[actor]"'
ALONE = Parallel()
DTYPES = ("float32", "bfloat16", "float16")


def build_model(
    checkpoint: Checkpoint,
    *,
    dtype: str = "bfloat16",
    device: str = "cpu",
    vocab_multiple: int = 128,
    log: logging.Logger | None = None,
) -> GPTModel:
    """Build the GPTModel of a checkpoint in this process alone: :func:`build_chunks` without any parallelism."""
    return build_chunks(checkpoint, dtype=dtype, device=device, vocab_multiple=vocab_multiple, log=log)[0]


def build_chunks(
    checkpoint: Checkpoint,
    parallel: Parallel = ALONE,
    *,
    dtype: str = "bfloat16",
    device: str = "cpu",
    vocab_multiple: int = 128,
    log: logging.Logger | None = None,
) -> list[GPTModel]:
    """Build this rank's part of a checkpoint's model, load its weights and put it into eval mode.

    A pipeline rank holds ``parallel.vpp`` chunks, any other rank one. ``dtype`` is one of float32, bfloat16, float16;
    ``device`` is ``cpu``, ``cuda`` or ``cuda:N``. On CUDA the TransformerEngine layer specification is used when
    transformer_engine is installed, else Megatron's local one. On the CPU see
    :mod:`probe.hooks.runners.megatron_cpu`. The vocabulary is padded to ``vocab_multiple`` times the tensor-parallel
    size, as Megatron does. Initialises torch.distributed (from torchrun's environment where there are several ranks)
    and Megatron's model parallel state when nobody has. Raises CheckpointError and EngineError.
    """
    shape = model_shape(checkpoint, vocab_multiple * parallel.tp)
    require_megatron()
    if dtype not in DTYPES:
        raise EngineError(f"Megatron cannot run in dtype {dtype!r}", f"choose one of {', '.join(DTYPES)}")
    _prepare_device(device, log)
    _ensure_parallel_state(device, parallel)
    with without_noise():
        config = _transformer_config(shape, getattr(torch, dtype), device, parallel)
        stages = [None] if parallel.vpp == 1 else list(range(parallel.vpp))
        chunks = [_build_chunk(shape, config, device, stage) for stage in stages]
    for chunk in chunks:
        # torch's RMSNorm ignores params_dtype; Megatron's Float16Module casts the whole model likewise.
        chunk.to(device=device, dtype=getattr(torch, dtype)).eval()
    load_weights(chunks, checkpoint, shape)
    return chunks


def _build_chunk(shape: ModelShape, config: Any, device: str, stage: int | None) -> GPTModel:
    """Build one chunk, without weights; ``stage`` numbers the chunks of a rank that has several."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    which = {"ignore_virtual": stage is None, "vp_stage": stage}
    return GPTModel(
        config,
        _layer_spec(shape, device, config, stage),
        vocab_size=shape.padded_vocab,
        max_sequence_length=shape.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(**which),
        post_process=parallel_state.is_pipeline_last_stage(**which),
        share_embeddings_and_output_weights=shape.tied,
        parallel_output=True,
        vp_stage=stage,
        **shape.rope.arguments(),
    )


def require_megatron() -> None:
    """Import Megatron-core without its noise; raise EngineError with the install command where that fails."""
    try:
        with without_noise():
            for module in ("megatron.core.models.gpt", "megatron.core.models.gpt.gpt_layer_specs"):
                import_module(module)
    except ImportError as error:
        raise EngineError(f"Megatron-core cannot be imported ({error})", INSTALL) from error


@contextmanager
def without_noise() -> Iterator[None]:
    """Hide Megatron's warnings that optional packages are absent and that its own default is deprecated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine|full scope is deprecated)")
        yield


def _prepare_device(device: str, log: logging.Logger | None) -> None:
    """Select the device, with CPU support where it is the CPU."""
    if device == "cpu":
        apply_cpu_support(log)
        return
    if not torch.cuda.is_available():
        raise EngineError(f"device {device!r} is not available to Megatron", "use the device cpu, or a CUDA machine")
    if cpu_support_applied():
        raise EngineError("this process already runs Megatron on the CPU", f"use a new process for {device}")
    torch.cuda.set_device(torch.device(device))


def _ensure_parallel_state(device: str, parallel: Parallel) -> None:
    """Initialise torch.distributed, Megatron's parallel state and its RNG where they are not, of the sizes wanted.

    Alone, an in-process store needs no port, so that runs on one machine cannot collide; several ranks meet where
    torchrun's environment says.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    if not dist.is_initialized():
        where = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if parallel.world == 1 else {}
        dist.init_process_group("gloo" if device == "cpu" else "nccl", **where)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            parallel.tp,
            parallel.pp,
            virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
            context_parallel_size=parallel.cp,
            expert_model_parallel_size=parallel.ep,
        )
        if device != "cpu":
            # A forward forks the tracker's state even with dropout 0; the seed draws nothing.
            tensor_parallel.model_parallel_cuda_manual_seed(0)
    found = ranks()
    for name in ("tp", "pp", "cp", "ep", "dp"):
        size, wanted = getattr(found, f"{name}_size"), getattr(parallel, name)
        if size != wanted:
            raise EngineError(f"Megatron is initialised with {name} size {size}, not {wanted}", "use a new process")


def _transformer_config(shape: ModelShape, dtype: Any, device: str, parallel: Parallel) -> Any:
    """Build the TransformerConfig of a shape."""
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
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        sequence_parallel=parallel.sp,
        use_cpu_initialization=device == "cpu",
        perform_initialization=False,
        **(shape.moe.arguments() if shape.moe else {}),
    )


def _layer_spec(shape: ModelShape, device: str, config: Any, stage: int | None) -> Any:
    """Return TransformerEngine's specification of a chunk's layers where it can run, else Megatron's local one.

    The local block names its final norm, because the default is TransformerEngine's wherever that is installed.
    """
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    moe = shape.moe
    if device != "cpu" and gpt_layer_specs.HAVE_TE and moe is not None:
        return gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=stage)
    if device != "cpu" and gpt_layer_specs.HAVE_TE:
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=shape.qk_norm)
    if device != "cpu" and config.context_parallel_size > 1:
        raise EngineError("context parallelism on CUDA needs TransformerEngine", "install transformer_engine")
    specs = {experts: _local_layer(shape, device, experts) for experts in {None, moe.experts if moe else None}}
    layers = [specs[moe.experts if moe and moe.layers[layer] else None] for layer in range(shape.layers)]
    first = get_transformer_layer_offset(config, vp_stage=stage)
    built = layers[first : first + get_num_layers_to_build(config, vp_stage=stage)]
    return TransformerBlockSubmodules(layer_specs=built, layer_norm=LocalNorm)


def _local_layer(shape: ModelShape, device: str, experts: int | None) -> Any:
    """Return Megatron's local specification of one layer, which refuses neither packing nor split rows on the CPU."""
    from megatron.core.models.gpt import gpt_layer_specs

    spec = gpt_layer_specs.get_gpt_layer_local_spec(
        num_experts=experts, moe_grouped_gemm=False, qk_layernorm=shape.qk_norm, normalization="RMSNorm"
    )
    parts, attention = spec.submodules, spec.submodules.self_attention.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = LocalNorm
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = LocalNorm
    if device == "cpu":
        attention.core_attention = packed_core_attention()
    return spec
