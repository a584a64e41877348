"""Version 1 of the dump format: the tables of a file and their columns (docs/format.md explains each)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from probe.settings import STAGES as STAGES
from probe.store.dtypes import TEXT

SCHEMA_VERSION = 1
PARTIAL_SUFFIX = ".partial"
MANIFEST_NAME = "manifest.json"
DRIVER = "driver"
"""Name of the file of the process that knows the sequences' identity and log-probs."""

ROW = np.dtype([("sequence", "<i4"), ("position", "<i4"), ("token", "<i4"), ("call", "<i4")])
INDEX = np.dtype(
    [
        ("module", TEXT),
        ("slot", TEXT),
        ("block", "<i4"),
        ("order", "<i4"),
        ("dtype", TEXT),
        ("shape", TEXT),
        ("row_axes", TEXT),
        ("shard", TEXT),
        ("rows", TEXT),
        ("min", "<f8"),
        ("max", "<f8"),
        ("mean", "<f8"),
        ("norm", "<f8"),
        ("nan", "<i8"),
        ("inf", "<i8"),
        ("checksum", TEXT),
        ("dataset", TEXT),
    ]
)
SEQUENCE = np.dtype(
    [
        ("id", "<i4"),
        ("trajectory", TEXT),
        ("request_id", TEXT),
        ("uid", TEXT),
        ("sample", "<i4"),
        ("prompt_len", "<i4"),
        ("length", "<i4"),
        ("token_hash", TEXT),
        ("weight_version", "<i4"),
        ("cached", "<i4"),
    ]
)
TOKEN = np.dtype(
    [
        ("sequence", "<i4"),
        ("position", "<i4"),
        ("token", "<i4"),
        ("response", "?"),
        ("logprob", "<f8"),
        ("logprob_recomputed", "<f8"),
    ]
)
MODULE = np.dtype([("path", TEXT), ("class", TEXT), ("order", "<i4"), ("info", TEXT)])
WEIGHT = np.dtype(
    [
        ("name", TEXT),
        ("shape", TEXT),
        ("dtype", TEXT),
        ("axis", "<i4"),
        ("start", "<i4"),
        ("whole", "<i4"),
        ("quad", "<f8"),
        ("alias", TEXT),
        ("dataset", TEXT),
    ]
)
PARAMETER = np.dtype(
    [
        ("name", TEXT),
        ("shape", TEXT),
        ("dtype", TEXT),
        ("axis", "<i4"),
        ("start", "<i4"),
        ("whole", "<i4"),
        ("weight_version", "<i4"),
        ("dataset", TEXT),
    ]
)
VERSION = np.dtype([("sequence", "<i4"), ("first", "<i4"), ("last", "<i4"), ("trained", "<i4")])
STATISTICS = np.dtype([("module", TEXT), ("slot", TEXT), ("dtype", TEXT), ("shape", TEXT)])
"""The tensors of whose rows statistics are stored (:mod:`probe.store.statistics`): dtype and shape of such a row."""
TABLES = {
    **{"index": INDEX, "sequences": SEQUENCE, "tokens": TOKEN, "modules": MODULE, "weights": WEIGHT},
    **{"parameters": PARAMETER, "versions": VERSION, "statistics": STATISTICS},
}
OPTIONAL_TABLES = frozenset({"parameters", "versions", "statistics"})
"""Tables that files of earlier writers lack: read as empty."""
RESERVED = frozenset({*TABLES, "rows", "manifest", "sketches", "values"})

AXES = ("tp", "pp", "cp", "ep", "dp")
"""Ways in which ranks share a model: tensor, pipeline, context, expert and data parallelism."""
WHOLE, COLUMNS, PARTIAL, REPLICATED, CHECKSUM = "", "columns", "partial", "replicated", "checksum"
SHARDS = (WHOLE, COLUMNS, PARTIAL, REPLICATED, CHECKSUM)
"""How a tensor lies over the tensor-parallel ranks: not declared, part of the features, a term of a sum, the same on
all (stored by rank 0), and what the other ranks store of the same: a checksum per row."""

CELLS = ("moe", "cells")
"""The tensor, int32 [rows], that numbers the tokens which an expert-parallel rank gave to the experts in each call."""
FOREIGN = -2
"""``sequence`` of a row of the token that global rank 0 gave to an expert elsewhere, -3 of rank 1 and so on down;
``position`` is then the token's number in that rank's :data:`CELLS` of the same call."""

RL = "rl"
"""The module whose tensors, float [rows], are what a trainer knows of each response token, one slot per column."""
RL_COLUMNS = ("advantages", "returns", "values", "old_values", "ref_log_probs", "new_log_probs")
"""Slots of :data:`RL`: critic, reference model, and the actor's log-prob after an update. A row's (sequence, position)
is the token that the value is of, not the row that scores it."""
RL_KEPT = ("response_mask", "rollout_log_probs", "old_log_probs")
"""Further slots of :data:`RL`, as the trainer had them in the batch of its update: which response tokens count (0: a
tool's), and the log-probs that the update took for the rollout's and for those before it."""

