"""One process of a job: steps, files, the budget of sequences, rows and bytes, and how its files are completed."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from capture_tools import by_row, hook_count
from checkpoints import make_checkpoint

from probe.errors import UsageError
from probe.hooks.budget import bytes_per_row, estimate_line, fitting
from probe.hooks.debugger import PrecisionDebugger
from probe.hooks.jobs import log as log_module
from probe.hooks.jobs.selection import Selection, hash_of
from probe.hooks.jobs.session import Session
from probe.hooks.jobs.steps import StepClock
from probe.hooks.rows import Announced
from probe.settings import JOB_DEFAULTS, Settings, job_settings
from probe.store.reader import open_dump


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny Qwen2 on transformers."""
    from transformers import AutoModelForCausalLM

    checkpoint = make_checkpoint(tmp_path_factory.mktemp("model"))
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(autouse=True)
def own_log(tmp_path, monkeypatch):
    """Let each test have an activation.log, and say everything once more."""
    monkeypatch.setenv("PROBE_DUMP_DIR", str(tmp_path / "d"))
    monkeypatch.setattr(log_module, "_said", set())


def said() -> str:
    return "\n".join(text for _, _, text in log_module._said)


def new_session(tmp_path, **settings) -> Session:
    return Session(Settings(dump_path=str(tmp_path / "d"), enabled=True, **settings))


def run_pass(recorder, model, sequences, *, prompt_len=2, tokens=True, batch=None):
    """Run a pass over {uid: ids}, with the tokens that an engine would return."""
    assert recorder.begin()
    items = [*sequences.items()]
    for chunk in itertools.batched(items, batch or len(items)) if hasattr(itertools, "batched") else [items]:
        recorder.announce([Announced(uid, prompt_len=prompt_len) for uid, _ in chunk])
        with torch.no_grad():
            model(input_ids=torch.tensor([ids for _, ids in chunk]), use_cache=False)
    for uid, ids in items if tokens else ():
        recorder.add_tokens(uid, ids, prompt_len, [np.nan] * prompt_len + [-1.0] * (len(ids) - prompt_len))
    recorder.end()


def recorded(dump):
    """Return the uids whose tensors a dump holds."""
    return sorted({uid for uid, _ in by_row(dump, "model.layers.0", "output.0")})


# -- settings ----------------------------------------------------------------------------------------------------------


def test_a_job_has_a_budget_unless_it_is_told_otherwise(tmp_path):
    plain = job_settings({"DUMP_ON": "1"})
    assert {key: getattr(plain, key) for key in JOB_DEFAULTS} == JOB_DEFAULTS and plain.enabled
    told = job_settings({"DUMP_ON": "1", "PROBE_SEQS": "0", "PROBE_MAX_BYTES": "1000", "PROBE_LAYERS": "0,3"})
    assert (told.seqs, told.rows, told.max_bytes, told.layers) == (0, 256, 1000, (0, 3))
    (tmp_path / "c.json").write_text('{"rows": 16, "task": "tensor", "tensor": {"seqs": 9}}')
    filed = job_settings({"DUMP_ON": "1", "PROBE_CONFIG": str(tmp_path / "c.json"), "PROBE_SEQS": "2"})
    assert (filed.seqs, filed.rows, filed.max_bytes) == (2, 16, JOB_DEFAULTS["max_bytes"])
    with pytest.raises(UsageError, match="seqs holds 'many'"):
        job_settings({"PROBE_SEQS": "many"})


def test_layers_leave_out_other_layers_only():
    settings = Settings(layers=(1, 10))
    wanted = {
        "model.layers.1.mlp": True,
        "model.layers.10": True,
        "model.layers.2.mlp.experts.1": False,
        "transformer.h.0.attn": False,
        "lm_head": True,
        "": True,
    }
    assert {path: settings.wants_module(path) for path in wanted} == wanted


# -- steps -------------------------------------------------------------------------------------------------------------


def test_what_a_trainer_says_reaches_every_process_and_beats_what_is_counted(tmp_path):
    trainer, other = StepClock(tmp_path / "d"), StepClock(tmp_path / "d")
    other.count()
    assert (other.step, other.said, trainer.step) == (1, None, 0)
    trainer.advance_to(7)
    other.count()
    assert (trainer.step, other.step, other.said) == (7, 7, 7)
    (tmp_path / "d" / "step").write_text("")  # a file system that is not atomic
    assert other.step == 2


