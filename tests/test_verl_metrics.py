"""What runs in a trainer, and its formulas, against verl's own functions on verl's own batches."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo.core_algos import kl_penalty
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_corr_metrics_from_logprobs
from verl.utils.debug import metrics as verls
from verl.utils.skip import SkipManager

from probe.compare.tokens.run import compare_token_sources
from probe.errors import UsageError
from probe.hooks.engines.verl import calculate_debug_metrics, calculate_token_level_prob_diff
from probe.logprobs import SEQUENCE_METRICS, kl_terms, ratio_metrics, sequence_metrics, token_metrics

# verl's std and correlation of one token warn before they are NaN.
pytestmark = pytest.mark.filterwarnings("ignore:(cov|std)\\(\\). degrees of freedom")

GRID = "training/rollout_probs_diff/"
FORMS = {
    "DataProto": lambda columns: DataProto.from_dict(tensors=columns),
    "TensorDict": lambda columns: TensorDict(columns, batch_size=len(columns["responses"])),
    "tensors": dict,
    "arrays": lambda columns: {key: column.numpy() for key, column in columns.items()},
}
PADDING = {
    "zero (verl 0.9)": 0.0,
    "minus one (verl 0.6, vLLM)": -1.0,
    "the pad id (verl 0.6, SGLang)": 151643.0,
    "NaN": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
}


def columns_of(seed=0, rows=4, width=8, dtype=torch.float32, noise=0.05):
    """Return a batch with a full row, a shorter one, one with a hole, and one that is masked out."""
    random = torch.Generator().manual_seed(seed)
    actor = -3 * torch.rand(rows, width, generator=random, dtype=dtype)
    rollout = actor + noise * torch.randn(rows, width, generator=random, dtype=dtype)
    mask = torch.ones(rows, width, dtype=torch.long)
    if rows > 3:
        mask[1, width // 2 :], mask[2, 2:4], mask[3] = 0, 0, 0
    ids = torch.randint(3, 100, (rows, width), generator=random)
    return {"responses": ids, "response_mask": mask, "rollout_log_probs": rollout, "old_log_probs": actor}


@st.composite
def batches(draw, empty_rows=True):
    """Draw a float64 batch of any size, any mask and any finite log-probs of a sampled token."""
    rows, width = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    # Above -12: the probabilities of two tokens are then apart by more than float64 rounds, and so is verl's Pearson.
    cells = st.lists(st.floats(-12, 0).map(lambda x: round(x, 3)), min_size=width * rows, max_size=width * rows)
    sides = [torch.tensor(draw(cells), dtype=torch.float64).view(rows, width) for _ in range(2)]
    mask = torch.tensor(draw(st.lists(st.integers(0, 1), min_size=width * rows, max_size=width * rows)))
    mask = mask.view(rows, width)
    if not empty_rows:
        mask[:, 0] |= mask.sum(1) == 0
    ids = torch.zeros(rows, width, dtype=torch.long)
    return {"responses": ids, "response_mask": mask, "rollout_log_probs": sides[0], "old_log_probs": sides[1]}


def flat(columns):
    """Return rollout, actor and sequence number of the tokens inside the mask."""
    inside = columns["response_mask"].bool()
    row = torch.arange(len(inside)).unsqueeze(1).expand(inside.shape)
    return tuple(x[inside].numpy() for x in (columns["rollout_log_probs"], columns["old_log_probs"], row))


def with_padding(columns, value):
    changed = dict(columns)
    for key in ("rollout_log_probs", "old_log_probs"):
        changed[key] = torch.where(columns["response_mask"].bool(), columns[key], value)
    return changed


# -- calculate_debug_metrics ------------------------------------------------------------------------------------------


@given(batches())
@settings(max_examples=80, deadline=None)
def test_debug_metrics_are_verls(columns):
    got, want = (f(FORMS["DataProto"](columns)) for f in (calculate_debug_metrics, verls.calculate_debug_metrics))
    assert list(got) == list(want)
    a, b, _ = flat(columns)
    if len(a) > 1 and min(np.ptp(np.exp(a)), np.ptp(np.exp(b))) == 0:  # equal values: verl may correlate its rounding
        assert math.isnan(got.pop("training/rollout_actor_probs_pearson_corr"))
        want.pop("training/rollout_actor_probs_pearson_corr")
    assert got == pytest.approx(want, rel=0, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(3))
def test_debug_metrics_of_every_form_of_a_float32_batch_are_verls(form, seed):
    columns = columns_of(seed, rows=64, width=50)
    got = calculate_debug_metrics(FORMS[form](columns))
    want = verls.calculate_debug_metrics(FORMS["DataProto"](columns))
    assert got == pytest.approx(want, rel=0, abs=1e-6)
    assert {type(value) for value in got.values()} == {int, float}


def test_debug_metrics_where_definitions_have_edges():
    """GIVEN an empty mask, one token, no mask, or an attention mask only, THEN the figures are verl's."""
    columns = columns_of()
    empty = columns | {"response_mask": torch.zeros(4, 8)}
    one = {key: column[:1, :1] for key, column in columns.items()}
    unmasked = {key: column for key, column in columns.items() if key != "response_mask"}
    mask = torch.cat([torch.ones(4, 6, dtype=torch.long), columns["response_mask"]], 1)
    attention = unmasked | {"attention_mask": mask}
    for case in (empty, one, unmasked, attention, columns | {"response_mask": mask}):
        batch = FORMS["DataProto"](case)
        want = verls.calculate_debug_metrics(batch)
        assert calculate_debug_metrics(batch) == pytest.approx(want, rel=0, abs=1e-6, nan_ok=True)
    assert calculate_debug_metrics(attention) == calculate_debug_metrics(columns)
    assert calculate_debug_metrics(empty)["training/rollout_probs_diff_valid"] == 0
    assert math.isnan(calculate_debug_metrics(one)["training/rollout_probs_diff_std"])


