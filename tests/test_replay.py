"""Replay: healthy modules of real models fit within their bands, and a fault is found in its module and named.

The table of faults is that of docs/replay.md, on a small random Qwen2 in bfloat16, where free-running comparison sees
none of the small ones.
"""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from synthetic_dumps import Scenario, prompts, write_dump
from synthetic_model import Tiny, make_weights
from transformers import AutoModelForCausalLM
from transformers.activations import ACT2FN

from probe import PrecisionDebugger
from probe.cli.main import run as run_cli
from probe.compare.evidence import BROKEN, FINE, SUSPECT
from probe.compare.replay.base import explained
from probe.compare.replay.faults import round_float8
from probe.compare.replay.figures import figures_of, words_of
from probe.compare.replay.inputs import choose_keys
from probe.compare.replay.residual import ACTIVATIONS
from probe.compare.replay.run import SideReplay, replay_side
from probe.compare.run import compare_dumps
from probe.compare.side import read_side
from probe.store.dtypes import widen
from probe.store.reader import open_dump

FAULTY = 1
"""The layer in which faults are planted, of three."""
IDS = torch.randint(0, 197, (1, 72), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A small Qwen2 checkpoint in bfloat16."""
    return make_checkpoint(
        tmp_path_factory.mktemp("replay") / "model", layers=3, hidden=128, intermediate=256, dtype="bfloat16"
    )


@pytest.fixture(scope="module")
def models(checkpoint) -> Callable[[str], Any]:
    """Return a fresh copy of the checkpoint on transformers by dtype."""
    loaded: dict[str, Any] = {}

    def model(dtype: str) -> Any:
        if dtype not in loaded:
            loaded[dtype] = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).eval()
        return copy.deepcopy(loaded[dtype])

    return model


def dump(folder: Path, model: Any, ids: torch.Tensor = IDS, stage: str = "actor") -> Path:
    with torch.no_grad(), PrecisionDebugger(dump_path=folder, stage=stage, enabled=True).start(model):
        model(ids, use_cache=False)
    return folder


def replayed(path: Path, weights: Path | None = None) -> SideReplay:
    with open_dump(path) as opened:
        return replay_side(read_side(opened), "a", weights)


def wrong(done: SideReplay) -> dict[str, tuple[str, ...]]:
    """Return the modules that do not fit, and the causes that would explain each."""
    bad = (found for found in done.modules.values() if found.verdict != FINE)
    return {found.label: tuple(entry.cause for entry in found.explanations) for found in bad}


# -- faults -----------------------------------------------------------------------------------------------------------


def layer(model: Any) -> Any:
    return model.model.layers[FAULTY]


def at(name: str) -> Callable[[Any], Any]:
    """Return a function that finds a module of the faulty layer by its path in it."""
    return lambda model: layer(model).get_submodule(name)


def weight(name: str, change: Callable[[torch.Tensor], Any], parameter: str = "weight") -> Callable[[Any], None]:
    """Return the fault that changes a parameter of the faulty layer in place."""
    return lambda model: change(getattr(at(name)(model), parameter))


def output(name: str, change: Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor]) -> Callable[[Any], None]:
    """Return the fault that replaces a module's output: (output, input, module) -> output."""

    def plant(model: Any) -> None:
        at(name)(model).register_forward_hook(lambda module, given, out: change(out, given[0], module))

    return plant


def through_fp8(tensor: torch.Tensor) -> None:
    tensor.copy_(tensor.to(torch.float8_e4m3fn).to(tensor.dtype))


def exchange(one: str, other: str) -> Callable[[Any], None]:
    def plant(model: Any) -> None:
        for parameter, twin in zip(at(one)(model).parameters(), at(other)(model).parameters()):
            kept = parameter.clone()
            parameter.copy_(twin)
            twin.copy_(kept)

    return plant


def half(out: torch.Tensor, x: torch.Tensor, module: Any) -> torch.Tensor:
    middle = x.shape[-1] // 2
    return x[..., :middle] @ module.weight[:, :middle].T


def in_bf16_pieces(out: torch.Tensor, x: torch.Tensor, module: Any) -> torch.Tensor:
    total = torch.zeros_like(out, dtype=torch.bfloat16)
    for part, columns in zip(x.chunk(8, -1), module.weight.chunk(8, -1)):
        total = total + (part.float() @ columns.float().T).bfloat16()
    return total.to(out.dtype)


def norm_in_bf16(out: torch.Tensor, x: torch.Tensor, module: Any) -> torch.Tensor:
    low = x.bfloat16()
    root = torch.rsqrt(low.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
    return (module.weight.bfloat16() * (low * root)).to(out.dtype)


def zero_columns(out: torch.Tensor, x: torch.Tensor, module: Any) -> torch.Tensor:
    return out.index_fill(-1, torch.tensor([5, 6]), 0)


def one_row(out: torch.Tensor, x: torch.Tensor, module: Any) -> torch.Tensor:
    out = out.clone()
    out[:, 7] = out.std() * torch.randn(out.shape[-1], generator=torch.Generator().manual_seed(2)).to(out.dtype)
    return out


def one_nan(out: torch.Tensor, x: torch.Tensor, module: Any) -> torch.Tensor:
    out = out.clone()
    out[0, 3, 4] = float("nan")
    return out


def drop(out: torch.Tensor, x: torch.Tensor, module: Any) -> torch.Tensor:
    torch.manual_seed(3)
    return torch.nn.functional.dropout(out, 0.1, training=True)


def without_input(model: Any) -> None:
    layer(model).register_forward_hook(lambda module, given, out: out - given[0])


def without_first_residual(model: Any) -> None:
    block = layer(model)

    def forward(hidden_states: torch.Tensor, **more: Any) -> torch.Tensor:
        attended, _ = block.self_attn(hidden_states=block.input_layernorm(hidden_states), **more)
        return attended + block.mlp(block.post_attention_layernorm(attended))

    block.forward = forward


def activation(name: str) -> Callable[[Any], None]:
    return lambda model: setattr(layer(model).mlp, "act_fn", ACT2FN[name])


def shuffle_rows(model: Any) -> None:
    projection = layer(model).self_attn.q_proj
    order = torch.randperm(len(projection.weight), generator=torch.Generator().manual_seed(4))
    for parameter in projection.parameters():
        parameter.copy_(parameter[order].clone())


def other_values(share: float) -> Callable[[torch.Tensor], Any]:
    def change(tensor: torch.Tensor) -> None:
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(5)).to(tensor.dtype)
        tensor.add_(share * tensor.std() * noise)

    return change


ATTENTION, NORM = "self_attn", f"layers.{FAULTY}.input_layernorm:output.0"
Q, V, OUT = (f"layers.{FAULTY}.self_attn.{name}_proj:output.0" for name in "qvo")
UP, DOWN = (f"layers.{FAULTY}.mlp.{name}_proj:output.0" for name in ("up", "down"))
ACTIVE, LAYER = f"layers.{FAULTY}.mlp.down_proj:input.0", f"layers.{FAULTY}:output.0"
POST = f"layers.{FAULTY}.post_attention_layernorm:output.0"

NAMELESS = "an activation that no config names"

SMALL: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "scaled 1.03": (weight("mlp.down_proj", lambda w: w.mul_(1.03)), DOWN, "scale"),
    "scaled 1.005": (weight("mlp.down_proj", lambda w: w.mul_(1.005)), DOWN, "scale"),
    "two columns zero": (output("self_attn.v_proj", zero_columns), V, "column-corruption"),
    "stale bias": (weight("self_attn.q_proj", lambda b: b.mul_(0.9), "bias"), Q, "wrong-bias"),
    "one weight row": (weight("mlp.up_proj", lambda w: w[5].mul_(1.05)), UP, "scaled-weight"),
    "fp8 weight": (weight("self_attn.o_proj", through_fp8), OUT, "weight-precision"),
    "norm weight": (weight("input_layernorm", lambda w: w.copy_((w + 4) - 4)), NORM, "stale-weights"),
    "norm in bf16": (output("input_layernorm", norm_in_bf16), NORM, "norm-precision"),
    "partial sums": (output("mlp.down_proj", in_bf16_pieces), DOWN, "partial-sums"),
    "weight 1 % off": (weight("mlp.up_proj", other_values(0.01)), UP, "stale-weights"),
}
"""Faults that bfloat16 noise covers in a comparison: fault, the label that must be wrong alone, its cause."""

