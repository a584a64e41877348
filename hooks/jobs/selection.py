"""Which sequences of a job have their tensors stored: the same few on every side, chosen by a hash of their prompts.

Engines, ranks and steps order sequences in their own ways, so that nothing but the token ids can choose alike. A
rollout notes which whole sequences it recorded (one empty file each, named by their hash), so that a trainer that sees
the same folder records the same sample of each prompt.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash

from probe.hooks.jobs.run import holds_earlier, is_earlier

ROLLOUT = "rollout"
Ids = Sequence[int] | np.ndarray


def hash_of(ids: Ids) -> int:
    """Return the hash (xxh3, 64 bits) by which sequences are chosen."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(ids, "<i8").data)


class Selection:
    """The choice of at most ``seqs`` sequences (0: all) of one stage and step.

    Those with the smallest (sample, hash of the prompt) are chosen, where ``sample`` numbers the responses to one
    prompt: one of each prompt, and more only where there are fewer prompts than ``seqs``. ``folder`` is where rollouts
    note what they recorded; with ``follows`` those sequences are chosen wherever any is noted.
    """

    def __init__(self, seqs: int, folder: Path | None = None, *, follows: bool = False) -> None:
        self.seqs, self.folder = seqs, folder
        self.admitted = self.refused = 0
        self._follows = follows
        self._noted: frozenset[int] | None = None
        self._keys: list[tuple[int, int]] = []
        self._samples: Counter[int] = Counter()
        self._expected: frozenset[int] | None = None

    def expect(self, sequences: Sequence[tuple[Ids, int]]) -> None:
        """Choose among all sequences of a pass, each (ids, prompt length), before any of them runs.

        Earlier passes of the same step have taken their part of the number; what a rollout noted comes before it.
        """
        known, noted = self._expected or frozenset(), self.noted()
        if any(hash_of(ids) in noted for ids, _ in sequences):
            left = self.seqs - len(known & noted)
        else:
            left = 0 if known & noted else self.seqs - len(known)
        prompts, wholes = [ids[:length] for ids, length in sequences], [ids for ids, _ in sequences]
        mine = self.chosen(prompts, wholes, known=known, most=left)
        self._expected = known | {hash_of(ids) for (ids, _), wanted in zip(sequences, mine) if wanted}

    def chosen(
        self,
        prompts: Sequence[Ids],
        wholes: Sequence[Ids] | None = None,
        *,
        known: frozenset[int] = frozenset(),
        most: int | None = None,
    ) -> list[bool]:
        """Tell for each sequence of a whole batch whether it is chosen; ``wholes`` are prompts with responses.

        Where several responses to a prompt are known, the smallest hash of all the ids comes first. At most ``most``
        besides those whose hash is ``known``, which need not be chosen again.
        """
        if not self.seqs:
            return [True] * len(prompts)
        whole = [hash_of(ids) for ids in (prompts if wholes is None else wholes)]
        noted = self.noted()
        pool = [n for n in range(len(prompts)) if whole[n] in noted] or list(range(len(prompts)))
        pool = [n for n in pool if whole[n] not in known]
        samples: Counter[int] = Counter()
        keys = []
        for number in sorted(pool, key=lambda n: (whole[n], n)):
            prompt = hash_of(prompts[number])
            keys.append((samples[prompt], prompt, number))
            samples[prompt] += 1
        wanted = {number for _, _, number in sorted(keys)[: max(0, self.seqs if most is None else most)]}
        return [number in wanted for number in range(len(prompts))]

    def admit(self, sequences: Sequence[tuple[Ids, Ids | None]]) -> list[bool]:
        """Tell for each sequence that is met now whether it is recorded: it is among the smallest so far.

        Each is (ids of the prompt, all its ids or None where they are not known yet).
        """
        admitted = self._admitted(sequences)
        self.admitted += sum(admitted)
        self.refused += len(admitted) - sum(admitted)
        return admitted

    def _admitted(self, sequences: Sequence[tuple[Ids, Ids | None]]) -> list[bool]:
        if not self.seqs:
            return [True] * len(sequences)
        found = [False] * len(sequences)
        undecided = []
        for number, (prompt, whole) in enumerate(sequences):
            if whole is not None and self._expected is not None:
                found[number] = hash_of(whole) in self._expected
            elif whole is not None and self.noted():
                found[number] = hash_of(whole) in self.noted()
            else:
                undecided.append((hash_of(prompt if whole is None else whole), number, hash_of(prompt)))
        keys = []
        for _, number, prompt_hash in sorted(undecided):
            keys.append((self._samples[prompt_hash], prompt_hash, number))
            self._samples[prompt_hash] += 1
        for sample, prompt_hash, number in sorted(keys):
            key = (sample, prompt_hash)
            place = bisect.bisect(self._keys, key)
            self._keys.insert(place, key)
            del self._keys[self.seqs :]
            found[number] = place < self.seqs
        return found

    # -- what a rollout leaves for the trainer -------------------------------------------------------------------------

    def note(self, whole: Ids) -> None:
        """Leave word that this sequence was recorded; a folder that cannot be written is let be."""
        if self.folder is None or self._follows or not self.seqs:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"{hash_of(whole):016x}").touch()
        except OSError:
            return  # the trainer then chooses by hash alone

    def noted(self) -> frozenset[int]:
        """Return the hashes of the sequences that rollouts of this step recorded, empty where this side leads."""
        if self._noted is None:
            found: list[str] = []
            if self._follows and self.folder is not None and self.folder.is_dir():
                # what an earlier run noted counts as long as its rollout is there to be compared with
                all_count = holds_earlier(self.folder.parent.parent / ROLLOUT / self.folder.name)
                found = [path.name for path in self.folder.iterdir() if all_count or not is_earlier(path)]
            self._noted = frozenset(int(name, 16) for name in found if len(name) == 16)
        return self._noted
