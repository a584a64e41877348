"""Read a dump: one stage and step, however many files its writers left. Needs numpy and h5py, never torch."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from probe.errors import DumpError, EmptyDumpError
from probe.store import schema
from probe.store.budget import budget_of
from probe.store.dtypes import widen
from probe.store.parameters import ParameterStore
from probe.store.parts import Part, open_part
from probe.store.places import Place, lists_batch, missing_ranks, places_of, topology_of
from probe.store.schema import DRIVER, PARTIAL_SUFFIX, STAGES, ModuleInfo, Sequence, WeightSketch
from probe.store.sequences import merge_sequences, name_apart, sequences_of
from probe.store.sketches import JoinedSketch, check_sketch, join_sketches
from probe.store.tensors import Replica, TensorStore
from probe.store.validate import DAMAGED, json_object, json_shape, reading, text_of

_STEP = re.compile(r"step[0-9]+")
_LATER_FILE = re.compile(r"-[0-9]+$")
"""The end of the name of a process's second or later file of one step."""


def open_dump(path: str | Path, step: int | None = None) -> Dump:
    """Open the dump of one stage (``DIR/rollout``), or of one step of it, and return a :class:`Dump`.

    ``path`` may name several folders with commas between (``A1,A2``): the files that the nodes of one run wrote of one
    stage and step. ``step`` picks a training step; the first one (of all folders) by default, and ``Dump.unread`` then
    lists the folders of the others. Files still named ``.partial`` (a killed run) are read as far as they were flushed.
    Raises DumpError or EmptyDumpError with one sentence.
    """
    roots = roots_of(path)
    held = [_steps(root) for root in roots]
    _require_one_stage(roots, held)
    chosen = _step(roots, held, step)
    files = [file for steps in held for file in steps[chosen]]
    if step is not None:
        path = ",".join(str(steps[chosen][0].parent) for steps in held)
    dump = open_files(Path(path), files)
    if step is None:
        opened = {file.parent for file in files}
        dump.unread = [folder for root in roots for folder in _step_folders(root) if folder not in opened]
    return dump


def roots_of(path: str | Path) -> tuple[Path, ...]:
    """Return the folders that ``path`` names: itself, or where nothing has that name those between its commas."""
    if "," not in str(path) or Path(path).exists():
        return (Path(path),)
    names = [name for name in str(path).split(",") if name]
    if len({os.path.realpath(name) for name in names}) < len(names):
        raise DumpError(f"{path} names a folder twice", "name each node's folder once")
    return tuple(map(Path, names)) or (Path(path),)


def open_files(root: Path, files: list[Path]) -> Dump:
    """Open the given files as one dump whose folder is ``root``; see :func:`open_dump`."""
    with contextlib.ExitStack() as stack:
        parts = []
        for file in files:
            parts.append(open_part(file))
            stack.callback(parts[-1].close)
        manifests = [part.manifest() for part in parts]
        version = manifests[_leading(files)].get("schema")
        if version != schema.SCHEMA_VERSION:
            raise DumpError(f"{root} has dump format {version!r}", f"this version reads {schema.SCHEMA_VERSION}")
        with reading(root):
            dump = Dump(root, manifests, parts)
        if not dump.tensors and not len(dump.tokens):
            raise _empty(root, files)
        stack.pop_all()  # from here on the dump closes its files
    return dump


def _steps(root: Path) -> dict[int, list[Path]]:
    """Return step -> files of a folder that holds one stage; a folder that is no step's counts as step -1."""
    if not root.is_dir():
        raise DumpError(f"there is no dump at {root}", "name the folder that 'probe dump -o' wrote")
    folders = _step_folders(root) or [root]  # which may itself be the folder of a step
    stages = sorted({folder.parent.name for folder in folders})
    if len(stages) > 1:
        fix = "name the folder of one stage, or give it to 'probe compare' alone"
        raise DumpError(f"{root} holds the stages {', '.join(stages)}", fix)
    held = {step_of(folder): step_files(folder) for folder in folders}
    held = {number: files for number, files in held.items() if files}
    if held:
        return held
    nested = [p.name for p in root.iterdir() if p.is_dir() and any(p.glob("*/step*"))]
    if nested:
        raise DumpError(f"{root} is not one dump but holds {', '.join(sorted(nested))}", "name one of them")
    raise EmptyDumpError(f"{root} holds no dump file (STAGE/stepN/*.h5)", "name the folder that 'probe dump -o' wrote")


def step_files(folder: Path) -> list[Path]:
    """Return the files of a dump that lie in a step's folder, complete or not."""
    return sorted([*folder.glob("*.h5"), *folder.glob("*.h5" + PARTIAL_SUFFIX)])