LARGE: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "norm weight + 1": (weight("input_layernorm", lambda w: w.add_(1)), NORM, "norm-weight-offset"),
    "no bias": (weight("self_attn.q_proj", lambda b: b.zero_(), "bias"), Q, "wrong-bias"),
    "other weight": (weight("mlp.up_proj", other_values(0.5)), UP, "stale-weights"),
    "transposed": (weight("self_attn.o_proj", lambda w: w.copy_(w.T.clone())), OUT, "transposed-weight"),
    "permuted": (shuffle_rows, Q, "permuted-qkv"),
    "missing all-reduce": (output("self_attn.o_proj", half), OUT, "missing-all-reduce"),
    "duplicated all-reduce": (output("self_attn.o_proj", lambda y, x, m: 2 * y), OUT, "duplicated-all-reduce"),
    "dropout": (output("mlp.down_proj", drop), DOWN, "dropout-on"),
    "one row": (output("mlp.down_proj", one_row), DOWN, "row-corruption"),
    "NaN": (output("mlp.down_proj", one_nan), DOWN, "nan"),
    "gelu": (activation("gelu"), ACTIVE, "activation"),
    "gelu tanh": (activation("gelu_pytorch_tanh"), ACTIVE, "activation"),
    NAMELESS: (lambda model: setattr(layer(model).mlp, "act_fn", torch.nn.Hardswish()), ACTIVE, "activation"),
    "no residual": (without_input, LAYER, "missing-residual"),
}


