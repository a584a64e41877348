"""Synthetic dumps: the tensors of a tiny numpy transformer laid out as vLLM, Megatron and transformers would.

No engine runs here; tests/synthetic_model.py is the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from synthetic_model import Fault, Forward, Tensors, Tiny, make_weights

from probe.layout import fuse_qkv_groups, pad_vocabulary
from probe.metrics import logprobs_from_logits
from probe.store.dtypes import round_to
from probe.store.reader import Dump, open_dump
from probe.store.schema import ROW, TOKEN, ModuleInfo, RowSegment, Sequence, WeightSketch
from probe.store.sketches import column_vector, sketch_rows
from probe.store.writer import DumpWriter

# -- native layouts ---------------------------------------------------------------------------------------------------

Native = dict[tuple[str, str], np.ndarray]


def as_vllm(out: Tensors, model: Tiny) -> Native:
    """Return one sequence's tensors under vLLM's names: fused projections, layers as (MLP output, residual)."""
    native: Native = {("model.embed_tokens", "output.0"): out["embed_tokens:output.0"]}
    for i in range(model.layers):
        a, n = f"layers.{i}", f"model.layers.{i}"
        attn = f"{n}.self_attn"
        native[f"{n}.input_layernorm", "output.0"] = out[f"{a}.input_layernorm:output.0"]
        native[f"{attn}.qkv_proj", "output.0"] = _cat(out, *(f"{a}.self_attn.{x}_proj:output.0" for x in "qkv"))
        if model.qk_norm:
            native |= {(f"{attn}.{x}_norm", "output.0"): out[f"{a}.self_attn.{x}_norm:output.0"] for x in "qk"}
        for slot in ("output.0", "output.1"):
            native[f"{attn}.rotary_emb", slot] = _flat(out[f"{a}.self_attn.rotary_emb:{slot}"])
        native[f"{attn}.attn", "output.0"] = out[f"{a}.self_attn.o_proj:input.0"]
        native[f"{attn}.o_proj", "output.0"] = out[f"{a}.self_attn.o_proj:output.0"]
        native[f"{n}.post_attention_layernorm", "output.0"] = out[f"{a}.post_attention_layernorm:output.0"]
        native[f"{n}.post_attention_layernorm", "output.1"] = out[f"{a}.residual"]
        native[f"{n}.mlp.gate_up_proj", "output.0"] = _cat(out, *(f"{a}.mlp.{x}_proj:output.0" for x in ("gate", "up")))
        native[f"{n}.mlp.down_proj", "input.0"] = out[f"{a}.mlp.down_proj:input.0"]
        native[f"{n}.mlp.down_proj", "output.0"] = out[f"{a}.mlp.down_proj:output.0"]
        native[n, "output.0"] = out[f"{a}.mlp.down_proj:output.0"]
        native[n, "output.1"] = out[f"{a}:output.0"] - out[f"{a}.mlp.down_proj:output.0"]
    native["model.norm", "output.0"] = out["norm:output.0"]
    native["logits_processor", "output.0"] = out["lm_head:output.0"]
    return native


def as_megatron(out: Tensors, model: Tiny) -> Native:
    """Return one sequence's tensors under Megatron's names: QKV in groups, rope as attention inputs, padded logits."""
    native: Native = {("embedding", "output.0"): out["embed_tokens:output.0"]}
    for i in range(model.layers):
        a, n = f"layers.{i}", f"decoder.layers.{i}"
        attn = f"{n}.self_attention"
        parts = (out[f"{a}.self_attn.{x}_proj:output.0"] for x in "qkv")
        native[f"{n}.input_layernorm", "output.0"] = out[f"{a}.input_layernorm:output.0"]
        native[f"{attn}.linear_qkv", "output.0"] = fuse_qkv_groups(*parts, model.heads, model.kv_heads, model.head_dim)
        if model.qk_norm:
            native |= {(f"{attn}.{x}_layernorm", "output.0"): out[f"{a}.self_attn.{x}_norm:output.0"] for x in "qk"}
        for slot in (0, 1):
            native[f"{attn}.core_attention", f"input.{slot}"] = out[f"{a}.self_attn.rotary_emb:output.{slot}"]
        native[f"{attn}.core_attention", "output.0"] = out[f"{a}.self_attn.o_proj:input.0"]
        native[f"{attn}.linear_proj", "output.0"] = out[f"{a}.self_attn.o_proj:output.0"]
        native[f"{n}.pre_mlp_layernorm", "output.0"] = out[f"{a}.post_attention_layernorm:output.0"]
        native[f"{n}.mlp.linear_fc1", "output.0"] = _cat(out, *(f"{a}.mlp.{x}_proj:output.0" for x in ("gate", "up")))
        native[f"{n}.mlp.linear_fc2", "input.0"] = out[f"{a}.mlp.down_proj:input.0"]
        native[f"{n}.mlp.linear_fc2", "output.0"] = out[f"{a}.mlp.down_proj:output.0"]
        native[n, "output.0"] = out[f"{a}:output.0"]
    native["decoder.final_layernorm", "output.0"] = out["norm:output.0"]
    native["output_layer", "output.0"] = pad_vocabulary(out["lm_head:output.0"], model.padded_vocab, axis=-1)
    return native


def as_megatron_te(out: Tensors, model: Tiny) -> Native:
    """Return Megatron's tensors under the TransformerEngine spec, whose norm modules pass the residual through."""
    native = as_megatron(out, model)
    for i in range(model.layers):
        stream = out["embed_tokens:output.0"] if i == 0 else out[f"layers.{i - 1}:output.0"]
        native[f"decoder.layers.{i}.input_layernorm", "output.0"] = stream
        native[f"decoder.layers.{i}.pre_mlp_layernorm", "output.0"] = out[f"layers.{i}.residual"]
    return native


