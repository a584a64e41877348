"""Run every rollout setting against every actor setting on real engines: ``python tests/matrix.py FOLDER``.

Four families of tiny random fp32 checkpoints are dumped through the command line, as a user would, and every rollout is
compared with every actor. ``--write docs/matrix.md`` writes the result as a table; tests/test_matrix.py runs a part.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoints import make_checkpoint

from probe.compare.run import compare_dumps
from probe.errors import ProbeError

LIMIT = 2e-5
"""Relative L2 that fp32 engines with other kernels and summation orders stay below (measured: 1e-6)."""
SIZES = {"layers": 4, "hidden": 128, "heads": 4, "kv_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {"qwen2": {}, "qwen3": {"tied": True}, "llama": {}, "mixtral": {}}
PROMPTS = (
    '{"id": "a", "token_ids": [5, 9, 33, 101, 7, 61, 12]}\n{"id": "b", "token_ids": [150, 2, 2, 88, 61, 30, 12, 190, 4,'
    ' 77, 31, 8, 15, 16, 23, 42, 108, 3, 14]}\n{"id": "c", "token_ids": [17, 42]}\n'
)
"""A prompt longer than a chunk of chunked prefill, one of two tokens, and lengths that no parallel size divides."""


@dataclass(frozen=True)
class Setting:
    """One way to run an engine: arguments of ``probe dump``, and the families that it is for (all by default)."""

    name: str
    arguments: tuple[str, ...]
    families: tuple[str, ...] = tuple(FAMILIES)
    environment: dict[str, str] = field(default_factory=dict)


GENERATED = "vLLM decode"
ROLLOUTS = (
    Setting(GENERATED, ()),
    Setting("vLLM TP1", ()),
    Setting("vLLM TP2", ("--tp", "2")),
    Setting("vLLM chunked prefill", ("--engine-arg", "max_num_batched_tokens=16", "--engine-arg", "max_num_seqs=8")),
)
"""The first one generates, through decode steps; the others score its tokens by prefill."""
ACTORS = (
    Setting("Megatron TP1 padded", ()),
    Setting("Megatron TP1 packed", ("--layout", "packed")),
    Setting("Megatron TP2", ("--tp", "2")),
    Setting("Megatron TP2+SP", ("--tp", "2", "--sp")),
    Setting("Megatron PP2", ("--pp", "2")),
    Setting("Megatron PP2+VPP2", ("--pp", "2", "--vpp", "2")),
    Setting("Megatron CP2 packed", ("--cp", "2", "--layout", "packed")),
    Setting("Megatron EP2", ("--ep", "2"), ("mixtral",)),
    Setting("HF", ("--engine", "transformers")),
    Setting("FSDP2", ("--engine", "fsdp", "--dp", "2")),
)


@dataclass
class Cell:
    """What one rollout against one actor gave; ``error`` says why a dump or the comparison could not be made."""

    verdict: str = ""
    tensors: int = 0
    worst: float = float("nan")
    rows: int = 0
    left: tuple[str, ...] = ()
    error: str = ""

    @property
    def good(self) -> bool:
        """Tell whether every canonical tensor met on every common row within :data:`LIMIT`."""
        return not self.error and self.verdict == "consistent" and not self.left and self.worst <= LIMIT

    def __str__(self) -> str:
        if self.error:
            return f"error: {self.error}"
        problems = "" if self.good else f" ({self.verdict}; {'; '.join(self.left) or 'beyond the limit'})"
        return f"{self.tensors} / {self.rows} / {self.worst:.1e}{problems}"


def by_name(settings: tuple[Setting, ...], name: str) -> Setting:
    """Return the setting called ``name``."""
    return next(setting for setting in settings if setting.name == name)


def dump(arguments: tuple[str, ...], output: Path, timeout: float = 600) -> str:
    """Run ``probe dump`` and return why it failed, empty where it did not; an output that is there is kept."""
    if output.exists():
        return ""
    command = [sys.executable, "-m", "probe", "dump", *arguments, "--dtype", "float32", "-o", str(output)]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    made = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    return "" if made.returncode == 0 else " ".join(made.stderr.split())[-400:] or f"exit {made.returncode}"


class Matrix:
    """Dumps of the settings in one folder, made when first asked for and then reused."""

    def __init__(self, folder: Path, say: Callable[[str], None] = lambda text: None) -> None:
        self.folder, self.say = folder, say
        self.errors: dict[Path, str] = {}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "prompts.jsonl").write_text(PROMPTS)

    def model(self, family: str) -> Path:
        """Return the checkpoint of a family."""
        path = self.folder / family / "model"
        return path if path.exists() else make_checkpoint(path, family, **SIZES, **FAMILIES[family])

    def rollout(self, family: str, setting: Setting) -> tuple[Path, str]:
        """Return the dump of a rollout setting, and why it failed if it did."""
        if setting.name == GENERATED:
            prompts = str(self.folder / "prompts.jsonl")
            source = ("--prompts", prompts, "--max-tokens", "12", "--ignore-eos", "--n", "2")
        else:
            source = self._source(family)
        return self._made(family, "rollout", setting, source)

    def actor(self, family: str, setting: Setting) -> tuple[Path, str]:
        """Return the dump of an actor setting, and why it failed if it did."""
        return self._made(family, "actor", setting, self._source(family))

    def _source(self, family: str) -> tuple[str, ...]:
        return "--from", str(self.rollout(family, by_name(ROLLOUTS, GENERATED))[0])

    def _made(self, family: str, stage: str, setting: Setting, source: tuple[str, ...]) -> tuple[Path, str]:
        output = self.folder / family / stage / setting.name.replace(" ", "-")
        if output not in self.errors:
            start = time.monotonic()
            model = ("--model", str(self.model(family)))
            self.errors[output] = dump(("--stage", stage, *model, *source, *setting.arguments), output)
            self.say(f"{family}: {setting.name} {time.monotonic() - start:.0f} s {self.errors[output]}")
        return output, self.errors[output]

    def cell(self, family: str, rollout: Setting, actor: Setting) -> Cell:
        """Compare one rollout with one actor."""
        path_a, error_a = self.rollout(family, rollout)
        path_b, error_b = self.actor(family, actor)
        if error_a or error_b:
            return Cell(error=error_a or error_b)
        try:
            return cell_of(compare_dumps(path_a, path_b))
        except ProbeError as error:
            return Cell(error=str(error))


def cell_of(report: dict[str, Any]) -> Cell:
    """Read a cell off a report: every tensor of either side must be compared, on every row that both ran."""
    coverage = report["coverage"]
    joined = coverage["rows"]["joined"]
    compared = [layer for layer in report["layers"] if layer["rel_l2"] is not None]
    left = [f"{len(coverage[name])} {name}" for name in ("only_a", "only_b") if coverage[name]]
    left += [f"{layer['name']} not compared" for layer in report["layers"] if layer["rel_l2"] is None]
    left += [f"{layer['name']} on {layer['rows']} rows" for layer in compared if layer["rows"] != joined]
    left += [f"gate {gate['name']}" for gate in report["gates"] if gate["status"] == "fail"]
    worst = max((layer["rel_l2"] for layer in compared), default=float("nan"))
    return Cell(report["verdict"], len(compared), worst, joined, tuple(left))


INTRODUCTION = """\
# Every rollout setting against every actor setting