def test_validation_before_training_is_not_the_first_step(tmp_path, model):
    session = new_session(tmp_path)
    recorder = session.recorder("rollout", model)
    for step in (-1, 0):
        session.clock.advance_to(step)
        assert not recorder.begin()
    session.clock.advance_to(1)
    assert recorder.begin() and recorder.records_later()
    session.clock.advance_to(2)
    assert not recorder.begin() and not recorder.records_later()
    assert new_session(tmp_path, step=(0,)).records("rollout", 0)


def test_a_step_is_a_file_and_passes_of_a_step_share_it(tmp_path, model):
    session = new_session(tmp_path, step=(0, 1))
    recorder = session.recorder("logprob", model)
    assert session.recorder("logprob", model) is recorder is not session.recorder("update", model)
    run_pass(recorder, model, {"a": [1, 2, 3]})
    assert hook_count(model) == 0
    run_pass(recorder, model, {"b": [4, 5, 6]})
    session.clock.advance_to(1)
    run_pass(recorder, model, {"a": [7, 8, 9]})
    session.close()
    with open_dump(tmp_path / "d" / "logprob", step=0) as dump:
        assert recorded(dump) == ["a", "b"] and dump.complete
        assert dump.rows("model.layers.0", "output.0")["call"].tolist() == [0] * 3 + [1] * 3
    with open_dump(tmp_path / "d" / "logprob", step=1) as dump:
        assert [s.tokens.tolist() for s in dump.sequences] == [[7, 8, 9]]


def test_hooks_stay_on_between_passes_that_follow_quickly(tmp_path, model):
    session = new_session(tmp_path)
    recorder = session.recorder("rollout", model)
    assert recorder.begin()
    recorder.end(flush=False)
    assert hook_count(model) > 0 and recorder.begin()
    recorder.flush()
    assert hook_count(model) == 0 and recorder.file is not None


def test_a_file_that_exists_is_never_touched(tmp_path, model):
    for _ in range(3):
        session = new_session(tmp_path)
        run_pass(session.recorder("actor", model), model, {"a": [1, 2, 3]})
        session.close()
    names = sorted(path.name for path in (tmp_path / "d" / "actor" / "step0").iterdir())
    own = f"-{os.getpid()}-rank0"
    assert names[0] == "rank0.h5" and all(own in name for name in names[1:]) and len(names) == 3


def test_a_model_of_which_nothing_ran_leaves_no_file(tmp_path, model):
    session = new_session(tmp_path)
    assert session.recorder("actor", model).begin()
    session.close()
    assert not (tmp_path / "d" / "actor").exists()


# -- what callers add --------------------------------------------------------------------------------------------------


def test_tokens_and_rl_columns_of_every_sequence(tmp_path, model):
    session = new_session(tmp_path, seqs=1)
    recorder = session.recorder("update", model)
    sequences = {"a": [1, 2, 3, 4], "b": [5, 6, 7, 8]}
    run_pass(recorder, model, sequences)
    recorder.add_tokens("a", [1, 2, 3, 4], 2)  # once more: the first stands
    recorder.add_rl("b", "advantages", torch.tensor([0.5, -0.5]), prompt_len=2)
    recorder.add_rl("c", "advantages", [1.0], prompt_len=1)  # a sequence that no forward showed
    recorder.update_manifest(sampling={"temperature": 0.5})
    recorder.update_manifest(sampling={"top_p": 0.9})
    session.close()
    with open_dump(tmp_path / "d" / "update") as dump:
        assert {s.uid: s.tokens.tolist() for s in dump.sequences} == {**sequences, "c": []}
        assert dump.tokens["logprob"].tolist()[2:4] == [-1, -1] and np.isnan(dump.tokens["logprob"][:2]).all()
        assert dump.tokens["response"].tolist() == [False, False, True, True] * 2
        assert by_row(dump, "rl", "advantages") == {("b", 2): 0.5, ("b", 3): -0.5, ("c", 1): 1.0}
        assert dump.manifest["sampling"] == {"temperature": 0.5, "top_p": 0.9}
        assert len(recorded(dump)) == 1


