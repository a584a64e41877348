"""Real FSDP2, FSDP1 and DDP over gloo, two processes: the runner of ``probe dump`` and a user's own script."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from fsdp_debugger import MODES, SEQUENCES, load

from probe.compare.run import compare_dumps
from probe.errors import UsageError
from probe.hooks.debugger import PrecisionDebugger
from probe.hooks.runners.job import DumpJob, Parallel, Sampling
from probe.hooks.runners.run import run_dump
from probe.hooks.weights import sketches
from probe.store.reader import open_dump
from probe.store.schema import WeightSketch

pytestmark = pytest.mark.slow

# fp32 on the same kernels; another batch size may sum in another order (24 bits carry 6e-8 per rounding)
TOLERANCE = 2e-5


@pytest.fixture(scope="module", params=["untied", "tied"])
def checkpoint(request, tmp_path_factory):
    """A tiny Qwen2 checkpoint."""
    return make_checkpoint(tmp_path_factory.mktemp("model"), tied=request.param == "tied")


@pytest.fixture(scope="module")
def rollout(checkpoint, tmp_path_factory):
    """A rollout of seven prompts on transformers: an odd number, so that one rank has fewer micro-batches."""
    folder = tmp_path_factory.mktemp("rollout")
    prompts = [{"id": f"p{n}", "token_ids": [5 + 7 * n + k for k in range(2 + n)]} for n in range(7)]
    (folder / "ids.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    sampling = Sampling(max_tokens=4, ignore_eos=True)
    job = DumpJob("rollout", "transformers", checkpoint, folder / "dump", folder / "ids.jsonl", dtype="float32")
    job.sampling = sampling
    return run_dump(job)


def actor(rollout: Path, checkpoint: Path, output: Path, engine: str, **changes) -> Path:
    job = DumpJob("actor", engine, checkpoint, output, source=rollout, dtype="float32", **changes)
    return run_dump(job)


@pytest.fixture(scope="module")
def reference(rollout, checkpoint, tmp_path_factory):
    """The same tokens on transformers in one process."""
    return actor(rollout, checkpoint, tmp_path_factory.mktemp("hf") / "d", "transformers", micro_batch_size=3)


@pytest.mark.parametrize("engine", ["fsdp", "fsdp1"])
def test_a_sharded_dump_agrees_with_one_process(tmp_path, rollout, checkpoint, reference, engine):
    dump = actor(rollout, checkpoint, tmp_path / "d", engine, parallel=Parallel(dp=2), micro_batch_size=2)
    report = compare_dumps(reference, dump)
    assert report["verdict"] in ("consistent", "identical")
    coverage = report["coverage"]
    assert (coverage["only_a"], coverage["only_b"], coverage["unavailable"]) == ([], [], [])
    with open_dump(reference) as whole, open_dump(dump) as sharded:
        rows = sum(s.length for s in whole.sequences)
        assert sharded.complete and sharded.manifest["topology"]["dp"] == 2
        assert sorted(s.uid for s in sharded.sequences) == sorted(s.uid for s in whole.sequences)
        assert set(sharded.tensors) == set(whole.tensors)
        scored = sharded.tokens["position"] > 0
        assert np.isfinite(sharded.tokens["logprob"][scored]).all()
        # torch's fp32 log-softmax against float64
        assert np.abs(sharded.tokens["logprob"] - sharded.tokens["logprob_recomputed"])[scored].max() <= 1e-5
    assert {layer["rows"] for layer in report["layers"]} == {rows}
    assert max(layer["rel_l2"] for layer in report["layers"]) <= TOLERANCE
    gates = {gate["name"]: gate for gate in report["gates"]}
    assert gates["weights"]["status"] == "pass", gates["weights"]
    assert sorted(path.name for path in dump.glob("actor/step0/*")) == ["driver.h5", "rank0.h5", "rank1.h5"]
    sizes = [coordinates_of(dump, rank) for rank in (0, 1)]
    assert [c["dp"] for c in sizes] == [0, 1]


def manifest_of(folder: Path, rank: int) -> dict:
    import h5py

    with h5py.File(folder / "actor" / "step0" / f"rank{rank}.h5") as file:
        return json.loads(file["manifest"][()])


def coordinates_of(folder: Path, rank: int) -> dict:
    return manifest_of(folder, rank)["coordinates"]


def weights_of(folder: Path, rank: int) -> dict[str, WeightSketch]:
    """Return the sketches in one rank's own file."""
    import h5py

    found = {}
    with h5py.File(folder / "actor" / "step0" / f"rank{rank}.h5") as file:
        for entry in file["weights"]:
            rows = file[entry["dataset"]][:] if entry["dataset"] else np.zeros((0, 3))
            name, shape = entry["name"].decode(), tuple(json.loads(entry["shape"]))
            lies = {key: int(entry[key]) for key in ("axis", "start", "whole")}
            found[name] = WeightSketch(
                name, shape, entry["dtype"].decode(), rows, alias=entry["alias"].decode(), **lies
            )
    return found


