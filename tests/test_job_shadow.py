"""PROMPTS_ONLY of models that are not causal: prompts are run alone, and nothing of the training changes by a bit."""

from __future__ import annotations

import functools
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import job_bidirectional
import numpy as np
import pytest
import torch
import transformers
from capture_tools import by_row, hook_count
from job_bidirectional import IDS, PROMPTS, Counting, batch, make_model
from job_patches import patched_job, said

from probe.compare.run import compare_dumps
from probe.hooks.causality import declared, not_causal
from probe.hooks.debugger import PrecisionDebugger
from probe.hooks.jobs import shadow
from probe.store.reader import open_dump

SCRIPT = Path(job_bidirectional.__file__)


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Patch transformers for one test, in a session whose settings the test gives; the folder is ``tmp_path / d``."""
    monkeypatch.setattr(shadow, "_how", {})
    return patched_job(tmp_path, monkeypatch)


# -- training is the same by a bit -------------------------------------------------------------------------------------


def train(folder: Path, name: str, *how: str, **switches: str) -> list[list[torch.Tensor]]:
    """Run the training script and return what each rank kept."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PROBE_", "DUMP_ON", "PROMPTS_ONLY"))}
    clean |= {"OMP_NUM_THREADS": "1", "PROBE_DUMP_DIR": str(folder / name), **switches}
    ranks = 2 if {"ddp", "fsdp2"} & set(how) else 1
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if ranks > 1 else []
    command = [sys.executable, *launch, str(SCRIPT), str(folder / f"{name}.pt"), *how]
    ran = subprocess.run(command, env=clean, capture_output=True, text=True, cwd=folder, timeout=600)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return [torch.load(folder / f"{name}.pt.{rank}") for rank in range(ranks)]


def same(one: list[list[torch.Tensor]], other: list[list[torch.Tensor]]) -> bool:
    """Tell whether two runs kept the same bits."""
    flat = [[tensor for rank in run for tensor in rank] for run in (one, other)]
    return len(flat[0]) == len(flat[1]) and all(torch.equal(a, b) for a, b in zip(*flat))


LONGER = [pytest.param((how,), marks=pytest.mark.slow) for how in ("autocast", "checkpointing", "ddp", "fsdp2")]


@pytest.mark.parametrize("how", [(), *LONGER], ids="-".join)
def test_losses_gradients_parameters_buffers_and_random_states_are_bit_identical(tmp_path, how):
    off = train(tmp_path, "off", *how)
    assert len(off[0]) == 2 * 3 + 3 * 2 * 25 + 20  # losses, gradients and parameters, and what a forward leaves behind
    assert same(off, train(tmp_path, "on", *how, DUMP_ON="1"))
    assert same(off, train(tmp_path, "prompts", *how, DUMP_ON="1", PROMPTS_ONLY="1"))
    with open_dump(tmp_path / "on" / "actor") as on, open_dump(tmp_path / "prompts" / "actor") as prompts:
        assert on.prompts == frozenset() and prompts.complete
        assert prompts.prompts == {"slice" if "fsdp2" in how else "shadow"}  # shards are gathered by all ranks or none
        rows = {name: set(by_row(dump, "model.layers.1", "output.0")) for name, dump in (("on", on), ("p", prompts))}
        assert rows["p"] == {(s, p) for s, p in rows["on"] if p < {x.uid: x.prompt_len for x in on.sequences}[s]}
        assert [s.tokens.tolist() for s in prompts.sequences] == [s.tokens.tolist() for s in on.sequences]
        # log-probs are of the job's own forward on either
        assert np.array_equal(on.tokens["logprob_recomputed"], prompts.tokens["logprob_recomputed"], equal_nan=True)


