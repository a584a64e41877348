"""Figures made from stored rows: any rows, in any order, with threads and without, and in bounded memory."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
from dump_tools import open_rank, segment
from synthetic_dumps import Scenario, actor, opened
from synthetic_model import Tiny
from synthetic_ranks import Ranks, write_ranks

from probe import kernels
from probe.compare import figures
from probe.compare.align import RowAligner
from probe.compare.figures import FigureMaker, measure_rows
from probe.compare.match import match_tensors
from probe.compare.merge import CanonicalReader
from probe.compare.sequences import join_sequences
from probe.compare.side import read_side, read_sides
from probe.metrics import coarser_dtype
from probe.store import tensors
from probe.store.reader import open_dump
from probe.store.schema import Sequence


@pytest.mark.parametrize(("layout", "tp", "dtype"), [("vllm", 4, "bfloat16"), ("megatron", 4, "float32")])
def test_chosen_rows_are_those_rows_of_the_whole_tensor(tmp_path, monkeypatch, layout, tp, dtype):
    monkeypatch.setattr(tensors, "GAP_BYTES", 64)  # so that some reads are split and some are not
    scenario = Scenario(layout=layout, model=Tiny(kv_heads=2, qk_norm=True), dtype=dtype, block_bytes=2048)
    folder = write_ranks(tmp_path / "many", scenario, Ranks(tp, sp=layout == "megatron"))
    rng = np.random.default_rng(0)
    with open_dump(folder) as dump:
        side = read_side(dump)
        for label, source in side.resolution.sources.items():
            reader = CanonicalReader(side)
            whole = CanonicalReader(side).read(source)
            count = reader.stored_rows(source)
            for rows in (np.arange(count), rng.integers(0, count, 9), np.arange(2, 5), np.zeros(0, np.int64)):
                np.testing.assert_array_equal(reader.read(source, rows), whole[rows], err_msg=label)


def pairs_of(a, b):
    side_a, side_b = read_sides(a, b)
    matching = match_tensors(side_a, side_b)
    aligner = RowAligner(join_sequences(a, b), a.sequences, b.sequences)
    return (CanonicalReader(side_a), CanonicalReader(side_b)), aligner, matching.matched


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")])
def test_threads_and_blocks_give_the_figures_of_whole_tensors(tmp_path, monkeypatch, dtypes):
    monkeypatch.setattr(figures, "WORTH_A_THREAD", 0)
    monkeypatch.setattr(figures, "BLOCK_VALUES", 200)
    one, two = Scenario(dtype=dtypes[0], noise=1), actor("megatron", dtype=dtypes[1], noise=2)
    with opened(tmp_path / "a", one) as a, opened(tmp_path / "b", two) as b:
        readers, aligner, matches = pairs_of(a, b)
        said = []
        with FigureMaker(readers, aligner, 3, lambda *words: said.append(words)).each(matches) as makers:
            found = [make() for make in makers]
        assert len(found) == len(matches) > 20 and not said
        for match, made in zip(matches, found):
            x, y = readers[0].read(match.source_a), readers[1].read(match.source_b)
            stored = [reader.side.dtype_of(s) for reader, s in zip(readers, (match.source_a, match.source_b))]
            want = dataclasses.asdict(measure_rows(x, y, made.join, coarser_dtype(*stored)))
            for name, value in dataclasses.asdict(made.metrics).items():
                if isinstance(value, str):
                    assert value == want[name]
                else:  # blocks of other sizes are added up in another order
                    np.testing.assert_allclose(value, want[name], rtol=1e-9, err_msg=f"{match.label} {name}")


def test_threads_hand_on_what_went_wrong_and_stop(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "WORTH_A_THREAD", 0)
    with opened(tmp_path / "a", Scenario()) as a, opened(tmp_path / "b", actor("megatron")) as b:
        readers, aligner, matches = pairs_of(a, b)

        def fails(*arguments):
            raise ZeroDivisionError

        monkeypatch.setattr(figures, "measure_stored", fails)
        with (
            pytest.raises(ZeroDivisionError),
            FigureMaker(readers, aligner, 2).each(matches) as makers,
        ):
            [make() for make in makers]


def test_numba_is_loaded_for_large_dumps_only_and_the_observer_hears_of_compiling(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(kernels, "load", lambda kinds, say: (asked.append(list(kinds)), say()))
    heard = []
    mixed = Scenario(dtype="bfloat16"), actor("megatron", dtype="float32")
    with opened(tmp_path / "a", mixed[0]) as a, opened(tmp_path / "b", mixed[1]) as b:
        readers, aligner, matches = pairs_of(a, b)
        maker = FigureMaker(readers, aligner, 1, lambda *words: heard.append(words))
        with maker.each(matches):
            assert not asked and not heard
        monkeypatch.setattr(kernels, "WORTH_LOADING", 1000)
        with maker.each(matches):
            assert asked == [["float32"]] and heard == [(figures.COMPILING, 0, 1)]


# -- memory -----------------------------------------------------------------------------------------------------------

PEAK = """
import sys
from probe.compare.run import compare_dumps
report = compare_dumps(*sys.argv[1:3])
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(report["layers"][0]["rows"], int(peak.split()[1]) // 1024)
"""


def peak_of(*folders) -> list[int]:
    """Return the rows of the first tensor, and the most MB of memory (files' pages included) that comparing took."""
    command = [sys.executable, "-c", PEAK, *map(str, folders)]
    return [int(word) for word in subprocess.run(command, capture_output=True, check=True, text=True).stdout.split()]


def write_tall(folder, rows: int, seed: int):
    """Write one tensor of rows of 4 KiB."""
    start, block = np.random.default_rng(seed), np.random.default_rng(0).standard_normal((2048, 1024), np.float32)
    sequence = Sequence(0, uid="s0", prompt_len=rows - 1, length=rows, tokens=np.arange(rows))
    writer = open_rank(folder, [sequence])
    for at in range(0, rows, 2048):
        count = min(2048, rows - at)
        values = block[:count] * (1 + np.float32(1e-7) * start.standard_normal(1024, np.float32))
        writer.append("model.layers.0.mlp.down_proj", "output.0", values, "float32", segment(count, start=at, call=0))
    writer.close()
    return folder / "rollout"


def test_memory_does_not_grow_with_a_tensor(tmp_path):
    assert kernels.load(["float32"]) is not None  # compiled before: that once takes 150 MB
    small = [write_tall(tmp_path / f"small{n}", 2048, n) for n in (1, 2)]
    large = [write_tall(tmp_path / f"large{n}", 24 * 1024, n) for n in (1, 2)]
    rows, base = peak_of(*small)
    assert rows == 2048
    rows, peak = peak_of(*large)
    assert rows == 24 * 1024
    # 96 MB a side; what may grow are tables of rows and, above kernels.WORTH_LOADING values, LLVM (60 MB)
    assert peak - base < 100