def test_debug_metrics_of_a_batch_without_a_mask_say_so(caplog):
    columns = columns_of()
    del columns["response_mask"]
    calculate_debug_metrics(columns)
    assert "every token counts" in caplog.text


@pytest.mark.parametrize("value", PADDING.values(), ids=PADDING)
def test_debug_metrics_do_not_see_padding(value):
    columns = columns_of()
    assert calculate_debug_metrics(with_padding(columns, value)) == calculate_debug_metrics(columns)


def test_what_is_not_finite_inside_the_mask_shows_in_every_debug_metric_as_in_verls():
    columns = columns_of()
    columns["rollout_log_probs"][0, 0] = math.nan
    want = verls.calculate_debug_metrics(FORMS["DataProto"](columns))
    got = calculate_debug_metrics(columns)
    assert got == pytest.approx(want, nan_ok=True) and math.isnan(got["training/rollout_probs_diff_max"])
    columns["rollout_log_probs"][0, 0] = 1000.0  # no log-prob; its probability is infinite
    assert calculate_debug_metrics(columns)["training/rollout_probs_diff_max"] == math.inf


@pytest.mark.parametrize("key", ["rollout_log_probs", "old_log_probs", "responses"])
@pytest.mark.parametrize("form", ["DataProto", "tensors"])
def test_missing_columns_give_no_metrics(key, form, tmp_path):
    """verl raises KeyError here; a monitor must not end a training run that lacks a column."""
    columns = columns_of()
    del columns[key]
    batch = DataProto.from_dict(tensors=columns) if form == "DataProto" else columns
    assert calculate_debug_metrics(batch) == {}
    assert calculate_token_level_prob_diff(batch, tmp_path / "out", 1) == {} and not (tmp_path / "out").exists()
    with pytest.raises(KeyError):
        verls.calculate_debug_metrics(DataProto.from_dict(tensors=columns))


# -- the per-token monitor --------------------------------------------------------------------------------------------


def monitored(columns):
    """Return what the monitor stores of a batch with finite padding: differences times the mask, and the mask."""
    inside = columns["response_mask"].bool()
    apart = torch.exp(columns["rollout_log_probs"]).sub(torch.exp(columns["old_log_probs"])).abs()
    return (apart * inside).numpy(), inside.numpy()


def analysed(folder, step):
    """Return the figures that the monitor's users compute offline: over valid tokens, and means by position."""
    diff, mask = (np.load(folder / f"prob_{name}_step_{step}.npy") for name in ("diff", "mask"))
    valid, count = diff[mask], mask.sum(axis=0)
    means = np.where(count > 0, (diff * mask).sum(axis=0) / np.maximum(count, 1), 0)
    return {"tokens": len(valid), "mean": valid.mean(), "max": valid.max(), "std": valid.std(), "positions": means}


