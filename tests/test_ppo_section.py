"""The ``ppo`` section: the policy loss and its gradient weight, split into learning and mismatch; and RL in dumps."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dump_tools import open_rank
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from ppo_reference import reference_update
from synthetic_dumps import Scenario, actor, prompts, write_dump

from probe.compare.align import RowAligner, pack
from probe.compare.ppo import PPOConfig
from probe.compare.report.model import clean_floats, validate
from probe.compare.run import compare_dumps
from probe.compare.sequences import SequenceJoin, SequencePair
from probe.compare.tokens.batch import COLUMNS, Origin, TokenBatch
from probe.compare.tokens.rl import read_rl, rl_columns
from probe.compare.tokens.update import CARRIERS, SCALARS, ppo_section
from probe.errors import DumpError
from probe.store.reader import open_dump
from probe.store.schema import RL, ROW, RowSegment, Sequence
from probe.store.writer import DumpWriter

CONFIG = PPOConfig()


def batch_of(a: Any, b: Any, lengths: list[int] | None = None, **columns: Any) -> TokenBatch:
    """Return a batch of sequences of the given lengths (one of all tokens), whose prompts have three tokens."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    lengths = [len(a)] if lengths is None else lengths
    origin = Origin("rollout.npz", "npz", "rollout_log_probs")
    return TokenBatch(
        sequence=np.repeat(np.arange(len(lengths)), lengths),
        position=np.concatenate([np.arange(n) for n in lengths]) if lengths else np.zeros(0, np.int64),
        token=np.arange(len(a)) + 100,
        prob_diff=np.abs(np.exp(a) - np.exp(b)),
        a=a,
        b=b,
        labels=[f"s{n}" for n in range(len(lengths))],
        step=np.full(len(lengths), -1),
        start=np.full(len(lengths), 3),
        valid=np.array(lengths),
        ids=[np.zeros(0, np.int64)] * len(lengths),
        width=max(lengths, default=0),
        origins=(origin, origin),
        columns={name: np.asarray(values, np.float64) for name, values in columns.items()},
    )


logs = st.floats(-12, 0)


@st.composite
def batches(draw: st.DrawFn) -> TokenBatch:
    """Return a random batch with advantages and any of the other columns, some of their numbers unknown."""
    lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any))
    count = sum(lengths)
    a, b = (draw(hnp.arrays(np.float64, count, elements=logs)) for _ in range(2))
    names = ["advantages", *draw(st.lists(st.sampled_from(COLUMNS[1:]), unique=True))]
    unknown = st.sampled_from([math.nan, math.inf, 0.0])
    columns = {
        name: draw(hnp.arrays(np.float64, count, elements=st.one_of(logs, unknown) if name != "advantages" else logs))
        for name in names
    }
    signs = draw(hnp.arrays(np.float64, count, elements=st.sampled_from([-1.0, 0.0, 1.0])))
    return batch_of(a, b, lengths, **columns | {"advantages": columns["advantages"] * signs})


# -- the split --------------------------------------------------------------------------------------------------------


