"""Read a dump: one stage and step, however many files its writers left. Needs numpy and h5py, never torch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from probe.errors import DumpError, EmptyDumpError
from probe.store import schema
from probe.store.dtypes import stored_dtype, widen
from probe.store.parts import Part, open_part
from probe.store.schema import DRIVER, PARTIAL_SUFFIX, ModuleInfo, Sequence, TensorInfo, WeightSketch
from probe.store.sequences import merge_sequences, sequences_of
from probe.store.validate import DAMAGED, check_dtype, json_object, json_shape, reading, text_of

PIECE_BYTES = 64 << 20
"""What :meth:`Dump.iter_blocks` holds at most, unless one row is larger: a block of one huge call can be gigabytes."""


@dataclass(frozen=True)
class _Block:
    file: int
    dataset: str
    shape: tuple[int, ...]
    rows: str


def open_dump(path: str | Path, step: int | None = None) -> Dump:
    """Open the dump of one stage (``DIR/rollout``) and return a :class:`Dump`.

    ``step`` picks a training step; the first one by default. Files still named ``.partial`` (a killed run) are read as
    far as they were flushed. Raises DumpError or EmptyDumpError with one sentence.
    """
    root = Path(path)
    return open_files(root, _locate(root, step))


def open_files(root: Path, files: list[Path]) -> Dump:
    """Open the given files as one dump whose folder is ``root``; see :func:`open_dump`."""
    with contextlib.ExitStack() as stack:
        parts = []
        for file in files:
            parts.append(open_part(file))
            stack.callback(parts[-1].close)
        manifests = [part.manifest() for part in parts]
        manifest = manifests[_leading(files)]
        version = manifest.get("schema")
        if version != schema.SCHEMA_VERSION:
            raise DumpError(f"{root} has dump format {version!r}", f"this version reads {schema.SCHEMA_VERSION}")
        with reading(root):
            dump = Dump(root, manifest, parts, complete=_complete(files, manifests))
        if not dump.tensors and not len(dump.tokens):
            raise _empty(root, files)
        stack.pop_all()  # from here on the dump closes its files
    return dump


def _locate(root: Path, step: int | None) -> list[Path]:
    if not root.is_dir():
        raise DumpError(f"there is no dump at {root}", "name the folder that 'probe dump -o' wrote")
    found = [*root.glob("*/step*"), *root.glob("step*")]
    folders = sorted((p for p in found if p.name[4:].isdecimal()), key=lambda p: int(p.name[4:]))
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


def _leading(files: list[Path]) -> int:
    """Return the number of the file whose manifest counts: the driver's, which knows most, else the first."""
    return next((number for number, file in enumerate(files) if file.name.startswith(DRIVER)), 0)


def _complete(files: list[Path], manifests: list[dict[str, Any]]) -> bool:
    """Tell whether every writer closed its file and the driver's is there if any manifest expects one."""
    lacking = any(m.get("driver") for m in manifests) and not any(f.name.startswith(DRIVER) for f in files)
    return not lacking and not any(f.name.endswith(PARTIAL_SUFFIX) for f in files)


def _empty(root: Path, files: list[Path]) -> EmptyDumpError:
    if all(file.name.endswith(PARTIAL_SUFFIX) for file in files):
        return EmptyDumpError(
            f"{root} holds no tensor and no token, its run ended before anything was flushed", "run the dump again"
        )
    return EmptyDumpError(f"{root} holds no tensor and no token", "nothing was captured: run the dump again")


