"""The compiled loops and numpy against one plain float64 reference: counts, maxima and ULPs exact, sums within a bound.

The bound: of n terms that are not negative, each rounded twice (the difference, the square), a float64 sum in any order
lies within (n + 2) 2^-53 of the exact one, to first order.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from probe import files, kernels, machine
from probe.metrics import BLOCK_VALUES, PairMeasure, PairMetrics
from probe.store.dtypes import narrow, round_to, widen
from probe.ulp import UlpHistogram

ROUNDING = 2.0**-53
WAYS = ("numpy", "compiled")
EXACT = ("rows", "pairs", "max_abs", "max_abs_at", "ulp_p50", "ulp_p99", "ulp_max", "nan_x", "nan_y", "inf_x", "inf_y",
         "nonfinite_mismatch", "nonfinite_at", "row_max_abs", "row_mismatch", "channel_max_abs")  # fmt: skip


@pytest.fixture(scope="session")
def loaded() -> list[kernels.Compiled]:
    """Return the compiled functions as the module keeps them."""
    before = list(kernels._compiled)
    assert kernels.load() is not None, kernels.why_not()
    found = list(kernels._compiled)
    kernels._compiled[:] = before
    return found


@pytest.fixture
def way(request, loaded, monkeypatch) -> str:
    """Measure in one of WAYS."""
    monkeypatch.setattr(kernels, "_compiled", loaded if request.param == "compiled" else [])
    return request.param


def measure(x: np.ndarray, y: np.ndarray, dtype: str, bits: str = "", chunk: int = 1 << 20) -> PairMetrics:
    found = PairMeasure(len(x), dtype)
    for start in range(0, len(x), chunk):
        found.update(x[start : start + chunk], y[start : start + chunk], start, bits)
    return found.result()


def in_both_ways(loaded, x, y, dtype, bits="", chunk=1 << 20) -> tuple[PairMetrics, PairMetrics]:
    results = []
    with pytest.MonkeyPatch.context() as patch:
        for functions in ([], loaded):
            patch.setattr(kernels, "_compiled", functions)
            results.append(measure(x, y, dtype, bits, chunk))
    return results[0], results[1]


# -- a reference ------------------------------------------------------------------------------------------------------


def ordinal(value: float, dtype: str) -> int:
    """Return the number of a finite value among the numbers of a dtype, those of both zeros 0."""
    if dtype in ("bfloat16", "float8_e4m3fn"):
        size = int(round_to(np.array([abs(value)], np.float32), "bfloat16").view(np.uint32)[0]) >> 16
    else:
        size = int(np.array([abs(value)], dtype).view(f"u{np.dtype(dtype).itemsize}")[0])
    return -size if math.copysign(1, value) < 0 else size


def check(got: PairMetrics, x: np.ndarray, y: np.ndarray, dtype: str) -> None:
    """Compare with sums by math.fsum, which are exact to the last bit, and with Python's integers."""
    x64, y64 = x.astype(np.float64), y.astype(np.float64)
    finite = np.isfinite(x64) & np.isfinite(y64)
    same = finite | (x64 == y64) | (np.isnan(x64) & np.isnan(y64))
    x0, y0 = np.where(finite, x64, 0), np.where(finite, y64, 0)
    d = x0 - y0
    assert got.pairs == finite.sum() and got.nonfinite_mismatch == (~same).sum()
    assert (got.nan_x, got.nan_y) == (np.isnan(x64).sum(), np.isnan(y64).sum())
    assert (got.inf_x, got.inf_y) == (np.isinf(x64).sum(), np.isinf(y64).sum())
    assert got.nonfinite_at == tuple(map(tuple, np.argwhere(~same)[:8].tolist()))
    assert got.row_mismatch.tolist() == (~same).any(axis=1).tolist()
    assert got.max_abs == np.abs(d).max()
    assert got.max_abs_at == (divmod(int(np.abs(d).argmax()), d.shape[1]) if d.any() else (0, 0))
    assert got.row_max_abs.tolist() == np.abs(d).max(axis=1).tolist()
    assert got.channel_max_abs.tolist() == np.abs(d).max(axis=0).tolist()
    steps = sorted(abs(ordinal(p, dtype) - ordinal(q, dtype)) for p, q in zip(x0[finite], y0[finite]))
    # those of float64 are counted in float64 where signs differ
    assert got.ulp_max == (pytest.approx(steps[-1], rel=2 * ROUNDING) if dtype == "float64" else steps[-1])
    for share, found in ((0.5, got.ulp_p50), (0.99, got.ulp_p99)):
        exact = steps[max(0, math.ceil(share * len(steps)) - 1)]
        # above 65,535 the lower edge of a bin of relative width 2^-10
        assert found == exact if exact < 65536 else exact * (1 - 2**-10) <= found <= exact * (1 + ROUNDING)
    d2, x2, y2 = (math.fsum((values**2).ravel().tolist()) for values in (d, x0, y0))
    bound = (d.size + 8) * ROUNDING  # 2 for the terms, and those of a root and a quotient
    assert got.norm_x == pytest.approx(math.sqrt(x2), rel=bound, abs=0)
    assert got.rmse == pytest.approx(math.sqrt(d2 / finite.sum()), rel=bound, abs=0)
    assert got.rel_l2 == pytest.approx(math.sqrt(d2 / (y2 or x2)), rel=bound, abs=0)
    channel = [math.fsum((column**2).tolist()) for column in d.T]
    np.testing.assert_allclose(got.channel_d2, channel, rtol=(len(d) + 8) * ROUNDING)
    row_norms = [[math.sqrt(math.fsum((row**2).tolist())) for row in side] for side in (x0, y0)]
    ratios = [p / q if q else math.nan for p, q in zip(*row_norms)]
    np.testing.assert_allclose(got.row_norm_ratio, ratios, rtol=(d.shape[1] + 8) * ROUNDING)
    if y2:
        xy = math.fsum((x0 * y0).ravel().tolist())
        # (x2 + y2 - d2) / 2 y2: what the three sums are off by
        assert got.slope == pytest.approx(xy / y2, rel=0, abs=bound * (x2 + y2 + d2) / y2)


