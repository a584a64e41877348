"""verl's Megatron engine, as far as a CPU lets it: passes, schedule and preprocessing are verl's, the model ours."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from activation_tools import clean_environment, python

from probe import open_dump
from probe.compare.run import compare_dumps
from probe.hooks.jobs.log import TROUBLE, read_lines

pytestmark = pytest.mark.slow
pytest.importorskip("verl")
pytest.importorskip("megatron.core")

TESTS = Path(__file__).parent
ENVIRONMENT = {
    "VERL_PLATFORM": "probe_cpu",
    "VERL_ENGINE_DEVICE": "cuda",
    "VERL_USE_EXTERNAL_MODULES": "verl_cpu_platform",
    "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
}


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> dict[str, Path]:
    """A job per layout (thd packed, bshd padded), recorded; and one in thd that is not."""
    folder = tmp_path_factory.mktemp("megatron")
    for name, data_format, switch in (("thd", "thd", "1"), ("bshd", "bshd", "1"), ("off", "thd", "0")):
        environ = clean_environment(**ENVIRONMENT, DUMP_ON=switch, PROBE_DUMP_DIR=str(folder / name))
        words = (TESTS / "verl_megatron.py", demo_model, data_format, folder / f"{name}.json")
        python(*words, cwd=folder, environ=environ)
    return {name: folder / name for name in ("thd", "bshd", "off")}


@pytest.mark.parametrize("data_format", ["thd", "bshd"])
def test_both_layouts_have_the_rows_of_their_sequences_alone(dumps: dict[str, Path], data_format: str) -> None:
    """GIVEN sequences of 9, 6, 6 and 7 tokens in micro-batches of two, THEN padding is no row, and all is well."""
    assert [line.text for line in read_lines(dumps[data_format]) if line.kind == TROUBLE] == []
    for stage in ("logprob", "update"):
        dump = open_dump(dumps[data_format] / stage)
        assert sorted(s.length for s in dump.sequences) == [6, 6, 7, 9]
        assert dump.tensors["decoder.layers.0", "output.0"].rows == 28
        assert dump.complete


def test_thd_and_bshd_agree(dumps: dict[str, Path]) -> None:
    report = compare_dumps(dumps["thd"] / "logprob", dumps["bshd"] / "logprob")
    assert report["verdict"] == "consistent"
    assert not report["coverage"]["only_a"] and not report["coverage"]["only_b"]


def test_log_probs_are_the_engines(dumps: dict[str, Path]) -> None:
    result = json.loads((dumps["thd"].parent / "thd.json").read_text())
    dump = open_dump(dumps["thd"] / "logprob")
    mine = {}
    for sequence in dump.sequences:
        own = dump.tokens[(dump.tokens["sequence"] == sequence.index) & dump.tokens["response"]]
        mine[sequence.uid.partition(".")[0]] = own["logprob"]
    for number, old in enumerate(result["old_log_probs"]):
        own = mine[f"p{number}"]
        assert np.array_equal(own, np.float64(old[: len(own)]))


def test_training_is_bit_identical(dumps: dict[str, Path]) -> None:
    folder = dumps["thd"].parent
    assert not dumps["off"].exists()
    assert json.loads((folder / "off.json").read_text()) == json.loads((folder / "thd.json").read_text())


PARALLEL = {
    "tp2": ({"tp": 2}, "update"),
    "pp2": ({"pp": 2}, "update"),
    # the interleaved schedule's backward pass hangs on the CPU's communication, with and without recording
    "vpp2": ({"pp": 2, "vpp": 2}, "logprob"),
}


@pytest.mark.parametrize("name", PARALLEL)
def test_parallel_ranks_join_to_what_one_rank_has(dumps: dict[str, Path], demo_model: Path, name: str) -> None:
    """GIVEN the engine on two ranks, its batch packed, THEN their files join to the one rank's tensors and rows."""
    sizes, last = PARALLEL[name]
    folder = dumps["thd"].parent
    environ = clean_environment(**ENVIRONMENT, DUMP_ON="1", PROBE_DUMP_DIR=str(folder / name))
    words = (TESTS / "verl_megatron.py", demo_model, "thd", folder / f"{name}.json", json.dumps(sizes), last)
    python("-m", "torch.distributed.run", "--nproc-per-node", "2", *words, cwd=folder, environ=environ)
    assert [line.text for line in read_lines(folder / name) if line.kind == TROUBLE] == []
    stages = ["logprob", "update"][: 1 + (last == "update")]
    assert sorted(path.name for path in (folder / name).iterdir() if path.is_dir()) == stages
    for stage in stages:
        report = compare_dumps(dumps["thd"] / stage, folder / name / stage)
        assert report["verdict"] in ("consistent", "identical")
        assert not report["coverage"]["only_a"] and not report["coverage"]["only_b"]
        assert report["coverage"]["rows"]["joined"] == 28
