"""Read a batch of verl's: who its rows are, where a packed forward has them, and what the trainer knows of each token.

A batch is a TensorDict whose ``input_ids`` is a nested (jagged) tensor, one row per sequence without padding (verl >=
0.7), or a padded tensor beside ``attention_mask``. Names, not row numbers, say who a row is: verl reorders rows
(``balance_batch``, dynamic batches, shuffled mini-batches) and repeats a prompt's uid for each of its responses.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from probe.hooks.engines.batches import Cells
from probe.hooks.jobs.selection import hash_of
from probe.hooks.jobs.verl_versions import UNKNOWN, VERSIONS
from probe.hooks.rows import Announced

RL_KEYS = {
    "advantages": "advantages",
    "returns": "returns",
    "values": "old_values",
    "ref_log_prob": "ref_log_probs",
    "response_mask": "response_mask",
    "rollout_log_probs": "rollout_log_probs",
    "old_log_probs": "old_log_probs",
}
"""verl's key in the batch of an update -> column of a dump; verl's ``values`` are the critic's when the batch was
made."""


PADDING = re.compile(r"pad[0-9a-f]{32}")
"""uid of the rows that verl's v1 trainers add so that ranks get equally many (``verl.trainer.ppo.padding_utils``)."""


class Twins:
    """Tells rows of equal uid and ids apart by a number, in the order in which the micro-batches of a pass show them.

    They are the same computation, so that it does not matter which is which. A model's chunks each see every
    micro-batch: what goes beyond the ``whole`` batch's rows is numbered from the first on again.
    """

    def __init__(self, whole: Rows | None = None) -> None:
        self._most = Counter(whole.keys) if whole is not None else Counter[str]()
        self._met = Counter[str]()

    def names(self, keys: list[str]) -> list[str]:
        """Return a name for each of the next rows."""
        found = []
        for key in keys:
            number = self._met[key] % self._most[key] if self._most[key] else self._met[key]
            self._met[key] += 1
            found.append(f"{key}.{number + 1}" if number else key)
        return found


@dataclass(frozen=True)
class Rows:
    """The sequences of a batch: a name that no other sequence of the job has, all ids, and the prompt's length.

    ``keys`` are the names without what tells rows of equal uid and ids apart. ``versions``: of the weights that made
    the first and the last token, as verl declares them.
    """

    names: list[str]
    tokens: list[np.ndarray]
    prompt_lens: list[int]
    keys: list[str]
    versions: list[tuple[int, int]]

    def numbered(self, twins: Twins) -> Rows:
        """Return the rows of a micro-batch under the names that they have in the whole batch."""
        return replace(self, names=twins.names(self.keys))

    def announced(self) -> list[Announced]:
        """Return the rows as adapters are told of them."""
        return [
            Announced(name, prompt_len=length, length=len(tokens), tokens=tokens.tolist())
            for name, tokens, length in zip(self.names, self.tokens, self.prompt_lens)
        ]


def read_rows(batch: Any) -> Rows | None:
    """Return the sequences of a batch, None where it holds no token ids.

    A name is the row's ``uid`` and a hash of its ids: samples of one prompt share the uid, ranks and passes see them in
    other orders. Rows of equal uid and ids get a number too (:class:`Twins`). A row that is verl's own padding has no
    response: no rollout ever had it.
    """
    tokens = _tokens(batch)
    if tokens is None:
        return None
    uids = _uids(batch, len(tokens))
    keys = [
        f"{uid}.{hash_of(ids) & 0xFFFFFFFF:08x}" if uid else f"{hash_of(ids):016x}" for uid, ids in zip(uids, tokens)
    ]
    lengths = [len(ids) for ids in tokens]
    prompts = [
        length if PADDING.fullmatch(uid) else prompt
        for uid, prompt, length in zip(uids, _prompt_lens(batch, lengths), lengths)
    ]
    return Rows(Twins().names(keys), tokens, prompts, keys, _versions(batch, len(tokens)))


def temperature_of(batch: Any) -> float | None:
    """Return the temperature by which verl divides the logits of a batch, None where its rows differ in it."""
    value = _plain(batch.get("temperature", None))
    if value is None:
        return 1.0
    values = np.unique(np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value, np.float64))
    return float(values[0]) if len(values) == 1 else None


def sequence_logprobs(log_probs: torch.Tensor, rows: Rows) -> list[np.ndarray]:
    """Return float64 [tokens] per sequence, NaN at its first token, from verl's nested log-probs.

    verl's value at an index scores the next token; its last value of a sequence scores none and is left out.
    """
    values = _host(log_probs.values() if log_probs.is_nested else log_probs.reshape(-1))
    ends = np.cumsum([len(ids) for ids in rows.tokens])
    if len(values) != ends[-1]:
        return [np.full(len(ids), np.nan) for ids in rows.tokens]
    starts = ends - [len(ids) for ids in rows.tokens]
    return [np.append(np.nan, values[start : end - 1]) for start, end in zip(starts, ends)]


def trainer_columns(batch: Any, rows: Rows) -> dict[str, list[np.ndarray]]:
    """Return, per column of :data:`RL_KEYS` that the batch has, float64 [response] of each sequence."""
    lengths = [len(ids) - prompt for ids, prompt in zip(rows.tokens, rows.prompt_lens)]
    found = {}
    for key, column in RL_KEYS.items():
        value = batch.get(key, None)
        if isinstance(value, torch.Tensor):
            pieces = _pieces(value, lengths)
            if pieces is not None:
                found[column] = pieces
    return found


