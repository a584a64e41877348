"""Experts in float64: linears and activations, the weighted sum of the experts used, the shared expert, the block.

Engines that run all experts in one kernel give only the sum: it is recomputed from the experts' weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

from probe.compare.judge import ROUNDING
from probe.compare.names.common import (
    EXPERT,
    EXPERT_INPUT,
    EXPERTS,
    MLP,
    ROUTER,
    ROUTER_IDS,
    ROUTER_WEIGHTS,
    SHARED,
    SHARED_GATE,
    SHARED_INPUT,
    SHARED_OUTPUT,
)
from probe.compare.replay.bands import ACCUMULATION, ACTIVATION, LINEAR, ROUTED, rounding
from probe.compare.replay.base import Context, Hypothesis, Recipe
from probe.compare.replay.faults import GENERIC, OFFSET
from probe.compare.replay.linear import FAULTS, POST_NORM, PRE_NORM, compute, input_of, inputs_of, linear, reduction
from probe.compare.replay.places import module_of
from probe.compare.replay.residual import ACTIVATIONS, activation_of
from probe.compare.replay.router import choice_of, is_moe, weights_of
from probe.store.dtypes import round_to

BLOCK = "layers.{i}.mlp"
NORMS = (PRE_NORM, POST_NORM)
SHARED_EXPERT = f"{BLOCK}.shared_expert"
LINEARS = (*EXPERT, *SHARED, SHARED_OUTPUT)
PAIRS = {EXPERT_INPUT: EXPERT[:2], SHARED_INPUT: SHARED}
"""Input of a down projection -> the gate and up projections that make it."""
SIZE = "expected size of the experts' rounding"
SHARING = frozenset({"qwen2_moe", "deepseek_v2", "deepseek_v3", "glm4_moe", "dots1", "kimi_k2"})
"""Model types that add a shared expert to the routed ones, unless the config says that there is none."""


def _form(context: Context) -> str:
    """Return the context's label with ``{i}`` and ``{e}``."""
    label = context.label.replace(f"layers.{context.layer}.", "layers.{i}.", 1)
    return label.replace(f".experts.{context.expert}.", ".experts.{e}.") if context.expert is not None else label


# -- linears and activations -------------------------------------------------------------------------------------------


def _score_size(context: Context, computed: np.ndarray) -> np.ndarray:
    """Return the magnitude that the errors of scores x w are relative to: |y| and, of the accumulator, |x_d w_d|.

    A score may be nearly zero, and there are few of them. The accumulator's float32 roundings grow with the square
    root of the length, as in bands.rounding.
    """
    own = ROUNDING[context.dtype]
    length = reduction(context)
    accumulated = ROUNDING["float32"] * ACCUMULATION * np.sqrt(length)
    terms = np.square(next(inputs_of(context))) @ np.square(context.parameter(f"{module_of(context)}.weight")).T
    noise = np.square(own * computed) + np.square(accumulated) * terms
    return np.asarray(np.sqrt(noise) / rounding(context.dtype, length))


def _activate(context: Context) -> Iterator[np.ndarray]:
    """Yield act(gate) * up, and the same times the router's weight, which Megatron multiplies in before ``down``."""
    gate, up = (context.value(label) for label in PAIRS[_form(context)])
    if context.assume("swapped", False):
        gate, up = up, gate
    active = ACTIVATIONS[context.assume("function", None) or activation_of(context)](gate)
    weight = None if context.expert is None else _weight_of(context)
    for product in (active * up, context.rounded(active) * up):
        yield product
        if weight is not None:
            yield product * weight
            yield context.rounded(product) * weight


def _weight_of(context: Context) -> np.ndarray:
    """Return the router's weight [n, 1] for the context's expert."""
    ids, weights = context.value(ROUTER_IDS), context.value(ROUTER_WEIGHTS)
    return np.asarray(np.where(ids == context.expert, weights, 0.0).sum(axis=1, keepdims=True))


# -- the routed experts' sum -------------------------------------------------------------------------------------------


@dataclass
class Routed:
    """The routed experts' sum float64 [n, hidden] and the size of one rounding's effect on it, of the same shape."""

    values: np.ndarray
    size: np.ndarray


WITHIN = 4.0
"""Roundings within an expert before its down projection: gate, up, the activation and their product."""


