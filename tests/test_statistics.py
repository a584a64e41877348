"""Statistics of rows: sound and tight bounds, parts that merge, and what capture stores and readers give back."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from dump_tools import open_writer, rank_file, segment
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from probe import PrecisionDebugger
from probe.compare.statistics import BoundMeasure, row_bounds
from probe.errors import DumpError
from probe.hooks.budget import bytes_per_row, estimate_line
from probe.hooks.statistics import RowReducer
from probe.store import statistics
from probe.store.reader import open_dump
from probe.store.statistics import COUNT, INF, LARGEST, NAN, NORM, SMALLEST, SUM, WIDTH, Reduced, statistics_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def gamma(terms: int, dtype: str) -> float:
    """By how much a sum of terms may be off, relative to the sum of their magnitudes (Higham 2002, eq. 3.3)."""
    unit = np.finfo(statistics.accumulator(dtype)).eps / 2
    return (terms + 4) * unit / (1 - (terms + 4) * unit)


def reduce(values: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Return rows rounded to a dtype, as float64, and their statistics as a reader gives them to a comparison."""
    tensor = torch.from_numpy(values).to(DTYPES[dtype])
    found = RowReducer().statistics(tensor)
    unit = np.full((len(found), 1), np.finfo(statistics.accumulator(dtype)).eps / 2)
    return tensor.double().numpy(), np.hstack([found.double().numpy(), unit])


