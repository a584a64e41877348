"""Measure what comparing costs: ``python benchmarks/measuring.py [--large] [--msprobe PYTHON]``.

1. The compiled loops on one thread: bytes per second of a pair of tensors, over the rate at which the same bytes are
   only read, for float32 and bfloat16. Cases take turns; the best of several rounds counts.
2. ``probe compare``, the whole process, on two dumps of one forward of a Qwen2 of 24 layers, hidden size 256, fp32,
   1 x 256 tokens, one weight perturbed: seconds, those of its CPUs, and the most memory of one of its processes, files'
   pages included. Once for the terminal alone, once with report.json and report.html.
3. With ``--msprobe PYTHON``, the interpreter of an environment with mindstudio-probe: its comparison of its own dumps
   of the same model, weights and inputs, in turns with ours; it ends with status 0 and has written its table.
4. With ``--large``: dumps of one tensor of 2 GB on each side.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from probe import kernels
from probe.metrics import PairMeasure
from probe.store.dtypes import narrow, widen
from probe.store.schema import ROW, RowSegment, Sequence
from probe.store.writer import DumpWriter

ROWS, FEATURES = 1024, 4096
ROUNDS, RUNS = 30, 5
LARGE_ROWS, LARGE_FEATURES = 1 << 19, 1 << 10
MANIFEST = {"schema": 1, "stage": "actor", "engine": {"name": "transformers"}, "dtype": "float32"}

# -- the loops --------------------------------------------------------------------------------------------------------


def reading() -> Callable[[np.ndarray, np.ndarray], int]:
    """Return a compiled loop that does nothing but read two arrays of uint64."""
    import numba

    @numba.njit(nogil=True)
    def read(x: np.ndarray, y: np.ndarray) -> int:
        total = np.uint64(0)
        for n in range(x.size):
            total ^= x[n] + y[n]
        return total

    return read


def whole(x: np.ndarray, y: np.ndarray, dtype: str) -> None:
    """Measure a pair, everything that a comparison wants of it."""
    measure = PairMeasure(len(x), dtype)
    measure.update(x, y, 0, bits="bfloat16" if dtype == "bfloat16" else "")
    measure.result()


def loop_cases(x: np.ndarray, y: np.ndarray, dtype: str) -> dict[str, Callable[[], object]]:
    """Return what is timed for one dtype; x and y as they are stored."""
    compiled = kernels.load([dtype])
    assert compiled is not None, kernels.why_not()
    read, flat = reading(), (x.reshape(-1).view(np.uint64), y.reshape(-1).view(np.uint64))
    bits = [values.view(f"u{values.itemsize}").reshape(-1, kernels.CHUNK) for values in (x, y)]
    per_row = (*(np.zeros(len(x)) for _ in range(4)), np.zeros(len(x), bool))
    per_channel = tuple(np.zeros(x.shape[1]) for _ in range(3))
    more = np.zeros(kernels.COUNTS, np.int64), np.zeros((8, 2), np.int64), 0, 0.0
    histogram = np.zeros((kernels.LANES, kernels.ULP_BINS), np.int64)
    return {
        "read": lambda: read(*flat),
        "sums": lambda: compiled.sums(dtype, x, y, per_row, per_channel, *more),
        "ulps": lambda: compiled.ulps(bits[0], bits[1], histogram),
        "all": lambda: whole(x, y, dtype),
    }


def loops() -> list[tuple[str, str]]:
    """Return the rows of the table about the compiled loops."""
    rng = np.random.default_rng(0)
    y = rng.standard_normal((ROWS, FEATURES), np.float32)
    x = y * (1 + 1e-6 * rng.standard_normal(y.shape, np.float32))
    rough = y * (1 + 1e-2 * rng.standard_normal(y.shape, np.float32))
    table = []
    for dtype, pair in (("float32", (x, y)), ("bfloat16", (narrow(rough, "bfloat16"), narrow(y, "bfloat16")))):
        cases = loop_cases(*pair, dtype)
        best = best_of(cases)
        size = sum(values.nbytes for values in pair)
        table.append((f"{dtype}: only reading", f"{size / best['read'] / 1e9:.1f} GB/s"))
        words = {"sums": "sums, maxima, non-finite, rows, channels", "ulps": "ULP distances", "all": "everything"}
        for name, text in words.items():
            table.append((f"{dtype}: {text}, share of that rate", f"{best['read'] / best[name]:.2f}"))
        values = [values if dtype == "float32" else widen(values, dtype) for values in pair]
        kept, kernels._compiled[:] = list(kernels._compiled), []
        start = time.thread_time()
        whole_numpy(*values, dtype)
        table.append((f"{dtype}: everything by numpy, share", f"{best['read'] / (time.thread_time() - start):.4f}"))
        kernels._compiled[:] = kept
    return table


def whole_numpy(x: np.ndarray, y: np.ndarray, dtype: str) -> None:
    """Measure a pair of numbers without the compiled loops."""
    measure = PairMeasure(len(x), dtype)
    measure.update(x, y, 0)
    measure.result()


def best_of(cases: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the best time of each case, in seconds of this thread's CPU; they take turns."""
    best = dict.fromkeys(cases, float("inf"))
    for _ in range(ROUNDS):
        for name, action in cases.items():
            start = time.thread_time()
            action()
            best[name] = min(best[name], time.thread_time() - start)
    return best