@pytest.mark.parametrize("name", [*SMALL, *LARGE])
def test_a_fault_is_found_in_its_module_alone_and_named_in_bf16(tmp_path, models, checkpoint, name):
    plant, label, cause = {**SMALL, **LARGE}[name]
    model = models("bfloat16")
    with torch.no_grad():
        plant(model)
    found = wrong(replayed(dump(tmp_path / "d", model), checkpoint))
    assert list(found) == [label] and found[label][0] == cause, found


@pytest.mark.parametrize("name", ["scaled 1.005", "fp8 weight", "norm in bf16", "partial sums", "gelu", NAMELESS])
def test_a_fault_is_found_and_named_in_fp32(tmp_path, models, checkpoint, name):
    plant, label, cause = {**SMALL, **LARGE}[name]
    model = models("float32")
    with torch.no_grad():
        plant(model)
    found = wrong(replayed(dump(tmp_path / "d", model), checkpoint))
    assert list(found) == [label] and found[label][0] == cause, found


@pytest.mark.parametrize(("pair", "cause"), [(("gate", "up"), "gate-up-swapped"), (("k", "v"), "kv-swapped")])
def test_exchanged_projections_are_both_named(tmp_path, models, checkpoint, pair, cause):
    model = models("bfloat16")
    home = "mlp" if pair[0] == "gate" else "self_attn"
    names = [f"{home}.{name}_proj" for name in pair]
    with torch.no_grad():
        exchange(*names)(model)
    found = wrong(replayed(dump(tmp_path / "d", model), checkpoint))
    assert found.keys() == {f"layers.{FAULTY}.{name}:output.0" for name in names}
    assert all(causes[0] == cause for causes in found.values())


@pytest.mark.parametrize(("factor", "dtype"), [(1000.0, "float32"), (1e6, "bfloat16")])
def test_eps_is_fitted_where_it_shows(tmp_path, models, checkpoint, factor, dtype):
    model = models(dtype)
    layer(model).input_layernorm.variance_epsilon *= factor
    done = replayed(dump(tmp_path / "d", model), checkpoint)
    assert wrong(done).keys() == {NORM}
    best = done.modules[NORM].explanations[0]
    assert best.cause == "norm-eps" and best.value == pytest.approx(factor, rel=0.05)


def test_a_missing_first_residual_shows_in_the_norm_and_in_the_layer(tmp_path, models, checkpoint):
    model = models("bfloat16")
    without_first_residual(model)
    found = wrong(replayed(dump(tmp_path / "d", model), checkpoint))
    assert found.keys() == {POST, LAYER} and all(causes[0] == "missing-residual" for causes in found.values())


