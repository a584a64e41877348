"""Forged and damaged journals end in one DumpError sentence."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from dump_tools import open_writer, read_everything, refusal, segment

from probe.store.journal import journal_of
from probe.store.schema import WeightSketch

BLOCK = "/layers.0.mlp/output.0/block0"


@pytest.fixture
def killed_file(tmp_path: Path) -> Path:
    """What a killed run left: a ``.partial`` file and its journal."""
    writer = open_writer(tmp_path)
    writer.append("layers.0.mlp", "output.0", np.ones((4, 8), np.float32), "float32", segment(4))
    writer.add_weight(WeightSketch("w", (2, 4), "float32", np.ones((2, 3))))
    writer.flush()
    writer.abandon()
    return writer.partial


def _forge_journal(partial: Path, change) -> None:
    journal = journal_of(partial)
    manifest, entry = (json.loads(line) for line in journal.read_text().splitlines())
    change(manifest, entry)
    journal.write_text(json.dumps(manifest) + "\n" + json.dumps(entry) + "\n")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda m, e: e["places"].update({BLOCK: [-8, 128]}), "lies outside the file"),
        (lambda m, e: e["places"].update({BLOCK: [1 << 40, 128]}), "lies outside the file"),
        (lambda m, e: e["places"].update({BLOCK: [0, 1 << 50]}), "lies outside the file"),
        (lambda m, e: e["places"].update({BLOCK: [0, 64]}), "the index says shape (4, 8)"),
        (lambda m, e: e["places"].update({BLOCK: 7}), "cannot be read"),
        (lambda m, e: e["places"].update({BLOCK: ["a", "b"]}), "is missing from the journal"),
        (lambda m, e: e["places"].pop(BLOCK), "is missing from the journal"),
        (lambda m, e: e["places"]["/rows/t0"].__setitem__(1, 32), "/rows/t0 2"),
        (lambda m, e: e["places"].update({"/sketches/w": [0, 40]}), "cannot be read"),
        (lambda m, e: e.update(places=[1]), "cannot be read"),
        (lambda m, e: e.update(tables=[1]), "cannot be read"),
        (lambda m, e: e["tables"].update(index=[[1, 2]]), "cannot be read"),
        (lambda m, e: e["tables"].update(index=7), "cannot be read"),
        (lambda m, e: e["tables"].update(sequences=[]), "names a sequence that the file does not list"),
        (lambda m, e: m.update(manifest=[]), "holds no manifest"),
        (lambda m, e: m["manifest"].update(engine="x"), "holds 'engine'"),
        (lambda m, e: m.clear(), "holds no manifest"),
    ],
    ids=range(17),
)
def test_forged_journals(killed_file, change, problem):
    read_everything(killed_file.parents[1])
    _forge_journal(killed_file, change)
    assert problem in refusal(killed_file.parents[1])


def test_journals_of_nothing(killed_file):
    journal_of(killed_file).write_bytes(b"\xff\xfe\x00garbage")
    assert "holds no manifest" in refusal(killed_file.parents[1])
    journal_of(killed_file).write_text("[1, 2]\n")
    assert "cannot be read" in refusal(killed_file.parents[1])
