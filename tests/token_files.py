"""Batches of response tokens as files of every format, and what a reader must make of them, token by token."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from probe.compare.tokens.batch import TokenBatch
from probe.compare.tokens.read import read_sources

SCRATCH = tempfile.TemporaryDirectory(prefix="probe-tokens-")
A2 = np.array([[-1.0, -2.0, 0.0], [-3.0, 0.0, 0.0]])
"""Log-probs of two sequences, padded with zeros."""

PADDING = (0.0, -1.0, float("nan"), float("inf"), 151643.0)
"""What trainers leave in padded log-probs: verl's 0 and -1, a pad id, and what must never leak."""


@dataclass
class Row:
    """One sequence as a trainer knows it."""

    uid: str
    sample: int
    step: int
    prompt: list[int]
    response: list[int]
    mask: list[int]
    a: list[float]
    b: list[float]
    advantages: list[float] = field(default_factory=list)


@st.composite
def rows(draw: st.DrawFn, finite: bool = False) -> list[Row]:
    """Draw sequences of different lengths with holes in their masks, some all masked or empty."""
    count = draw(st.integers(1, 5))
    score = st.floats(-30, -(2.0**-10), width=32)
    odd = score if finite else st.one_of(score, score, score, st.sampled_from([float("nan"), float("-inf")]))
    found = []
    for number in range(count):
        length = draw(st.integers(0 if number else 1, 6))
        ids = st.lists(st.integers(0, 99), min_size=length, max_size=length)
        found.append(
            Row(
                uid=f"u{number // 2}",
                sample=number % 2,
                step=number // 3,
                prompt=draw(st.lists(st.integers(0, 99), min_size=1, max_size=4)),
                response=draw(ids),
                mask=draw(st.lists(st.integers(0, 1), min_size=length, max_size=length)),
                a=draw(st.lists(odd, min_size=length, max_size=length)),
                b=draw(st.lists(odd, min_size=length, max_size=length)),
                advantages=draw(st.lists(score, min_size=length, max_size=length)),
            )
        )
    return found


NAMES = {"a": "rollout_log_probs", "b": "old_log_probs"}


def write_npz(path: Path, batch: list[Row], sides: str = "ab", names: dict[str, str] = NAMES, **more: Any) -> Path:
    """Write padded arrays: prompts to the left, responses to the right, of any width beyond what is needed."""
    padding, extra = more.pop("padding", 0.0), more.pop("extra", 0)
    width = max(len(row.response) for row in batch) + extra
    depth = max(len(row.prompt) for row in batch)
    fields = {names[side]: _right([getattr(row, side) for row in batch], width, padding, np.float32) for side in sides}
    ids = _right([row.response for row in batch], width, 151643, np.int64)
    prompts = np.array([[151643] * (depth - len(row.prompt)) + row.prompt for row in batch], np.int64)
    fields |= {
        "responses": ids,
        "prompts": prompts,
        "input_ids": np.concatenate([prompts, ids], axis=1),
        "attention_mask": np.array(
            [
                [0] * (depth - len(r.prompt))
                + [1] * (len(r.prompt) + len(r.response))
                + [0] * (width - len(r.response))
                for r in batch
            ]
        ),
        "response_mask": _right([row.mask for row in batch], width, 0, np.int64),
        "uid": np.array([row.uid for row in batch]),
        "sample": np.array([row.sample for row in batch]),
        "step": np.array([row.step for row in batch]),
        "advantages": _right([row.advantages for row in batch], width, padding, np.float32),
    }
    np.savez(path, **{name: value for name, value in (fields | more).items() if value is not None})
    return path


def _right(values: list[list[Any]], width: int, padding: Any, dtype: Any) -> np.ndarray:
    return np.array([row + [padding] * (width - len(row)) for row in values], dtype).reshape(len(values), width)


def as_objects(batch: list[Row], sides: str = "ab", names: dict[str, str] = NAMES) -> list[dict[str, Any]]:
    """Return one object per sequence, its lists as long as the response."""
    return [
        {
            **{names[side]: getattr(row, side) for side in sides},
            "responses": row.response,
            "prompts": row.prompt,
            "response_mask": row.mask,
            "uid": row.uid,
            "sample": row.sample,
            "step": row.step,
            "advantages": row.advantages,
        }
        for row in batch
    ]


def write_jsonl(path: Path, objects: list[dict[str, Any]]) -> Path:
    """Write one JSON object per line."""
    path.write_text("".join(json.dumps(entry) + "\n" for entry in objects))
    return path


def write_parquet(path: Path, objects: list[dict[str, Any]]) -> Path:
    """Write one row per sequence."""
    import pyarrow as arrow
    from pyarrow import parquet

    parquet.write_table(arrow.Table.from_pylist(objects), path)
    return path


def tokens_of(batch: list[Row]) -> list[tuple[int, int, int, float, float, float]]:
    """Return (sequence, position, token, a, b, advantage) of the tokens inside the mask, finite on both sides."""
    return [
        (number, place, row.response[place], row.a[place], row.b[place], row.advantages[place])
        for number, row in enumerate(batch)
        for place in range(len(row.response))
        if row.mask[place] and np.isfinite([row.a[place], row.b[place]]).all()
    ]


def read(*paths: Path, **options: Any) -> TokenBatch:
    """Return the tokens of one or two sources."""
    return read_sources(list(paths), **options)[0]


def folder() -> Path:
    """Return an empty folder for one example of hypothesis."""
    return Path(tempfile.mkdtemp(dir=SCRATCH.name))


def arrays(path: Path, **fields: Any) -> Path:
    """Write an npz file of these arrays."""
    np.savez(path, **{name: np.asarray(value) for name, value in fields.items()})
    return path


def two_tokens(**changes: Any) -> dict[str, Any]:
    """Return one sequence of two tokens with both sides."""
    return {"rollout_log_probs": [-1.0, -2.0], "old_log_probs": [-1.0, -2.0], **changes}