@st.composite
def pairs(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, str]:
    """Two tensors that are alike in one way or another: independent, scaled, shifted, permuted, nearly equal."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    rows, features = draw(st.integers(1, 5)), draw(st.integers(1, 600))
    size = 10.0 ** draw(st.integers(-4, 3))
    y = size * (rng.standard_normal((rows, features)) + draw(st.sampled_from([0.0, 3.0])))
    near = 10.0 ** draw(st.integers(-8, 0))
    kinds = {
        "other": lambda: size * rng.standard_normal(y.shape),
        "scaled": lambda: y * (1 + near),
        "shifted": lambda: y + near * size,
        "permuted": lambda: rng.permuted(y, axis=1),
        "near": lambda: y + near * size * rng.standard_normal(y.shape),
        "same": lambda: y.copy(),
    }
    return kinds[draw(st.sampled_from(sorted(kinds)))](), y, draw(st.sampled_from(sorted(DTYPES)))


@settings(max_examples=300, deadline=None)
@given(pairs())
def test_a_bound_is_never_above_the_true_difference(case):
    """GIVEN any two tensors, WHEN bounded by statistics, THEN neither rows nor the whole are said to differ by more."""
    (x, of_x), (y, of_y) = (reduce(values, case[2]) for values in case[:2])
    true = np.linalg.norm(x - y, axis=1)
    rounding = 1 + x.shape[1] * 2.0**-52  # of the true difference itself, a sum in float64
    assert (row_bounds(of_x, of_y) <= true * rounding).all()
    measure = BoundMeasure(len(x), "float32")
    measure.update(of_x, of_y, 0)
    found = measure.result()
    assert found.is_bound and found.nonfinite_mismatch == 0 and found.pairs == x.size
    assert found.rel_l2 <= np.linalg.norm(true) / np.linalg.norm(y) * rounding
    assert np.isnan([found.max_abs, found.rmse, found.one_minus_cos, found.ulp_p50, found.slope]).all()
    ratio = np.linalg.norm(x) / np.linalg.norm(y)
    assert abs(found.norm_ratio - 1) <= abs(ratio - 1) + x.size * 2.0**-52


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(20, 800), st.sampled_from(sorted(DTYPES)), st.floats(0.5, 2.0))
def test_a_scaled_row_is_bounded_by_its_whole_difference(seed, features, dtype, factor):
    """The norm sees all of a change of scale: the bound is the difference, less the rounding of the two norms."""
    y = np.random.default_rng(seed).standard_normal((3, features))
    (x, of_x), (y, of_y) = reduce(y * factor, dtype), reduce(y, dtype)
    norms = np.abs(np.linalg.norm(x, axis=1) - np.linalg.norm(y, axis=1))
    rounding = gamma(features, dtype) * (np.linalg.norm(x, axis=1) + np.linalg.norm(y, axis=1))
    tiny = np.sqrt(features * np.finfo(statistics.accumulator(dtype)).tiny)
    assert (row_bounds(of_x, of_y) >= norms - rounding - 2 * tiny).all()


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from(sorted(DTYPES)), st.lists(st.integers(1, 90), min_size=2, max_size=5))
def test_the_statistics_of_shards_and_of_some_rows_are_those_of_the_whole(seed, dtype, widths):
    rng = np.random.default_rng(seed)
    whole, found = reduce(rng.standard_normal((6, sum(widths))) + 1, dtype)
    columns = np.split(np.arange(sum(widths)), np.cumsum(widths)[:-1])
    parts = [reduce(whole[:, at], dtype)[1][:, :WIDTH] for at in rng.permutation(len(columns)) for at in [columns[at]]]
    merged = statistics.merged(parts)
    exact = [LARGEST, SMALLEST, NAN, INF, COUNT]
    assert np.array_equal(merged[:, exact], found[:, exact])
    allowed = 2 * gamma(sum(widths), dtype)
    norm = np.linalg.norm(whole, axis=1)
    assert (np.abs(merged[:, NORM] - norm) <= allowed * norm).all()
    assert (np.abs(merged[:, SUM] - whole.sum(axis=1)) <= allowed * np.abs(whole).sum(axis=1)).all()
    rows = rng.permutation(6)[:3]
    some = reduce(whole[rows], dtype)[1]
    assert np.array_equal(some[:, exact], found[rows][:, exact])
    assert (np.abs(some[:, NORM] - found[rows, NORM]) <= allowed * norm[rows]).all()


def test_values_that_are_not_finite_are_counted():
    values = np.array([[1.0, np.nan, np.inf, -np.inf], [1.0, 2.0, 3.0, 4.0]])
    for found in (reduce(values, "float32")[1], statistics_of(values)):
        assert found[:, [NAN, INF, COUNT]].tolist() == [[1, 2, 4], [0, 0, 4]]
        assert not np.isfinite(found[0, NORM]) and found[1, [SUM, LARGEST, SMALLEST]].tolist() == [10, 4, 1]
    other = values.copy()
    other[0] = [np.nan, np.nan, np.inf, 1.0]
    measure = BoundMeasure(2, "float32")
    measure.update(reduce(values, "float32")[1], reduce(other, "float32")[1], 0)
    found = measure.result()
    assert found.nonfinite_mismatch == 2 and found.row_mismatch.tolist() == [True, False]
    assert (found.pairs, found.rel_l2) == (4, 0.0) and (found.nan_x, found.nan_y, found.inf_x, found.inf_y) == (
        1,
        2,
        2,
        1,
    )


# -- capture ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Any:
    from transformers import AutoModelForCausalLM

    path = make_checkpoint(tmp_path_factory.mktemp("statistics") / "model")
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


IDS = torch.randint(0, 197, (2, 24), generator=torch.Generator().manual_seed(1))


def recorded(folder: Path, model: Any, task: str, *, mode: Any = torch.no_grad, **settings: Any) -> Path:
    debugger = PrecisionDebugger(dump_path=folder, task=task, enabled=True, **settings)
    with mode(), debugger.start(model, uids=["x", "y"], prompt_lens=[12, 24]):
        model(input_ids=IDS)
    return folder


def assert_statistics_of(values: Path, reduced: Path, dtype: str = "float32") -> int:
    """Check that a dump holds the statistics of what another one holds in full; return of how many tensors."""
    count = 0
    with open_dump(values) as full, open_dump(reduced) as found:
        assert found.reduced and not full.reduced and found.tasks == {"statistics"}
        assert found.tensors.keys() == full.tensors.keys()
        for key, info in full.tensors.items():
            own = found.tensors[key]
            assert (own.dtype, own.feature_shape, own.rows) == (info.dtype, info.feature_shape, info.rows), key
            assert np.array_equal(found.rows(*key), full.rows(*key))
            if not own.reduced:
                assert np.array_equal(found.read_raw(*key), full.read_raw(*key))
                continue
            count += 1
            want, (got,) = full.read(*key), found.read_statistics(*key)
            expected = statistics_of(want)
            exact = [LARGEST, SMALLEST, NAN, INF, COUNT]
            assert np.array_equal(got[:, exact], expected[:, exact]), key
            allowed = 2 * gamma(int(expected[0, COUNT]), dtype)
            assert (np.abs(got[:, NORM] - expected[:, NORM]) <= allowed * expected[:, NORM]).all()
            magnitudes = np.abs(want.astype(np.float64)).reshape(len(want), -1).sum(axis=1)
            assert (np.abs(got[:, SUM] - expected[:, SUM]) <= allowed * magnitudes).all()
            assert (own.min, own.max, own.nan, own.inf) == (info.min, info.max, info.nan, info.inf)
            assert own.norm == pytest.approx(info.norm, rel=float(allowed))
            with pytest.raises(DumpError, match=r"holds statistics of the rows of .*, not its values"):
                found.read(*key)
    return count


@pytest.mark.parametrize("limits", [{}, {"rows": 3}, {"seqs": 1}], ids=str)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_capture_stores_the_statistics_of_what_it_would_store(tmp_path, model, mode, limits):
    """All rows are reduced before they are picked, few are picked first; budgets mean the same."""
    full = recorded(tmp_path / "tensor", model, "tensor", mode=mode, **limits)
    reduced = recorded(tmp_path / "statistics", model, "statistics", mode=mode, **limits)
    assert assert_statistics_of(full, reduced) > 40
    with open_dump(reduced) as dump:
        assert not dump.tensors["model.embed_tokens", "input.0"].reduced  # ids


def test_bfloat16_is_accumulated_in_float32(tmp_path, model):
    coarse = copy.deepcopy(model).bfloat16()
    full, reduced = (recorded(tmp_path / task, coarse, task) for task in ("tensor", "statistics"))
    assert assert_statistics_of(full, reduced, "bfloat16") > 40
    with open_dump(reduced) as dump:
        assert dump.read_statistics("lm_head", "output.0")[0].dtype == np.float32


class Overwriting(nn.Module):
    """Writes into what one module returned before the next one gets it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.embed = nn.Linear(32, 32), nn.Linear(32, 32), nn.Embedding(197, 32)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.first(self.embed(input_ids))
        return self.second(hidden.mul_(2))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_tensor_that_was_written_into_is_read_again(tmp_path, mode):
    torch.manual_seed(0)
    recorded(tmp_path, Overwriting(), "statistics", mode=mode)
    with open_dump(tmp_path) as dump:
        (before,), (after,) = (dump.read_statistics(*key) for key in (("first", "output.0"), ("second", "input.0")))
    assert np.allclose(after[:, NORM], 2 * before[:, NORM], rtol=2 * gamma(32, "float32"))


