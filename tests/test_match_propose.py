"""Structural proposals for tensors that no table knows: marked, cautious, and never worse than suspect."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from probe import PrecisionDebugger
from probe.cli.main import run
from probe.compare.propose import Leftover, propose
from probe.compare.run import compare_dumps

WIDTH, TOKENS = 16, 9


def leftovers(*entries: tuple[str, int]) -> list[Leftover]:
    return [Leftover(f"{name}:output.0", order, width) for order, (name, width) in enumerate(entries)]


def pairs(a: list[Leftover], b: list[Leftover], anchors: tuple[tuple[int, int], ...] = ()) -> set[tuple[str, str]]:
    found = propose(a, b, anchors).pairs
    return {(pair.a.removesuffix(":output.0"), pair.b.removesuffix(":output.0")) for pair in found}


def test_a_unique_width_is_evidence_enough_and_says_so():
    found = propose(leftovers(("h.0.fc", 64)), leftovers(("blocks.0.wide", 64)), ())
    assert [(p.a, p.b, p.confidence) for p in found.pairs] == [("h.0.fc:output.0", "blocks.0.wide:output.0", 0.5)]
    assert "no other candidate" in found.pairs[0].reason


def test_two_candidates_of_one_width_without_like_names_stay_unpaired_with_the_reason():
    found = propose(leftovers(("h.0.alpha", 16), ("h.0.beta", 16)), leftovers(("h.0.gamma", 16), ("h.0.xyz", 16)), ())
    assert not found.pairs
    assert set(found.unpaired_a) == {"h.0.alpha:output.0", "h.0.beta:output.0"}
    assert "ambiguous" in found.unpaired_a["h.0.alpha:output.0"] and "xyz" in found.unpaired_a["h.0.alpha:output.0"]
    assert "ambiguous" in found.unpaired_b["h.0.gamma:output.0"]


def test_names_tell_candidates_of_one_width_apart():
    a = leftovers(("h.0.q_conv", 16), ("h.0.k_conv", 16))
    b = leftovers(("blk.0.k_conv", 16), ("blk.0.q_conv", 16))
    assert pairs(a, b) == {("h.0.q_conv", "blk.0.q_conv"), ("h.0.k_conv", "blk.0.k_conv")}


def test_a_common_ending_is_no_evidence():
    a = leftovers(("h.0.q_lin", 16), ("h.0.k_lin", 16))
    b = leftovers(("blk.0.u_lin", 16), ("blk.0.w_lin", 16))
    assert not pairs(a, b)


def test_layers_and_slots_must_agree():
    assert not pairs(leftovers(("h.0.fc", 16)), leftovers(("h.1.fc", 16)))
    assert not pairs(leftovers(("h.0.fc", 16)), [Leftover("h.0.fc:output.1", 0, 16)])
    assert pairs(leftovers(("h.0.fc", 8), ("h.1.fc", 8)), leftovers(("b.0.fc", 8), ("b.1.fc", 8))) == {
        ("h.0.fc", "b.0.fc"),
        ("h.1.fc", "b.1.fc"),
    }


def test_a_pair_stands_between_the_same_matched_tensors():
    a = leftovers(("h.0.alpha", 16), ("known", 1), ("h.0.beta", 16))
    b = leftovers(("h.0.gamma", 16), ("known", 1), ("h.0.delta", 16))
    found = propose([a[0], a[2]], [b[0], b[2]], [(1, 1)])
    assert {(p.a, p.b) for p in found.pairs} == {
        ("h.0.alpha:output.0", "h.0.gamma:output.0"),
        ("h.0.beta:output.0", "h.0.delta:output.0"),
    }
    assert not propose([a[0]], [b[2]], [(1, 1)]).pairs


# -- through the whole comparison -------------------------------------------------------------------------------------


class Block(nn.Module):
    """A block of a model that no table knows; ``names`` are the attribute names of its two linears."""

    def __init__(self, names: tuple[str, str], seed: int) -> None:
        super().__init__()
        self.names = names
        generator = torch.Generator().manual_seed(seed)
        for name, shape in zip(names, ((4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH))):
            linear = nn.Linear(shape[1], shape[0], bias=False)
            linear.weight = nn.Parameter(torch.randn(shape, generator=generator) * shape[1] ** -0.5)
            setattr(self, name, linear)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide, narrow = (getattr(self, name) for name in self.names)
        return x + narrow(torch.tanh(wide(x)))


class Unknown(nn.Module):
    """A model that no table knows, under names of the caller's choice."""

    def __init__(self, names: tuple[str, str], blocks: str = "stack") -> None:
        super().__init__()
        self.blocks = blocks
        self.table = nn.Embedding(50, WIDTH)
        self.table.weight = nn.Parameter(torch.randn(50, WIDTH, generator=torch.Generator().manual_seed(0)))
        setattr(self, blocks, nn.ModuleList(Block(names, seed) for seed in (1, 2)))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.table(input_ids)
        for block in getattr(self, self.blocks):
            x = block(x)
        return x