def one_step(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return gradients of one step, and what its forwards left behind."""
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    model(**batch(slice(0, 4))).loss.backward()
    return [*(p.grad for p in model.parameters()), *job_bidirectional.state(model)]


@pytest.mark.parametrize("broken", ["", "_keeper", "_random_states"])
def test_what_the_bits_rest_on_is_seen_by_these_tests(job, monkeypatch, broken):
    """GIVEN a shadow that leaves one of its traces, WHEN a step is trained, THEN the training differs, else not."""

    def step() -> list[torch.Tensor]:
        model = make_model(attention_dropout=0.2).train()
        model.model.layers[0].mlp = Counting(model.model.layers[0].mlp)
        return one_step(model)

    plain = step()
    if broken:
        monkeypatch.setattr(shadow, broken, lambda *_: lambda: None)
    session = job(prompts_only=True)
    recorded = step()
    session.close()
    assert "run alone" in said()
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded)) == (not broken)


def test_autocast_keeps_no_weight_that_has_no_gradient(job, monkeypatch):
    """torch before its pull request 165068 keeps what it casts under no_grad: weights so cast get no gradient."""
    seen: list[tuple[bool, bool]] = []
    monkeypatch.setattr(
        torch.nn.Linear,
        "forward",
        lambda self, x, forward=torch.nn.Linear.forward: (
            seen.append((torch.is_grad_enabled(), torch.is_autocast_cache_enabled())) or forward(self, x)
        ),
    )
    session = job(prompts_only=True)
    with torch.autocast("cpu", torch.bfloat16):
        make_model()(**batch(slice(0, 4))).loss.backward()
    session.close()
    assert set(seen) == {(False, False), (True, True)}


def test_generators_of_the_models_devices_are_put_back(monkeypatch):
    states = {0: "first", 1: "second"}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states[device.index])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states.update({device.index: state}))
    places = [SimpleNamespace(device=torch.device(name)) for name in ("cpu", "cuda:0", "cuda:1", "meta")]
    put_back = shadow._random_states(SimpleNamespace(parameters=lambda: places))
    states.update({0: "moved", 1: "moved"})
    put_back()
    assert states == {0: "first", 1: "second"}


# -- what is stored ----------------------------------------------------------------------------------------------------


def test_rows_are_those_of_a_forward_of_the_prompts_alone(tmp_path, job):
    model = make_model().eval()
    ids = IDS[[1, 3]]
    labels = ids.clone()
    labels[:, :4] = -100
    with torch.no_grad():
        alone = model.model(input_ids=ids[:, :4], use_cache=False).last_hidden_state
        full = model.model(input_ids=ids).last_hidden_state
    session = job(prompts_only=True)
    model(input_ids=ids, labels=labels)
    assert hook_count(model) == 0
    session.close()
    with open_dump(tmp_path / "d") as dump:
        rows = by_row(dump, "model.norm", "output.0")
        assert sorted(rows) == [(s, p) for s in ("s0", "s1") for p in range(4)]
        for (uid, position), row in rows.items():
            assert np.array_equal(row, alone[int(uid[1]), position].numpy())  # one batch of one length: the same call
            assert not np.allclose(row, full[int(uid[1]), position].numpy(), rtol=1e-2)
        assert dump.manifest["not_causal"] == "config.is_causal=False" and dump.prompts == {"shadow"}
        assert ("lm_head", "output.0") in dump.tensors


def test_prompts_of_several_lengths_are_padded(tmp_path, job):
    """Row by row: padding a batch changes sums in another order only, of 32 terms and as many keys in fp32.

    Each of the few dozen operations between embedding and last norm may so move a value of order 1 by 32 roundings,
    2^-24 * 32 = 2e-6 each; 1e-4 is some 50 of them, and 1000 times less than what the responses change.
    """
    model = make_model().eval()
    session = job(prompts_only=True)
    model(**batch(slice(0, 4)))
    session.close()
    with open_dump(tmp_path / "d") as dump:
        rows = by_row(dump, "model.norm", "output.0")
        for number, (row, end) in enumerate(zip(IDS, PROMPTS)):
            prompt = row[:end][row[:end] != 0]
            with torch.no_grad():
                alone = model.model(input_ids=prompt[None], use_cache=False).last_hidden_state[0]
                full = model.model(input_ids=row[row != 0][None], use_cache=False).last_hidden_state[0]
            found = np.stack([rows[f"s{number}", position] for position in range(len(prompt))])
            assert (f"s{number}", len(prompt)) not in rows
            assert np.abs(found - alone.numpy()).max() < 1e-4
            assert np.abs(found - full[: len(prompt)].numpy()).max() > 1e-1


def test_a_job_that_wants_few_logits_gets_no_more_in_the_shadow(tmp_path, job):
    model = make_model().eval()
    ids, kept = IDS[[1, 3]], torch.tensor([4, 5, 6])
    widths: list[int] = []
    head = model.lm_head.forward
    model.lm_head.forward = lambda hidden: (widths.append(hidden.shape[1]), head(hidden))[1]
    session = job(prompts_only=True)
    for keep in (3, kept):
        labels = ids.clone()
        labels[:, :4] = -100
        model(input_ids=ids, labels=labels, logits_to_keep=keep, shift_labels=labels[:, -3:].clone())
    session.close()
    assert widths == [1, 3, 1, 3]
    with open_dump(tmp_path / "d") as dump:
        assert sorted(by_row(dump, "lm_head", "output.0")) == [(s, 3) for s in ("s0", "s1", "s2", "s3")]


def compared(tmp_path: Path, stage: str = "rollout") -> dict:
    return compare_dumps(tmp_path / "d" / stage, tmp_path / "d" / "actor", replay=False, text=False)


@pytest.mark.parametrize("shadowed", [True, False])
@pytest.mark.parametrize("stage", ["rollout", "reference"])
def test_compared_with_prompts_alone(tmp_path, job, monkeypatch, shadowed, stage):
    """GIVEN a rollout, or a forward of prompts, WHEN the trainer's prompts ran alone, THEN their bits are the same.

    Rows that were cut from the trainer's forward are left out: without that the two would diverge.
    """
    model = make_model().eval()
    prompts = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    ids = torch.cat([prompts, prompts + 20], dim=1)
    session = job(prompts_only=True)
    if stage == "rollout":
        ids = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=4, do_sample=False)
    else:
        session = job(prompts_only=True, stage=stage)
        model(input_ids=prompts)
        session.close()
        session = job(prompts_only=True)
    if not shadowed:
        monkeypatch.setattr(shadow, "_unsafe", lambda model, named: "of this test")
    labels = ids.clone()
    labels[:, :4] = -100
    model(input_ids=ids, labels=labels)
    session.close()
    report = compared(tmp_path, stage)
    layers = [layer["verdict"] for layer in report["layers"]]
    if shadowed:
        assert report["verdict"] == "consistent" and layers == ["identical"] * 27
        return
    assert not layers and report["verdict"] == "incomparable"
    (told,) = [line for line in report["not_compared"] if "is not causal" in line]
    assert "unavailable in b" in told and "its prompt rows saw the responses" in told
    assert "not comparable with a rollout's: of this test" in said()
    monkeypatch.setattr("probe.compare.visibility.saw_unlike", lambda a, b, join: ("", ""))
    assert compared(tmp_path, stage)["verdict"] == "divergent"


def test_sides_that_both_saw_the_responses_are_compared(tmp_path, job, monkeypatch):
    model = make_model().eval()
    monkeypatch.setattr(shadow, "_unsafe", lambda model, named: "of this test")
    for stage in ("logprob", "actor"):
        session = job(prompts_only=True, stage=stage)
        model(**batch(slice(0, 4)))
        session.close()
    report = compare_dumps(tmp_path / "d" / "logprob", tmp_path / "d" / "actor", replay=False, text=False)
    assert report["verdict"] == "consistent"


def test_a_causal_model_runs_once(tmp_path, job):
    model = make_model(is_causal=True).eval()
    calls: list[int] = []
    model.model.layers[0].mlp.register_forward_hook(lambda *_: calls.append(1))
    session = job(prompts_only=True)
    model(**batch(slice(0, 4)))
    session.close()
    assert len(calls) == 1
    with open_dump(tmp_path / "d") as dump:
        assert dump.prompts == {"slice"} and "not_causal" not in dump.manifest


def test_the_debugger_cuts_and_says_so(tmp_path, caplog):
    model = make_model().eval()
    debugger = PrecisionDebugger(enabled=True, dump_path=str(tmp_path / "d"), prompts_only=True)
    with debugger.start(model, prompt_lens=[3]):
        model(input_ids=IDS[[1]])
    with open_dump(tmp_path / "d") as dump:
        assert dump.prompts == {"slice"} and dump.manifest["not_causal"] == "config.is_causal=False"
    assert "config.is_causal=False: prompt rows are of your own forwards" in caplog.text


# -- what is refused ---------------------------------------------------------------------------------------------------


def packed(model):
    ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 9]])
    return {"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]]), "labels": labelled(ids)}


def labelled(ids):
    labels = ids.clone()
    labels[:, :2] = -100
    return labels


def square_mask(model):
    return batch(slice(1, 2)) | {"attention_mask": torch.ones(1, 1, 8, 8, dtype=torch.bool)}


def odd_argument(model):
    model.forward = functools.partial(lambda forward, odd=None, **named: forward(**named), model.forward)
    return batch(slice(0, 2)) | {"odd": torch.zeros(3, 8)}


def callback(model):
    model.forward = functools.partial(lambda forward, tell=None, **named: forward(**named), model.forward)
    return batch(slice(0, 2)) | {"tell": [].append}


def quantized(model):
    model.model.layers[0].register_buffer("packed", torch.zeros(sum(p.nbytes for p in model.parameters()) + 1))
    return batch(slice(0, 2))


def flexible(model):
    model.config._attn_implementation = "flex_attention"
    model.forward = functools.partial(as_eager, model, model.forward)
    return batch(slice(0, 2))


def as_eager(model, forward, **named):
    model.config._attn_implementation = "eager"  # torch.compile takes a minute
    try:
        return forward(**named)
    finally:
        model.config._attn_implementation = "flex_attention"


def hooked(model):
    model.model.layers[0].register_forward_hook(lambda *_: None)
    return batch(slice(0, 2))


REFUSED = {
    "packed": (packed, "a row of its batch holds several sequences"),
    "square mask": (square_mask, "which of its argument attention_mask"),
    "odd argument": (odd_argument, "which of its argument odd"),
    "an argument that may be written to": (callback, "which of its argument tell"),
    "quantized weights": (quantized, "it holds more in buffers"),
    "flex attention": (flexible, "flex attention is compiled"),
    "a hook of the user's": (hooked, "test_job_shadow.hooked.<locals>.<lambda> would be called twice"),
    "no labels": (lambda model: {"input_ids": IDS[:2]}, "nothing says where its prompts end"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_run_alone_is_said_and_recorded_as_it_is(tmp_path, job, case):
    make, words = REFUSED[case]
    model = make_model().eval()
    arguments = make(model)
    with torch.no_grad():
        plain = model(**arguments).logits
    session = job(prompts_only=True)
    with torch.no_grad():
        made = model(**arguments).logits
        model(**arguments)
    assert torch.equal(made, plain)
    session.close()
    assert words in said() and said().count("not comparable with a rollout's") == 1
    with open_dump(tmp_path / "d") as dump:
        assert dump.prompts == {"slice"} and len(dump.sequences) == 2 * (2 if case == "packed" else len(made))
        assert len(by_row(dump, "model.layers.1", "output.0"))


def test_one_slice_makes_a_file_a_slice(tmp_path, job):
    model = make_model().eval()
    session = job(prompts_only=True)
    model(**batch(slice(0, 2)))
    model(**packed(model))
    model(**batch(slice(2, 4)))
    session.close()
    with open_dump(tmp_path / "d") as dump:
        assert dump.prompts == {"slice"}


def test_a_shadow_that_fails_is_no_concern_of_the_job(job, monkeypatch):
    model = make_model().eval()
    with torch.no_grad():
        plain = model(**batch(slice(0, 2))).logits
    session = job(prompts_only=True)
    monkeypatch.setattr(shadow._Shadow, "_cut", lambda *_: 1 / 0)
    with torch.no_grad():
        assert torch.equal(model(**batch(slice(0, 2))).logits, plain)
    session.close()
    assert "nothing more is recorded in this process (ZeroDivisionError" in said() and hook_count(model) == 0


def test_what_a_model_writes_into_its_arguments_is_not_the_jobs(job):
    """GIVEN a model that changes its own ids and images in place, WHEN a shadow ran, THEN it changes them once."""

    def step() -> tuple[torch.Tensor, list[torch.Tensor]]:
        model = make_model().eval()
        model.model.forward = functools.partial(writing, model.model.forward)
        given = batch(slice(0, 2)) | {"input_ids": IDS[:2].clone(), "pixel_values": torch.ones(3)}
        with torch.no_grad():
            return model(**given).logits, [given["input_ids"], given["pixel_values"]]

    plain, written = step()
    session = job(prompts_only=True)
    recorded, again = step()
    session.close()
    assert "run alone" in said()
    assert torch.equal(plain, recorded) and all(torch.equal(a, b) for a, b in zip(written, again))


def writing(forward, input_ids, pixel_values, **named):
    input_ids[:, 1] += 1
    pixel_values *= 2
    return forward(input_ids=input_ids, **named)


def test_hooks_that_transformers_adds_in_a_first_forward_are_not_added_twice(job):
    """They collect hidden states; twice, each would be there twice (and the router logits of an auxiliary loss)."""

    def step() -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return make_model().eval()(**batch(slice(0, 2)), output_hidden_states=True).hidden_states

    plain = step()
    session = job(prompts_only=True)
    recorded = step()
    session.close()
    assert "run alone" in said() and len(plain) == 3
    assert len(recorded) == len(plain) and all(torch.equal(a, b) for a, b in zip(plain, recorded))


@pytest.mark.parametrize("pad", [-1, 64, None])
def test_padding_that_is_no_token(tmp_path, job, pad):
    """A configuration may say -1, or a token that the embedding lacks: on a GPU its lookup would end the process."""
    model = make_model().eval()
    model.config.pad_token_id = pad
    session = job(prompts_only=True)
    model(**batch(slice(0, 4)))
    session.close()
    with open_dump(tmp_path / "d") as dump:
        assert dump.prompts == {"shadow"} and dump.complete


def test_a_recorder_that_fails_in_a_shadow_leaves_no_hook(job, monkeypatch):
    model = make_model().eval()
    with torch.no_grad():
        plain = model(**batch(slice(0, 2))).logits
    session = job(prompts_only=True)
    monkeypatch.setattr("probe.hooks.capture.Capture._record", lambda *_: 1 / 0)
    with torch.no_grad():
        assert torch.equal(model(**batch(slice(0, 2))).logits, plain)
    session.close()
    assert "nothing more is recorded in this process (ZeroDivisionError" in said() and hook_count(model) == 0


def test_passes_of_others_are_cut_and_say_so(tmp_path, job):
    """Of verl's engines, for one: they call the model themselves."""
    model = make_model().eval()
    session = job(prompts_only=True)
    recorder = session.recorder("logprob", model)
    assert recorder.begin()
    shadow.own_forward(recorder, [model], "it packs its batches")
    model(input_ids=IDS[[1]])
    recorder.end()
    session.close()
    with open_dump(tmp_path / "d") as dump:
        assert dump.prompts == {"slice"} and dump.manifest["not_causal"] == "config.is_causal=False"
    assert "logprob: config.is_causal=False" in said() and said().count("it packs its batches") == 1


@pytest.mark.parametrize("package", sorted(shadow.ELSEWHERE))
def test_modules_that_cannot_be_run_alone(package):
    odd = type("Layer", (torch.nn.Module,), {"__module__": f"{package}.core.layer"})()
    assert shadow._unsafe(torch.nn.Sequential(odd), {}) == shadow.ELSEWHERE[package]


# -- ranks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2])
def test_ranks_that_may_need_each_other_run_none(tmp_path, job, monkeypatch, world):
    """GIVEN ranks without DDP, WHEN one's shadow could fail alone, THEN it would leave the others a collective ahead.

    Under DDP each rank computes its own forward, and runs its own shadow (the slow test of training with it).
    """
    model = make_model().eval()
    session = job(prompts_only=True)
    monkeypatch.setattr(shadow, "world_size", lambda: world)
    model(**batch(slice(0, 4)))
    session.close()
    with open_dump(tmp_path / "d") as dump:
        assert dump.prompts == {"shadow" if world == 1 else "slice"}
    assert ("its ranks may need each other in a forward" in said()) == (world > 1)


# -- what declares it --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"is_causal": False}, "config.is_causal=False"),
        ({"is_causal": True}, ""),
        ({"is_causal": None, "causal": 0}, ""),
        ({"use_bidirectional_attention": True}, "config.use_bidirectional_attention=True"),
        ({"use_bidirectional_attention": "all"}, "config.use_bidirectional_attention=all"),
        ({"use_bidirectional_attention": "vision"}, ""),
        ({"text_config": {"use_bidirectional_attention": True}}, "config.use_bidirectional_attention=True"),
        ({"vision_config": {"is_causal": False}}, ""),
        ({"model_type": "llada"}, "config.model_type=llada"),
        ({"model_type": "Dream"}, "config.model_type=Dream"),
        ({"model_type": "roformer"}, "config.model_type=roformer"),
        ({"model_type": "roformer", "is_decoder": True}, ""),
        ({"moe_expert_capacity_factor": 1.0}, "config.moe_expert_capacity_factor=1.0"),
        ({"moe_expert_capacity_factor": None}, ""),
        ({"expert_capacity": 64, "is_encoder_decoder": True}, ""),
    ],
)
def test_declared_by_a_configuration(config, words):
    assert declared(config) == words


