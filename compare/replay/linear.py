"""Linear layers: y = x W' + b, and what may be wrong with W, b, the sum over tensor-parallel ranks, or y."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from probe.compare.replay.bands import FINE_DTYPES, LINEAR
from probe.compare.replay.base import Context, Hypothesis, Recipe, Unreplayable
from probe.compare.replay.faults import (
    CHANNELS,
    FEW_ONLY,
    OFFSET,
    OUTPUT,
    PERMUTED,
    ROUNDINGS,
    WEIGHT_CASTS,
    permuted_columns,
)
from probe.compare.replay.norm import INPUTS as NORMS
from probe.compare.replay.norm import norm_outputs
from probe.compare.replay.places import ATTENTION, MLP, form_of, kind_of, module_of
from probe.metrics import coarser_dtype
from probe.store.dtypes import round_to

CHUNK = 1 << 21
"""Elements of a weight that are held at once: 16 MiB as float64."""

INPUT_NORM, POST_NORM = "layers.{i}.input_layernorm:output.0", "layers.{i}.post_attention_layernorm:output.0"
PRE_NORM = "layers.{i}.pre_feedforward_layernorm:output.0"

EXPERT_MODULES = (f"{MLP}.experts.{{e}}", f"{MLP}.shared_expert")
INPUTS: dict[str, tuple[str, ...]] = {
    **{f"{ATTENTION}.{name}": (INPUT_NORM,) for name in ("q_proj", "k_proj", "v_proj")},
    **{f"{ATTENTION}.{name}": (INPUT_NORM,) for name in ("q_a_proj", "kv_a_proj_with_mqa")},
    f"{ATTENTION}.q_b_proj": (f"{ATTENTION}.q_a_layernorm:output.0",),
    f"{ATTENTION}.kv_b_proj": (f"{ATTENTION}.kv_a_layernorm:output.0",),
    f"{ATTENTION}.o_proj": (f"{ATTENTION}.o_proj:input.0",),
    **{f"{MLP}.{name}": (PRE_NORM, POST_NORM) for name in ("gate_proj", "up_proj")},
    f"{MLP}.down_proj": (f"{MLP}.down_proj:input.0",),
    # mixture of experts: compare/replay/experts.py has the recipes of these
    **{f"{MLP}.{name}": (PRE_NORM, POST_NORM) for name in ("router", "shared_expert_gate")},
    **{f"{block}.{name}_proj": (PRE_NORM, POST_NORM) for block in EXPERT_MODULES for name in ("gate", "up")},
    **{f"{block}.down_proj": (f"{block}.down_proj:input.0",) for block in EXPERT_MODULES},
}
"""Linear module -> the tensors that may be its input: the first that was stored. Gemma's MLP has a norm of its own."""

TWINS = {"k_proj": "v_proj", "v_proj": "k_proj", "gate_proj": "up_proj", "up_proj": "gate_proj"}
SWAPS = ("kv-swapped", "kv-swapped", "gate-up-swapped", "gate-up-swapped")
ROW_PARALLEL = ("o_proj", "down_proj")
"""Linears whose input features lie on tensor-parallel ranks, so that their outputs are summed over the ranks."""
TP_SIZES = (2, 4, 8)


def input_of(context: Context, labels: Iterable[str]) -> np.ndarray:
    """Return the first of these tensors that was stored, at the context's rows."""
    labels = tuple(labels)
    for label in labels:
        if context.has(label):
            return context.value(label)
    raise Unreplayable(f"its input {context.name(labels[-1])} was not stored")