def test_an_unknown_column_is_said_and_stops_the_recorder_only(tmp_path, model):
    session = new_session(tmp_path)
    recorder = session.recorder("update", model)
    run_pass(recorder, model, {"a": [1, 2, 3]})
    recorder.add_rl("a", "/etc/passwd", [1.0], prompt_len=2)
    assert "is no column of a trainer" in said()
    assert not recorder.begin() and session.recorder("logprob", model).begin()
    session.close()


def test_tokens_hook_nothing(tmp_path, model):
    session = new_session(tmp_path, task="tokens", seqs=1)
    recorder = session.recorder("rollout", model)
    for step in range(3):
        session.clock.advance_to(step + 1)
        assert recorder.begin() and hook_count(model) == 0 and recorder.adapter is None
        recorder.add_tokens("a", [step, 1, 2], 1, [np.nan, -0.5, -0.25])
        recorder.end()
    session.close()
    for step in range(3):
        with open_dump(tmp_path / "d" / "rollout", step=step + 1) as dump:
            assert not dump.tensors and len(dump.weights) > 20 and dump.manifest["task"] == "tokens"
            assert dump.tokens["token"].tolist() == [step, 1, 2] and "budget" not in dump.manifest


def test_sketches_of_an_engine_that_repacks(tmp_path, model):
    from probe.hooks.weights import sketch

    session = new_session(tmp_path)
    recorder = session.recorder("rollout", model)
    recorder.sketches = lambda: [sketch("w", torch.ones(2, 3))]
    run_pass(recorder, model, {"a": [1, 2, 3]})
    session.close()
    with open_dump(tmp_path / "d" / "rollout") as dump:
        assert list(dump.weights) == ["w"]


# -- the budget --------------------------------------------------------------------------------------------------------

SIXTEEN = {f"u{n}": [n, n + 1, n + 2, n + 3] for n in range(16)}


def test_both_sides_choose_the_same_sequences_whatever_their_order(tmp_path, model):
    one, two = new_session(tmp_path, seqs=3), Session(Settings(dump_path=str(tmp_path / "e"), enabled=True, seqs=3))
    run_pass(one.recorder("logprob", model), model, SIXTEEN)
    run_pass(two.recorder("logprob", model), model, dict(reversed(SIXTEEN.items())))
    one.close(), two.close()
    with open_dump(tmp_path / "d" / "logprob") as a, open_dump(tmp_path / "e" / "logprob") as b:
        chosen = sorted(SIXTEEN, key=lambda uid: hash_of(SIXTEEN[uid][:2]))[:3]
        assert recorded(a) == recorded(b) == sorted(chosen)
        assert a.manifest["budget"] == {"seqs": 3} and len(a.tokens) == 64
    assert "tensors of 3 of 16 sequences" in said() and "left out 52 rows" in said()


def test_a_trainer_follows_what_the_rollout_recorded(tmp_path, model):
    # GIVEN a rollout that met its prompts one by one, four responses to each of two of them
    session = new_session(tmp_path, seqs=3)
    responses = {f"p{p}r{r}": [p, p + 1, 20 + r, 30 + p] for p, r in itertools.product(range(2), range(4))}
    rollout = session.recorder("rollout", model)
    for uid, ids in responses.items():
        run_pass(rollout, model, {uid: ids})
    # WHEN a trainer of the same folder gets them in another order
    order = dict(sorted(responses.items(), key=lambda item: -hash_of(item[1])))
    run_pass(session.recorder("logprob", model), model, order)
    # or says them all before the first of several forwards
    update = session.recorder("update", model)
    assert update.begin()
    update.expect([(ids, 2) for ids in order.values()])
    for uid, ids in order.items():
        run_pass(update, model, {uid: ids})
    session.close()
    # THEN it records sequences that the rollout recorded, one of each prompt before a second one of any
    with open_dump(tmp_path / "d" / "rollout") as a, open_dump(tmp_path / "d" / "logprob") as b:
        followed = recorded(b)
        assert recorded(a) == followed and {uid[:2] for uid in followed} == {"p0", "p1"}
    with open_dump(tmp_path / "d" / "update") as c:
        assert len(recorded(c)) == 3 and set(recorded(c)) <= set(followed)
        assert {uid[:2] for uid in recorded(c)} == {"p0", "p1"}


