"""PrecisionDebugger in a script: free when off, complete when on, settings from everywhere in the documented order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from capture_tools import by_row, hook_count
from checkpoints import make_checkpoint
from torch import nn

import probe
from probe.compare.run import compare_dumps
from probe.errors import CaptureError, OutputExistsError, UsageError
from probe.hooks import debugger as debugger_module
from probe.hooks.debugger import PrecisionDebugger
from probe.store.reader import open_dump


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """Take the caller's switches away and let the next inert start speak again."""
    for name in ("DUMP_ON", "PROMPTS_ONLY", "RANK", *(name for name in os.environ if name.startswith("PROBE_"))):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(debugger_module, "_said_inert", False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny Qwen2 checkpoint."""
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(checkpoint):
    """The checkpoint on transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def forward(model, *tokens):
    with torch.no_grad():
        return model(input_ids=torch.tensor(tokens or [[1, 2, 3], [4, 5, 6]]), use_cache=False).logits


# -- off ---------------------------------------------------------------------------------------------------------------

INERT = """
import sys
from probe import PrecisionDebugger
class Model:
    pass
debugger = PrecisionDebugger(dump_path="out", stage="actor", level="L0", step=[0])
for step in range(3):
    debugger.start(Model())
    debugger.stop()
    debugger.step()
with PrecisionDebugger().start(Model()):
    pass
debugger.save("anything", "name")
heavy = {"torch", "h5py", "numpy", "transformers", "vllm"} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.mark.parametrize("switch", [None, "0", ""])
def test_off_imports_and_writes_nothing_and_says_so_once(tmp_path, switch):
    environment = {k: v for k, v in os.environ.items() if k != "DUMP_ON"} | (
        {} if switch is None else {"DUMP_ON": switch}
    )
    ran = subprocess.run([sys.executable, "-c", INERT], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == "PrecisionDebugger is off: set DUMP_ON=1 (or pass enabled=True) to record\n"
    assert list(tmp_path.iterdir()) == []


def test_off_hooks_nothing(tmp_path, model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    debugger = PrecisionDebugger()
    assert debugger.start(model) is debugger and hook_count(model) == 0
    debugger.stop()
    assert list(tmp_path.iterdir()) == []


# -- on ----------------------------------------------------------------------------------------------------------------


def test_dump_on_is_enough(tmp_path, model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DUMP_ON", "1")
    before = forward(model)
    debugger = PrecisionDebugger()
    debugger.start(model)
    during = forward(model)
    debugger.stop()
    assert hook_count(model) == 0
    debugger.step()
    assert torch.equal(before, during) and torch.equal(before, forward(model))
    with open_dump(tmp_path / "probe-dump") as dump:
        assert (dump.stage, dump.engine, dump.complete) == ("actor", "transformers", True)
        assert dump.manifest["model"]["architecture"] == "Qwen2ForCausalLM"
        assert dump.manifest["layout"]["num_key_value_heads"] == 2
        logits = by_row(dump, "lm_head", "output.0")
        assert np.array_equal(logits[("s1", 2)], before[1, 2].numpy())
        assert set(dump.weights) == {name for name, _ in model.named_parameters(remove_duplicate=False)}
        # log-probs recomputed from the dumped logits, entry p from row p - 1
        expected = torch.log_softmax(before.double(), -1)[1, 1, 6].item()
        entry = dump.tokens[(dump.tokens["sequence"] == 1) & (dump.tokens["position"] == 2)]
        assert entry["token"] == 6 and entry["logprob_recomputed"] == pytest.approx(expected, abs=1e-9)
    assert json.loads((tmp_path / "probe-dump" / "manifest.json").read_text())["schema"] == 1


def test_prompts_only(tmp_path, model, monkeypatch):
    monkeypatch.setenv("DUMP_ON", "1")
    monkeypatch.setenv("PROMPTS_ONLY", "1")
    monkeypatch.setenv("PROBE_DUMP_DIR", str(tmp_path / "d"))
    with PrecisionDebugger().start(model, prompt_lens=[2, 1], uids=["a", "b"]):
        forward(model)
    with open_dump(tmp_path / "d") as dump:
        assert set(by_row(dump, "lm_head", "output.0")) == {("a", 0), ("a", 1), ("b", 0)}
        assert dump.manifest["prompts_only"] is True


def test_steps_are_dumps_of_their_own(tmp_path, model):
    debugger = PrecisionDebugger(enabled=True, dump_path=str(tmp_path / "d"), step=[0, 2])
    for step in range(4):
        for micro_batch in range(2):  # several start and stop in one step
            debugger.start(model)
            forward(model, [10 * step + micro_batch, 1, 2])
            debugger.stop()
        debugger.step()
    assert sorted(p.name for p in (tmp_path / "d" / "actor").iterdir()) == ["step0", "step2"]
    with open_dump(tmp_path / "d", step=2) as dump:
        assert [s.tokens.tolist() for s in dump.sequences] == [[20, 1, 2], [21, 1, 2]]
        assert len(dump.read("model.layers.0.mlp", "output.0")) == 6
        assert dump.rows("model.layers.0.mlp", "output.0")["call"].tolist() == [0] * 3 + [1] * 3
        assert not dump.unread


def test_the_folder_of_one_step_opens_and_a_comparison_says_which_steps_it_left_out(tmp_path, model):
    debugger = PrecisionDebugger(enabled=True, dump_path=str(tmp_path / "d"))
    for step in range(2):
        with debugger.start(model):
            forward(model, [10 * step, 1, 2])
    later = tmp_path / "d" / "actor" / "step1"
    with open_dump(tmp_path / "d") as both, open_dump(later) as one:
        assert both.unread == [later] and not one.unread
        assert one.sequences[0].tokens.tolist() == [10, 1, 2]
    assert "first step of b only" in compare_dumps(later.with_name("step0"), tmp_path / "d")["headline"]
    assert (
        f"1 later step of b: add --step or name a step's folder ({later})"
        in (compare_dumps(tmp_path / "d", tmp_path / "d")["not_compared"])
    )
    assert "step" not in compare_dumps(later, later)["headline"]


def test_a_new_start_forgets_what_was_announced(tmp_path, model):
    debugger = PrecisionDebugger(enabled=True, dump_path=str(tmp_path / "d"))
    debugger.start(model, uids=["mine"], prompt_lens=[1])
    forward(model, [1, 2, 3])
    debugger.stop()
    debugger.start(model)
    forward(model, [7, 8])
    debugger.stop()
    debugger.step()
    with open_dump(tmp_path / "d") as dump:
        assert [(s.uid, s.prompt_len, s.tokens.tolist()) for s in dump.sequences] == [
            ("mine", 1, [1, 2, 3]),
            ("s1", 2, [7, 8]),
        ]


def test_other_ranks_are_left_alone(tmp_path, model, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)  # as another test may have left it
    monkeypatch.setenv("RANK", "3")
    with PrecisionDebugger(enabled=True, dump_path=str(tmp_path / "d"), rank=[0, 1]).start(model):
        assert hook_count(model) == 0
    assert not (tmp_path / "d").exists()
    with PrecisionDebugger(enabled=True, dump_path=str(tmp_path / "d"), rank="2,3").start(model):
        forward(model)
    assert (tmp_path / "d" / "actor" / "step0" / "rank3.h5").is_file()


def test_list_data_mode_and_token_range(tmp_path, model):
    debugger = PrecisionDebugger(
        enabled=True, dump_path=str(tmp_path / "d"), list=["layers.1.self_attn"], data_mode=["input"]
    )
    with debugger.start(model, token_range=(1, 2)):
        forward(model, [3, 4, 5, 6])
    with open_dump(tmp_path / "d") as dump:
        assert dump.tensors and all("layers.1.self_attn" in module for module, _ in dump.tensors)
        assert not any(slot.startswith("output") for _, slot in dump.tensors)
        assert dump.rows("model.layers.1.self_attn.q_proj", "input.0")["position"].tolist() == [1, 2]


def test_save(tmp_path, model):
    debugger = PrecisionDebugger(enabled=True, dump_path=str(tmp_path / "d"), list=["lm_head"])
    with debugger.start(model):
        probe.save(torch.tensor(1.5), "early")
        logits = forward(model)
        probe.save(logits.argmax(-1), "choice")  # after the forward: still the rows of the last one
        debugger.save(torch.ones(4), "loss/terms")
    probe.save(torch.ones(1), "late")
    with open_dump(tmp_path / "d") as dump:
        assert by_row(dump, "save.choice", "output.0")[("s1", 2)] == logits[1, 2].argmax()
        assert dump.read("save.loss/terms", "output.0").tolist() == [[1, 1, 1, 1]]
        assert dump.read("save.early", "output.0").tolist() == [1.5]
        assert not dump.tensors[("save.loss/terms", "output.0")].has_rows
        assert ("save.late", "output.0") not in dump.tensors


def test_the_end_of_the_program_completes_the_dump(tmp_path):
    script = """
    import torch, probe
    model = torch.nn.Linear(3, 2)
    debugger = probe.PrecisionDebugger(dump_path="d")
    debugger.start(model)
    model(torch.ones(4, 3))
    """
    environment = {**os.environ, "DUMP_ON": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    with open_dump(tmp_path / "d") as dump:
        assert dump.complete and dump.engine == "module"
        assert dump.read("", "output.0").shape == (4, 2)


def test_an_exception_in_the_block_still_stops_and_completes(tmp_path, model):
    with (
        pytest.raises(ZeroDivisionError),
        PrecisionDebugger(enabled=True, dump_path=str(tmp_path / "d")).start(model),
    ):
        forward(model)
        raise ZeroDivisionError
    assert hook_count(model) == 0 and open_dump(tmp_path / "d").complete


def test_samples_trajectories_and_weight_versions(tmp_path, model):
    debugger = PrecisionDebugger(enabled=True, dump_path=str(tmp_path / "d"))
    debugger.start(model)
    debugger.announce(uids=["p", "p"], samples=[0, 1], prompt_lens=[2, 2])
    forward(model)
    debugger.announce(uids=["q", "r"], trajectories=["talk", "talk"], weight_version=3)
    forward(model)
    debugger.announce(uids=["q", "r"], trajectories=["talk", "talk"], weight_version=4)
    forward(model)
    debugger.announce(samples=[0, 1])
    forward(model)
    debugger.stop()
    debugger.step()
    with open_dump(tmp_path / "d") as dump:
        assert [(s.uid, s.trajectory, s.sample, s.weight_version) for s in dump.sequences] == [
            *(("p.s0", "p", 0, 0), ("p.s1", "p", 1, 0)),
            *(("q", "talk", 0, 3), ("r", "talk", 0, 3), ("q#v4", "talk", 0, 4), ("r#v4", "talk", 0, 4)),
            *(("s6", "s6", 0, 0), ("s7", "s7", 1, 0)),
        ]
        assert len(dump.read("model.layers.0", "output.0")) == 24


# -- mistakes ----------------------------------------------------------------------------------------------------------


def test_misuse_is_said(tmp_path, model):
    debugger = PrecisionDebugger(enabled=True, dump_path=str(tmp_path / "d"))
    with pytest.raises(UsageError, match="was given no model"):
        debugger.start()
    with pytest.raises(CaptureError, match="cannot capture a str"):
        debugger.start("model")
    with pytest.raises(CaptureError, match="cannot capture an empty list"):
        debugger.start([])
    with pytest.raises(UsageError, match="differ in length"):
        debugger.start(model, prompt_lens=[1, 2], uids=["a"])
    assert hook_count(model) == 0
    debugger.start(model)
    with pytest.raises(CaptureError, match="was called twice"):
        debugger.start(model)
    with pytest.raises(UsageError, match="announce was told nothing"):
        debugger.announce()
    forward(model)
    debugger.stop()
    debugger.stop()
    debugger.step()
    again = PrecisionDebugger(enabled=True, dump_path=str(tmp_path / "d"))
    with pytest.raises(OutputExistsError, match=r"rank0\.h5 already exists"):
        again.start(model)
    assert hook_count(model) == 0


def test_a_compiled_model_leaves_nothing_behind(tmp_path):
    debugger = PrecisionDebugger(enabled=True, dump_path=str(tmp_path / "d"))
    model = nn.Sequential(nn.Linear(3, 3))
    compiled = nn.Sequential(nn.Linear(3, 3))
    compiled.compile()
    for refused in (compiled, torch.compile(model), [model, compiled]):
        with pytest.raises(CaptureError, match="is compiled"):
            debugger.start(refused)
    assert hook_count(model) == 0 and not (tmp_path / "d").exists()
    with debugger.start(model):
        model(torch.ones(2, 3))
    assert open_dump(tmp_path / "d").complete


def test_a_failure_while_hooking_leaves_nothing_behind(tmp_path, model, monkeypatch):
    def broken(chunk, adapter):
        raise RuntimeError("no memory")

    monkeypatch.setattr("probe.hooks.attach.named_sketches", broken)
    with pytest.raises(RuntimeError, match="no memory"):
        PrecisionDebugger(enabled=True, dump_path=str(tmp_path / "d")).start(model)
    assert hook_count(model) == 0 and not (tmp_path / "d" / "actor").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(CaptureError, match="cannot write"):
        PrecisionDebugger(enabled=True, dump_path=str(tmp_path / "file")).start(model)


def test_nothing_captured_is_said_and_leaves_no_dump(tmp_path, model, caplog):
    debugger = PrecisionDebugger(enabled=True, dump_path=str(tmp_path / "d"))
    debugger.start(model)
    debugger.stop()
    assert "nothing ran through the model" in caplog.text
    debugger.step()
    assert not (tmp_path / "d").exists()
    with debugger.start(model):
        forward(model)
    with debugger.start(model):
        pass
    assert [p.name for p in (tmp_path / "d" / "actor").iterdir()] == ["step1"]  # and the dump of step 1 is whole
    assert (tmp_path / "d" / "manifest.json").is_file() and open_dump(tmp_path / "d").complete


def test_seed_all(monkeypatch):
    import random

    drawn = []
    for _ in range(2):
        probe.seed_all(7)
        drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert drawn[0] == drawn[1]
    for name in ("CUBLAS_WORKSPACE_CONFIG", "HCCL_DETERMINISTIC"):
        monkeypatch.delenv(name, raising=False)
    try:
        probe.seed_all(7, mode=True)
        assert torch.are_deterministic_algorithms_enabled() and os.environ["HCCL_DETERMINISTIC"] == "true"
    finally:
        torch.use_deterministic_algorithms(False)
        for name in ("CUBLAS_WORKSPACE_CONFIG", "HCCL_DETERMINISTIC"):
            os.environ.pop(name, None)
