"""What a fault is, and the run that it is put into."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from probe.hooks.runners.inprocess import token_logprobs
from probe.hooks.runners.job import TokenSequence

DTYPES = ("float32", "bfloat16")
LogProbs = Callable[[torch.Tensor, list[int]], np.ndarray]


@dataclass
class Run:
    """One side before it runs: what a fault may change.

    ``model``: a copy of this run's own; ``config``: what the manifest will say; ``path``: the checkpoint that it
    names; ``how``: which of harness.PLANS feeds the tokens; ``logprobs``: how the engine computes the log-probs that it
    returns; ``said``: further entries of the manifest; ``cache_model``: what fills the prefix cache; ``load``: makes a
    checkpoint with another config.json and the model of it.
    """

    model: Any
    family: str
    dtype: str
    path: Path
    config: dict[str, Any]
    sequences: list[TokenSequence]
    layer: int = 0
    how: str = "score"
    stage: str = "actor"
    logprobs: LogProbs = token_logprobs
    said: dict[str, Any] = field(default_factory=dict)
    weight_version: int = 0
    cache_model: Any = None
    load: Callable[[dict[str, Any]], tuple[Path, Any]] | None = None

    @property
    def block(self) -> Any:
        """Return the layer that the fault is put into."""
        return self.model.model.layers[self.layer]

    def eager(self) -> None:
        """Let attention be computed by plain matrix products, whatever this side's default is."""
        self.model.config._attn_implementation = "eager"

    def reconfigure(self, **changes: Any) -> None:
        """Load the model from a copy of the checkpoint whose config.json differs."""
        assert self.load is not None
        implementation = self.model.config._attn_implementation
        self.path, self.model = self.load(changes)
        self.config = {**self.config, **changes}
        self.model.config._attn_implementation = implementation


Inject = Callable[[Run], None]


@dataclass(frozen=True)
class Fault:
    """One fault of the table.

    ``causes``: the slugs of docs/diagnosis.md that name it rightly; ``modules``: the canonical modules at fault, with
    ``{i}`` for the layer and ``*`` for anything; ``inject`` puts it into a run. ``placed``: whether it is
    in one layer, so that it has three places. ``invisible``: dtype -> why no number can show it there (measured by the
    runner); ``gate``: the gate that must then find it, empty where none can. ``sides``: on which sides it can occur;
    ``options``: of compare_dumps; ``how`` and ``healthy``: the plans of this and of the other side
    (harness.PLANS); ``texts``: harness.TEXTS; ``other``: what the other side does, which is no fault;
    ``benign``: this is none either, and must not be called one.
    """

    name: str
    causes: tuple[str, ...]
    modules: tuple[str, ...]
    inject: Inject
    family: str = "dense"
    placed: bool = True
    dtypes: tuple[str, ...] = DTYPES
    invisible: Mapping[str, str] = field(default_factory=dict)
    gate: str = ""
    sides: str = "ab"
    how: str = "score"
    healthy: str = ""
    texts: str = ""
    other: Inject | None = None
    benign: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def modules_at(self, layer: int) -> tuple[str, ...]:
        """Return the canonical modules at fault when it is in this layer."""
        return tuple(name.replace("{i}", str(layer)) for name in self.modules)


def patch(module: torch.nn.Module, change: Callable[..., Any]) -> None:
    """Let a module return ``change(output, *inputs)`` instead of its output."""
    forward = module.forward

    def faulty(*args: Any, **kwargs: Any) -> Any:
        return change(forward(*args, **kwargs), *args)

    module.forward = faulty  # type: ignore[method-assign]