def _require_one_stage(roots: tuple[Path, ...], held: list[dict[int, list[Path]]]) -> None:
    stages = [next(iter(steps.values()))[0].parent.parent.name for steps in held]
    other = next((n for n, stage in enumerate(stages) if {stage, stages[0]} <= set(STAGES) and stage != stages[0]), 0)
    if other:
        said = f"{roots[0]} holds {stages[0]} and {roots[other]} holds {stages[other]}"
        raise DumpError(said, "name folders of one stage together, or each job's own folder")


def _step(roots: tuple[Path, ...], held: list[dict[int, list[Path]]], wanted: int | None) -> int:
    """Return the step to open: the one asked for, else the first that every folder holds."""
    if wanted is not None:
        lacking = next((number for number, steps in enumerate(held) if wanted not in steps), None)
        if lacking is not None:
            raise EmptyDumpError(
                f"{roots[lacking]} holds no step {wanted}", f"it holds {_steps_in_words(held[lacking])}"
            )
        return wanted
    common = set.intersection(*map(set, held))
    if not common:
        each = ", ".join(f"{root} ({_steps_in_words(steps)})" for root, steps in zip(roots, held))
        raise DumpError(f"no step is in all of {each}", "name folders that hold the same steps")
    return min(common)


def _steps_in_words(steps: Iterable[int]) -> str:
    known = sorted(step for step in steps if step >= 0)
    return f"step{'s' if len(known) > 1 else ''} {', '.join(map(str, known))}" if known else "no numbered step"


def step_of(folder: Path) -> int:
    """Return the number of a step's folder as writers name it (``step7``, never ``step007``), -1 for any other."""
    name = folder.name[4:]
    return int(name) if _STEP.fullmatch(folder.name) and str(int(name)) == name else -1


def steps_in(stage: Path) -> list[Path]:
    """Return the step folders that lie directly in a folder, in order."""
    return sorted((p for p in stage.glob("step*") if step_of(p) >= 0), key=step_of)


def _step_folders(root: Path) -> list[Path]:
    """Return the folders of the steps of a dump in order, in ``root`` or one folder below."""
    nested = [p for p in root.iterdir() if p.is_dir() and p.name != "chosen"] if root.is_dir() else []  # notes of a job
    return sorted([*(step for folder in nested for step in steps_in(folder)), *steps_in(root)], key=step_of)


def _before_updates(parts: list[Part]) -> list[Part]:
    """Return the files whose weight sketches count.

    An engine that receives weights within a step goes on in another file (``NAME-2``), for sequences of later weight
    versions: its sketches are of an update, no copy that differs. Of the files of one process those of its first
    version count; another process, of whatever coordinates and versions, is a copy that must agree.
    """
    versions = [int(p.tables["sequences"]["weight_version"].min(initial=1 << 30)) for p in parts]
    writers = [(p.path.parent, _LATER_FILE.sub("", p.path.name.partition(".")[0])) for p in parts]
    lowest = {writer: min(v for v, own in zip(versions, writers) if own == writer) for writer in writers}
    return [
        part
        for part, version, writer in zip(parts, versions, writers)
        if version == lowest[writer] or not len(part.tables["sequences"])
    ]


def _leading(files: list[Path]) -> int:
    """Return the number of the file whose manifest counts: the driver's, which knows most, else the first."""
    return next((number for number, file in enumerate(files) if file.name.startswith(DRIVER)), 0)


def _lost(files: list[Path], manifests: list[dict[str, Any]]) -> list[str]:
    """Return one phrase per file that is missing or unfinished."""
    lost = missing_ranks(files, manifests)
    if any(m.get("driver") for m in manifests) and not any(f.name.startswith(DRIVER) for f in files):
        lost.append(f"{DRIVER}.h5 is missing")
    if any(f.name.endswith(PARTIAL_SUFFIX) for f in files):
        lost.append("its run was killed or is still going")
    return lost


def _empty(root: Path, files: list[Path]) -> EmptyDumpError:
    if all(file.name.endswith(PARTIAL_SUFFIX) for file in files):
        return EmptyDumpError(
            f"{root} holds no tensor and no token, its run ended before anything was flushed", "run the dump again"
        )
    return EmptyDumpError(f"{root} holds no tensor and no token", "nothing was captured: run the dump again")