def dump(folder: Path, stage: str, model: nn.Module) -> Path:
    ids = torch.arange(TOKENS)[None]
    with torch.no_grad(), PrecisionDebugger(dump_path=folder, stage=stage, enabled=True).start(model):
        model(ids)
    return folder


@pytest.fixture
def known(tmp_path) -> Path:
    return dump(tmp_path / "a", "rollout", Unknown(("widen", "narrow")))


def test_an_unknown_model_is_paired_by_structure_and_marked(tmp_path, known):
    b = dump(tmp_path / "b", "actor", Unknown(("widen_it", "narrow_it"), blocks="pile"))
    report = compare_dumps(known, b)
    assert {layer["verdict"] for layer in report["layers"]} == {"identical"}
    proposed = {layer["name"]: layer["proposal"] for layer in report["layers"] if layer["proposed"]}
    assert set(proposed) == {f"stack.{i}{leaf}" for i in (0, 1) for leaf in ("", ".widen", ".narrow")}
    assert all(0 < proposal["confidence"] <= 1 and proposal["reason"] for proposal in proposed.values())
    assert {layer["name"] for layer in report["layers"]} - set(proposed) == {"table"}, "equal names need no proposal"
    assert "6 pairs only proposed" in report["headline"] and report["coverage"]["proposed"] == 6


def test_the_terminal_marks_and_counts_proposed_pairs(tmp_path, known, capsys):
    model = Unknown(("widen_it", "narrow_it"), blocks="pile")
    with torch.no_grad():
        model.pile[0].widen_it.weight.mul_(3)
    b = dump(tmp_path / "b", "actor", model)
    assert run(["compare", str(known), str(b)]) == 1
    shown = capsys.readouterr().out
    assert "6 pairs only proposed" in shown and "~ stack.0.widen" in shown and "confirm them with --map" in shown


def test_a_proposed_pair_never_makes_the_verdict_worse_than_suspect(tmp_path, known):
    model = Unknown(("widen_it", "narrow_it"), blocks="pile")
    with torch.no_grad():
        model.pile[0].widen_it.weight.mul_(3)
    report = compare_dumps(known, dump(tmp_path / "b", "actor", model))
    flagged = [layer for layer in report["layers"] if layer["verdict"] == "suspect"]
    assert flagged and all("only proposed" in layer["reason"] for layer in flagged)
    assert report["verdict"] == "suspect" and report["first_divergence"] is None


def test_one_engine_matches_equal_names_for_sure(tmp_path, known):
    report = compare_dumps(known, dump(tmp_path / "b", "actor", Unknown(("widen", "narrow"))))
    assert report["layers"] and not any(layer["proposed"] for layer in report["layers"])
    assert report["verdict"] == "consistent"


def test_ambiguous_tensors_are_listed_with_the_candidates(tmp_path, known):
    class Two(nn.Module):
        def __init__(self, names: tuple[str, str]) -> None:
            super().__init__()
            self.names, self.table = names, nn.Embedding(50, WIDTH)
            for name in names:
                setattr(self, name, nn.Linear(WIDTH, WIDTH))

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            x = self.table(input_ids)
            return sum(getattr(self, name)(x) for name in self.names)

    a = dump(tmp_path / "c", "rollout", Two(("alpha", "omega")))
    b = dump(tmp_path / "d", "actor", Two(("fizz", "buzz")))
    report = compare_dumps(a, b, min_coverage=0)
    assert {layer["name"] for layer in report["layers"]} == {"table"}
    assert "2 tensors of a that no table of names knows (first alpha:output.0)" in report["not_compared"]
    reasons = {entry["name"]: entry["reason"] for entry in report["coverage"]["auxiliary_a"]}
    assert "ambiguous" in reasons["alpha"] and "buzz" in reasons["alpha"]