@pytest.mark.parametrize("form", FORMS)
def test_the_monitors_files_are_the_same_bytes(form, tmp_path):
    columns = columns_of(rows=40, width=30)
    for name, array in zip(("diff", "mask"), monitored(columns)):
        (tmp_path / "original").mkdir(exist_ok=True)
        np.save(tmp_path / "original" / f"prob_{name}_step_10.npy", array)
    calculate_token_level_prob_diff(FORMS[form](columns), str(tmp_path / "ours"), step=10)
    files = sorted(path.name for path in (tmp_path / "ours").iterdir())
    assert files == ["prob_diff_step_10.npy", "prob_mask_step_10.npy"]
    for name in files:
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "original" / name).read_bytes()
    got, want = (analysed(tmp_path / name, 10) for name in ("ours", "original"))
    assert {**got, "positions": got["positions"].tolist()} == {**want, "positions": want["positions"].tolist()}
    diff, mask = (np.load(tmp_path / "ours" / name) for name in files)
    assert diff.shape == mask.shape == (40, 30) and diff.dtype == np.float32 and mask.dtype == np.bool_


@given(batches(), st.integers(0, 6), st.integers(0, 11))
@settings(max_examples=80, deadline=None)
def test_the_grid_has_the_valid_tokens_of_the_first_rows_and_positions(columns, samples, positions):
    got = calculate_token_level_prob_diff(columns, token_max_print=positions, sample_max_print=samples)
    diff, mask = monitored(columns)
    want = {
        f"{GRID}s{row}_p{position:04d}": pytest.approx(diff[row, position], abs=1e-7)  # stored as float32
        for row in range(min(samples, len(mask)))
        for position in range(min(positions, mask.shape[1]))
        if mask[row, position]
    }
    assert got == want and list(got) == list(want)


def test_what_the_monitor_stored_has_the_figures_of_training_when_it_is_read(tmp_path):
    for step in (3, 4):
        calculate_token_level_prob_diff(columns_of(step, rows=20, width=30), tmp_path, step)
    trend = compare_token_sources([tmp_path])["tokens"]["by_step"]
    assert [entry["step"] for entry in trend] == [3, 4]
    for entry in trend:
        want = calculate_debug_metrics(columns_of(entry["step"], rows=20, width=30))
        figures = {name: entry[f"{name}_prob_diff"] for name in ("max", "mean", "std")}
        stored = {name: want[f"training/rollout_probs_diff_{name}"] for name in figures}
        assert figures == pytest.approx(stored, rel=0, abs=1e-7)  # stored as float32


def test_the_grid_is_eight_by_ten_by_default():
    got = calculate_token_level_prob_diff(columns_of(rows=20, width=30) | {"response_mask": torch.ones(20, 30)})
    names = list(got)
    assert len(names) == 80 and (names[0], names[-1]) == (f"{GRID}s0_p0000", f"{GRID}s7_p0009")


@pytest.mark.parametrize("value", PADDING.values(), ids=PADDING)
def test_padding_never_leaks_into_the_files(value, tmp_path):
    """The monitor multiplies by the mask, and NaN or inf times 0 is NaN; its files then break every later mean."""
    columns = columns_of()
    calculate_token_level_prob_diff(columns, tmp_path / "clean", 1)
    grid = calculate_token_level_prob_diff(with_padding(columns, value), tmp_path / "dirty", 1)
    assert grid == calculate_token_level_prob_diff(columns)
    for name in ("prob_diff_step_1.npy", "prob_mask_step_1.npy"):
        assert (tmp_path / "dirty" / name).read_bytes() == (tmp_path / "clean" / name).read_bytes()


def test_a_log_prob_that_is_not_finite_inside_the_mask_stays_in_the_files(tmp_path):
    columns = columns_of()
    columns["old_log_probs"][0, 1] = math.nan
    columns["old_log_probs"][0, 2] = -math.inf  # a probability of 0
    grid = calculate_token_level_prob_diff(columns, tmp_path, 1)
    diff = np.load(tmp_path / "prob_diff_step_1.npy")
    assert math.isnan(grid[f"{GRID}s0_p0001"]) and np.isnan(diff).sum() == 1
    assert diff[0, 2] == columns["rollout_log_probs"][0, 2].exp()


