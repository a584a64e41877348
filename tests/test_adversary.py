"""Dumps that lack something or are wrong somewhere: never plainly consistent; broken ones: refused in one sentence."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from dump_tools import MANIFEST, open_rank, segment
from synthetic_dumps import Scenario, actor, prompts, write_dump
from synthetic_ranks import Ranks, write_ranks

from probe.compare.explain import explain
from probe.compare.replicas import replicas_gate
from probe.compare.run import compare_dumps
from probe.errors import CompareError, ProbeError
from probe.store.reader import open_dump
from probe.store.schema import Sequence
from probe.store.writer import DumpWriter


def edit(folder: Path, name: str, change: Callable[[np.ndarray], np.ndarray | None], file: str = "rank0.h5") -> None:
    """Change a table or block of a file in place; ``change`` may return other rows."""
    (path,) = folder.glob(f"*/step0/{file}")
    with h5py.File(path, "r+") as handle:
        table = handle[name][...]
        changed = change(table)
        changed = table if changed is None else changed
        dtype = handle[name].dtype
        del handle[name]
        handle.create_dataset(name, data=changed, dtype=dtype)


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], Any], file: str = "rank0.h5") -> None:
    """Change the manifest of a file."""
    (path,) = folder.glob(f"*/step0/{file}")
    with h5py.File(path, "r+") as handle:
        manifest = json.loads(handle["manifest"][()])
        change(manifest)
        handle["manifest"][()] = json.dumps(manifest)


def gate_of(report: dict[str, Any], name: str) -> dict[str, Any]:
    return next(gate for gate in report["gates"] if gate["name"] == name)


@pytest.fixture
def pair(tmp_path):
    """A rollout of one rank and an actor of two TP ranks, which agree."""
    a, b = write_dump(tmp_path / "a", Scenario()), write_ranks(tmp_path / "b", actor(), Ranks(2))
    assert re.fullmatch(r"consistent on \d+ tensors", compare_dumps(a, b)["headline"])
    return a, b


# -- rows -------------------------------------------------------------------------------------------------------------


def test_rows_that_one_rank_lacks_of_many_tensors_lower_the_share_and_are_named(pair):
    """GIVEN a TP rank that lost half its rows, THEN every row joins in some tensor, but not in all of them."""
    a, b = pair

    def lose(rows):
        rows["sequence"][::2] = -1

    with h5py.File(next(b.glob("*/step0/rank1.h5"))) as file:
        tables = list(file["rows"])
    for name in tables:
        edit(b, f"rows/{name}", lose, "rank1.h5")
    report = compare_dumps(a, b)
    assert report["verdict"] == "incomparable"
    assert 0.5 < report["coverage"]["shares"]["rows"] < 0.9
    lenient = compare_dumps(a, b, min_coverage=0.1)["headline"]
    assert re.fullmatch(r"consistent on \d+ tensors; \d+ tensors on part of the rows", lenient)


def test_logits_are_made_where_they_are_asked_for_and_their_rows_lower_no_share(tmp_path):
    a = write_dump(tmp_path / "a", Scenario())
    b = write_dump(tmp_path / "b", actor(layout="transformers", block_bytes=1))
    edit(b, "index", lambda table: table[(table["module"] != b"lm_head") | (table["block"] > 0)])
    report = compare_dumps(a, b)
    assert [entry["name"] for entry in report["coverage"]["fewer_rows"]] == ["lm_head"]
    assert report["verdict"] == "consistent" and report["coverage"]["shares"]["rows"] == 1.0


def test_what_two_pipeline_stages_call_alike_is_no_copy(tmp_path):
    for pp in range(2):
        writer = open_rank(tmp_path, sizes={"pp": 2}, at={"pp": pp})
        writer.append("decoder", "output.0", np.full((4, 2), pp, np.float32), "float32", segment(4))
        writer.append(f"layers.{pp}", "output.0", np.full((4, 2), pp, np.float32), "float32", segment(4))
        writer.close()
    with open_dump(tmp_path) as dump:
        assert replicas_gate(dump, dump).status == "skipped"
        assert (dump.read("decoder", "output.0") == 0).all() and (dump.read("layers.1", "output.0") == 1).all()


def test_values_that_are_finite_on_neither_side_are_not_compared(tmp_path):
    sides = (Scenario(drop=("norm", "lm_head", "logits")), actor(layout="transformers"))
    a, b = (write_dump(tmp_path / side.stage, side) for side in sides)
    for folder, name in ((a, "model.layers.1.mlp.gate_up_proj"), (b, "model.layers.1.mlp.gate_proj")):
        with h5py.File(next(folder.glob("*/step0/rank0.h5"))) as file:
            blocks = [text.decode() for text in file["index"]["dataset"] if text.decode().startswith(f"/{name}/")]
        for block in blocks:
            edit(folder, block, lambda values: np.full_like(values, np.nan))
    report = compare_dumps(a, b, min_coverage=0.1)
    assert "could not be paired" in report["headline"]
    assert any("finite on either side" in sentence for sentence in report["not_compared"])
    layer = next(e for e in report["layers"] if (e["name"], e["slot"]) == ("layers.1.mlp.gate_proj", "output.0"))
    assert layer["verdict"] == "incomparable"


def test_a_pair_without_a_common_row_is_not_explained_as_compared(tmp_path):
    a, b = write_dump(tmp_path / "a", Scenario()), write_ranks(tmp_path / "b", actor(), Ranks(2, lost=(0,)))
    (entry,) = explain(a, b, "lm_head")["entries"]
    assert entry["status"] == "not compared" and "rank 0 of 2 is missing" in entry["reason"]


def test_tensors_of_zeros_are_named(tmp_path):
    """GIVEN weights that were never loaded, THEN all is identical, and the line says that it is nothing."""
    sides = (Scenario(), actor(layout="transformers"))
    faults = {"layers.1.mlp.down_proj:output.0": np.zeros_like}
    a, b = (write_dump(tmp_path / side.stage, replace(side, faults=faults)) for side in sides)
    assert "; 1 tensor of zeros only" in compare_dumps(a, b)["headline"]


# -- log-probs --------------------------------------------------------------------------------------------------------


def exchange(table: np.ndarray) -> None:
    """Exchange the log-probs of the responses of sequences 0 and 1, those of the logits too."""
    for column in ("logprob", "logprob_recomputed"):
        own = [np.flatnonzero((table["sequence"] == n) & table["response"]) for n in (0, 1)]
        count = min(map(len, own))
        table[column][own[0][:count]], table[column][own[1][:count]] = (
            table[column][own[1][:count]],
            table[column][own[0][:count]].copy(),
        )


def one_off(table: np.ndarray) -> None:
    table["logprob"][np.flatnonzero(table["response"])[1]] -= 1.2


def impossible(table: np.ndarray) -> None:
    table["logprob"][np.flatnonzero(table["response"])[1]] = -np.inf


@pytest.mark.parametrize(
    ("change", "verdict"), [(exchange, "suspect"), (one_off, "divergent"), (impossible, "divergent")]
)
def test_log_probs_that_agreeing_logits_do_not_account_for_are_no_noise(tmp_path, change, verdict):
    """One log-prob that is not its own side's recomputed one, or not finite, fails the sampling gate; else the verdict
    is in doubt."""
    a, b = write_dump(tmp_path / "a", Scenario()), write_dump(tmp_path / "b", actor(engine_logprobs=True))
    edit(b, "tokens", change)
    report = compare_dumps(a, b)
    assert report["verdict"] == verdict
    assert "The logits account for all but" in report["summary"]


def test_log_probs_of_one_side_only_are_named(tmp_path):
    a, b = write_dump(tmp_path / "a", Scenario()), write_dump(tmp_path / "b", actor(engine_logprobs=True))

    def lose(table):
        table["logprob"][np.flatnonzero(table["response"])[:3]] = np.nan

    edit(b, "tokens", lose)
    report = compare_dumps(a, b)
    assert report["tokens"]["lone"] == {"a": 3, "b": 0}
    assert report["headline"].endswith("; 3 log-probs on one side only")
    assert "3 response tokens: only a has a finite log-prob of it" in report["not_compared"]


# -- weights, names, maps ---------------------------------------------------------------------------------------------


def test_weights_that_were_not_compared_are_named(pair):
    a, b = pair
    edit(b, "weights", lambda table: table[:0], "rank1.h5")
    report = compare_dumps(a, b)
    found = re.search(r"; (\d+) parameters of b without all shards$", report["headline"])
    assert found and int(found[1]) > 10
    assert any("the shard of tensor-parallel rank 1 of 2 is in no file" in text for text in report["not_compared"])
    edit(b, "weights", lambda table: table[:0], "rank0.h5")
    report = compare_dumps(a, b)
    assert report["headline"].endswith("; weights not compared")
    assert "no parameter sketches in b: weights were not compared" in report["not_compared"]


def test_tensors_that_no_table_knows_are_named_in_the_verdict_line(tmp_path):
    a, b = write_dump(tmp_path / "a", Scenario()), write_dump(tmp_path / "b", actor(layout="transformers"))

    def rename(table):
        table["module"] = [name.replace(b"model.norm", b"mystery") for name in table["module"]]

    edit(b, "index", rename)
    assert re.search(r"; 1 tensor of unknown name", compare_dumps(a, b)["headline"])


def test_pairs_that_a_map_states_are_named_in_the_verdict_line(pair, tmp_path):
    """GIVEN a map that makes two norms the logits, THEN nothing diverges, and the line says who said so."""
    mapping = tmp_path / "map.json"
    mapping.write_text(json.dumps({"lm_head": {"a": "model.norm", "b": "decoder.final_layernorm"}}))
    report = compare_dumps(*pair, mapping=mapping)
    assert "; 1 pair as --map states" in report["headline"]


# -- sequences without ids --------------------------------------------------------------------------------------------


def stage_without_ids(folder: Path, names: list[str], lengths: list[int]) -> Path:
    """Write what a later pipeline stage stores: rows of sequences whose ids it never saw."""
    manifest = {**MANIFEST, "stage": "actor"}
    writer = DumpWriter(folder / "actor" / "step0" / "rank0.h5", manifest)
    for number, (name, length) in enumerate(zip(names, lengths)):
        writer.add_sequence(Sequence(0, name, prompt_len=1, length=length))
        rows = segment(length, sequence=number)
        rows.rows["token"] = -1
        writer.append("model.norm", "output.0", np.ones((length, 2), np.float32), "float32", rows)
    writer.close()
    return folder / "actor"


def whole_model(folder: Path, names: list[str], lengths: list[int]) -> Path:
    writer = DumpWriter(folder / "rollout" / "step0" / "rank0.h5", MANIFEST)
    for number, (name, length) in enumerate(zip(names, lengths)):
        writer.add_sequence(Sequence(0, name, prompt_len=1, length=length))
        writer.append(
            "model.norm", "output.0", np.ones((length, 2), np.float32), "float32", segment(length, sequence=number)
        )
    writer.close()
    return folder / "rollout"


@pytest.mark.parametrize(
    ("names", "lengths", "lent"),
    [
        (["s0", "s1"], [4, 6], 2),
        (["d1.s0", "d1.s1"], [4, 6], 2),
        (["mine", "yours"], [5, 5], 2),
        (["p.s0", "p.s1"], [5, 5], 2),
        (["s0", "s1", "s2"], [5, 5, 6], 1),
    ],
)
def test_numbers_for_names_lend_ids_only_where_no_other_sequence_is_as_long(tmp_path, names, lengths, lent):
    a, b = whole_model(tmp_path, names, lengths), stage_without_ids(tmp_path, names, lengths)
    tokens = gate_of(compare_dumps(a, b), "tokens")
    assert tokens["status"] == "warn" and tokens["detail"].startswith(f"{lent} sequence")


def test_a_stage_whose_names_are_numbers_of_equal_sequences_is_refused_with_the_way_out(tmp_path):
    a = whole_model(tmp_path, ["s0", "s1"], [5, 5])
    b = stage_without_ids(tmp_path, ["s0", "s1"], [5, 5])
    with pytest.raises(CompareError, match=r"hold no token ids .*: announce the same uids on both sides"):
        compare_dumps(a, b)


# -- broken files -----------------------------------------------------------------------------------------------------

ODD = ("two", 1 << 40, float("nan"), [2])


def _into(*path: str) -> Callable[[dict[str, Any], Any], None]:
    def change(manifest: dict[str, Any], value: Any) -> None:
        for key in path[:-1]:
            manifest = manifest.setdefault(key, {})
        manifest[path[-1]] = value

    return change


@pytest.mark.parametrize(
    "path",
    [
        *(("layout", name) for name in ("vocab_size", "hidden_size", "num_attention_heads", "head_dim", "num_layers")),
        *(("model", "config", name) for name in ("hidden_size", "num_attention_heads", "text_config", "layer_types")),
        *(("sampling", name) for name in ("temperature", "top_p")),
        *(("topology", name) for name in ("tp", "pp", "vpp")),
        *(("coordinates", name) for name in ("tp", "cp")),
        *((name,) for name in ("topology", "coordinates", "world_size", "dtype", "driver", "batching", "backends")),
    ],
    ids=".".join,
)
def test_no_value_in_a_manifest_raises_anything_but_one_sentence(pair, path):
    a, b = pair
    with h5py.File(next(b.glob("*/step0/rank1.h5"))) as file:
        original = json.loads(file["manifest"][()])
    for value in ODD:
        for file_name in ("rank0.h5", "rank1.h5"):
            edit_manifest(b, lambda m: _into(*path)(m, value), file_name)  # noqa: B023
        try:
            compare_dumps(a, b, text=False)
        except ProbeError as error:
            assert "\n" not in str(error)
        for number in range(2):
            fresh = json.loads(json.dumps(original))
            fresh["coordinates"]["tp"] = number
            edit_manifest(b, lambda m: (m.clear(), m.update(fresh)), f"rank{number}.h5")  # noqa: B023


def test_a_module_with_odd_parameters_is_refused(pair):
    a, b = pair

    def odd(table):
        table["info"] = b'{"parameters": 3}'

    edit(b, "modules", odd)
    with pytest.raises(ProbeError, match="holds parameters as no object"):
        compare_dumps(a, b)


def test_prompts_that_share_a_length_still_join_by_their_tokens(tmp_path):
    """GIVEN one prompt twice with the same greedy response, THEN both pair and nothing is named."""
    twice = prompts(2)
    twice.append(("p2.s0", twice[0][1].copy(), twice[0][2]))
    a = write_dump(tmp_path / "a", Scenario(), twice)
    b = write_dump(tmp_path / "b", actor(), twice[::-1])
    assert re.fullmatch(r"consistent on \d+ tensors", compare_dumps(a, b)["headline"])
