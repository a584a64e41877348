"""The driver's file of a dump: identity, token ids and log-probs of every sequence, beside the workers' tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from probe.hooks.runners.job import TokenSequence
from probe.metrics import logprobs_from_logits
from probe.store.reader import Dump, open_files
from probe.store.schema import DRIVER, TOKEN, Sequence
from probe.store.writer import DumpWriter


def write_tokens(
    folder: Path,
    manifest: dict[str, Any],
    logits: tuple[str, str],
    done: list[TokenSequence] | None = None,
    known: Mapping[str, list[int]] | None = None,
) -> None:
    """Write ``driver.h5`` into a step's folder once the workers' files there are complete.

    ``done`` are the sequences as the driver knows them; without it they are those that the workers saw, with the ids
    of their rows or, where rows do not begin with a sequence's first token (a cached prefix), those ``known`` by uid.
    """
    with open_files(folder, sorted(folder.glob("*.h5"))) as dump:
        entries = [_seen(sequence, known or {}) for sequence in dump.sequences] if done is None else done
        recomputed = recompute_logprobs(dump, _final(dump, logits), entries)
    about = {key: value for key, value in manifest.items() if key != "coordinates"}  # the driver is no rank
    writer = DumpWriter(folder / f"{DRIVER}.h5", about)
    for entry in entries:
        number = writer.add_sequence(
            Sequence(
                index=0,
                uid=entry.uid,
                request_id=entry.request_id,
                trajectory=entry.trajectory or entry.uid,
                sample=entry.sample,
                prompt_len=entry.prompt_len,
                length=len(entry.tokens),
                tokens=np.array(entry.tokens, np.int64),
            )
        )
        writer.add_tokens(_token_rows(number, entry, recomputed[entry.uid]))
    writer.close()


def _seen(sequence: Sequence, known: Mapping[str, list[int]]) -> TokenSequence:
    tokens = [int(token) for token in sequence.tokens] or list(known.get(sequence.uid, ()))
    identity = (sequence.sample, sequence.trajectory, sequence.request_id)
    return TokenSequence(sequence.uid, tokens, sequence.prompt_len, *identity)


CAPPED = ("", "output.logits")
"""Where a transformers model that caps its logits after the head (Gemma 2) shows them: the model's own output."""


def _final(dump: Dump, logits: tuple[str, str]) -> tuple[str, str]:
    """Return where the logits are that the model's tokens were drawn from."""
    config = (dump.manifest.get("model") or {}).get("config") or {}
    return CAPPED if config.get("final_logit_softcapping") and CAPPED in dump.tensors else logits


Score = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Log-probs of tokens [n] under logits [n, vocab]."""


def recompute_logprobs(
    dump: Dump, logits: tuple[str, str], done: list[TokenSequence], score: Score = logprobs_from_logits
) -> dict[str, np.ndarray]:
    """Return, per uid, the log-prob of each token from the dumped logits (float64 [length], NaN where there are none).

    The log-prob of the token at position p comes from row p - 1; columns beyond the vocabulary are padding.
    """
    found = {entry.uid: np.full(len(entry.tokens), np.nan) for entry in done}
    held = dump.tensors.get(logits)
    if held is None or held.reduced or not held.rows:
        return found
    vocab_size = int(dump.manifest.get("layout", {}).get("vocab_size") or 0) or None  # unknown: every column counts
    entries = {key: entry for entry in done for key in (entry.uid, entry.request_id) if key}
    ids = {entry.uid: np.array([*entry.tokens, -1]) for entry in done}
    for values, rows in dump.iter_blocks(*logits):
        for number in np.unique(rows["sequence"]):
            if number < 0:
                continue  # a call whose logits have no token axis
            sequence = dump.sequences[number]
            entry = entries.get(sequence.uid) or entries.get(sequence.request_id.rpartition("-")[0])
            if entry is None:
                continue
            mine = np.nonzero((rows["sequence"] == number) & (rows["position"] < len(entry.tokens) - 1))[0]
            positions = rows["position"][mine] + 1
            found[entry.uid][positions] = score(values[mine][:, :vocab_size], ids[entry.uid][positions])
    return found


def _token_rows(number: int, entry: TokenSequence, recomputed: np.ndarray | None) -> np.ndarray:
    rows = np.zeros(len(entry.tokens), TOKEN)
    rows["sequence"], rows["position"], rows["token"] = number, np.arange(len(rows)), entry.tokens
    rows["response"] = rows["position"] >= entry.prompt_len
    rows["logprob"] = np.nan if entry.logprobs is None else entry.logprobs
    rows["logprob_recomputed"] = np.nan if recomputed is None else recomputed
    return rows
