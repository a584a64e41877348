"""Measure what joining rows costs, as a ratio within one run: ``python benchmarks/alignment.py``.

Two comparisons of the same tensors: with both sides' rows in one order, and with one side in another sequence order,
cut into prefill chunks and micro-batches, its rows shuffled within each call. They take turns; the best of several
rounds counts, so that a machine that slows down slows both.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from probe.compare.run import compare_dumps
from probe.store.schema import ROW, RowSegment, Sequence
from probe.store.writer import DumpWriter

ROUNDS = 5
LAYERS, HIDDEN, INTERMEDIATE = 8, 512, 1376
SEQUENCES, LENGTH = 16, 160
CHUNK = 64
"""Rows of one call of the batched side; the other runs all rows in one call."""

MANIFEST = {"schema": 1, "stage": "actor", "engine": {"name": "transformers"}, "dtype": "float32"}
SIZES = {"input_layernorm": HIDDEN, "self_attn.o_proj": HIDDEN, "mlp.gate_proj": INTERMEDIATE, "mlp.down_proj": HIDDEN}


def calls(rng: np.random.Generator, *, batched: bool) -> list[np.ndarray]:
    """Return per call the row numbers of the plain order that it runs."""
    order = np.arange(SEQUENCES * LENGTH)
    if not batched:
        return [order]
    order = order.reshape(SEQUENCES, LENGTH)[rng.permutation(SEQUENCES)].ravel()
    return [rng.permutation(chunk) for chunk in np.array_split(order, len(order) // CHUNK)]


def write(folder: Path, seed: int, *, batched: bool) -> Path:
    """Write one side: ``seed`` chooses its rounding noise, ``batched`` how its rows lie."""
    rng = np.random.default_rng(seed)
    ids = np.random.default_rng(0).integers(0, 1000, (SEQUENCES, LENGTH))
    writer = DumpWriter(folder / "actor" / "step0" / "rank0.h5", MANIFEST)
    places = rng.permutation(SEQUENCES) if batched else np.arange(SEQUENCES)
    for number in np.argsort(places):
        writer.add_sequence(Sequence(0, f"u{number}", prompt_len=LENGTH, length=LENGTH, tokens=ids[number]))
    plain = calls(rng, batched=batched)
    segments = []
    for number, rows in enumerate(plain):
        sequence, position = np.divmod(rows, LENGTH)
        cells = zip(places[sequence], position, ids[sequence, position], np.full(len(rows), number))
        segments.append(RowSegment(np.array(list(cells), ROW)))
    shared = np.random.default_rng(1)
    for layer in range(LAYERS):
        for name, size in SIZES.items():
            values = shared.standard_normal((SEQUENCES * LENGTH, size), np.float32)
            values *= 1 + rng.uniform(-1e-7, 1e-7, values.shape).astype(np.float32)
            for rows, segment in zip(plain, segments):
                writer.append(f"model.layers.{layer}.{name}", "output.0", values[rows], "float32", segment)
    writer.close()
    return folder


def seconds(a: Path, b: Path) -> float:
    """Return how long one comparison takes; it must have joined every row of every tensor."""
    start = time.perf_counter()
    report = compare_dumps(a, b)
    taken = time.perf_counter() - start
    assert report["verdict"] == "consistent", report["summary"]
    assert report["coverage"]["matched"] == LAYERS * len(SIZES)
    assert all(layer["rows"] == SEQUENCES * LENGTH for layer in report["layers"])
    return taken


def main() -> None:
    """Print the table."""
    scratch = Path(tempfile.mkdtemp())
    a = write(scratch / "a", 2, batched=False)
    equal, batched = write(scratch / "equal", 3, batched=False), write(scratch / "batched", 3, batched=True)
    size = sum(file.stat().st_size for file in a.rglob("*.h5"))
    seconds(a, equal), seconds(a, batched)  # files in the page cache, imports done
    times: dict[str, list[float]] = {"equal": [], "batched": []}
    for _ in range(ROUNDS):
        times["equal"].append(seconds(a, equal))
        times["batched"].append(seconds(a, batched))
    best = {name: min(values) for name, values in times.items()}
    middle = {name: statistics.median(values) for name, values in times.items()}
    rows = [
        ("rows of each side", f"{SEQUENCES * LENGTH}"),
        ("tensors", f"{LAYERS * len(SIZES)}"),
        ("file of each side", f"{size / 1e6:.0f} MB"),
        ("compare, rows in equal order", f"{best['equal']:.3f} s"),
        ("compare, rows shuffled, chunked and re-batched", f"{best['batched']:.3f} s"),
        ("shuffled / equal order, best of each", f"{best['batched'] / best['equal']:.2f}"),
        ("shuffled / equal order, medians", f"{middle['batched'] / middle['equal']:.2f}"),
    ]
    for name, value in rows:
        print(f"{name:50} {value}")
    shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