class Dump:
    """One stage and step of a run, read lazily: tables are in memory, tensors stay on disk until asked for.

    What the ranks of a run stored of one tensor or parameter is joined. ``lost`` says in a phrase each which files are
    missing or unfinished; ``complete`` is False where there is any. ``whole_batch``: a trainer's ranks are all here and
    list all sequences of its batch. ``unread`` has the folders of the steps that were not opened. ``joined_weights``
    has, per parameter, its shards and what is wrong with them; ``weights`` the whole ones. ``parameters`` lists those
    whose values are stored (``PROBE_WEIGHTS=layers``). ``budget`` is what a job's files say that they were told to
    leave out (:func:`probe.store.budget.budget_of`).
    """

    def __init__(self, path: Path, manifests: list[dict[str, Any]], parts: list[Part]) -> None:
        files = [part.path for part in parts]
        self.path, self.manifest = path, manifests[_leading(files)]
        self.budget, self._manifests = budget_of(manifests), manifests
        self.lost = _lost(files, manifests)
        self.complete = not self.lost
        self.whole_batch = self.complete and lists_batch(files, manifests, [len(p.tables["tokens"]) for p in parts])
        self.unread: list[Path] = []
        self._parts, self._places = parts, places_of(files, manifests)
        self._tp = topology_of(manifests)["tp"]
        self.sequences: list[Sequence] = self._sequence_list()
        self.tokens = self._token_table()
        self._tensors = TensorStore(parts, self._places, self._tp, topology_of(manifests)["ep"])
        self.tensors = self._tensors.infos
        self.modules = self._module_table()
        self.joined_weights = self._weight_table()
        self.weights = {name: joined.whole for name, joined in self.joined_weights.items()}
        self._parameters = ParameterStore(parts, self._places, self._tp)
        self.parameters = self._parameters.infos
        self._fill_missing_tokens()

    @property
    def roots(self) -> tuple[Path, ...]:
        """Return the folders of the dump: :attr:`path`, or those that it names with commas between."""
        return roots_of(self.path)

    @property
    def files(self) -> list[Path]:
        """Return the files that were opened."""
        return [part.path for part in self._parts]

    @property
    def stage(self) -> str:
        """Return the stage: rollout, actor, logprob, ... (:data:`probe.store.schema.STAGES`)."""
        return str(self.manifest.get("stage", ""))

    @property
    def tasks(self) -> frozenset[str]:
        """Return what the files were told to record (``tensor``, ``statistics``, ``tokens``), as far as they say."""
        return frozenset(str(manifest["task"]) for manifest in self._manifests if manifest.get("task"))

    @property
    def prompts(self) -> frozenset[str]:
        """Return how the rows of prompts came (``slice``, ``shadow``), as far as the files say."""
        return frozenset(str(manifest["prompts"]) for manifest in self._manifests if manifest.get("prompts"))

    @property
    def reduced(self) -> bool:
        """Tell whether statistics stand in place of the values of some tensors (task ``statistics``)."""
        return any(info.reduced for info in self.tensors.values())

    @property
    def engine(self) -> str:
        """Return the name of the engine that ran the model."""
        return str(self.manifest.get("engine", {}).get("name", ""))

    def iter_blocks(self, module: str, slot: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (values [rows, *features], rows) in order, a stored block or at most 64 MiB of it at a time.

        bf16 and fp8 are widened to float32, so memory stays bounded whatever the size of the tensor.
        """
        key = self._values_key(module, slot)
        for raw, rows in self._tensors.pieces(key):
            yield widen(raw, self.tensors[key].dtype), rows

    def read(self, module: str, slot: str) -> np.ndarray:
        """Return all rows of a tensor as [rows, *features]; bf16 and fp8 widened exactly to float32."""
        return widen(self.read_raw(module, slot), self.tensors[module, slot].dtype)

    def read_raw(self, module: str, slot: str) -> np.ndarray:
        """Return all rows of a tensor bit for bit in the carrier dtype (bf16 as uint16, fp8 as uint8)."""
        return self._tensors.raw(self._values_key(module, slot))

    def read_shards(
        self, module: str, slot: str, rows: np.ndarray | None = None, *, raw: bool = False
    ) -> list[np.ndarray]:
        """Return all rows as one array per tensor-parallel rank where ranks hold columns, else as the only entry.

        ``rows``: only these (int64 numbers, in their order); ``raw``: bit for bit as :meth:`read_raw`. Concatenated
        along the first feature axis they are :meth:`read`. The terms of a sum are added in float32 (or float64) and
        rounded to the tensor's dtype.
        """
        key = self._values_key(module, slot)
        shards = self._tensors.shards(key, rows)
        return shards if raw else [widen(shard, self.tensors[key].dtype) for shard in shards]

    def read_statistics(self, module: str, slot: str, rows: np.ndarray | None = None) -> list[np.ndarray]:
        """Return the statistics of the rows of a reduced tensor, [rows, WIDTH] per tensor-parallel rank that shares it,
        in the dtype of their accumulation (:mod:`probe.store.statistics`); ``rows``: only these, in their order."""
        return self._tensors.statistics(self._key(module, slot), rows)

    def rows(self, module: str, slot: str) -> np.ndarray:
        """Return (sequence, position, token, call) of each row of a tensor, sequence numbering :attr:`sequences`."""
        return self._tensors.rows(self._key(module, slot))

    def replicas(self, module: str, slot: str) -> list[Replica]:
        """Return which rows other ranks stored again, with the checksums of what they hold."""
        return self._tensors.replicas(self._key(module, slot))

    def row_checksums(self, module: str, slot: str, at: np.ndarray) -> np.ndarray:
        """Return the checksums (uint64) of rows ``at`` of a tensor: what its :meth:`replicas` are compared with."""
        return self._tensors.checksums(self._key(module, slot), at)

    def parameter_values(self, name: str) -> np.ndarray | None:
        """Return the values of a parameter by its native name, bf16 and fp8 widened exactly to float32.

        None where they are not stored (``PROBE_WEIGHTS=layers``), or not all of them.
        """
        return self._parameters.values(name)

    def parameter_shards(self, name: str) -> list[np.ndarray] | None:
        """Return a parameter's values as one array per tensor-parallel rank where ranks share it, else as one."""
        return self._parameters.shards(name)

    def close(self) -> None:
        """Close the files."""
        for part in self._parts:
            part.close()

    def __enter__(self) -> Dump:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _key(self, module: str, slot: str) -> tuple[str, str]:
        if (module, slot) not in self.tensors:
            raise DumpError(f"{self.path} has no tensor {module}:{slot}", "see 'probe show' for what it holds")
        return module, slot

    def _values_key(self, module: str, slot: str) -> tuple[str, str]:
        key = self._key(module, slot)
        if self.tensors[key].reduced:
            held = f"{self.path} holds statistics of the rows of {module}:{slot}, not its values (task statistics)"
            raise DumpError(held, "record it with task tensor")
        return key

    def _sequence_list(self) -> list[Sequence]:
        """Read and merge the sequences of all files, and let the files number their rows by the merged list."""
        found = [sequences_of(p.tables, str(p.path)) for p in self._parts]
        if len(self._parts) > 1 and not any(part.path.name.startswith(DRIVER) for part in self._parts):
            name_apart(found, self._parts, self._places)
        merged, maps = merge_sequences(found)
        for part, mapping in zip(self._parts, maps):
            part.to_global = mapping
        return merged

    def _token_table(self) -> np.ndarray:
        tables = []
        for part in self._parts:
            table = part.tables["tokens"].copy()
            if len(table):
                table["sequence"] = part.to_global[table["sequence"]]
            tables.append(table)
        merged = np.concatenate(tables) if tables else np.zeros(0, schema.TOKEN)
        return merged[np.lexsort((merged["position"], merged["sequence"]))]

    def _module_table(self) -> dict[str, ModuleInfo]:
        modules = {}
        for part in self._parts:
            for record in part.tables["modules"]:
                path = text_of(record["path"])
                info = json_object(record["info"], f"{part.path}:/modules {path}")
                if not isinstance(info.get("parameters") or {}, dict):
                    raise DumpError(f"{part.path}:/modules {path} holds parameters as no object", DAMAGED)
                modules[path] = ModuleInfo(path, text_of(record["class"]), int(record["order"]), info)
        return modules

    def _weight_table(self) -> dict[str, JoinedSketch]:
        found: dict[str, list[tuple[Place, WeightSketch]]] = {}
        first = _before_updates(self._parts)
        for part, place in zip(self._parts, self._places):
            for record in part.tables["weights"] if part in first else ():
                name, dtype, alias = (text_of(record[column]) for column in ("name", "dtype", "alias"))
                where = f"{part.path}:/weights {name}"
                shape = json_shape(record["shape"], where)
                dataset, columns = text_of(record["dataset"]), 3 if len(shape) > 1 else 1
                rows = part.sketch(dataset, columns) if dataset else np.zeros((0, columns))
                lies = (int(record[column]) for column in ("axis", "start", "whole"))
                sketch = WeightSketch(name, shape, dtype, rows, float(record["quad"]), alias, *lies)
                found.setdefault(name, []).append((place, check_sketch(sketch, where)))
        return {name: join_sketches(entries, self._tp, str(self.path)) for name, entries in found.items()}

    def _fill_missing_tokens(self) -> None:
        """Rebuild the ids of sequences that no token table lists (a killed run) from the rows of their tensors."""
        lacking = [s for s in self.sequences if not len(s.tokens)]
        if not lacking:
            return
        tables = [rows for _, rows in self._tensors.row_tables()]
        rows = np.concatenate([np.zeros(0, schema.ROW), *tables])
        rows = rows[(rows["position"] >= 0) & (rows["token"] >= 0)]
        for sequence in lacking:
            mine = rows[rows["sequence"] == sequence.index]
            positions, first = np.unique(mine["position"], return_index=True)
            unbroken = int(np.argmin(np.append(positions, -1) == np.arange(len(positions) + 1)))
            sequence.tokens = mine["token"][first[:unbroken]].astype(np.int64)
            sequence.length = max(sequence.length, unbroken)
