"""What kind of source of log-probs a path is, by its content, never by its name's ending."""

from __future__ import annotations

import zipfile
from pathlib import Path

from probe.compare.tokens.read.monitor import is_monitor
from probe.errors import TokensError
from probe.store.reader import roots_of

ACCEPTED = "give a dump's folder, a monitor's folder of prob_diff*.npy, or an npz, parquet or jsonl file"
MAGIC: dict[bytes, str] = {b"PAR1": "parquet", b"\x80": "verl-batch", b"{": "jsonl", b"PK\x03\x04": "npz"}
"""How the files of each kind begin: a pickle with the opcode PROTO."""
STRANGERS: dict[bytes, tuple[str, str]] = {
    b"\x89HDF": ("is one file of a dump", "name the folder of its stage, as 'probe dump -o' wrote it"),
    b"\x93NUMPY": ("is one bare array", "save both sides' log-probs and the response_mask in one npz"),
    b"\x1f\x8b": ("is compressed with gzip", "unpack it"),
    b"\x28\xb5\x2f\xfd": ("is compressed with zstd", "unpack it"),
    b"[": ("is one JSON list", "write one object per line (jsonl)"),
}


def sniff(path: Path) -> str:
    """Return the kind of a source: ``dump``, ``monitor``, ``npz``, ``parquet``, ``jsonl`` or ``verl-batch``.

    Raises TokensError for a path that does not exist or is nothing of these.
    """
    if len(roots := roots_of(path)) > 1 and any(root.is_dir() for root in roots):
        return "dump"
    if not path.exists():
        raise TokensError(f"there is no {path}", ACCEPTED)
    if path.is_dir():
        if (path / "gen_batch.dp").is_file():
            raise TokensError(f"{path} is a folder of verl's rollout cache", "name the file gen_batch.dp in it")
        return "monitor" if is_monitor(path) else "dump"
    if not path.is_file():
        raise TokensError(f"{path} is no regular file", "write what it holds into one")
    try:
        with path.open("rb") as stream:
            start = stream.read(4096)
    except OSError as error:
        raise TokensError(f"{path} cannot be read ({error.strerror})", ACCEPTED) from None
    if not start:
        raise TokensError(f"{path} is empty", ACCEPTED)
    if is_monitor(path):
        return "monitor"
    start = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    for magic, (what, fix) in STRANGERS.items():
        if start.startswith(magic):
            raise TokensError(f"{path} {what}", fix)
    kind = next((kind for magic, kind in MAGIC.items() if start.startswith(magic)), "")
    if not kind:
        raise TokensError(f"{path} is no kind of file that this tool knows", ACCEPTED)
    if kind == "npz":
        _refuse_other_archives(path)
    return kind


def _refuse_other_archives(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise TokensError(f"{path} cannot be read as an npz file ({error})", "write it again") from None
    if any(name.endswith("data.pkl") for name in names):
        raise TokensError(f"{path} was written by torch.save", "save its arrays with numpy.savez instead")
    if not any(name.endswith(".npy") for name in names):
        raise TokensError(f"{path} is a zip archive without arrays", ACCEPTED)