class Dump:
    """One stage and step of a run, read lazily: tables are in memory, tensors stay on disk until asked for."""

    def __init__(self, path: Path, manifest: dict[str, Any], parts: list[Part], *, complete: bool) -> None:
        self.path, self.manifest, self.complete = path, manifest, complete
        self._parts = parts
        self._blocks: dict[tuple[str, str], list[_Block]] = {}
        locals_ = [sequences_of(p.tables["sequences"], p.tables["tokens"], str(p.path)) for p in parts]
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
        """Return the stage: rollout, actor or reference (:data:`probe.store.schema.STAGES`)."""
        return str(self.manifest.get("stage", ""))

    @property
    def engine(self) -> str:
        """Return the name of the engine that ran the model."""
        return str(self.manifest.get("engine", {}).get("name", ""))

    def iter_blocks(self, module: str, slot: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (values [rows, *features], rows) in order, a stored block or at most 64 MiB of it at a time.

        bf16 and fp8 are widened to float32, so memory stays bounded whatever the size of the tensor.
        """
        info, blocks = self._tensor(module, slot)
        for block in blocks:
            rows = self._rows(block)
            row_bytes = math.prod(block.shape[1:]) * stored_dtype(info.dtype).carrier.itemsize
            step = max(1, PIECE_BYTES // max(row_bytes, 1))
            for start in range(0, block.shape[0], step):
                stop = min(start + step, block.shape[0])
                yield widen(self._raw(block, info.dtype, start, stop), info.dtype), rows[start:stop]

    def read(self, module: str, slot: str) -> np.ndarray:
        """Return all rows of a tensor as [rows, *features]; bf16 and fp8 widened exactly to float32."""
        return widen(self.read_raw(module, slot), self._tensor(module, slot)[0].dtype)

    def read_raw(self, module: str, slot: str) -> np.ndarray:
        """Return all rows of a tensor bit for bit in the carrier dtype (bf16 as uint16, fp8 as uint8)."""
        info, blocks = self._tensor(module, slot)
        arrays = [self._raw(block, info.dtype, 0, block.shape[0]) for block in blocks]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

    def rows(self, module: str, slot: str) -> np.ndarray:
        """Return (sequence, position, token, call) of each row of a tensor, sequence numbering :attr:`sequences`."""
        return np.concatenate([self._rows(block) for block in self._tensor(module, slot)[1]])

    def close(self) -> None:
        """Close the files."""
        for part in self._parts:
            part.close()

    def __enter__(self) -> Dump:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _tensor(self, module: str, slot: str) -> tuple[TensorInfo, list[_Block]]:
        if (module, slot) not in self.tensors:
            raise DumpError(f"{self.path} has no tensor {module}:{slot}", "see 'probe show' for what it holds")
        return self.tensors[(module, slot)], self._blocks[(module, slot)]

    def _raw(self, block: _Block, dtype: str, start: int, stop: int) -> np.ndarray:
        return self._parts[block.file].raw(block.dataset, block.shape, dtype, start, stop)

    def _rows(self, block: _Block) -> np.ndarray:
        part = self._parts[block.file]
        rows = part.rows(block.rows)
        if len(rows) != block.shape[0]:
            raise DumpError(
                f"{part.path}:{block.dataset} has {block.shape[0]} rows, /rows/{block.rows} {len(rows)}", DAMAGED
            )
        return rows

    def _tensor_table(self) -> dict[tuple[str, str], TensorInfo]:
        tensors: dict[tuple[str, str], TensorInfo] = {}
        sums: dict[tuple[str, str], list[tuple[float, int, float]]] = {}
        for number, part in enumerate(self._parts):
            for record in sorted(part.tables["index"], key=lambda r: (int(r["order"]), int(r["block"]))):
                key = (text_of(record["module"]), text_of(record["slot"]))
                where = f"{part.path}:/index {':'.join(key)}"
                shape = json_shape(record["shape"], where, rows=True)
                dtype = check_dtype(text_of(record["dtype"]), where)
                block = _Block(number, text_of(record["dataset"]), shape, text_of(record["rows"]))
                info = tensors.setdefault(key, TensorInfo(*key, dtype, shape[1:], order=int(record["order"])))
                if info.feature_shape != shape[1:] or info.dtype != dtype:
                    continue  # a tensor that changes its shape between calls has no common row: its first shape stands
                info.has_rows = text_of(record["row_axes"]) != ""
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
                path = text_of(record["path"])
                info = json_object(record["info"], f"{part.path}:/modules {path}")
                modules[path] = ModuleInfo(path, text_of(record["class"]), int(record["order"]), info)
        return modules

    def _weight_table(self) -> dict[str, WeightSketch]:
        weights = {}
        for part in self._parts:
            for record in part.tables["weights"]:
                name, dtype, alias = (text_of(record[column]) for column in ("name", "dtype", "alias"))
                shape = json_shape(record["shape"], f"{part.path}:/weights {name}")
                dataset, columns = text_of(record["dataset"]), 3 if len(shape) > 1 else 1
                rows = part.sketch(dataset, columns) if dataset else np.zeros((0, columns))
                weights[name] = WeightSketch(name, shape, dtype, rows, float(record["quad"]), alias)
        return weights

    def _fill_missing_tokens(self) -> None:
        """Rebuild the ids of sequences that no token table lists (a killed run) from the rows of their tensors."""
        lacking = [s for s in self.sequences if not len(s.tokens)]
        if not lacking:
            return
        tables = [
            part.rows(name)
            for part in self._parts
            for name in sorted({text_of(record["rows"]) for record in part.tables["index"]})
        ]
        rows = np.concatenate([np.zeros(0, schema.ROW), *tables])
        rows = rows[(rows["position"] >= 0) & (rows["token"] >= 0)]
        for sequence in lacking:
            mine = rows[rows["sequence"] == sequence.index]
            positions, first = np.unique(mine["position"], return_index=True)
            unbroken = int(np.argmin(np.append(positions, -1) == np.arange(len(positions) + 1)))
            sequence.tokens = mine["token"][first[:unbroken]].astype(np.int64)
            sequence.length = max(sequence.length, unbroken)


def _accumulate(
    info: TensorInfo, record: np.void, shape: tuple[int, ...], sums: list[tuple[float, int, float]]
) -> None:
    """Fold one block's statistics into those of its tensor."""
    info.rows += shape[0]
    info.nan += int(record["nan"])
    info.inf += int(record["inf"])
    finite = math.prod(shape) - int(record["nan"]) - int(record["inf"])
    if finite and np.isfinite(record["norm"]):
        info.min = float(np.fmin(info.min, record["min"]))
        info.max = float(np.fmax(info.max, record["max"]))
        sums.append((float(record["mean"]), finite, float(record["norm"])))