def test_an_empty_mask_stores_zeros_and_prints_nothing(tmp_path):
    columns = columns_of() | {"response_mask": torch.zeros(4, 8, dtype=torch.long)}
    assert calculate_token_level_prob_diff(columns, tmp_path) == {}
    diff, mask = np.load(tmp_path / "prob_diff.npy"), np.load(tmp_path / "prob_mask.npy")
    assert diff.shape == mask.shape == (4, 8) and not diff.any() and not mask.any()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prob_diff.npy", "prob_mask.npy"]


def test_without_a_response_mask_the_end_of_the_attention_mask_counts(tmp_path):
    columns = columns_of()
    want = calculate_token_level_prob_diff(columns, tmp_path / "a", 3)
    mask = columns.pop("response_mask")
    assert calculate_token_level_prob_diff(columns, tmp_path / "none", 3) == {}
    assert not (tmp_path / "none").exists()
    columns["attention_mask"] = torch.cat([torch.ones(4, 6, dtype=torch.long), mask], 1)
    assert calculate_token_level_prob_diff(columns, tmp_path / "b", 3) == want
    first, second = (np.load(tmp_path / name / "prob_mask_step_3.npy") for name in "ab")
    assert np.array_equal(first, second)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0)])
def test_a_batch_without_a_token_has_no_metrics(shape, tmp_path):
    """A mask of prompt and response has no last 0 columns, which Python's [-0:] would take to be all."""
    empty = torch.zeros(shape)
    columns = {"rollout_log_probs": empty, "old_log_probs": empty, "responses": empty}
    columns["attention_mask"] = torch.ones(shape[0], shape[1] + 5)
    assert calculate_token_level_prob_diff(columns, tmp_path, 0) == {}
    assert np.load(tmp_path / "prob_diff_step_0.npy").shape == shape
    assert calculate_debug_metrics(columns)["training/rollout_probs_diff_valid"] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_computed_in_float32_or_better(dtype, tmp_path):
    """The monitor takes exp in the dtype of the log-probs, and cannot store bfloat16; half of them is noise then."""
    columns = columns_of()
    for key in ("rollout_log_probs", "old_log_probs"):
        columns[key] = columns[key].to(dtype)
    calculate_token_level_prob_diff(columns, tmp_path, 1)
    diff = np.load(tmp_path / "prob_diff_step_1.npy")
    exact = (columns["rollout_log_probs"].double().exp() - columns["old_log_probs"].double().exp()).abs()
    assert diff.dtype == np.float32
    np.testing.assert_allclose(diff, (exact * columns["response_mask"]).numpy(), rtol=0, atol=2e-7)  # float32 near 1


