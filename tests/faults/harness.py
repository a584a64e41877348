"""Run a case: a healthy side and one with a fault, captured as ``probe dump`` does, compared, and what came of it."""

from __future__ import annotations

import copy
import itertools
import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch

from faults.attention import with_steps
from faults.base import DTYPES, Fault, Run
from faults.models import FAMILIES, LENGTHS, PLACES, load_model, long_texts, make_model, make_texts, read_config
from faults.plans import PLANS
from probe.compare.run import compare_dumps
from probe.errors import ProbeError
from probe.hooks.engines.transformers import BatchAdapter
from probe.hooks.runners.inprocess import capturing
from probe.hooks.runners.job import ENGINES, DumpJob, TokenSequence, step_folder
from probe.hooks.runners.tokens import write_tokens
from probe.manifest import make_manifest, write_manifest
from probe.store.reader import Dump, open_dump

STAGES = {"a": "rollout", "b": "actor"}
ATTENTION = {"a": "eager", "b": "sdpa"}
"""Side a is the rollout with plain attention, side b the actor with torch's fused one: healthy sides differ too."""
PROMPTS = {whole: prompt for prompt, whole in LENGTHS}
TOP = 3
"""Suspects among which the right cause must be."""


TEXTS: dict[str, Callable[[list[list[int]]], list[list[int]]]] = {
    "": lambda texts: texts,
    "short": lambda texts: texts[1:],
    "long": lambda texts: long_texts(),
}
"""Which texts are run: all of a family, those that decode in few steps, 2,000 rows."""


# -- one side ---------------------------------------------------------------------------------------------------------


def dump(run: Run, output: Path) -> Path:
    """Capture a run with the product's own capture and complete the dump as ``probe dump`` does."""
    job = DumpJob(run.stage, "transformers", run.path, output, dtype=run.dtype)
    about = {"path": str(run.path.resolve()), "architecture": run.config["architectures"][0], "config": run.config}
    manifest = make_manifest(
        run.stage,
        "transformers",
        torch.__version__,
        about,
        dtype=run.dtype,
        device="cpu",
        prompts_only=False,
        task="tensor",
        sampling={},
        logprobs_mode="raw_logprobs",
        source_dump=None,
        driver=True,
        backends={"attention": run.model.config._attn_implementation},
    )
    manifest |= run.said
    torch.manual_seed(0)
    with capturing(job, manifest, run.model, BatchAdapter) as rows, torch.no_grad():
        PLANS[run.how](run, rows)
    write_manifest(output, manifest)
    write_tokens(step_folder(job), manifest, ENGINES["transformers"].logits, run.sequences)
    return output


# -- cases ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A fault at a place, in a dtype, on a side."""

    fault: Fault
    place: str
    dtype: str
    side: str

    @property
    def layer(self) -> int:
        """Return the number of the layer that the fault is in."""
        return PLACES.get(self.place, 0)

    @property
    def visible(self) -> bool:
        """Tell whether numbers can show the fault in this dtype."""
        return self.dtype not in self.fault.invisible and not self.fault.benign

    def __str__(self) -> str:
        return f"{self.fault.name} {self.place} {self.dtype} {self.side}"


@dataclass
class Outcome:
    """What the comparison of one case said. Ranks count from 1, 0 where the right one is not listed."""

    case: Case
    verdict: str = ""
    suspects: list[dict[str, Any]] = field(default_factory=list)
    gates: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    error: str = ""
    effect: float | None = None

    @property
    def seen(self) -> bool:
        """Tell whether the verdict is anything but consistent."""
        return self.verdict != "consistent"

    @property
    def module_rank(self) -> int:
        """Return the rank of the right module among the suspects."""
        wanted = self.case.fault.modules_at(self.case.layer)
        return self._rank(lambda suspect: any(names(name, suspect["name"]) for name in wanted))

    @property
    def cause_rank(self) -> int:
        """Return the rank of the right cause among the suspects."""
        return self._rank(lambda suspect: suspect["cause"] in self.case.fault.causes)

    @property
    def gated(self) -> bool:
        """Tell whether the gate that must find the fault did."""
        return self.gates.get(self.case.fault.gate) in ("warn", "fail")

    @property
    def side_right(self) -> bool:
        """Tell whether the first suspect is on the side that has the fault, or says that it does not know."""
        return bool(self.suspects) and self.suspects[0]["side"] in (self.case.side, "both", "unknown")

    def _rank(self, right: Callable[[dict[str, Any]], bool]) -> int:
        return next((rank for rank, suspect in enumerate(self.suspects, 1) if right(suspect)), 0)


