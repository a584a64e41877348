"""``probe compare JOB``: which stages and steps of a job's folder are compared, several folders per side, budgets."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from dataclasses import replace

import numpy as np
import pytest
from job_folders import compared, ranks, with_budget, write_job, write_stage, write_update
from synthetic_dumps import Scenario, actor, prompts

from probe.cli.main import run
from probe.compare.align import RowAligner
from probe.compare.job import open_pair, pair_of, stages_of
from probe.compare.run import compare_dumps
from probe.compare.sequences import join_sequences
from probe.compare.tokens.batch import batch_of_dumps
from probe.errors import DumpError, UsageError
from probe.store.reader import open_dump, roots_of

# -- which stages and steps -------------------------------------------------------------------------------------------


def test_a_job_alone_is_compared_with_itself(tmp_path, capsys):
    # GIVEN a job that dumped its rollout and its log-prob pass
    job = write_job(tmp_path / "job")

    # WHEN its folder alone is compared
    status = run(["-q", "compare", str(job), "--json"])
    report = json.loads(capsys.readouterr().out)

    # THEN the rollout is held against the log-prob pass, and the command to repeat it names the job
    assert status == 0 and report["verdict"] == "consistent"
    assert [(report[side]["stage"], report[side]["path"]) for side in "ab"] == [
        ("rollout", str(job / "rollout" / "step0")),
        ("logprob", str(job / "logprob" / "step0")),
    ]
    assert "rollout a" in report["summary"] and "logprob b" in report["summary"]
    again = f"probe compare {shlex.quote(str(job))} --step 0 --report html --force"
    assert again in report["next_commands"]
    assert run(["-q", *shlex.split(again)[1:], "-o", str(tmp_path / "report")]) == 0


def test_a_job_that_diverges_exits_with_1(tmp_path, capsys):
    job = write_job(tmp_path / "job", weights_seed=1)
    assert run(["-q", "compare", str(job)]) == 1
    assert f"probe compare {job} --step 0" in capsys.readouterr().out


def test_the_first_step_of_both_stages_is_compared_and_the_others_are_said(tmp_path):
    # GIVEN rollouts of steps 0, 2 and 5, and log-probs of steps 2, 5 and 10
    job = tmp_path / "job"
    for step in (0, 2, 5):
        write_stage(job, Scenario(), step)
    for step in (2, 5, 10):
        write_stage(job, actor(stage="logprob"), step)

    # WHEN the job is compared THEN it is step 2, and 5 is left
    report = compared(job)
    assert report["a"]["path"].endswith("rollout/step2") and report["b"]["path"].endswith("logprob/step2")
    left = "1 later step of a: add --step or name a step's folder"
    assert any(sentence.startswith(left) for sentence in report["not_compared"])
    assert "first step of a only" in report["headline"]

    # WHEN a step is asked for THEN it is that one, and nothing is said of the others
    report = compared(job, step=5)
    assert report["a"]["path"].endswith("rollout/step5") and "only" not in report["headline"]


def test_a_step_of_two_dumps(tmp_path, capsys):
    a, b = (write_job(tmp_path / name, (0, 3)) for name in "ab")
    command = ["-q", "compare", str(a / "rollout"), str(b / "rollout"), "--step", "3", "--json"]
    assert run(command) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["a"]["path"] == str(a / "rollout" / "step3") and report["b"]["path"] == str(b / "rollout" / "step3")


def test_a_trainer_without_a_log_prob_pass_is_compared_by_its_forward(tmp_path):
    job = tmp_path / "job"
    write_stage(job, Scenario())
    write_stage(job, actor())
    assert compared(job)["b"]["stage"] == "actor"


def test_dumps_of_their_own_beside_each_other_are_a_job_too(tmp_path):
    for scenario in (Scenario(), actor()):
        write_stage(tmp_path / "d" / scenario.stage, scenario)
    report = compared(tmp_path / "d")
    assert report["verdict"] == "consistent" and report["b"]["path"] == str(tmp_path / "d/actor/actor/step0")


REFUSED = {
    "no folder": ((), None, "there is no .*job: name a job's folder, or two dumps"),
    "one stage": (
        ("rollout",),
        None,
        "holds rollout alone, not rollout and logprob .* give the dump to compare it with",
    ),
    "no pair": (("reference", "update"), None, r"holds reference and update, not rollout .*'probe compare \S+ \S+'"),
    "no rollout": (("logprob", "update"), None, r"holds logprob and update, not rollout .*'probe tokens \S+'"),
    "no such step": (("rollout", "logprob"), 7, "does not hold step 7 of both rollout and logprob: it holds step 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_folder_without_two_sides_is_refused_in_one_sentence(tmp_path, case, capsys):
    stages, step, said = REFUSED[case]
    for stage in stages:
        write_stage(tmp_path / "job", replace(Scenario(), stage=stage))
    with pytest.raises(UsageError, match=said):
        pair_of(tmp_path / "job", step)
    assert run(["-q", "compare", str(tmp_path / "job"), *(["--step", str(step)] if step else [])]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_stages_without_a_common_step_are_refused(tmp_path):
    write_stage(tmp_path / "job", Scenario(), 0)
    write_stage(tmp_path / "job", actor(stage="logprob"), 1)
    with pytest.raises(UsageError, match="holds rollout of step 0 and logprob of step 1, no step of both"):
        pair_of(tmp_path / "job")


def test_a_stage_alone_and_a_job_beside_a_dump_are_refused(tmp_path):
    job = write_job(tmp_path / "job")
    with pytest.raises(UsageError, match="rollout is a dump of one stage: name a job's folder, or two dumps"):
        compare_dumps(job / "rollout")
    with pytest.raises(DumpError, match="or give it to 'probe compare' alone"):
        compare_dumps(job, job / "rollout")


def test_explain_reads_the_pair_of_a_job(tmp_path, capsys):
    job = write_job(tmp_path / "job")
    assert run(["compare", str(job), "--explain", "layers.0.mlp.down_proj"]) == 0
    assert "joined by (sequence, position)" in capsys.readouterr().out


# -- what the trainer's update knows ----------------------------------------------------------------------------------


def test_the_columns_of_the_update_reach_the_ppo_section(tmp_path):
    # GIVEN an update stage that knows advantages, its sequences in another order
    job = write_job(tmp_path / "job")
    write_update(job, {"advantages": 0.5, "ref_log_probs": -3.0})

    # WHEN the job is compared
    report = compared(job)

    # THEN the update is computed of all tokens, which no stage alone allows
    assert compared(job / "rollout", job / "logprob")["ppo"]["given"] == []
    assert report["ppo"]["given"] == ["advantages", "ref_log_probs"] and report["ppo"]["gradient"] is not None


def test_the_update_is_joined_by_tokens(tmp_path):
    # GIVEN an update of which one sequence went on with other tokens
    sequences = prompts()
    uid, ids, prompt_len = sequences[1]
    changed = [*sequences]
    changed[1] = (uid, np.append(ids[:-1], (ids[-1] + 1) % 50), prompt_len)
    job = write_job(tmp_path / "job")
    write_update(job, {"advantages": 10.0}, sequences=changed)

    # WHEN it is joined
    with open_pair(job) as opened:
        aligner = RowAligner(join_sequences(opened.a, opened.b), opened.a.sequences, opened.b.sequences)
        batch = batch_of_dumps(opened.a, opened.b, aligner, opened.update)

    # THEN every token has its own value, and the one that is another token has none
    assert batch is not None
    found = batch.columns["advantages"]
    assert np.isnan(found).sum() == 1
    known = ~np.isnan(found)
    assert np.array_equal(found[known], 10.0 + batch.position[known])


def test_tokens_that_the_update_masks_are_no_response(tmp_path):
    # GIVEN an update whose mask leaves the first token of each response out (0, 1, 2, ...: only 0 masks)
    job = write_job(tmp_path / "job")
    whole = compared(job)["tokens"]["compared"]
    write_update(job, {"response_mask": 0.0})

    # WHEN the job is compared THEN these tokens are in no figure
    report = compared(job)
    assert report["tokens"]["compared"] == whole - len(prompts()) and report["verdict"] == "consistent"


@pytest.mark.parametrize("column", ["advantages", "response_mask"])
@pytest.mark.parametrize("shared", [True, False])
def test_what_another_sample_of_a_prompt_got_is_not_taken(tmp_path, column, shared):
    # GIVEN two samples of a prompt that begin alike, and an update that holds one of them and a third one
    prompt = np.arange(3, 9)
    tails = {"first": [10, 11, 12, 13], "second": [10, 11, 14, 15], "third": [10, 11, 16, 17, 18]}
    name = {key: "u" if shared else key for key in tails}

    def of(*keys):
        return [(name[key], np.append(prompt, tails[key]), len(prompt)) for key in keys]

    job = write_job(tmp_path / "job", sequences=of("first", "second"))
    write_update(job, {column: 0.0}, sequences=of("first", "third"))

    # WHEN the job is opened THEN the second one has no value of the third
    with open_pair(job) as opened:
        known = {s.index for s in opened.a.sequences if s.tokens[-1] == 13}
        whole = {s.index for s in opened.a.sequences}
        if column == "advantages":
            aligner = RowAligner(join_sequences(opened.a, opened.b), opened.a.sequences, opened.b.sequences)
            batch = batch_of_dumps(opened.a, opened.b, aligner, opened.update)
            have = np.isfinite(batch.columns[column])
            found = {int(number) for number, known in zip(batch.sequence, have) if known}
            assert [aligner.join.pairs[number].a for number in found] == list(known)
        else:
            table = opened.a.tokens
            masked = table[(table["position"] >= len(prompt)) & ~table["response"].astype(bool)]
            assert set(masked["sequence"].tolist()) == known and known < whole


def test_the_mask_reaches_every_piece_of_a_request(tmp_path):
    # GIVEN a rollout that a weight update split in two pieces, and an update that masks their first token
    uid, ids, prompt_len = max(prompts(), key=lambda entry: len(entry[1]) - entry[2])
    job, middle = tmp_path / "job", prompt_len + 2
    first = write_stage(job, Scenario(), 0, [(uid, ids[:middle], prompt_len)])
    later = write_stage(tmp_path / "later", Scenario(), 0, [(f"{uid}#1", ids, middle)])
    with_budget(later, version=1)
    (later / "rank0.h5").rename(first / "rank0-2.h5")
    write_stage(job, actor(stage="logprob"), 0, [(uid, ids, prompt_len)])
    write_update(job, {"response_mask": 0.0}, sequences=[(uid, ids, prompt_len)])

    # WHEN the job is opened THEN neither piece holds it as a response
    with open_pair(job) as opened:
        table = opened.a.tokens
        assert len(opened.a.sequences) == 2 and not table["response"][table["position"] == prompt_len].any()
        assert table["response"][table["position"] == prompt_len + 1].any()


# -- several folders per side -----------------------------------------------------------------------------------------


def write_nodes(tmp_path, **changes):
    """Write a job whose two nodes hold half of the sequences each, and the same job on one node."""
    sequences = prompts(6)
    nodes = [tmp_path / "node1", tmp_path / "node2"]
    for rank, node in enumerate(nodes):
        write_stage(node, Scenario(manifest=changes or ranks(rank)), 0, sequences[rank::2])
        write_stage(node, actor(stage="logprob", manifest=changes or ranks(rank)), 0, sequences[1 - rank :: 2])
    return nodes, sequences


def test_the_folders_of_several_nodes_are_one_side(tmp_path, capsys):
    # GIVEN two nodes, each of which recomputed what the other one generated
    nodes, sequences = write_nodes(tmp_path)
    sides = [",".join(str(node / stage) for node in nodes) for stage in ("rollout", "logprob")]

    # WHEN the folders of both are given for each side
    assert run(["-q", "compare", *sides, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)

    # THEN every sequence is compared, and the commands to run next name both folders
    assert report["a"]["sequences"] == report["b"]["sequences"] == len(sequences) and report["verdict"] == "consistent"
    assert report["coverage"]["rows"]["a"] == {}
    assert any(sides[0] in command for command in report["next_commands"])
    assert run(["-q", "compare", str(nodes[0] / "rollout"), str(nodes[0] / "logprob")]) == 2


def test_the_jobs_of_several_nodes_are_one_job(tmp_path):
    nodes, sequences = write_nodes(tmp_path)
    report = compared(",".join(map(str, nodes)))
    assert report["verdict"] == "consistent" and report["a"]["sequences"] == len(sequences)
    assert report["a"]["path"] == ",".join(str(node / "rollout" / "step0") for node in nodes)


NODES = {
    "a folder that is not there": ([], "nodeX, one of .*, is no folder: name the job's folder of each node"),
    "a folder of nothing": ([None], r"nodeX, one of .*, holds no stage of a job \(STAGE/stepN/\*.h5\)"),
    "another step": ([("rollout", 4)], "no step of rollout is in all of .*rollout .step 0., .*nodeX/rollout .step 4."),
}


@pytest.mark.parametrize("case", NODES)
@pytest.mark.parametrize("command", ["compare", "tokens", "show"])
def test_a_node_that_holds_nothing_of_the_job_is_refused(tmp_path, case, command, capsys):
    # GIVEN a job of one node, and another folder beside it
    job, other = write_job(tmp_path / "node1"), tmp_path / "nodeX"
    held, said = NODES[case]
    for entry in held:
        other.mkdir(exist_ok=True) if entry is None else write_stage(other, Scenario(stage=entry[0]), entry[1])
    both = f"{job},{other}"

    # WHEN both are named as one job THEN that is refused in one sentence, never done without it
    if command == "show" and case == "another step":
        assert run(["show", both]) == 0 and f"next: probe show {job}" in capsys.readouterr().out
        return
    assert run(["-q", command, both]) == 2
    printed = capsys.readouterr().err
    assert re.search(said, printed) and printed.count("\n") == 1


def test_a_step_that_a_node_lacks_is_no_step_of_the_job(tmp_path):
    # GIVEN a node that holds steps 0 and 3 of both stages, one with steps 0 of the rollout only and 3 of both
    one, two, trainer = (tmp_path / name for name in ("one", "two", "trainer"))
    sequences = prompts(4)
    for step in (0, 3):
        write_stage(one, Scenario(manifest=ranks(0)), step, sequences[:2])
        write_stage(trainer, actor(stage="logprob"), step, sequences)
    write_stage(two, Scenario(manifest=ranks(1)), 3, sequences[2:])
    both = f"{one},{two},{trainer}"

    # WHEN they are compared THEN it is of the step that every folder of a stage holds
    report = compared(both)
    assert report["a"]["path"] == f"{one / 'rollout/step3'},{two / 'rollout/step3'}" and report["a"]["sequences"] == 4
    assert report["b"]["path"] == str(trainer / "logprob/step3") and report["verdict"] == "consistent"
    with pytest.raises(UsageError, match=r"step 0 of rollout is not in all of .*one/rollout \(steps 0, 3\), "):
        pair_of(both, 0)


@pytest.mark.parametrize("name", ["step007", "step+7", "step\u0667", "steps7", "step7 "])
def test_folders_that_no_writer_names_so_are_no_steps(tmp_path, name):
    # GIVEN a copy of a step beside it, under a name that reads alike
    job = write_job(tmp_path / "job", (7,))
    shutil.copytree(job / "rollout/step7", job / "rollout" / name)

    # WHEN the job and its stage are opened THEN there is one step 7
    assert stages_of(job)["rollout"] == {7: [job / "rollout/step7"]}
    with open_dump(job / "rollout") as dump:
        assert dump.files == [job / "rollout/step7/rank0.h5"] and not dump.unread


def test_files_of_one_name_without_coordinates_stay_apart(tmp_path):
    nodes, sequences = write_nodes(tmp_path, note="no coordinates")
    with open_dump(",".join(str(node / "rollout") for node in nodes)) as dump:
        assert len(dump.sequences) == len(sequences) and dump.roots == tuple(node / "rollout" for node in nodes)
        assert all(not info.lacking for info in dump.tensors.values())


def test_requests_that_two_engines_number_alike_are_two_sequences(tmp_path):
    # GIVEN two replicas that both count their requests from 0, and no driver that knows better
    from probe.store.schema import Sequence
    from probe.store.writer import DumpWriter

    for node, start in (("node1", 3), ("node2", 30)):
        writer = DumpWriter(tmp_path / node / "rollout/step0/rank0.h5", {"schema": 1, "stage": "rollout"})
        ids = np.arange(start, start + 4)
        writer.add_sequence(Sequence(0, "", "0", prompt_len=2, length=4, tokens=ids))
        from probe.store.schema import TOKEN

        writer.add_tokens(np.array([(0, p, t, p > 1, -1.0, np.nan) for p, t in enumerate(ids)], TOKEN))
        writer.close()

    # WHEN they are read as one dump THEN both are there, under names of their own
    with open_dump(f"{tmp_path / 'node1'},{tmp_path / 'node2'}") as dump:
        assert [s.tokens[0] for s in dump.sequences] == [3, 30]
        assert len({s.request_id for s in dump.sequences}) == 2


def test_folders_that_do_not_go_together_are_refused(tmp_path):
    nodes, _ = write_nodes(tmp_path)
    first = nodes[0] / "rollout"
    with pytest.raises(DumpError, match="names a folder twice"):
        open_dump(f"{first},{first}/")
    with pytest.raises(DumpError, match=r"holds rollout and .* holds logprob"):
        open_dump(f"{first},{nodes[1] / 'logprob'}")
    with pytest.raises(DumpError, match="there is no dump at"):
        open_dump(f"{first},{tmp_path / 'none'}")
    write_stage(nodes[1], Scenario(), 4)
    with pytest.raises(DumpError, match="node1/rollout holds no step 4: it holds step 0"):
        open_dump(f"{first},{nodes[1] / 'rollout'}", step=4)


def test_a_folder_with_a_comma_in_its_name_is_one_folder(tmp_path):
    folder = tmp_path / "a,b"
    folder.mkdir()
    assert roots_of(folder) == (folder,) and roots_of("x,y") != ("x,y",)
