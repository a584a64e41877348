"""Token ids as text, through the tokenizer beside a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from probe.errors import UsageError
from probe.store.reader import Dump

Decoder = Callable[[list[int]], str]
FILE = "tokenizer.json"


def load_decoder(*dumps: Dump) -> Decoder | None:
    """Return ids -> text through the tokenizer.json beside a dump's checkpoint, or None when there is none to use."""
    for dump in dumps:
        path = Path(str((dump.manifest.get("model") or {}).get("path") or "")) / FILE
        if path.is_file():
            try:
                return _decoder(path)
            except Exception:  # tokenizers is missing, or raises bare Exception over what it cannot parse: ids will do
                return None
    return None


def decoder_of(path: Path) -> Decoder:
    """Return ids -> text through a tokenizer.json or the one in a folder; raise UsageError where it cannot be used."""
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise UsageError(f"there is no {file}", f"name a {FILE}, or a model folder that holds one")
    try:
        return _decoder(file)
    except ImportError:
        raise UsageError("decoding tokens needs the package tokenizers", "pip install tokenizers") from None
    except Exception as error:  # tokenizers raises bare Exception
        raise UsageError(f"{file} is no tokenizer that can be read ({error})", f"name a {FILE}") from None


def _decoder(file: Path) -> Decoder:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))
