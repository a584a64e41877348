"""The PPO update: equal to torch's autograd on the same formulas, to verl where definitions agree, and split in two."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from ppo_reference import reference_update
from verl.trainer.ppo import core_algos

from probe.compare.ppo import SCALARS, PPOConfig, masked_mean, policy_term, ppo_update, reference_term, value_term
from probe.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore:.*compute_policy_loss_vanilla:FutureWarning")

CLOSE = {"rtol": 1e-6, "atol": 1e-9}
"""The issue asks for 1e-6; both sides are float64, so that what differs is the order of a sum."""
PADDING = (math.nan, math.inf, -math.inf, 0.0, -1.0, 151643.0)
NEVER = 1e9
"""A ``clip_ratio_c`` that verl's dual clip never reaches, so that its policy loss is the plain one."""

numbers = st.floats(-20, 20)
numbers_or_zero = st.one_of(numbers, st.sampled_from([0.0, -0.0, 1.0, -1.0]))
configs = st.builds(
    PPOConfig,
    clip_epsilon=st.sampled_from([0.0, 0.1, 0.2, 0.5, 1.0, 1.5]),
    kl_coef=st.sampled_from([0.0, 0.02, 1.0]),
    cliprange_value=st.sampled_from([0.0, 0.2, 3.0]),
    vf_coef=st.sampled_from([0.0, 0.5, 2.0]),
    early_stop_kl=st.sampled_from([0.0, 0.25, 100.0, math.inf]),
    accumulation_steps=st.integers(1, 8),
)


@st.composite
def updates(draw: st.DrawFn, largest: float = 30.0) -> dict[str, np.ndarray]:
    """Return the arrays of one update, [rows, tokens]; outside the mask stands anything that engines pad with."""
    shape = draw(hnp.array_shapes(min_dims=2, max_dims=2, max_side=5))
    kept = st.floats(-largest, largest)
    logs = {name: draw(hnp.arrays(np.float64, shape, elements=kept)) for name in ("new", "old", "reference")}
    critic = ("advantages", "values", "old_values", "returns")
    arrays = logs | {name: draw(hnp.arrays(np.float64, shape, elements=numbers_or_zero)) for name in critic}
    same = draw(hnp.arrays(bool, shape))
    arrays["old"] = np.where(same, arrays["new"], arrays["old"])
    mask = draw(hnp.arrays(bool, shape))
    for values in arrays.values():
        values[~mask] = draw(st.sampled_from(PADDING))
    return arrays | {"mask": mask}


def near_edge(new: np.ndarray, old: np.ndarray, config: PPOConfig) -> np.ndarray:
    """Tell where numpy's exp and torch's may fall on two sides of an end of the range (exp is good to an ulp)."""
    with np.errstate(over="ignore", invalid="ignore"):
        ratio = np.exp(new - old)
    ends = (1 - config.clip_epsilon, 1 + config.clip_epsilon)
    return np.logical_or.reduce([(ratio != end) & (np.abs(ratio - end) < 1e-14) for end in ends])


# -- against torch ----------------------------------------------------------------------------------------------------


@given(arrays=updates(), config=configs, aux=st.sampled_from([0.0, 0.7]))
@settings(max_examples=150, deadline=None)
def test_forward_and_gradient_equal_torch(arrays: dict[str, np.ndarray], config: PPOConfig, aux: float) -> None:
    assume(not (near_edge(arrays["new"], arrays["old"], config) & arrays["mask"]).any())
    expected = reference_update(arrays, config, aux)
    assume(math.isinf(config.early_stop_kl) or abs(expected["approx_kl"] - config.early_stop_kl) > 1e-12)
    new, old, others = arrays["new"], arrays["old"], {k: v for k, v in arrays.items() if k not in ("new", "old")}
    found = ppo_update(new, old, config, **others, aux_loss=aux)
    for name in ("approx_kl", "clipfrac", "kl_ref_penalty", "policy_loss", "value_loss", "loss", "early_stop"):
        np.testing.assert_allclose(found.scalars[name], expected[name], err_msg=name, **CLOSE)
    assert found.gradient is not None and found.value_gradient is not None
    np.testing.assert_allclose(found.gradient, expected["gradient"], **CLOSE)
    np.testing.assert_allclose(found.value_gradient, expected["value_gradient"], **CLOSE)
    assert not found.gradient[~arrays["mask"]].any() and not found.value_gradient[~arrays["mask"]].any()
    inside = arrays["mask"]
    np.testing.assert_allclose(found.log_ratio[inside], new[inside] - old[inside])
    np.testing.assert_allclose(found.ratio[inside], np.exp(new[inside] - old[inside]))
    assert set(found.scalars) == set(SCALARS)


