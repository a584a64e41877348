"""Monte Carlo arithmetic: what ``probe dump --noise`` does to a model, and a reference that really is in float64."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from capture_tools import by_row
from checkpoints import make_checkpoint

from probe.errors import EngineError, UsageError
from probe.hooks.noise import add_noise, reround
from probe.hooks.runners.job import DumpJob, Sampling, check_job
from probe.hooks.runners.run import run_dump
from probe.hooks.runners.transformers import KeepFloat64
from probe.metrics import MANTISSA_BITS
from probe.store.reader import open_dump

HALF = (torch.bfloat16, torch.float16, torch.float32)


# -- one tensor -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALF)
def test_rerounding_moves_values_by_up_to_one_ulp_without_a_bias(dtype):
    values = (torch.randn(400, 400, generator=torch.Generator().manual_seed(0)) + 3).to(dtype)
    moved = reround(values, torch.Generator().manual_seed(1))
    assert moved.dtype == dtype
    ulp = 2.0 ** torch.floor(torch.log2(values.double().abs())) * 2.0 ** -MANTISSA_BITS[str(dtype).split(".")[1]]
    steps = (moved.double() - values.double()) / ulp
    assert steps.abs().max() <= 1
    assert 0.2 < (steps != 0).double().mean() < 0.8
    assert abs(steps.mean()) < 0.01  # the draw is symmetric: 160,000 steps of less than one, five deviations


def test_what_is_no_float_or_not_a_tensor_stays():
    generator = torch.Generator()
    ids = torch.arange(4)
    assert reround(ids, generator) is ids and reround(None, generator) is None
    zeros = torch.zeros(3)
    assert torch.equal(reround(zeros, generator), zeros)


# -- a model ----------------------------------------------------------------------------------------------------------


class RMSNorm(torch.nn.Module):
    """A norm that hands on the residual stream, as vLLM's does."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x / x.norm(), x


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.proj, self.drop = RMSNorm(), torch.nn.Linear(16, 16), torch.nn.Dropout()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, residual = self.norm(x)
        return self.drop(self.proj(y)), residual


def run(seed: int | None, times: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model, x = Small().eval(), torch.randn(8, 16)
    undo = add_noise(model, seed, "float32") if seed is not None else lambda: None
    outputs = [model(x) for _ in range(times)]
    undo()
    again = model(x)
    assert torch.equal(again[0], run(None)[0]) if seed is not None else True
    return outputs[-1]


def test_leaf_modules_are_re_rounded_and_residuals_handed_on_as_they_are():
    plain, noisy = run(None), run(1)
    assert not torch.equal(plain[0], noisy[0]) and torch.equal(plain[1], noisy[1])
    assert ((plain[0] - noisy[0]).norm() / plain[0].norm()) < 1e-6


def test_the_seed_and_the_number_of_the_run_decide():
    assert torch.equal(run(1)[0], run(1)[0])
    assert not torch.equal(run(1)[0], run(2)[0])
    assert not torch.equal(run(1)[0], run(1, times=2)[0])


def test_two_modules_draw_different_noise_and_ranks_with_the_same_module_the_same():
    ones = torch.nn.Sequential(torch.nn.Identity(), torch.nn.ReLU(), torch.nn.ReLU())
    seen = []
    add_noise(ones, 3, "float32")
    for module in ones:
        module.register_forward_hook(lambda m, a, o: seen.append(o.clone()))
    ones(torch.ones(1000))
    identity, first, second = (value - 1 for value in seen)
    assert not identity.any() and first.any() and not torch.equal(first, second - first)


def test_noise_below_float64_is_refused():
    with pytest.raises(EngineError, match="below the rounding of float64"):
        add_noise(Small(), 0, "float64")


# -- whole dumps ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    """Dump a rollout, and its tokens again as each test asks."""
    folder = tmp_path_factory.mktemp("noise")
    (folder / "p.jsonl").write_text(json.dumps({"token_ids": list(range(5, 30))}) + "\n")
    first = DumpJob("rollout", "transformers", make_checkpoint(folder / "m"), folder / "r", device="cpu")
    run_dump(replace(first, prompts=folder / "p.jsonl", sampling=Sampling(max_tokens=3)))

    def dump(name: str, **changes):
        output = folder / name
        if not output.exists():
            run_dump(replace(first, stage="actor", source=folder / "r", output=output, **changes))
        with open_dump(output) as opened:
            rows = {key: by_row(opened, *key) for key in (("model.layers.0", "output.0"), ("lm_head", "output.0"))}
            return opened.manifest, {k: np.stack([found[at] for at in sorted(found)]) for k, found in rows.items()}

    return dump


def relative(one, other):
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


def test_a_noise_dump_differs_by_rounding_alone_and_follows_its_seed(dumps):
    (manifest, noisy), (_, other) = dumps("n1", noise=1), dumps("n2", noise=2)
    plain_manifest, plain = dumps("plain")
    assert manifest["noise"] == {"seed": 1} and "noise" not in plain_manifest
    for key, values in plain.items():
        assert 1e-8 < relative(noisy[key], values) < 3e-6
        assert not np.array_equal(noisy[key], other[key])
    again = dumps("n1-again", noise=1)[1]
    assert all(np.array_equal(again[key], noisy[key]) for key in again)


def test_noise_needs_a_run_to_measure():
    with pytest.raises(UsageError, match="--noise measures a run"):
        check_job(DumpJob("rollout", "transformers", "m", "o", prompts="p", noise=0))


def test_a_float64_reference_keeps_float64_where_transformers_asks_for_float32(dumps):
    """Norms, softmax and rope of transformers compute in float32: two float64 runs would part by 1e-8 and more."""
    one = dumps("f64", dtype="float64")[1]
    other = dumps("f64-eager", dtype="float64", engine_args={"attn_implementation": "eager"})[1]
    assert all(relative(one[key], other[key]) < 1e-14 for key in one)
    assert 1e-8 < relative(dumps("plain")[1]["lm_head", "output.0"], one["lm_head", "output.0"]) < 3e-6


def test_only_float64_is_kept():
    wide, narrow = torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.bfloat16)
    with KeepFloat64():
        assert wide.float().dtype == wide.to(torch.float32).dtype == torch.float64
        assert torch.softmax(wide, 0, dtype=torch.float32).dtype == torch.float64
        assert narrow.float().dtype == narrow.to(torch.float32).dtype == torch.float32
        assert wide.to(torch.int32).dtype == torch.int32
    assert wide.float().dtype == torch.float32
