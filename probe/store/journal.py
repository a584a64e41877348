"""What makes a killed run readable: beside ``NAME.h5.partial``, one JSON line per flush that needs no HDF5 structure.

HDF5 updates groups and tables in several writes, so a process killed during a flush can leave them inconsistent, even
for blocks flushed long before. The bytes of a dataset never move once written: the journal notes where they lie in the
``.partial`` file, with the table rows that give them meaning. A last line cut by the kill is ignored.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from probe.errors import DumpError

JOURNAL_SUFFIX = ".journal"


def journal_of(partial: Path) -> Path:
    """Return the journal of a ``.partial`` file."""
    return partial.with_name(partial.name + JOURNAL_SUFFIX)


class JournalWriter:
    """Append the manifest and then one line per commit to the journal of ``partial``."""

    def __init__(self, partial: Path, manifest: dict[str, Any]) -> None:
        self.path = journal_of(partial)
        self._handle = os.open(self.path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND, 0o644)
        self._write({"manifest": manifest})

    def commit(self, tables: dict[str, list[tuple[Any, ...]]], places: dict[str, tuple[int, int]]) -> None:
        """Note table rows and the (offset, size) in bytes of datasets; all have reached the ``.partial`` file."""
        self._write({"places": places, "tables": {name: rows for name, rows in tables.items() if rows}})

    def move(self, partial: Path, manifest: dict[str, Any]) -> None:
        """Go on as the journal of another file, to which the first one was renamed, under another manifest."""
        os.rename(self.path, journal_of(partial))
        self.path = journal_of(partial)
        self._write({"manifest": manifest})

    def close(self, *, delete: bool = False) -> None:
        """Close the journal; ``delete`` it when the file it stands by is complete."""
        os.close(self._handle)
        if delete:
            self.path.unlink(missing_ok=True)

    def _write(self, entry: dict[str, Any]) -> None:
        os.write(self._handle, json.dumps(entry, default=_plain).encode() + b"\n")


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else str(value)


def read_journal(partial: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, list[tuple[Any, ...]]]]:
    """Return the manifest, [offset, size] of each dataset and the rows of each table that a killed writer noted."""
    manifest: dict[str, Any] = {}
    places: dict[str, Any] = {}
    tables: dict[str, list[tuple[Any, ...]]] = {}
    with open(journal_of(partial), "rb") as lines:
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError:
                break  # the kill cut this line
            if not isinstance(entry, dict):
                raise ValueError("a line is not an object")
            manifest = entry.get("manifest", manifest)
            places |= dict(entry.get("places", {}))
            for name, rows in dict(entry.get("tables", {})).items():
                tables.setdefault(name, []).extend(tuple(row) for row in rows)
    if not manifest or not isinstance(manifest, dict):
        raise DumpError(f"{journal_of(partial)} holds no manifest", "nothing was flushed before the run was killed")
    return manifest, places, tables
