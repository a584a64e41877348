"""Replays of rope and attention from what dumps hold: rotated tensors, missing rows, unknown settings, real engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from attention_faults import (
    DTYPES,
    FAULTY,
    RECIPE,
    excesses,
    model,
    rotates,
    run,
    turn,
)
from checkpoints import make_checkpoint
from replay_tools import Captured, in_dtype
from test_replay_attention import DYNAMIC, LLAMA3, YARN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from probe.compare.replay import rope
from probe.compare.replay.base import Unreplayable
from probe.compare.replay.explain import bands_of, explain, read_best
from probe.compare.replay.figures import BROKEN_EXCESS
from probe.compare.replay.run import replay_side
from probe.compare.side import read_side
from probe.hooks.runners.job import DumpJob, Sampling
from probe.hooks.runners.run import run_dump
from probe.store.reader import open_dump

# -- what was stored --------------------------------------------------------------------------------------------------


def stored_rotary(dtype: str) -> Captured:
    """Return a run with rotated queries and keys stored, as vLLM and Megatron dumps have them."""
    kept: list[Any] = []

    def keep(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        result = turn(q, k, cos, sin)
        kept.append([x.transpose(1, 2).flatten(2).flatten(0, 1).float().numpy() for x in result])
        return result

    other = in_dtype(model(), dtype)
    undo = [rotates(keep)(layer.self_attn) for layer in other.model.layers]
    found = run(other, dtype, copied=False)
    for layer, (q, k) in enumerate(kept):
        undo[layer]()
        found.tensors[f"layers.{layer}.self_attn.rotary_emb:output.0"] = q
        found.tensors[f"layers.{layer}.self_attn.rotary_emb:output.1"] = k
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_stored_rotary_tensors_are_replayed_and_feed_the_attention(dtype: str) -> None:
    found = stored_rotary(dtype)
    for recipe in (*rope.RECIPES, RECIPE):
        context = found.context(recipe, FAULTY)
        reading = read_best(recipe, context)
        assert reading is not None and reading.figures.excess(bands_of(recipe, dtype)) < 1
    found.tensors[f"layers.{FAULTY}.self_attn.rotary_emb:output.0"] *= (
        1 + 0.05 * np.sin(np.arange(found.count()))[:, None]
    )
    assert excesses(found)[FAULTY] > BROKEN_EXCESS


def test_a_rotation_that_is_off_is_named_from_the_rotated_tensors_alone() -> None:
    recipe = rope.RECIPES[1]
    for change, cause in (
        ({"rope_parameters": {"rope_theta": 2e4}}, "rope-base"),
        ({"rotary_interleaved": True}, "rope-pairing"),
    ):
        found = stored_rotary("bfloat16")
        found.config = {**found.config, **change}
        context = found.context(recipe, FAULTY)
        reading = read_best(recipe, context)
        assert reading is not None and reading.figures.excess(bands_of(recipe, found.computed_in)) > BROKEN_EXCESS
        assert explain(recipe, context, reading)[0].cause == cause


class Cached(Captured):
    """A dump without the keys of the first 32 tokens of its first sequence: a prefix-cache hit."""

    def history(self, label: str, sequences: np.ndarray) -> Any:
        """Return the rows that are there."""
        whole = super().history(label, sequences)
        there = (whole.sequence != 0) | (whole.position >= 32)
        return type(whole)(whole.values[there], whole.sequence[there], whole.position[there])


def test_rows_whose_keys_were_not_stored_are_left_out_or_refused() -> None:
    found = run(model(), "float32", batch=2)
    cached = Cached(**vars(found))
    keys = np.array([(0, 40), (0, 70), (1, 40), (1, 70)])
    context = cached.context(RECIPE, 0, keys)
    reading = read_best(RECIPE, context)
    assert reading is not None and reading.figures.rows == 2
    assert np.isnan(reading.values[:2]).all() and np.isfinite(reading.values[2:]).all()
    with pytest.raises(Unreplayable, match="not stored"):
        read_best(RECIPE, cached.context(RECIPE, 0, keys[:2]))


def test_what_the_replay_does_not_know_is_said_in_words() -> None:
    found = run(model(), "float32")
    for change, words in (
        ({"rope_parameters": {"rope_type": "fourier"}}, "fourier is not known"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "lacks"),
        ({"model_type": "qwen3"}, "k_norm was not stored"),
        ({"model_type": "gpt_oss"}, "gpt_oss is not known"),
        ({"head_dim": 24}, "no multiple"),
    ):
        other = Captured(**{**vars(found), "config": {**found.config, **change}})
        with pytest.raises(Unreplayable, match=words):
            read_best(RECIPE, other.context(RECIPE, 0))


# -- rope against transformers ----------------------------------------------------------------------------------------

LONG = (("rope_type", "longrope"), ("rope_theta", 1e4), ("original_max_position_embeddings", 64), ("factor", 4.0))
SHORT_FACTOR, LONG_FACTOR = [1 + 0.01 * i for i in range(8)], [1.5 + 0.1 * i for i in range(8)]


@pytest.mark.parametrize("length", (50, 5000))
@pytest.mark.parametrize(
    "settings",
    [
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        dict(DYNAMIC),
        dict(LLAMA3),
        dict(YARN),
        {**dict(YARN), "mscale": 1.0, "mscale_all_dim": 0.7, "truncate": False},
        {**dict(LONG), "short_factor": SHORT_FACTOR, "long_factor": LONG_FACTOR},
    ],
    ids=lambda settings: settings["rope_type"],
)
def test_frequencies_are_those_of_transformers(settings: dict[str, Any], length: int) -> None:
    config = transformers.LlamaConfig(
        hidden_size=128, num_attention_heads=8, max_position_embeddings=4096, rope_parameters=dict(settings)
    )
    inverse, factor = ROPE_INIT_FUNCTIONS[settings["rope_type"]](config, seq_len=length)
    turn = rope.rotation({**settings, "max_position_embeddings": 4096}, 16, length=length)
    assert turn.inverse == pytest.approx(inverse.double().numpy(), rel=2e-6)
    assert turn.factor == pytest.approx(factor, rel=1e-9)


def test_memory_is_bounded_for_long_sequences() -> None:
    import tracemalloc

    from probe.compare.replay.scores import CELLS, Core, Precision, Rows, attend

    rng, length = np.random.default_rng(0), 4000
    k = Rows(rng.normal(size=(length, 2, 16)), np.zeros(length, np.int64), np.arange(length))
    at = np.arange(0, length, 32)
    q = Rows(rng.normal(size=(len(at), 8, 16)), np.zeros(len(at), np.int64), at)
    tracemalloc.start()
    values, _ = attend(q, k, k, Core(0.25), Precision("float32"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.isfinite(values).all() and peak < 12 * 8 * CELLS


# -- real engines -----------------------------------------------------------------------------------------------------

OURS = ("rope", "attention", "experts", "router ids", "router weights", "activation", "linear")


def assert_no_alarm(path: Path, kinds: set[str]) -> None:
    """Replay a dump: modules of all ``kinds`` were replayed, and each is fine."""
    with open_dump(path) as dump:
        done = replay_side(read_side(dump), "a", None)
    ours = [module for module in done.modules.values() if module.kind in OURS]
    assert kinds <= {module.kind for module in ours}, done.skipped
    assert [(module.label, module.reason) for module in ours if module.verdict != "fine"] == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("llama", {"attention"}),
        ("qwen3", {"attention"}),
        ("mixtral", {"attention", "experts"}),
        ("qwen2_moe", {"attention", "experts"}),
    ],
)
def test_healthy_dumps_of_megatron_and_transformers_raise_no_alarm(
    family: str, kinds: set[str], dtype: str, tmp_path: Path
) -> None:
    model_path = make_checkpoint(tmp_path / "model", family, hidden=128, intermediate=256, head_dim=32)
    ids = [[(3 + 7 * place * step) % 190 for place in range(length)] for step, length in ((1, 90), (3, 40))]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"token_ids": row}) + "\n" for row in ids))
    rollout = DumpJob("rollout", "transformers", model_path, tmp_path / "hf", dtype=dtype, device="cpu")
    rollout.prompts, rollout.sampling = tmp_path / "prompts.jsonl", Sampling(max_tokens=4, ignore_eos=True)
    actor = DumpJob("actor", "megatron", model_path, tmp_path / "megatron", dtype=dtype, source=tmp_path / "hf")
    assert_no_alarm(run_dump(rollout), kinds)
    assert_no_alarm(run_dump(actor), kinds | {"rope"})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp32", "bf16", "chunked", "decoded", "qwen3", "llama"])
def test_healthy_dumps_of_vllm_raise_no_alarm(rollouts: Path, name: str) -> None:
    assert_no_alarm(rollouts / name, {"rope", "attention"})
