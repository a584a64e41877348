"""Ranks whose file is missing, unfinished, contradictory or forged: whole tensors or one clear sentence, no halves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from dump_tools import open_rank, rank_file, refusal, segment

from probe.errors import DumpError
from probe.store.reader import open_dump
from probe.store.schema import CHECKSUM, COLUMNS, PARTIAL, WHOLE, WeightSketch

TP2 = {"tp": 2}


def two_ranks(folder: Path, counts=(4, 4), *, shards=(COLUMNS, COLUMNS), dtypes=("float32", "float32"), close=(1, 1)):
    """Write a tensor of two TP ranks, ``counts`` rows each."""
    for tp in range(2):
        writer = open_rank(folder, sizes=TP2, at={"tp": tp})
        values = np.full((counts[tp], 3), tp, dtypes[tp])
        writer.append("m", "output.0", values, dtypes[tp], segment(counts[tp]), shard=shards[tp])
        writer.append("other", "output.0", np.ones((2, 3), np.float32), "float32", segment(2))
        if close[tp]:
            writer.close()
        else:
            writer.flush()
            writer.abandon()


def test_a_missing_rank_is_named_and_its_tensors_are_never_read_in_half(tmp_path):
    two_ranks(tmp_path)
    rank_file(tmp_path, 1).rename(tmp_path / "elsewhere")
    with open_dump(tmp_path) as dump:
        assert not dump.complete
        assert dump.lost == ["the file of tensor-parallel rank 1 of 2 is missing"]
        info = dump.tensors["m", "output.0"]
        assert info.rows == 0 and info.left_out == 4
        reason = r"m:output\.0 .* part of the features is in no file: that of tensor-parallel rank 1 of 2 is missing"
        for read in (dump.read, dump.rows, dump.read_shards, lambda *key: list(dump.iter_blocks(*key))):
            with pytest.raises(DumpError, match=reason):
                read("m", "output.0")
        assert len(dump.read("other", "output.0")) == 2


def test_rows_that_one_rank_lacks_are_left_out_and_counted(tmp_path):
    two_ranks(tmp_path, (4, 3))
    with open_dump(tmp_path) as dump:
        info = dump.tensors["m", "output.0"]
        assert (info.rows, info.left_out) == (3, 1) and "not every tensor-parallel rank stored them" in info.lacking
        assert dump.read("m", "output.0").tolist() == [[0, 0, 0, 1, 1, 1]] * 3


def test_a_rank_that_was_killed_gives_what_it_had_flushed(tmp_path):
    two_ranks(tmp_path, (4, 2), close=(1, 0))
    with open_dump(tmp_path) as dump:
        assert dump.lost == ["its run was killed or is still going"]
        assert dump.tensors["m", "output.0"].rows == 2


def test_only_checksums_are_no_tensor(tmp_path):
    writer = open_rank(tmp_path, sizes=TP2, at={"tp": 1})
    writer.append("m", "output.0", np.zeros(2, np.uint64), "uint64", segment(2), shard=CHECKSUM)
    writer.append("other", "output.0", np.zeros((2, 1), np.float32), "float32", segment(2))
    writer.close()
    with open_dump(tmp_path) as dump, pytest.raises(DumpError, match=r"only checksums of it are stored: .* rank 0"):
        dump.read("m", "output.0")


def test_ranks_that_store_other_dtypes_do_not_join(tmp_path):
    two_ranks(tmp_path, dtypes=("float32", "float64"))
    with open_dump(tmp_path) as dump:
        assert "do not join (float32 [3] and float64 [3])" in dump.tensors["m", "output.0"].lacking


def test_ranks_that_disagree_about_the_kind_of_shard_are_refused(tmp_path):
    two_ranks(tmp_path, shards=(COLUMNS, WHOLE))
    with pytest.raises(DumpError, match=r"the ranks disagree about how they share m:output\.0"):
        open_dump(tmp_path)


@pytest.mark.parametrize("axis", ["pp", "dp"])
def test_tensors_of_the_shape_of_a_ranks_own_batch_keep_the_first_ones(tmp_path, axis):
    """The model's own output is hidden states on the first stage, logits on the last; masks are as long as a batch."""
    for rank in range(2):
        writer = open_rank(tmp_path, sizes={axis: 2}, at={axis: rank})
        values = np.full((2, 3 + rank), rank, np.float32)
        writer.append("", "output.0", values, "float32", segment(2, start=2 * rank))
        writer.close()
    with open_dump(tmp_path) as dump:
        info = dump.tensors["", "output.0"]
        assert (info.rows, info.feature_shape, info.left_out, info.lacking) == (2, (3,), 0, "")


