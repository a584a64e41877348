"""Number the sequences of a capture: the first call that shows one registers it, later calls find it again."""

from __future__ import annotations

import numpy as np

from probe.hooks.rows import Announced
from probe.store.schema import Sequence
from probe.store.writer import DumpWriter


class SequenceBook:
    """Sequences known to one capture, by uid, with the prompt length that decides what PROMPTS_ONLY keeps."""

    def __init__(self, writer: DumpWriter) -> None:
        self._writer = writer
        self._numbers: dict[str, int] = {}
        self.sequences: list[Sequence] = []
        self._announced: dict[int, np.ndarray] = {}

    def number(
        self, announced: Announced, *, length: int, request_id: str = "", weight_version: int = 0, cached: int = 0
    ) -> int:
        """Return the sequence's number in the file, registering it when it is new; its length only grows.

        What one uid runs under another weight version is a sequence of its own, ``UID#vN``, of the same trajectory.
        """
        version = weight_version or announced.weight_version
        uid = announced.uid
        if uid in self._numbers and self.sequences[self._numbers[uid]].weight_version != version:
            uid = f"{uid}#v{version}"
        if uid not in self._numbers:
            sequence = Sequence(
                index=0,
                uid=uid,
                request_id=request_id,
                trajectory=announced.trajectory or announced.uid,
                sample=announced.sample,
                prompt_len=length if announced.prompt_len is None else announced.prompt_len,
                weight_version=version,
                cached=cached,
            )
            self._numbers[uid] = self._writer.add_sequence(sequence)
            self.sequences.append(sequence)
            if announced.tokens is not None:
                self._announced[sequence.index] = np.asarray(announced.tokens, np.int64)
        sequence = self.sequences[self._numbers[uid]]
        sequence.length = max(sequence.length, length)
        return sequence.index

    def forget_ids(self, number: int) -> None:
        """Drop the ids that were announced with a sequence: nobody asks for them any more."""
        self._announced.pop(number, None)

    def known(self, uid: str, weight_version: int) -> int | None:
        """Return the number that :meth:`number` has given to a sequence, None for one that is new."""
        number = self._numbers.get(uid)
        if number is not None and self.sequences[number].weight_version != weight_version:
            number = self._numbers.get(f"{uid}#v{weight_version}")
        return number

    def length(self, uid: str) -> int:
        """Return how many tokens of a sequence have been seen, 0 for an unknown one."""
        return self.sequences[self._numbers[uid]].length if uid in self._numbers else 0

    def announced_ids(self, number: int) -> np.ndarray | None:
        """Return the ids (int64 [n]) that were announced with a sequence, None where none were."""
        return self._announced.get(number)
