"""Read a dump: one stage and step, however many files its writers left. Needs numpy and h5py, never torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from probe.errors import DumpError, EmptyDumpError
from probe.store import schema
from probe.store.dtypes import stored_dtype, widen
from probe.store.schema import DRIVER, PARTIAL_SUFFIX, ModuleInfo, Sequence, TensorInfo, WeightSketch
from probe.store.sequences import merge_sequences, sequences_of
from probe.store.validate import check_table, check_tensor, open_file, safe_dataset


@dataclass(frozen=True)
class _Block:
    file: int
    dataset: str
    shape: tuple[int, ...]
    rows: str


@dataclass
class _Part:
    """One file of the dump, opened, with its tables in memory."""

    file: h5py.File
    path: Path
    tables: dict[str, np.ndarray]
    row_tables: dict[str, np.ndarray] = field(default_factory=dict)
    to_global: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))

    def rows(self, name: str) -> np.ndarray:
        """Return row table ``name`` with sequence numbers of the whole dump (-1 stays: no sequence)."""
        if name not in self.row_tables:
            table = safe_dataset(self.file, f"/rows/{name}")
            check_table(table, schema.ROW)
            rows = table[...]
            if len(rows) and int(rows["sequence"].max()) >= len(self.to_global):
                raise DumpError(f"{self.path}:/rows/{name} names a sequence that the file does not list", "dump again")
            known = rows["sequence"] >= 0
            rows["sequence"][known] = self.to_global[rows["sequence"][known]]
            self.row_tables[name] = rows
        return self.row_tables[name]


def open_dump(path: str | Path, step: int | None = None) -> Dump:
    """Open the dump of one stage (``DIR/rollout``) and return a :class:`Dump`.

    ``step`` picks a training step; the first one by default. Files still named ``.partial`` (a killed run) are read as
    far as they were flushed. Raises DumpError or EmptyDumpError with one sentence.
    """
    root = Path(path)
    return open_files(root, _locate(root, step))


def open_files(root: Path, files: list[Path]) -> Dump:
    """Open the given files as one dump whose folder is ``root``; see :func:`open_dump`."""
    parts = [_open_part(file) for file in files]
    manifest = _manifest(parts)
    version = manifest.get("schema")
    if version != schema.SCHEMA_VERSION:
        raise DumpError(f"{root} has dump format {version!r}", f"this version reads {schema.SCHEMA_VERSION}")
    dump = Dump(root, manifest, parts, complete=not any(f.name.endswith(PARTIAL_SUFFIX) for f in files))
    if not dump.tensors and not len(dump.tokens):
        raise EmptyDumpError(f"{root} holds no tensor and no token", "nothing was captured: run the dump again")
    return dump


def _locate(root: Path, step: int | None) -> list[Path]:
    if not root.is_dir():
        raise DumpError(f"there is no dump at {root}", "name the folder that 'probe dump -o' wrote")
    found = [*root.glob("*/step*"), *root.glob("step*")]
    folders = sorted((p for p in found if p.name[4:].isdigit()), key=lambda p: int(p.name[4:]))
    stages = sorted({folder.parent.name for folder in folders})
    if len(stages) > 1:
        raise DumpError(f"{root} holds the stages {', '.join(stages)}", "name the folder of one stage")
    if step is not None:
        folders = [f for f in folders if f.name == f"step{step}"]
    for folder in folders:
        files = sorted([*folder.glob("*.h5"), *folder.glob("*.h5" + PARTIAL_SUFFIX)])
        if files:
            return files
    nested = [p.name for p in root.iterdir() if p.is_dir() and any(p.glob("*/step*"))]
    if nested:
        raise DumpError(f"{root} is not one dump but holds {', '.join(sorted(nested))}", "name one of them")
    raise EmptyDumpError(f"{root} holds no dump file (STAGE/stepN/*.h5)", "name the folder that 'probe dump -o' wrote")


def _open_part(path: Path) -> _Part:
    file = open_file(path)
    tables = {}
    for name, dtype in schema.TABLES.items():
        if name not in file:
            raise DumpError(f"{path} has no /{name} table", "it is not a probe dump file")
        table = safe_dataset(file, f"/{name}")
        check_table(table, dtype)
        tables[name] = table[...]
    return _Part(file, path, tables)


def _manifest(parts: list[_Part]) -> dict[str, Any]:
    """Return the manifest of the driver's file, which is written last and knows most, else that of the first file."""
    part = next((p for p in parts if p.path.name.startswith(DRIVER)), parts[0])
    try:
        manifest = json.loads(safe_dataset(part.file, "/manifest")[()])
    except (ValueError, TypeError) as error:
        raise DumpError(f"{part.path}:/manifest is not valid JSON ({error})", "the dump is damaged") from None
    if not isinstance(manifest, dict):
        raise DumpError(f"{part.path}:/manifest does not hold a JSON object", "the dump is damaged")
    return manifest


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