def numbers(rng: np.random.Generator, shape: tuple[int, int], dtype: str) -> np.ndarray:
    """Return random numbers of a dtype: large, tiny, zeros of both signs, and non-finite ones where it has any."""
    if np.dtype(dtype if not dtype.startswith(("bf", "float8")) else "float32").kind in "iub":
        limits = (0, 2) if dtype == "bool" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        return rng.integers(*limits, shape, endpoint=dtype != "bool").astype(dtype)
    scale = 10.0 ** rng.integers(-6, 4, shape) if dtype != "float8_e4m3fn" else 1.0
    values = rng.standard_normal(shape) * scale
    values[rng.random(shape) < 0.1] = 0.0
    values[rng.random(shape) < 0.1] *= -0.0
    values[rng.random(shape) < 0.03] = np.nan
    if dtype != "float8_e4m3fn":  # which has no infinity
        values[rng.random(shape) < 0.03] = np.inf
        values[rng.random(shape) < 0.03] = -np.inf
    with np.errstate(over="ignore"):
        if dtype == "float8_e4m3fn":
            return widen(rng.integers(0, 256, shape).astype(np.uint8), dtype)
        return round_to(values, dtype) if dtype != "float16" else values.astype(np.float16)


DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "float64", "int8", "int32", "int64", "uint8", "bool"]


@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (5, 130), (3, 1100)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_figures_of_each_dtype_equal_the_reference(way, dtype, shape):
    rng = np.random.default_rng([len(dtype), *shape])
    x, y = numbers(rng, shape, dtype), numbers(rng, shape, dtype)
    y[rng.random(shape) < 0.3] = x[-1, -1]
    x[0, 0] = y[0, 0] = 1  # one finite pair there must be
    steps = dtype if dtype.startswith(("float", "bfloat")) else "float32"
    check(measure(x, y, steps, chunk=3), x, y, steps)