def packed_cells(rows: Rows, *, padding: int = 0, parts: int = 1, part: int = 0) -> Cells:
    """Return which cell of a packed forward [1, tokens] is which token of which row.

    ``padding`` cells are appended, more where ``parts`` ranks of sequence parallelism share the tokens evenly; the
    cells are then those of one ``part``.
    """
    owner = np.repeat(np.arange(len(rows.tokens)), [len(ids) for ids in rows.tokens])
    position = np.concatenate([np.arange(len(ids)) for ids in rows.tokens])
    share = -(-(len(owner) + padding) // parts)
    owner, position = (np.append(x, np.full(share * parts - len(x), -1)) for x in (owner, position))
    mine = slice(share * part, share * (part + 1))
    return Cells(owner[None, mine].astype(np.int64), position[None, mine].astype(np.int64), len(rows.tokens))


# -- keys of a batch ---------------------------------------------------------------------------------------------------


def _tokens(batch: Any) -> list[np.ndarray] | None:
    ids = batch.get("input_ids", None)
    if not isinstance(ids, torch.Tensor):
        return None
    if ids.is_nested:
        values, offsets = _host(ids.values(), np.int64), _host(ids.offsets(), np.int64)
        return [values[start:end] for start, end in pairwise(offsets)]
    mask, rows = batch.get("attention_mask", None), _host(ids, np.int64)
    if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape:
        return list(rows)
    return [row[real] for row, real in zip(rows, _host(mask, np.int64) != 0)]


def _uids(batch: Any, count: int) -> list[str]:
    value = _plain(batch.get("uid", None))
    if isinstance(value, (list, tuple, np.ndarray)) and len(value) == count:
        return [str(uid) for uid in value]
    return [str(value)] * count if isinstance(value, str) else [""] * count


def _versions(batch: Any, count: int) -> list[tuple[int, int]]:
    """Return the first and the last version of each row's weights (:data:`VERSIONS`), UNKNOWN where verl has none.

    Batches of a DataProto have keys of these names, those of the transfer queue have them in each row's extra fields.
    """
    extras = _per_row(batch, "extra_fields", count)
    named = [_per_row(batch, name, count) for name in VERSIONS]
    found = []
    first: Any
    last: Any
    for extra, own in zip(extras, zip(*named)):
        first, last = map(extra.get, VERSIONS) if None in own and isinstance(extra, dict) else own
        known = first is not None and last is not None
        found.append((int(first), int(last)) if known else (UNKNOWN, UNKNOWN))
    return found


def _per_row(batch: Any, name: str, count: int) -> list[Any]:
    """Return a batch's entry of a name that is no tensor, per row; None for each where there is no such list."""
    value = _plain(batch.get(name, None))
    return list(value) if isinstance(value, (list, tuple, np.ndarray)) and len(value) == count else [None] * count


def _plain(value: Any) -> Any:
    """Return what a TensorDict's entry that is no tensor holds: a list per row, or one value for all."""
    if value is None or isinstance(value, torch.Tensor):
        return value
    return value.tolist() if hasattr(value, "tolist") else getattr(value, "data", value)


def _prompt_lens(batch: Any, lengths: list[int]) -> list[int]:
    """Return the prompts' lengths from the prompts, else from the response's mask, else from the loss's first token."""
    prompts, mask = batch.get("prompts", None), batch.get("attention_mask", None)
    if isinstance(prompts, torch.Tensor) and prompts.is_nested:
        return _widths(prompts)
    if isinstance(prompts, torch.Tensor) and isinstance(mask, torch.Tensor) and not mask.is_nested:
        return [int(n) for n in _host(mask[:, : prompts.shape[1]].sum(1), np.int64)]
    for key in ("response_mask", "loss_mask"):
        given = batch.get(key, None)
        if not isinstance(given, torch.Tensor) or not given.is_nested:
            continue
        widths = _widths(given)
        if widths != lengths:
            return [length - width for length, width in zip(lengths, widths)]
        rows = [_host(row) != 0 for row in given.unbind()]
        return [int(row.argmax()) if row.any() else len(row) for row in rows]
    return lengths


def _widths(nested: torch.Tensor) -> list[int]:
    return [int(n) for n in np.diff(_host(nested.offsets(), np.int64))]


def _pieces(value: torch.Tensor, lengths: list[int]) -> list[np.ndarray] | None:
    """Return each row's first ``lengths`` values, None for a tensor that is not of response tokens."""
    if value.is_nested:
        flat, ends = _host(value.values()), np.cumsum(_widths(value))
        rows = [flat[end - width : end] for end, width in zip(ends, _widths(value))]
    elif value.dim() == 2:
        rows = list(_host(value))
    else:
        return None
    if len(rows) != len(lengths) or any(row.ndim != 1 or len(row) < n for row, n in zip(rows, lengths)):
        return None
    return [row[:n] for row, n in zip(rows, lengths)]


def _host(tensor: torch.Tensor, dtype: Any = np.float64) -> np.ndarray:
    tensor = tensor.detach()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy().astype(dtype)
