"""Comparisons by statistics of rows: healthy pairs pass, faults are found at their module, what is unseen is said."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint

from probe import PrecisionDebugger
from probe.cli.main import run
from probe.compare.run import compare_dumps
from probe.errors import UsageError
from probe.manifest import make_manifest
from probe.store.reader import open_dump
from probe.store.schema import RowSegment, Sequence
from probe.store.statistics import Reduced, accumulator, statistics_of
from probe.store.writer import DumpWriter

IDS = torch.randint(0, 197, (4, 32), generator=torch.Generator().manual_seed(1))
UIDS = [f"s{n}" for n in range(len(IDS))]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Any:
    from transformers import AutoModelForCausalLM

    path = make_checkpoint(tmp_path_factory.mktemp("compare") / "model", layers=4, hidden=128, intermediate=352)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def recorded(folder: Path, model: Any, task: str = "statistics", *, size: int = 4) -> Path:
    """Run the sequences ``size`` at a time and record them."""
    debugger = PrecisionDebugger(dump_path=folder, task=task, enabled=True)
    for start in range(0, len(IDS), size):
        at = slice(start, start + size)
        debugger.start(model, uids=UIDS[at], prompt_lens=[32] * size)
        with torch.no_grad():
            model(input_ids=IDS[at])
        debugger.stop()
    debugger.step()
    return folder


@pytest.fixture(scope="module")
def dumps(tmp_path_factory, model) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("dumps")
    return {task: recorded(folder / task, model, task) for task in ("statistics", "tensor")}


def words(report: dict[str, Any]) -> set[str]:
    return set(Counter(layer["verdict"] for layer in report["layers"]))


@pytest.mark.parametrize("a", ["statistics", "tensor"])
def test_the_same_model_in_another_batching_agrees(tmp_path, model, dumps, a):
    report = compare_dumps(dumps[a], recorded(tmp_path / "b", model, size=1))
    assert report["verdict"] == "consistent" and words(report) == {"consistent"}, report["summary"]
    assert all(layer["bound"] and layer["ulp_p99"] is layer["max_abs"] is None for layer in report["layers"])
    assert report["coverage"]["shares"]["tensors"] == 1.0
    assert "statistics of rows in place of values" in report["headline"]
    said = " ".join(report["not_compared"])
    assert "features that changed places" in said and "(PROBE_TASK=statistics)" in said
    assert report["next_commands"][0].startswith("probe dump --task tensor -o ")


def test_bf16_against_fp32_is_no_error(tmp_path, model, dumps):
    report = compare_dumps(dumps["statistics"], recorded(tmp_path / "b", copy.deepcopy(model).bfloat16()))
    assert report["verdict"] == "consistent" and words(report) == {"consistent"}, report["summary"]


def scaled(model: Any) -> None:
    model.model.layers[2].mlp.down_proj.weight *= 1.02


def without_attention(model: Any) -> None:
    model.model.layers[1].self_attn.o_proj.weight *= 0


def noisy(model: Any) -> None:
    weight = model.model.layers[1].mlp.down_proj.weight
    weight += 0.4 * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2))


def not_a_number(model: Any) -> None:
    model.model.layers[3].mlp.up_proj.weight[5, 7] = float("nan")


FAULTS = {
    scaled: "layers.2.mlp.down_proj",
    without_attention: "layers.1.self_attn.o_proj",
    noisy: "layers.1.mlp.down_proj",
    not_a_number: "layers.3.mlp.up_proj",
}


@pytest.mark.parametrize("task", ["statistics", "tensor"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found_at_its_module(tmp_path, model, dumps, fault, task):
    """GIVEN one broken module, WHEN one or both sides hold statistics, THEN it is the first that diverges."""
    broken = copy.deepcopy(model)
    with torch.no_grad():
        fault(broken)
    report = compare_dumps(dumps["statistics"], recorded(tmp_path / "b", broken, task))
    assert report["verdict"] == "divergent"
    assert report["first_divergence"]["name"] == FAULTS[fault]
    layer = int(FAULTS[fault].split(".")[1])
    assert report["next_commands"][0].startswith(f"probe dump --task tensor --layers {layer} ")


def test_a_bound_never_exceeds_what_the_tensors_show(tmp_path, model, dumps):
    broken = copy.deepcopy(model)
    with torch.no_grad():
        noisy(broken)
    full = compare_dumps(dumps["tensor"], recorded(tmp_path / "b", broken, "tensor"))
    bounds = compare_dumps(dumps["statistics"], recorded(tmp_path / "c", broken))
    errors = {(layer["name"], layer["slot"]): layer["rel_l2"] for layer in full["layers"]}
    assert len(bounds["layers"]) == len(errors) > 40
    for layer in bounds["layers"]:  # the tensors' figure is of sums in float64: 2 ** -40 is far above its rounding
        assert layer["rel_l2"] <= errors[layer["name"], layer["slot"]] * (1 + 2**-40)


def test_features_that_changed_places_are_not_seen(tmp_path, model, dumps):
    """What the report says that statistics cannot see: the MLP's neurons in another order."""
    other = copy.deepcopy(model)
    mlp, order = other.model.layers[1].mlp, torch.randperm(352, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for weight, axis in ((mlp.gate_proj.weight, 0), (mlp.up_proj.weight, 0), (mlp.down_proj.weight, 1)):
            weight.copy_(weight.index_select(axis, order))
    report = compare_dumps(dumps["statistics"], recorded(tmp_path / "b", other))
    assert words(report) == {"consistent"}
    assert report["verdict"] == "divergent"  # by the weights, whose sketches see it
    assert next(gate for gate in report["gates"] if gate["name"] == "weights")["status"] == "fail"


# -- fused tensors ----------------------------------------------------------------------------------------------------

FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


def as_vllm(source: Path, folder: Path, *, residual: bool = True) -> Path:
    """Write a tensor dump again as vLLM would have: fused linears, the layer's output in two parts, its sum behind."""
    with open_dump(source) as dump:
        manifest = make_manifest(
            "rollout", "vllm", "0.1", dump.manifest["model"], dtype="float32", task="statistics", sampling={}
        )
        writer = DumpWriter(folder / "rollout" / "step0" / "rank0.h5", manifest)
        for sequence in dump.sequences:
            writer.add_sequence(Sequence(0, sequence.uid, prompt_len=32, length=32, tokens=sequence.tokens))
        segment = RowSegment(dump.rows("model.norm", "output.0"))

        def add(module: str, slot: str, values: np.ndarray) -> None:
            of = Reduced("float32", values.shape[1:])
            kept = statistics_of(values).astype(accumulator("float32"))
            writer.append(module, slot, kept, accumulator("float32"), segment, of=of)

        stream = dump.read("model.embed_tokens", "output.0")
        add("model.embed_tokens", "output.0", stream)
        for i in range(4):
            at = f"model.layers.{i}"
            add(f"{at}.input_layernorm", "output.0", dump.read(f"{at}.input_layernorm", "output.0"))
            if i and residual:
                add(f"{at}.input_layernorm", "output.1", stream)
            for fused, parts in FUSED.items():
                add(f"{at}.{fused}", "output.0", np.hstack([dump.read(f"{at}.{part}", "output.0") for part in parts]))
            for name in ("self_attn.o_proj", "mlp.down_proj"):
                add(f"{at}.{name}", "output.0", dump.read(f"{at}.{name}", "output.0"))
            stream, mlp = dump.read(at, "output.0"), dump.read(f"{at}.mlp.down_proj", "output.0")
            add(at, "output.0", mlp)
            add(at, "output.1", stream - mlp)
        add("model.norm", "output.0", dump.read("model.norm", "output.0"))
        if residual:
            add("model.norm", "output.1", stream)
        writer.close()
    return folder


@pytest.mark.parametrize("b", ["statistics", "tensor"])
def test_fused_tensors_are_compared_with_their_parts(tmp_path, dumps, b):
    report = compare_dumps(as_vllm(dumps["tensor"], tmp_path / "a"), dumps[b], min_coverage=0.0)
    assert words(report) - {"missing"} == {"consistent"}, report["summary"]
    names = {layer["name"] for layer in report["layers"]}
    for i in range(4):
        assert {
            f"layers.{i}.self_attn.q_proj+k_proj+v_proj",
            f"layers.{i}.mlp.gate_proj+up_proj",
            f"layers.{i}",
        } <= names
    assert not any(name.endswith((".q_proj", ".gate_proj")) for name in names)


def test_a_sum_is_not_compared_where_only_its_terms_were_reduced(tmp_path, dumps):
    split = as_vllm(dumps["tensor"], tmp_path / "a", residual=False)
    report = compare_dumps(split, dumps["statistics"], min_coverage=0.0)
    unavailable = {entry["name"]: (entry["side"], entry["reason"]) for entry in report["coverage"]["unavailable"]}
    assert {f"layers.{i}" for i in range(4)} <= unavailable.keys()
    assert unavailable["layers.2"] == (
        "a",
        "it is a sum of tensors, and the statistics of the terms do not say those of the sum",
    )


# -- what needs values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["floor", "golden"])
def test_options_that_need_values_are_refused(dumps, option):
    for a, b, c in (("statistics", "tensor", "tensor"), ("tensor", "statistics", "tensor")):
        with pytest.raises(UsageError, match=rf"--{option} compares values, and .* holds statistics of rows"):
            compare_dumps(dumps[a], dumps[b], **{option: dumps[c]})


@pytest.mark.parametrize("option", ["floor", "golden"])
def test_a_reference_of_statistics_is_refused(tmp_path, model, dumps, option, capsys):
    other = recorded(tmp_path / "b", model, "tensor")
    assert run(["-q", "compare", str(dumps["tensor"]), str(other), f"--{option}", str(dumps["statistics"])]) == 2
    said = capsys.readouterr().err
    assert "holds statistics" in said and said.startswith("probe: error: ") and said.strip().count("\n") == 0


def test_a_replay_says_that_it_needs_values(dumps, capsys):
    assert run(["-q", "replay", str(dumps["statistics"])]) == 2
    said = capsys.readouterr().err
    assert "a replay needs values, and" in said and said.strip().count("\n") == 0


def test_show_says_what_is_stored(dumps, capsys):
    assert run(["show", str(dumps["statistics"])]) == 0
    assert "tensors statistics of each row are stored, not the values" in capsys.readouterr().out
    assert run(["show", str(dumps["statistics"]), "layers.1.mlp.down_proj:output.0"]) == 0
    one = capsys.readouterr().out
    with open_dump(dumps["tensor"]) as dump:
        first = dump.read("model.layers.1.mlp.down_proj", "output.0")[0]
    assert "of each row" in one and f"{np.linalg.norm(first.astype(np.float64)):.5g}" in one


def test_every_report_is_written(tmp_path, dumps, capsys):
    words = ["compare", str(dumps["statistics"]), str(dumps["tensor"])]
    assert run([*words, "--report", "terminal,markdown,html,json,csv", "-o", str(tmp_path / "r")]) == 0
    made = {path.suffix: path.read_text() for path in (tmp_path / "r").iterdir()}
    assert made.keys() == {".md", ".html", ".json", ".csv"}
    for text in (capsys.readouterr().out, made[".md"], made[".html"], made[".json"]):
        assert "statistics of rows in place of values" in " ".join(text.split())
