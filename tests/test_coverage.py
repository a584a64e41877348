"""Every row and every native tensor of both sides is joined or has exactly one reason, and the verdict line says so."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sequence_tools import aligner_of, seq, side, table
from synthetic_dumps import Scenario, actor, opened, prompts, write_dump

from probe.compare.coverage import REASONS, count_rows, fewer_rows
from probe.compare.report.model import ROW_REASONS
from probe.compare.run import compare_dumps, compare_open, exit_status
from probe.errors import CompareError
from probe.store.schema import ROW, RowSegment, Sequence, Versions
from probe.store.writer import DumpWriter

IDS = [1, 2, 3, 4, 5]


def counted(a: Any, b: Any, cells_a: list[tuple[int, int]], cells_b: list[tuple[int, int]], **options: Any):
    aligner = aligner_of(a, b, **options)
    return count_rows(aligner, [aligner.rows(table(cells_a), table(cells_b))], a, b)


def positions(*numbers: int) -> list[tuple[int, int]]:
    return [(0, p) for p in numbers]


# -- one reason at a time ---------------------------------------------------------------------------------------------


def test_the_last_generated_token_is_not_executed_and_not_missing():
    a, b = side(seq("x", IDS)), side(seq("x", IDS))
    coverage = counted(a, b, positions(0, 1, 2, 3), positions(0, 1, 2, 3, 4))
    assert (coverage.joined, coverage.a, coverage.b) == (4, {}, {"not_executed": 1})
    assert coverage.covered == 1.0


def test_a_missing_prompt_row_counts_even_when_it_is_the_last():
    a, b = side(seq("x", [1, 2])), side(seq("x", [1, 2]))
    coverage = counted(a, b, positions(0), positions(0, 1))
    assert coverage.b == {"not_stored": 1} and coverage.covered == 0.5


def test_rows_after_the_tokens_part_are_listed_but_excused():
    a, b = side(seq("x", [1, 2, 3, 4])), side(seq("x", [1, 2, 9, 9]))
    coverage = counted(a, b, positions(0, 1, 2, 3), positions(0, 1, 2, 3))
    assert (coverage.joined, coverage.a, coverage.b) == (2, {"beyond_prefix": 2}, {"beyond_prefix": 2})
    assert coverage.covered == 1.0


def test_response_rows_that_one_side_was_told_not_to_store_are_excused():
    a, b = side(seq("x", IDS), prompts_only=True), side(seq("x", IDS))
    coverage = counted(a, b, positions(0, 1), positions(*range(5)))
    assert (coverage.joined, coverage.b) == (2, {"prompts_only": 2, "not_executed": 1})
    knows_prompts_only = side(seq("x", IDS[:2]), prompts_only=True)
    assert counted(knows_prompts_only, b, positions(0, 1), positions(*range(5))).b == {"prompts_only": 3}


def test_prefix_cache_hits_are_rows_that_the_other_side_did_not_execute():
    a, b = side(seq("x", IDS, 4, cached=3)), side(seq("x", IDS, 4))
    coverage = counted(a, b, positions(3), positions(0, 1, 2, 3))
    assert (coverage.joined, coverage.b, coverage.covered) == (1, {"prefix_cache": 3}, 1.0)


def test_rows_of_a_sequence_that_one_side_lacks_lower_the_coverage():
    a, b = side(seq("x", [1, 2, 3]), seq("y", [7, 8, 9])), side(seq("x", [1, 2, 3]))
    coverage = counted(a, b, [*positions(0, 1, 2), (1, 0), (1, 1), (1, 2)], positions(0, 1, 2))
    assert (coverage.joined, coverage.a, coverage.covered) == (3, {"other_sequence": 3}, 0.5)


def test_rows_of_another_weight_version_lower_the_coverage_unless_asked_for():
    a, b = side(seq("x", IDS, weight_version=1)), side(seq("x", IDS, weight_version=2))
    coverage = counted(a, b, positions(0, 1), positions(0, 1))
    assert coverage.a == coverage.b == {"other_version": 2} and coverage.covered == 0.0
    assert counted(a, b, positions(0, 1), positions(0, 1), across_versions=True).joined == 2


def test_rows_that_a_later_piece_holds_too_are_computed_again():
    a = side(seq("r0", IDS[:3], trajectory="t"), seq("r1", IDS, 3, trajectory="t"))
    coverage = counted(a, side(seq("x", IDS)), [*positions(0, 1, 2), (1, 0), (1, 1), (1, 2)], positions(0, 1, 2))
    assert (coverage.joined, coverage.a, coverage.covered) == (3, {"computed_again": 3}, 1.0)


def test_padding_is_counted():
    a, b = side(seq("x", IDS)), side(seq("x", IDS))
    assert counted(a, b, [*positions(0), (-1, -1), (-1, -1)], positions(0)).a == {"padding": 2}


def test_a_tensor_with_fewer_rows_is_listed_with_the_side_that_lacks_them():
    a, b = side(seq("x", IDS)), side(seq("x", IDS))
    aligner = aligner_of(a, b)
    hidden = aligner.rows(table(positions(0, 1, 2, 3)), table(positions(0, 1, 2, 3, 4)))
    logits = aligner.rows(table(positions(3)), table(positions(1, 2, 3)))
    (entry,) = fewer_rows(aligner, [("hidden", hidden), ("logits", logits), ("hidden too", hidden)])
    assert (entry.label, entry.joined, entry.missing, entry.lacking_a, entry.lacking_b) == ("logits", 1, 3, 3, 1)


# -- any two dumps ----------------------------------------------------------------------------------------------------


@st.composite
def sides(draw: st.DrawFn) -> tuple[Any, list[np.ndarray]]:
    """Draw one side: overlapping contents, names, versions, pieces, cache holes, and row tables of three tensors.

    A side may be a rollout or its trainer, which declares versions of its sequences and lists its whole batch or not.
    """
    found = []
    for number in range(draw(st.integers(0, 5))):
        ids = [draw(st.integers(0, 1)), *draw(st.lists(st.integers(0, 1), min_size=0, max_size=5))]
        more = {
            "sample": draw(st.integers(0, 1)),
            "trajectory": draw(st.sampled_from(["", "t"])),
            "weight_version": draw(st.sampled_from([0, 1, 2])),
            "cached": draw(st.integers(0, 2)),
            "declared": draw(st.sampled_from([None, None, Versions(0, 0, 1), Versions(1, 1, 1), Versions(0, 1, 1)])),
        }
        found.append(seq(draw(st.sampled_from(["", "u", f"n{number}"])), ids, draw(st.integers(0, 3)), **more))
    cells = [(-1, -1), *((n, p) for n, s in enumerate(found) for p in range(len(s.tokens)))]
    drawn = [draw(st.lists(st.tuples(st.sampled_from(cells), st.integers(0, 3)), max_size=12)) for _ in range(3)]
    tables = [table([(*cell, call) for cell, call in one]) for one in drawn]
    job = {"run": draw(st.sampled_from(["", "r"])), "stage": draw(st.sampled_from(["rollout", "logprob"]))}
    return side(*found, prompts_only=draw(st.booleans()), whole_batch=draw(st.booleans()), **job), tables


@given(sides(), sides(), st.booleans())
@settings(deadline=None, max_examples=300)
def test_every_row_of_any_two_dumps_is_joined_or_has_one_reason(one, other, across_versions):
    (a, tables_a), (b, tables_b) = one, other
    aligner = aligner_of(a, b, across_versions=across_versions)
    joins = [aligner.rows(*both) for both in zip(tables_a, tables_b)]
    coverage = count_rows(aligner, joins, a, b)
    for counts, tables in ((coverage.a, tables_a), (coverage.b, tables_b)):
        stored = {(int(r["sequence"]), int(r["position"])) for rows in tables for r in rows if r["sequence"] >= 0}
        padding = max(int((rows["sequence"] < 0).sum()) for rows in tables)
        assert coverage.joined + sum(counts.values()) == len(stored) + padding
        assert set(counts) <= set(REASONS) and all(count > 0 for count in counts.values())
    for join, rows_a, rows_b in zip(joins, tables_a, tables_b):  # never rows of other token content
        for row_a, row_b in zip(rows_a[join.index_a], rows_b[join.index_b]):
            left, right = a.sequences[row_a["sequence"]].tokens, b.sequences[row_b["sequence"]].tokens
            assert row_a["position"] == row_b["position"]
            assert left[: row_a["position"] + 1].tolist() == right[: row_b["position"] + 1].tolist()
    entries = fewer_rows(aligner, [(str(n), join) for n, join in enumerate(joins)])
    everything = {(int(s), int(p)) for join in joins for s, p in zip(join.pair, join.position)}
    assert all(entry.joined + entry.missing == len(everything) for entry in entries)
    assert {int(entry.label) for entry in entries} == {
        n for n, join in enumerate(joins) if len(join.index_a) < len(everything)
    }


def test_the_words_of_every_reason_are_documented():
    text = (Path(__file__).parents[1] / "docs" / "report.md").read_text(encoding="utf-8")
    assert all(f"| `{reason}` |" in text for reason in ROW_REASONS)


# -- whole comparisons ------------------------------------------------------------------------------------------------


WORDS = ("embed", "norm", "qkv", "q_proj", "rotary", "core_attention", "o_proj", "mlp", "layers.1", "logits", "lm_head")


@pytest.mark.parametrize("layout", ["megatron", "megatron-te", "transformers"])
@given(drop_a=st.sets(st.sampled_from(WORDS), max_size=3), drop_b=st.sets(st.sampled_from(WORDS), max_size=3))
@settings(deadline=None, max_examples=20)
def test_every_native_tensor_is_compared_or_listed_once_with_a_reason(layout, drop_a, drop_b):
    """Whatever either side did not store."""
    with tempfile.TemporaryDirectory() as folder:
        one = opened(Path(folder) / "a", Scenario(drop=tuple(drop_a)))
        other = opened(Path(folder) / "b", actor(layout, drop=tuple(drop_b)))
        with one as a, other as b:
            report = compare_open(a, b, min_coverage=0)
            for name, dump in (("a", a), ("b", b)):
                check_natives(report, name, {f"{module}:{slot}" for module, slot in dump.tensors})


def check_natives(report: dict[str, Any], name: str, stored: set[str]) -> None:
    """Check that the report accounts for every native tensor of one side."""
    coverage = report["coverage"]
    compared = {label for layer in report["layers"] for label in layer[name]["tensors"]}
    lacking = [entry for entry in coverage["unavailable"] if entry["side"] != name]
    listed = [*coverage[f"only_{name}"], *lacking]
    alone = {label for entry in listed for label in entry["tensors"]}
    auxiliary = [f"{entry['name']}:{entry['slot']}" for entry in coverage[f"auxiliary_{name}"]]
    assert compared | alone | set(auxiliary) == stored
    assert not set(auxiliary) & (compared | alone) and len(auxiliary) == len(set(auxiliary))
    assert all(entry["reason"] for entry in (*listed, *coverage[f"auxiliary_{name}"]))
    canonical = [(entry["name"], entry["slot"]) for entry in (*coverage["only_a"], *coverage["only_b"])]
    canonical += [(entry["name"], entry["slot"]) for entry in coverage["unavailable"]]
    matched = [(e["name"], e["slot"]) for e in report["layers"] if e["verdict"] != "missing"]
    assert len(set(canonical + matched)) == len(canonical) + len(matched)


def test_dumps_of_which_no_tensor_has_a_canonical_name_are_incomparable(tmp_path):
    """GIVEN names that no table knows on either side, THEN agreeing log-probs alone do not make them consistent."""
    paths = write_dump(tmp_path / "a", Scenario()), tmp_path / "b"
    with opened(tmp_path / "c", actor()) as source:
        writer = DumpWriter(paths[1] / "actor" / "step0" / "rank0.h5", {**source.manifest, "engine": {"name": "x"}})
        for sequence in source.sequences:
            writer.add_sequence(sequence)
        writer.add_tokens(source.tokens)
        rows = np.array([(0, 0, int(source.sequences[0].tokens[0]), 0)], ROW)
        writer.append("block.thing", "output.0", np.ones((1, 4), np.float32), "float32", RowSegment(rows))
        writer.close()
    report = compare_dumps(*paths)
    assert report["tokens"]["compared"] and report["verdict"] == "incomparable" and exit_status(report) == 2


def test_dumps_of_two_weight_versions_are_refused_with_the_option_that_joins_them(tmp_path):
    paths = [tmp_path / "a", tmp_path / "b"]
    for version, path in enumerate(paths, start=1):
        write_versions(path, [version])
    with pytest.raises(CompareError, match=r"weight version 1.* and .*\(2\)") as caught:
        compare_dumps(*paths)
    assert "--across-versions" in str(caught.value)
    report = compare_dumps(*paths, across_versions=True)
    assert report["coverage"]["rows"]["joined"] == 5 and report["verdict"] == "consistent"


def write_versions(path: Any, versions: list[int], repeat: float | None = None) -> None:
    """Write one sequence per weight version; ``repeat``: the last row was computed before, off by this much."""
    manifest = {"schema": 1, "stage": "actor", "engine": {"name": "transformers"}, "dtype": "float32"}
    writer = DumpWriter(path / "actor" / "step0" / "rank0.h5", manifest)
    for number, version in enumerate(versions):
        ids = np.array([number, *IDS[1:]], np.int64)
        writer.add_sequence(Sequence(0, f"u{number}", prompt_len=5, length=5, tokens=ids, weight_version=version))
    rows = np.array([(n, p, 0, 1) for n in range(len(versions)) for p in range(5)], ROW)
    rows["token"] = [n if p == 0 else IDS[p] for n in range(len(versions)) for p in range(5)]
    values = np.random.default_rng(0).standard_normal((len(rows), 4)).astype(np.float32)
    if repeat is not None:
        again = rows[-1:].copy()
        again["call"] = 0
        rows, values = np.concatenate([again, rows]), np.concatenate([values[-1:] + np.float32(repeat), values])
    writer.append("model.embed_tokens", "output.0", values, "float32", RowSegment(rows))
    writer.close()


def test_some_rows_of_another_weight_version_are_said_in_the_verdict_line(tmp_path):
    write_versions(tmp_path / "a", [1, 2])
    write_versions(tmp_path / "b", [1, 1])
    report = compare_dumps(tmp_path / "a", tmp_path / "b", min_coverage=0.1)
    rows = report["coverage"]["rows"]
    assert (rows["joined"], rows["a"], rows["b"]) == (5, {"other_version": 5}, {"other_version": 5})
    assert report["headline"] == "consistent on 1 tensor; 10 rows of another weight version; weights not compared"
    assert compare_dumps(tmp_path / "a", tmp_path / "b")["verdict"] == "incomparable"


@pytest.mark.parametrize(("repeat", "differing"), [(0.0, 0), (1e-3, 1)])
def test_rows_computed_twice_are_counted_and_said_where_their_bits_differ(tmp_path, repeat, differing):
    write_versions(tmp_path / "a", [0], repeat)
    write_versions(tmp_path / "b", [0])
    report = compare_dumps(tmp_path / "a", tmp_path / "b")
    assert report["coverage"]["rows"]["recomputed"] == {
        "a": {"rows": 1, "differing": differing},
        "b": {"rows": 0, "differing": 0},
    }
    assert any("other bits" in sentence for sentence in report["not_compared"]) == bool(differing)
    assert report["verdict"] == "consistent" and report["layers"][0]["rel_l2"] == 0


BARE = {"drop": ("",)}


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        ({}, {}, ("consistent on 45 tensors",)),
        ({"prompts_only": True}, {}, ("consistent on prompt rows of 45 tensors", "decode not seen")),
        ({}, {"layout": "megatron-te"}, ("consistent on 39 tensors", "6 norms not comparable (fused)")),
        ({"drop": ("model.norm",)}, {}, ("consistent on 44 tensors", "1 tensor only in b")),
        (
            {**BARE, "manifest": {"task": "tokens"}},
            {**BARE, "manifest": {"task": "tokens"}},
            ("consistent on", "log-probs"),
        ),
        (BARE, BARE, ("incomparable: only 0% of the tensors", "no tensor was recorded")),
        ({"complete": False}, {}, ("consistent on 45 tensors", "a incomplete")),
        ({"drop": ("mlp", "self_attn")}, {}, ("incomparable: only", "less than the 90% asked for")),
    ],
)
def test_the_verdict_line_says_what_was_not_compared(tmp_path, a, b, words):
    paths = write_dump(tmp_path / "a", Scenario(noise=1, **a)), write_dump(tmp_path / "b", actor(noise=2, **b))
    report = compare_dumps(*paths)
    assert all(word in report["headline"] for word in words), report["headline"]
    assert report["summary"].lower().startswith(report["headline"].lower() + ".")
    assert report["headline"].startswith(report["verdict"])


def test_logits_of_fewer_rows_are_listed(tmp_path):
    with opened(tmp_path / "a", Scenario()) as a, opened(tmp_path / "b", actor()) as b:
        whole = a.rows

        def sampled(module: str, slot: str) -> np.ndarray:
            rows = whole(module, slot).copy()
            if module == "logits_processor":
                rows["sequence"][rows["position"] < 3] = -1
            return rows

        a.rows = sampled  # type: ignore[method-assign]
        report = compare_open(a, b)
    (entry,) = report["coverage"]["fewer_rows"]
    lost = 3 * len(prompts())
    assert (entry["name"], entry["missing"], entry["lacking_a"], entry["lacking_b"]) == ("lm_head", lost, lost, 0)
    assert any(sentence.startswith("lm_head:output.0") for sentence in report["not_compared"])


def test_rows_that_no_tensor_holds_whole_are_counted(tmp_path):
    with opened(tmp_path / "a", Scenario()) as a, opened(tmp_path / "b", actor()) as b:
        for info in a.tensors.values():
            info.left_out, info.lacking = 7, "a part is in no file"
        report = compare_open(a, b)
    assert report["coverage"]["rows"]["a"]["part_of_shards"] == 7
    assert "7 rows without all their shards" in report["headline"]
