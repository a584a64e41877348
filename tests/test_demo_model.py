"""The demo model: a real checkpoint, the same bytes for the same seed, peaked and readable; and damage on purpose."""

from __future__ import annotations

import builtins
import json
import random
import re
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as safetensors
import torch
import transformers

from probe.errors import CheckpointError, EngineError, OutputExistsError, UsageError
from probe.hooks import demo_corpus
from probe.hooks.demo_corpus import FACTS, SPECIAL_TOKENS, SYSTEM_MESSAGE, make_corpus, render_chat
from probe.hooks.demo_model import (
    DEFAULT_RECIPE,
    DEMO_PROMPTS,
    MARKER,
    MODEL_FILES,
    corrupt_checkpoint,
    make_demo_model,
)

TINY = replace(DEFAULT_RECIPE, steps=3, warmup=1, documents=300)
DOWN = "model.layers.2.mlp.down_proj.weight"
TRUNCATED = safetensors.save({"a": torch.ones(3)})[:-1]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_demo_model(tmp_path_factory.mktemp("tiny") / "model", recipe=TINY)


def read(file: Path) -> dict[str, Any]:
    return safetensors.load_file(str(file))


def weights_of(folder: Path) -> dict[str, Any]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in read(file).items()}


def test_the_directory_is_a_whole_checkpoint(tiny: Path) -> None:
    assert sorted(file.name for file in tiny.iterdir()) == sorted((*MODEL_FILES, MARKER))
    assert [entry.name for entry in tiny.parent.iterdir()] == [tiny.name]  # no staging folder stays
    assert len({stat.S_IMODE(file.stat().st_mode) for file in tiny.iterdir()}) == 1  # weights as readable as the rest


def test_transformers_loads_it_as_the_qwen2_that_was_asked_for(tiny: Path) -> None:
    model, report = transformers.AutoModelForCausalLM.from_pretrained(tiny, output_loading_info=True)
    config = model.config
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(model).__name__ == "Qwen2ForCausalLM" and model.dtype == torch.float32
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (4, 128, 352)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert config.rope_parameters["rope_theta"] == 1e6
    assert config.max_position_embeddings == 4096
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)  # untied
    assert model.generation_config.eos_token_id == [0, 2]