def product(context: Context, x: np.ndarray, module: str, rows: int | None = None) -> np.ndarray:
    """Return x W' float64 [n, out] in chunks of output rows, under the assumptions about W; ``rows``: only the first.

    Assumptions: ``weight``, a key of :data:`WEIGHT_CASTS`; ``transposed``; ``inputs``, a slice of the input features;
    ``partial``, (number of partial sums, dtype): the sums of equal parts of the input features are added in that dtype;
    ``block``: (input features of one partial sum, dtype) likewise; ``cast``: input and weight are rounded to it first.
    """
    name = f"{module}.weight"
    shape = context.parameter_shape(name)
    if shape is None:
        raise Unreplayable(f"the weights at hand hold no {context.name(name)}")
    if len(shape) != 2 or shape[1] != x.shape[1]:
        raise Unreplayable(
            f"{context.name(name)} of shape {list(shape)} does not fit an input of {x.shape[1]} features"
        )
    outputs = min(shape[0], rows or shape[0])
    result = np.empty((len(x), outputs))
    start = 0
    for chunk in weight_chunks(context, name, (outputs, shape[1])):
        result[:, start : start + len(chunk)] = _multiply(context, x, chunk)
        start += len(chunk)
    return result


def weight_chunks(context: Context, name: str, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """Yield a weight some output rows at a time, under the context's assumptions about it."""
    cast = WEIGHT_CASTS.get(context.assume("cast", context.assume("weight", "")))
    if context.assume("transposed", False):
        yield context.parameter(name).T
        return
    peak = None
    step = max(1, CHUNK // shape[1])
    if cast is not None and cast.scaled:
        peak = max(float(np.abs(part).max(initial=0.0)) for part in _parts(context, name, shape[0], step))
    for part in _parts(context, name, shape[0], step):
        yield part if cast is None else cast.apply(part, peak)


def _parts(context: Context, name: str, rows: int, step: int) -> Iterator[np.ndarray]:
    for start in range(0, rows, step):
        yield context.parameter_rows(name, start, min(start + step, rows))


def _multiply(context: Context, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    inputs = context.assume("inputs", None)
    if inputs is not None:
        first, stop = (int(share * x.shape[1]) for share in inputs)
        return np.asarray(x[:, first:stop] @ weight[:, first:stop].T)
    if context.assume("cast", ""):
        x = ROUNDINGS[context.assume("cast", "")](x)
    count, dtype = context.assume("partial", (1, ""))
    if "block" in context.assumptions:
        features, dtype = context.assumptions["block"]
        count = max(1, x.shape[1] // features)
    if count == 1:
        return np.asarray(x @ weight.T)
    total = np.zeros((len(x), len(weight)))
    for columns in np.array_split(np.arange(x.shape[1]), count):
        total = round_to(total + round_to(x[:, columns] @ weight[:, columns].T, dtype), dtype).astype(np.float64)
    return total


def linear(context: Context, x: np.ndarray, module: str) -> np.ndarray:
    """Return x W' + b under the context's assumptions, rounded at the end only."""
    return next(linear_readings(context, x, module))


def linear_readings(context: Context, x: np.ndarray, module: str) -> Iterator[np.ndarray]:
    """Yield x W' + b under the context's assumptions (``bias`` and ``product`` are factors): rounded at the end only,
    and before the bias too, as Megatron does."""
    result = context.assume("product", 1.0) * product(context, x, module)
    bias = context.optional(f"{module}.bias")
    if bias is None:
        yield result
        return
    bias = context.assume("bias", 1.0) * bias
    yield result + bias
    yield context.rounded(result) + bias


def compute(context: Context) -> Iterable[np.ndarray]:
    """Yield the outputs of a linear layer.

    Assumptions: ``swap``, its twin's weight; ``shuffled``, the parts of its input in reverse order.
    """
    module = module_of(context)
    if context.assume("swap", False):
        module = module.removesuffix(kind_of(context)) + TWINS[kind_of(context)]
    for x in inputs_of(context):
        if context.assume("shuffled", None):
            x = np.concatenate(np.array_split(x, context.assume("shuffled", 1), axis=1)[::-1], axis=1)
        yield from linear_readings(context, x, module)
        if _held_finer(context, module) and not context.assume("weight", ""):
            yield from linear_readings(context.assuming({"weight": context.dtype}), context.rounded(x), module)


def inputs_of(context: Context) -> Iterator[np.ndarray]:
    """Yield the linear's stored input; where an engine fuses the norm before it, that norm, replayed and rounded."""
    labels = INPUTS[form_of(context)]
    stored = [label for label in labels if context.has(label)]
    fused = [label.rpartition(":")[0] for label in labels if label.rpartition(":")[0] in NORMS]
    if stored or not fused:
        yield input_of(context, labels)
        return
    for normed in norm_outputs(context, fused[-1]):
        yield context.rounded(normed)


def _held_finer(context: Context, module: str) -> bool:
    """Tell whether a weight is cast where it is used (autocast, FSDP's mixed precision): both readings are right."""
    parameters, name = context.parameters, context.name(f"{module}.weight")
    return parameters is not None and coarser_dtype(parameters.dtype(name), context.dtype) != parameters.dtype(name)


def reduction(context: Context) -> int:
    """Return the input features of the linear: the length of its dot products."""
    shape = context.parameter_shape(f"{module_of(context)}.weight")
    return shape[1] if shape else 1


def size_of(context: Context, computed: np.ndarray) -> np.ndarray:
    """Return the magnitudes that errors are relative to: in float32 what the accumulator saw, where that is larger.

    The terms x_k w_k of a dot product may cancel; the accumulator's error goes with their root sum of squares, not with
    the result. It is taken as T_row T_column / T_all, each exact: one more pass over the weight, in float32 only.
    """
    if context.dtype not in FINE_DTYPES:
        return computed
    name, x = f"{module_of(context)}.weight", next(inputs_of(context))
    shape = context.parameter_shape(name)
    if shape is None:
        return computed
    squares, means = np.zeros(shape[1]), np.square(np.nan_to_num(x, posinf=0.0, neginf=0.0)).mean(axis=0)
    columns = []
    for chunk in weight_chunks(context.assuming({"weight": "", "transposed": False}), name, shape):
        square = chunk * chunk
        squares += square.sum(axis=0)
        columns.append(square @ means)
    column, row = np.concatenate(columns), (x * x) @ squares
    terms = row[:, None] * column / max(float(column.sum()), 1e-300)
    return np.sqrt(np.maximum(computed * computed, terms))


def sum_over_ranks(context: Context) -> float:
    """Return how many roundings a sum over tensor-parallel ranks leaves beside one.

    Each of n partial sums is rounded, together one rounding of the result, and a ring adds them one after the other:
    the k-th addition rounds a sum of size sqrt(k / n), so that sqrt(1 + (n + 1) / 2) roundings are expected.
    """
    ranks = int((context.side.dump.manifest.get("topology") or {}).get("tp") or 1)
    summed = ranks > 1 and kind_of(context) in ROW_PARALLEL and context.dtype not in FINE_DTYPES
    return math.sqrt(1 + (ranks + 1) / 2) if summed else 1.0


# -- hypotheses -------------------------------------------------------------------------------------------------------


def _is(*names: str) -> Callable[[Context], bool]:
    return lambda context: kind_of(context) in names


def _is_square(context: Context) -> bool:
    shape = context.parameter_shape(f"{module_of(context)}.weight")
    return shape is not None and shape[0] == shape[1]


def _is_finer(context: Context) -> bool:
    return context.dtype in FINE_DTYPES


def _has_bias(context: Context) -> bool:
    return context.parameter_shape(f"{module_of(context)}.bias") is not None


def _scaled_weight(context: Context, stored: np.ndarray) -> dict[str, float] | None:
    """Fit s in y = s x W' + b."""
    module = module_of(context)
    bias = context.optional(f"{module}.bias")
    if bias is None:
        return None
    plain = product(context, next(inputs_of(context)), module)
    factor = float(np.vdot(plain, stored - bias) / max(float(np.vdot(plain, plain)), 1e-300))
    return {"product": factor, "value": factor}


def _permuted_qkv(context: Context, stored: np.ndarray) -> dict[str, np.ndarray] | None:
    """Find each stored feature among those of q, k and v."""
    module = module_of(context).removesuffix(kind_of(context))
    x = next(inputs_of(context))
    found = [linear(context, x, f"{module}{name}") for name in ("q_proj", "k_proj", "v_proj")]
    chosen = permuted_columns(stored, np.concatenate(found, axis=1))
    return None if chosen is None else {"replaced": chosen}


FOLDS = 4
STALE_MARGIN = 0.02
"""Share of the error that another weight explains on rows it was not fitted to: rounding gives 0.00 +- 0.01 over the
256 rows and 64 or more features of a replay."""


def _other_weight(context: Context, stored: np.ndarray) -> dict[str, Any] | None:
    """Tell whether the error is a linear function of the input, as that of another weight is and rounding is not.

    Each fourth of the rows is predicted from the others by kernel ridge regression (the minimum-norm solution, ridge
    1e-3 of the mean diagonal); ``value`` is the share of the error's energy that the prediction takes away.
    """
    if len(stored) < 4 * FOLDS:
        return None
    x = next(inputs_of(context))
    error = stored - context.plain()
    gram = x @ x.T
    ridge = 1e-3 * np.trace(gram) / len(gram)
    predicted = np.empty_like(error)
    folds = np.arange(len(error)) % FOLDS
    for fold in range(FOLDS):
        known, asked = folds != fold, folds == fold
        solved = np.linalg.solve(gram[np.ix_(known, known)] + ridge * np.eye(int(known.sum())), error[known])
        predicted[asked] = gram[np.ix_(asked, known)] @ solved
    share = 1 - float(np.sum((error - predicted) ** 2)) / max(float(np.sum(error**2)), 1e-300)
    return {"replaced": context.plain() + predicted, "value": share} if share > STALE_MARGIN else None


FAULTS = (
    *(
        Hypothesis(cause, {"swap": True}, f"its weight is that of {twin}", when=_is(name))
        for (name, twin), cause in zip(TWINS.items(), SWAPS)
    ),
    Hypothesis("transposed-weight", {"transposed": True}, "its weight is transposed", when=_is_square),
    Hypothesis("wrong-bias", {"bias": 0.0}, "its bias is missing", when=_has_bias),
    Hypothesis("wrong-bias", {"bias": 2.0}, "its bias is added twice", when=_has_bias),
    *(
        Hypothesis(
            "missing-all-reduce",
            {"inputs": (rank / size, (rank + 1) / size)},
            f"it is the partial sum of rank {rank} of {size} alone",
            when=_is(*ROW_PARALLEL),
        )
        for size in TP_SIZES
        for rank in range(size)
    ),
    Hypothesis(
        "duplicated-all-reduce",
        {"product": 2.0},
        "its partial sums are added twice over",
        when=_is(*ROW_PARALLEL),
    ),
    Hypothesis("tp-shards-swapped", {"shuffled": 2}, "the halves of its input are exchanged", when=_is(*ROW_PARALLEL)),
    *(Hypothesis("weight-precision", {"weight": key}, cast.text, factor=2.0) for key, cast in WEIGHT_CASTS.items()),
    *(
        Hypothesis(
            "partial-sums",
            {"partial": (count, "bfloat16")},
            f"{count} partial sums are added in bfloat16",
            typical=True,
        )
        for count in (2, 4, 8)
    ),
    *(
        Hypothesis(
            "partial-sums",
            {"block": (features, "bfloat16")},
            f"partial sums of {features} inputs are added in bfloat16",
            typical=True,
        )
        for features in (16, 32, 64, 128, 256)
    ),
    *(
        Hypothesis(
            "precision", {"cast": name}, f"its input and weight are rounded to {name}", factor=2.0, when=_is_finer
        )
        for name in ROUNDINGS
    ),
    Hypothesis("scaled-weight", {}, "its weight is scaled by {value:.6g}, its bias is not", solve=_scaled_weight),
    *OUTPUT,
    *CHANNELS,
    Hypothesis(
        "permuted-qkv",
        {},
        "its features are those of q, k and v in another order",
        solve=_permuted_qkv,
        when=_is("q_proj", "k_proj", "v_proj"),
    ),
    PERMUTED,
    OFFSET,
    *FEW_ONLY,
    Hypothesis(
        "stale-weights",
        {},
        "another weight explains a share {value:.2f} of its error on rows that were not fitted",
        solve=_other_weight,
        factor=1.0,
    ),
)

RECIPES = tuple(
    Recipe(
        *("linear", f"{module}:output.0", compute, *LINEAR, FAULTS),
        length=reduction,
        steps=sum_over_ranks,
        size=size_of,
    )
    for module in INPUTS
)
