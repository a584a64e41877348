"""Files that appear whole or not at all, and files kept for later that can be made again."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

_DIGEST = 32
"""Bytes of SHA-256 before what is kept."""
_WRITABLE_BY_OTHERS = 0o022


def replace_all(contents: Mapping[Path, bytes], mode: int = 0o666) -> None:
    """Write files into existing folders, each renamed into place once all are written.

    A reader never sees a part of one, and a failure to write any leaves every earlier one as it was. ``mode``: who may
    do what with them, less what the process's umask forbids. Raises OSError.
    """
    # a number of the process would not do: two containers on one home may have the same
    ending = f"{os.getpid()}-{os.urandom(6).hex()}.tmp"
    temporary = {path: path.with_name(f".{path.name}.{ending}") for path in contents}
    try:
        for path, content in contents.items():
            with open(temporary[path], "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
                file.write(content)
        for path in contents:
            temporary[path].replace(path)
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)


# -- what is kept for later processes ----------------------------------------------------------------------------------
# Some of it is run. So it is read only from where nobody else can have put it.


def cache_folders(beside: Path) -> list[Path]:
    """Return the folders for what can be made again: beside the sources as Python's own, else the user's."""
    folders = [beside / "__pycache__"]
    with contextlib.suppress(RuntimeError):  # a user without a home folder, as in some containers
        folders.append(Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "probe")
    return folders


def shared_folders(named: Path) -> list[Path]:
    """Return a folder that the user has named, and the one in it for this user where others can write to it."""
    return [named, *([named / f"probe-{os.geteuid()}"] if hasattr(os, "geteuid") else [])]


def keep(folders: Iterable[Path], name: str, content: bytes) -> None:
    """Keep a file in the first folder that can be written, by nobody but this user or root; without any, do nothing."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.mkdir(0o755 if folder.name == "__pycache__" else 0o700, parents=True, exist_ok=True)
            if _is_ours(os.stat(folder)):
                replace_all({folder / name: _digest(content) + content}, 0o644)
                return


def kept(folders: Iterable[Path], name: str) -> Iterator[bytes]:
    """Yield what :func:`keep` has kept in each folder, as far as it is whole and nobody else can have written it."""
    for folder in folders:
        with contextlib.suppress(OSError), open(folder / name, "rb") as file:
            if not _is_ours(os.stat(folder)) or not _is_ours(os.fstat(file.fileno())):
                continue
            content = file.read()
            if _digest(content[_DIGEST:]) == content[:_DIGEST]:
                yield content[_DIGEST:]


def _is_ours(found: os.stat_result) -> bool:
    """Tell whether a file or folder belongs to this user or root, and nobody else can write to it."""
    if not hasattr(os, "geteuid"):  # where files have no such owners
        return True
    return found.st_uid in (0, os.geteuid()) and not found.st_mode & _WRITABLE_BY_OTHERS


def _digest(content: bytes) -> bytes:
    import hashlib

    return hashlib.sha256(content).digest()