def built(name: str, **config: object) -> torch.nn.Module:
    """Return a model of transformers of two layers, without memory, by the name of its class."""
    cls = getattr(transformers, name)
    sizes = job_bidirectional.SIZES | {"num_key_value_heads": 4, "head_dim": 8}
    accepted = {k: v for k, v in sizes.items() if k in vars(cls.config_class())}
    with torch.device("meta"):
        return cls(cls.config_class(**accepted, **config))


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("LlamaForCausalLM", {}, ""),
        ("LlamaForCausalLM", {"is_causal": False}, "config.is_causal=False"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "config.use_bidirectional_attention=True"),
        ("BertLMHeadModel", {"is_decoder": True}, ""),
        ("BertLMHeadModel", {}, "BertSelfAttention.is_causal=False"),
        ("GPT2LMHeadModel", {}, ""),
        ("XLNetLMHeadModel", {}, "config.attn_type=bi"),
        ("HrmTextForCausalLM", {}, "config.prefix_lm=True"),
        ("T5ForConditionalGeneration", {}, ""),
        ("BartForCausalLM", {"is_encoder_decoder": False}, ""),
        ("BigBirdPegasusForCausalLM", {"is_encoder_decoder": False}, ""),
        ("RoFormerForCausalLM", {}, "config.model_type=roformer"),
        ("RoFormerForCausalLM", {"is_decoder": True}, ""),
        ("CpmAntForCausalLM", {}, "config.model_type=cpmant"),
    ],
)
def test_declared_by_models_of_transformers(name, config, words):
    assert not_causal(built(name, **config)) == words