def test_too_few_sequences_are_refused_before_anything_starts(tmp_path, rollout, checkpoint):
    with pytest.raises(UsageError, match="7 sequences cannot be dealt out to 8 data-parallel ranks: lower --dp"):
        actor(rollout, checkpoint, tmp_path / "d", "fsdp", parallel=Parallel(dp=8))
    assert not (tmp_path / "d").exists()


# -- a user's own script -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scripts(checkpoint, tmp_path_factory):
    """The folder of dumps that fsdp_debugger.py leaves with two processes."""
    folder = tmp_path_factory.mktemp("scripts")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += [
        "--nproc-per-node",
        "2",
        str(Path(__file__).with_name("fsdp_debugger.py")),
        str(checkpoint),
        str(folder),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def alone(checkpoint, tmp_path_factory):
    """The same sequences on the bare model in one process."""
    folder, model = tmp_path_factory.mktemp("alone") / "d", load(str(checkpoint))
    with PrecisionDebugger(enabled=True, dump_path=str(folder)).start(model), torch.no_grad():
        for tokens in SEQUENCES:
            model(input_ids=torch.tensor([tokens]), use_cache=False)
    return folder


each_mode = pytest.mark.parametrize("mode", [mode.__name__ for mode in MODES])


@each_mode
def test_wrapped_models_dump_what_the_bare_model_does(scripts, alone, mode):
    report = compare_dumps(alone, scripts / mode)
    assert report["verdict"] in ("consistent", "identical"), report["summary"]
    assert (report["coverage"]["only_a"], report["coverage"]["only_b"]) == ([], [])
    assert {layer["rows"] for layer in report["layers"]} == {sum(map(len, SEQUENCES))}
    assert max(layer["rel_l2"] for layer in report["layers"]) <= TOLERANCE
    with open_dump(scripts / mode) as dump, open_dump(alone) as whole:
        assert dump.engine == "transformers" and dump.complete
        assert not [name for name in dump.modules if "#" in name or "_module" in name or name.startswith("module")]
        assert set(dump.modules) == set(whole.modules)  # and nothing was recorded in backward
        assert sorted(s.tokens.tolist() for s in dump.sequences) == sorted(SEQUENCES)


@each_mode
def test_ranks_do_not_share_the_names_of_their_sequences(scripts, mode):
    known = mode != "by_hand"
    with open_dump(scripts / mode) as dump:
        prefix = "d" if known else "r"
        assert sorted(s.uid for s in dump.sequences) == [f"{prefix}{r}.s{n}" for r in (0, 1) for n in (0, 1)]
    for rank in (0, 1):
        manifest = manifest_of(scripts / mode, rank)
        assert manifest["world_size"] == 2
        assert manifest["topology"]["dp"] == (2 if known else None)
        assert manifest["coordinates"] == (dict(dict.fromkeys(("tp", "pp", "cp", "ep"), 0), dp=rank) if known else None)


def test_slices_of_fsdp2_join_to_the_whole_sketch(scripts, checkpoint):
    whole = {s.name: s for s in sketches(load(str(checkpoint)))}
    parts = [weights_of(scripts / "fsdp2", rank) for rank in (0, 1)]
    assert parts[0].keys() == whole.keys()
    for name, sketch in whole.items():
        held = [part[name] for part in parts if name in part]
        assert {p.alias for p in held} == {sketch.alias}
        if sketch.alias:
            continue
        assert [p.start for p in held] == [0, len(held[0].rows)] and {p.whole for p in held} == {sketch.shape[0]}
        # float64 sums of some hundred products, in blocks of other sizes
        assert np.allclose(np.concatenate([p.rows for p in held]), sketch.rows, rtol=1e-12, atol=1e-12)
        assert sum(p.shape[0] for p in held) == sketch.shape[0] and all(np.isnan(p.quad) for p in held)


@pytest.mark.parametrize("mode", ["fsdp1", "fsdp1_with_original_parameters"])
def test_flat_parameters_are_listed_as_not_sketched(scripts, alone, checkpoint, mode):
    names = {name for name, _ in load(str(checkpoint)).named_parameters()}
    found = weights_of(scripts / mode, 0)
    assert set(found) >= names and all(not len(s.rows) and not s.alias for s in found.values())
    gate = next(g for g in compare_dumps(alone, scripts / mode)["gates"] if g["name"] == "weights")
    assert gate["status"] != "pass" and "sketch" in gate["detail"], gate


def test_ddp_sketches_are_those_of_the_bare_model(scripts, alone):
    gate = next(g for g in compare_dumps(alone, scripts / "ddp")["gates"] if g["name"] == "weights")
    assert gate["status"] == "pass"


def test_hybrid_and_partial_wrappers_are_told_apart(monkeypatch):
    """Where a wrapper covers only some processes, nothing is claimed about the others."""
    from probe.hooks import wrappers

    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    monkeypatch.setattr(wrappers, "_replicas", functools.partial(lambda inner, m: 2 if m is inner else 0, model[0]))
    assert wrappers.is_data_parallel(model, 2) and not wrappers.is_data_parallel(model, 4)