def as_transformers(out: Tensors, model: Tiny) -> Native:
    """Return one sequence's tensors under Hugging Face's names; rope is a function there and leaves none."""
    hidden = (".rotary_emb", ".residual")
    kept = {label: value for label, value in out.items() if not any(part in label for part in hidden)}
    prefix = {label: "" if label.startswith("lm_head") else "model." for label in kept}
    return {(prefix[label] + label.rpartition(":")[0], label.rpartition(":")[2]): v for label, v in kept.items()}


LAYOUTS = {
    "vllm": ("vllm", as_vllm),
    "megatron": ("megatron", as_megatron),
    "megatron-te": ("megatron", as_megatron_te),
    "transformers": ("transformers", as_transformers),
}


def _flat(values: np.ndarray) -> np.ndarray:
    return values.reshape(len(values), -1)


def _cat(out: Tensors, *labels: str) -> np.ndarray:
    return np.concatenate([_flat(out[label]) for label in labels], axis=-1)


# -- weight sketches and modules --------------------------------------------------------------------------------------


def native_weights(weights: Tensors, model: Tiny, layout: str) -> Tensors:
    """Return parameters fused and named as an engine holds them."""
    if layout == "transformers":
        return {("" if n.startswith("lm_head") else "model.") + n: w for n, w in weights.items()}
    megatron = layout.startswith("megatron")
    fused: Tensors = {}
    for name, value in weights.items():
        if ".k_proj" in name or ".v_proj" in name or ".up_proj" in name:
            continue
        if ".q_proj" in name:
            parts = [weights[name.replace("q_proj", f"{x}_proj")] for x in "qkv"]
            heads = (model.heads, model.kv_heads, model.head_dim)
            value = fuse_qkv_groups(*parts, *heads, axis=0) if megatron else np.concatenate(parts)
        if ".gate_proj" in name:
            value = np.concatenate([value, weights[name.replace("gate", "up")]])
        if megatron and name in ("embed_tokens.weight", "lm_head.weight"):
            value = pad_vocabulary(value, model.padded_vocab)
        fused[_native_name(name, layout)] = value
    return fused


_VLLM_NAMES = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
_MEGATRON_NAMES = {
    "embed_tokens.weight": "embedding.word_embeddings.weight",
    "lm_head.weight": "output_layer.weight",
    "layers.": "decoder.layers.",
    ".self_attn.q_proj": ".self_attention.linear_qkv",
    ".self_attn.q_norm": ".self_attention.q_layernorm",
    ".self_attn.k_norm": ".self_attention.k_layernorm",
    ".self_attn.o_proj": ".self_attention.linear_proj",
    ".post_attention_layernorm": ".pre_mlp_layernorm",
    ".mlp.gate_proj": ".mlp.linear_fc1",
    ".mlp.down_proj": ".mlp.linear_fc2",
}
_TE_NAMES = {
    ".input_layernorm.weight": ".self_attention.linear_qkv.layer_norm_weight",
    ".pre_mlp_layernorm.weight": ".mlp.linear_fc1.layer_norm_weight",
}


