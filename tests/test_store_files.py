"""Several files make one dump, and a killed writer leaves one that can be read."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from dump_tools import MANIFEST, open_writer, rank_file, segment

from probe.errors import EmptyDumpError
from probe.manifest import make_manifest, write_manifest
from probe.store.journal import journal_of
from probe.store.reader import open_dump
from probe.store.schema import TOKEN, ModuleInfo, Sequence, WeightSketch
from probe.store.writer import DumpWriter


def test_files_of_one_dump_are_merged_by_request(tmp_path):
    driver = DumpWriter(rank_file(tmp_path).with_name("driver.h5"), {**MANIFEST, "complete": True})
    for number, tokens in enumerate(([5, 6, 7], [8, 9])):
        ids = np.array(tokens, np.int64)
        driver.add_sequence(Sequence(0, f"p{number}.s0", f"{number}", f"p{number}", 0, 2, len(ids), ids))
        rows = np.zeros(len(ids), TOKEN)
        rows["sequence"], rows["position"], rows["token"] = number, np.arange(len(ids)), ids
        driver.add_tokens(rows[::-1])  # in any order
    driver.close()
    for rank in range(2):  # both workers see the requests in the other order, under the engine's own suffix
        worker = DumpWriter(rank_file(tmp_path, rank), MANIFEST)
        for request in ("1-ab12", "0-cd34", "extra"):
            worker.add_sequence(Sequence(0, request, request, prompt_len=2, length=2, weight_version=3, cached=rank))
        for number, slot in itertools.product(range(3), ("output.0", f"output.rank{rank}")):
            values = np.full((2, 4), 10 * rank + number, np.float32)
            worker.append("m", slot, values, "float32", segment(2, sequence=number, call=number))
        worker.close()
    with open_dump(tmp_path / "rollout") as dump:
        assert [(s.uid, s.request_id, s.tokens.tolist()) for s in dump.sequences] == [
            ("p0.s0", "0", [5, 6, 7]),
            ("p1.s0", "1", [8, 9]),
            ("extra", "extra", [0, 1]),
        ]
        assert [s.index for s in dump.sequences] == [0, 1, 2]
        assert [(s.length, s.weight_version, s.cached) for s in dump.sequences] == [(3, 3, 1), (2, 3, 1), (2, 3, 1)]
        assert dump.manifest["complete"] is True  # the driver's manifest is the one that counts
        assert list(dump.tensors) == [("m", "output.0"), ("m", "output.rank0"), ("m", "output.rank1")]
        rows, values = dump.rows("m", "output.0"), dump.read("m", "output.0")
        assert rows["sequence"].tolist() == [1, 1, 0, 0, 2, 2]  # the same rows of a second file are copies
        assert values[:, 0].tolist() == [0, 0, 1, 1, 2, 2]
        assert dump.tokens["token"].tolist() == [5, 6, 7, 8, 9]


def test_sequences_without_request_are_merged_by_uid(tmp_path):
    for rank, uids in enumerate((["a", "b"], ["b", "c"])):
        writer = DumpWriter(rank_file(tmp_path, rank), MANIFEST)
        for uid in uids:
            writer.add_sequence(Sequence(0, uid, prompt_len=1, length=1))
        writer.append("m", "output.0", np.zeros((1, 2), np.float32), "float32", segment(1, sequence=0))
        writer.close()
    with open_dump(tmp_path / "rollout") as dump:
        assert [s.uid for s in dump.sequences] == ["a", "b", "c"]
        assert dump.rows("m", "output.0")["sequence"].tolist() == [0, 1]


def test_the_name_is_partial_until_closed(tmp_path):
    writer = open_writer(tmp_path)
    path = rank_file(tmp_path)
    partial = path.with_name(path.name + ".partial")
    writer.append("m", "output.0", np.ones((2, 3), np.float32), "float32", segment(2))
    assert partial.exists() and not path.exists()
    assert writer.close() == path
    assert [file.name for file in path.parent.iterdir()] == ["rank0.h5"]
    assert open_dump(tmp_path / "rollout").complete


def test_a_file_still_being_written_is_readable_as_far_as_flushed(tmp_path):
    writer = open_writer(tmp_path)
    writer.append("m", "output.0", np.ones((2, 3), np.float32), "float32", segment(2))
    with pytest.raises(EmptyDumpError, match="its run ended before anything was flushed: run the dump again"):
        open_dump(tmp_path / "rollout")
    writer.add_weight(WeightSketch("w", (2, 2), "float32", np.arange(6.0).reshape(2, 3)))
    writer.add_module(ModuleInfo("m", "Linear", 0, {"eps": 1e-6}))
    writer.flush()
    writer.append("m", "output.0", np.ones((2, 3), np.float32), "float32", segment(2, start=2))
    with open_dump(tmp_path / "rollout") as dump:
        assert not dump.complete
        assert dump.rows("m", "output.0")["position"].tolist() == [0, 1]
        assert dump.weights["w"].rows.tolist() == [[0, 1, 2], [3, 4, 5]]
        assert dump.modules["m"].info == {"eps": 1e-6}
        assert dump.sequences[0].tokens.tolist() == [0, 1]  # rebuilt from the rows
    writer.close()


def test_a_complete_dump_of_nothing_says_that_nothing_was_captured(tmp_path):
    open_writer(tmp_path).close()
    with pytest.raises(EmptyDumpError, match="nothing was captured"):
        open_dump(tmp_path / "rollout")


def test_a_dump_that_lacks_its_driver_file_is_incomplete(tmp_path):
    for rank, more in enumerate(({}, {"driver": True})):  # any file that says so counts
        writer = DumpWriter(rank_file(tmp_path, rank), {**MANIFEST, **more})
        writer.add_sequence(Sequence(0, "s0", prompt_len=2, length=2))
        writer.append("m", "output.0", np.ones((2, 3), np.float32), "float32", segment(2))
        writer.close()
        assert open_dump(tmp_path / "rollout").complete is not bool(more)
    driver = DumpWriter(rank_file(tmp_path).with_name("driver.h5"), {**MANIFEST, "driver": True})
    driver.close()
    assert open_dump(tmp_path / "rollout").complete


@pytest.mark.parametrize("links", [True, False], ids=["hard links", "none"])
def test_the_first_writer_of_a_manifest_wins(tmp_path, monkeypatch, links):
    def refused(source, target):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    if not links:  # as on exFAT and some network file systems
        monkeypatch.setattr(os, "link", refused)
    for created in ("first", "second"):
        write_manifest(tmp_path, {"created": created})
    assert json.loads((tmp_path / "manifest.json").read_text()) == {"created": "first"}
    assert [file.name for file in tmp_path.iterdir()] == ["manifest.json"]


def test_the_manifest_states_no_topology_that_it_does_not_know():
    axes = ("tp", "pp", "cp", "ep", "dp")
    for alone in (make_manifest("actor", "module", "1", {}), make_manifest("actor", "module", "1", {}, world_size=1)):
        assert alone["topology"] == {**dict.fromkeys(axes, 1), "vpp": 1, "sp": False}
        assert alone["coordinates"] == dict.fromkeys(axes, 0)
    several = make_manifest("actor", "module", "1", {}, world_size=8)
    assert several["topology"] == {**dict.fromkeys(axes), "vpp": 1, "sp": False}
    assert several["coordinates"] is None
    assert (several["world_size"], several["driver"]) == (8, False)
    assert make_manifest("actor", "module", "1", {}, driver=True)["driver"] is True


def test_the_manifest_states_the_topology_that_it_is_given():
    sizes, place = {"tp": 2, "pp": 2, "sp": True}, {"tp": 1, "pp": 0, "cp": 0, "ep": 0, "dp": 0}
    found = make_manifest("actor", "megatron", "1", {}, world_size=4, topology=sizes, coordinates=place)
    assert found["topology"] == {"tp": 2, "pp": 2, "cp": None, "ep": None, "dp": None, "vpp": 1, "sp": True}
    assert found["coordinates"] == place


CHILD = """
import os, sys
from pathlib import Path
import numpy as np
sys.path.insert(0, sys.argv[2])
from dump_tools import open_writer, segment
folder = Path(sys.argv[1])
writer = open_writer(folder, block_bytes=1 << 14)
progress = os.open(folder / "progress", os.O_CREAT | os.O_WRONLY)
call = 0
while True:
    for call in range(call, call + 3):
        rows = segment(8, start=8 * call, call=call)
        for module in range(10):
            values = np.full((8, 32), call, np.float32)
            values[:, 0], values[:, 1] = rows.rows["position"], module
            writer.append(f"layers.{module}.mlp", "output.0", values, "float32", rows)
    writer.flush()
    call += 1
    os.pwrite(progress, b"%010d" % call, 0)