@given(
    log_ratio=st.floats(-0.6, 0.6).filter(lambda x: abs(x) > 1e-3),
    advantage=numbers_or_zero,
    base=st.sampled_from([0.0, -0.5, -3.0]),
)
@settings(max_examples=100, deadline=None)
def test_a_ratio_exactly_at_the_clip_edge_keeps_its_gradient(log_ratio: float, advantage: float, base: float) -> None:
    new, old = np.array([log_ratio + base]), np.array([base])
    ratio = float(np.exp(new - old)[0])
    epsilon = abs(ratio - 1)  # exact: neighbours within a factor of 2 subtract without rounding
    assume(ratio in (1 + epsilon, 1 - epsilon) and torch.exp(torch.from_numpy(new - old)).item() == ratio)
    arrays = {name: np.zeros(1) for name in ("reference", "values", "old_values", "returns")}
    arrays |= {"new": new, "old": old, "advantages": np.array([advantage]), "mask": np.ones(1, bool)}
    config = PPOConfig(clip_epsilon=epsilon, kl_coef=0.0, early_stop_kl=math.inf)
    expected = reference_update(arrays, config, 0.0)
    found = ppo_update(new, old, config, mask=arrays["mask"], advantages=arrays["advantages"])
    np.testing.assert_allclose(found.gradient, expected["gradient"], **CLOSE)
    np.testing.assert_allclose(found.gradient, [-advantage * ratio], **CLOSE)  # inside, ends included
    assert found.policy is not None and not found.policy.clipped.any()


def test_two_ratios_with_one_product_share_the_gradient_as_in_torch() -> None:
    # just beyond the range, rounding may give both parts of the maximum one value: torch then halves the slope
    ratio = float(np.exp(0.3))
    epsilon = float(np.nextafter(ratio, 1)) - 1
    advantage = next(x for x in map(float, range(1, 100)) if x * ratio == x * (1 + epsilon))
    new = torch.tensor([0.3], dtype=torch.float64, requires_grad=True)
    r = torch.exp(new)
    assert r.item() == ratio > 1 + epsilon
    torch.max(-advantage * r, -advantage * r.clamp(1 - epsilon, 1 + epsilon)).backward()
    term = policy_term(np.array([0.3]), np.array([advantage]), epsilon)
    np.testing.assert_allclose(term.slope, new.grad.numpy(), **CLOSE)  # type: ignore[union-attr]
    np.testing.assert_allclose(term.slope, [-advantage * ratio / 2], **CLOSE)


@given(value=numbers, cliprange=st.sampled_from([0.0, 0.25, 1.0]), side=st.sampled_from([-1, 1]), returns=numbers)
@settings(max_examples=80, deadline=None)
def test_a_value_exactly_at_its_clip_edge_equals_torch(
    value: float, cliprange: float, side: int, returns: float
) -> None:
    old = value - side * cliprange
    assume(old + side * cliprange == value)
    V = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    before, target = torch.tensor([old], dtype=torch.float64), torch.tensor([returns], dtype=torch.float64)
    bounded = torch.clamp(V, before - cliprange, before + cliprange)
    loss = 0.5 * torch.max((V - target) ** 2, (bounded - target) ** 2)
    loss.sum().backward()
    term = value_term(np.array([value]), np.array([old]), np.array([returns]), cliprange)
    np.testing.assert_allclose(term.value, loss.detach().numpy(), **CLOSE)
    np.testing.assert_allclose(term.slope, V.grad.numpy(), **CLOSE)  # type: ignore[union-attr]


