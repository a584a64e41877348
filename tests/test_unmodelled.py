"""What a replay does not know is not called a fault: models without a recipe, checkpoints that are not what ran."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from probe.compare.run import compare_dumps
from probe.errors import CheckpointError
from probe.hooks.runners.job import DumpJob, Sampling
from probe.hooks.runners.run import run_dump

SIZES = {
    **{"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
    **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False},
}
MODELS = {
    "norms after the blocks": ("Olmo2", {}),
    "scaled residuals and logits": ("Granite", {"residual_multiplier": 0.22, "logits_scaling": 8.0}),
    "exact gelu": ("Llama", {"hidden_act": "gelu"}),
    "known": ("Qwen2", {}),
}
"""What a model does -> its classes in transformers and what its configuration needs."""


def make_model(path: Path, name: str, seed: int = 0) -> Path:
    import torch
    import transformers

    family, settings = MODELS[name]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**SIZES, **settings)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=1.5 / parameter.shape[-1] ** 0.5)
    model.to(torch.bfloat16).save_pretrained(path)
    return path


def dumps(folder: Path, model: Path, *, other: str = "float32") -> tuple[Path, Path]:
    """Return two healthy dumps of a model: bf16 with SDPA, and eager attention in another dtype."""
    prompts = folder / "prompts.jsonl"
    draw = np.random.default_rng(3)
    prompts.write_text("".join(json.dumps({"token_ids": draw.integers(0, 320, n).tolist()}) + "\n" for n in (40, 17)))
    sampling = Sampling(max_tokens=2, ignore_eos=True)
    job = DumpJob(
        "rollout", "transformers", model, folder / "rollout", device="cpu", prompts=prompts, sampling=sampling
    )
    actor = replace(job, stage="actor", prompts=None, source=run_dump(job))
    a, b = (
        run_dump(replace(actor, output=folder / name, dtype=dtype, engine_args={"attn_implementation": kernel}))
        for name, dtype, kernel in (("a", "bfloat16", "sdpa"), ("b", other, "eager"))
    )
    return a, b


@pytest.mark.parametrize("other", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", list(MODELS)[:2])
def test_a_model_that_the_replay_does_not_know_is_no_fault(tmp_path, name, other):
    """In mixed dtypes too, where one error is many float32 roundings and hardly one of bf16."""
    report = compare_dumps(*dumps(tmp_path, make_model(tmp_path / "model", name), other=other))
    words = {module[side]["verdict"] for module in report["replay"]["modules"] for side in "ab" if module[side]}
    assert report["verdict"] == "consistent", report["summary"]
    assert "unmodelled" in words and "broken" not in words
    assert "not as the replay does" in report["summary"]


@pytest.mark.parametrize("key", ["rms_norm_eps", "hidden_act"])
def test_a_config_that_changed_on_disk_after_both_runs_is_no_fault(tmp_path, key):
    model = make_model(tmp_path / "model", "known")
    pair = dumps(tmp_path, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {key: {"rms_norm_eps": 0.1, "hidden_act": "gelu"}[key]}))
    report = compare_dumps(*pair)
    assert report["verdict"] == "consistent", report["summary"]
    assert not [suspect for suspect in report["suspects"] if suspect["confidence"] > 0.2]


def test_a_checkpoint_of_neither_side_is_refused(tmp_path):
    pair = dumps(tmp_path, make_model(tmp_path / "model", "known"))
    other = make_model(tmp_path / "other", "known", seed=1)
    with pytest.raises(CheckpointError, match=r"holds the weights of neither side: .* parameters looked at differ"):
        compare_dumps(*pair, weights=other)
    assert (
        compare_dumps(*pair, weights=shutil.copytree(tmp_path / "model", tmp_path / "copy"))["verdict"] == "consistent"
    )


@pytest.mark.parametrize("other", ["bfloat16", "float32"])
def test_an_activation_whose_sum_cancels_is_within_its_rounding(tmp_path, other):
    report = compare_dumps(*dumps(tmp_path, make_model(tmp_path / "model", "exact gelu"), other=other))
    found = [module[side] for module in report["replay"]["modules"] for side in "ab" if module["kind"] == "activation"]
    assert len(found) == 4 and {module["verdict"] for module in found} == {"fine"}


def test_a_model_in_training_is_replayed_with_the_parameters_stored_with_its_dump(tmp_path, monkeypatch):
    """The checkpoint that the manifest names is no longer what ran."""
    monkeypatch.setenv("PROBE_WEIGHTS", "layers")
    model = make_model(tmp_path / "model", "known")
    pair = dumps(tmp_path, model)
    make_model(tmp_path / "model", "known", seed=1)  # the next steps of training
    report = compare_dumps(*pair)
    assert report["replay"]["weights"] == dict.fromkeys("ab", "stored with the dump")
    kinds = {module["kind"] for module in report["replay"]["modules"] if module["a"] and module["b"]}
    assert {"linear", "norm", "attention", "residual", "lm_head"} <= kinds
    assert report["verdict"] == "consistent" and not report["suspects"], report["summary"]


def test_a_parameter_that_changed_on_disk_after_both_runs_is_no_fault(tmp_path):
    from safetensors.torch import load_file, save_file

    model = make_model(tmp_path / "model", "known")
    pair = dumps(tmp_path, model)
    values = load_file(model / "model.safetensors")
    values["model.layers.1.mlp.down_proj.weight"] *= 1.5
    save_file(values, model / "model.safetensors", {"format": "pt"})
    report = compare_dumps(*pair)
    assert report["verdict"] == "consistent" and not [s for s in report["suspects"] if s["confidence"] > 0.2]
    module = next(
        m for m in report["replay"]["modules"] if (m["name"], m["slot"]) == ("layers.1.mlp.down_proj", "output.0")
    )
    assert "not those that both sides ran with" in module["b"]["reason"]


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_values_that_are_not_finite_on_both_sides_are_found_by_the_replay(tmp_path, monkeypatch, value):
    """The sides agree to the last bit there; what their own inputs and weights give is finite."""
    from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

    healthy, calls = Qwen2MLP.forward, itertools.count()

    def broken(self, x):
        found = healthy(self, x)
        if next(calls) % 2 and x.shape[1] > 5:  # in the second of two layers, so that it stays in its row
            found[0, 5, 3] = value
        return found

    model = make_model(tmp_path / "model", "known")
    monkeypatch.setattr(Qwen2MLP, "forward", broken)
    report = compare_dumps(*dumps(tmp_path, model, other="bfloat16"))
    assert report["verdict"] == "divergent", report["summary"]
    first = report["suspects"][0]  # what the block adds up to: no module returned the value
    assert (first["name"], first["cause"]) == ("layers.1", "row-corruption"), report["suspects"]
