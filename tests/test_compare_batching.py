"""Whole comparisons, through dump files, of sides that ran the same tokens in other batches, orders and pieces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_dumps import Scenario, actor, write_dump
from synthetic_model import Tiny

from probe.compare.run import compare_dumps
from probe.store import writer as store_writer
from probe.store.schema import Sequence

Run = tuple[str, np.ndarray, int]

RNG = np.random.default_rng(5)
PROMPT = RNG.integers(0, 50, 5)
TURN = np.concatenate([PROMPT, RNG.integers(0, 50, 4)])
WHOLE = np.concatenate([TURN, RNG.integers(0, 50, 7)])
"""A second turn: three tokens of a tool's answer, then four generated ones."""
OTHER = RNG.integers(0, 50, 12)


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Compare two scenarios over (uid, ids, prompt length) runs; ``fields`` completes each side's sequences by uid."""

    def run(runs_a: list[Run], runs_b: list[Run], fields: dict[str, dict[str, Any]] | None = None, **more: Any) -> Any:
        add = store_writer.DumpWriter.add_sequence

        def completed(self: Any, sequence: Sequence) -> int:
            return add(self, replace(sequence, **(fields or {}).get(sequence.uid, {})))

        monkeypatch.setattr(store_writer.DumpWriter, "add_sequence", completed)
        a, b = Scenario(model=Tiny(), noise=None), actor("transformers")
        paths = write_dump(tmp_path / "a", a, runs_a), write_dump(tmp_path / "b", b, runs_b)
        return compare_dumps(*paths, **more)

    return run


def worst(report: dict[str, Any]) -> float:
    return max(layer["rel_l2"] for layer in report["layers"] if layer["rel_l2"] is not None)


def test_samples_of_one_prompt_without_usable_names_meet_in_any_order(compare):
    """n responses per prompt, greedy duplicates among them, under one uid or none, reordered by balance_batch."""
    responses = [RNG.integers(0, 50, size) for size in (3, 6, 4)]
    runs = [("u", np.concatenate([PROMPT, response]), 5) for response in (*responses, responses[1])]
    report = compare(runs, [("", ids, n) for _, ids, n in (runs[2], runs[1], runs[0], runs[3])])
    assert report["verdict"] == "consistent" and worst(report) < 1e-6
    rows = report["coverage"]["rows"]
    assert (rows["joined"], rows["a"]) == (sum(len(ids) - 1 for _, ids, _ in runs), {})
    assert rows["b"] == {"not_executed": 4}
    assert report["tokens"]["compared"] == 3 + 6 + 4 + 6 and report["tokens"]["max_abs_logprob_diff"] < 1e-5


@pytest.mark.parametrize(
    "fields",
    [
        {name: {"trajectory": "t"} for name in ("r0", "r1")},
        {"r0": {"request_id": "7-0a", "uid": ""}, "r1": {"request_id": "8-1b", "uid": ""}},
    ],
    ids=["declared", "known by content only"],
)
def test_turns_of_one_trajectory_meet_the_whole_sequence(compare, fields):
    pieces = [("r1", WHOLE, len(TURN) + 3), ("other", OTHER, 4), ("r0", TURN, 5)]
    report = compare(pieces, [("other", OTHER, 4), ("whole", WHOLE, 5)], fields)
    assert report["verdict"] == "consistent" and worst(report) < 1e-6
    rows = report["coverage"]["rows"]
    assert rows["joined"] == len(WHOLE) - 1 + len(OTHER) - 1
    assert (rows["a"], rows["b"]) == ({"computed_again": len(TURN) - 1}, {"not_executed": 2})
    # the tokens of both turns are response tokens, the tool's answer between them is not
    lengths = {entry["sequence"]: entry["prompt_len"] for entry in report["tokens"]["sequences"]}
    assert sorted(lengths.values()) == [4, 5]
    assert report["tokens"]["max_abs_logprob_diff"] < 1e-5


@pytest.mark.parametrize("version", [1, 2])
def test_partial_rollouts_of_two_weight_versions_meet_where_the_versions_agree(compare, version):
    """The second piece ran all rows again, with newer weights."""
    fields = {
        "r0": {"trajectory": "t", "weight_version": 1},
        "r1": {"trajectory": "t", "weight_version": 2},
        "whole": {"weight_version": version},
    }
    pieces = [("r0", TURN, 5), ("r1", WHOLE, len(TURN))]
    report = compare(pieces, [("whole", WHOLE, 5)], fields, min_coverage=0.1)
    rows, old, new = report["coverage"]["rows"], len(TURN) - 1, len(WHOLE) - 1
    assert report["verdict"] == "consistent"
    if version == 2:
        assert (rows["joined"], rows["a"]) == (new, {"computed_again": old})
    else:
        assert (rows["joined"], rows["a"]) == (old, {"computed_again": old, "other_version": new - old})
        assert "rows of another weight version" in report["headline"]