def _native_name(name: str, layout: str) -> str:
    if layout == "vllm":
        for old, new in _VLLM_NAMES.items():
            name = name.replace(old, new)
        return name if name.startswith("lm_head") else f"model.{name}"
    if name == "norm.weight":
        return "decoder.final_layernorm.weight"
    for old, new in (_MEGATRON_NAMES | (_TE_NAMES if layout == "megatron-te" else {})).items():
        name = name.replace(old, new)
    return name


def sketch(name: str, weight: np.ndarray, dtype: str) -> WeightSketch:
    """Return a parameter's sketch, as a capture would store it."""
    weight = round_to(weight, dtype).astype(np.float64)
    if weight.ndim == 1:
        return WeightSketch(name, weight.shape, dtype, weight[:, None])
    rows = sketch_rows(weight)
    square = weight.shape[0] == weight.shape[1]
    quad = float(column_vector(len(weight)) @ rows[:, 0]) if square else float("nan")
    return WeightSketch(name, weight.shape, dtype, rows, quad)


def modules_of(native: Iterable[tuple[str, str]], layout: str, model: Tiny) -> list[ModuleInfo]:
    modules = []
    for order, path in enumerate(dict.fromkeys(module for module, _ in native)):
        info: dict[str, Any] = {"eps": model.eps} if "norm" in path else {}
        cls = "Module"
        if layout == "megatron-te" and path.endswith((".input_layernorm", ".pre_mlp_layernorm")):
            cls, info = "IdentityOp", {}
        modules.append(ModuleInfo(path, cls, order, info))
    return modules


# -- writing ----------------------------------------------------------------------------------------------------------


@dataclass
class Scenario:
    """One side of a comparison: what is run, how it is laid out and batched, and what is wrong with it."""

    layout: str = "vllm"
    stage: str = "rollout"
    dtype: str = "float32"
    model: Tiny = field(default_factory=Tiny)
    weights_seed: int = 0
    noise: int | None = None
    faults: dict[str, Fault] = field(default_factory=dict)
    change_weights: Callable[[Tensors], None] | None = None
    sketched: Callable[[Tensors], None] | None = None
    weights_dtype: str = ""
    prompts_only: bool = False
    decode: bool = True
    complete: bool = True
    drop: tuple[str, ...] = ()
    cached: dict[int, int] = field(default_factory=dict)
    manifest: dict[str, Any] = field(default_factory=dict)
    logprob_shift: int = 0
    engine_logprobs: bool = True
    block_bytes: int = 8 << 20


def prompts(count: int = 4, vocab: int = 50, seed: int = 3) -> list[tuple[str, np.ndarray, int]]:
    """Return (uid, all token ids, prompt length) of ``count`` sequences."""
    rng = np.random.default_rng(seed)
    sizes = [(int(rng.integers(3, 9)), int(rng.integers(2, 7))) for _ in range(count)]
    return [(f"p{n}.s0", rng.integers(0, vocab, p + r).astype(np.int64), p) for n, (p, r) in enumerate(sizes)]


def write_dump(path: Path, scenario: Scenario, sequences: list[tuple[str, np.ndarray, int]] | None = None) -> Path:
    """Write the dump of a scenario to ``path`` and return it.

    A vLLM layout runs all prompts in one call and then one call per decode step, last tokens not fed; other layouts run
    micro-batches of two whole sequences. Of sequence n the first ``cached[n]`` rows did not run.
    """
    sequences = prompts(vocab=scenario.model.vocab) if sequences is None else sequences
    weights = make_weights(scenario.model, scenario.weights_seed)
    if scenario.change_weights:
        scenario.change_weights(weights)
    engine, convert = LAYOUTS[scenario.layout]
    runs = []
    for number, (_, ids, _) in enumerate(sequences):
        kernels = {"noise": scenario.noise, "sequence": number, "faults": scenario.faults}
        forward = Forward(scenario.model, weights, scenario.dtype, **kernels)
        runs.append(forward.run(ids))
    native = [convert(run, scenario.model) for run in runs]
    writer = DumpWriter(
        path / scenario.stage / "step0" / "rank0.h5", manifest_of(scenario, engine), block_bytes=scenario.block_bytes
    )
    for number, (uid, ids, prompt_len) in enumerate(sequences):
        known = {"prompt_len": prompt_len, "length": len(ids), "tokens": ids, "cached": scenario.cached.get(number, 0)}
        writer.add_sequence(Sequence(0, uid, **known))
    for module in modules_of(native[0], scenario.layout, scenario.model):
        writer.add_module(module)
    sketched = {name: value.copy() for name, value in weights.items()}
    if scenario.sketched:
        scenario.sketched(sketched)
    for name, value in native_weights(sketched, scenario.model, scenario.layout).items():
        writer.add_weight(sketch(name, value, scenario.weights_dtype or scenario.dtype))
    for number, cells in enumerate(calls_of(scenario, sequences)):
        cells = [(n, p) for n, p in cells if p >= scenario.cached.get(n, 0)]
        _append_call(writer, scenario, sequences, native, cells, number)
    writer.add_tokens(token_table(scenario, sequences, runs))
    if scenario.complete:
        writer.close()
    else:
        writer.flush()
        writer.abandon()
    return path


