"""Leads: what one piece of evidence says of one module, before they are merged and ranked."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from probe.compare.names.canonical import place_of

GATE, REPLAY, MEASURED, ASIDE = "gate", "replay", "measured", "aside"
"""Where a lead comes from: a failed gate, a broken replay, the free-running comparison, something on the side (a gate
that only warns, the environment)."""

CONFIDENCE_CAP = 0.99
"""No evidence is certain."""

# (end of a canonical label without its layer, family); the first that fits.
FAMILIES: tuple[tuple[str, str], ...] = (
    (r"embed_tokens:.*", "embedding"),
    (r"lm_head:.*", "head"),
    (r".*norm:.*", "norm"),
    (r".*\.rotary_emb:.*", "rope"),
    (r".*\.self_attn\.o_proj:input\.0", "attention"),
    (r".*\.down_proj:input\.0", "activation"),
    (r".*\.mlp\.router:.*", "router"),
    (r".*\.mlp\.experts:.*", "experts"),
    (r".*\.mlp:.*", "mlp"),
    (r".*_proj.*:.*|.*_gate:.*", "linear"),
    (r".*\.shared_expert:.*", "mlp"),
    (r"layers\.\d+:.*", "residual"),
)
LAST = (1 << 30,)
"""Rank of what follows every module: the log-probs."""
FIRST = (-2,)
"""Rank of what precedes every module: config, weights, tokens."""


@dataclass(frozen=True)
class Lead:
    """A cause at a module, with the sentences that speak for it.

    ``source``: GATE, REPLAY, MEASURED or ASIDE; ``label``: the tensor it was seen in, where there is one; ``modules``:
    every module concerned, in execution order, the first of which is ``module``; ``value``: the fitted number.
    """

    cause: str
    module: str
    side: str
    confidence: float
    evidence: tuple[str, ...]
    source: str
    label: str = ""
    modules: tuple[str, ...] = ()
    value: float | None = None

    @property
    def all_modules(self) -> tuple[str, ...]:
        """Return the modules concerned, this one's own where no others are named."""
        return self.modules or (self.module,)


def family_of(label: str) -> str:
    """Return the family of a tensor (norm, rope, attention, linear, ...), empty where it has none."""
    return next((family for form, family in FAMILIES if re.fullmatch(form, label)), "")


def output_of(module: str) -> str:
    """Return the canonical label of a module's output: the inverse of :func:`module_at_fault`."""
    for end, slot in ((".self_attn", ".self_attn.o_proj:input.0"), (".act_fn", ".down_proj:input.0")):
        if module.endswith(end):
            return module.removesuffix(end) + slot
    return f"{module}:output.0"


def rank_of(module: str, layers: int) -> tuple[int, ...]:
    """Return where a module stands in execution: a sort key; FIRST and LAST for what is no module."""
    if module == "log-probs":
        return LAST
    place = place_of(output_of(module), layers)
    if place is not None:
        return place.rank
    found = re.match(r"layers\.(\d+)\b", module)
    return (int(found.group(1)), 0) if found else FIRST


def kind_of(module: str) -> str:
    """Return a module without its layer and expert numbers, so that one fault of every layer is seen as one."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", module)


def joined(confidences: Iterable[float]) -> float:
    """Return the confidence of independent pieces of evidence together: 1 - product of the doubts, capped."""
    doubt = 1.0
    for confidence in confidences:
        doubt *= 1.0 - confidence
    return min(CONFIDENCE_CAP, 1.0 - doubt)


def first_of(modules: Iterable[str], layers: int) -> tuple[str, ...]:
    """Return modules in execution order, each once."""
    return tuple(sorted(dict.fromkeys(modules), key=lambda module: (rank_of(module, layers), module)))