def test_without_a_rollouts_word_the_smallest_hash_is_the_sample():
    batch = [([1, 2], [1, 2, r]) for r in range(4)] + [([3, 4], [3, 4, r]) for r in range(4)]
    prompts, wholes = [p for p, _ in batch], [w for _, w in batch]
    chosen = Selection(2).chosen(prompts, wholes)
    firsts = {min(range(4), key=lambda n: hash_of(wholes[n])), min(range(4, 8), key=lambda n: hash_of(wholes[n]))}
    assert {n for n, wanted in enumerate(chosen) if wanted} == firsts
    assert sum(Selection(5).chosen(prompts, wholes)) == 5 and all(Selection(0).chosen(prompts))
    met = Selection(2)
    assert met.admit([(p, w) for p, w in reversed(batch)]) == chosen[::-1]


def test_one_by_one_the_smallest_so_far_are_admitted():
    ids = [[n] for n in range(200)]
    selection = Selection(4)
    admitted = [n for n in range(200) if selection.admit([(ids[n], None)])[0]]
    smallest = sorted(range(200), key=lambda n: hash_of(ids[n]))[:4]
    assert set(smallest) <= set(admitted) and len(admitted) < 40
    assert (selection.admitted, selection.refused) == (len(admitted), 200 - len(admitted))


@pytest.mark.parametrize(
    ("prompt_len", "positions"), [(2, [*range(8)]), (4, [*range(8)]), (7, [0, 1, 2, 3, 6, 7, 8, 9])]
)
def test_rows_of_a_sequence(tmp_path, model, prompt_len, positions):
    session = new_session(tmp_path, rows=8)
    run_pass(session.recorder("actor", model), model, {"a": [*range(1, 21)]}, prompt_len=prompt_len)
    session.close()
    with open_dump(tmp_path / "d" / "actor") as dump:
        assert dump.rows("model.layers.1.mlp", "output.0")["position"].tolist() == positions
        assert len(dump.tokens) == 20


@pytest.mark.parametrize("max_bytes", [60_000, 200_000, 400_000])
def test_bytes_are_never_more_than_allowed_and_what_is_dropped_is_counted(tmp_path, model, max_bytes):
    sketches = sum(3 * 8 * len(p) if p.dim() > 1 else 8 * len(p) for p in model.parameters())

    def recorded(folder, **limits):
        session = new_session(folder, **limits)
        recorder = session.recorder("actor", model)
        for start in range(0, 16, 4):
            run_pass(recorder, model, {f"u{n}": [n, *range(1, 40)] for n in range(start, start + 4)})
        session.close()
        return folder / "d" / "actor"

    with open_dump(recorded(tmp_path, seqs=8, rows=64, max_bytes=max_bytes)) as dump:
        stored, limits = dump.tensors, dump.budget
        with open_dump(recorded(tmp_path / "whole", seqs=limits.seqs, rows=limits.rows)) as whole:
            wanted = {key: info.rows for key, info in whole.tensors.items() if info.has_rows}
            assert whole.budget.dropped == 0
        lost = [count - (stored[key].rows if key in stored else 0) for key, count in wanted.items()]
        assert dump.manifest["budget"]["dropped_rows"] == limits.dropped == max(lost) > 0
        assert len(dump.tokens) == 16 * 40 and dump.complete
        size = (tmp_path / "d" / "actor" / "step0" / "rank0.h5").stat().st_size
        overhead = 64 * len(dump.tokens) + 1200 * (len(stored) + 80)  # tables: tokens, index, modules, rows
        assert size <= max(max_bytes, sketches) + overhead
        rows = {info.rows for (_, slot), info in stored.items() if info.has_rows}
        assert max_bytes < 100_000 or rows  # what fits is there
    assert "PROBE_MAX_BYTES left out" in said()


def test_the_estimate_is_near_what_a_row_takes(tmp_path, model):
    session = new_session(tmp_path, rows=64)
    recorder = session.recorder("actor", model)
    run_pass(recorder, model, {"a": [*range(60)]})
    session.close()
    with open_dump(tmp_path / "d" / "actor") as dump:
        size = (tmp_path / "d" / "actor" / "step0" / "rank0.h5").stat().st_size
        assert 0.6 < bytes_per_row(dump.manifest) * 60 / size < 1.5
    assert "actor: tensors take about" in said()