def opened(path: Path, scenario: Scenario, sequences: list[tuple[str, np.ndarray, int]] | None = None) -> Dump:
    """Write a scenario's dump and open it."""
    return open_dump(write_dump(path, scenario, sequences))


def calls_of(scenario: Scenario, sequences: list[tuple[str, np.ndarray, int]]) -> list[list[tuple[int, int]]]:
    """Return per call the (sequence, position) of its rows."""
    if LAYOUTS[scenario.layout][0] != "vllm":
        whole = [[(n, p) for p in range(size)] for n, size in enumerate(_fed(scenario, sequences))]
        return [list(chain(*whole[start : start + 2])) for start in range(0, len(whole), 2)]
    calls = [[(n, p) for n, (_, _, prompt_len) in enumerate(sequences) for p in range(prompt_len)]]
    longest = max(len(ids) - prompt_len for _, ids, prompt_len in sequences)
    if scenario.prompts_only or not scenario.decode:
        return calls
    for step in range(longest - 1):
        alive = [(n, p + step) for n, (_, ids, p) in enumerate(sequences) if p + step < len(ids) - 1]
        calls.append(alive[::-1])
    return calls


def _fed(scenario: Scenario, sequences: list[tuple[str, np.ndarray, int]]) -> list[int]:
    return [prompt_len if scenario.prompts_only else len(ids) for _, ids, prompt_len in sequences]


def _append_call(
    writer: DumpWriter,
    scenario: Scenario,
    sequences: list[tuple[str, np.ndarray, int]],
    native: list[Native],
    cells: list[tuple[int, int]],
    call: int,
) -> None:
    if not cells:
        return
    rows = np.array([(n, p, sequences[n][1][p], call) for n, p in cells], ROW)
    segment = RowSegment(rows)
    for key in native[0]:
        if any(part in f"{key[0]}:{key[1]}" for part in scenario.drop):
            continue
        values = np.stack([native[n][key][p] for n, p in cells])
        writer.append(*key, carrier(values, scenario.dtype), scenario.dtype, segment)


def carrier(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return values in the numpy carrier of a stored dtype."""
    if dtype == "bfloat16":
        return (round_to(values, dtype).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype)


def token_table(scenario: Scenario, sequences: list[tuple[str, np.ndarray, int]], runs: list[Tensors]) -> np.ndarray:
    records: list[tuple[Any, ...]] = []
    for number, (_, ids, prompt_len) in enumerate(sequences):
        own = np.full(len(ids), np.nan)
        own[1:] = logprobs_from_logits(runs[number]["lm_head:output.0"][:-1].astype(np.float32), ids[1:])
        engine = np.roll(own, scenario.logprob_shift) if scenario.engine_logprobs else np.full(len(ids), np.nan)
        for position, token in enumerate(ids):
            response = position >= prompt_len
            shown = engine[position] if response else np.nan
            records.append((number, position, token, response, shown, own[position]))
    return np.array(records, TOKEN)


def manifest_of(scenario: Scenario, engine: str) -> dict[str, Any]:
    base: dict[str, Any] = {
        "schema": 1,
        "probe": "0",
        "stage": scenario.stage,
        "engine": {"name": engine, "version": "1.0"},
        "model": {"path": "", "architecture": "Tiny", "config": scenario.model.config()},
        "dtype": scenario.dtype,
        "device": "cpu",
        "logprobs_mode": "raw_logprobs",
        "sampling": {"temperature": 1.0, "top_p": 1.0},
        "prompts_only": scenario.prompts_only,
        "task": "tensor",
        "layout": {},
        "backends": {"attention": "numpy"},
        "environment": {"python": "3", "torch": "2"},
    }
    return base | scenario.manifest


def actor(layout: str = "megatron", **changes: Any) -> Scenario:
    """Return the scenario of an actor that recomputes whole sequences and reports no log-probs of its own."""
    return replace(Scenario(layout=layout, stage="actor", engine_logprobs=False), **changes)