def routed(context: Context, replaced: Mapping[int, int] | None = None) -> Routed:
    """Return sum_k w_k expert_k(x) from the experts' weights; ``replaced``: expert -> whose weights it uses instead.

    Independent roundings add in squares: one of the sum and of each weighted output, and :data:`WITHIN` of each of the
    numbers that the down projection adds.
    """
    x = input_of(context, NORMS)
    ids, weights = _chosen(context)
    act = ACTIVATIONS[activation_of(context)]
    values, squares = np.zeros_like(x), np.zeros_like(x)
    for expert in np.unique(ids[ids >= 0]):
        if context.assume("only", expert) != expert:
            continue
        rows, place = np.nonzero(ids == expert)
        source = int((replaced or {}).get(int(expert), int(expert)))
        gate, up, down = (_expert(context, source, name) for name in ("gate", "up", "down"))
        if context.assume("gate_up_swapped", False):
            gate, up = up, gate
        active = act(x[rows] @ gate.T) * (x[rows] @ up.T)
        factor = weights[rows, place][:, None]
        one = factor * (active @ down.T)
        np.add.at(values, rows, one)
        np.add.at(squares, rows, np.square(one) + WITHIN * np.square(factor) * (np.square(active) @ np.square(down).T))
    bad = np.isnan(x).any(axis=1) | np.isnan(weights).any(axis=1)
    values[bad] = np.nan
    return Routed(values, np.sqrt(np.square(values) + squares))


def _chosen(context: Context) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids int64 [n, k], -1 where not known, and the weights [n, k], stored or by the model's rule."""
    ids = context.value(ROUTER_IDS)
    ids = np.where(np.isnan(ids), -1, ids).astype(np.int64)
    own = context.has(ROUTER_WEIGHTS) and not {"normalise", "scale"} & set(context.assumptions)
    return ids, context.value(ROUTER_WEIGHTS) if own else weights_of(context)


def _expert(context: Context, expert: int, name: str) -> np.ndarray:
    return context.parameter(f"layers.{{i}}.mlp.experts.{expert}.{name}_proj.weight")


def summed(context: Context) -> Iterator[Routed]:
    """Yield the routed experts' sum of the experts' own outputs where they were stored, weighted here or before.

    Raises Unreplayable where an expert's output is missing for a token that it served.
    """
    ids, weights = _chosen(context)
    outputs = {}
    for expert in np.unique(ids[ids >= 0]):
        label = EXPERT[2].replace("{e}", str(expert))
        outputs[int(expert)] = context.value(label)
    for weighted in (False, True):
        values: Any = 0.0
        squares: Any = 0.0
        for expert, rows in outputs.items():
            weight = np.where(ids == expert, weights, 0.0).sum(axis=1, keepdims=True)
            here = (ids == expert).any(axis=1, keepdims=True)
            one = np.where(here, rows * (1.0 if weighted else weight), 0.0)
            values, squares = values + one, squares + np.square(one)
        yield Routed(np.asarray(values), np.sqrt(np.square(values) + squares))


def _sums(context: Context) -> Iterator[Routed]:
    ids = context.value(ROUTER_IDS)
    used = np.unique(ids[~np.isnan(ids) & (ids >= 0)]).astype(int)
    if not context.assumptions and used.size and all(context.has(EXPERT[2].replace("{e}", str(e))) for e in used):
        yield from summed(context)
    else:
        swap = context.assume("experts", {})
        yield routed(context, swap)


def _experts(context: Context) -> Iterator[np.ndarray]:
    for found in _sums(context):
        yield _kept(context, found)


def _kept(context: Context, found: Routed) -> np.ndarray:
    """Return the values, and keep the size that their rounding is measured by."""
    if not context.assumptions:
        context.memory.setdefault(SIZE, found.size)
    return found.values


def _size(context: Context, computed: np.ndarray) -> np.ndarray:
    return np.asarray(context.memory.get(SIZE, computed))


# -- the block ---------------------------------------------------------------------------------------------------------


def has_shared(context: Context) -> bool:
    """Tell whether the model adds a shared expert to its routed ones."""
    if any(context.has(label) for label in (SHARED_OUTPUT, SHARED_INPUT, *SHARED)):
        return True
    none = context.config.get("n_shared_experts", context.config.get("shared_expert_intermediate_size")) in (0,)
    return context.config.get("model_type") in SHARING and not none