def test_the_estimate_of_a_model_of_seven_billion():
    config = {"hidden_size": 3584, "num_attention_heads": 28}
    sizes = {"hidden_size": 3584, "intermediate_size": 18944, "num_layers": 28, "vocab_size": 152064}
    layout = {**sizes, "num_key_value_heads": 4, "head_dim": 128}
    manifest = {"stage": "actor", "dtype": "bfloat16", "layout": layout, "model": {"config": config}}
    assert 5e6 < bytes_per_row(manifest) < 7e6
    assert fitting(4, 256, 2 << 30, bytes_per_row(manifest)) == (4, 86)
    assert fitting(4, 256, 10**8, bytes_per_row(manifest)) == (1, 64)
    assert bytes_per_row({**manifest, "budget": {"layers": [0, 27]}}) < bytes_per_row(manifest) / 8
    line = estimate_line({**manifest, "budget": {"seqs": 4, "rows": 86, "max_bytes": 2 << 30}})
    assert line.startswith("actor: tensors take about 6.21 MB per token x 86 rows x 4 sequences = 2.14 GB")


def test_a_debugger_of_a_script_stores_all_unless_it_is_told(tmp_path, model, monkeypatch):
    for name, limit in (("all", None), ("some", "2")):
        if limit:
            monkeypatch.setenv("PROBE_SEQS", limit)
        with PrecisionDebugger(enabled=True, dump_path=str(tmp_path / name)).start(model), torch.no_grad():
            model(input_ids=torch.tensor([*SIXTEEN.values()]))
        with open_dump(tmp_path / name) as dump:
            assert len(recorded(dump)) == (2 if limit else 16)


# -- the end of a process ----------------------------------------------------------------------------------------------

SCRIPT = """
import os, sys, time, signal, multiprocessing
import torch
from probe.hooks.jobs.session import session

def work(stage):
    model = torch.nn.Linear(3, 2)
    recorder = session().recorder(stage, model)
    assert recorder.begin()
    model(torch.ones(4, 3))
    recorder.end()

if __name__ == "__main__":
    how = sys.argv[1]
    if how in ("fork", "spawn"):
        if how == "fork":
            work("actor")
        child = multiprocessing.get_context(how).Process(target=work, args=("update",))
        child.start()
        child.join()
        assert child.exitcode == 0
    else:
        work("actor")
    if how == "handled":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    if how == "chained":  # as programs do that write a checkpoint before they end
        before = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *given: (before(*given), sys.exit(5)))
    if how in ("terminate", "handled", "chained"):
        print("ready", flush=True)
        time.sleep(60)
    if how == "killed":
        os._exit(4)
"""
ENDS = {
    "exit": (0, ["actor"], []),
    "fork": (0, ["actor", "update"], []),
    "spawn": (0, ["update"], []),
    "terminate": (-signal.SIGTERM, ["actor"], []),
    "handled": (3, ["actor"], []),
    "chained": (5, ["actor"], []),
    "killed": (4, [], ["actor"]),
}


@pytest.mark.parametrize("how", ENDS)
def test_files_are_completed_at_the_end_of_a_process(tmp_path, how):
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    environment = {**os.environ, "PROBE_DUMP_DIR": str(tmp_path / "d"), "OMP_NUM_THREADS": "1"}
    environment.pop("DUMP_ON", None)
    process = subprocess.Popen(
        [sys.executable, "script.py", how],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if how in ("terminate", "handled", "chained"):
        assert process.stdout.readline() == "ready\n"
        process.terminate()
    _, trouble = process.communicate(timeout=120)
    code, complete, partial = ENDS[how]
    assert process.returncode == code, trouble
    assert sorted(p.parents[1].name for p in (tmp_path / "d").glob("*/step0/*.h5")) == complete
    assert sorted(p.parents[1].name for p in (tmp_path / "d").glob("*/step0/*.partial")) == partial
    for stage in complete + partial:
        with open_dump(tmp_path / "d" / stage) as dump:
            assert dump.read("", "output.0").shape == (4, 2) and dump.complete == (stage in complete)
