"""Faults on real engines: vLLM as the rollout, Megatron-core as the actor, both through ``probe dump``.

A faulty engine loads a damaged copy of the checkpoint (a converter's mistake, an older step), a copy whose config.json
differs, or its ranks are taken for each other.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import torch
from matrix import dump
from safetensors.torch import load_file, save_file

from faults.models import make_model
from faults.weights import drift, permuted_heads
from probe.compare.run import compare_dumps

LAYER = 2
PROMPTS = '{"token_ids": [5, 9, 33, 101, 7, 61, 12]}\n{"token_ids": [150, 2, 2, 88, 61, 30, 12, 190, 4, 77, 31, 8]}\n'
GENERATE = ("--max-tokens", "24", "--ignore-eos", "--seed", "2")
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class EngineFault:
    """One fault of a real engine on side a (vLLM) or b (Megatron).

    ``weights`` changes the checkpoint's tensors, ``config`` its config.json, ``edit`` the finished dump; ``arguments``:
    further ones of ``probe dump``; ``gate``: which gate must find it.
    """

    name: str
    side: str
    causes: tuple[str, ...]
    modules: tuple[str, ...]
    gate: str
    weights: Callable[[Tensors], None] | None = None
    config: dict[str, Any] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    edit: Callable[[Path], None] | None = None


def permuted_q(tensors: Tensors) -> None:
    """Permute the query heads' features of one layer."""
    name = f"model.layers.{LAYER}.self_attn.q_proj.weight"
    tensors[name] = permuted_heads(tensors[name]).contiguous()


def stale_layer(tensors: Tensors) -> None:
    """Give one layer the weights of an earlier step."""
    for number, name in enumerate(name for name in tensors if f".layers.{LAYER}." in name):
        tensors[name] = drift(tensors[name], seed=number).to(tensors[name].dtype)


def ranks_swapped(folder: Path) -> None:
    """Let each of two tensor-parallel ranks say that it is the other."""
    files = sorted(folder.glob("*/step0/rank*.h5"))
    said = []
    for file in files:
        with h5py.File(file) as stored:
            said.append(json.loads(stored["manifest"][()]))
    for file, manifest, other in zip(files, said, said[::-1]):
        with h5py.File(file, "r+") as stored:
            stored["manifest"][()] = json.dumps({**manifest, "coordinates": other["coordinates"]})


Q = f"layers.{LAYER}.self_attn.q_proj"
FAULTS = (
    EngineFault("Megatron: permuted qkv", "b", ("permuted-qkv",), (Q,), "weights", weights=permuted_q),
    EngineFault(
        "Megatron: eps x1000", "b", ("norm-eps",), ("config", "*norm*"), "config", config={"rms_norm_eps": 1e-3}
    ),
    EngineFault(
        "Megatron: rope base",
        "b",
        ("rope-base",),
        ("config", "layers.0.self_attn*"),
        "config",
        config={"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    ),
    EngineFault(
        "Megatron TP2: ranks swapped",
        "b",
        ("tp-shards-swapped",),
        ("*",),
        "weights",
        arguments=("--tp", "2"),
        edit=ranks_swapped,
    ),
    EngineFault(
        "vLLM: stale weights of one layer",
        "a",
        ("stale-weights",),
        (f"layers.{LAYER}.*",),
        "weights",
        weights=stale_layer,
    ),
)


class Engines:
    """Dumps of real engines in one folder: one healthy rollout and actor, and what the faults need."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "prompts.jsonl").write_text(PROMPTS)
        self.model = make_model(folder / "model", "dense", "float32")

    def checkpoint(self, fault: EngineFault) -> Path:
        """Return the checkpoint that the faulty engine loads."""
        if fault.weights is None and not fault.config:
            return self.model
        path = self.folder / f"{len(list(self.folder.iterdir()))}-model"
        path.mkdir()
        config = json.loads((self.model / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, **fault.config}))
        tensors = load_file(self.model / "model.safetensors")
        if fault.weights is not None:
            fault.weights(tensors)
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        return path

    def rollout(self) -> Path:
        """Return vLLM's dump, which generates the tokens that every other one recomputes."""
        prompts = ("--prompts", str(self.folder / "prompts.jsonl"), *GENERATE)
        return self._dump("rollout", self.model, "rollout", prompts)

    def actor(self) -> Path:
        """Return Megatron's healthy dump."""
        return self._dump("actor", self.model, "actor", ("--from", str(self.rollout())))

    def report(self, fault: EngineFault) -> dict[str, Any]:
        """Return the comparison of a faulty engine with the healthy other one."""
        source = ("--from", str(self.rollout()))
        stage = "rollout" if fault.side == "a" else "actor"
        output = fault.name.replace(" ", "-").replace(":", "")
        faulty = self._dump(stage, self.checkpoint(fault), output, (*source, *fault.arguments))
        if fault.edit is not None:
            fault.edit(faulty)
        pair = (faulty, self.actor()) if fault.side == "a" else (self.rollout(), faulty)
        return compare_dumps(*pair, text=False)

    def _dump(self, stage: str, model: Path, name: str, arguments: tuple[str, ...]) -> Path:
        output = self.folder / name
        error = dump(("--stage", stage, "--model", str(model), *arguments), output)
        if error:
            raise RuntimeError(f"{name}: {error}")
        return output
