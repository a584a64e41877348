"""Run the suite: ``python -m faults [--write docs/faults.md]`` with the folder ``tests`` on the path."""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from faults.harness import Bench, Case, Outcome, cases_of, controls, rotating
from faults.result import missed, page, totals
from faults.table import FAULTS, GROUPS


def line(outcome: Outcome) -> str:
    """Return one line of progress."""
    first = outcome.suspects[0] if outcome.suspects else {}
    said = f"{first.get('name', '-')} ({first.get('side', '-')}) {first.get('cause', '-')}"
    ranks = f"module {outcome.module_rank} cause {outcome.cause_rank}"
    effect = "" if outcome.effect is None else f" effect {outcome.effect:.3g}"
    gates = ",".join(f"{name}:{status}" for name, status in outcome.gates.items() if status in ("warn", "fail"))
    wrong = missed(outcome)
    tail = f"[{gates}] {outcome.seconds:.2f}s{effect} {outcome.error[:150]}{' MISSED ' + wrong if wrong else ''}"
    return f"{outcome.case!s:56} {outcome.verdict:12} {ranks} {said} {tail}"


def chosen_cases(only: str, turn: int | None) -> list[Case]:
    """Return the cases whose text holds ``only``; with a ``turn`` one of each fault."""
    cases = [case for fault in FAULTS for case in cases_of(fault)] if turn is None else rotating(FAULTS, turn)
    return [case for case in cases if only in str(case)]


def run_all(cases: list[Case], bench: Bench, keep: bool) -> Iterator[Outcome]:
    """Run cases one after the other."""
    for case in cases:
        yield bench.outcome(case, keep=keep)


def run_part(only: str, turn: int | None, jobs: int, part: int) -> list[Outcome]:
    """Run every ``jobs``-th case in a process of its own."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        found = []
        for outcome in run_all(chosen_cases(only, turn)[part::jobs], Bench(Path(folder)), False):
            print(line(outcome), flush=True)
            found.append(replace(outcome, case=None))  # type: ignore[arg-type]  # faults hold functions: not sent
    return found


def run_parts(only: str, turn: int | None, jobs: int) -> list[Outcome]:
    """Run the cases in several processes and return what came of them, in order."""
    cases = chosen_cases(only, turn)
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        parts = list(pool.map(run_part, *zip(*((only, turn, jobs, part) for part in range(jobs)))))
    return [replace(parts[n % jobs][n // jobs], case=case) for n, case in enumerate(cases)]


def main() -> int:
    """Run the cases, print what came of them, and return 1 unless the suite is passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="only cases with this text (fault, place, dtype, side)")
    parser.add_argument("--turn", type=int, help="one case of each fault; each turn 0 to 5 takes others")
    parser.add_argument("--keep", action="store_true", help="keep the dumps and say where they are")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the cases")
    parser.add_argument("--write", type=Path, help="write the page to this file")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    try:
        bench, outcomes = Bench(folder), []
        if chosen.jobs > 1:
            outcomes = run_parts(chosen.only, chosen.turn, chosen.jobs)
        else:
            for outcome in run_all(chosen_cases(chosen.only, chosen.turn), bench, chosen.keep):
                outcomes.append(outcome)
                print(line(outcome), flush=True)
        healthy = [] if chosen.only else controls(bench)
        for control in healthy:
            print(*control, flush=True)
    finally:
        if not chosen.keep:
            shutil.rmtree(folder)
    found = totals(outcomes)
    print(found)
    if chosen.write:
        chosen.write.write_text(page(outcomes, healthy, GROUPS))
    return 0 if found.good and all(verdict in ("identical", "consistent") for _, verdict, _ in healthy) else 1
