"""The whole loop on real engines: vLLM dumps a rollout, Megatron-core and transformers recompute it, compare joins.

Tolerances: relative L2 1e-5 is what fp32 engines with other kernels and summation orders reach (they were measured at
5e-7 here, 24 bits carry 6e-8 per rounding); log-probs 1e-5 likewise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from probe.checkpoint import Checkpoint
from probe.compare.run import compare_dumps, exit_status
from probe.hooks.debugger import PrecisionDebugger
from probe.hooks.demo_model import corrupt_checkpoint
from probe.hooks.runners.job import DumpJob
from probe.hooks.runners.megatron_model import build_model
from probe.hooks.runners.run import run_dump
from probe.store.reader import open_dump

pytestmark = pytest.mark.slow

LAYERS = 4
PER_LAYER = (
    *(("input_layernorm", "output.0"), ("self_attn.q_proj", "output.0"), ("self_attn.k_proj", "output.0")),
    *(("self_attn.v_proj", "output.0"), ("self_attn.o_proj", "input.0"), ("self_attn.o_proj", "output.0")),
    *(("post_attention_layernorm", "output.0"), ("mlp.gate_proj", "output.0"), ("mlp.up_proj", "output.0")),
    *(("mlp.down_proj", "input.0"), ("mlp.down_proj", "output.0")),
)
CANONICAL = {
    ("embed_tokens", "output.0"),
    ("norm", "output.0"),
    ("lm_head", "output.0"),
    *((f"layers.{i}", "output.0") for i in range(LAYERS)),
    *((f"layers.{i}.{name}", slot) for i in range(LAYERS) for name, slot in PER_LAYER),
}
LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
KINDS = ("input_layernorm", *LINEARS, "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def actor(source: Path, output: Path, model: Path, **changes: Any) -> Path:
    job = DumpJob("actor", "megatron", model, output, source=source, dtype="float32", micro_batch_size=3)
    for name, value in changes.items():
        setattr(job, name, value)
    return run_dump(job)


@pytest.fixture(scope="module")
def megatron_fp32(rollouts: Path, demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return actor(rollouts / "fp32", tmp_path_factory.mktemp("actor") / "fp32", demo_model)


def rows_by_position(path: Path, module: str, slot: str) -> dict[tuple[str, int], bytes]:
    """Return every stored row bit for bit, by (sequence, position)."""
    with open_dump(path) as dump:
        names = {s.index: s.uid for s in dump.sequences}
        rows = dump.rows(module, slot)
        values = dump.read_raw(module, slot)
        return {(names[r["sequence"]], int(r["position"])): v.tobytes() for r, v in zip(rows, values)}


def test_fp32_rollout_and_actor_agree_on_every_canonical_tensor(rollouts: Path, megatron_fp32: Path) -> None:
    report = compare_dumps(rollouts / "fp32", megatron_fp32)
    assert report["verdict"] == "consistent"
    assert exit_status(report) == 0
    measured = {(layer["name"], layer["slot"]): layer for layer in report["layers"]}
    assert measured.keys() >= CANONICAL
    coverage = report["coverage"]
    assert (coverage["only_a"], coverage["only_b"], coverage["unavailable"]) == ([], [], [])
    with open_dump(rollouts / "fp32") as dump:
        executed = sum(s.length - 1 for s in dump.sequences)
        assert coverage["rows"]["joined"] == executed
        assert (coverage["rows"]["a"], coverage["rows"]["b"]) == ({}, {"not_executed": len(dump.sequences)})
    for key in CANONICAL:
        assert measured[key]["rel_l2"] <= 1e-5, key
        assert measured[key]["rows"] == executed, key
    assert report["tokens"]["max_abs_logprob_diff"] <= 1e-5
    assert {gate["name"]: gate["status"] for gate in report["gates"] if gate["status"] != "pass"} == {
        "replicas": "skipped"  # one process on each side
    }


def test_prompt_and_response_logprobs_are_those_of_the_logits(rollouts: Path, megatron_fp32: Path) -> None:
    for path in (rollouts / "fp32", megatron_fp32):
        with open_dump(path) as dump:
            tokens = dump.tokens
            scored = tokens["position"] > 0
            assert np.isfinite(tokens["logprob"][scored]).all()
            # both are log-softmax of the same fp32 logits; fp32 holds 6e-8 of values up to about 20
            assert np.abs(tokens["logprob"] - tokens["logprob_recomputed"])[scored].max() <= 1e-5


@pytest.mark.parametrize(
    ("micro_batch_size", "layout"), [(1, "padded"), (2, "packed"), (4, "packed")], ids=lambda v: str(v)
)
def test_batching_changes_nothing(
    rollouts: Path, megatron_fp32: Path, demo_model: Path, tmp_path: Path, micro_batch_size: int, layout: str
) -> None:
    other = actor(rollouts / "fp32", tmp_path / "actor", demo_model, micro_batch_size=micro_batch_size, layout=layout)
    report = compare_dumps(rollouts / "fp32", other)
    assert report["verdict"] == "consistent"
    assert {(layer["name"], layer["slot"]) for layer in report["layers"]} >= CANONICAL
    same_side = compare_dumps(megatron_fp32, other)
    assert same_side["verdict"] == "consistent"
    assert max(layer["rel_l2"] for layer in same_side["layers"]) <= 1e-5


@pytest.mark.parametrize(("rollout", "dtype"), [("bf16", "bfloat16"), ("bf16", "float32"), ("fp32", "bfloat16")])
def test_bf16_pairs_are_consistent(rollouts: Path, demo_model: Path, tmp_path: Path, rollout: str, dtype: str) -> None:
    report = compare_dumps(rollouts / rollout, actor(rollouts / rollout, tmp_path / "actor", demo_model, dtype=dtype))
    assert report["verdict"] == "consistent"
    assert {(layer["name"], layer["slot"]) for layer in report["layers"]} >= CANONICAL
    assert not [layer for layer in report["layers"] if layer["verdict"] not in ("identical", "consistent")]


FAULTS = [*(f"layers.{i}.{kind}" for i in (0, 2, 3) for kind in KINDS), "embed_tokens", "norm", "lm_head"]


@pytest.mark.parametrize("module", FAULTS)
def test_a_scaled_weight_is_named_first(rollouts: Path, demo_model: Path, tmp_path: Path, module: str) -> None:
    parameter = f"{'' if module == 'lm_head' else 'model.'}{module}.weight"
    broken = corrupt_checkpoint(demo_model, tmp_path / "model", parameter=parameter, scale=1.03)
    report = compare_dumps(rollouts / "fp32", actor(rollouts / "fp32", tmp_path / "actor", broken))
    assert report["verdict"] == "divergent"
    assert exit_status(report) == 1
    assert report["first_divergence"]["name"] == module
    failed = [gate for gate in report["gates"] if gate["status"] == "fail"]
    assert [gate["name"] for gate in failed] == ["weights"]
    assert f"{module}.weight" in failed[0]["detail"]


def test_prompts_only_stores_the_prompt_rows_of_a_full_dump(
    rollouts: Path, megatron_fp32: Path, demo_model: Path, tmp_path: Path
) -> None:
    short = actor(rollouts / "fp32", tmp_path / "actor", demo_model, prompts_only=True)
    for full, prompts in ((rollouts / "fp32", rollouts / "prompts-only"), (megatron_fp32, short)):
        with open_dump(full) as dump, open_dump(prompts) as cut:
            lengths = {s.uid: s.prompt_len for s in dump.sequences}
            with_rows = [key for key, info in dump.tensors.items() if info.has_rows]
            assert {key for key, info in cut.tensors.items() if info.has_rows} == set(with_rows)
        for key in with_rows:
            wanted = {k: v for k, v in rows_by_position(full, *key).items() if k[1] < lengths[k[0]]}
            assert rows_by_position(prompts, *key) == wanted, key
    report = compare_dumps(rollouts / "prompts-only", short)
    assert report["verdict"] == "consistent"
    rows = report["coverage"]["rows"]
    assert (rows["joined"], rows["a"], rows["b"]) == (sum(lengths.values()), {}, {})
    assert any("response" in sentence for sentence in report["not_compared"])


@pytest.mark.parametrize("name", ["rescored", "chunked", "decoded"])
def test_rescoring_joins_every_token_of_the_rollout(rollouts: Path, name: str) -> None:
    """Prefill, chunked prefill and forced decode run the rollout's exact tokens; on this CPU kernel they agree."""
    report = compare_dumps(rollouts / "fp32", rollouts / name)
    assert report["verdict"] == "consistent"
    assert {(layer["name"], layer["slot"]) for layer in report["layers"]} >= CANONICAL
    assert max(layer["rel_l2"] for layer in report["layers"]) <= 1e-5
    with open_dump(rollouts / "fp32") as a, open_dump(rollouts / name) as b:
        assert [s.tokens.tolist() for s in a.sequences] == [s.tokens.tolist() for s in b.sequences]
        assert [s.prompt_len for s in a.sequences] == [s.prompt_len for s in b.sequences]