def test_two_values_at_one_distance_of_the_return_share_the_gradient_as_in_torch() -> None:
    value = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)
    loss = 0.5 * torch.max((value - 0.5) ** 2, (value.clamp(-0.25, 0.0) - 0.5) ** 2)
    loss.backward()
    term = value_term(np.array([1.0]), np.array([-0.125]), np.array([0.5]), 0.125)
    assert term.value.tolist() == loss.tolist() == [0.125]
    assert term.slope.tolist() == value.grad.tolist() == [0.25]  # type: ignore[union-attr]


@given(arrays=updates(largest=300.0))
@settings(max_examples=60, deadline=None)
def test_huge_log_ratios_are_exact_or_infinite_and_never_nan(arrays: dict[str, np.ndarray]) -> None:
    config = PPOConfig(early_stop_kl=math.inf)
    assume(not (near_edge(arrays["new"], arrays["old"], config) & arrays["mask"]).any())
    found = ppo_update(arrays["new"], arrays["old"], config, mask=arrays["mask"], advantages=arrays["advantages"])
    expected = reference_update(arrays | {"reference": arrays["new"]}, config, 0.0)
    np.testing.assert_allclose(found.scalars["policy_loss"], expected["policy_loss"], **CLOSE)
    np.testing.assert_allclose(found.gradient, expected["gradient"], **CLOSE)


def test_where_a_ratio_overflows_torch_says_nan_and_this_says_what_it_is() -> None:
    # exp(800) is infinite in float64: 0 x inf and a clipped gradient times inf are NaN in torch
    log_ratio, advantages = np.array([800.0, 800.0, 800.0]), np.array([0.0, 1.0, -1.0])
    tensor = torch.tensor(log_ratio, requires_grad=True)
    ratio = torch.exp(tensor)
    loss = torch.max(-torch.tensor(advantages) * ratio, -torch.tensor(advantages) * ratio.clamp(0.8, 1.2))
    loss.sum().backward()
    assert tensor.grad is not None and torch.isnan(loss[0]) and torch.isnan(tensor.grad[1])
    term = policy_term(log_ratio, advantages, 0.2)
    assert term.value.tolist() == [0.0, -1.2, math.inf]
    assert term.slope.tolist() == [0.0, 0.0, math.inf]


# -- definitions by hand ----------------------------------------------------------------------------------------------


def test_each_quantity_on_four_tokens_by_hand() -> None:
    ratio, advantages = np.array([1.0, 1.5, 1.5, 0.5]), np.array([2.0, 1.0, -1.0, -1.0])
    found = ppo_update(np.log(ratio), np.zeros(4), PPOConfig(), advantages=advantages)
    assert found.policy is not None and found.gradient is not None
    np.testing.assert_allclose(found.policy.value, [-2.0, -1.2, 1.5, 0.8])
    np.testing.assert_allclose(found.policy.slope, [-2.0, 0.0, 1.5, 0.0], atol=1e-15)
    np.testing.assert_allclose(found.gradient, np.array([-2.0, 0.0, 1.5, 0.0]) / 4, atol=1e-15)
    scalars = found.scalars
    assert scalars["clipfrac"] == 0.75 and scalars["clipfrac_verl"] == 0.5 and scalars["clipfrac_lower_verl"] == 0
    assert scalars["approx_kl"] == pytest.approx(np.mean(np.log(ratio) ** 2) / 2)
    assert scalars["ppo_kl_verl"] == pytest.approx(-np.mean(np.log(ratio)))
    assert scalars["policy_loss"] == scalars["loss"] == pytest.approx((-2 - 1.2 + 1.5 + 0.8) / 4)
    assert scalars["kl_ref_penalty"] is None and scalars["value_loss"] is None and scalars["early_stop"] is False


def test_an_early_stop_multiplies_the_loss_by_zero_and_keeps_what_was_computed() -> None:
    new, old, advantages = np.array([1.0, 0.0]), np.zeros(2), np.array([1.0, -1.0])
    stopped = ppo_update(new, old, PPOConfig(early_stop_kl=0.2), advantages=advantages, aux_loss=3.0)
    runs = ppo_update(new, old, PPOConfig(early_stop_kl=0.25), advantages=advantages, aux_loss=3.0)
    assert stopped.scalars["approx_kl"] == 0.25  # above 0.2, not above itself
    assert stopped.scalars["early_stop"] is True and runs.scalars["early_stop"] is False
    assert stopped.scalars["loss"] == 0 and not stopped.gradient.any()  # type: ignore[union-attr]
    assert stopped.scalars["policy_loss"] == runs.scalars["policy_loss"] != 0
    assert runs.scalars["loss"] == pytest.approx(runs.scalars["policy_loss"] + 3.0)


