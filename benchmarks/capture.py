"""Measure what recording costs, as ratios within one run: ``python benchmarks/capture.py``.

The model is a random Qwen2 of 24 layers, hidden size 256, fp32, one sequence of 256 tokens, one thread. Each figure is
the median of several rounds in which the cases take turns, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from probe import PrecisionDebugger, open_dump

ROUNDS = 7
CASES = ("plain", "dump", "hooked", "statistics", "reduced", "write", "after")


def make_model() -> torch.nn.Module:
    """Return the model of the figures."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 24, "vocab_size": 4096}
    return Qwen2ForCausalLM(Qwen2Config(num_attention_heads=4, num_key_value_heads=2, **sizes)).eval()


def seconds(action: Callable[[], object]) -> float:
    """Return how long one call takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def raw_write(folder: Path, size: int) -> None:
    """Write as many bytes as a dump holds, in one file, through to the disk."""
    block = memoryview(bytes(8 << 20))
    with open(folder / "raw", "wb") as file:
        for start in range(0, size, len(block)):
            file.write(block[: min(len(block), size - start)])
        file.flush()
        os.fsync(file.fileno())


def dump_once(
    model: torch.nn.Module, forward: Callable[[], object], folder: Path, task: str = "tensor"
) -> tuple[float, float]:
    """Record one forward completely; return the seconds of all of it and of the hooked forward alone."""
    shutil.rmtree(folder, ignore_errors=True)
    start = time.perf_counter()
    with PrecisionDebugger(dump_path=str(folder), task=task, enabled=True).start(model):
        hooked = seconds(forward)
    return time.perf_counter() - start, hooked


def main() -> None:
    """Print the table."""
    model = make_model()
    ids = torch.randint(0, 4096, (1, 256))

    def forward() -> None:
        with torch.no_grad():
            model(input_ids=ids)

    scratch = Path(tempfile.mkdtemp())
    folder = scratch / "dump"
    forward()
    dump_once(model, forward, folder)
    file = folder / "actor" / "step0" / "rank0.h5"
    size = file.stat().st_size
    dump_once(model, forward, scratch / "statistics", "statistics")
    small = (scratch / "statistics" / "actor" / "step0" / "rank0.h5").stat().st_size
    times: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(ROUNDS):
        times["plain"].append(seconds(forward))
        whole, hooked = dump_once(model, forward, folder)
        times["dump"].append(whole)
        times["hooked"].append(hooked)
        whole, hooked = dump_once(model, forward, scratch / "statistics", "statistics")
        times["statistics"].append(whole)
        times["reduced"].append(hooked)
        times["write"].append(seconds(lambda: raw_write(scratch, size)))
        times["after"].append(seconds(forward))
    middle = {name: statistics.median(values) for name, values in times.items()}
    with open_dump(folder) as dump:
        tensors = len(dump.tensors)
    rows = [
        ("recorded tensors", f"{tensors}"),
        ("file", f"{size / 1e6:.0f} MB"),
        ("file of statistics", f"{small / 1e6:.1f} MB"),
        ("plain forward", f"{middle['plain']:.3f} s"),
        ("forward with tensor dump / plain forward", f"{middle['dump'] / middle['plain']:.2f}"),
        (
            "forward with tensor dump / (plain + raw write)",
            f"{middle['dump'] / (middle['plain'] + middle['write']):.2f}",
        ),
        ("the hooked forward alone / plain forward", f"{middle['hooked'] / middle['plain']:.2f}"),
        ("forward with statistics dump / plain forward", f"{middle['statistics'] / middle['plain']:.2f}"),
        ("the hooked forward alone / plain forward", f"{middle['reduced'] / middle['plain']:.2f}"),
        ("forward after stop() / before start()", f"{middle['after'] / middle['plain']:.2f}"),
    ]
    for name, value in rows:
        print(f"{name:50} {value}")
    shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
