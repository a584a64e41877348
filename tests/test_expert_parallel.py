"""Real Megatron-core with expert parallelism: an expert's tensors hold every token that it served, whoever's it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import make_checkpoint

from probe.compare.run import compare_dumps
from probe.hooks.runners.job import DumpJob, Parallel
from probe.hooks.runners.run import run_dump
from probe.store.reader import Dump, open_dump

pytestmark = pytest.mark.slow

PROMPTS = [[5, 9, 33, 101, 7, 60], [150, 2, 2, 88, 61, 30, 12, 190, 4, 3], [17, 42, 8], [9, 8, 7, 6, 5], [77]]
"""Five, so that one of two ranks (three of four) runs out of batches first and then only keeps the others company."""
REL_L2 = 2e-5
"""fp32 experts that see batches of other sizes, and with tensor parallelism add up in another order (seen: 3e-7)."""
ALONE: dict[str, Any] = {}
EP2, EP4 = {"ep": 2}, {"ep": 4}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str, bool]] = {
    "padded": (ALONE, EP2, "padded", False),
    "packed, prompts only": (ALONE, EP2, "packed", True),
    "two ranks and four": (EP2, EP4, "padded", False),
    "tp2 sp": (ALONE, {"ep": 2, "tp": 2, "sp": True, "dp": 2}, "padded", False),
}
Actor = Callable[[dict[str, Any], str, bool], Path]


@pytest.fixture(scope="module")
def actor(tmp_path_factory: pytest.TempPathFactory) -> Actor:
    """Return a function that dumps the tokens of a small Mixtral's rollout on Megatron."""
    folder, made = tmp_path_factory.mktemp("experts"), dict[str, Path]()
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps({"token_ids": ids}) for ids in PROMPTS))
    model = make_checkpoint(folder / "model", "mixtral")
    rollout = DumpJob("rollout", "transformers", model, folder / "rollout", device="cpu")
    rollout.prompts, rollout.sampling.max_tokens = folder / "prompts.jsonl", 4
    source = run_dump(rollout)

    def dump(sizes: dict[str, Any], layout: str, prompts_only: bool) -> Path:
        name = f"{'-'.join(sizes)}-{sizes.get('ep')}-{layout}-{prompts_only}"
        if name not in made:
            job = DumpJob("actor", "megatron", model, folder / name, source=source, device="cpu", layout=layout)
            job.parallel, job.micro_batch_size, job.prompts_only = Parallel(**sizes), 1, prompts_only
            made[name] = run_dump(job)
        return made[name]

    return dump


def by_token(dump: Dump, key: tuple[str, str]) -> tuple[list[tuple[str, int, int]], np.ndarray]:
    """Return (uid, position, token) of a tensor's rows, sorted, and its values in that order."""
    rows = dump.rows(*key)
    names = [(dump.sequences[row["sequence"]].uid, int(row["position"]), int(row["token"])) for row in rows]
    order = sorted(range(len(names)), key=names.__getitem__)
    return [names[n] for n in order], dump.read(*key)[order]


@pytest.mark.parametrize("case", CASES)
def test_every_row_of_every_expert_is_that_of_another_number_of_ranks(actor: Actor, case: str) -> None:
    few, more, layout, prompts_only = CASES[case]
    paths = actor(few, layout, prompts_only), actor(more, layout, prompts_only)
    with open_dump(paths[0]) as a, open_dump(paths[1]) as b:
        experts = [key for key in a.tensors if ".local_experts." in key[0]]
        assert {key[0].split(".")[6] for key in experts} == {"0", "1", "2", "3"}
        assert set(experts) == {key for key in b.tensors if ".local_experts." in key[0]}
        for key in experts:
            (tokens, wanted), (found, values) = by_token(a, key), by_token(b, key)
            assert found == tokens, key
            if "tp" not in more or not key[0].endswith("linear_fc1"):  # else its gate and up columns lie by rank
                assert np.linalg.norm(values - wanted) <= REL_L2 * np.linalg.norm(wanted), key
        assert not any(info.left_out for info in b.tensors.values())
    report, itself = compare_dumps(*paths), compare_dumps(paths[0], paths[0])
    assert report["verdict"] == "consistent", report["summary"]
    assert (report["coverage"]["only_a"], report["coverage"]["only_b"]) == ([], [])
    assert max(layer["rel_l2"] for layer in report["layers"]) <= REL_L2
    compared = rows_of_experts(report)
    assert any(label.endswith("experts.3.down_proj:output.0") for label in compared)
    assert compared == rows_of_experts(itself)


def rows_of_experts(report: dict[str, Any]) -> dict[str, int]:
    """Return how many rows of each expert's tensors a report compares."""
    layers = (layer for layer in report["layers"] if ".experts." in layer["name"])
    return {f"{layer['name']}:{layer['slot']}": layer["rows"] for layer in layers}
