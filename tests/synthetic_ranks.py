"""Synthetic dumps of several ranks: the tiny model's tensors cut as vLLM's and Megatron's tensor parallelism cut them.

No engine runs here. Which tensor is cut how is written down once more, from the engines' own layouts, and not taken
from the code under test: query heads by rank, key/value heads by rank or copied where there are fewer heads than ranks,
[gate | up] of each rank's part, the vocabulary padded and cut, inputs of row-parallel linears cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from synthetic_dumps import (
    LAYOUTS,
    Scenario,
    calls_of,
    carrier,
    manifest_of,
    modules_of,
    native_weights,
    prompts,
    sketch,
    token_table,
)
from synthetic_model import Forward, Tiny, make_weights

from probe.layout import pad_vocabulary
from probe.store.checksums import row_checksums
from probe.store.dtypes import round_to
from probe.store.schema import AXES, CHECKSUM, COLUMNS, REPLICATED, ROW, WHOLE, RowSegment, Sequence, WeightSketch
from probe.store.sketches import column_vector
from probe.store.writer import DumpWriter

Cut = Callable[[np.ndarray, Tiny, int, int], np.ndarray]
"""(whole array, model, number of ranks, rank) -> the rank's part of its last axis."""


def _even(values: np.ndarray, model: Tiny, tp: int, rank: int) -> np.ndarray:
    return np.split(values, tp, axis=-1)[rank]