"""


@pytest.mark.parametrize("seed", range(4))
def test_what_was_flushed_survives_a_kill(tmp_path, seed):
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path), str(Path(__file__).parent)])
    progress = tmp_path / "progress"
    deadline = time.monotonic() + 60
    while not (progress.exists() and progress.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(random.Random(seed).uniform(0, 0.3))
    child.send_signal(signal.SIGKILL)
    child.wait()
    flushed = 8 * int(progress.read_text())
    assert flushed
    with open_dump(tmp_path / "rollout") as dump:
        assert not dump.complete
        assert [module for module, _ in dump.tensors] == [f"layers.{n}.mlp" for n in range(10)]
        for number, (module, slot) in enumerate(dump.tensors):
            values, rows = dump.read(module, slot), dump.rows(module, slot)
            assert len(values) >= flushed
            assert np.array_equal(rows["position"], np.arange(len(values)))
            assert np.array_equal(values[:, 0], rows["position"]) and np.array_equal(values[:, 2], rows["call"])
            assert (values[:, 1] == number).all() and (rows["sequence"] == 0).all()
        assert len(dump.sequences[0].tokens) >= flushed


def test_a_journal_line_cut_by_the_kill_is_ignored(tmp_path):
    writer = open_writer(tmp_path)
    for call in range(2):
        writer.append("m", "output.0", np.full((2, 3), call, np.float32), "float32", segment(2, start=2 * call))
        writer.flush()
    writer.abandon()
    journal = journal_of(writer.partial)
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:-1]) + lines[-1][:-20])
    with open_dump(tmp_path / "rollout") as dump:
        assert dump.read("m", "output.0").tolist() == [[0] * 3] * 2