@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize("shape", [(2, 3), (5, 130), (3, 1100)])
def test_bits_of_bfloat16_give_the_figures_of_its_numbers(way, shape):
    rng = np.random.default_rng(shape)
    x, y = numbers(rng, shape, "bfloat16"), numbers(rng, shape, "bfloat16")
    x[0, 0] = y[0, 0] = 1
    got = measure(narrow(x, "bfloat16"), narrow(y, "bfloat16"), "bfloat16", bits="bfloat16", chunk=2)
    check(got, x, y, "bfloat16")


@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize(("mine", "other"), [("float32", "bfloat16"), ("float32", "float16"), ("float64", "float32")])
def test_ulps_of_mixed_dtypes_are_counted_in_the_coarser_one(way, mine, other):
    rng = np.random.default_rng(4)
    x, y = (np.asarray(rng.standard_normal((4, 700)), np.float64) for _ in range(2))
    x, y = round_to(x, mine), round_to(x * (1 + 1e-3 * y), other)
    check(measure(x, y, other), x, y, other)


# -- two ways to the same figures -------------------------------------------------------------------------------------


def assert_same(one: PairMetrics, other: PairMetrics, size: int) -> None:
    for name in EXACT:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
    for name in ("norm_x", "norm_y", "rmse", "row_rel_l2", "row_norm_ratio", "channel_d2", "channel_rel_l2"):
        left, right = getattr(one, name), getattr(other, name)
        np.testing.assert_allclose(left, right, rtol=2 * (size + 8) * ROUNDING, err_msg=name)


def bit_patterns(kind: str) -> st.SearchStrategy[tuple[np.ndarray, np.ndarray]]:
    carrier = {"float32": np.uint32, "bfloat16": np.uint16, "float64": np.uint64}[kind]
    shapes = st.tuples(st.integers(1, 6), st.integers(1, 40))
    return shapes.flatmap(lambda shape: st.tuples(*(hnp.arrays(carrier, shape) for _ in range(2))))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float64"])
@given(data=st.data(), chunk=st.integers(1, 6))
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bits_give_equal_figures_both_ways(loaded, kind, data, chunk):
    x, y = data.draw(bit_patterns(kind))
    bits = kind if kind == "bfloat16" else ""
    if not bits:
        x, y = x.view(kind), y.view(kind)
    assert_same(*in_both_ways(loaded, x, y, kind, bits, chunk), x.size)


def test_differences_that_overflow_float64_are_infinite_both_ways(loaded):
    x, y = np.full((3, 4), 1e300), np.ones((3, 4))
    x[1, 2], y[1, 2] = 1.7e308, -1.7e308
    both = in_both_ways(loaded, x, y, "float64")
    assert_same(*both, x.size)
    assert both[1].max_abs == math.inf and both[1].max_abs_at == (1, 2) and both[1].pairs == 12


def test_large_blocks_and_equal_ones_give_equal_figures_both_ways(loaded):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((300, 2000)).astype(np.float32)
    y = x.copy()
    y[200:] *= 1 + rng.standard_normal((100, 2000)).astype(np.float32) * np.float32(1e-6)
    y[299, 1999] = np.nan
    assert_same(*in_both_ways(loaded, x, y, "float32"), x.size)
    assert_same(*in_both_ways(loaded, x, y, "bfloat16"), x.size)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float64"])
