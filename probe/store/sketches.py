"""Sketch parameters, and join the sketches of several ranks: slices of FSDP, tensor-parallel (TP) shards, copies."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from probe.errors import DumpError
from probe.store.places import Place, absent_ranks
from probe.store.schema import WeightSketch
from probe.store.validate import DAMAGED

SAME = 1e-9
"""Relative difference of two ranks' float64 sketches of one weight: order of summation on different devices."""


def column_vector(columns: int, start: int = 0) -> np.ndarray:
    """Return r for global input columns ``start .. start + columns``: float64 in (-1, 1), the same on every rank.

    Each entry is the splitmix64 hash of its column number (Steele, Lea and Flood, 2014) scaled to (-1, 1). Random
    values rather than signs: with signs, half of all swaps of two columns would go unseen.
    """
    z = (np.arange(start, start + columns, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) / 2.0**52 - 1.0 + 2.0**-53


def sketch_rows(matrix: np.ndarray) -> np.ndarray:
    """Return the sketch of a matrix [rows, in]: float64 [rows, 3], the product with r, the sum and the sum of squares.

    What :func:`probe.hooks.weights.sketch` computes of a tensor, in numpy; ``matrix`` is held in float64 at once.
    """
    wide = np.asarray(matrix, np.float64)
    return np.stack([wide @ column_vector(wide.shape[1]), wide.sum(1), np.square(wide).sum(1)], axis=1)


@dataclass
class JoinedSketch:
    """One parameter over all ranks.

    ``whole``: its sketch, shards concatenated or added; ``shards``: one per TP rank where ``axis`` is 0 or 1, else one.
    ``gap`` says which shard is in no file (``whole`` is then what is there), ``conflict`` which ranks hold copies that
    differ; both are empty in a healthy dump.
    """

    whole: WeightSketch
    shards: list[WeightSketch]
    gap: str = ""
    conflict: str = ""


def join_sketches(found: list[tuple[Place, WeightSketch]], tp: int | None, where: str) -> JoinedSketch:
    """Join what every file says of one parameter. Raises DumpError when the files contradict each other."""
    first = found[0][1]
    found = sorted((entry for entry in found if len(entry[1].rows)), key=lambda entry: entry[0].tp)
    if not found:  # an alias on every rank, or nowhere sketched
        return JoinedSketch(first, [first])
    first = found[0][1]
    kinds = {(sketch.axis, sketch.dtype, len(sketch.shape)) for _, sketch in found}
    if len(kinds) > 1:
        raise DumpError(f"the files of {where} disagree about how ranks share {first.name}", DAMAGED)
    if first.axis < 0:
        return _join_slices(found, where)
    numbers = sorted({place.tp for place, _ in found})
    absent = absent_ranks(numbers, tp or 1 + numbers[-1])
    gap = f"the shard of tensor-parallel {absent} is in no file" if absent else ""
    shards, conflict = [], ""
    for number in numbers:
        joined = _join_slices([entry for entry in found if entry[0].tp == number], where)
        gap, conflict = gap or joined.gap, conflict or joined.conflict
        shards.append(joined.whole)
    return JoinedSketch(_join_tp(shards, where), shards, gap, conflict)


def _join_slices(found: list[tuple[Place, WeightSketch]], where: str) -> JoinedSketch:
    """Concatenate the slices of the first axis; those of one start are copies and must be equal."""
    slices: dict[int, tuple[Place, WeightSketch]] = {}
    conflict = ""
    for place, sketch in found:
        known = slices.setdefault(sketch.start, (place, sketch))
        if known[1] is not sketch and not conflict and not _same(known[1], sketch):
            conflict = f"{known[0].label} and {place.label} hold different copies of it"
    ordered = [slices[start][1] for start in sorted(slices)]
    whole, gaps, stop = ordered[0].whole, [], 0
    for sketch in ordered:
        if sketch.whole != whole or sketch.start < stop or sketch.shape[1:] != ordered[0].shape[1:]:
            raise DumpError(f"the slices of {sketch.name} in {where} do not fit together", DAMAGED)
        if sketch.start > stop:
            gaps.append((stop, sketch.start))
        stop = sketch.start + _leading(sketch)
    if stop < whole:
        gaps.append((stop, whole))
    if stop > whole:
        raise DumpError(f"the slices of {ordered[0].name} in {where} do not fit together", DAMAGED)
    gap = f"rows {gaps[0][0]} to {gaps[0][1] - 1} of {whole} are in no file" if gaps else ""
    if len(ordered) == 1 and not gaps:
        return JoinedSketch(ordered[0], ordered, gap, conflict)
    rows = np.concatenate([sketch.rows for sketch in ordered])
    shape = (sum(map(_leading, ordered)), *ordered[0].shape[1:])
    joined = replace(ordered[0], shape=shape, rows=rows, quad=float("nan"), start=0, whole=shape[0])
    return JoinedSketch(joined, [joined], gap, conflict)


def _join_tp(shards: list[WeightSketch], where: str) -> WeightSketch:
    """Return the whole of TP shards: output rows one after another, or sketches of input columns added."""
    first = shards[0]
    if len(shards) == 1:
        return first
    shape, tables = list(first.shape), [by_output(shard) for shard in shards]
    axis = first.axis if len(shape) < 3 else 1 + first.axis  # [out, in], or [experts, out, in]
    others = [[*shard.shape[:axis], *shard.shape[axis + 1 :]] for shard in shards]
    if axis >= len(shape) or any(other != others[0] for other in others):
        raise DumpError(f"the tensor-parallel shards of {first.name} in {where} do not fit together", DAMAGED)
    shape[axis] = sum(shard.shape[axis] for shard in shards)
    rows = np.concatenate(tables, axis=-2) if first.axis == 0 else np.sum(tables, axis=0)
    rows = rows.reshape(-1, rows.shape[-1])
    return replace(first, shape=tuple(shape), rows=rows, quad=float("nan"), whole=shape[0])


def by_output(sketch: WeightSketch) -> np.ndarray:
    """Return a sketch's table with an axis for experts: [experts, out, 3] for three axes, else as it is."""
    experts = len(sketch.shape) == 3 and len(sketch.rows) == sketch.shape[0] * sketch.shape[1]
    return sketch.rows.reshape(*sketch.shape[:2], -1) if experts else sketch.rows


def _leading(sketch: WeightSketch) -> int:
    return sketch.shape[0] if sketch.shape else 1


def _same(a: WeightSketch, b: WeightSketch) -> bool:
    scale = float(np.abs(a.rows).max(initial=0.0))
    return a.shape == b.shape and np.allclose(a.rows, b.rows, rtol=SAME, atol=SAME * scale, equal_nan=True)


def check_sketch(sketch: WeightSketch, where: str) -> WeightSketch:
    """Return a sketch read from a file, unless no parameter can be shared in the way that it states."""
    leading, axes = _leading(sketch), len(sketch.shape)
    if not -1 <= sketch.axis < min(max(axes, 1), 2) or not 0 <= sketch.start <= sketch.whole - leading:
        stated = f"axis {sketch.axis}, rows {sketch.start} to {sketch.start + leading} of {sketch.whole}"
        raise DumpError(f"{where} lies as no parameter does ({stated})", DAMAGED)
    return sketch