BOTH_SIDES = {
    *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
    *("rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"),
    *("cpmant", "hrm_text", "xlm", "xlnet", "paligemma", "pi0", "diffusion_gemma"),
}
"""Models of transformers' mappings that attend to both sides by default: BERT and its kin until ``is_decoder``."""
ODD = {
    *("aya_vision", "chameleon", "cohere_compass", "cohere_compass_text", "dbrx", "deepseek_ocr2"),
    *("diffusion_gemma", "dots1", "emu3", "fast_vlm", "gemma3n", "gemma4_assistant"),
    *("gemma4_unified_assistant", "granite4_vision", "hunyuan_vl", "lfm2_moe", "llama4", "musicgen"),
    *("musicgen_melody", "perception_lm", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "reformer"),
    *("vision-encoder-decoder", "gemma3n_text"),
}
"""Models that are not made with default sizes, or need a package that is not installed."""


@pytest.mark.parametrize(
    "mapping",
    [
        "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
        pytest.param("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", marks=pytest.mark.slow),
    ],
)
def test_every_model_of_transformers_says_what_it_is(mapping):
    from transformers.models.auto import modeling_auto

    kinds = getattr(modeling_auto, mapping).items()
    models = {kind: made(names if isinstance(names, str) else names[0]) for kind, names in kinds}
    assert {kind for kind, model in models.items() if model is None} <= ODD
    said = {kind: not_causal(model) for kind, model in models.items() if model is not None}
    assert {kind for kind, words in said.items() if words} == BOTH_SIDES & said.keys()