@given(batch=batches(), epsilon=st.sampled_from([0.1, 0.2, 0.5]))
@settings(max_examples=50, deadline=None)
def test_the_split_adds_up_and_each_half_is_torch_s(batch: TokenBatch, epsilon: float) -> None:
    config = PPOConfig(clip_epsilon=epsilon, kl_coef=0.0, early_stop_kl=math.inf)
    section = ppo_section(batch, config, None)
    policy = [batch.columns[name] for name in ("new_log_probs", "advantages", "ref_log_probs") if name in batch.columns]
    known = [np.isfinite(column) for column in policy if np.isfinite(column).any()]
    mask = np.logical_and.reduce(known)
    if not mask.any():
        assert section["scalars"] == dict.fromkeys(SCALARS) and section["gradient"] is None
        return
    given = batch.columns.get("new_log_probs", np.array([math.nan]))
    new = given if np.isfinite(given).any() else batch.b
    assert new is not None and batch.a is not None and batch.b is not None
    slopes, losses = [], []
    for old in (batch.a, batch.b):
        zeros = {name: np.zeros(len(batch)) for name in ("values", "old_values", "returns")}
        arrays = zeros | {"new": new, "old": old, "advantages": batch.columns["advantages"], "mask": mask}
        found = reference_update(arrays | {"reference": np.where(mask, new, 0.0)}, config, 0.0)
        slopes.append(found["gradient"] * mask.sum())
        losses.append(found["policy_loss"])
    scalars, gradient = section["scalars"], section["gradient"]
    close = {"rel": 1e-6, "abs": 1e-9}  # the 1e-6; float64 on both sides
    assert scalars["policy_clip_loss"] == pytest.approx(losses[0], **close)
    assert scalars["policy_loss_mismatch"] == pytest.approx(losses[0] - losses[1], rel=1e-6, abs=1e-6)
    assert scalars["policy_loss"] == pytest.approx(
        scalars["policy_loss_recomputed"] + scalars["policy_loss_mismatch"], rel=1e-6, abs=1e-6
    )
    weights = [np.abs(slope).sum() / mask.sum() for slope in slopes]
    mismatch = np.abs(slopes[0] - slopes[1]).sum() / mask.sum()
    assert gradient["weight_total"] == pytest.approx(weights[0], **close)
    assert gradient["weight_recomputed"] == pytest.approx(weights[1], **close)
    assert gradient["weight_mismatch"] == pytest.approx(mismatch, **close)
    assert gradient["weight_mismatch"] == pytest.approx(gradient["gained"] + gradient["lost"], **close)
    assert weights[0] == pytest.approx(weights[1] + gradient["gained"] - gradient["lost"], **close)
    if weights[1] + mismatch > 1e-12:
        assert gradient["share"] == pytest.approx(mismatch / (weights[1] + mismatch), **close)
    carried = [entry["share"] for entry in section["carriers"]]
    assert carried == sorted(carried, reverse=True)
    if mismatch > 1e-12 and gradient["tokens"] <= CARRIERS:
        assert sum(carried) == pytest.approx(1, abs=1e-9) and len(carried) == gradient["tokens"]


def test_the_carriers_are_named_with_their_place_and_what_happens_to_them() -> None:
    a = [-1.0, -2.0, -0.5, -3.0]
    b = [-1.0, -2.0 + math.log(1.5), -0.5 + math.log(1.5), -3.0 + math.log(1.1)]
    batch = batch_of(a, b, [2, 2], advantages=[1.0, 2.0, -3.0, -1.0])
    batch.ids[0] = np.array([7, 8, 9, 100, 101, 5])
    section = ppo_section(batch, CONFIG, lambda ids: "".join(f"<{token}>" for token in ids))
    first, second, third = section["carriers"]
    # ratio 1.5 with A = 2 is clipped and loses its slope of -2; with A = -3 it grows from 3 to 4.5; 1.1 adds 0.1
    assert (first.pop("context"), first.pop("after")) == ("<7><8><9><100>", "<5>")
    assert first == {
        "sequence": "s0", "position": 4, "token": 101, "text": "<101>", "diff": pytest.approx(math.log(1.5)),
        "logprob_a": -2.0, "logprob_b": b[1], "prob_diff": pytest.approx(math.exp(-2) / 2),
        "ratio": pytest.approx(1.5), "advantage": 2.0, "slope": 0.0, "slope_recomputed": -2.0, "clipped": True,
        "share": pytest.approx(2 / 3.6),
    }  # fmt: skip
    assert (second["token"], second["clipped"], second["slope"]) == (102, False, pytest.approx(4.5))
    assert (second["sequence"], second["position"]) == ("s1", 3) and third["share"] == pytest.approx(0.1 / 3.6)
    gradient = section["gradient"]
    assert gradient["weight_recomputed"] == pytest.approx(7 / 4) and gradient["lost"] == pytest.approx(2 / 4)
    assert gradient["gained"] == pytest.approx(1.6 / 4) and gradient["weight_total"] == pytest.approx(6.6 / 4)
    assert gradient["share"] == pytest.approx(3.6 / 10.6) and gradient["tokens"] == 3 and gradient["half"] == 1
    assert gradient["carriers_share"] == pytest.approx(1)
    clipped = section["clipped"]
    assert clipped["share_gradient"] == pytest.approx(2 / 7)  # the advantage weight that no gradient comes of
    assert (clipped["tokens"], clipped["share_above"], clipped["share_below"]) == (2, 0.5, 0.0)
    assert (clipped["sequences"], clipped["share_sequences"]) == (2, 1.0)
    assert section["scalars"]["policy_loss_recomputed"] == pytest.approx(-np.mean([1, 2, -3, -1]))