def test_tensors_with_a_gradient_transposed_ones_and_read_only_arrays_are_read(tmp_path):
    columns = columns_of()
    want = calculate_token_level_prob_diff(columns, tmp_path / "plain", 1)
    odd = dict(columns)
    odd["old_log_probs"] = columns["old_log_probs"].clone().requires_grad_()
    odd["rollout_log_probs"] = columns["rollout_log_probs"].T.contiguous().T
    odd["response_mask"] = columns["response_mask"].numpy()
    odd["response_mask"].setflags(write=False)
    assert calculate_token_level_prob_diff(odd, tmp_path / "odd", 1) == want
    name = "prob_diff_step_1.npy"
    assert (tmp_path / "odd" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    assert odd["old_log_probs"].requires_grad  # the batch is left as it was


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_of_verls_unpadded_engine_are_read(layout):
    columns = columns_of()
    columns["response_mask"][2] = 1  # rows without a hole
    lengths = columns["response_mask"].sum(1).tolist()
    nested = {
        key: torch.nested.nested_tensor([row[:n] for row, n in zip(column, lengths)], layout=layout)
        for key, column in columns.items()
    }
    assert calculate_token_level_prob_diff(nested) == calculate_token_level_prob_diff(columns)
    assert calculate_debug_metrics(nested) == calculate_debug_metrics(columns)
    nested["attention_mask"] = nested.pop("response_mask")
    with pytest.raises(UsageError, match="attention_mask has rows of different lengths"):
        calculate_debug_metrics(nested)


BAD = {
    "log-probs of prompt and response": {"old_log_probs": torch.zeros(4, 14)},
    "one row less": {"rollout_log_probs": torch.zeros(3, 8)},
    "a mask that is too short": {"response_mask": torch.ones(4, 5)},
    "a vector": dict.fromkeys(("rollout_log_probs", "old_log_probs", "responses", "response_mask"), torch.zeros(4)),
    "logits": {"old_log_probs": torch.zeros(4, 8, 11)},
    "a number": dict.fromkeys(("rollout_log_probs", "old_log_probs", "responses", "response_mask"), torch.tensor(0.0)),
    "text": {"rollout_log_probs": [["a"] * 8] * 4},
    "ragged lists": {"rollout_log_probs": [[0.0] * 8] * 3 + [[0.0]]},
}


@pytest.mark.parametrize("change", BAD.values(), ids=BAD)
def test_a_batch_that_does_not_fit_together_is_refused_in_a_sentence(change, tmp_path):
    for function in (calculate_debug_metrics, lambda data: calculate_token_level_prob_diff(data, tmp_path / "out")):
        with pytest.raises(UsageError, match="batch") as refused:
            function(columns_of() | change)
        assert str(refused.value).endswith(".") and "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_what_is_no_batch_is_refused():
    with pytest.raises(UsageError, match="cannot be a list"):
        calculate_debug_metrics([1.0])
    assert calculate_debug_metrics(DataProto()) == {}


def test_a_folder_that_cannot_be_written_is_one_sentence_and_leaves_earlier_steps(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="choose another save_dir"):
        calculate_token_level_prob_diff(columns_of(), tmp_path / "file", 1)
    calculate_token_level_prob_diff(columns_of(), tmp_path / "out", 1)
    before = (tmp_path / "out" / "prob_diff_step_1.npy").read_bytes()
    (tmp_path / "out" / "prob_mask_step_2.npy").mkdir()
    with pytest.raises(UsageError):
        calculate_token_level_prob_diff(columns_of(1), tmp_path / "out", 2)
    assert (tmp_path / "out" / "prob_diff_step_1.npy").read_bytes() == before
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.endswith(".tmp")]


def test_the_hooks_need_no_verl():
    code = "import sys; sys.modules['verl'] = None; import probe.hooks.engines.verl; print('tensordict' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent.parent
    )
    assert done.stdout == "False\n", done.stderr


# -- formulas ---------------------------------------------------------------------------------------------------------

ROLLOUT_CORRECTION = {
    "kl": "k1",
    "k3_kl": "k3",
    "chi2_token": "chi2_token",
    "chi2_seq": "chi2_sequence",
    "rollout_ppl": "ppl_a",
    "training_ppl": "ppl_b",
    "rollout_log_ppl": "log_ppl_a",
    "training_log_ppl": "log_ppl_b",
    **{
        name: name for name in ("log_ppl_diff", "log_ppl_abs_diff", "log_ppl_diff_max", "log_ppl_diff_min", "ppl_ratio")
    },
}
"""verl's names of rollout_corr/* and ours."""


def our_figures(columns):
    a, b, row = flat(columns)
    over_sequences, _ = sequence_metrics(a, b, row, len(columns["response_mask"]))
    return token_metrics(a, b) | ratio_metrics(a, b) | over_sequences


def verls_figures(columns):
    keys = ("old_log_probs", "rollout_log_probs", "response_mask")
    found = compute_rollout_corr_metrics_from_logprobs(*(columns[key] for key in keys))
    return {name.removeprefix("rollout_corr/"): value for name, value in found.items()}


def near(columns, scale):
    """Return a batch whose log-probs differ by at most ``scale``, so that none of verl's bounds of +-20 is reached."""
    gap = (columns["old_log_probs"] - columns["rollout_log_probs"]) * scale / 12
    return columns | {"old_log_probs": columns["rollout_log_probs"] + gap}


@given(batches(empty_rows=False), st.sampled_from([1e-3, 0.1, 1.0]))
@settings(max_examples=80, deadline=None)
def test_every_shared_figure_of_the_rollout_correction_is_verls(columns, scale):
    columns = near(columns, scale)
    got, want = our_figures(columns), verls_figures(columns)
    assert set(want) == set(ROLLOUT_CORRECTION)
    # Relative for perplexities and ratios above 1; verl divides by the number of tokens plus 1e-8.
    assert {name: got[ours] for name, ours in ROLLOUT_CORRECTION.items()} == pytest.approx(want, rel=1e-6, abs=1e-6)