def shared(context: Context) -> np.ndarray:
    """Return the shared expert's part of the block's output float64 [n, hidden], after its gate where it has one."""
    if context.has(SHARED_OUTPUT):
        output = context.value(SHARED_OUTPUT)
    else:
        x = input_of(context, NORMS)
        gate, up, down = (context.parameter(f"{SHARED_EXPERT}.{name}_proj.weight") for name in ("gate", "up", "down"))
        output = (ACTIVATIONS[activation_of(context)](x @ gate.T) * (x @ up.T)) @ down.T
    gate_weight = None if context.has(SHARED_GATE) else _gate_weight(context)
    if context.assume("ungated", False) or (gate_weight is None and not context.has(SHARED_GATE)):
        return output
    logit = context.value(SHARED_GATE) if gate_weight is None else input_of(context, NORMS) @ gate_weight.T
    return np.asarray(output * np.exp(-np.logaddexp(0.0, -logit)))


def _gate_weight(context: Context) -> np.ndarray | None:
    if context.config.get("model_type") != "qwen2_moe":
        return None
    return context.parameter(f"{BLOCK}.shared_expert_gate.weight")


def _block(context: Context) -> Iterator[np.ndarray]:
    """Yield routed + shared; where the weights lack the routed scaling factor (vLLM), it is applied here."""
    factor = context.assume("shared", 1.0) if has_shared(context) else 0.0
    added = factor * shared(context) if factor else 0.0
    stored = context.has(EXPERTS) and not ({"experts", "gate_up_swapped", "normalise"} & set(context.assumptions))
    if stored:
        values = context.value(EXPERTS)
        sums: Any = [Routed(values, np.abs(values))]
        scale = float(context.config.get("routed_scaling_factor") or 1.0)
        sums += [Routed(values * scale, np.abs(values * scale))] if scale != 1.0 else []
    else:
        sums = _sums(context)
    for found in sums:
        total = context.assume("routed", 1.0) * found.values + added
        size = np.sqrt(np.square(found.size) + np.square(total) + 3 * np.square(added))
        yield _kept(context, Routed(total, size))


# -- what may be wrong -------------------------------------------------------------------------------------------------

MOST = 0.8
CANDIDATES, OTHERS = 8, 64
"""Experts that may be exchanged, and others whose weights one expert may have, that are tried at most."""