def test_at_no_update_yet_and_equal_sides_nothing_comes_from_the_mismatch() -> None:
    logp = np.linspace(-5, 0, 50)
    section = ppo_section(batch_of(logp, logp, advantages=np.linspace(-1, 1, 50)), CONFIG, None)
    assert section["gradient"]["share"] == 0 and section["gradient"]["half"] is None and section["carriers"] == []
    assert section["clipped"]["tokens"] == 0 and section["scalars"]["approx_kl"] == 0
    assert section["scalars"]["policy_loss_mismatch"] == 0 and "They are the same numbers" in section["detail"]


def test_a_real_update_is_told_from_the_mismatch() -> None:
    rng = np.random.default_rng(0)
    b = -rng.random(2000) * 3
    new, advantages = b + 0.05 * rng.standard_normal(2000), rng.standard_normal(2000)
    clean = ppo_section(batch_of(b, b, advantages=advantages, new_log_probs=new), CONFIG, None)
    off = ppo_section(
        batch_of(b + 0.3 * rng.standard_normal(2000), b, advantages=advantages, new_log_probs=new), CONFIG, None
    )
    assert clean["scalars"]["approx_kl"] == pytest.approx(0.05**2 / 2, rel=0.1)
    assert clean["gradient"]["share"] == 0  # what moved is learning
    assert off["scalars"]["approx_kl_recomputed"] == clean["scalars"]["approx_kl"]
    assert off["gradient"]["share"] > 0.1 and off["scalars"]["clipfrac"] > 0.3 > off["scalars"]["clipfrac_recomputed"]
    assert off["gradient"]["weight_recomputed"] == pytest.approx(clean["gradient"]["weight_recomputed"])


# -- what is missing --------------------------------------------------------------------------------------------------


def test_without_advantages_the_ratio_alone_says_what_is_clipped() -> None:
    ratio = np.array([1.0, 1.19, 1.21, 0.81, 0.79, 5.0])
    section = ppo_section(batch_of(np.full(6, -7.0), -7.0 + np.log(ratio), [3, 3]), CONFIG, None)
    clipped = section["clipped"]
    assert (clipped["tokens"], clipped["share_tokens"]) == (3, 0.5) and clipped["share_gradient"] is None
    assert (clipped["share_above"], clipped["share_below"]) == (pytest.approx(2 / 6), pytest.approx(1 / 6))
    scalars = section["scalars"]
    assert scalars["clipfrac"] == 0.5 and scalars["clipfrac_verl"] is scalars["policy_loss"] is scalars["loss"] is None
    assert section["gradient"] is None and section["given"] == []
    assert section["carriers"][0]["ratio"] == pytest.approx(5) and section["carriers"][0]["advantage"] is None
    assert "no update has happened yet" in section["detail"] and "Without advantages" in section["detail"]


