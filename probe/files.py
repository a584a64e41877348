"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def replace_all(contents: Mapping[Path, bytes]) -> None:
    """Write files into existing folders, each renamed into place once all are written.

    A reader never sees a part of one, and a failure to write any leaves every earlier one as it was. Raises OSError.
    """
    temporary = {path: path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in contents}
    try:
        for path, content in contents.items():
            temporary[path].write_bytes(content)
        for path in contents:
            temporary[path].replace(path)
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)


def cache_folders(beside: Path) -> list[Path]:
    """Return the folders for what can be made again: beside the sources as Python's own, else the user's."""
    users = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    return [beside / "__pycache__", users / "probe"]