# -- whole processes --------------------------------------------------------------------------------------------------

RUN = """
import resource, subprocess, sys, time
start = time.perf_counter()
done = subprocess.run(sys.argv[1:], capture_output=True, text=True)
seconds, used = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
print(done.returncode, seconds, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)
print(done.stdout[-2000:], done.stderr[-4000:])
"""


DIFFERS = 1
"""The exit status of ``probe compare`` on the two dumps, one of which has another weight."""


def run(*command: str | Path, status: int = 0) -> tuple[float, float, float]:
    """Run a command to its end and return its seconds, those of its CPUs, and its most memory in MB.

    A small process starts it: what it starts inherits the most memory that this one has had. Ends this program where
    the command's exit status is another than ``status``.
    """
    words = [sys.executable, "-S", "-c", RUN, *map(str, command)]
    first, text = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split("\n", 1)
    ended, *figures = first.split()
    if int(ended) != status:
        raise SystemExit(f"{' '.join(words[4:])} ended with status {ended}, not {status}:\n{text}")
    seconds, cpu, memory = map(float, figures)
    return seconds, cpu, memory


MODEL = """
import os, sys, torch
from transformers import Qwen2Config, Qwen2ForCausalLM
torch.set_num_threads(1)

def model(perturbed):
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 24, "vocab_size": 2048}
    config = Qwen2Config(num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
                         attn_implementation="eager", **sizes)
    found = Qwen2ForCausalLM(config).eval()
    if perturbed:
        weight = found.get_submodule("model.layers.5.mlp.down_proj").weight
        with torch.no_grad():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(99)) * weight.std() * 1e-2)
    return found

ids = torch.randint(0, 2048, (1, 256), generator=torch.Generator().manual_seed(1))
folder = sys.argv[1]
"""

OURS = """
from probe import PrecisionDebugger
for side in "ab":
    with PrecisionDebugger(dump_path=os.path.join(folder, side), enabled=True).start(found := model(side == "b")):
        with torch.no_grad():
            found(input_ids=ids, use_cache=False)
"""

THEIRS = """
import json
from msprobe.pytorch import PrecisionDebugger
side = sys.argv[2]
target = os.path.join(folder, side)
config = {"task": "tensor", "dump_path": target, "rank": [], "step": [], "level": "L0",
          "tensor": {"scope": [], "list": [], "data_mode": ["all"]}}
with open(target + ".json", "w") as file:
    json.dump(config, file)
os.chmod(target + ".json", 0o640)
debugger = PrecisionDebugger(config_path=target + ".json")
found = model(side == "b")
debugger.start(model=found)
with torch.no_grad():
    found(input_ids=ids, use_cache=False)
debugger.stop()
debugger.step()
"""


@dataclass(frozen=True)
class Case:
    """A comparison that is timed: how it is started but for the folder of its result, how it ends, what it writes."""

    command: tuple[str | Path, ...]
    status: int
    files: tuple[str, ...]


def dump_theirs(python: str, folder: Path) -> Case:
    """Dump with msProbe and return its comparison: of files, for of one process's dump it wants no folder."""
    folder.mkdir()
    paths = []
    for side in "ab":
        subprocess.run([python, "-c", MODEL + THEIRS, str(folder), side], check=True, capture_output=True)
        paths.append(next((folder / side).rglob("dump.json")))
    tool = Path(python).with_name("msprobe")
    words = (tool, "compare", "--golden_path", paths[0], "--target_path", paths[1], "--output_path")
    return Case(words, 0, ("*.csv",))