@pytest.mark.parametrize("case", ["none", "empty", "monitor"])
def test_where_log_probs_are_not_known_every_figure_is_null(case: str) -> None:
    batch = None if case == "none" else batch_of([], []) if case == "empty" else batch_of([-1.0], [-2.0])
    if batch is not None and case == "monitor":
        batch.a = batch.b = None
    section = ppo_section(batch, CONFIG, None)
    assert section["scalars"] == dict.fromkeys(SCALARS) and section["carriers"] == [] == section["given"]
    assert section["gradient"] is section["clipped"] is None and section["config"] == asdict(CONFIG)
    assert "nothing of the update is known" in section["detail"]


def test_tokens_without_a_number_are_in_no_figure_and_are_counted() -> None:
    a, b = np.full(4, -1.0), np.full(4, -1.0) + np.log([1.0, 1.5, 1.5, 1.5])
    section = ppo_section(batch_of(a, b, advantages=[1.0, -1.0, math.nan, math.inf]), CONFIG, None)
    assert section["scalars"]["clipfrac"] == 0.5 and section["clipped"]["share_tokens"] == 0.75
    assert "2 of 4 tokens lack a number" in section["detail"]
    nothing = ppo_section(
        batch_of(a, b, advantages=[1.0, 1, math.nan, math.nan], new_log_probs=[math.nan] * 2 + [0, 0]), CONFIG, None
    )
    assert nothing["scalars"] == dict.fromkeys(SCALARS)
    assert "No token has all of advantages, new_log_probs" in nothing["detail"]


@pytest.mark.parametrize("given", ["values", "old_values"])
def test_one_kind_of_values_stands_for_the_other(given: str) -> None:
    columns = {given: [1.0, 2.0], "returns": [0.0, 0.0], "advantages": [1.0, 1.0]}
    section = ppo_section(batch_of([-1.0, -1.0], [-1.0, -1.0], **columns), CONFIG, None)
    assert section["scalars"]["value_loss"] == pytest.approx((1 + 4) / 4)
    assert section["scalars"]["loss"] == pytest.approx(-1 + 0.5 * 1.25)
    assert section["given"] == ["advantages", *(n for n in COLUMNS if n in (given, "returns"))]
    assert "new and old values are the same" in section["detail"]


def test_values_without_returns_give_no_value_loss() -> None:
    section = ppo_section(batch_of([-1.0], [-1.0], values=[1.0], advantages=[1.0]), CONFIG, None)
    assert section["scalars"]["value_loss"] is None and "needs values and returns" in section["detail"]


def test_the_step_0_check_of_actor_against_reference() -> None:
    section = ppo_section(batch_of([-1.0, -1.0], [-1.0, -2.0], ref_log_probs=[-1.0, -2.25]), CONFIG, None)
    assert section["scalars"]["ref_max_abs_diff"] == pytest.approx(0.25)
    assert section["scalars"]["kl_ref_penalty"] == pytest.approx((math.exp(-0.25) + 0.25 - 1) / 2)


def test_the_step_0_check_leaves_out_tokens_that_lack_a_number() -> None:
    reference = [-1.5, math.inf, math.nan]
    section = ppo_section(batch_of([-1.0] * 3, [-1.0] * 3, ref_log_probs=reference), CONFIG, None)
    assert section["scalars"]["ref_max_abs_diff"] == pytest.approx(0.5)


def test_an_early_stop_that_only_the_mismatch_causes_is_said() -> None:
    a, b = np.full(3, -2.0), np.full(3, -1.0)
    section = ppo_section(batch_of(a, b, advantages=np.ones(3)), CONFIG, None)
    assert section["scalars"]["early_stop"] is True and section["scalars"]["early_stop_recomputed"] is False
    assert section["scalars"]["loss"] == 0
    assert "approx_kl 0.5 is above early_stop_kl 0.25: the loss is multiplied by 0; " in section["detail"]


