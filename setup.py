"""What setup.cfg cannot express: the start-up line ``zz_probe_rl.pth`` in wheels and editable installs alike.

Python runs the line at the start of every process of the environment; it must lie in site-packages itself, where
neither package data nor ``data_files`` can put it.
"""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

START = Path(__file__).parent / "probe" / "hooks" / "start.pth"
NAME = "zz_probe_rl.pth"
"""Python runs start-up lines in the order of their names: this one comes after those that make the package (of an
editable install) and what it needs importable."""


class BuildWithStart(build_py):
    """Put the start-up line beside the packages of a wheel."""

    def run(self) -> None:
        """Build the packages, then the line; an editable install takes it from :class:`EditableWithStart`."""
        super().run()
        if not self.editable_mode:
            self.copy_file(str(START), self._target(), preserve_mode=False)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """Return what was built."""
        built: list[str] = super().get_outputs(include_bytecode)
        return built if self.editable_mode else [*built, self._target()]

    def _target(self) -> str:
        return str(Path(self.build_lib) / NAME)


class EditableWithStart(editable_wheel):
    """Put the start-up line into the wheel of an editable install."""

    def run(self) -> None:
        """Build the wheel, then add the line to it."""
        super().run()
        for wheel in Path(self.dist_dir).glob("probe_rl-*editable*.whl"):
            add_to_wheel(wheel, NAME, START.read_bytes())


def add_to_wheel(wheel: Path, name: str, content: bytes) -> None:
    """Add a file to a wheel and to its RECORD, unless it is there."""
    with zipfile.ZipFile(wheel) as archive:
        entries = [(entry, archive.read(entry)) for entry in archive.infolist()]
    if any(entry.filename == name for entry, _ in entries):
        return
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
        for entry, held in entries:
            if entry.filename.endswith(".dist-info/RECORD"):
                held += f"{name},sha256={digest},{len(content)}\n".encode()
            archive.writestr(entry, held)


setup(cmdclass={"build_py": BuildWithStart, "editable_wheel": EditableWithStart})