class Dump:
    """One stage and step of a run, read lazily: tables are in memory, tensors stay on disk until asked for."""

    def __init__(self, path: Path, manifest: dict[str, Any], parts: list[_Part], *, complete: bool) -> None:
        self.path, self.manifest, self.complete = path, manifest, complete
        self._parts = parts
        self._blocks: dict[tuple[str, str], list[_Block]] = {}
        locals_ = [sequences_of(part.tables["sequences"], part.tables["tokens"]) for part in parts]
        self.sequences: list[Sequence]
        self.sequences, maps = merge_sequences(locals_)
        for part, mapping in zip(parts, maps):
            part.to_global = mapping
        self.tokens = self._token_table()
        self.tensors = self._tensor_table()
        self.modules = self._module_table()
        self.weights = self._weight_table()
        self._fill_missing_tokens()

    @property
    def stage(self) -> str:
        """Return the stage: rollout, actor, reference or critic."""
        return str(self.manifest.get("stage", ""))

    @property
    def engine(self) -> str:
        """Return the name of the engine that ran the model."""
        return str(self.manifest.get("engine", {}).get("name", ""))

    def iter_blocks(self, module: str, slot: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (values [rows, *features], rows) one stored block at a time; bf16 and fp8 widened to float32."""
        info = self.tensors[(module, slot)]
        for block in self._blocks[(module, slot)]:
            yield widen(self._raw(block, info.dtype), info.dtype), self._parts[block.file].rows(block.rows)

    def read(self, module: str, slot: str) -> np.ndarray:
        """Return all rows of a tensor as [rows, *features]; bf16 and fp8 widened exactly to float32."""
        return widen(self.read_raw(module, slot), self.tensors[(module, slot)].dtype)

    def read_raw(self, module: str, slot: str) -> np.ndarray:
        """Return all rows of a tensor bit for bit in the carrier dtype (bf16 as uint16, fp8 as uint8)."""
        if (module, slot) not in self.tensors:
            raise DumpError(f"{self.path} has no tensor {module}:{slot}", "see 'probe show' for what it holds")
        dtype = self.tensors[(module, slot)].dtype
        return np.concatenate([self._raw(block, dtype) for block in self._blocks[(module, slot)]])

    def rows(self, module: str, slot: str) -> np.ndarray:
        """Return (sequence, position, token, call) of each row of a tensor, sequence numbering :attr:`sequences`."""
        return np.concatenate([self._parts[b.file].rows(b.rows) for b in self._blocks[(module, slot)]])

    def close(self) -> None:
        """Close the files."""
        for part in self._parts:
            part.file.close()

    def __enter__(self) -> Dump:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _raw(self, block: _Block, dtype: str) -> np.ndarray:
        dataset = safe_dataset(self._parts[block.file].file, block.dataset)
        check_tensor(dataset, block.shape, dtype)
        out = np.empty(dataset.shape, stored_dtype(dtype).carrier)
        if out.size:
            dataset.id.read(h5py.h5s.ALL, h5py.h5s.ALL, out, mtype=dataset.id.get_type())
        return out.reshape(block.shape)

    def _tensor_table(self) -> dict[tuple[str, str], TensorInfo]:
        tensors: dict[tuple[str, str], TensorInfo] = {}
        sums: dict[tuple[str, str], list[tuple[float, int, float]]] = {}
        for number, part in enumerate(self._parts):
            for record in sorted(part.tables["index"], key=lambda r: (int(r["order"]), int(r["block"]))):
                key = (_text(record["module"]), _text(record["slot"]))
                shape = tuple(json.loads(_text(record["shape"])))
                block = _Block(number, _text(record["dataset"]), shape, _text(record["rows"]))
                info = tensors.setdefault(
                    key, TensorInfo(*key, _text(record["dtype"]), shape[1:], order=int(record["order"]))
                )
                if info.feature_shape != shape[1:] or info.dtype != _text(record["dtype"]):
                    continue  # a tensor that changes its shape between calls has no common row: its first shape stands
                info.has_rows = _text(record["row_axes"]) != ""
                self._blocks.setdefault(key, []).append(block)
                _accumulate(info, record, shape, sums.setdefault(key, []))
        for key, info in tensors.items():
            count = sum(n for _, n, _ in sums[key])
            info.mean = sum(m * n for m, n, _ in sums[key]) / count if count else float("nan")
            info.norm = float(np.sqrt(sum(norm**2 for *_, norm in sums[key])))
        return tensors

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
                path = _text(record["path"])
                info = json.loads(_text(record["info"]))
                modules[path] = ModuleInfo(path, _text(record["class"]), int(record["order"]), info)
        return modules

    def _weight_table(self) -> dict[str, WeightSketch]:
        weights = {}
        for part in self._parts:
            for record in part.tables["weights"]:
                name, dataset = _text(record["name"]), _text(record["dataset"])
                rows = safe_dataset(part.file, dataset)[...] if dataset else np.zeros((0, 3))
                shape = tuple(json.loads(_text(record["shape"])))
                alias = _text(record["alias"])
                weights[name] = WeightSketch(name, shape, _text(record["dtype"]), rows, float(record["quad"]), alias)
        return weights

    def _fill_missing_tokens(self) -> None:
        """Rebuild the ids of sequences that no token table lists (a killed run) from the rows of their tensors."""
        lacking = [s for s in self.sequences if not len(s.tokens)]
        if not lacking:
            return
        seen: dict[int, dict[int, int]] = {s.index: {} for s in lacking}
        for part in self._parts:
            for name in sorted({_text(record["rows"]) for record in part.tables["index"]}):
                for sequence, position, token, _ in part.rows(name).tolist():
                    if sequence in seen and position >= 0:
                        seen[sequence][position] = token
        for sequence in lacking:
            found = seen[sequence.index]
            length = next((i for i in range(len(found) + 1) if i not in found), 0)
            sequence.tokens = np.array([found[i] for i in range(length)], np.int64)
            sequence.length = max(sequence.length, length)


def _accumulate(
    info: TensorInfo, record: np.void, shape: tuple[int, ...], sums: list[tuple[float, int, float]]
) -> None:
    """Fold one block's statistics into those of its tensor."""
    info.rows += shape[0]
    info.nan += int(record["nan"])
    info.inf += int(record["inf"])
    finite = int(np.prod(shape, dtype=np.int64)) - int(record["nan"]) - int(record["inf"])
    if finite and np.isfinite(record["norm"]):
        info.min = float(np.fmin(info.min, record["min"]))
        info.max = float(np.fmax(info.max, record["max"]))
        sums.append((float(record["mean"]), finite, float(record["norm"])))
