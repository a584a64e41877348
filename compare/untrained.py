"""Sequences of a job that need no partner: those of its rollout that the trainer was never given, and its padding.

Validation, groups that dynamic sampling filters out, partial rollouts that are dropped, all but the best of n: a
rollout makes more than a step trains on. Where both dumps are stages of one run, and the trainer says that it listed
its whole batch, a rollout's sequence that matches none of it was not asked for. A trainer's sequence without its
rollout is lost all the same: for each of those one of the rollout's is taken as its lost partner.
"""

from __future__ import annotations

import numpy as np

from probe.compare.sequences import SequenceJoin
from probe.store.reader import Dump
from probe.store.schema import Sequence

ROLLOUT, TRAINERS = "rollout", ("logprob", "actor")
"""Stages of a job that are compared with each other (:data:`probe.compare.job.PAIRS`)."""


def trainer_of(a: Dump, b: Dump) -> int | None:
    """Return which side (0: a, 1: b) is the trainer of the other one's run and listed its whole batch, else None."""
    runs = [dump.manifest.get("run") for dump in (a, b)]
    if not runs[0] or runs[0] != runs[1]:
        return None
    for side, (trainer, rollout) in enumerate(((a, b), (b, a))):
        if trainer.stage in TRAINERS and rollout.stage == ROLLOUT and trainer.whole_batch:
            return side
    return None


def untrained(join: SequenceJoin, a: Dump, b: Dump) -> tuple[int, int]:
    """Return how many sequences of each side need no partner."""
    trainer = trainer_of(a, b)
    if trainer is None:
        return 0, 0
    own, others = _lone(join, trainer), _lone(join, 1 - trainer)
    padding = sum(_is_padding((a, b)[trainer].sequences[number]) for number in own)
    spared = max(0, len(others) - (len(own) - padding))
    return (padding, spared) if trainer == 0 else (spared, padding)


def need_no_partner(join: SequenceJoin, a: Dump, b: Dump, side: int, sequence: np.ndarray) -> np.ndarray:
    """Tell which rows or tokens of sequences without a partner need none; ``sequence``, int64 [n], says whose they are.

    Of the rollout those sequences with the most of them are taken as the lost partners of the trainer's.
    """
    trainer = trainer_of(a, b)
    if trainer is None or not len(sequence):
        return np.zeros(len(sequence), bool)
    numbers, entries = np.unique(sequence, return_counts=True)
    if side == trainer:
        sequences = (a, b)[side].sequences
        return np.isin(sequence, [number for number in numbers.tolist() if _is_padding(sequences[number])])
    own = (a, b)[trainer].sequences
    missing = sum(not _is_padding(own[number]) for number in _lone(join, trainer))
    lost = numbers[np.argsort(-entries, kind="stable")[:missing]]
    return ~np.isin(sequence, lost)


def _lone(join: SequenceJoin, side: int) -> list[int]:
    return join.only_b if side else join.only_a


def _is_padding(sequence: Sequence) -> bool:
    """Tell whether a trainer's sequence has no response: verl fills up batches with such (docs/verl.md)."""
    return 0 < len(sequence.tokens) <= sequence.prompt_len