def test_a_float32_batch_has_verls_figures():
    columns = columns_of(rows=3, width=64)
    got, want = our_figures(columns), verls_figures(columns)
    assert {name: got[ours] for name, ours in ROLLOUT_CORRECTION.items()} == pytest.approx(want, rel=1e-6, abs=1e-6)


def test_a_row_that_is_masked_out_counts_in_verls_figures_and_not_in_ours():
    """verl takes such a row for one of perplexity 1 and ratio 1; here it is in no figure."""
    columns = columns_of(dtype=torch.float64)
    kept = {key: column[:3] for key, column in columns.items()}
    assert our_figures(columns) == our_figures(kept)
    got, want = our_figures(columns), verls_figures(columns)
    figures = {ours: (want[name], got[ours]) for name, ours in ROLLOUT_CORRECTION.items()}
    for name in ("log_ppl_a", "log_ppl_b", "log_ppl_diff", "log_ppl_abs_diff", "chi2_sequence"):
        assert figures[name][0] == pytest.approx(figures[name][1] * 3 / 4, abs=1e-6)
    for name in ("ppl_a", "ppl_b", "ppl_ratio"):
        assert figures[name][0] == pytest.approx((figures[name][1] * 3 + 1) / 4, abs=1e-6)
    for name in ("k1", "k3", "chi2_token"):
        assert figures[name][0] == pytest.approx(figures[name][1], abs=1e-6)


def test_without_a_token_verl_stops_and_every_figure_here_is_nan():
    columns = columns_of() | {"response_mask": torch.zeros(4, 8, dtype=torch.long)}
    with pytest.raises(AssertionError):
        verls_figures(columns)
    assert all(math.isnan(value) for value in our_figures(columns).values())
    scalars, of_each = sequence_metrics(np.zeros(0), np.zeros(0), np.zeros(0, np.int64), 0)
    assert set(scalars) == set(SEQUENCE_METRICS) and all(column.shape == (0,) for column in of_each.values())


def test_ratios_beyond_verls_bound_are_not_cut():
    """verl takes log-ratios of tokens and sequences to be within +-20; the figures here say what they are."""
    columns = columns_of(rows=1, width=2, dtype=torch.float64)
    columns["rollout_log_probs"][:] = -15.0
    columns["old_log_probs"][:] = -1.0
    got, want = our_figures(columns), verls_figures(columns)
    assert got["chi2_sequence"] == pytest.approx(math.exp(56)) and want["chi2_seq"] == pytest.approx(math.exp(40))
    columns["rollout_log_probs"][:] = -800.0
    assert our_figures(columns)["chi2_token"] == math.inf and our_figures(columns)["k3"] == math.inf


@given(batches(empty_rows=False))
@settings(max_examples=60, deadline=None)
def test_terms_of_the_kl_estimators_are_those_of_verls_kl_penalty(columns):
    a, b, _ = flat(columns)
    terms = kl_terms(a, b)
    for name, ours in terms.items():
        theirs = kl_penalty(torch.from_numpy(a), torch.from_numpy(b), name).numpy()
        uncut = ours <= 10 if name == "k3" else np.full(len(a), True)
        np.testing.assert_allclose(ours[uncut], theirs[uncut], rtol=1e-6, atol=1e-6)
        assert (theirs[~uncut] == 10).all()
    size = kl_penalty(torch.from_numpy(a), torch.from_numpy(b), "abs").numpy()
    assert token_metrics(a, b)["mean_abs_logprob_diff"] == pytest.approx(size.mean(), rel=1e-6, abs=1e-6)
    means = {name: term.mean() for name, term in terms.items()}
    assert {name: token_metrics(a, b)[name] for name in means} == pytest.approx(means, nan_ok=True)


