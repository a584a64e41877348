"""No false alarm: forwards that differ by rounding alone are consistent, in any kernel, batch, dtype and depth."""

from __future__ import annotations

import pytest
from healthy import MODELS, PAIRS, Figures, Healthy, figures

from probe.compare.judge import BANDS, MEASURED, MODELLED
from probe.compare.run import compare_dumps

FAST = (("sdpa bf16", "eager fp32"), ("sdpa fp16", "eager bf16"), ("sdpa fp32", "eager fp32"))


@pytest.fixture(scope="session")
def healthy(tmp_path_factory):
    return Healthy(tmp_path_factory.mktemp("healthy"))


def check(found: Figures) -> None:
    """Require that nothing alarmed, and that it was not near: two thirds of the absolute bands at most."""
    assert found.fine, found
    assert found.evidence <= BANDS[MEASURED if "noise" in found.pair else MODELLED].suspect / 1.5, found


@pytest.mark.parametrize(("a", "b"), FAST)
def test_a_small_model(healthy, a, b):
    """bf16 against fp32 of one model is the pair of which the peer calls most rows errors."""
    check(healthy.compare("tiny", a, b, {}))


def test_a_small_model_with_its_floor_measured_and_a_golden_dump(healthy):
    found = healthy.compare("tiny", "sdpa bf16", "eager bf16", {"floor": "noise bf16", "golden": "golden"})
    check(found)
    assert found.golden < 2


def test_the_log_probs_of_bf16_against_fp32_do_not_alarm_either(healthy):
    report = compare_dumps(healthy.dump("tiny", "sdpa bf16"), healthy.dump("tiny", "eager fp32"))
    assert report["verdict"] == "consistent" and not report["suspects"], report["suspects"]
    assert report["tokens"]["compared"] > 0


def test_the_figures_tell_an_alarm_from_none(healthy):
    """The suite's own instrument must fire: a floor that is too small by a factor of a hundred is no healthy pair."""
    report = compare_dumps(healthy.dump("tiny", "sdpa bf16"), healthy.dump("tiny", "eager fp32"))
    worst = max((layer for layer in report["layers"] if layer["evidence"]), key=lambda layer: layer["evidence"])
    worst |= {"verdict": "divergent", "evidence": 100 * worst["evidence"]}
    found = figures(report, "tiny", "")
    assert not found.fine and found.divergent == 1
    with pytest.raises(AssertionError):
        check(found)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "pair"), [(name, i % len(PAIRS)) for i, name in enumerate(MODELS)])
def test_every_model_and_every_pair(healthy, model, pair):
    """Each model once and each pair at least once; ``make healthy`` runs all combinations."""
    a, b, third = PAIRS[pair]
    check(healthy.compare(model, a, b, third))
