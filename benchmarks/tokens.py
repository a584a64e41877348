"""Measure what comparing a million tokens costs: ``python benchmarks/tokens.py``.

The whole command runs in a process of its own, from the file to the written page, so that its peak memory is its own;
the steps are timed in this one. Targets: all figures and the page in 5 s and 1 GB. The best of ROUNDS counts, in CPU
seconds, single-threaded: on a machine that is shared the clock on the wall says little.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from probe.compare.ppo import PPOConfig
from probe.compare.report.tokens import TOKEN_FORMS
from probe.compare.tokens.read import read_columns, read_sources
from probe.compare.tokens.run import token_report
from probe.compare.tokens.section import token_section
from probe.compare.tokens.semantics import find_semantics
from probe.compare.tokens.update import ppo_section

ROUNDS = 3
SEQUENCES, WIDTH, SHARE = 1000, 1250, 0.8
"""A million tokens inside the mask: responses of many lengths with holes, as a step of multi-turn training has them."""


def write(path: Path) -> int:
    """Write a batch as verl names it, with advantages, and return its number of tokens inside the mask."""
    rng = np.random.default_rng(0)
    shape = SEQUENCES, WIDTH
    length = rng.integers(int((2 * SHARE - 1) * WIDTH), WIDTH + 1, (SEQUENCES, 1))
    mask = (np.arange(WIDTH) < length) & (rng.random(shape) < 0.999)
    a = -rng.exponential(0.6, shape).astype(np.float32)
    noise = rng.standard_normal(shape, np.float32) * 0.015 * np.sqrt(-a)
    np.savez(
        path,
        rollout_log_probs=a,
        old_log_probs=np.where(a + noise < 0, a + noise, a),
        response_mask=mask,
        responses=rng.integers(0, 150_000, shape),
        advantages=np.repeat(rng.standard_normal((SEQUENCES, 1), np.float32), WIDTH, axis=1),
        step=np.arange(SEQUENCES) // 128,
    )
    return int(mask.sum())


def best_of(call: Callable[[], object]) -> float:
    """Return the CPU seconds of the best of ROUNDS calls."""
    times = []
    for _ in range(ROUNDS):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times)


def whole(source: Path, folder: Path) -> tuple[float, float, float]:
    """Return CPU seconds, seconds on the wall and peak bytes of the command in a process of its own."""
    command = [sys.executable, "-m", "probe", "tokens", source, "--ppo", source, "--report", "html", "-o", folder]
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run([*map(str, command), "--force"], capture_output=True, text=True)
    taken, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode in (0, 1), result.stderr
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return used, taken, after.ru_maxrss * 1024


def main() -> None:
    """Print the table."""
    scratch = Path(tempfile.mkdtemp())
    source = scratch / "batch.npz"
    tokens = write(source)
    runs = [whole(source, scratch / "report") for _ in range(ROUNDS)]
    used, taken, peak = (min(column) for column in zip(*runs))
    page = scratch / "report" / TOKEN_FORMS["html"].file_name
    batch, _ = read_sources([source])
    read_columns(source, batch)
    report = token_report(batch, None, PPOConfig())
    steps: dict[str, Callable[[], object]] = {
        "read both sides": lambda: read_sources([source]),
        "read the advantages": lambda: read_columns(source, batch),
        "what the log-probs are": lambda: find_semantics(batch),
        "every figure": lambda: token_section(batch, None),
        "the PPO update": lambda: ppo_section(batch, PPOConfig(), None),
        "the report as a whole": lambda: token_report(batch, None, PPOConfig()),
        "the page": lambda: TOKEN_FORMS["html"].render(report),
    }
    rows = [("tokens inside the mask", f"{tokens}"), ("file", f"{source.stat().st_size / 1e6:.0f} MB")]
    rows += [(name, f"{best_of(call):.2f} s") for name, call in steps.items()]
    rows += [
        ("whole command, from file to page (at most 5 s)", f"{used:.2f} s"),
        ("the same on the wall", f"{taken:.2f} s"),
        ("peak memory of its process (at most 1000 MB)", f"{peak / 1e6:.0f} MB"),
        ("page (at most 5 MB)", f"{page.stat().st_size / 1e6:.2f} MB"),
    ]
    for name, value in rows:
        print(f"{name:50} {value}")
    shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