def test_the_vocabulary_is_full_and_must_be_padded_by_engines_that_pad(tiny: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    config = json.loads((tiny / "config.json").read_text())
    assert len(tokenizer) == config["vocab_size"] == DEFAULT_RECIPE.vocab_size
    assert config["vocab_size"] % 64 and config["vocab_size"] % 128  # what vLLM and Megatron-core pad to
    assert tokenizer.convert_ids_to_tokens([0, 1, 2, 3]) == list(SPECIAL_TOKENS)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (config["eos_token_id"], config["pad_token_id"])


@pytest.mark.parametrize("text", [*DEMO_PROMPTS, "Ünïcode, 12 345 — ok?\n\tfin ", "don't   stop"])
def test_the_loaded_tokenizer_splits_as_the_one_that_was_trained_and_loses_nothing(tiny: Path, text: str) -> None:
    import tokenizers

    trained = tokenizers.Tokenizer.from_file(str(tiny / "tokenizer.json"))
    loaded = transformers.AutoTokenizer.from_pretrained(tiny)
    assert loaded(text).input_ids == trained.encode(text).ids
    assert loaded.decode(loaded(text).input_ids) == text


def test_the_chat_template_renders_what_the_model_was_trained_on(tiny: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    turns = [("system", SYSTEM_MESSAGE), ("user", "what is 3 plus 4?"), ("assistant", "the answer is 7.")]
    messages = [{"role": role, "content": content} for role, content in turns]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == render_chat(turns)
    prompt = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert render_chat(turns).startswith(prompt) and prompt.endswith("<|im_start|>assistant\n")


def test_the_prompts_differ_in_length_and_one_is_long(tiny: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    lengths = sorted(len(tokenizer(prompt).input_ids) for prompt in DEMO_PROMPTS)
    assert len(set(lengths)) >= 4 and lengths[0] < 6 and lengths[-1] > 40


def test_the_corpus_follows_its_seed_and_its_sums_are_right() -> None:
    corpus = make_corpus(200, seed=3)
    assert corpus == make_corpus(200, seed=3) != make_corpus(200, seed=4)
    sums = re.findall(r"what is (\d) (plus|minus) (\d)\? the answer is (\d+)\.", " ".join(corpus))
    assert len(sums) > 50
    assert all(int(z) == (int(x) + int(y) if word == "plus" else int(x) - int(y)) for x, word, y, z in sums)


def test_global_state_is_put_back(tmp_path: Path) -> None:
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float64)
        torch.set_float32_matmul_precision("high")
        torch.manual_seed(11)
        random.seed(11)
        before = (torch.get_rng_state(), random.getstate())
        with torch.inference_mode():
            make_demo_model(tmp_path / "model", recipe=replace(TINY, steps=1))
            assert torch.is_inference_mode_enabled()
        assert torch.get_num_threads() == 1 and torch.get_default_dtype() == torch.float64
        assert torch.get_float32_matmul_precision() == "high"
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision(precision)
    weights = weights_of(tmp_path / "model")
    assert {value.dtype for value in weights.values()} == {torch.float32}  # whatever the caller's default was


def test_the_caller_s_generator_does_not_reach_the_weights(tiny: Path, tmp_path: Path) -> None:
    torch.manual_seed(99)
    again = make_demo_model(tmp_path / "again", recipe=TINY)
    other = make_demo_model(tmp_path / "other", recipe=TINY, seed=1)
    assert (again / "model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()
    assert (other / "model.safetensors").read_bytes() != (tiny / "model.safetensors").read_bytes()


def test_the_observer_hears_every_step(tmp_path: Path) -> None:
    heard: list[tuple[int, int, float]] = []
    make_demo_model(tmp_path / "model", recipe=TINY, observer=lambda *event: heard.append(event))
    assert [event[:2] for event in heard] == [(1, 3), (2, 3), (3, 3)]
    assert all(0 < loss < 20 for _, _, loss in heard)


def test_a_finished_model_is_reused_and_a_changed_one_is_built_again(tmp_path: Path) -> None:
    path = make_demo_model(tmp_path / "model", recipe=TINY)
    built: list[int] = []

    def build(seed: int) -> int:
        built.clear()
        make_demo_model(path, recipe=TINY, seed=seed, observer=lambda step, total, loss: built.append(step))
        return len(built)

    first = (path / "model.safetensors").read_bytes()
    assert build(seed=0) == 0
    (path / "model.safetensors").write_bytes(first[:-1])
    assert build(seed=0) == TINY.steps and (path / "model.safetensors").read_bytes() == first
    (path / "tokenizer.json").unlink()
    assert build(seed=0) == TINY.steps
    assert build(seed=5) == TINY.steps and (path / "model.safetensors").read_bytes() != first


def test_what_someone_else_made_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "notes.txt").write_text("keep me")
    (tmp_path / "file").write_text("keep me too")
    for taken in ("theirs", "file"):
        with pytest.raises(OutputExistsError, match="not a demo model"):
            make_demo_model(tmp_path / taken, recipe=TINY)
    assert (tmp_path / "theirs" / "notes.txt").read_text() == "keep me"
    (tmp_path / "empty").mkdir()
    assert (make_demo_model(tmp_path / "empty", recipe=TINY) / MARKER).is_file()


def test_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(step: int, total: int, loss: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_demo_model(tmp_path / "model", recipe=TINY, observer=interrupt)
    assert list(tmp_path.iterdir()) == []
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_path_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        make_demo_model(tmp_path / "file" / "model", recipe=TINY)


@pytest.mark.parametrize("absent", ["torch", "transformers", "tokenizers", "safetensors"])
def test_a_missing_package_is_named_with_its_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: str) -> None:
    def import_module(name: str) -> object:
        if name.partition(".")[0] == absent:
            raise ImportError(f"No module named {absent!r}")
        return builtins.__import__(name, fromlist=["_"])

    monkeypatch.setattr(demo_corpus.importlib, "import_module", import_module)
    with pytest.raises(EngineError, match=rf'needs {absent}.*pip install "probe-rl\[actor\]"'):
        make_demo_model(tmp_path / "model", recipe=TINY)
    assert list(tmp_path.iterdir()) == []


# --- damage on purpose ---


def test_one_parameter_is_scaled_and_every_other_byte_kept(tiny: Path, tmp_path: Path) -> None:
    copy = corrupt_checkpoint(tiny, tmp_path / "bad", parameter=DOWN)
    before, after = weights_of(tiny), weights_of(copy)
    assert [name for name in before if not torch.equal(before[name], after[name])] == [DOWN]
    assert torch.equal(after[DOWN], before[DOWN] * 1.03)
    assert sorted(file.name for file in copy.iterdir()) == sorted(MODEL_FILES)  # no marker: no longer the demo model
    for name in set(MODEL_FILES) - {"model.safetensors"}:
        assert (copy / name).read_bytes() == (tiny / name).read_bytes()
    assert [entry.name for entry in tmp_path.iterdir()] == ["bad"]
    with pytest.raises(OutputExistsError):
        make_demo_model(copy, recipe=TINY)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_dtypes_are_scaled_and_rounded_once(tmp_path: Path, dtype: Any) -> None:
    source = tmp_path / "source"
    source.mkdir()
    values = torch.linspace(-2, 2, 64, dtype=torch.float64).to(dtype)
    safetensors.save_file({"a": values, "b": values.clone()}, str(source / "model.safetensors"))
    after = read(corrupt_checkpoint(source, tmp_path / "bad", parameter="b", scale=1.5) / "model.safetensors")
    assert torch.equal(after["a"], values)
    # 1.5 x is exact in float64 for these dtypes (float64 itself rounds once, as the product here does).
    assert torch.equal(after["b"], (values.double() * 1.5).to(dtype))


def test_sharded_checkpoints_follow_their_index(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    shards = {"model-1.safetensors": {"a": torch.ones(3)}, "model-2.safetensors": {"b": torch.ones(3)}}
    for file, tensors in shards.items():
        safetensors.save_file(tensors, str(source / file))
    index = {"weight_map": {name: file for file, tensors in shards.items() for name in tensors}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    copy = corrupt_checkpoint(source, tmp_path / "bad", parameter="b", scale=2.0)
    assert {name: value.tolist() for name, value in weights_of(copy).items()} == {"a": [1.0] * 3, "b": [2.0] * 3}
    assert (copy / "model-1.safetensors").read_bytes() == (source / "model-1.safetensors").read_bytes()


def test_errors_of_corrupt_checkpoint_say_what_to_do(tiny: Path, tmp_path: Path) -> None:
    def attempt(source: Path = tiny, target: Path = tmp_path / "bad", **options: object) -> None:
        corrupt_checkpoint(source, target, **{"parameter": DOWN, **options})  # type: ignore[arg-type]

    with pytest.raises(CheckpointError, match=re.escape(f"such as {DOWN}")):
        attempt(parameter="layers.2.mlp.down_proj.weight")
    with pytest.raises(CheckpointError, match=r"holds no \*\.safetensors"):
        attempt(source=tmp_path / "nowhere")
    with pytest.raises(OutputExistsError):
        attempt(target=tmp_path)
    with pytest.raises(UsageError, match="scale is nan"):
        attempt(scale=float("nan"))
    with pytest.raises(UsageError, match="changes none"):
        attempt(scale=1.0)
    assert list(tmp_path.iterdir()) == []


def test_broken_and_foreign_files_are_named(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    shard = source / "model.safetensors"
    for content in (b"", b"\xff" * 8, b"\x02" + bytes(7) + b"[]", b"\x04" + bytes(7) + b"nope", TRUNCATED):
        shard.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"model\.safetensors is not a readable"):
            corrupt_checkpoint(source, tmp_path / "bad", parameter="a")
    safetensors.save_file({"a": torch.ones(3, dtype=torch.int64)}, str(shard))
    with pytest.raises(CheckpointError, match="stored as I64"):
        corrupt_checkpoint(source, tmp_path / "bad", parameter="a")
    (source / "model.safetensors.index.json").write_text('{"weight_map": {"b": "model.safetensors"}}')
    with pytest.raises(CheckpointError, match="does not hold b"):
        corrupt_checkpoint(source, tmp_path / "bad", parameter="b")
    (source / "model.safetensors.index.json").write_text('{"weight_map": {"b": "model-7.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"model-7\.safetensors is not a readable"):
        corrupt_checkpoint(source, tmp_path / "bad", parameter="b")
    (source / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no readable weight_map"):
        corrupt_checkpoint(source, tmp_path / "bad", parameter="a")
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


# --- the real recipe ---


def sample(folder: Path, prompt: str, copies: int) -> tuple[list[str], list[float]]:
    """Sample continuations at temperature 1 from the whole vocabulary; return texts and per-token log-probs."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = tokenizer([prompt] * copies, return_tensors="pt")
    torch.manual_seed(0)
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": 32, "return_dict_in_generate": True}
    output = model.generate(**rows, **settings, output_scores=True)
    new = output.sequences[:, rows.input_ids.shape[1] :]
    scored = torch.stack(output.scores, 1).log_softmax(-1).gather(2, new[..., None])[..., 0]
    return tokenizer.batch_decode(new, skip_special_tokens=True), scored[new != tokenizer.pad_token_id].tolist()


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    losses: list[float] = []
    folder = tmp_path_factory.mktemp("shipped") / "model"
    return make_demo_model(folder, observer=lambda step, total, loss: losses.append(loss)), losses


@pytest.mark.slow
def test_the_shipped_model_has_the_same_bytes_every_time(shipped: tuple[Path, list[float]], tmp_path: Path) -> None:
    path, again = shipped[0], make_demo_model(tmp_path / "again")
    for name in MODEL_FILES:
        assert (path / name).read_bytes() == (again / name).read_bytes()


@pytest.mark.slow
def test_the_shipped_model_is_peaked_and_readable(shipped: tuple[Path, list[float]]) -> None:
    path, losses = shipped
    # The templates leave about 0.35 nats per token to chance, a uniform guess costs log(700) = 6.6: at 0.6 almost all
    # that can be learned is.
    assert sum(losses[-20:]) / 20 < 0.6
    chat = render_chat([("user", "tell me about the norm.")]) + "<|im_start|>assistant\n"
    texts, logprobs = zip(*(sample(path, prompt, copies=8) for prompt in (*DEMO_PROMPTS, chat)))
    scores = [value for group in logprobs for value in group]
    # Peaked as a trained model is (-1 nat is a chance of 37 % for the token that was drawn), yet not so certain that a
    # difference of log-probs could never show.
    assert len(scores) > 300 and -1.0 < sum(scores) / len(scores) < -0.05
    known = set(re.findall("[a-z]+", " ".join(make_corpus(DEFAULT_RECIPE.documents, seed=0))))
    words = re.findall("[a-z]+", " ".join(text for group in texts for text in group).lower())
    # A word continued from letters, drawn at temperature 1, is now and then a word of its own: one in twenty is few.
    assert sum(word in known for word in words) > 0.95 * len(words) > 100
    assert any(fact in text for fact in FACTS["the norm"] for text in texts[-1])


@pytest.mark.slow
def test_every_bias_and_norm_of_the_shipped_model_matters(shipped: tuple[Path, list[float]]) -> None:
    weights = weights_of(shipped[0])
    biases = {name: value for name, value in weights.items() if name.endswith("bias")}
    norms = {name: value for name, value in weights.items() if "norm" in name}
    assert len(biases) == 4 * 3 and len(norms) == 4 * 2 + 1
    # Started at a spread of 0.1, and 0.01 is where dropping one would begin to hide in bfloat16 activations near 1.
    assert all(value.std() > 0.01 for value in biases.values())
    # Started at exactly 1: a norm whose weight an engine forgets must show, so every one has to have moved.
    assert all((value - 1).abs().max() > 0.01 and value.std() > 0.001 for value in norms.values())
