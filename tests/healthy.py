"""Compare healthy pairs and print how near each comes to an alarm: ``python tests/healthy.py FOLDER [MODEL ...]``.

Every model is run on transformers with other kernels, batches and dtypes, which differ by rounding alone. The figures
calibrate the bands of docs/verdicts.md; tests/test_healthy.py runs each model and each pair at least once.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import make_checkpoint

from probe.compare.run import compare_dumps
from probe.hooks.runners.job import DumpJob, Sampling
from probe.hooks.runners.run import run_dump

SHORT, LONG = (96, 41, 7), (1400, 1000)
"""Lengths of the prompts."""
VOCABULARY = 512


@dataclass(frozen=True)
class Model:
    """A random checkpoint. ``weights``: ``plain`` as transformers initialises; ``trained``: outlier channels in norms
    and residual stream, biases; ``sharp``: the same with q/k norms that make attention sharp; ``double``: matrices
    twice as large; ``dtype``: of the stored checkpoint."""

    layers: int = 12
    hidden: int = 256
    ffn: int = 768
    family: str = "qwen2"
    weights: str = "trained"
    lengths: tuple[int, ...] = SHORT
    dtype: str = "bfloat16"
    config: dict[str, Any] = field(default_factory=dict)


MODELS = {
    "tiny": Model(layers=3, hidden=64, ffn=128, lengths=(40, 17)),
    "4 layers": Model(layers=4, hidden=128, ffn=256),
    "12 layers": Model(),
    "24 layers": Model(layers=24, hidden=128, ffn=384),
    "48 layers": Model(layers=48, hidden=64, ffn=192),
    "wide": Model(layers=4, hidden=768, ffn=2048, lengths=(48, 17)),
    "as initialised": Model(layers=6, weights="plain"),
    "fp32 checkpoint": Model(layers=6, dtype="float32"),
    "sharp attention": Model(family="qwen3", weights="sharp"),
    "doubled weights": Model(layers=8, weights="double"),
    "llama": Model(layers=6, family="llama"),
    "long": Model(layers=4, hidden=128, ffn=256, lengths=LONG),
    "long, sharp": Model(layers=4, hidden=128, ffn=256, family="qwen3", weights="sharp", lengths=LONG),
    "sliding window": Model(layers=6, hidden=128, ffn=384, family="gemma3"),
    "experts": Model(layers=6, hidden=128, ffn=384, family="qwen3_moe"),
}
EAGER = {"engine_args": {"attn_implementation": "eager"}, "micro_batch_size": 1}
SDPA = {"engine_args": {"attn_implementation": "sdpa"}, "micro_batch_size": 4}
FORWARDS: dict[str, dict[str, Any]] = {
    f"{kernel} {dtype}": {**settings, "dtype": name}
    for dtype, name in (("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16"))
    for kernel, settings in (("eager", EAGER), ("sdpa", SDPA))
} | {
    **{f"noise {d}": {**SDPA, "dtype": n, "noise": 1} for d, n in (("fp32", "float32"), ("bf16", "bfloat16"))},
    "again bf16": {**SDPA, "dtype": "bfloat16"},
    "golden": {**EAGER, "dtype": "float64", "stage": "reference"},
}
PAIRS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("sdpa fp32", "eager fp32", {}),
    ("sdpa bf16", "eager bf16", {}),
    ("sdpa fp16", "eager fp16", {}),
    ("sdpa bf16", "eager fp32", {}),
    ("sdpa bf16", "eager fp16", {}),
    ("sdpa fp16", "eager fp32", {}),
    ("sdpa fp32", "golden", {}),
    ("sdpa fp32", "eager fp32", {"floor": "noise fp32", "golden": "golden"}),
    ("sdpa bf16", "eager bf16", {"floor": "noise bf16", "golden": "golden"}),
    ("sdpa bf16", "eager fp32", {"floor": "noise bf16", "golden": "golden"}),
    ("sdpa bf16", "eager bf16", {"floor": "again bf16"}),
)
"""Two forwards, and the third dumps of the comparison."""


@dataclass(frozen=True)
class Figures:
    """What one comparison showed: the largest evidence, rise over the level before, golden ratio, and replay excess of
    each kind of module, with the tensor of the first two."""

    model: str
    pair: str
    verdict: str
    tensors: int
    divergent: int
    suspect: int
    evidence: float
    at: str
    rise: float
    golden: float
    replay: dict[str, float]
    broken: tuple[str, ...]

    @property
    def fine(self) -> bool:
        """Tell whether nothing alarmed: no tensor divergent, at most 1 % suspect, no module broken in its replay."""
        calm = not self.divergent and self.suspect <= 0.01 * self.tensors
        return calm and self.verdict == "consistent" and not self.broken

    def __str__(self) -> str:
        kinds = " ".join(f"{kind} {value:.2f}" for kind, value in sorted(self.replay.items()))
        alarm = "" if self.fine else f"  ALARM {self.divergent} divergent, {self.suspect} suspect; {self.broken[:3]}"
        figures = f"evidence {self.evidence:5.2f} rise {self.rise:5.2f} golden {self.golden:5.2f}"
        return f"{self.model:16} {self.pair:44} {self.verdict:12} {figures} at {self.at} | {kinds}{alarm}"


class Healthy:
    """Checkpoints and dumps of healthy models in one folder, made when first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def checkpoint(self, name: str) -> Path:
        """Return a model's checkpoint."""
        path = self.folder / name.replace(" ", "-") / "model"
        return path if path.exists() else write_checkpoint(path, MODELS[name])

    def dump(self, name: str, forward: str) -> Path:
        """Return the dump of one forward of a model; all of them run the tokens of one rollout."""
        home = self.folder / name.replace(" ", "-")
        output = home / forward.replace(" ", "-")
        if output.exists():
            return output
        job = DumpJob("actor", "transformers", self.checkpoint(name), output, device="cpu", source=home / "rollout")
        if not (home / "rollout").exists():
            prompts = home / "prompts.jsonl"
            draw = np.random.default_rng(5)
            lines = [{"token_ids": draw.integers(3, VOCABULARY, size).tolist()} for size in MODELS[name].lengths]
            prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
            sampling = Sampling(max_tokens=2, ignore_eos=True)
            first = replace(job, stage="rollout", output=home / "rollout", source=None, prompts=prompts)
            run_dump(replace(first, sampling=sampling, dtype="float32"))
        return run_dump(replace(job, **FORWARDS[forward]))

    def compare(self, name: str, a: str, b: str, third: dict[str, str]) -> Figures:
        """Compare two forwards of a model."""
        extra = {option: self.dump(name, forward) for option, forward in third.items()}
        report = compare_dumps(self.dump(name, a), self.dump(name, b), **extra)
        return figures(report, name, ", ".join((f"{a} / {b}", *third.values())))