ENDS: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "ids off by one": (
        lambda m: m.model.embed_tokens.weight.copy_(m.model.embed_tokens.weight.roll(1, 0)),
        "embed_tokens:output.0",
        "vocab-offset",
    ),
    "untied copy": (lambda m: m.lm_head.weight.copy_(m.model.embed_tokens.weight), "lm_head:output.0", "untied-head"),
    "logits off by one": (
        lambda m: m.lm_head.register_forward_hook(lambda module, given, out: out.roll(1, -1)),
        "lm_head:output.0",
        "vocab-offset",
    ),
    "head in bf16": (
        lambda m: m.lm_head.register_forward_hook(
            lambda module, given, out: (given[0].bfloat16() @ module.weight.bfloat16().T).float()
        ),
        "lm_head:output.0",
        "head-precision",
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_faults_of_embedding_and_head(tmp_path, models, checkpoint, name):
    plant, label, cause = ENDS[name]
    model = models("float32")
    with torch.no_grad():
        plant(model)
    found = wrong(replayed(dump(tmp_path / "d", model), checkpoint))
    assert list(found) == [label] and found[label][0] == cause, found


# -- healthy ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_healthy_modules_fit(tmp_path, models, checkpoint, dtype, attention):
    model = models(dtype)
    model.set_attn_implementation(attention)
    done = replayed(dump(tmp_path / "d", model))
    assert not wrong(done) and not done.skipped and "the manifest's checkpoint" in done.found.words
    assert {found.kind for found in done.modules.values()} >= {"embedding", "norm", "linear", "residual", "lm_head"}
    linears = [found for found in done.modules.values() if found.kind == "linear"]
    assert len(linears) == 21 and all(0.5 < found.error < 1.1 for found in linears)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3", "llama", "deepseek_v3"])
def test_families_fit(tmp_path, family):
    path = make_checkpoint(tmp_path / "model", family, dtype="bfloat16", tied=family.startswith("gemma"))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    done = replayed(dump(tmp_path / "d", model, IDS[:, :48]))
    dense = [found for found in done.modules.values() if found.kind not in ("attention", "rope", "experts", "router")]
    assert len(dense) >= 20 and not [found for found in dense if found.verdict != FINE]


def save_weights(path: Path, model: Tiny) -> Path:
    """Write the weights of the synthetic model as a checkpoint."""
    path.mkdir()
    weights = {f"{'' if n.startswith('lm_head') else 'model.'}{n}": w for n, w in make_weights(model).items()}
    save_file({name: value.astype(np.float32) for name, value in weights.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(model.config()))
    return path


@pytest.mark.parametrize("layout", ["vllm", "megatron", "megatron-te", "transformers"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_engine_layout_is_replayed(tmp_path, layout, dtype):
    model = Tiny(qk_norm=layout == "megatron")
    weights = save_weights(tmp_path / "model", model)
    sequences = [(f"p{n}", np.random.default_rng(n).integers(0, 50, 24), 12) for n in range(2)]
    scenario = Scenario(layout=layout, dtype=dtype, model=model, engine_logprobs=layout == "vllm")
    done = replayed(write_dump(tmp_path / "d", scenario, sequences), weights)
    assert not wrong(done)
    labels = set(done.modules)
    assert {"layers.1.self_attn.k_proj:output.0", "layers.2:output.0", "lm_head:output.0"} <= labels
    assert ("log-probs" in labels) == (layout == "vllm")
    # what the reader itself recomputes (TransformerEngine's fused norms) is no evidence
    assert ("layers.1.input_layernorm:output.0" in labels) == (layout != "megatron-te")


LOG_PROBS = {
    "shifted": ({"logprob_shift": 1}, "logprob-shift"),
    "over a temperature": ({"manifest": {"sampling": {"temperature": 0.7, "top_p": 1.0}}}, "raw-logprobs"),
    "declared raw": ({"manifest": {"sampling": {"temperature": 1.0, "top_p": 0.5}}}, "raw-logprobs"),
}


@pytest.mark.parametrize("name", LOG_PROBS)
def test_log_probs_are_replayed_from_their_logits(tmp_path, name):
    changes, cause = LOG_PROBS[name]
    manifest = {"logprobs_mode": "processed_logprobs", **changes.get("manifest", {})}
    scenario = replace(Scenario(), **{**changes, "manifest": manifest})
    sequences = [(f"p{n}", np.random.default_rng(n).integers(0, 50, 24), 4) for n in range(2)]
    found = wrong(replayed(write_dump(tmp_path / "d", scenario, sequences)))
    assert found.get("log-probs", ("none",))[0] == cause, found


# -- both sides -------------------------------------------------------------------------------------------------------


def words(report: dict[str, Any], word: str) -> set[tuple[str, str]]:
    """Return (side, label) of the modules with that word in a report."""
    entries = [(side, entry) for entry in report["replay"]["modules"] for side in "ab" if entry[side]]
    return {(side, f"{e['name']}:{e['slot']}") for side, e in entries if e[side]["verdict"] == word}


def test_a_broken_module_makes_its_tensor_divergent_and_names_the_side(tmp_path, models, checkpoint):
    a = dump(tmp_path / "a", models("bfloat16"), stage="rollout")
    model = models("bfloat16")
    output("mlp.down_proj", lambda y, x, m: y * 1.03)(model)
    report = compare_dumps(a, dump(tmp_path / "b", model))
    entry = next(found for found in report["layers"] if f"{found['name']}:{found['slot']}" == DOWN)
    assert report["verdict"] == "divergent" and entry["verdict"] == "divergent"
    assert "replay of side b" in entry["reason"] and "side a: 1" in entry["reason"]
    assert words(report, "broken") == {("b", DOWN)}


def test_what_both_sides_do_alike_is_no_alarm(tmp_path, models, checkpoint):
    paths = []
    for stage in ("rollout", "actor"):
        model = models("bfloat16")
        activation("gelu")(model)
        paths.append(dump(tmp_path / stage, model, stage=stage))
    report = compare_dumps(*paths)
    assert words(report, "unmodelled") == {("a", ACTIVE), ("b", ACTIVE)}
    assert report["verdict"] == "consistent"


def test_without_weights_the_rest_is_replayed(tmp_path):
    path = write_dump(tmp_path / "d", Scenario(dtype="bfloat16"))
    done = replayed(path)
    assert done.found.why_not and {found.kind for found in done.modules.values()} >= {"activation", "residual"}
    assert "layers.0.mlp.down_proj:output.0" in done.skipped


def test_another_checkpoint_is_not_used_unasked(tmp_path, models, checkpoint):
    model = models("bfloat16")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    done = replayed(dump(tmp_path / "d", model))
    assert "parameters differ from" in done.found.why_not and not done.found.words


# -- the command line -------------------------------------------------------------------------------------------------


def test_the_command_says_what_is_wrong(tmp_path, models, checkpoint, capsys):
    good = dump(tmp_path / "good", models("bfloat16"))
    model = models("bfloat16")
    output("mlp.down_proj", lambda y, x, m: y * 1.03)(model)
    bad = dump(tmp_path / "bad", model)
    assert run_cli(["replay", str(good), "--weights", str(checkpoint)]) == 0
    assert "fine:" in capsys.readouterr().out
    assert run_cli(["replay", str(bad)]) == 1
    assert f"{DOWN} broken" in " ".join(capsys.readouterr().out.split())
    assert run_cli(["replay", str(bad), "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["verdict"] == "broken" and data["weights"].endswith(str(checkpoint))


def test_the_command_refuses_what_it_cannot_replay(tmp_path, capsys):
    assert run_cli(["replay", str(tmp_path / "nothing")]) == 2
    keep = ("output.0",)
    path = write_dump(tmp_path / "d", Scenario(drop=("layers", "lm_head", "logits", *keep)), prompts(1))
    assert run_cli(["replay", str(path)]) == 2
    assert "could be replayed" in capsys.readouterr().err
    assert run_cli(["replay", str(path), "--weights", str(tmp_path / "none")]) == 2
    assert "is not a directory" in capsys.readouterr().err


# -- parts ------------------------------------------------------------------------------------------------------------


def test_float8_rounding_is_exact_on_every_code_and_nearest_between():
    for name in ("float8_e4m3fn", "float8_e5m2"):
        codes = widen(np.arange(256, dtype=np.uint8), name).astype(np.float64)
        values = np.unique(codes[np.isfinite(codes)])
        assert np.array_equal(round_float8(values, name), values)
        between = np.random.default_rng(0).uniform(values[0], values[-1], 2000)
        nearest = np.abs(between[:, None] - values).min(axis=1)
        assert np.array_equal(np.abs(round_float8(between, name) - between), nearest)


@pytest.mark.parametrize(
    ("before", "after", "enough"),
    [(300, 99, True), (300, 101, False), (2.65, 1.04, True), (2.65, 1.4, False), (1.2, 1.02, True), (1.2, 1.1, False)],
)
def test_a_hypothesis_explains_most_of_what_is_beyond_rounding(before, after, enough):
    """A fault and rounding add in squares: with a large error a third may be left, with a small one about a band."""
    assert explained(before, after) is enough


def test_activations_agree_with_torch():
    x = np.linspace(-12, 12, 4001)
    for name, function in ACTIVATIONS.items():
        expected = ACT2FN[name](torch.tensor(x)).numpy()
        assert np.abs(function(x) - expected).max() < 1e-14 * 12, name
    assert ACTIVATIONS["gelu"](np.ones(1))[0] == pytest.approx(0.5 * (1 + math.erf(1 / math.sqrt(2))), rel=1e-15)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 200)), min_size=1, max_size=300, unique=True),
    st.integers(1, 64),
    st.integers(0, 3),
)
def test_chosen_rows_are_stored_ones_the_preferred_first(cells, rows, sequences):
    stored = np.array(sorted(cells), np.int64)
    prefer = np.concatenate([stored[:: max(1, len(stored) // 3)][:3], [[9, 9]]])
    lengths = np.full(10, 50)
    chosen = choose_keys(stored, prefer, lengths, rows, sequences)
    pairs = [tuple(pair) for pair in chosen]
    assert pairs == sorted(set(pairs)) and set(pairs) <= set(map(tuple, stored)) and 0 < len(pairs) <= rows
    assert not sequences or len({pair[0] for pair in pairs}) <= sequences
    if not sequences:
        assert set(map(tuple, prefer[: min(rows, 3)])) & set(map(tuple, stored)) <= set(pairs)
        both = {pair[1] >= 50 for pair in map(tuple, stored)}
        if rows >= 8 and len(stored) > rows:
            assert {pair[1] >= 50 for pair in pairs} == both


def test_figures_point_at_the_worst_row_and_feature():
    rng = np.random.default_rng(0)
    size = rng.normal(size=(40, 30))
    difference = 1e-3 * size
    difference[3] *= 5
    difference[:, 7] *= 4
    found = figures_of(size + difference, difference, size, 1e-3, "bfloat16")
    assert found is not None and (found.row, found.column, found.rows) == (3, 7, 40)
    assert found.worst_row >= 5 and found.typical_row == pytest.approx(1, abs=0.5)
    difference[5, 5] = np.nan
    broken = figures_of(size + difference, difference, size, 1e-3, "bfloat16")
    assert broken is not None and broken.row == 5 and math.isinf(broken.worst_row)
    assert figures_of(size, difference, np.full_like(size, np.nan), 1e-3, "bfloat16") is None


def test_words_follow_the_band_and_the_kinds_own_level():
    errors = np.array([0.66, 0.67, 0.66, 0.68, 0.67, 0.66])
    assert words_of(errors, errors) == [FINE] * 6
    one = np.where(np.arange(6) == 2, 2.0, errors)
    assert words_of(one, one)[2] == BROKEN
    lifted = 1.3 * np.ones(6)  # another kernel's rounding, alike in all layers
    assert words_of(lifted, lifted) == [FINE] * 6
    everywhere = 20.0 * np.ones(6)  # a fault in all layers
    assert words_of(everywhere, everywhere) == [BROKEN] * 6
    apart = np.where(np.arange(6) == 4, 0.99, 0.4)  # within its band, far from its kind
    assert words_of(apart, apart)[4] == SUSPECT
    last_bits = np.where(np.arange(6) == 4, 7e-4, 0.0)  # an exact replay, but for one sum near a tie
    assert words_of(last_bits, last_bits) == [FINE] * 6


# -- real engines -----------------------------------------------------------------------------------------------------

ENGINES = """
import sys
from pathlib import Path
from probe.hooks.runners.job import DumpJob, Sampling
from probe.hooks.runners.run import run_dump

if __name__ == "__main__":
    engine, model, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    for dtype in ("float32", "bfloat16"):
        rollout = folder / f"vllm-{dtype}"
        job = DumpJob("rollout", "vllm", model, rollout, prompts=folder / "ids.jsonl", dtype=dtype)
        job.sampling = Sampling(n=1, max_tokens=12, seed=1)
        if engine == "megatron":
            job = DumpJob("actor", "megatron", model, folder / f"megatron-{dtype}", source=rollout, dtype=dtype)
        run_dump(job)
"""


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_real_engines_fit(tmp_path, family):
    model = make_checkpoint(tmp_path / "model", family, hidden=128, intermediate=256, dtype="bfloat16")
    (tmp_path / "ids.jsonl").write_text('{"token_ids": [5, 6, 7, 8, 9, 10, 11]}\n{"token_ids": [11, 12, 13]}\n')
    script = tmp_path / "engines.py"
    script.write_text(ENGINES)
    for engine in ("vllm", "megatron"):  # a process each: both set up torch.distributed
        command = [sys.executable, str(script), engine, str(model), str(tmp_path)]
        ran = subprocess.run(command, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        for dtype in ("float32", "bfloat16"):
            done = replayed(tmp_path / f"{engine}-{dtype}")
            assert not wrong(done) and not done.skipped, (engine, dtype)
            assert {"linear", "norm", "rope", "attention"} <= {found.kind for found in done.modules.values()}
