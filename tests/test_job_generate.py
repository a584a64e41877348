"""Responses of plain scripts: generate and decode loops by hand, and what else runs or is asked for in between."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from capture_tools import by_row
from checkpoints import make_checkpoint
from job_patches import expected_logprobs, patched_job, said, stages

from probe.store.reader import open_dump


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny Qwen2 checkpoint."""
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def load(checkpoint):
    """A function that returns the checkpoint on transformers, a new object each time."""
    from transformers import AutoModelForCausalLM

    return lambda: AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture
def model(load):
    """The checkpoint on transformers."""
    return load()


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Patch transformers for one test, in a session whose settings the test gives; the folder is ``tmp_path / d``."""
    return patched_job(tmp_path, monkeypatch)


# -- generate ----------------------------------------------------------------------------------------------------------


def test_other_models_inside_generate(tmp_path, model, load, job):
    # GIVEN a processor of scores that asks another model, and one that asks it for other tokens
    session, other = job(), load()

    def guided(ids, scores):
        return scores + 0.1 * other(input_ids=ids).logits[:, -1]

    prompts = torch.tensor([[5, 6, 7], [9, 10, 11]])
    ids = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=4, do_sample=False, logits_processor=[guided]
    )
    session.close()
    # THEN only the model that generates is recorded
    assert stages(tmp_path) == ["rollout"] and "inside another model's generate" in said()
    with open_dump(tmp_path / "d" / "rollout") as dump:
        assert [s.tokens.tolist() for s in dump.sequences] == ids.tolist()
        for number, row in enumerate(ids.tolist()):
            scores = dump.tokens["logprob_recomputed"][dump.tokens["sequence"] == number]
            assert scores[3:] == pytest.approx(expected_logprobs(model, row)[3:], abs=1e-4)
        assert len(by_row(dump, "model.layers.1", "output.0")) == 2 * 6


ODD = {
    "guidance": ({"guidance_scale": 1.5}, "guidance_scale"),
    "beams in a configuration": ({"config": {"num_beams": 2}}, "num_beams"),
    "lookup in a configuration": ({"config": {"prompt_lookup_num_tokens": 2}}, "prompt_lookup_num_tokens"),
}


@pytest.mark.parametrize("case", ODD)
@pytest.mark.parametrize("where", ["argument", "position", "model"])
def test_ways_to_generate_that_cannot_be_followed(tmp_path, model, job, case, where):
    from transformers import GenerationConfig

    session = job()
    keywords, named = ODD[case]
    keywords = dict(keywords)
    settings = {"max_new_tokens": 3, "do_sample": False, **keywords.pop("config", keywords)}
    prompts, keywords = torch.tensor([[5, 6, 7]]), {}
    args = [prompts]
    if where == "argument":
        keywords = settings
    elif where == "position":
        args.append(GenerationConfig(**settings))
    else:
        model.generation_config = GenerationConfig(**settings)
    model.generate(*args, **keywords)
    model(input_ids=torch.tensor([[1, 2, 3]]))
    session.close()
    assert stages(tmp_path) == ["actor"] and f"generate with {named} is not recorded" in said()


@pytest.mark.parametrize("compiled", [True, False])
def test_a_cache_of_fixed_size_with_a_compiled_decode_or_without(tmp_path, model, job, compiled):
    from transformers import CompileConfig

    # GIVEN a padded batch, whose second response ends first
    compiling = CompileConfig(backend="eager", mode="default")
    compiling._compile_all_devices = compiled
    prompts, mask = torch.tensor([[0, 6, 7], [9, 10, 11]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
    how = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
    stop = int(model.generate(prompts, **how)[1, 4])
    session = job()
    made = model.generate(prompts, cache_implementation="static", compile_config=compiling, eos_token_id=stop, **how)
    session.close()
    ends = [next((n + 1 for n in range(3, len(row)) if row[n] == stop), len(row)) for row in made.tolist()]
    wanted = [made[0, 1 : ends[0]].tolist(), made[1, : ends[1]].tolist()]
    # THEN its ids are those that it returned, and of compiled forwards there are no tensors and log-probs
    with open_dump(tmp_path / "d" / "rollout") as dump:
        assert [s.tokens.tolist() for s in dump.sequences] == wanted
        assert [s.prompt_len for s in dump.sequences] == [2, 3] and bool(dump.tensors) != compiled
        scores = dump.tokens["logprob_recomputed"][dump.tokens["sequence"] == 1][3:]
        seen = scores[:1] if compiled else scores
        assert seen == pytest.approx(expected_logprobs(model, wanted[1])[3 : 3 + len(seen)], abs=1e-4)
        assert np.isnan(scores[len(seen) :]).all() and ends[1] < len(made[1])
    assert ("generate compiles the model's decode steps" in said()) == compiled


def test_a_generate_that_is_not_recorded_asks_for_the_step_once(tmp_path, model, job, monkeypatch):
    from probe.hooks.jobs.steps import StepClock

    session = job(step=(7,))
    asked = []
    said_before = StepClock.said.fget
    monkeypatch.setattr(StepClock, "said", property(lambda self: asked.append(1) or said_before(self)))
    model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=20, do_sample=False)
    assert len(asked) <= 2 and not (tmp_path / "d" / "rollout").exists()
    session.close()


# -- decode loops of a script's own ------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["tensor", "tokens"])
def test_a_decode_loop_written_by_hand(tmp_path, model, job, task):
    session = job(task=task)
    ids = [[5, 6, 7], [9, 10, 11]]
    with torch.no_grad():
        for _ in range(2):  # a second batch begins where the first is over
            batch, cache, tokens = torch.tensor(ids), None, torch.tensor(ids)
            for _ in range(4):
                output = model(input_ids=tokens, past_key_values=cache, use_cache=True)
                cache, tokens = output.past_key_values, output.logits[:, -1].argmax(-1)[:, None]
                batch = torch.cat([batch, tokens], 1)
            wanted = batch[:, :-1].tolist()  # the last token is given to no forward
    session.close()
    with open_dump(tmp_path / "d" / "actor") as dump:
        assert [s.tokens.tolist() for s in dump.sequences] == wanted * 2
        assert [s.prompt_len for s in dump.sequences] == [3] * 4
        scores = dump.tokens["logprob_recomputed"][dump.tokens["sequence"] == 3]
        assert scores[1:] == pytest.approx(expected_logprobs(model, wanted[1])[1:], abs=1e-4)
        assert dump.tokens["response"].sum() == 4 * 3


def test_a_loop_that_cannot_be_followed_is_said(tmp_path, model, job):
    session = job()
    output = model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=True)  # with gradients: listed at once
    model(input_ids=torch.tensor([[8]]), past_key_values=output.past_key_values)
    session.close()
    assert "goes on with sequences that began elsewhere" in said()
    with open_dump(tmp_path / "d" / "actor") as dump:
        assert len(dump.tokens) == 3


def test_logits_of_chosen_positions_score_nothing(tmp_path, model, job):
    session = job()
    ids = [1, 2, 3, 4]
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]), logits_to_keep=torch.tensor([0, 2]))
        model(input_ids=torch.tensor([ids]), logits_to_keep=2)
    session.close()
    with open_dump(tmp_path / "d" / "actor") as dump:
        scores = dump.tokens["logprob_recomputed"].reshape(2, 4)
        assert np.isnan(scores[0]).all() and np.isnan(scores[1, :3]).all()
        assert scores[1, 3] == pytest.approx(expected_logprobs(model, ids)[3], abs=1e-5)