Written by `make matrix`: real vLLM, Megatron-core, transformers and FSDP2 on a CPU (gloo between processes), tiny
random fp32 checkpoints of four layers, six sequences. A cell holds: canonical tensors compared / rows joined / worst
relative L2. {good} of {count} cells are `consistent`, with every canonical tensor that both engines can show matched on
every row that both executed and below {limit:g}; a cell that is not says why.

`vLLM decode` generated the tokens; the other columns scored them by prefill. Packed and context-parallel attention on a
CPU are probe's own replacements of TransformerEngine's kernels: those cells test names, layouts, rows and the code
around the kernel, not the kernel."""


def page(cells: dict[tuple[str, str, str], Cell]) -> str:
    """Return the result as a Markdown page."""
    good = sum(cell.good for cell in cells.values())
    lines = [INTRODUCTION.format(good=good, count=len(cells), limit=LIMIT)]
    for family in FAMILIES:
        actors = [setting.name for setting in ACTORS if family in setting.families]
        columns = [setting.name for setting in ROLLOUTS]
        if not any((family, rollout, actor) in cells for rollout in columns for actor in actors):
            continue
        lines += ["", f"## {family}", "", "| actor | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
        for actor in actors:
            row = [str(cells.get((family, rollout, actor), "")) for rollout in columns]
            lines.append(f"| {actor} | " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the matrix, print progress and the page, and return 1 unless every cell is good."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where dumps go; those that are there are reused")
    parser.add_argument("--family", action="append", choices=FAMILIES, help="only this family; may be repeated")
    parser.add_argument("--write", type=Path, help="write the table to this file")
    chosen = parser.parse_args()
    matrix = Matrix(chosen.folder, lambda text: print(text, flush=True))
    cells = {}
    for family in chosen.family or FAMILIES:
        for actor in ACTORS:
            if family in actor.families:
                for rollout in ROLLOUTS:
                    cells[family, rollout.name, actor.name] = matrix.cell(family, rollout, actor)
    text = page(cells)
    print(text)
    if chosen.write:
        chosen.write.write_text(text)
    return 0 if all(cell.good for cell in cells.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
