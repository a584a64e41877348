"""Measure what DUMP_ON=1 costs a training job that knows nothing of it: ``python benchmarks/job.py``.

A random Qwen2 of 12 layers, hidden size 256, fp32, is trained on batches of 8 sequences of 128 tokens, one thread, in a
process of its own under the default budget, and again under a budget of 64 MB. Its first step is recorded. Of the steps
after it, those with probe's patches in place take turns with those without, so that a machine that slows down slows
both; a figure is the median.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROUNDS = 15
SMALL = 64 << 20


def train(result: Path) -> None:
    """Be the job: train, and write the seconds of each step."""
    import torch
    from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 12, "vocab_size": 4096}
    model = Qwen2ForCausalLM(Qwen2Config(num_attention_heads=4, num_key_value_heads=2, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    patched, plain = PreTrainedModel.__call__, torch.nn.Module.__call__
    assert patched is not plain, "the start-up line is not installed: pip install -e ."
    seconds: dict[str, list[float]] = {"recorded": [], "patched": [], "plain": []}
    for turn in range(2 * ROUNDS + 3):
        kind = "recorded" if turn == 0 else ("plain", "patched")[turn % 2]
        PreTrainedModel.__call__ = plain if kind == "plain" else patched  # type: ignore[method-assign]
        ids = torch.randint(0, 4096, (8, 128))
        start = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if turn == 0 or turn > 2:  # the first steps after the recorded one warm up
            seconds[kind].append(time.perf_counter() - start)
    result.write_text(json.dumps({kind: statistics.median(values) for kind, values in seconds.items()}))


def run(folder: Path, **environment: str) -> tuple[dict[str, float], int, list[str]]:
    """Run the job under DUMP_ON=1; return the seconds per kind of step, the bytes of its dump and what was said."""
    os.makedirs(folder)
    dump, result = folder / "dump", folder / "result"
    given = {**os.environ, "DUMP_ON": "1", "PROBE_DUMP_DIR": str(dump), **environment}
    subprocess.run([sys.executable, __file__, str(result)], env=given, check=True, capture_output=True)
    lines = [row.split("\t")[4] for row in (dump / "activation.log").read_text().splitlines()]
    return json.loads(result.read_text()), sum(path.stat().st_size for path in dump.rglob("*.h5")), lines


def main() -> None:
    """Print the table."""
    scratch = Path(tempfile.mkdtemp())
    for name, limit in (("default budget", 2 << 30), ("PROBE_MAX_BYTES=64 MB", SMALL)):
        given = {} if limit != SMALL else {"PROBE_MAX_BYTES": str(SMALL)}
        middle, size, lines = run(scratch / str(limit), **given)
        print(name)
        for line in lines:
            print(f"  {line}")
        print(f"  {'dump / budget':52} {size / 1e6:.1f} MB / {limit / 1e6:.0f} MB = {size / limit:.3f}")
        print(f"  {'plain step':52} {middle['plain']:.3f} s")
        print(f"  {'step that is not recorded / plain step':52} {middle['patched'] / middle['plain']:.3f}")
        print(f"  {'recorded step / plain step':52} {middle['recorded'] / middle['plain']:.1f}")
    shutil.rmtree(scratch)


if __name__ == "__main__":
    train(Path(sys.argv[1])) if len(sys.argv) > 1 else main()