def test_a_ratio_that_overflows_is_said_and_leaves_null_where_nothing_finite_is_true() -> None:
    section = ppo_section(batch_of([-1000.0, -1.0], [-1.0, -1.0], advantages=[-1.0, 1.0]), CONFIG, None)
    assert section["scalars"]["overflows"] == 1 and "1 ratios overflow" in section["detail"]
    clean = clean_floats(section)
    assert clean["scalars"]["policy_loss"] is None and clean["gradient"]["weight_total"] is None
    assert clean["gradient"]["share"] is None and clean["gradient"]["weight_recomputed"] == 1
    assert clean["carriers"][0]["position"] == 3 and clean["carriers"][0]["share"] is None


# -- RL columns of dumps ----------------------------------------------------------------------------------------------


def add_rl(folder: Path, stage: str, sequences: list[tuple[str, np.ndarray, int]], columns: dict[str, Any]) -> None:
    """Write a second file into a dump, holding the response tokens' columns (sequence number, position -> value)."""
    writer = DumpWriter(folder / stage / "step0" / "rank1.h5", {"schema": 1, "stage": stage, "engine": {"name": "x"}})
    cells = [(n, p) for n, (_, ids, prompt) in enumerate(sequences) for p in range(prompt, len(ids))]
    for uid, ids, prompt in sequences:
        writer.add_sequence(Sequence(0, uid, prompt_len=prompt, length=len(ids), tokens=ids))
    rows = np.array([(n, p, sequences[n][1][p], 0) for n, p in cells], ROW)
    for name, function in columns.items():
        values = np.array([function(n, p) for n, p in cells], np.float32)
        writer.append(RL, name, values, "float32", RowSegment(rows))
    writer.close()


def test_rl_tensors_of_a_dump_reach_the_report_and_no_other_part_of_it(tmp_path: Path) -> None:
    known = prompts()
    rollout, trained = Scenario(), actor(noise=5)
    paths = [write_dump(tmp_path / name, side) for name, side in (("a", rollout), ("b", trained))]
    before = compare_dumps(*paths)
    add_rl(paths[1], trained.stage, known, {"advantages": lambda n, p: n + p / 100, "ref_log_probs": lambda n, p: -1})
    after = compare_dumps(*paths)
    validate(after)
    assert before["ppo"]["given"] == [] and after["ppo"]["given"] == ["advantages", "ref_log_probs"]
    reason = "numbers of the PPO update: read for the report's ppo section"
    assert [(e["name"], e["slot"], e["reason"]) for e in after["coverage"]["auxiliary_b"] if e["name"] == RL] == [
        (RL, "advantages", reason),
        (RL, "ref_log_probs", reason),
    ]
    for key in ("verdict", "headline", "not_compared", "layers", "tokens"):
        assert after[key] == before[key], key
    mean = np.mean([n + p / 100 for n, (_, ids, prompt) in enumerate(known) for p in range(prompt, len(ids))])
    assert after["ppo"]["scalars"]["policy_loss_recomputed"] - after["ppo"]["config"]["kl_coef"] * after["ppo"][
        "scalars"
    ]["kl_ref_penalty"] == pytest.approx(-mean, rel=1e-6)
    assert after["ppo"]["scalars"]["ref_max_abs_diff"] > 0


def test_dumps_of_log_probs_and_rl_alone_still_compare(tmp_path: Path) -> None:
    only = ("embed", "layers", "norm", "lm_head", "logits", "decoder", "output_layer", "model")
    tokens = {"task": "tokens"}
    sides = Scenario(drop=only, manifest=tokens), actor(drop=only, manifest=tokens)
    paths = [write_dump(tmp_path / name, side) for name, side in zip("ab", sides)]
    for path, side in zip(paths, sides):
        add_rl(path, side.stage, prompts(), {"advantages": lambda n, p: 1.0})
    report = compare_dumps(*paths)
    assert report["coverage"]["shares"]["tensors"] == 1 and report["tokens"]["compared"] > 0


