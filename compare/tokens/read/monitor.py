"""The files of the per-token monitor: what |p - q| was of each token, step by step, without either side's log-probs."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from probe.compare.report.model import counted
from probe.compare.tokens.batch import Origin, TokenBatch, find_not_finite
from probe.compare.tokens.read.table import MAX_CELLS, MAX_TOKENS
from probe.errors import TokensError, first_line

_NAME = re.compile(r"prob_diff(?:_step_(\d+))?\.npy")
BEYOND = 1e-6
"""How far above 1 rounding in float32 may carry a difference of two probabilities."""


def is_monitor(path: Path) -> bool:
    """Tell whether a path is a monitor's folder, or one of its prob_diff files."""
    return (
        any(map(_NAME.fullmatch, (p.name for p in path.iterdir())))
        if path.is_dir()
        else bool(_NAME.fullmatch(path.name))
    )


def read_monitor(path: Path) -> TokenBatch:
    """Return the tokens of a folder of prob_diff[_step_N].npy and prob_mask[_step_N].npy, or of one such pair.

    The files are [sequences, width], float32 and bool. The batch has no log-probs. A prob_diff without its mask (the
    run was writing it) is left out and noted.
    """
    found = sorted(path.iterdir() if path.is_dir() else [path], key=lambda p: p.name)
    steps = sorted((_step(file), file) for file in found if _NAME.fullmatch(file.name))
    notes, parts, cells = [], [], 0
    for step, file in steps:
        mask_file = file.with_name(file.name.replace("prob_diff", "prob_mask"))
        if not mask_file.is_file():
            notes.append(f"{file.name} has no {mask_file.name} beside it and is left out")
            continue
        gap, mask = _load(file), _load(mask_file)
        if gap.shape != mask.shape or gap.dtype.kind != "f" or mask.dtype.kind not in "bu":
            said = f"{file} ({gap.dtype} {list(gap.shape)}) and {mask_file.name} ({mask.dtype} {list(mask.shape)})"
            raise TokensError(f"{said} are not one step's", "they must be float and bool of one shape")
        cells += gap.size
        if cells > MAX_CELLS:
            raise TokensError(f"{path} holds more than {MAX_CELLS} cells", "name the prob_diff file of one step")
        parts.append((step, gap, np.asarray(mask, bool)))
    if sum(int(mask.sum()) for _, _, mask in parts) > MAX_TOKENS:
        raise TokensError(f"{path} holds more than {MAX_TOKENS} tokens", "name the prob_diff file of one step")
    if not parts:
        raise TokensError(f"{path} holds no prob_diff with its prob_mask", "copy both files of a step")
    return _batch(path, parts, notes)


def _step(file: Path) -> int:
    found = _NAME.fullmatch(file.name)
    return int(found[1]) if found and found[1] else -1


def _load(file: Path) -> np.ndarray:
    try:
        values = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise TokensError(f"{file} cannot be read as an npy file ({first_line(error)})", "copy it again") from None
    if values.ndim != 2:
        raise TokensError(f"{file} has the shape {list(values.shape)}", "the monitor writes [sequences, tokens]")
    return np.asarray(values)


def _batch(path: Path, parts: list[tuple[int, np.ndarray, np.ndarray]], notes: list[str]) -> TokenBatch:
    sequence, position, gaps, steps, valid = [], [], [], [], []
    labels: list[str] = []
    for step, gap, mask in parts:
        row, place = np.nonzero(mask)
        sequence.append(row + len(labels))
        position.append(place)
        gaps.append(gap[row, place].astype(np.float64))
        labels += [f"step {step} s{n}" if len(parts) > 1 and step >= 0 else f"s{n}" for n in range(len(gap))]
        steps.append(np.full(len(gap), step))
        valid.append(mask.sum(axis=1))
    owner, where, values = np.concatenate(sequence), np.concatenate(position), np.concatenate(gaps)
    finite = np.isfinite(values)
    if finite.any() and not -BEYOND <= values[finite].min() <= values[finite].max() <= 1 + BEYOND:
        worst = float(values[finite][np.abs(values[finite] - 0.5).argmax()])
        raise TokensError(f"{path} holds a difference of {worst:.3g}", "those of probabilities lie in 0 to 1")
    origin = Origin(str(path), "monitor", "prob_diff")
    return TokenBatch(
        sequence=owner[finite].astype(np.int64),
        position=where[finite].astype(np.int64),
        token=np.full(int(finite.sum()), -1, np.int64),
        prob_diff=values[finite],
        a=None,
        b=None,
        labels=labels,
        step=np.concatenate(steps).astype(np.int64),
        start=np.zeros(len(labels), np.int64),
        valid=np.concatenate(valid).astype(np.int64),
        ids=[np.zeros(0, np.int64)] * len(labels),
        width=max(gap.shape[1] for _, gap, _ in parts),
        origins=(origin, origin),
        not_finite=find_not_finite("unknown", values, owner, where, labels),
        notes=[*notes, f"{path} holds {counted(len(parts), 'step')} of probability differences: no log-probs"],
    )