def _suspects(context: Context, stored: np.ndarray) -> list[int]:
    """Return experts most of whose tokens are wrong (to some it adds little), the ones with most tokens first."""
    ids, _ = _chosen(context)
    size = _size(context, context.plain())
    rows = np.linalg.norm(stored - context.plain(), axis=1) / np.maximum(np.linalg.norm(size, axis=1), 1e-300)
    wrong = rows > 3 * np.median(np.sort(rows)[: max(1, len(rows) // 4)])
    found = {int(e): int((ids == e).any(axis=1).sum()) for e in np.unique(ids[ids >= 0])}
    guilty = [e for e in found if wrong[(ids == e).any(axis=1)].mean() > MOST]
    return sorted(guilty, key=lambda expert: -found[expert])[:CANDIDATES]


def _exchanged(context: Context, stored: np.ndarray) -> Mapping[str, Any] | None:
    """Try to exchange the weights of two experts, then to give one the weights of another."""
    guilty = _suspects(context, stored)
    swaps = [{one: two, two: one} for one, two in combinations(guilty, 2)]
    swaps += [{one: two} for one in guilty[:2] for two in range(min(context.shape.experts, OTHERS)) if one != two]
    best, least = None, np.inf
    for swap in swaps:
        values = next(iter(_recomputed(context.assuming({"experts": swap}))))
        error = float(np.nansum(np.square(stored - values)))
        if error < least:
            best, least = {"replaced": values, "value": float(next(iter(swap))), "swap": swap}, error
    return best


def _one_scaled(context: Context, stored: np.ndarray) -> Mapping[str, Any] | None:
    """Fit a factor to the part of one expert."""
    best, least, error = None, np.inf, stored - context.plain()
    for expert in _suspects(context, stored):
        part = routed(context.assuming({"only": expert})).values
        factor = float(np.nansum(part * error) / max(float(np.nansum(np.square(part))), 1e-300))
        left = float(np.nansum(np.square(error - factor * part)))
        if left < least:
            best, least = {"replaced": context.plain() + factor * part, "value": 1 + factor}, left
    return best


def _recomputed(context: Context) -> Iterator[np.ndarray]:
    yield from _experts(context) if _form(context) == EXPERTS else _block(context)


def _coarse(context: Context, stored: np.ndarray) -> Mapping[str, Any] | None:
    """Multiply in bfloat16 where the dump is finer: with a float32 or a bfloat16 result, whichever fits."""
    if context.dtype in ("bfloat16", "float16"):
        return None
    x, weight = next(inputs_of(context)), context.parameter(f"{module_of(context)}.weight")
    fine = round_to(x, "bfloat16").astype(np.float64) @ round_to(weight, "bfloat16").astype(np.float64).T
    both = fine, round_to(fine, "bfloat16").astype(np.float64)
    return {"replaced": min(both, key=lambda values: float(np.sum(np.square(stored - values))))}


def _another(context: Context, stored: np.ndarray) -> Mapping[str, Any] | None:
    """Find the expert whose weights make this expert's output."""
    x, best, least = next(inputs_of(context)), None, np.inf
    module = module_of(context)
    for other in range(min(context.shape.experts, OTHERS)):
        if other != context.expert:
            values = linear(context, x, module.replace(f".experts.{context.expert}.", f".experts.{other}."))
            error = float(np.sum(np.square(stored - values)))
            if error < least:
                best, least = {"replaced": values, "value": float(other)}, error
    return best


def _is_of_expert(context: Context) -> bool:
    return context.expert is not None


def _normalises(context: Context) -> bool:
    return choice_of(context).normalise


def _does_not(context: Context) -> bool:
    return not choice_of(context).normalise


SWAPPED = Hypothesis(
    "expert-swapped", {}, "its weights are those of expert {value:.0f}", solve=_another, when=_is_of_expert
)
ROUTER_FAULTS = (
    Hypothesis("precision", {}, "inputs and weights are rounded to bfloat16 before they are multiplied", solve=_coarse),
    replace(OFFSET, cause="router-bias"),
)
ACTIVATION_FAULTS = (
    Hypothesis("gate-up-swapped", {"swapped": True}, "gate and up are exchanged"),
    *(Hypothesis("activation", {"function": name}, f"the activation is {name}") for name in ACTIVATIONS),
    *GENERIC,
)
SUM_FAULTS = (
    Hypothesis("expert-swapped", {}, "expert {value:.0f} has the weights of another expert", solve=_exchanged),
    Hypothesis("scale", {}, "one expert's part is {value:.4g} times what it should be", solve=_one_scaled),
    Hypothesis("gate-up-swapped", {"gate_up_swapped": True}, "the experts' gate and up are exchanged"),
    Hypothesis("norm-topk", {"normalise": False}, "weights are not normalised over the chosen", when=_normalises),
    Hypothesis("norm-topk", {"normalise": True}, "weights are normalised over the chosen", when=_does_not),
)
BLOCK_FAULTS = (
    Hypothesis("shared-expert-missing", {"shared": 0.0}, "the shared expert is not added", when=has_shared),
    Hypothesis("shared-expert-missing", {"ungated": True}, "the shared expert's gate is not applied", when=has_shared),
    Hypothesis("router-fault", {"routed": 0.0}, "the routed experts are not added", when=has_shared),
)


def hidden(context: Context) -> int:
    """Return the model's hidden size: the length of the experts' dot products."""
    return context.shape.hidden or 1


RECIPES = (
    *(Recipe("linear", label, compute, *LINEAR, (SWAPPED, *FAULTS), reduction, is_moe) for label in LINEARS),
    Recipe("linear", ROUTER, compute, *LINEAR, (*ROUTER_FAULTS, *FAULTS), reduction, is_moe, size=_score_size),
    Recipe("linear", SHARED_GATE, compute, *LINEAR, FAULTS, reduction, is_moe, size=_score_size),
    *(Recipe("activation", label, _activate, *ACTIVATION, ACTIVATION_FAULTS, applies=is_moe) for label in PAIRS),
    Recipe("experts", EXPERTS, _experts, *ROUTED, (*SUM_FAULTS, *GENERIC), hidden, is_moe, 64, size=_size),
    Recipe(*("experts", MLP, _block, *ROUTED, (*BLOCK_FAULTS, *SUM_FAULTS, *GENERIC), hidden, is_moe, 64), size=_size),
)