def names(wanted: str, name: str) -> bool:
    """Tell whether a module is the wanted one, in which ``*`` stands for anything."""
    return fnmatchcase(name, wanted)


class Bench:
    """Checkpoints, texts and healthy dumps in one folder, each made when first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._models: dict[tuple[str, str], Any] = {}
        self._texts: dict[str, list[list[int]]] = {}
        self._healthy: dict[tuple[str, ...], Path] = {}
        self._count = itertools.count()

    def checkpoint(self, family: str, dtype: str) -> Path:
        """Return the checkpoint of a family in a dtype."""
        path = self.folder / f"{family}-{dtype}"
        return path if path.exists() else make_model(path, family, dtype)

    def run(self, family: str, dtype: str, side: str, how: str = "score", texts: str = "") -> Run:
        """Return a healthy run of a side; ``how`` is one of :data:`PLANS`, ``texts`` one of :data:`TEXTS`."""
        path = self.checkpoint(family, dtype)
        if (family, dtype) not in self._models:
            self._models[family, dtype] = load_model(path, dtype)
        if family not in self._texts:
            self._texts[family] = make_texts(load_model(self.checkpoint(family, "float32"), "float32"))
        model = copy.deepcopy(self._models[family, dtype])
        model.config._attn_implementation = "eager" if family == "capped" else ATTENTION[side]
        sequences = list(_sequences(TEXTS[texts](self._texts[family])))
        run = Run(model, family, dtype, path, read_config(path), sequences, how=how, stage=STAGES[side])
        run.cache_model = copy.deepcopy(model) if how == "prefix" else None
        run.load = lambda changes: self._variant(path, dtype, changes)
        return run

    def _variant(self, path: Path, dtype: str, changes: dict[str, Any]) -> tuple[Path, Any]:
        """Return a checkpoint with the same weights and another config.json, and the model loaded from it."""
        variant = self.folder / f"{path.name}-variant{next(self._count)}"
        variant.mkdir()
        for file in path.iterdir():
            if file.name != "config.json":
                (variant / file.name).symlink_to(file.resolve())
        (variant / "config.json").write_text(json.dumps({**read_config(path), **changes}))
        return variant, load_model(variant, dtype)

    def healthy(self, fault: Fault, dtype: str, side: str) -> Path:
        """Return the dump of a side without the fault."""
        own = fault.name if fault.other is not None else ""
        key = (fault.family, dtype, side, fault.healthy or fault.how, fault.texts, own)
        if key not in self._healthy:
            run = self.run(*key[:-1])
            if fault.other is not None:
                fault.other(run)
            self._healthy[key] = dump(run, self.folder / "healthy" / str(next(self._count)))
        return self._healthy[key]

    def faulty(self, case: Case) -> tuple[Run, Path]:
        """Return the run of the side that has the fault, and a new dump of it."""
        run = self._of(case)
        run.layer = case.layer
        case.fault.inject(run)
        return run, dump(run, self.folder / "faulty" / str(next(self._count)))

    def _of(self, case: Case) -> Run:
        return self.run(case.fault.family, case.dtype, case.side, case.fault.how, case.fault.texts)

    def outcome(self, case: Case, *, keep: bool = False) -> Outcome:
        """Run a case and return what came of it; ``effect`` is measured where the fault is said to be invisible."""
        fault, other = case.fault, "b" if case.side == "a" else "a"
        outcome = Outcome(case)
        healthy = self.healthy(fault, case.dtype, other)
        layers: list[dict[str, Any]] = []
        start = time.monotonic()
        run, faulty = self.faulty(case)
        pair = (faulty, healthy) if case.side == "a" else (healthy, faulty)
        try:
            report = compare_dumps(*pair, text=False, **fault.options)
            outcome.verdict, outcome.suspects = report["verdict"], report["suspects"]
            layers = report["layers"]
            outcome.gates = {gate["name"]: gate["status"] for gate in report["gates"]}
        except ProbeError as error:
            outcome.verdict, outcome.error = "incomparable", str(error)
        outcome.seconds = time.monotonic() - start
        if not case.visible and not fault.benign:
            outcome.effect = self._effect(case, run, faulty, layers)
        if keep:
            print(*pair)
        else:
            shutil.rmtree(faulty)
        return outcome

    def _effect(self, case: Case, run: Run, faulty: Path, layers: list[dict[str, Any]]) -> float:
        """Return what the fault alone changes, in noise floors: faulty against the same code without the fault.

        The largest over the canonical tensors of the layer at fault (of all where it is in none).
        """
        floors = {f"{entry['name']}:{entry['slot']}": entry["floor"] for entry in layers if entry.get("floor")}
        again = self._of(case)
        again.model.config._attn_implementation = run.model.config._attn_implementation
        plain = dump(again, self.folder / "faulty" / str(next(self._count)))
        with open_dump(plain) as one, open_dump(faulty) as other:
            part = f"layers.{case.layer}." if case.fault.placed else ""
            gaps = [(name, gap) for name, gap in _differences(one, other, part) if name in floors]
        shutil.rmtree(plain)
        return max((gap / floors[name] for name, gap in gaps), default=0.0)


def _differences(one: Dump, other: Dump, part: str) -> Iterator[tuple[str, float]]:
    """Yield (canonical label, relative L2) of the tensors that both dumps of transformers hold."""
    for module, slot in one.tensors:
        label = f"{module.removeprefix('model.')}:{slot}"
        if part in module and (module, slot) in other.tensors:
            x, y = (np.asarray(dump.read(module, slot), np.float64) for dump in (one, other))
            norm = float(np.linalg.norm(x))
            if x.shape == y.shape and norm:
                yield label, float(np.linalg.norm(x - y)) / norm


def _sequences(texts: list[list[int]]) -> Iterator[TokenSequence]:
    for number, tokens in enumerate(texts):
        prompt = PROMPTS.get(len(tokens), len(tokens) // 2)
        yield TokenSequence(f"s{number}", list(tokens), prompt, trajectory=f"s{number}")


def cases_of(fault: Fault) -> list[Case]:
    """Return every case of a fault; its side alternates with place and dtype where it can be on either."""
    places = tuple(PLACES) if fault.placed else ("all",)
    found = []
    for turn, (place, dtype) in enumerate(itertools.product(places, fault.dtypes)):
        found.append(Case(fault, place, dtype, fault.sides[(turn // 2 + turn) % len(fault.sides)]))
    return found


def rotating(faults: tuple[Fault, ...], turn: int = 0) -> list[Case]:
    """Return one case of each fault, with place and dtype going round; every ``turn`` (0 to 5) gives others."""
    return [cases[(number + turn) % len(cases)] for number, cases in enumerate(map(cases_of, faults))]


def controls(bench: Bench) -> list[tuple[str, str, int]]:
    """Compare healthy sides in every way that a case compares a faulty one: (what, verdict, number of suspects)."""
    plain = Fault("healthy", (), (), lambda run: None)
    pairs = [(replace(plain, family=family), dtype) for family in FAMILIES for dtype in DTYPES]
    for how, texts in (("left", ""), ("decode", "short"), ("prefix", ""), ("score", "long")):
        pairs += [(replace(plain, how=how, healthy="score", texts=texts, sides="a"), dtype) for dtype in DTYPES]
    pairs += [(replace(plain, inject=with_steps(), name="own attention"), dtype) for dtype in DTYPES]
    found = []
    for fault, dtype in pairs:
        outcome = bench.outcome(Case(fault, "all", dtype, "a"))
        name = f"{fault.family}, {dtype}, {fault.how} {fault.texts}".strip()
        found.append((name, outcome.verdict, len(outcome.suspects)))
    return found