def test_a_missing_pipeline_rank_makes_a_dump_incomplete(tmp_path):
    writer = open_rank(tmp_path, sizes={"pp": 3, "dp": 2}, at={"pp": 1})
    writer.append("m", "output.0", np.zeros((2, 1), np.float32), "float32", segment(2))
    writer.close()
    with open_dump(tmp_path) as dump:
        assert dump.lost == ["the files of pipeline-parallel ranks 0, 2 of 3 are missing"]


def test_a_forged_number_of_ranks_costs_no_time_and_no_memory(tmp_path):
    writer = open_rank(tmp_path, sizes={"tp": 1 << 20, "pp": 1 << 20})
    writer.append("m", "output.0", np.zeros((2, 1), np.float32), "float32", segment(2), shard=COLUMNS)
    writer.add_weight(WeightSketch("w", (2, 4), "float32", np.ones((2, 3)), axis=0))
    writer.close()
    sentence = refusal(tmp_path / "rollout")
    assert "tensor-parallel ranks 1, 2, 3 and more of 1048576 is missing" in sentence and len(sentence) < 500
    with open_dump(tmp_path) as dump:
        assert "ranks 1, 2, 3 and more of 1048576" in dump.joined_weights["w"].gap


# -- forged files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"coordinates": {"tp": 2}}, "is of tp rank 2 of 2, which no rank is"),
        ({"coordinates": {"tp": -1}}, "is of tp rank -1"),
        ({"coordinates": {"dp": True}}, "is of dp rank True"),
        ({"coordinates": {"pp": "0"}}, "is of pp rank '0'"),
        ({"coordinates": [0, 1]}, "holds 'coordinates' as something else than an object"),
        ({"topology": {"tp": 0}}, "states 0 ranks along tp"),
        ({"topology": {"cp": 1.5}}, "states 1.5 ranks along cp"),
        ({"topology": {"vpp": 1 << 40}}, "ranks along vpp"),
        ({"topology": [1]}, "holds 'topology' as something else than an object"),
        ({"topology": {"tp": 4}}, "state both 2 and 4 ranks along tp"),
    ],
)
def test_forged_places_are_refused(tmp_path, change, problem):
    two_ranks(tmp_path)
    base = {"topology": {"tp": 2}, "coordinates": dict.fromkeys(("tp", "pp", "cp", "ep", "dp"), 0)}
    parts = {key: {**base[key], **value} if isinstance(value, dict) else value for key, value in change.items()}
    writer = open_rank(tmp_path, sizes={"tp": 2, "pp": 3}, at={"tp": 1, "pp": 2}, manifest=parts)
    writer.close()
    with pytest.raises(DumpError, match=problem.replace("[", r"\[")) as caught:
        open_dump(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "dtype", "shard", "problem"),
    [
        (np.zeros((2, 3), np.float32), "float32", "diagonal", "is shared over ranks as 'diagonal'"),
        (np.zeros(2, np.int64), "int64", CHECKSUM, "holds row checksums as int64"),
        (np.zeros((2, 3), np.uint64), "uint64", CHECKSUM, "holds row checksums as uint64"),
    ],
)
def test_forged_shards_are_refused(tmp_path, values, dtype, shard, problem):
    writer = open_rank(tmp_path, sizes=TP2)
    writer.append("m", "output.0", values, dtype, segment(2), shard=shard)
    writer.close()
    with pytest.raises(DumpError, match=problem):
        open_dump(tmp_path)


def test_sums_of_eight_bit_floats_are_refused(tmp_path):
    for tp in range(2):
        writer = open_rank(tmp_path, sizes=TP2, at={"tp": tp})
        writer.append("m", "output.0", np.zeros((2, 3), np.uint8), "float8_e4m3fn", segment(2), shard=PARTIAL)
        writer.close()
    with open_dump(tmp_path) as dump, pytest.raises(DumpError, match="cannot be turned back into float8_e4m3fn"):
        dump.read("m", "output.0")
