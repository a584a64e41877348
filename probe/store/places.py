"""Where each file of a dump stands among the ranks: which hold other features, which other rows, which are lost."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probe.errors import DumpError
from probe.store.schema import AXES, DRIVER
from probe.store.validate import DAMAGED

_WORDS = {"tp": "tensor-parallel", "pp": "pipeline-parallel", "cp": "context-parallel", "ep": "expert-parallel"}
_RANK = re.compile(r"rank([0-9]+)(-[0-9]+)?$")


@dataclass(frozen=True)
class Place:
    """Where one file's rank stands.

    ``tp``: its tensor-parallel number. ``group``: what tells it from ranks that hold other rows, so that files of one
    group differ in ``tp`` only. ``dp``: its data-parallel number, None where the file does not say. ``label``: its name
    in sentences; ``pp``: its pipeline stage, where the file says it.
    """

    tp: int
    group: tuple[Any, ...]
    dp: int | None
    label: str
    pp: int | None = None


def places_of(files: Sequence[Path], manifests: Sequence[Mapping[str, Any]]) -> list[Place]:
    """Return the place of each file.

    A file that does not state its coordinates is a group of its own, and so is another one of the same coordinates (a
    second replica of the engine). Expert parallelism makes no groups: its ranks are those of the other axes.
    """
    sizes, seen, places = topology_of(manifests), Counter[tuple[int, ...]](), []
    for name, manifest in zip(_names(files), manifests):
        at = manifest.get("coordinates")
        if not at or any(type(at.get(axis)) is not int for axis in AXES):
            places.append(Place(0, (name,), None, name))
            continue
        key = tuple(at[axis] for axis in AXES if axis != "ep")
        shown = [axis for axis in AXES if sizes[axis] != 1] if not seen[key] else []
        label = f"rank {', '.join(f'{axis} {at[axis]}' for axis in shown)}" if shown else name
        places.append(Place(at["tp"], (at["pp"], at["cp"], at["dp"], seen[key]), at["dp"], label, at["pp"]))
        seen[key] += 1
    return places


def _names(files: Sequence[Path]) -> list[str]:
    """Return one name per file; files of one name, from several nodes' folders, are numbered."""
    times, names = Counter[str](), []
    for file in files:
        name = file.name.partition(".")[0]
        times[name] += 1
        names.append(name if times[name] == 1 else f"{name}#{times[name]}")
    return names


def topology_of(manifests: Sequence[Mapping[str, Any]]) -> dict[str, int | None]:
    """Return the parallel sizes that the ranks' files state, None where none does; raise DumpError when two disagree.

    A file without coordinates (the driver's) is no rank's: its topology counts only where no rank states its own.
    """
    sizes: dict[str, int | None] = dict.fromkeys(AXES)
    for manifest in [manifest for manifest in manifests if manifest.get("coordinates")] or manifests:
        for axis in AXES:
            stated = (manifest.get("topology") or {}).get(axis)
            if stated is not None and sizes[axis] not in (None, stated):
                problem = f"the files of one dump state both {sizes[axis]} and {stated} ranks along {axis}"
                raise DumpError(problem, "keep the files of different runs in different folders")
            sizes[axis] = stated if stated is not None else sizes[axis]
    return sizes


def missing_ranks(files: Sequence[Path], manifests: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one phrase per axis along which a rank's file should be there, because another shares its model with it.

    Data-parallel ranks are not expected: one may have had nothing to store.
    """
    ranks = [m.get("coordinates") for f, m in zip(files, manifests) if not f.name.startswith(DRIVER)]
    sizes, known = topology_of(manifests), [at for at in ranks if at]
    lost = []
    for axis, word in _WORDS.items():
        there = {at.get(axis) for at in known}
        absent = absent_ranks(there, sizes[axis] or 0) if known else ""
        if absent:
            which = f"files of {word} {absent} are" if absent.startswith("ranks") else f"file of {word} {absent} is"
            lost.append(f"the {which} missing")
    return lost


def lists_batch(files: Sequence[Path], manifests: Sequence[Mapping[str, Any]], listing: Sequence[int]) -> bool:
    """Tell whether every process's file is there, and each that is ``listing`` tokens says that they are all it had.

    Which process wrote a file is in its name (``rank3.h5``, ``ENGINE-HOST-PID-rank3.h5``).
    """
    ranks = {found[1] for file in files if (found := _RANK.search(file.name.partition(".")[0]))}
    whole = [manifest.get("whole_batch") is True for manifest, lists in zip(manifests, listing) if lists]
    worlds = [size for manifest in manifests if type(size := manifest.get("world_size")) is int]
    return bool(whole) and all(whole) and len(ranks) >= max(worlds, default=1)


def absent_ranks(there: Collection[int | None], size: int) -> str:
    """Return in words which of ``size`` numbers are not there, at most three of them; empty where all are there."""
    absent = list(itertools.islice((number for number in range(size) if number not in there), 4))
    if not absent:
        return ""
    more = " and more" if len(absent) > 3 else ""
    return f"rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent[:3]))}{more} of {size}"


def check_place(manifest: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a manifest, unless no run can have its topology or coordinates."""
    topology = manifest.get("topology") or {}
    for axis in (*AXES, "vpp"):
        size = topology.get(axis)
        if size is not None and (type(size) is not int or not 1 <= size <= 1 << 20):
            raise DumpError(f"{where} states {size!r:.40} ranks along {axis}", DAMAGED)
    at = manifest.get("coordinates")
    if at is None:
        return manifest
    if not isinstance(at, dict):
        raise DumpError(f"{where} holds 'coordinates' as something else than an object", DAMAGED)
    for axis in AXES:
        number, size = at.get(axis), topology.get(axis)
        if number is not None and (type(number) is not int or not 0 <= number < (size or 1 << 20)):
            of = f" of {size}" if size else ""
            raise DumpError(f"{where} is of {axis} rank {number!r:.40}{of}, which no rank is", DAMAGED)
    return manifest