@given(batches(), st.randoms(use_true_random=False))
@settings(max_examples=80, deadline=None)
def test_sequence_figures_are_those_of_each_sequence_alone(columns, random):
    columns = near(columns, 2.0)
    a, b, row = flat(columns)
    order = np.array(random.sample(range(len(a)), len(a)), np.int64)  # tokens come in any order
    scalars, of_each = sequence_metrics(a[order], b[order], row[order], len(columns["response_mask"]))
    figures = {name: [] for name in of_each}
    for number in range(len(columns["response_mask"])):
        d = [float(y) - float(x) for x, y, owner in zip(a, b, row) if owner == number]
        mean = sum(d) / len(d) if d else math.nan
        own = {
            "log_ppl_a": -float(a[row == number].mean()) if d else math.nan,
            "log_ppl_b": -float(b[row == number].mean()) if d else math.nan,
            "log_ppl_diff": -mean,
            "ratio": math.prod(math.exp(x) for x in d) if d else math.nan,
            "ratio_geometric": math.exp(mean),
            "tme": sum(math.exp(abs(x)) for x in d) / len(d) if d else math.nan,
            "k3": sum(math.exp(x) - x - 1 for x in d) / len(d) if d else math.nan,
        }
        for name, value in own.items():
            figures[name].append(value)
            assert of_each[name][number] == pytest.approx(value, rel=1e-9, abs=1e-9, nan_ok=True)  # float64 sums
    known = {name: [x for x in values if not math.isnan(x)] for name, values in figures.items()}
    count = len(known["ratio"])
    if not count:
        assert all(math.isnan(value) for value in scalars.values())
        return
    squares = {name: sum(x * x for x in known[name]) / count - 1 for name in ("ratio", "ratio_geometric")}
    assert scalars["chi2_sequence"] == pytest.approx(squares["ratio"], rel=1e-9, abs=1e-9)
    assert scalars["chi2_sequence_geometric"] == pytest.approx(squares["ratio_geometric"], rel=1e-9, abs=1e-9)
    assert scalars["tme_sequence_max"] == pytest.approx(max(known["tme"]), rel=1e-9)


def test_equal_sides_of_one_token_have_defined_figures():
    a = np.array([-1.5])
    scalars, of_each = sequence_metrics(a, a, np.array([1]), 3)
    assert scalars["log_ppl_a"] == scalars["log_ppl_b"] == 1.5 and scalars["ppl_ratio"] == 1.0
    assert scalars["chi2_sequence"] == scalars["chi2_sequence_geometric"] == scalars["log_ppl_abs_diff"] == 0.0
    assert np.isnan(of_each["ratio"]).tolist() == [True, False, True]
    one = token_metrics(a, a)
    assert math.isnan(one["std_prob_diff"]) and math.isnan(one["pearson"]) and one["max_prob_diff"] == 0.0


def test_a_side_of_one_probability_has_no_correlation():
    """0.1 three times has a mean that is not quite 0.1, and what is left over is no correlation."""
    a = np.log(np.full(3, 0.1))
    assert math.isnan(token_metrics(a, np.log([0.1, 0.2, 0.3]))["pearson"])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("a", [math.nan, -math.inf, math.inf, -800.0, 800.0])
@pytest.mark.parametrize("b", [math.nan, -math.inf, math.inf, -800.0, 0.0])
def test_no_log_prob_makes_a_formula_warn_or_raise(a, b):
    a, b, row = np.array([a, -1.0]), np.array([b, -2.0]), np.array([0, 1])
    scalars, of_each = sequence_metrics(a, b, row, 2)
    assert of_each["log_ppl_diff"][1] == 1.0  # the other sequence is as it was
    for figures in (token_metrics(a, b), ratio_metrics(a, b), scalars):
        assert {type(value) for value in figures.values()} == {float}


def test_the_module_of_the_docs_hooks_verl_without_an_edit(monkeypatch, tmp_path):
    """GIVEN docs/training.md's module, WHEN verl calls what it takes for its own function, THEN both halves run."""
    page = (Path(__file__).parent.parent / "docs" / "training.md").read_text()
    module = page.split("## Without editing verl")[1].split("```python")[1].split("```")[0]
    monkeypatch.setattr(verls, "calculate_debug_metrics", None)  # what stood there is put back after the test
    monkeypatch.setattr(SkipManager, "step", 7)
    monkeypatch.setenv("PROB_DIFF_DIR", str(tmp_path))
    exec(module, {})
    columns = columns_of()
    found = verls.calculate_debug_metrics(FORMS["DataProto"](columns))
    assert found == calculate_debug_metrics(columns) | calculate_token_level_prob_diff(columns)
    assert np.load(tmp_path / "prob_diff_step_7.npy").shape == (4, 8)