def test_an_empty_mask_gives_zeros_as_minimind_does() -> None:
    arrays = {
        name: np.full((2, 3), math.nan) for name in ("advantages", "reference", "values", "old_values", "returns")
    }
    nothing = np.zeros((2, 3), bool)
    found = ppo_update(np.full((2, 3), math.inf), np.full((2, 3), -math.inf), PPOConfig(), mask=nothing, **arrays)
    assert set(found.scalars.values()) == {0.0}  # False is 0 too
    assert not found.gradient.any() and not found.value_gradient.any()  # type: ignore[union-attr]


def test_values_may_have_a_mask_of_their_own() -> None:
    mask, value_mask = np.array([1, 0, 0]), np.array([0, 1.0, 1.0])
    critic = {"values": np.array([math.nan, 1.0, 2.0]), "old_values": np.array([0.0, 1.0, 2.0]), "returns": np.zeros(3)}
    found = ppo_update(np.zeros(3), np.zeros(3), PPOConfig(), mask=mask, value_mask=value_mask, **critic)
    assert found.scalars["value_loss"] == pytest.approx(0.5 * (1 + 4) / 2)
    np.testing.assert_allclose(found.value_gradient, [0, 0.5 * 1 / 2, 0.5 * 2 / 2])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("clip_epsilon", -0.1), ("clip_epsilon", math.nan), ("clip_epsilon", math.inf), ("kl_coef", -1.0),
        ("cliprange_value", -0.2), ("vf_coef", math.inf), ("early_stop_kl", math.nan), ("accumulation_steps", 0),
    ],
)  # fmt: skip
def test_a_number_that_cannot_work_is_refused(option: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"--{option.replace('_', '-')} is {value}: give a number of at least [01]"):
        PPOConfig(**{option: value})  # type: ignore[arg-type]


def test_the_defaults_are_minimind_s() -> None:
    known = {"clip_epsilon": 0.2, "kl_coef": 0.02, "cliprange_value": 0.2, "vf_coef": 0.5, "early_stop_kl": 0.25}
    assert PPOConfig() == PPOConfig(**known, accumulation_steps=1)  # type: ignore[arg-type]
    assert PPOConfig(early_stop_kl=math.inf).early_stop_kl == math.inf


# -- against verl -----------------------------------------------------------------------------------------------------

# verl's masked mean divides by the count + 1e-8, which the tolerance of 1e-6 covers
VERL = {"rel": 1e-6, "abs": 1e-7}


def as_verl(arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Return verl's tensors, padding cleared: its masked sums would carry NaN and infinities along."""
    mask = arrays["mask"]
    return {name: torch.from_numpy(np.where(mask, values, 0.0)) for name, values in arrays.items()}


@given(arrays=updates(largest=9.0), epsilon=st.sampled_from([0.1, 0.2, 0.5]))
@settings(max_examples=60, deadline=None)
def test_policy_and_value_loss_equal_verl_s(arrays: dict[str, np.ndarray], epsilon: float) -> None:
    assume(arrays["mask"].any())  # verl's token mean of nothing is 0 / 0
    config = PPOConfig(clip_epsilon=epsilon, cliprange_value=epsilon)
    assume(not (near_edge(arrays["new"], arrays["old"], config) & arrays["mask"]).any())
    new, old, others = arrays["new"], arrays["old"], {k: v for k, v in arrays.items() if k not in ("new", "old")}
    ours = ppo_update(new, old, config, **others).scalars
    theirs = as_verl(arrays)
    sides = {"old_log_prob": theirs["old"], "log_prob": theirs["new"], "advantages": theirs["advantages"]}
    loss, clipfrac, kl, lower = core_algos.compute_policy_loss(
        **sides, response_mask=theirs["mask"], cliprange=epsilon, clip_ratio_c=NEVER
    )
    assert ours["policy_clip_loss"] == pytest.approx(loss.item(), **VERL)
    assert ours["clipfrac_verl"] == pytest.approx(clipfrac.item(), **VERL)
    assert ours["ppo_kl_verl"] == pytest.approx(kl.item(), **VERL)
    *_, lower = core_algos.compute_policy_loss(**sides, response_mask=theirs["mask"], cliprange=epsilon)
    assert ours["clipfrac_lower_verl"] == pytest.approx(lower.item(), **VERL)
    value_loss, value_clipfrac = core_algos.compute_value_loss(
        vpreds=theirs["values"],
        returns=theirs["returns"],
        values=theirs["old_values"],
        response_mask=theirs["mask"],
        cliprange_value=epsilon,
    )
    assert ours["value_loss"] == pytest.approx(float(value_loss), **VERL)
    assert ours["value_clipfrac_verl"] == pytest.approx(float(value_clipfrac), **VERL)


def test_the_reference_penalty_is_verl_s_k3_within_its_clamps() -> None:
    # verl clamps d to +-20 and the penalty to 10; below both, the two are one formula
    new = np.linspace(-3, 0, 40)
    reference = new + np.linspace(-2.4, 2.4, 40)
    ours = reference_term(new, reference).value
    theirs = core_algos.kl_penalty(torch.from_numpy(new), torch.from_numpy(reference), "k3").numpy()
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-12)
    far = reference_term(np.array([-30.0]), np.array([0.0])).value[0]
    clamped = core_algos.kl_penalty(torch.tensor([[-30.0]]), torch.tensor([[0.0]]), "k3").item()
    assert clamped == 10 and far == pytest.approx(math.exp(30) - 31)