def made(name: str) -> torch.nn.Module | None:
    """Return a model of small or of default sizes, None where neither fits."""
    for make in (built, lambda name: getattr(transformers, name)(getattr(transformers, name).config_class())):
        try:
            with torch.device("meta"):
                return make(name)
        except Exception:
            continue
    return None


def test_models_of_other_libraries_declare_nothing():
    class Odd(torch.nn.Module):
        config = SimpleNamespace(get_text_config=lambda which: None, is_causal=True)

        def get_decoder(self, which):
            raise AssertionError

    assert [not_causal(model) for model in (Odd(), torch.nn.Linear(1, 1), torch.nn.MultiheadAttention(4, 2))] == [
        ""
    ] * 3
    Odd.config.is_causal = False
    assert not_causal(Odd()) == "config.is_causal=False"


def test_declared_by_megatrons_attention():
    class Attention(torch.nn.Module):
        def __init__(self, kind):
            super().__init__()
            from megatron.core.transformer.enums import AttnMaskType

            self.attn_mask_type = AttnMaskType[kind]

    found = {kind: not_causal(torch.nn.Sequential(Attention(kind))) for kind in ("causal", "padding_causal", "no_mask")}
    assert found == {"causal": "", "padding_causal": "", "no_mask": "Attention.attn_mask_type=no_mask"}