def test_the_actor_s_number_counts_where_both_dumps_have_one(tmp_path: Path) -> None:
    rollout, trained = Scenario(), actor()
    paths = [write_dump(tmp_path / name, side) for name, side in (("a", rollout), ("b", trained))]
    add_rl(paths[0], rollout.stage, prompts(), {"advantages": lambda n, p: 1.0, "returns": lambda n, p: 2.0})
    add_rl(paths[1], trained.stage, prompts(), {"advantages": lambda n, p: 3.0})
    ppo = compare_dumps(*paths)["ppo"]
    assert ppo["given"] == ["advantages", "returns"]
    assert ppo["scalars"]["policy_loss_recomputed"] == pytest.approx(-3)


def test_of_a_token_stored_twice_the_last_call_counts(tmp_path: Path) -> None:
    writer = open_rank(tmp_path)
    for call, value in ((1, 5.0), (0, 4.0)):
        rows = RowSegment(np.array([(0, 3, 3, call), (-1, -1, -1, call)], ROW))
        writer.append(RL, "returns", np.full((2, 1), value, np.float32), "float32", rows)
    writer.close()
    with open_dump(tmp_path / "rollout") as dump:
        sequence, position, values = read_rl(dump)["returns"]
    assert (sequence.tolist(), position.tolist(), values.tolist()) == ([0], [3], [5.0])


def test_of_two_pieces_of_a_trajectory_the_last_one_counts_and_the_first_fills_its_gaps(tmp_path: Path) -> None:
    ids = np.arange(7)
    # the longer piece is the dump's first sequence; only the shorter one knows position 3
    pieces = [Sequence(0, f"x{n}", prompt_len=2, length=n, tokens=ids[:n]) for n in (7, 5)]
    writer = open_rank(tmp_path, pieces)
    cells = [(0, 4, 1.0), (1, 4, 2.0), (1, 3, 3.0), (0, 6, 9.0)]
    rows = RowSegment(np.array([(piece, place, place, 0) for piece, place, _ in cells], ROW))
    writer.append(RL, "advantages", np.array([value for *_, value in cells]), "float64", rows)
    writer.close()
    join = SequenceJoin([SequencePair(0, 0, 6, "x", pieces_a=(1, 0), pieces_b=(1, 0), prompt_len=2)])
    with open_dump(tmp_path / "rollout") as dump:
        aligner = RowAligner(join, dump.sequences, dump.sequences)
        columns = rl_columns((dump, dump), aligner, pack(np.zeros(3, np.int64), np.array([3, 4, 5])))
    np.testing.assert_array_equal(columns["advantages"], [3.0, 1.0, math.nan])


@pytest.mark.parametrize("kind", ["wide", "integers", "no rows"])
def test_a_column_that_is_not_one_float_per_token_is_refused(tmp_path: Path, kind: str) -> None:
    writer = open_rank(tmp_path)
    rows = RowSegment(np.array([(0, p, p, 0) for p in range(4)], ROW))
    array = {"wide": np.zeros((4, 2), np.float32), "integers": np.zeros(4, np.int32)}.get(kind, np.zeros(4, np.float32))
    writer.append(RL, "values", array, str(array.dtype), rows, has_rows=kind != "no rows")
    writer.close()
    with open_dump(tmp_path / "rollout") as dump, pytest.raises(DumpError, match=r"rl:values is .* not one float"):
        read_rl(dump)


# -- size -------------------------------------------------------------------------------------------------------------


def test_a_million_tokens_stay_small() -> None:
    rng = np.random.default_rng(1)
    a = -rng.exponential(1.0, 1_000_000)
    columns = {name: rng.standard_normal(len(a)) for name in COLUMNS if "log_probs" not in name}
    columns |= {"new_log_probs": a + 0.01, "ref_log_probs": a - 0.02}
    batch = batch_of(a, a + 0.05 * rng.standard_normal(len(a)), [1000] * 1000, **columns)
    tracemalloc.start()
    section = ppo_section(batch, CONFIG, None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 400e6  # a part of the gigabyte that a command may take
    assert len(section["carriers"]) == CARRIERS and section["given"] == list(COLUMNS)
