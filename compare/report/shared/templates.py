"""The templates of pages, compiled once per machine: jinja2 takes longer to compile one than to fill it in."""

from __future__ import annotations

import contextlib
from pathlib import Path

import jinja2
from jinja2 import BytecodeCache, Environment, FileSystemLoader
from jinja2.bccache import Bucket

from probe.files import cache_folders, replace_all


def environment(folder: Path) -> Environment:
    """Return an environment for the templates of a folder, whose output is escaped."""
    kept = Kept(cache_folders(folder))
    loader = FileSystemLoader(folder)
    return Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, bytecode_cache=kept)


class Kept(BytecodeCache):
    """Compiled templates in the first folder that can be written; without any, each process compiles anew.

    A template that was changed since, or compiled by another Python, is compiled again.
    """

    def __init__(self, folders: list[Path]) -> None:
        self.folders = folders

    def load_bytecode(self, bucket: Bucket) -> None:
        """Fill in a template's code where it is kept."""
        for folder in self.folders:
            with contextlib.suppress(OSError):
                bucket.bytecode_from_string((folder / _name(bucket)).read_bytes())
            if bucket.code is not None:
                return

    def dump_bytecode(self, bucket: Bucket) -> None:
        """Keep a template's code."""
        for folder in self.folders:
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                replace_all({folder / _name(bucket): bucket.bytecode_to_string()})
                return


def _name(bucket: Bucket) -> str:
    return f"template-{jinja2.__version__}-{bucket.key}.bin"
