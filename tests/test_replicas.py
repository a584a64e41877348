"""Ranks that hold the same rows must hold the same values: the gate names what differs, and where."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from dump_tools import open_rank, segment
from synthetic_dumps import Scenario, actor, write_dump
from synthetic_ranks import Ranks, write_ranks

from probe.compare.judge import overall
from probe.compare.replicas import check_replicas, replicas_gate
from probe.compare.run import compare_dumps
from probe.store.checksums import row_checksums
from probe.store.reader import open_dump
from probe.store.schema import CHECKSUM, REPLICATED, Sequence


def gate_of(report):
    return next(gate for gate in report["gates"] if gate["name"] == "replicas")


def test_a_dump_of_one_process_has_no_copies(tmp_path):
    report = compare_dumps(write_dump(tmp_path / "a", Scenario()), write_dump(tmp_path / "b", actor()))
    assert gate_of(report) == {
        "name": "replicas",
        "status": "skipped",
        "detail": "no row is stored by more than one rank",
        "findings": [],
    }


def test_one_bit_of_one_copy_is_found_named_and_makes_the_verdict_suspect(tmp_path):
    a = write_dump(tmp_path / "a", Scenario())
    label = "decoder.layers.1.self_attention.linear_proj:output.0"
    b = write_ranks(tmp_path / "b", actor(), Ranks(2, corrupt=(1, label)))
    report = compare_dumps(a, b)
    detail = gate_of(report)["detail"]
    assert gate_of(report)["status"] == "fail" and report["verdict"] == "suspect"
    assert f"{label} of b is not the same on rank tp 0 and rank tp 1: 2 of" in detail  # the last row of both calls
    assert "first p1.s0 position" in detail and "(1 of " in detail
    assert "replicas gate fails" in report["summary"]


@pytest.mark.parametrize(
    ("status", "verdict"), [("fail", "suspect"), ("pass", "consistent"), ("skipped", "consistent")]
)
def test_what_the_gate_says_of_the_verdict(status, verdict):
    gates = {"tokens": "pass", "replicas": status}
    assert overall(["consistent"] * 10, gates, None, 1.0, 0.9) == verdict
    assert overall(["divergent"], gates, None, 1.0, 0.9) == "divergent"
    assert overall(["consistent"], gates, None, 0.1, 0.9) == "incomparable"


def test_copies_of_data_parallel_ranks_and_full_copies_are_compared(tmp_path):
    for dp in range(2):
        for tp in range(2):
            one = [Sequence(0, "shared", prompt_len=2, length=4)]
            writer = open_rank(tmp_path, one, sizes={"tp": 2, "dp": 2}, at={"tp": tp, "dp": dp})
            values = np.ones((4, 2), np.float32)
            values[3] += dp
            values[1] += tp
            writer.append("m", "output.0", values, "float32", segment(4, call=dp))
            writer.append("same", "output.0", np.ones((4, 2), np.float32), "float32", segment(4, call=dp))
            writer.close()
    with open_dump(tmp_path) as dump:
        assert dump.tensors["m", "output.0"].rows == 4
        found = {(c.tensor, c.rank): c.differing["position"].tolist() for c in check_replicas(dump)}
        assert found == {
            ("m:output.0", "rank tp 1, dp 0"): [1],
            ("m:output.0", "rank tp 0, dp 1"): [3],
            ("m:output.0", "rank tp 1, dp 1"): [1, 3],
            **{("same:output.0", f"rank tp {tp}, dp {dp}"): [] for tp, dp in ((1, 0), (0, 1), (1, 1))},
        }
        gate = replicas_gate(dump, dump)
        assert gate.status == "fail" and gate.detail.endswith("; and 3 more (6 of 12 copies of tensors differ)")


def test_tensors_without_tokens_are_named_by_their_call(tmp_path):
    for tp in range(2):
        writer = open_rank(tmp_path, sizes={"tp": 2}, at={"tp": tp})
        rows = segment(1, call=7)
        rows.rows["sequence"] = rows.rows["position"] = -1
        mask, dtype, shard = np.full((1, 2), tp, np.float32), "float32", REPLICATED
        if tp:
            mask, dtype, shard = row_checksums(mask), "uint64", CHECKSUM
        writer.append("m", "output.0", mask, dtype, rows, has_rows=False, shard=shard)
        writer.close()
    with open_dump(tmp_path) as dump:
        assert "1 of 1 rows differ, first call 7" in replicas_gate(dump, dump).detail


def test_row_checksums_tell_bits_apart_whatever_the_shape():
    values = np.array([[0.0, 1.0], [-0.0, 1.0], [0.0, 1.0]], np.float32)
    found = row_checksums(values)
    assert found.dtype == np.uint64 and found[0] == found[2] != found[1]
    assert np.array_equal(row_checksums(values.reshape(3, 1, 2)), found)
    assert np.array_equal(row_checksums(np.asfortranarray(values)), found)
    assert row_checksums(np.zeros((0, 3), np.uint16)).shape == (0,)
    assert len(set(row_checksums(np.zeros((2, 0), np.float32)))) == 1
    assert row_checksums(np.arange(3.0)).shape == (3,)


# -- probe show -------------------------------------------------------------------------------------------------------


def shown(*arguments):
    done = subprocess.run([sys.executable, "-m", "probe", "show", *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return " ".join((done.stdout + done.stderr).split())


def test_show_says_how_ranks_share_a_tensor(tmp_path):
    folder = write_ranks(tmp_path / "d", actor(), Ranks(2))
    text = shown(folder, "--all")
    assert "columns over 2 ranks" in text and "copies on 2 ranks" in text and "incomplete" not in text
    assert "parallel tp 2" in text
    text = shown(folder, "decoder.layers.0.self_attention.linear_qkv")
    assert "x 64, " in text and "columns over 2 ranks" in text


def test_show_says_what_a_lost_rank_takes_away(tmp_path):
    folder = write_ranks(tmp_path / "d", actor(), Ranks(2, lost=(1,)))
    text = shown(folder)
    assert "incomplete: the file of tensor-parallel rank 1 of 2 is missing" in text
    assert "tensors are not whole" in text
    text = shown(folder, "decoder.layers.0.self_attention.linear_qkv")
    assert "rows are left out: part of the features is in no file" in text