def _heads(values: np.ndarray, model: Tiny, tp: int, rank: int) -> np.ndarray:
    """Cut key/value heads, [..., heads, dim] or flat; ranks share a head where there are fewer heads."""
    shaped = values.reshape(len(values), -1, model.head_dim)
    first = rank * shaped.shape[1] // tp
    mine = shaped[:, first : first + max(1, shaped.shape[1] // tp)]
    return mine if values.ndim == 3 else mine.reshape(len(values), -1)


def _qkv(values: np.ndarray, model: Tiny, tp: int, rank: int) -> np.ndarray:
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    parts = np.split(values, (q, q + kv), axis=-1)
    return np.concatenate([_even(parts[0], model, tp, rank), *(_heads(p, model, tp, rank) for p in parts[1:])], -1)


def _halves(values: np.ndarray, model: Tiny, tp: int, rank: int) -> np.ndarray:
    return np.concatenate([_even(half, model, tp, rank) for half in np.split(values, 2, axis=-1)], -1)


CUTS: dict[str, dict[str, Cut]] = {
    "vllm": {
        "qkv_proj:output.0": _qkv,
        "q_norm:output.0": _heads,
        "k_norm:output.0": _heads,
        "rotary_emb:output.0": _even,
        "rotary_emb:output.1": _heads,
        "attn:output.0": _even,
        "gate_up_proj:output.0": _halves,
        "down_proj:input.0": _even,
    },
    "megatron": {
        "linear_qkv:output.0": _even,
        "q_layernorm:output.0": _heads,
        "k_layernorm:output.0": _heads,
        "core_attention:input.0": _heads,
        "core_attention:input.1": _heads,
        "core_attention:output.0": _even,
        "linear_fc1:output.0": _halves,
        "linear_fc2:input.0": _even,
        "output_layer:output.0": _even,
    },
}
WEIGHT_CUTS: dict[str, dict[str, tuple[int, Cut]]] = {
    "vllm": {
        "embed_tokens.": (0, _even),
        "lm_head.": (0, _even),
        "qkv_proj.": (0, _qkv),
        "o_proj.weight": (1, _even),
        "gate_up_proj.": (0, _halves),
        "down_proj.weight": (1, _even),
    },
    "megatron": {
        "word_embeddings.": (0, _even),
        "output_layer.": (0, _even),
        "linear_qkv.weight": (0, _even),
        "linear_qkv.bias": (0, _even),
        "linear_proj.weight": (1, _even),
        "linear_fc1.weight": (0, _halves),
        "linear_fc2.weight": (1, _even),
    },
}


@dataclass(frozen=True)
class Ranks:
    """How a scenario is spread over ranks.

    ``sp``: sequence parallelism; ``lost``: ranks without a file; ``corrupt``: rank, and end of the label, of a copy
    that is off by a bit; ``shuffle``: seed of the order in which each rank stores its rows.
    """

    tp: int = 2
    sp: bool = False
    lost: tuple[int, ...] = ()
    corrupt: tuple[int, str] | None = None
    driver: bool = True
    shuffle: int | None = None


def write_ranks(
    path: Path, scenario: Scenario, ranks: Ranks, sequences: list[tuple[str, np.ndarray, int]] | None = None
) -> Path:
    """Write one file per tensor-parallel rank, and a driver's, and return the folder."""
    sequences = prompts(vocab=scenario.model.vocab) if sequences is None else sequences
    weights = make_weights(scenario.model, scenario.weights_seed)
    engine, convert = LAYOUTS[scenario.layout]
    runs = [Forward(scenario.model, weights, scenario.dtype, noise=scenario.noise).run(ids) for _, ids, _ in sequences]
    native = [convert(run, scenario.model) for run in runs]
    topology = {**dict.fromkeys(AXES, 1), "tp": ranks.tp, "vpp": 1, "sp": ranks.sp}
    base = {**manifest_of(scenario, engine), "topology": topology, "world_size": ranks.tp, "driver": ranks.driver}
    folder = path / scenario.stage / "step0"
    for rank in set(range(ranks.tp)) - set(ranks.lost):
        at = {**dict.fromkeys(AXES, 0), "tp": rank}
        writer = DumpWriter(folder / f"rank{rank}.h5", {**base, "coordinates": at}, block_bytes=scenario.block_bytes)
        _register(writer, sequences)
        for module in modules_of(native[0], scenario.layout, scenario.model):
            writer.add_module(module)
        for name, value in native_weights(weights, scenario.model, scenario.layout).items():
            writer.add_weight(weight_shard(name, value, scenario, ranks.tp, rank))
        for call, cells in enumerate(calls_of(scenario, sequences)):
            _append(writer, scenario, ranks, rank, (sequences, native, cells, call))
        writer.close()
    if ranks.driver:
        driver = DumpWriter(folder / "driver.h5", base)
        _register(driver, sequences)
        driver.add_tokens(token_table(scenario, sequences, runs))
        driver.close()
    return path


def _register(writer: DumpWriter, sequences: list[tuple[str, np.ndarray, int]]) -> None:
    for uid, ids, prompt_len in sequences:
        writer.add_sequence(Sequence(0, uid, prompt_len=prompt_len, length=len(ids)))


def _append(writer: DumpWriter, scenario: Scenario, ranks: Ranks, rank: int, run) -> None:
    """Append one call's tensors as a rank holds them."""
    sequences, native, cells, call = run
    if not cells:
        return
    rows = np.array([(n, p, sequences[n][1][p], call) for n, p in cells], ROW)
    whole, own = RowSegment(rows), RowSegment(np.array_split(rows, ranks.tp)[rank])
    for key in native[0]:
        label = ":".join(key)
        values = np.stack([native[n][key][p] for n, p in cells])
        cut = _cut_of(label, CUTS[LAYOUTS[scenario.layout][0]])
        segment, shard, dtype = whole, COLUMNS if cut else REPLICATED, scenario.dtype
        if cut:
            values = cut(values, scenario.model, ranks.tp, rank)
        elif ranks.sp:
            values, segment, shard = np.array_split(values, ranks.tp)[rank], own, WHOLE
        if ranks.shuffle is not None:
            order = np.random.default_rng((ranks.shuffle, rank, call, len(label))).permutation(len(values))
            values, segment = values[order], RowSegment(segment.rows[order])
        bits = carrier(values, scenario.dtype)
        if ranks.corrupt and ranks.corrupt[0] == rank and label.endswith(ranks.corrupt[1]):
            bits.view(np.uint8)[-1, ..., 0] ^= 1
        if shard == REPLICATED and rank:
            bits, shard, dtype = row_checksums(bits), CHECKSUM, "uint64"
        writer.append(*key, bits, dtype, segment, shard=shard)


def _cut_of(label: str, cuts: dict[str, Cut]) -> Cut | None:
    return next((cut for suffix, cut in cuts.items() if label.endswith(f".{suffix}") or label == suffix), None)


def weight_shard(name: str, weight: np.ndarray, scenario: Scenario, tp: int, rank: int) -> WeightSketch:
    """Return the sketch of a rank's part of a parameter."""
    dtype = scenario.weights_dtype or scenario.dtype
    weight = round_to(weight, dtype).astype(np.float64)
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
        weight = pad_vocabulary(weight, scenario.model.padded_vocab)
    found = next((rule for part, rule in WEIGHT_CUTS[LAYOUTS[scenario.layout][0]].items() if part in name), None)
    if found is None:
        return sketch(name, weight, dtype)
    axis, cut = found
    if axis == 0:
        part = sketch(
            name, cut(np.atleast_2d(weight.T), scenario.model, tp, rank).T.reshape(-1, *weight.shape[1:]), dtype
        )
        return WeightSketch(name, part.shape, dtype, part.rows, axis=0)
    r = column_vector(weight.shape[1])
    mine = cut(np.arange(weight.shape[1])[None], scenario.model, tp, rank)[0]
    part = weight[:, mine]
    rows = np.stack([part @ r[mine], part.sum(1), (part**2).sum(1)], axis=1)
    return WeightSketch(name, part.shape, dtype, rows, axis=1)
