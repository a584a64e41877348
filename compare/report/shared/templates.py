"""The templates of pages, compiled once per machine: jinja2 takes longer to compile one than to fill it in."""

from __future__ import annotations

import contextlib
from pathlib import Path

import jinja2
from jinja2 import BytecodeCache, Environment, FileSystemLoader
from jinja2.bccache import Bucket

from probe.files import cache_folders, keep, kept


def environment(folder: Path) -> Environment:
    """Return an environment for the templates of a folder, whose output is escaped."""
    cache, loader = Kept(cache_folders(folder)), FileSystemLoader(folder)
    return Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, bytecode_cache=cache)


class Kept(BytecodeCache):
    """Compiled templates in the first folder that can be written; without any, each process compiles anew.

    A template that was changed since, or compiled by another Python, is compiled again; so is one that is damaged, or
    that another user could have written.
    """

    def __init__(self, folders: list[Path]) -> None:
        self.folders = folders

    def load_bytecode(self, bucket: Bucket) -> None:
        """Fill in a template's code where it is kept."""
        for content in kept(self.folders, _name(bucket)):
            with contextlib.suppress(Exception):  # pickle and marshal raise anything
                bucket.bytecode_from_string(content)
            if bucket.code is not None:
                return

    def dump_bytecode(self, bucket: Bucket) -> None:
        """Keep a template's code."""
        keep(self.folders, _name(bucket), bucket.bytecode_to_string())


def _name(bucket: Bucket) -> str:
    return f"template-{jinja2.__version__}-{bucket.key}.bin"