def test_another_rollout_engine_rescores_all_tokens(rollouts: Path, demo_model: Path, tmp_path: Path) -> None:
    job = DumpJob("rollout", "transformers", demo_model, tmp_path / "hf", source=rollouts / "fp32", dtype="float32")
    report = compare_dumps(rollouts / "fp32", run_dump(job))
    assert report["verdict"] == "consistent"
    assert {(layer["name"], layer["slot"]) for layer in report["layers"]} >= CANONICAL
    with open_dump(rollouts / "fp32") as dump:
        assert report["tokens"]["compared"] == sum(s.length - s.prompt_len for s in dump.sequences)


def test_a_rollout_of_transformers_is_recomputed_by_megatron(demo_model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the rollout\nwhat is 3 plus 4?\n")
    job = DumpJob("rollout", "transformers", demo_model, tmp_path / "hf", prompts=prompts, dtype="float32")
    report = compare_dumps(run_dump(job), actor(tmp_path / "hf", tmp_path / "actor", demo_model))
    assert report["verdict"] == "consistent"
    assert {(layer["name"], layer["slot"]) for layer in report["layers"]} >= CANONICAL
    assert report["coverage"]["rows"]["b"] == {"not_executed": 2}


def load_live(engine: str, checkpoint: Path) -> Any:
    """Return a model and its forward over one sequence, as a user's own script would have them."""
    if engine == "transformers":
        model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
        return model, lambda ids: model(input_ids=ids)
    model = build_model(Checkpoint(checkpoint), dtype="float32", device="cpu")  # knows its vocabulary only padded

    def forward(ids: torch.Tensor) -> None:
        length = ids.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
        model(input_ids=ids, position_ids=torch.arange(length)[None], attention_mask=mask)

    return model, forward


@pytest.mark.parametrize("prompts_only", [False, True], ids=["whole", "prompts-only"])
@pytest.mark.parametrize("engine", ["transformers", "megatron"])
def test_a_debugger_in_the_users_script_compares_with_a_rollout(
    rollouts: Path, demo_model: Path, tmp_path: Path, engine: str, prompts_only: bool
) -> None:
    model, forward = load_live(engine, demo_model)
    debugger = PrecisionDebugger(dump_path=str(tmp_path / "dump"), enabled=True, prompts_only=prompts_only)
    debugger.start(model)
    with open_dump(rollouts / "fp32") as dump, torch.no_grad():
        sequences = dump.sequences
        for sequence in sequences:
            debugger.announce(prompt_lens=[sequence.prompt_len])
            forward(torch.tensor([sequence.tokens.tolist()]))
    debugger.stop()
    debugger.step()
    report = compare_dumps(rollouts / "fp32", tmp_path / "dump")
    assert report["verdict"] == "consistent"
    assert [gate["name"] for gate in report["gates"] if gate["status"] == "fail"] == []
    assert {(layer["name"], layer["slot"]) for layer in report["layers"]} >= CANONICAL
    assert not [sentence for sentence in report["not_compared"] if "part" in sentence.split()]
    if not prompts_only:
        assert report["tokens"]["max_abs_logprob_diff"] <= 1e-5


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("engine", ["megatron", "transformers"])
def test_other_families_work_the_same_way(rollouts: Path, tmp_path: Path, family: str, engine: str) -> None:
    """q/k norms and tied embeddings (Qwen3), no biases (Llama); token ids without a tokenizer, two responses each."""
    model = rollouts / f"{family}-model"
    report = compare_dumps(rollouts / family, actor(rollouts / family, tmp_path / "actor", model, engine=engine))
    assert report["verdict"] == "consistent"
    assert (report["coverage"]["only_a"], report["coverage"]["only_b"]) == ([], [])
    assert report["coverage"]["matched"] >= 27
    assert max(layer["rel_l2"] for layer in report["layers"]) <= 1e-5
    assert report["a"]["sequences"] == 4


def test_many_decode_steps_make_no_more_datasets_than_few(rollouts: Path) -> None:
    stored = {}
    for name, steps in (("steps-10", 10), ("steps-2000", 2000)):
        with open_dump(rollouts / name) as dump:
            assert dump.sequences[0].length - dump.sequences[0].prompt_len == steps
        stored[name] = count_datasets(rollouts / name / "rollout" / "step0" / "rank0.h5")
    assert stored["steps-2000"] <= stored["steps-10"]


def count_datasets(path: Path) -> int:
    import h5py

    found: list[str] = []
    with h5py.File(path) as file:
        file.visititems(lambda name, item: found.append(name) if isinstance(item, h5py.Dataset) else None)
    return len(found)


def test_a_long_generation_is_recomputed_and_compared(rollouts: Path, demo_model: Path, tmp_path: Path) -> None:
    report = compare_dumps(rollouts / "steps-300", actor(rollouts / "steps-300", tmp_path / "actor", demo_model))
    assert report["verdict"] == "consistent"
    assert report["tokens"]["compared"] == 300
    assert {(layer["name"], layer["slot"]) for layer in report["layers"]} >= CANONICAL


def test_vllm_out_of_process_dumps_the_same_rows(rollouts: Path, demo_model: Path, tmp_path: Path) -> None:
    """The worker writes its own file, so an engine in other processes makes the same dump."""
    import os
    import subprocess
    import sys

    command = (sys.executable, "-m", "probe", "dump", "--stage", "rollout", "--from", rollouts / "fp32", "--dtype")
    more = ("float32", "-o", tmp_path / "dump", "--out-of-process")
    environment = {**os.environ, "PROMPTS_ONLY": "1"}
    made = subprocess.run([str(w) for w in (*command, *more)], env=environment, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[-3000:]
    key = ("model.layers.3.mlp.down_proj", "output.0")
    assert rows_by_position(tmp_path / "dump", *key) == rows_by_position(rollouts / "prompts-only", *key)