def figures(report: dict[str, Any], model: str, pair: str) -> Figures:
    """Return the figures of a report."""
    layers = [layer for layer in report["layers"] if layer["evidence"] is not None]
    level, rise, worst = 1.0, 0.0, max(layers, key=lambda layer: layer["evidence"])
    for layer in layers:
        reached = layer["evidence"] * layer["floor_gain"]
        rise, level = max(rise, reached / level), max(level, reached)
    replay: dict[str, float] = {}
    broken = []
    for module in report["replay"]["modules"]:
        for side in (side for side in "ab" if module[side]):
            replay[module["kind"]] = max(replay.get(module["kind"], 0.0), module[side]["excess"])
            broken += [f"{side} {module['name']}"] if module[side]["verdict"] == "broken" else []
    verdicts = [layer["verdict"] for layer in report["layers"]]
    return Figures(
        model,
        pair,
        report["verdict"],
        len(layers),
        verdicts.count("divergent"),
        verdicts.count("suspect"),
        worst["evidence"],
        f"{worst['name']}:{worst['slot']}",
        rise,
        max((layer["golden"]["ratio"] for layer in layers if layer["golden"]), default=math.nan),
        replay,
        tuple(broken),
    )


# -- weights ----------------------------------------------------------------------------------------------------------


def write_checkpoint(path: Path, model: Model) -> Path:
    """Write a random checkpoint of a model and return its path."""
    from safetensors.torch import load_file, save_file

    sizes = {"layers": model.layers, "hidden": model.hidden, "intermediate": model.ffn, "vocab": VOCABULARY}
    heads = {"heads": 8, "kv_heads": 2, "max_position_embeddings": 4096}
    make_checkpoint(path, model.family, dtype=model.dtype, **sizes, **heads, **model.config)
    file = path / "model.safetensors"
    tensors = load_file(file)
    generator = np.random.default_rng(0)
    save_file({name: _drawn(name, old, model.weights, generator) for name, old in tensors.items()}, file)
    return path


def _drawn(name: str, old: Any, kind: str, generator: np.random.Generator) -> Any:
    """Return new values for a parameter, in the old one's dtype."""
    import torch

    shape, noise = tuple(old.shape), generator.normal(size=tuple(old.shape))
    if kind == "plain":
        values = np.ones(shape) if "norm" in name else np.zeros(shape) if name.endswith("bias") else 0.02 * noise
    elif "norm" in name:
        values = np.exp(0.3 * noise)
        if kind == "sharp" or ("q_norm" not in name and "k_norm" not in name):
            values[:2] *= 6  # channels of which every trained model has some
    elif name.endswith("bias"):
        values = 0.2 * noise
    else:
        values = (2.4 if kind == "double" else 1.2) / math.sqrt(shape[-1]) * noise
    return torch.from_numpy(values).to(old.dtype)


def main() -> None:
    """Print the figures of all models, or of those named."""
    folder, names = Path(sys.argv[1]), sys.argv[2:] or list(MODELS)
    healthy = Healthy(folder)
    for name in names:
        for a, b, third in PAIRS:
            print(healthy.compare(name, a, b, third), flush=True)


if __name__ == "__main__":
    main()
