"""Token ids as text, through the tokenizer beside a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from probe.store.reader import Dump

Decoder = Callable[[list[int]], str]


def load_decoder(*dumps: Dump) -> Decoder | None:
    """Return ids -> text through the tokenizer.json beside a dump's checkpoint, or None when there is none to use."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    for dump in dumps:
        path = Path(str((dump.manifest.get("model") or {}).get("path") or "")) / "tokenizer.json"
        if path.is_file():
            try:
                tokenizer = Tokenizer.from_file(str(path))
            except Exception:  # tokenizers raises bare Exception for a file that it cannot parse: ids will do
                return None
            return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))
    return None