def test_values_that_are_not_finite_in_several_strips_give_equal_figures_both_ways(loaded, kind):
    # GIVEN rows and columns for more strips than one, of which some hold such values, on one side and on both
    rows, features = kernels.GROUP + 7, kernels.STRIP + 20
    assert rows * features < BLOCK_VALUES  # so that one call takes them
    rng = np.random.default_rng(5)
    x, y = (round_to(rng.standard_normal((rows, features)), kind) for _ in range(2))
    last, right = rows - 1, kernels.STRIP + 3
    for row, column in [(1, right), (1, 5), (kernels.GROUP, 0), (last, right), (last, 2), (3, right), (4, 4), (5, 5)]:
        x[row, column] = np.nan if column % 2 else -np.inf
    y[2, right] = x[2, right] = np.inf
    y[last, 9], y[0, 0] = np.nan, np.inf
    # WHEN they are measured both ways THEN each figure is the same, and the first eight are found row by row
    both = in_both_ways(loaded, x, y, kind)
    assert_same(*both, x.size)
    first = [(0, 0), (1, 5), (1, right), (3, right), (4, 4), (5, 5), (kernels.GROUP, 0), (last, 2)]
    assert list(both[1].nonfinite_at) == first
    assert both[1].pairs == x.size - 11


# -- loading ----------------------------------------------------------------------------------------------------------

LOADING = """
import sys, numpy as np
from probe import kernels
from probe.metrics import measure_pair
said = []
found = kernels.load(["float64"], lambda: said.append(1))
x = np.ones((3, 4))
print(len(said), found is not None, measure_pair(x, 2 * x, 'float64').max_abs, kernels.why_not())
"""


def loading(**environment: str) -> list[str]:
    """Return what LOADING prints in a process of its own."""
    env = {**os.environ, **environment}
    done = subprocess.run([sys.executable, "-W", "error", "-c", LOADING], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.split(maxsplit=3)


def test_the_first_use_on_a_machine_says_that_it_compiles_and_later_ones_do_not(tmp_path):
    assert loading(NUMBA_CACHE_DIR=str(tmp_path)) == ["1", "True", "1.0"]
    assert loading(NUMBA_CACHE_DIR=str(tmp_path)) == ["0", "True", "1.0"]


def test_code_that_was_kept_is_run_without_numba(tmp_path):
    loading(NUMBA_CACHE_DIR=str(tmp_path))
    without = LOADING + "print('numba' in sys.modules, 'probe.loops' in sys.modules)"
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.split()[:3] == ["0", "True", "1.0"] and done.stdout.split()[-2:] == ["False", "False"]


def test_kept_code_that_is_damaged_is_compiled_again(tmp_path):
    loading(NUMBA_CACHE_DIR=str(tmp_path))
    found = sorted(tmp_path.glob("*.o"))
    assert len(found) == 2  # of float64: the sums, and the quantiles
    for file, content in zip(found, (found[0].read_bytes()[:-7], b"")):
        file.write_bytes(content)
    assert loading(NUMBA_CACHE_DIR=str(tmp_path)) == ["1", "True", "1.0"]
    assert loading(NUMBA_CACHE_DIR=str(tmp_path)) == ["0", "True", "1.0"]


LOOP = machine.Loop("_ulps16", "bits", ("uint16*", "uint16*", "int64*", "uint32*", "int64", "int64"), "int64")


@pytest.mark.parametrize("what", ["folder", "file"])
@pytest.mark.parametrize("mode", [0o777, 0o775], ids=oct)
def test_code_that_others_can_write_is_not_run(tmp_path, monkeypatch, what, mode):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "named"))
    machine.compiled(LOOP)
    assert machine.kept(LOOP) is not None
    (path,) = (tmp_path / "named").iterdir()
    assert not (path.stat().st_mode | path.parent.stat().st_mode) & 0o022
    (path if what == "file" else path.parent).chmod(mode)
    assert machine.kept(LOOP) is None
    machine.compiled(LOOP)  # a file is replaced; beside a folder of others there is one's own
    assert machine.kept(LOOP) is not None


