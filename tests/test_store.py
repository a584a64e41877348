"""The dump format: what is written comes back bit for bit, in order, in bounded memory, and after a kill."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from dump_tools import MANIFEST, open_writer, rank_file, segment, whole, write_dump
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from probe.errors import DumpError, EmptyDumpError, OutputExistsError
from probe.store.dtypes import DTYPES, round_to, widen
from probe.store.reader import open_dump
from probe.store.schema import ModuleInfo, WeightSketch
from probe.store.writer import DumpWriter

# Any character but NUL and surrogates, neither of which HDF5's UTF-8 text holds; names of tensors collide on purpose.
NAMES = st.one_of(
    st.sampled_from(["", ".", "..", "index", "rows", "module:index", "layers.0.mlp", "a/b", "a|b", "模块", "a b"]),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=8),
)
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@st.composite
def captures(draw):
    """Draw tensors (name, dtype, feature shape) and, call by call, how many rows each call has and who appends."""
    keys = draw(st.lists(st.tuples(NAMES, NAMES), min_size=1, max_size=5, unique=True))
    tensors = [(*key, draw(st.sampled_from(sorted(DTYPES))), draw(SHAPES)) for key in keys]
    calls = draw(st.lists(st.integers(0, 4), min_size=1, max_size=6))
    return tensors, calls, draw(st.sampled_from([1, 64, 1 << 20])), draw(st.sampled_from([1, 256, 1 << 20]))


def random_bits(rng, shape, dtype):
    """Return random contents of a tensor in its carrier, every bit pattern possible."""
    carrier = DTYPES[dtype].carrier
    count = int(np.prod(shape, dtype=np.int64))
    return np.frombuffer(rng.bytes(count * carrier.itemsize), carrier).reshape(shape).copy()


@given(captures(), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_round_trip(tmp_path_factory, capture, seed):
    tensors, calls, block_bytes, buffer_bytes = capture
    folder = tmp_path_factory.mktemp("dump")
    rng = np.random.default_rng(seed)
    writer = open_writer(folder, block_bytes=block_bytes, buffer_bytes=buffer_bytes)
    expected: dict = {}
    start = 0
    for call, count in enumerate(calls):
        rows = segment(count, start=start, call=call)
        start += count
        for module, slot, dtype, features in tensors:
            values = random_bits(rng, (count, *features), dtype)
            if count:
                expected.setdefault((module, slot), []).append((values.copy(), rows.rows))
            writer.append(module, slot, values, dtype, rows)
    writer.close()
    if not expected:
        with pytest.raises(EmptyDumpError):
            open_dump(folder / "rollout")
        return
    with open_dump(folder / "rollout") as dump:
        assert list(dump.tensors) == list(expected)  # order of first execution
        for (module, slot), parts in expected.items():
            bits = np.concatenate([values for values, _ in parts])
            stored = dump.read_raw(module, slot)
            assert stored.dtype == bits.dtype and stored.shape == bits.shape
            assert stored.tobytes() == bits.tobytes()
            assert np.array_equal(dump.rows(module, slot), np.concatenate([rows for _, rows in parts]))
            pieces = list(dump.iter_blocks(module, slot))
            assert b"".join(v.tobytes() for v, _ in pieces) == dump.read(module, slot).tobytes()
            assert np.array_equal(np.concatenate([r for _, r in pieces]), dump.rows(module, slot))


def test_blocks_come_in_bounded_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("probe.store.tensors.PIECE_BYTES", 100)
    values = np.arange(96, dtype=np.float32).reshape(12, 8)
    dump = open_dump(write_dump(tmp_path, [("m", "output.0", values, "float32")]))
    pieces = list(dump.iter_blocks("m", "output.0"))
    assert [len(v) for v, _ in pieces] == [3, 3, 3, 3]  # 32 bytes a row
    assert np.array_equal(np.concatenate([v for v, _ in pieces]), values)
    assert [r["position"].tolist() for _, r in pieces] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


def test_every_bfloat16_code_is_kept(tmp_path):
    codes = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    folder = write_dump(tmp_path, [("m", "output.0", codes, "bfloat16")])
    with open_dump(folder) as dump:
        assert np.array_equal(dump.read_raw("m", "output.0"), codes)
        values = dump.read("m", "output.0")
    torch_values = torch.from_numpy(codes.view(np.int16)).view(torch.bfloat16).float().numpy()
    assert np.array_equal(values.view(np.uint32), torch_values.view(np.uint32))  # NaN payloads too


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_every_float8_code_is_kept(tmp_path, name):
    codes = np.arange(256, dtype=np.uint8).reshape(16, 16)
    with open_dump(write_dump(tmp_path, [("m", "output.0", codes, name)])) as dump:
        assert np.array_equal(dump.read_raw("m", "output.0"), codes)
        values = dump.read("m", "output.0")
    expected = torch.from_numpy(codes).view(getattr(torch, name)).float().numpy()
    assert np.array_equal(values, expected, equal_nan=True)
    numbers = ~np.isnan(expected)
    assert np.array_equal(np.signbit(values[numbers]), np.signbit(expected[numbers]))  # minus zero too


@given(st.lists(st.floats(width=32, allow_nan=True), min_size=1, max_size=20))
def test_rounding_to_bfloat16_is_torchs(values):
    values = np.array(values, np.float32)
    expected = torch.from_numpy(values).to(torch.bfloat16).float().numpy()
    assert np.array_equal(round_to(values, "bfloat16"), expected, equal_nan=True)


def test_content_is_stored_once(tmp_path):
    rng = np.random.default_rng(0)
    writer = open_writer(tmp_path)
    unique = 0
    for call in range(8):
        rows = segment(64, start=64 * call, call=call)
        values = rng.normal(size=(64, 1024)).astype(np.float32)
        unique += values.nbytes
        writer.append("a", "output.0", values, "float32", rows)
        writer.append("b", "input.0", values.copy(), "float32", rows)  # the same content, not the same memory
        writer.append("b", "kwargs.x", values.reshape(64, 32, 32).copy(), "float32", rows)  # in another shape
    path = writer.close()
    # docs/format.md promises at most 2 % over the unique bytes; the rest is tables and HDF5's own bookkeeping
    assert unique <= path.stat().st_size <= 1.02 * unique
    with open_dump(tmp_path / "rollout") as dump:
        first = dump.read("a", "output.0")
        assert np.array_equal(first, dump.read("b", "input.0"))
        assert np.array_equal(first.reshape(-1, 32, 32), dump.read("b", "kwargs.x"))


def count_objects(path):
    with h5py.File(path) as file:
        found: list[str] = []
        file.visit(found.append)
        return len(found)


def test_one_row_appends_make_no_more_datasets(tmp_path):
    made = {}
    for calls in (10, 2000):
        writer = open_writer(tmp_path / str(calls))
        for call in range(calls):
            rows = segment(1, start=call, call=call)
            for module in ("a", "b", "c"):
                writer.append(module, "output.0", np.full((1, 16), call, np.float32), "float32", rows)
        made[calls] = count_objects(writer.close())
    assert made[2000] == made[10]
    with open_dump(tmp_path / "2000" / "rollout") as dump:
        assert np.array_equal(dump.read("b", "output.0")[:, 3], np.arange(2000))


def test_what_waits_in_memory_is_bounded(tmp_path):
    bound, size = 4 << 20, 1 << 18
    writer = open_writer(tmp_path, block_bytes=1 << 40, buffer_bytes=bound)
    rng = np.random.default_rng(0)
    tracemalloc.start()
    for call in range(64):
        rows = segment(1, start=call, call=call)
        for module in range(3):
            writer.append(f"m{module}", "output.0", random_bits(rng, (1, size), "uint8"), "uint8", rows)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    writer.close()
    # 48 MB pass through. Beside the bound a block is joined and its statistics taken in float64 (8 times uint8), and
    # the largest block holds about a third of the bound.
    assert peak < bound + (1 + 8 + 8) * bound
    with open_dump(tmp_path / "rollout") as dump:
        assert dump.tensors[("m2", "output.0")].rows == 64


def test_nothing_is_overwritten(tmp_path):
    write_dump(tmp_path)
    with pytest.raises(OutputExistsError, match=r"rank0\.h5 already exists: choose another output folder\.$"):
        open_writer(tmp_path)
    other = open_writer(tmp_path / "other")
    with pytest.raises(OutputExistsError, match=r"partial already exists"):
        open_writer(tmp_path / "other")
    other.discard()
    assert list((tmp_path / "other").iterdir()) == []


def test_statistics_leave_out_what_is_not_finite(tmp_path):
    first = np.array([[1, -2, np.nan], [np.inf, 4, -np.inf]], np.float32)
    second = np.array([[8, 0, 0], [0, 0, 0]], np.float32)
    nothing = np.full((2, 3), np.nan, np.float32)
    whole_numbers = np.array([[1, -2, 3], [4, 5, -6]], np.int32)
    writer = open_writer(tmp_path, block_bytes=1)
    for values in (first, second):
        writer.append("m", "output.0", values.copy(), "float32", segment(2))
    writer.append("nan", "output.0", nothing, "float32", segment(2))
    writer.append("int", "output.0", whole_numbers, "int32", segment(2))
    writer.append("half", "output.0", np.full((2, 3), 60000, np.float16), "float16", segment(2))
    writer.append("bits", "output.0", np.full((2, 3), 0x4040, np.uint16), "bfloat16", segment(2))
    writer.close()
    with open_dump(tmp_path / "rollout") as dump:
        info = dump.tensors[("m", "output.0")]
        assert (info.min, info.max, info.nan, info.inf, info.rows) == (-2, 8, 1, 2, 4)
        assert info.mean == pytest.approx((1 - 2 + 4 + 8) / 9)
        assert info.norm == pytest.approx(np.sqrt(1 + 4 + 16 + 64))
        info = dump.tensors[("nan", "output.0")]
        assert (info.nan, info.inf) == (6, 0) and np.isnan([info.min, info.max, info.mean]).all()
        info = dump.tensors[("int", "output.0")]
        assert (info.min, info.max, info.mean) == (-6, 5, pytest.approx(5 / 6))
        assert dump.tensors[("half", "output.0")].mean == 60000  # summed in float64
        assert dump.tensors[("bits", "output.0")].max == 3.0


def test_a_tensor_that_changes_its_features_keeps_the_first_ones(tmp_path):
    writer = open_writer(tmp_path)
    for call, width in enumerate((3, 5, 3)):
        writer.append("m", "output.0", np.full((2, width), call, np.float32), "float32", segment(2, start=2 * call))
    writer.append("m", "output.0", np.full((2, 3), 9, np.float16), "float16", segment(2, start=6))
    writer.close()
    with open_dump(tmp_path / "rollout") as dump:
        info = dump.tensors[("m", "output.0")]
        assert (info.feature_shape, info.dtype, info.rows) == ((3,), "float32", 4)
        assert dump.read("m", "output.0")[:, 0].tolist() == [0, 0, 2, 2]
        assert dump.rows("m", "output.0")["position"].tolist() == [0, 1, 4, 5]


def test_tensors_without_rows_or_features(tmp_path):
    writer = open_writer(tmp_path)
    writer.append("empty", "output.0", np.zeros((0, 4), np.float32), "float32", segment(0))
    writer.append("flat", "output.0", np.zeros((3, 0), np.float32), "float32", segment(3))
    writer.append("flat", "output.1", np.zeros((3, 0), np.int64), "int64", segment(3))
    writer.append("one", "output.0", np.array([1.0, 2.0, 3.0], np.float32), "float32", segment(3))
    for call in range(3):
        writer.append("mask", "input.0", np.full((1, 2, 2), call, np.uint8), "bool", whole(call), has_rows=False)
    with pytest.raises(DumpError, match="has 2 rows but its call has 3"):
        writer.append("m", "output.0", np.zeros((2, 1), np.float32), "float32", segment(3))
    writer.close()
    with open_dump(tmp_path / "rollout") as dump:
        assert ("empty", "output.0") not in dump.tensors
        assert dump.read("flat", "output.0").shape == (3, 0)
        assert dump.tensors[("one", "output.0")].feature_shape == ()
        info = dump.tensors[("mask", "input.0")]
        assert (info.has_rows, info.rows, info.feature_shape) == (False, 3, (2, 2))
        assert dump.rows("mask", "input.0")["call"].tolist() == [0, 1, 2]
        assert (dump.rows("mask", "input.0")["sequence"] == -1).all()


def test_modules_and_weights_come_back(tmp_path):
    writer = open_writer(tmp_path)
    writer.append("m", "output.0", np.zeros((1, 2), np.float32), "float32", segment(1))
    writer.add_module(ModuleInfo("layers.0/x", "Linear", 7, {"eps": 1e-6, "odd": Path("x")}))
    for name in ("a/w", "a|w", "a/w"):
        writer.add_weight(WeightSketch(name, (2, 5), "bfloat16", np.full((2, 3), len(name), np.float64), 1.5))
    writer.add_weight(WeightSketch("bias", (4,), "float32", np.arange(4.0)[:, None]))
    writer.add_weight(WeightSketch("tied", (2, 5), "bfloat16", np.zeros((0, 3)), alias="a/w"))
    writer.close()
    with open_dump(tmp_path / "rollout") as dump:
        assert dump.modules["layers.0/x"] == ModuleInfo("layers.0/x", "Linear", 7, {"eps": 1e-6, "odd": "x"})
        assert dump.weights["a/w"].rows.shape == (2, 3) and dump.weights["a/w"].quad == 1.5
        assert dump.weights["bias"].rows[:, 0].tolist() == [0, 1, 2, 3]
        assert dump.weights["tied"].alias == "a/w" and len(dump.weights["tied"].rows) == 0


def test_a_manifest_may_hold_what_json_does_not(tmp_path):
    writer = DumpWriter(rank_file(tmp_path), {**MANIFEST, "dtype": torch.bfloat16})
    writer.append("m", "output.0", np.zeros((1, 2), np.float32), "float32", whole())
    writer.close()
    assert open_dump(tmp_path / "rollout").manifest["dtype"] == "torch.bfloat16"


def test_which_folder_is_a_dump(tmp_path):
    with pytest.raises(DumpError, match="there is no dump at"):
        open_dump(tmp_path / "none")
    with pytest.raises(EmptyDumpError, match="holds no dump file"):
        open_dump(tmp_path)
    write_dump(tmp_path)
    (tmp_path / "rollout" / "step²").mkdir()
    assert open_dump(tmp_path).stage == open_dump(tmp_path / "rollout").stage == "rollout"
    with pytest.raises(EmptyDumpError):
        open_dump(tmp_path, step=3)
    with open_dump(tmp_path) as dump, pytest.raises(DumpError, match="no tensor nothing:output"):
        dump.rows("nothing", "output.0")
    os.renames(tmp_path / "rollout", tmp_path / "pair" / "rollout")
    write_dump(tmp_path / "second")
    os.renames(tmp_path / "second" / "rollout", tmp_path / "pair" / "actor")
    with pytest.raises(DumpError, match="holds the stages actor, rollout"):
        open_dump(tmp_path / "pair")
    with pytest.raises(DumpError, match="is not one dump but holds pair"):
        open_dump(tmp_path)


def test_unknown_dtypes_are_refused():
    from probe.store.dtypes import stored_dtype

    with pytest.raises(DumpError, match="complex64"):
        stored_dtype("complex64")
    assert widen(np.array([0, 1], np.uint8), "bool").tolist() == [False, True]
