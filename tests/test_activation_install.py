"""The start-up line reaches site-packages from a wheel, from an sdist's wheel and from an editable install alike."""

from __future__ import annotations

import shutil
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from activation_tools import clean_environment

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
LINE = "zz_probe_rl.pth"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
OFFLINE = ("--no-deps", "--no-index", "--no-build-isolation", "--quiet")
OURS = "import sys; print(*[m for m in sys.modules if m.split('.')[0] == 'probe'])"

POINTS = """
import sys
from importlib.metadata import entry_points
print(*[point.value for group in sys.argv[1:] for point in entry_points(group=group)])
"""


def run(*command: str | Path, cwd: Path = ROOT, **environ: str) -> subprocess.CompletedProcess[str]:
    words = [str(part) for part in command]
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, env=clean_environment(**environ))
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project, so that builds leave nothing in the real one."""
    folder = tmp_path_factory.mktemp("source")
    names = run("git", "ls-files", "-co", "--exclude-standard").stdout.splitlines()
    for name in names:
        if (ROOT / name).exists() and not name.startswith("tests/"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def wheel_of(source: Path, folder: Path) -> Path:
    run(*PIP, "wheel", *OFFLINE, "--wheel-dir", folder, source)
    return next(folder.glob("probe_rl-*.whl"))


def sdist_wheel(source: Path, folder: Path) -> Path:
    """Build an sdist with the backend itself, and the wheel from what the sdist holds."""
    build = "from setuptools.build_meta import build_sdist; import sys; print(build_sdist(sys.argv[1]))"
    name = run(sys.executable, "-c", build, folder, cwd=source).stdout.splitlines()[-1]
    shutil.unpack_archive(folder / name, folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return wheel_of(unpacked, folder)


def new_environment(folder: Path) -> Path:
    """Return the Python of a new environment that sees the packages of this one, without its start-up lines."""
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip())
    (packages / "a_base.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return python


def install(how: str, source: Path, folder: Path) -> Path:
    python = new_environment(folder / "venv")
    what = {
        "wheel": lambda: [wheel_of(source, folder)],
        "sdist": lambda: [sdist_wheel(source, folder)],
        "editable": lambda: ["--editable", source],
        "editable strict": lambda: ["--config-settings", "editable-mode=strict", "--editable", source],
    }[how]()
    run(*PIP, "--python", python, "install", *OFFLINE, *what)
    return python


@pytest.mark.parametrize("how", ["wheel", "sdist", "editable", "editable strict"])
def test_each_kind_of_install_has_the_line_and_uninstalls_it(how: str, source: Path, tmp_path: Path) -> None:
    python = install(how, source, tmp_path)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    assert (packages / LINE).read_bytes() == (ROOT / "hooks" / "start.pth").read_bytes()
    (record,) = packages.glob("probe_rl-*.dist-info/RECORD")
    assert sum(row.startswith(f"{LINE},sha256=") for row in record.read_text().splitlines()) == 1

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert run(python, "-c", OURS, cwd=elsewhere).stdout == "\n"
    assert run(python, "-c", OURS, cwd=elsewhere, DUMP_ON="0").stdout == "\n"
    on = run(python, "-c", OURS, cwd=elsewhere, DUMP_ON="1")
    assert "probe.hooks.activate" in on.stdout.split() and on.stderr == ""
    assert list(elsewhere.iterdir()) == []
    found = run(python, "-c", POINTS, "vllm.general_plugins", "verl.plugins", cwd=elsewhere).stdout
    assert set(found.split()) >= {"probe.hooks.plugin:start", "probe.hooks.plugin"}

    line = (packages / LINE).read_bytes()
    run(*PIP, "--python", python, "uninstall", "--quiet", "--yes", "probe-rl")
    assert not (packages / LINE).exists()
    (packages / LINE).write_bytes(line)  # left behind, as by a copied environment
    assert run(python, "-c", "print('fine')", cwd=elsewhere, DUMP_ON="1").stderr == ""


def test_a_wheel_holds_the_line_once(source: Path, tmp_path: Path) -> None:
    names = zipfile.ZipFile(wheel_of(source, tmp_path)).namelist()
    assert sorted(name for name in names if name.endswith(".pth")) == ["probe/hooks/start.pth", LINE]


def test_off_imports_exactly_what_python_imports_without_the_line(source: Path, tmp_path: Path) -> None:
    """GIVEN the line there and gone, WHEN Python starts with capture off, THEN it has loaded the same modules."""
    python = install("wheel", source, tmp_path)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    loaded = "import sys; print(*sorted(sys.modules))"
    there = run(python, "-c", loaded, cwd=tmp_path).stdout
    (packages / LINE).unlink()
    assert run(python, "-c", loaded, cwd=tmp_path).stdout == there
