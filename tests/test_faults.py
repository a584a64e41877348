"""The fault suite of tests/faults: each fault once here, at a place and in a dtype that go round; ``make faults`` runs
all of it and writes docs/faults.md."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from faults import engines
from faults.harness import Bench, Outcome, controls, names
from faults.models import PLACES
from faults.result import MIN_CAUSE, MIN_MODULE, missed, totals
from faults.run import run_parts
from faults.table import FAULTS

from probe.compare.diagnose.causes import CAUSES

PAGE = Path(__file__).parents[1] / "docs" / "faults.md"
TURN = int(os.environ.get("PROBE_FAULTS_TURN", "0"))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    torch.set_num_threads(1)
    return Bench(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    """What one case of every fault came to; two processes share them, which each make their own models."""
    return run_parts("", TURN, 2)


def problems(outcomes: list[Outcome]) -> str:
    return "\n".join(f"{outcome.case}: {missed(outcome)}" for outcome in outcomes if missed(outcome))


@pytest.mark.slow
def test_every_visible_fault_is_seen(outcomes: list[Outcome]) -> None:
    found = totals(outcomes)
    assert found.visible >= 60
    assert found.seen == found.visible, problems(outcomes)


@pytest.mark.slow
def test_the_right_module_comes_first(outcomes: list[Outcome]) -> None:
    found = totals(outcomes)
    assert found.module_first >= MIN_MODULE * found.visible, problems(outcomes)


@pytest.mark.slow
def test_the_right_cause_is_among_the_first_three(outcomes: list[Outcome]) -> None:
    found = totals(outcomes)
    assert found.cause_listed >= MIN_CAUSE * found.visible, problems(outcomes)


@pytest.mark.slow
def test_a_side_that_is_named_is_the_faulty_one(outcomes: list[Outcome]) -> None:
    found = totals(outcomes)
    assert found.sided >= 0.5 * found.visible
    assert found.side_right == found.sided, problems(outcomes)


@pytest.mark.slow
def test_what_numbers_cannot_show_a_gate_finds(outcomes: list[Outcome]) -> None:
    found = totals(outcomes)
    assert found.caught == found.gated, problems(outcomes)


@pytest.mark.slow
def test_a_fault_that_is_said_to_be_invisible_is(outcomes: list[Outcome]) -> None:
    """Where no gate can find it either, it must move the layer by no more than healthy pairs differ (1.5 floors)."""
    silent = [outcome for outcome in outcomes if outcome.effect is not None and not outcome.case.fault.gate]
    for outcome in silent:
        assert (outcome.effect or 0.0) < 1.5, f"{outcome.case}: {outcome.effect}"


@pytest.mark.slow
def test_what_is_no_fault_is_not_called_one(outcomes: list[Outcome]) -> None:
    found = totals(outcomes)
    assert found.benign and found.cleared == found.benign, problems(outcomes)


@pytest.mark.slow
def test_healthy_pairs_have_no_suspect(bench: Bench) -> None:
    assert [found for found in controls(bench) if found[1] not in ("identical", "consistent") or found[2]] == []


def test_the_table_is_whole() -> None:
    """Names are unique, causes are documented slugs, and each fault can be in every place."""
    assert len(FAULTS) >= 60
    assert not [name for name, count in Counter(fault.name for fault in FAULTS).items() if count > 1]
    for fault in FAULTS:
        assert set(fault.causes) <= set(CAUSES), fault.name
        assert fault.placed == any("{i}" in module for module in fault.modules), fault.name


def test_the_committed_page_is_of_the_whole_suite() -> None:
    """docs/faults.md must hold every fault and dtype, and totals that pass."""
    text = PAGE.read_text()
    for fault in FAULTS:
        rows = [line for line in text.splitlines() if line.startswith(f"| {fault.name} |")]
        assert len(rows) == len(fault.dtypes), fault.name
        verdicts = rows[0].split("|")[3]
        assert fault.placed <= ("/" in rows[0].split("|")[4]), (fault.name, verdicts)
    share = {name: (int(part), int(whole)) for name, part, whole in re.findall(r"([\w` ,]+): (\d+) of (\d+) \(", text)}
    ratios = {name.strip(): part / max(whole, 1) for name, (part, whole) in share.items()}
    assert ratios["visible and not `consistent`"] == 1
    assert ratios["right module first"] >= MIN_MODULE
    assert ratios["right cause among the first 3"] >= MIN_CAUSE
    assert len(PLACES) == 3


# -- real engines -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> engines.Engines:
    return engines.Engines(tmp_path_factory.mktemp("engines"))


@pytest.mark.slow
@pytest.mark.parametrize("fault", engines.FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_faults_of_real_engines_are_named(real: engines.Engines, fault: engines.EngineFault) -> None:
    report = real.report(fault)
    assert report["verdict"] == "divergent"
    gates = {gate["name"]: gate["status"] for gate in report["gates"]}
    assert gates[fault.gate] == "fail"
    first = report["suspects"][0]
    assert any(names(module, first["name"]) for module in fault.modules), first
    assert {suspect["cause"] for suspect in report["suspects"][:3]} & set(fault.causes), report["suspects"][:3]
    assert first["side"] in (fault.side, "both", "unknown")


@pytest.mark.slow
def test_healthy_real_engines_have_no_suspect(real: engines.Engines) -> None:
    from probe.compare.run import compare_dumps

    report = compare_dumps(real.rollout(), real.actor(), text=False)
    assert report["verdict"] == "consistent" and not report["suspects"]
