"""``probe tokens JOB``, the worst sequences as a file, and ``probe dump --from`` that file."""

from __future__ import annotations

import json

import h5py
import numpy as np
import pytest
from checkpoints import make_checkpoint
from job_folders import without_tensors, write_job, write_update
from synthetic_dumps import prompts

from probe.cli.main import run
from probe.compare.run import compare_dumps
from probe.compare.tokens.read import read_sources
from probe.compare.tokens.run import compare_token_sources
from probe.compare.tokens.worst import worst_sequences
from probe.errors import CompareError, PromptsError, UsageError
from probe.hooks.runners.job import DumpJob, Sampling, TokenSequence
from probe.hooks.runners.prompts import model_of_sequences, read_sequences
from probe.hooks.runners.run import run_dump, told_apart
from probe.store.reader import open_dump

# -- probe tokens JOB -------------------------------------------------------------------------------------------------


def test_the_log_probs_of_a_job(tmp_path, capsys):
    # GIVEN a job of tokens only whose update knows advantages
    job = write_job(tmp_path / "job")
    write_update(job, {"advantages": 1.0})
    for stage in ("rollout", "logprob"):
        without_tensors(job / stage / "step0")

    # WHEN its tokens are compared
    assert run(["-q", "tokens", str(job), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)

    # THEN the rollout is held against the log-prob pass, the update is known, and the commands name the job
    assert report["a"]["path"] == str(job / "rollout/step0") and report["b"]["path"] == str(job / "logprob/step0")
    assert report["verdict"] == "consistent" and report["ppo"]["given"] == ["advantages"]
    assert report["next_commands"][0] == f"probe compare {job}"
    assert report["next_commands"][-1] == f"probe tokens {job} --report html --force"


def test_a_step_of_a_job(tmp_path, capsys):
    job = write_job(tmp_path / "job", (0, 4))
    first = compare_token_sources([job])
    assert any("also holds step4: add --step" in note for note in first["notes"])
    assert run(["-q", "tokens", str(job), "--step", "4", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["a"]["path"].endswith("rollout/step4") and report["notes"] == []
    assert report["next_commands"][0] == f"probe compare {job} --step 4"
    with pytest.raises(UsageError, match="does not hold step 9 of both rollout and logprob: it holds steps 0, 4"):
        compare_token_sources([job], step=9)


def test_several_nodes_and_one_stage(tmp_path):
    sequences = prompts(6)
    nodes = [tmp_path / "n1", tmp_path / "n2"]
    for node, half in zip(nodes, (sequences[:3], sequences[3:])):
        write_job(node, sequences=half)
    names = ",".join(map(str, nodes))
    assert compare_token_sources([names])["counts"]["sequences"] == 6
    sides = [",".join(str(node / stage) for node in nodes) for stage in ("rollout", "logprob")]
    assert compare_token_sources(sides)["counts"]["sequences"] == 6
    own = compare_token_sources([nodes[0] / "rollout"])  # one stage: against its own logits
    assert own["b"]["key"] == "recomputed"


def test_a_step_of_files_is_refused(tmp_path):
    path = tmp_path / "both.npz"
    np.savez(path, rollout_log_probs=-np.ones((1, 2)), old_log_probs=-np.ones((1, 2)), response_mask=np.ones((1, 2)))
    with pytest.raises(UsageError, match="--step is for dumps"):
        compare_token_sources([path], step=1)


# -- the worst sequences ----------------------------------------------------------------------------------------------


@pytest.fixture
def broken(tmp_path):
    """A job of six sequences whose log-prob pass is wrong, and most so in the sequences that are read below."""
    return write_job(tmp_path / "job", sequences=prompts(6), weights_seed=1)


def test_the_worst_sequences_are_those_with_the_largest_difference(broken):
    batch, _ = read_sources([broken])
    assert batch.a is not None and batch.b is not None
    gap = np.abs(batch.b - batch.a)
    most = [gap[batch.sequence == number].max() for number in range(6)]
    assert worst_sequences(batch, 3).tolist() == np.argsort(most)[::-1][:3].tolist()
    assert len(worst_sequences(batch, 99)) == 6


def test_the_worst_sequences_are_written_as_they_can_be_run_again(broken, tmp_path, capsys):
    # WHEN the two worst sequences of a job are asked for
    file = tmp_path / "seqs.jsonl"
    assert run(["tokens", str(broken), "--worst", "2", "-o", str(file)]) == 1
    printed = capsys.readouterr().out

    # THEN the report is printed and the file holds them whole
    assert "verdict" in printed and f"probe tokens {broken} --worst 4 -o seqs.jsonl" in printed
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    known = {uid: (ids.tolist(), prompt_len) for uid, ids, prompt_len in prompts(6)}
    assert len(lines) == 2 and lines[0]["max_abs_logprob_diff"] >= lines[1]["max_abs_logprob_diff"] > 0
    for line in lines:
        assert (line["tokens"], line["prompt_len"]) == known[line["uid"]]
        assert line["sampling"] == {"temperature": 1.0, "top_p": 1.0} and line["weight_version"] == 0
    assert [entry.sequence.tokens for entry in read_sequences(file)] == [line["tokens"] for line in lines]


def test_what_worst_needs(broken, tmp_path, capsys):
    file = tmp_path / "seqs.jsonl"
    worst = ["-q", "tokens", str(broken), "--worst", "2"]

    def refused(*words: str) -> str:
        assert run([*worst, *words]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        return said

    assert "--worst writes a file: add -o FILE.jsonl" in refused()
    assert "no report is written" in refused("-o", str(file), "--report", "html")
    assert "is a folder" in refused("-o", str(tmp_path))
    assert "in a folder that is not there" in refused("-o", str(tmp_path / "none" / "s.jsonl"))
    file.write_text("mine")
    assert "already exists" in refused("-o", str(file))
    assert file.read_text() == "mine"
    assert run([*worst, "-o", str(file), "--force"]) == 1 and file.read_text() != "mine"


def spoil(folder, column, values):
    """Give tokens of a step's files other log-probs: (sequence, index in the response or None for all) -> value."""
    for path in folder.glob("*.h5"):
        with h5py.File(path, "r+") as file:
            tokens = file["tokens"][()]
            for (sequence, index), value in values.items():
                response = np.flatnonzero((tokens["sequence"] == sequence) & tokens["response"].astype(bool))
                tokens[column][response if index is None else response[index]] = value
            file["tokens"][...] = tokens


@pytest.mark.parametrize("stage", ["rollout", "logprob"])
@pytest.mark.parametrize(("index", "value"), [(0, np.nan), (1, -np.inf), (0, np.inf), (None, np.nan), (None, -np.inf)])
def test_sequences_that_are_not_finite_come_first(broken, tmp_path, stage, index, value):
    # GIVEN a job that is wrong everywhere, of which the least wrong sequence has log-probs that are no numbers
    batch, _ = read_sources([broken])
    least = int(worst_sequences(batch, 6)[-1])
    for column in ("logprob", "logprob_recomputed"):
        spoil(broken / stage / "step0", column, {(least, index): value})

    # WHEN the worst is asked for THEN it is this one, and the line can be read
    file = tmp_path / "seqs.jsonl"
    compare_token_sources([broken], worst=1, worst_file=file)
    line = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert line["uid"] == batch.labels[least] and line["not_finite"] > 0
    assert (line["max_abs_logprob_diff"] is None) == (index is None)
    assert read_sequences(file)[0].sequence.tokens == line["tokens"]


def test_a_last_token_without_a_log_prob_is_no_fault(broken):
    batch, _ = read_sources([broken])
    before = worst_sequences(batch, 6).tolist()
    least, length = before[-1], int(batch.valid[before[-1]])
    gap = np.abs(batch.b - batch.a)
    if gap[batch.sequence == least].argmax() == length - 1:
        pytest.skip("its largest difference is in the last token")
    for column in ("logprob", "logprob_recomputed"):
        spoil(broken / "logprob" / "step0", column, {(least, -1): np.nan})
    assert worst_sequences(read_sources([broken])[0], 6).tolist() == before


def test_a_file_that_cannot_be_written_is_refused_before_the_comparison(broken, tmp_path, capsys, monkeypatch):
    # GIVEN a folder in which not even root may make a file
    assert run(["-q", "tokens", "none-such", "--worst", "2", "-o", "/proc/s.jsonl"]) == 2

    # THEN it is said by the file's own name, before anything is read
    said = capsys.readouterr().err
    assert said.startswith("probe: error: /proc/s.jsonl cannot be written (") and said.count("\n") == 1

    # WHEN it cannot be written any more after the comparison THEN its own name is said too
    with pytest.raises(CompareError, match=r"^/proc/s.jsonl cannot be written \("):
        compare_token_sources([broken], worst=1, worst_file="/proc/s.jsonl")


def test_files_without_prompts_have_no_worst_sequences(tmp_path):
    path = tmp_path / "both.npz"
    np.savez(path, rollout_log_probs=-np.ones((1, 2)), old_log_probs=-np.ones((1, 2)), response_mask=np.ones((1, 2)))
    with pytest.raises(CompareError, match="--worst needs whole sequences, prompts included: give dumps"):
        compare_token_sources([path], worst=1, worst_file=tmp_path / "s.jsonl")


# -- probe dump --from seqs.jsonl -------------------------------------------------------------------------------------

LINE = {"uid": "p0", "tokens": [3, 4, 5], "prompt_len": 1, "model": "m", "sampling": {"temperature": 0.5}}
BAD = {
    "tokens": ({**LINE, "tokens": [1.5]}, "line 2: 'tokens' is not a list of token ids"),
    "no tokens": ({"uid": "x"}, "line 2: 'tokens' is not a list of token ids"),
    "prompt": ({**LINE, "prompt_len": 4}, "line 2: 'prompt_len' is 4 of 3 tokens"),
    "no prompt": ({**LINE, "prompt_len": "1"}, "line 2: 'prompt_len' is '1', not a whole number"),
    "uid": ({**LINE, "uid": 3}, "line 2: 'uid' is int, not str"),
    "sampling": ({**LINE, "sampling": [1]}, "line 2: 'sampling' is list, not dict"),
    "text": ("hello", "line 2 holds str, not an object"),
    **{
        f"{key} {value}": ({**LINE, "sampling": {key: value}}, f"line 2: '{key}' is {value!r}, not a number {lies}")
        for key, lies, values in (
            ("temperature", ">= 0", (-3, -0.001, float("nan"), float("inf"), 10**400, "1", True, [])),
            ("top_p", "above 0 and at most 1", (0, -0.5, 1.0001, float("nan"), float("-inf"), "0.9", False)),
        )
        for value in values
    },
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_line_is_named(tmp_path, case):
    line, said = BAD[case]
    path = tmp_path / "s.jsonl"
    path.write_text(json.dumps(LINE) + "\n" + json.dumps(line) + "\n")
    with pytest.raises(PromptsError) as caught:
        read_sequences(path)
    assert said[:60] in str(caught.value)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0, "top_p": 1}, {"temperature": 2.5}, {"top_p": None}])
def test_a_line_may_say_how_it_was_sampled(tmp_path, sampling):
    path = tmp_path / "s.jsonl"
    path.write_text(json.dumps({**LINE, "sampling": sampling}))
    assert read_sequences(path)[0].sampling == {key: value for key, value in sampling.items() if value is not None}


def test_files_that_list_nothing(tmp_path):
    path = tmp_path / "s.jsonl"
    path.write_text("\n")
    with pytest.raises(PromptsError, match="holds no sequence: write it with 'probe tokens"):
        read_sequences(path)
    path.write_bytes(b"\x89HDF\xff")
    with pytest.raises(PromptsError, match=r"the file of sequences .* cannot be read .* a dump's folder, or what"):
        read_sequences(path)


def test_the_model_is_that_of_all_lines(tmp_path):
    path = tmp_path / "s.jsonl"
    path.write_text(json.dumps(LINE))
    assert model_of_sequences(path) == "m"
    path.write_text(json.dumps(LINE) + "\n" + json.dumps({**LINE, "model": "n"}))
    assert model_of_sequences(path) == ""


def test_samples_of_one_prompt_get_names_of_their_own():
    listed = [TokenSequence(uid, [1, 2], 1, sample) for uid, sample in (("u", 0), ("u", 1), ("u", 1), ("v", 0))]
    listed.append(TokenSequence("u.s0", [1], 1))
    found = told_apart(listed)
    assert len({s.uid for s in found}) == 5
    assert [s.trajectory for s in found] == ["u", "u", "u", "v", "u.s0"] and found[3].uid == "v"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny Qwen2 checkpoint without tokenizer."""
    return make_checkpoint(tmp_path_factory.mktemp("model"))


def rollout_of(checkpoint, folder):
    """Return a rollout of three prompts by transformers, two samples each."""
    lines = [{"id": f"q{n}", "token_ids": ids} for n, ids in enumerate(([5, 6, 7], [11, 12, 13, 14], [21]))]
    prompts_file = folder / "p.jsonl"
    prompts_file.write_text("\n".join(map(json.dumps, lines)))
    sampling = Sampling(max_tokens=4, n=2, seed=3)
    made = DumpJob(
        "rollout", "transformers", checkpoint, folder / "rollout", prompts=prompts_file, sampling=sampling, device="cpu"
    )
    return run_dump(made)


def test_the_worst_sequences_are_dumped_and_compared(checkpoint, tmp_path, capsys):
    # GIVEN a rollout and an actor's dump of all its tokens
    rollout = rollout_of(checkpoint, tmp_path)
    again = run_dump(DumpJob("actor", "transformers", checkpoint, tmp_path / "all", source=rollout, device="cpu"))

    # WHEN the two worst sequences are listed and run again
    file = tmp_path / "seqs.jsonl"
    assert run(["-q", "tokens", str(rollout), str(again), "--worst", "2", "-o", str(file)]) == 0
    words = ["dump", "--stage", "actor", "--engine", "transformers", "--from", str(file), "-o", str(tmp_path / "some")]
    capsys.readouterr()
    assert run(["-q", *words, "--device", "cpu"]) == 0

    # THEN the dump holds them alone, and the next command makes or compares the other side
    with open_dump(tmp_path / "some") as dump:
        assert len(dump.sequences) == 2 and dump.manifest["model"]["path"] == str(checkpoint.resolve())
    assert f"next: probe compare {rollout} {tmp_path / 'some'}" in capsys.readouterr().out

    # THEN what was not listed is no missing coverage
    report = compare_dumps(rollout, tmp_path / "some", replay=False)
    assert report["verdict"] == "consistent", report["headline"]
    assert report["coverage"]["rows"]["a"]["budget"] > 0 and "other_sequence" not in report["coverage"]["rows"]["a"]


def test_the_other_side_is_what_follows(checkpoint, tmp_path, capsys):
    file = tmp_path / "seqs.jsonl"
    file.write_text(json.dumps({"tokens": [5, 6, 7, 8], "prompt_len": 2, "model": str(checkpoint)}))
    words = ["--engine", "transformers", "--from", str(file), "--device", "cpu", "-o", str(tmp_path / "actor")]
    assert run(["-q", "dump", "--stage", "actor", *words]) == 0
    expected = f"next: probe dump --stage rollout --from {file} -o {tmp_path / 'rollout'}"
    assert expected in capsys.readouterr().out


def test_samples_of_a_job_are_run_again_from_its_rollout(checkpoint, tmp_path):
    # GIVEN a job's rollout that names both samples of a prompt by the prompt's uid, as verl does
    source = tmp_path / "s.jsonl"
    lines = [{"uid": "u", "sample": n, "tokens": [5, 6, 7 + n, 9], "prompt_len": 2} for n in (0, 1)]
    source.write_text("\n".join(map(json.dumps, lines)))

    # WHEN it is run again THEN each sample has its own log-probs
    job = DumpJob("actor", "transformers", checkpoint, tmp_path / "d", source=source, device="cpu")
    with open_dump(run_dump(job)) as dump:
        assert sorted(s.uid for s in dump.sequences) == ["u.s0", "u.s1"]
        assert {s.trajectory for s in dump.sequences} == {"u"}
        scores = dump.tokens["logprob_recomputed"].reshape(2, 4)
        assert np.isfinite(scores[:, 1:]).all() and scores[0, 3] != scores[1, 3]


def test_processed_log_probs_need_one_way_of_sampling(checkpoint, tmp_path):
    source = tmp_path / "s.jsonl"
    lines = [{**LINE, "uid": f"p{n}", "sampling": {"temperature": 0.5 + n, "top_p": 1.0}} for n in range(2)]
    source.write_text("\n".join(map(json.dumps, lines)))
    sampling = Sampling(logprobs_mode="processed_logprobs")
    job = DumpJob("actor", "transformers", checkpoint, tmp_path / "d", source=source, sampling=sampling, device="cpu")
    with pytest.raises(UsageError, match="were drawn in different ways: leave out --logprobs-mode"):
        run_dump(job)
    source.write_text(json.dumps({**LINE, "sampling": {}}))
    with pytest.raises(UsageError, match="does not say with which temperature and top-p"):
        run_dump(job)
    source.write_text(json.dumps({**LINE, "sampling": {"temperature": 0.5, "top_p": 1.0}}))
    with open_dump(run_dump(job)) as dump:
        assert dump.manifest["sampling"] == {"temperature": 0.5, "top_p": 1.0}
