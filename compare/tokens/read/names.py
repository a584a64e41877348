"""The names under which files of log-probs keep what a token comparison needs, and which of them become which side."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from probe.compare.tokens.batch import COLUMNS

CELL, TAIL, PROMPT, ROW, LOGITS = "cell", "tail", "prompt", "row", "logits"
"""How a column lies: one value per response token; per token of the whole sequence, of which the last ones are the
response; per token of the prompt; per sequence (or one for all); a vector over the vocabulary per response token."""


@dataclass(frozen=True)
class Column:
    """A column that is read from a file: how it lies, what its values are, and its names, the first that exists counts.

    ``kind``: ``float``, ``int``, ``bool`` or ``text``. Where ``lies`` is CELL a column of the PPO update may also hold
    one value per sequence, which is then that of all its tokens.
    """

    lies: str
    kind: str
    names: tuple[str, ...]


FILE_COLUMNS: dict[str, Column] = {
    "log_probs": Column(CELL, "float", ("log_probs", "log_prob", "logprobs", "logprob", "per_token_logps")),
    "rollout_log_probs": Column(
        CELL,
        "float",
        ("rollout_log_probs", "rollout_logprobs", "generation_logprobs", "sampling_per_token_logps"),
    ),
    "old_log_probs": Column(
        CELL,
        "float",
        ("old_log_probs", "old_log_prob", "actor_log_probs", "prev_logprobs", "old_per_token_logps"),
    ),
    "response_mask": Column(
        CELL,
        "bool",
        ("response_mask", "response_masks", "completion_mask", "loss_mask", "loss_masks", "token_mask"),
    ),
    "attention_mask": Column(TAIL, "bool", ("attention_mask",)),
    "responses": Column(CELL, "int", ("responses", "response_ids", "completion_ids", "output_ids")),
    "prompts": Column(PROMPT, "int", ("prompts", "prompt_ids")),
    "input_ids": Column(TAIL, "int", ("input_ids", "tokens")),
    "uid": Column(ROW, "text", ("uid", "uids", "id", "request_id")),
    "sample": Column(ROW, "int", ("sample", "sample_index")),
    "step": Column(ROW, "int", ("step", "global_step", "global_steps")),
    "temperature": Column(ROW, "float", ("temperature",)),
    "top_p": Column(ROW, "float", ("top_p",)),
    "advantages": Column(CELL, "float", ("advantages", "advantage")),
    "returns": Column(CELL, "float", ("returns",)),
    "values": Column(CELL, "float", ("values",)),
    "old_values": Column(CELL, "float", ("old_values",)),
    "ref_log_probs": Column(
        CELL,
        "float",
        ("ref_log_probs", "ref_log_prob", "ref_logprobs", "reference_policy_logprobs", "ref_per_token_logps"),
    ),
    "new_log_probs": Column(CELL, "float", ("new_log_probs", "new_log_prob", "new_logprobs")),
    "logits": Column(LOGITS, "float", ("logits",)),
}
"""verl 0.9.1's keys (DataProto.batch: rollout_log_probs, old_log_probs, ref_log_prob, response_mask, responses...), and
those under which slime (tokens, loss_masks), NeMo-RL (generation_logprobs, prev_logprobs, token_mask) and TRL
(completion_ids, ..._per_token_logps) keep the same."""

SCORES = ("log_probs", "rollout_log_probs", "old_log_probs")
SIDE_SCORES = (("rollout_log_probs", "log_probs", "old_log_probs"), ("old_log_probs", "log_probs", "rollout_log_probs"))
"""Which column of a file of its own is side a's (the rollout), and side b's (the actor): the first that it has."""
BOTH_SCORES = ("rollout_log_probs", ("old_log_probs", "log_probs"))
"""What one file with both sides must hold: a's column, and b's (slime calls the actor's ``log_probs``)."""
PER_ROW = frozenset(COLUMNS)
IDS = ("responses", "prompts", "input_ids")
"""Columns of token ids: where a file keeps text or messages under their names, they are passed over."""
ID_NAMES = frozenset(name for column in IDS for name in FILE_COLUMNS[column].names)


@dataclass(frozen=True)
class Names:
    """The columns that a file has: ``found`` column -> its name there; ``spare`` names that mean one of these too."""

    found: dict[str, str] = field(default_factory=dict)
    spare: tuple[str, ...] = ()


def resolve(available: Iterable[str]) -> Names:
    """Return which columns a file with these names has."""
    names = list(available)
    found, spare = {}, []
    for column, entry in FILE_COLUMNS.items():
        here = [name for name in entry.names if name in names]
        if here:
            found[column] = here[0]
            spare += here[1:]
    return Names(found, tuple(spare))