def test_where_definitions_differ_both_are_told_apart() -> None:
    """MiniMind counts every ratio outside the range, verl those that lose their gradient; likewise the two KLs."""
    rng = np.random.default_rng(0)
    old = -rng.random(1000) * 3
    new, advantages = old + 0.3 * rng.standard_normal(1000), rng.standard_normal(1000)
    scalars = ppo_update(new, old, PPOConfig(), advantages=advantages).scalars
    tensors = [torch.from_numpy(x)[None] for x in (old, new, advantages, np.ones(1000))]
    _, clipfrac, kl, _ = core_algos.compute_policy_loss(*tensors, cliprange=0.2, clip_ratio_c=NEVER)
    ratio = np.exp(new - old)
    assert scalars["clipfrac"] == pytest.approx(np.mean(np.abs(ratio - 1) > 0.2))
    assert scalars["clipfrac_verl"] == pytest.approx(clipfrac.item(), **VERL)
    assert 1.5 < scalars["clipfrac"] / scalars["clipfrac_verl"] < 2.5  # random signs: half of them lose it
    assert scalars["ppo_kl_verl"] == pytest.approx(kl.item(), **VERL)
    assert scalars["approx_kl"] == pytest.approx(np.mean((new - old) ** 2) / 2)
    assert abs(scalars["ppo_kl_verl"]) < scalars["approx_kl"]  # one cancels, the other cannot
    outside = (ratio > 1.2) & (advantages > 0) | (ratio < 0.8) & (advantages < 0)
    assert scalars["clipfrac_verl"] == pytest.approx(outside.mean())


def test_verl_s_dual_clip_bounds_what_this_loss_does_not() -> None:
    new, old, advantages = np.array([[math.log(5.0)]]), np.zeros((1, 1)), np.array([[-1.0]])
    found = ppo_update(new, old, PPOConfig(), advantages=advantages)
    tensors = [torch.from_numpy(x) for x in (old, new, advantages, np.ones((1, 1)))]
    loss, *_ = core_algos.compute_policy_loss(*tensors, cliprange=0.2)
    assert loss.item() == pytest.approx(3.0) and found.scalars["policy_loss"] == pytest.approx(5.0)
    assert found.scalars["clipfrac_lower_verl"] == 1


@given(hnp.arrays(np.float64, 7, elements=numbers), hnp.arrays(bool, 7))
@example(np.ones(7), np.zeros(7, bool))
def test_the_masked_mean_is_the_mean_of_what_is_inside(values: np.ndarray, mask: np.ndarray) -> None:
    expected = values[mask].mean() if mask.any() else 0.0
    assert masked_mean(np.where(mask, values, math.nan), mask) == pytest.approx(expected, abs=1e-12)