_segment_keys = itertools.count()


@dataclass(frozen=True)
class RowSegment:
    """The rows of one call, in the order in which every tensor of that call is gathered.

    ``rows`` is an array of :data:`ROW`; ``key`` is unique in the process, so that tensors of the same calls share one
    row table in the file.
    """

    rows: np.ndarray
    key: int = field(default_factory=lambda: next(_segment_keys))


@dataclass(frozen=True)
class Versions:
    """What a trainer declares of a sequence's weights, by its own count of weight syncs; -1 where it does not say.

    ``first`` and ``last``: the versions that generated its first and its last token; ``trained``: the version that the
    recorded pass ran with.
    """

    first: int
    last: int
    trained: int


@dataclass
class Sequence:
    """One prompt with its response.

    ``prompt_len`` and ``length`` count tokens (prompt, prompt + response); ``tokens`` is int64 [length], or shorter
    while a sequence is still being generated. ``weight_version`` counts weight updates that the engine received;
    ``cached`` leading tokens came from the engine's prefix cache, so that their rows never ran. ``declared``: what a
    trainer says of the weights, None elsewhere.
    """

    index: int
    uid: str
    request_id: str = ""
    trajectory: str = ""
    sample: int = 0
    prompt_len: int = 0
    length: int = 0
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    weight_version: int = 0
    cached: int = 0
    declared: Versions | None = None


@dataclass(frozen=True)
class ModuleInfo:
    """One module of the model: native path, class name, first execution order, and scalars that numbers cannot show."""

    path: str
    cls: str
    order: int
    info: dict[str, Any]


@dataclass(frozen=True)
class WeightSketch:
    """A small fingerprint of one parameter that says how two copies differ, without storing the weight.

    ``rows`` is float64: for a matrix [out, 3] holding, per output row, W @ r (r uniform in (-1, 1) from a hash of the
    global input column), the row sum and the row sum of squares; for a vector [n, 1] holding its values; for experts
    [E, out, in] those of each expert in turn, [E * out, 3]. ``quad`` is r' W r for a square matrix, else NaN. ``alias``
    names the parameter that shares this one's storage.

    ``axis`` says how tensor-parallel ranks share the parameter: -1 not at all, 0 by output rows, 1 by input columns.
    Within one such rank FSDP may have left this process a slice of the first axis: ``shape`` is the slice's, ``start``
    its first entry and ``whole`` the entries of the whole axis (``shape[0]``, the default, where nothing is sliced).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    rows: np.ndarray
    quad: float = float("nan")
    alias: str = ""
    axis: int = -1
    start: int = 0
    whole: int = -1

    def __post_init__(self) -> None:
        if self.whole < 0:
            object.__setattr__(self, "whole", self.shape[0] if self.shape else 1)


@dataclass(frozen=True)
class StoredParameter:
    """The values of a parameter, or of a rank's part of it, as the model held them before the engine repacked them.

    ``shape`` is that of the stored array, ``dtype`` as in the index; ``axis``, ``start`` and ``whole`` say as in
    :class:`WeightSketch` how ranks share the parameter. ``weight_version`` counts the updates received before.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    axis: int = -1
    start: int = 0
    whole: int = -1
    weight_version: int = 0


_OVER_RANKS = {
    WHOLE: "on {} ranks",
    COLUMNS: "columns over {} ranks",
    PARTIAL: "sum over {} ranks",
    REPLICATED: "copies on {} ranks",
    CHECKSUM: "checksums on {} ranks",
}


@dataclass
class TensorInfo:
    """All blocks of one (module, slot): what a reader can know before reading any of them.

    ``rows`` counts stored rows; ``feature_shape`` is the shape of one row. ``has_rows`` is False where no axis of the
    tensor runs along tokens: such a tensor has one row per call. ``norm`` is the L2 norm over all blocks. ``shard``
    says how ranks share it (:data:`SHARDS`) and ``ranks`` how many: tensor-parallel ones for columns and terms of a
    sum, else all that stored any of it. The other fields are of the whole tensor. Statistics are of the stored blocks,
    NaN for the terms of a sum. ``left_out`` counts rows that could not be made whole, ``lacking`` says why; a tensor
    without any whole row cannot be read. ``reduced``: only statistics of its rows are stored, no values.
    """

    module: str
    slot: str
    dtype: str
    feature_shape: tuple[int, ...]
    rows: int = 0
    order: int = 0
    has_rows: bool = True
    shard: str = ""
    ranks: int = 1
    left_out: int = 0
    lacking: str = ""
    reduced: bool = False
    min: float = float("nan")
    max: float = float("nan")
    mean: float = float("nan")
    norm: float = float("nan")
    nan: int = 0
    inf: int = 0

    @property
    def over_ranks(self) -> str:
        """Return in words how ranks share the tensor, empty for one that a single rank stored."""
        return _OVER_RANKS[self.shard].format(self.ranks) if self.ranks > 1 else ""
