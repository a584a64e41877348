"""Read the parameter values that the ranks of a run stored (``PROBE_WEIGHTS=layers``), shard by shard or whole."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from probe.errors import DumpError
from probe.store.dtypes import widen
from probe.store.parts import Part
from probe.store.places import Place
from probe.store.schema import StoredParameter
from probe.store.validate import DAMAGED, check_dtype, json_shape, text_of


@dataclass(frozen=True)
class _Piece:
    """One file's part of a parameter."""

    part: Part
    tp: int
    about: StoredParameter
    dataset: str


class ParameterStore:
    """The stored parameters of a dump; ``infos`` has what is known of each before any is read."""

    def __init__(self, parts: list[Part], places: list[Place], tp: int | None) -> None:
        self._tp = tp
        self._pieces: dict[str, dict[tuple[int, int], _Piece]] = {}
        for part, place in zip(parts, places):
            for record in part.tables["parameters"]:
                piece = _piece(part, place, record)
                self._pieces.setdefault(piece.about.name, {}).setdefault((place.tp, piece.about.start), piece)
        self.infos = {name: _whole(pieces) for name, pieces in self._pieces.items()}

    def shards(self, name: str) -> list[np.ndarray] | None:
        """Return a parameter as one array per tensor-parallel rank that shares it, else as the only entry.

        bf16 and fp8 are widened exactly to float32. None for one that is not stored, or of which a part is in no file.
        """
        pieces = self._pieces.get(name)
        if not pieces:
            return None
        numbers = sorted({tp for tp, _ in pieces})
        if self.infos[name].axis < 0:
            numbers = numbers[:1]
        elif numbers != list(range(self._tp or 1 + numbers[-1])):
            return None
        joined = [self._joined([pieces[key] for key in sorted(pieces) if key[0] == tp]) for tp in numbers]
        return None if any(shard is None for shard in joined) else [shard for shard in joined if shard is not None]

    def values(self, name: str) -> np.ndarray | None:
        """Return a whole parameter; of a fused projection, rank after rank."""
        shards, info = self.shards(name), self.infos.get(name)
        if shards is None or info is None or len(shards) == 1:
            return shards[0] if shards else None
        return np.concatenate(shards, axis=info.axis + max(0, len(info.shape) - 2))

    def _joined(self, slices: list[_Piece]) -> np.ndarray | None:
        """Return the slices of one rank one after the other, None where one is in no file."""
        arrays, stop = [], 0
        for piece in slices:
            if piece.about.start != stop:
                return None
            values = piece.part.raw(piece.dataset, piece.about.shape, piece.about.dtype, 0, _length(piece.about.shape))
            arrays.append(widen(values, piece.about.dtype))
            stop += _length(piece.about.shape)
        if stop != slices[0].about.whole:
            return None
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _piece(part: Part, place: Place, record: np.void) -> _Piece:
    name, dtype = text_of(record["name"]), text_of(record["dtype"])
    where = f"{part.path}:/parameters {name}"
    shape = json_shape(record["shape"], where)
    axis, start, whole, version = (int(record[key]) for key in ("axis", "start", "whole", "weight_version"))
    if not -1 <= axis < min(max(len(shape), 1), 2) or not 0 <= start <= whole - _length(shape):
        raise DumpError(f"{where} lies as no parameter does (axis {axis}, start {start} of {whole})", DAMAGED)
    about = StoredParameter(name, shape or (1,), check_dtype(dtype, where), axis, start, whole, version)
    return _Piece(part, place.tp, about, text_of(record["dataset"]))


def _whole(pieces: dict[tuple[int, int], _Piece]) -> StoredParameter:
    """Return what is known of the parameter: the first piece's facts."""
    return next(iter(pieces.values())).about


def _length(shape: tuple[int, ...]) -> int:
    return shape[0] if shape else 1
