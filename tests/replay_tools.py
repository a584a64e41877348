"""Contexts for replays of single modules, from tensors captured off a Hugging Face model in process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
import torch

from probe.compare.names.base import ModelShape
from probe.compare.replay.base import Context, History, Recipe, Unreplayable
from probe.compare.settings_gates import flat_config

ROUNDING = {"float32": 2.5e-8, "bfloat16": 1.66e-3, "float16": 2.07e-4}
"""Relative L2 of one rounding of random numbers."""


@dataclass
class Captured:
    """Tensors by canonical label, all rows of a batch without padding: [batch * length, features]."""

    config: dict[str, Any]
    tensors: dict[str, np.ndarray]
    length: int
    computed_in: str
    parameters: dict[str, np.ndarray] = field(default_factory=dict)
    kept: dict[str, np.ndarray] = field(default_factory=dict)
    prompt: int = 1 << 30

    def rows(self, label: str, keys: np.ndarray) -> np.ndarray:
        """Return a tensor's rows at keys."""
        if not self.has(label):
            raise Unreplayable(f"{label} was not stored")
        values = self.tensors[label].astype(np.float64)
        if label in self.kept:  # the flat rows that a tensor of one expert holds
            wide = np.full((self.count(), values.shape[1]), np.nan)
            wide[self.kept[label]] = values
            values = wide
        return values[keys[:, 0] * self.length + keys[:, 1]]

    def count(self) -> int:
        """Return how many rows a tensor of all tokens has."""
        return max(len(values) for values in self.tensors.values())

    def history(self, label: str, sequences: np.ndarray) -> History:
        """Return all rows of some sequences."""
        keys = np.array([(s, p) for s in sequences for p in range(self.length)], np.int64)
        return History(self.rows(label, keys), keys[:, 0], keys[:, 1])

    def tokens(self, keys: np.ndarray) -> np.ndarray:
        """Return no token ids."""
        return np.full(len(keys), -1)

    def dtype(self, name: str) -> str:
        """Return the dtype of every tensor and parameter."""
        return self.computed_in

    def has(self, label: str) -> bool:
        """Tell whether a tensor was captured."""
        return label in self.tensors

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return a parameter's shape."""
        return self.parameters[name].shape if name in self.parameters else None

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return rows of a parameter."""
        return self.parameters[name][start:stop].astype(np.float64)

    def context(self, recipe: Recipe, layer: int, keys: np.ndarray | None = None, expert: int | None = None) -> Context:
        """Return the context of a recipe in one layer, at all rows unless ``keys`` are given."""
        manifest = {"model": {"config": self.config}}
        config = {**flat_config(manifest), "model_type": self.config.get("model_type")}
        sequences = [SimpleNamespace(prompt_len=self.prompt)] * (self.count() // self.length)
        dump = SimpleNamespace(sequences=sequences, manifest=manifest)
        side: Any = SimpleNamespace(dump=dump, facts=set(), shape=ModelShape.of(manifest))
        side.resolution = SimpleNamespace(sources={})
        if keys is None:
            keys = np.array([divmod(i, self.length) for i in range(self.count())], np.int64)
        about: dict[str, Any] = {"side": side, "tensors": self, "parameters": self, "config": config}
        context = Context(label="", layer=layer, expert=expert, keys=keys, dtype=self.computed_in, **about)
        return replace(context, label=context.name(recipe.output))


def run_model(
    model: torch.nn.Module, ids: torch.Tensor, modules: Mapping[str, tuple[str, ...]], **forward: Any
) -> Captured:
    """Run a model on ids [batch, length]; ``modules``: name within a layer -> slots to capture, ``in`` or ``out.n``."""
    config: Any = model.config
    found: dict[str, np.ndarray] = {}
    handles: list[Any] = []

    def keep(label: str, value: torch.Tensor) -> None:
        value = value.detach()
        if value.ndim == 4 and value.shape[2] == ids.shape[1] != value.shape[1]:  # Gemma 3 norms [batch, heads, length]
            value = value.transpose(1, 2)
        rows = value.reshape(ids.numel(), -1) if value.numel() % ids.numel() == 0 else value
        found[label] = rows.float().numpy().copy()

    def hooks(i: int, name: str, slots: tuple[str, ...], module: torch.nn.Module) -> None:
        def after(_m: Any, args: Any, result: Any) -> None:
            for slot in slots:
                kind, _, number = slot.partition(".")
                label = f"layers.{i}.{name}:{'input' if kind == 'in' else 'output'}.{number or 0}"
                values = args if kind == "in" else result if isinstance(result, tuple) else (result,)
                keep(label, values[int(number or 0)])

        handles.append(module.register_forward_hook(after))

    for i, layer in enumerate(model.model.layers):  # type: ignore[union-attr,arg-type]
        known = dict(layer.named_modules())  # type: ignore[union-attr]
        for name, slots in modules.items():
            if name in known:
                hooks(i, name, slots, known[name])
    try:
        with torch.no_grad():
            model(ids, use_cache=False, **forward)
    finally:
        for handle in handles:
            handle.remove()
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return Captured(config.to_dict(), found, ids.shape[1], dtype)


ATTENTION_MODULES = {
    **{f"self_attn.{name}_proj": ("out",) for name in "qkv"},
    **{f"self_attn.{name}": ("out",) for name in ("q_norm", "k_norm", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")},
    **{f"self_attn.{name}": ("out",) for name in ("kv_a_layernorm",)},
    "self_attn.o_proj": ("in",),
}


def in_dtype(model: torch.nn.Module, dtype: str) -> torch.nn.Module:
    """Return a copy of a model in ``dtype`` as from_pretrained loads it: the rope's frequencies stay in float32."""
    import copy

    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))
    return other