def test_engines_own_what_they_are_made_with():
    # GIVEN three engines, the third of which fails after it is made
    # WHEN two are closed THEN the other one's code still runs and the process ends well
    code = """
import gc, numpy as np
from probe import kernels, machine
from probe.kernels import _RANKS, _ULPS
for bits in (16, 32, 16):
    machine.kept(_ULPS[bits]) or machine.compiled(_ULPS[bits])
code = machine._object(machine._renamed(_RANKS))
call = machine._runnable(_RANKS, code)
try:
    machine._runnable(machine.Loop("_ranks", "bins", ("int64*",), "no such type"), code)
except KeyError:
    pass
for engine in machine._engines[:2]:
    engine.close()
del machine._engines[:2]
gc.collect()
found = np.zeros(1, np.int64)
counts = np.zeros((kernels.LANES, kernels.ULP_BINS), np.int64)
counts[0, 5] = 3
target = np.array([2])
call(*(values.ctypes.data for values in (counts, target, found)), 9, 1)
for engine in machine._engines:
    engine.close()
print(found[0])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "5\n"), done.stderr


def test_a_disk_that_is_full_is_done_without(monkeypatch):
    def full(*arguments):
        raise OSError("no space left on device")

    monkeypatch.setattr(files, "replace_all", full)
    monkeypatch.setattr(machine, "kept", lambda loop: None)
    monkeypatch.setattr(kernels, "_compiled", [])
    found = kernels.load(["float64"])
    x = np.arange(12.0).reshape(3, 4)
    assert_same(*in_both_ways([found], x, 2 * x, "float64"), x.size)


def test_code_that_would_call_what_only_numba_has_is_not_kept(monkeypatch):
    from probe import loops

    def allocates(x, n):
        return np.zeros(n)[n // 2]

    monkeypatch.setattr(loops, "_ranks", allocates)
    loop = machine.Loop("_ranks", "bins", ("int64*", "int64"), "float64")
    with pytest.raises(machine.NoCodeError, match="calls NRT_"):
        machine.compiled(loop)
    monkeypatch.setattr(kernels, "_compiled", [])
    monkeypatch.setattr(kernels, "_refused", [])
    monkeypatch.setattr(kernels, "_RANKS", loop)
    monkeypatch.setattr(machine, "kept", lambda loop: None)
    assert kernels.load(["float32"]) is None and "probe_ranks_bins calls" in kernels.why_not()


def test_ranks_and_numpy_find_the_same_quantiles(loaded):
    rng = np.random.default_rng(0)
    histogram, table = UlpHistogram(), rng.integers(0, 3, (kernels.LANES, kernels.ULP_BINS))
    table[:, 70_000:] = 0
    for shares in ((0.5, 0.99), (0.99, 0.01, 0.3), (1.0,)):
        results = []
        with pytest.MonkeyPatch.context() as patch:
            for functions in ([], loaded):
                patch.setattr(kernels, "_compiled", functions)
                histogram._counts, histogram._total, histogram.largest = table, int(table.sum()), 2.0**21
                results.append(histogram.quantiles(shares))
        assert results[0] == results[1] and len(results[0]) == len(shares)


def test_a_cache_folder_that_is_a_file_is_no_error(tmp_path):
    Path(tmp_path / "file").write_text("")
    assert loading(NUMBA_CACHE_DIR=str(tmp_path / "file" / "folder"))[1:] == ["True", "1.0"]


def test_numpy_measures_where_numba_is_switched_off_or_cannot_be_imported(monkeypatch):
    assert loading(NUMBA_DISABLE_JIT="1") == ["0", "False", "1.0", "NUMBA_DISABLE_JIT is set\n"]
    monkeypatch.setattr(kernels, "_compiled", [])
    monkeypatch.setattr(kernels, "_refused", [])
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setattr(machine, "kept", lambda loop: None)
    assert kernels.load() is None and "numba" in kernels.why_not()


def test_importing_the_measuring_imports_no_numba():
    code = "import sys, probe.compare.figures; print('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