def test_training_is_the_same_to_the_bit(tmp_path, model):
    def train(folder: Path | None) -> list[torch.Tensor]:
        torch.manual_seed(3)
        own = copy.deepcopy(model).train()
        optimizer = torch.optim.AdamW(own.parameters(), lr=1e-2)
        debugger = PrecisionDebugger(dump_path=folder or "unused", task="statistics", enabled=folder is not None)
        for _ in range(3):
            debugger.start(own)
            own(input_ids=IDS, labels=IDS).loss.backward()
            debugger.stop()
            debugger.step()
            optimizer.step()
            optimizer.zero_grad()
        return [*own.parameters(), torch.rand(4)]

    plain, watched = train(None), train(tmp_path / "d")
    assert all(torch.equal(one, other) for one, other in zip(plain, watched))
    assert len(list((tmp_path / "d").glob("actor/step*/rank0.h5"))) == 3


def test_the_estimate_is_of_statistics():
    """A row of bfloat16 takes 7 float32 per distinct tensor, of which a layer has 14; logits are one more."""
    layout = {"num_layers": 24, "hidden_size": 896, "vocab_size": 151936}
    manifest = {"stage": "actor", "task": "statistics", "dtype": "bfloat16", "layout": layout}
    assert bytes_per_row(manifest) == 7 * 4 * (24 * 14 + 1)
    assert "statistics of tensors take about 9.44 kB per token" in estimate_line(manifest)
    assert bytes_per_row({**manifest, "dtype": "float32"}) == 2 * bytes_per_row(manifest)


# -- files ------------------------------------------------------------------------------------------------------------


def test_a_killed_run_is_read_and_a_later_kind_of_rows_is_left_out(tmp_path):
    writer = open_writer(tmp_path)
    rows = np.arange(24.0).reshape(3, 8)
    of = Reduced("bfloat16", (2, 4))
    writer.append("m", "output.0", statistics_of(rows).astype(np.float32), "float32", segment(3), of=of)
    writer.append("m", "output.0", rows.astype(np.float32), "float32", segment(3, start=3))  # short rows, at last
    writer.flush()
    writer.abandon()
    assert not rank_file(tmp_path).exists()
    with open_dump(tmp_path / "rollout") as dump:
        info = dump.tensors["m", "output.0"]
        assert (info.dtype, info.feature_shape, info.rows, info.reduced) == ("bfloat16", (2, 4), 3, True)
        assert (info.min, info.max, info.mean) == (0, 23, 11.5)
        assert np.array_equal(dump.read_statistics("m", "output.0")[0], statistics_of(rows).astype(np.float32))


def test_a_file_whose_statistics_have_another_width_is_refused(tmp_path):
    writer = open_writer(tmp_path)
    writer.append("m", "output.0", np.zeros((3, 8), np.float32), "float32", segment(3), of=Reduced("float32", (64,)))
    writer.close()
    with pytest.raises(DumpError, match=r"holds statistics as float32 \['rows', 8\] instead of \[rows, 7\]"):
        open_dump(tmp_path / "rollout")