def run_case(case: Case, out: Path) -> tuple[float, float, float]:
    """Run a comparison (see :func:`run`) and check that it wrote what it should."""
    out.mkdir(exist_ok=True)
    result = run(*case.command, *((out,) if case.files else ()), status=case.status)
    for pattern in case.files:
        if not any(path.stat().st_size for path in out.rglob(pattern)):
            raise SystemExit(f"{case.command[0]} wrote no {pattern}")
    shutil.rmtree(out)
    return result


def processes(scratch: Path, msprobe: str | None) -> list[tuple[str, str]]:
    """Return the rows of the table about whole processes."""
    subprocess.run([sys.executable, "-c", MODEL + OURS, str(scratch)], check=True, stdout=subprocess.DEVNULL)
    ours = (sys.executable, "-m", "probe", "compare", scratch / "a", scratch / "b")
    cases = {
        "probe compare, terminal": Case(ours, DIFFERS, ()),
        "probe compare, terminal, json and html": Case((*ours, "-o"), DIFFERS, ("report.json", "report.html")),
    }
    if msprobe:
        cases["msprobe compare, csv"] = dump_theirs(msprobe, scratch / "theirs")
    results: dict[str, list[tuple[float, float, float]]] = {name: [] for name in cases}
    for number in range(RUNS + 1):
        for name, case in cases.items():
            result = run_case(case, scratch / "out")
            results[name] += [result] if number else []  # the first fills the page cache, and compiles
    table = []
    for name, found in results.items():
        seconds, cpu, memory = zip(*found)
        table.append((f"{name}: best, median, worst of {RUNS}", spread(seconds)))
        table.append(("  of its CPUs", spread(cpu)))
        table.append(("  most memory", f"{max(memory):.0f} MB"))
    return table


def spread(seconds: SequenceOf[float]) -> str:
    """Return the best, the median and the worst of some times."""
    ordered = sorted(seconds)
    return f"{ordered[0]:.2f}, {ordered[len(ordered) // 2]:.2f}, {ordered[-1]:.2f} s"


# -- larger than memory -----------------------------------------------------------------------------------------------


def write_large(folder: Path, seed: int) -> Path:
    """Write a dump of one tensor, block by block."""
    writer = DumpWriter(folder / "actor" / "step0" / "rank0.h5", MANIFEST)
    tokens = np.arange(LARGE_ROWS) % 1000
    writer.add_sequence(Sequence(0, "long", prompt_len=LARGE_ROWS - 1, length=LARGE_ROWS, tokens=tokens))
    block = np.random.default_rng(0).standard_normal((1 << 14, LARGE_FEATURES), np.float32)
    noise = np.random.default_rng(seed)
    for start in range(0, LARGE_ROWS, len(block)):
        rows = np.zeros(len(block), ROW)
        rows["position"] = np.arange(start, start + len(block))
        rows["token"] = tokens[start : start + len(block)]
        values = block * (1 + np.float32(1e-7) * noise.standard_normal(LARGE_FEATURES, np.float32))
        writer.append("model.layers.0.mlp.down_proj", "output.0", values, "float32", RowSegment(rows))
    writer.close()
    return folder


def large(scratch: Path) -> list[tuple[str, str]]:
    """Return the rows of the table about a dump of which memory holds a block."""
    a, b = write_large(scratch / "large_a", 1), write_large(scratch / "large_b", 2)
    seconds, cpu, memory = run(sys.executable, "-m", "probe", "compare", a, b, "-o", scratch / "large_report")
    size = LARGE_ROWS * LARGE_FEATURES * 4 / 1e9
    return [
        (f"one tensor of {size:.1f} GB a side", f"{seconds:.1f} s, {cpu:.1f} s of CPUs"),
        ("  most memory", f"{memory:.0f} MB"),
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--msprobe", metavar="PYTHON")
    chosen = parser.parse_args()
    scratch = Path(tempfile.mkdtemp())
    try:
        table = [*loops(), *processes(scratch, chosen.msprobe), *(large(scratch) if chosen.large else ())]
        for name, value in table:
            print(f"{name:74} {value}")
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
