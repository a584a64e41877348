"""The dump format page: its h5py example runs on real dumps, and its tables are those of the schema."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from dump_tools import open_writer, rank_file, segment

from probe.manifest import make_manifest
from probe.settings import ENVIRONMENT, Settings
from probe.store import schema
from probe.store.dtypes import DTYPES, widen
from probe.store.reader import open_dump
from probe.store.sketches import column_vector

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")


def example() -> str:
    """Return the page's Python example."""
    return PAGE.split("```python\n", 1)[1].split("```", 1)[0]


@pytest.fixture
def dump_folder(tmp_path: Path) -> Path:
    """A dump with several blocks of every dtype, one content stored once under two shapes."""
    rng = np.random.default_rng(0)
    writer = open_writer(tmp_path, block_bytes=600)
    for call in range(5):
        rows = segment(4, start=4 * call, call=call)
        for name, dtype in DTYPES.items():
            bits = rng.integers(0, 2, (4, 16 * dtype.carrier.itemsize), np.uint8) * 0x3C
            writer.append(f"layers.0.{name}", "output.0", bits.view(dtype.carrier).copy(), name, rows)
        again = rng.normal(size=(4, 32)).astype(np.float32)
        writer.append("a", "output.0", again, "float32", rows)
        writer.append("b", "input.0", again.reshape(4, 4, 8).copy(), "float32", rows)
    writer.close()
    return tmp_path / "rollout"


def test_the_example_is_short():
    assert len([line for line in example().splitlines() if line.strip()]) <= 12


def test_the_example_reads_every_tensor(dump_folder):
    namespace: dict = {}
    exec(compile(example(), "docs/format.md", "exec"), namespace)
    with open_dump(dump_folder) as dump:
        assert len(dump.tensors) == len(DTYPES) + 2
        for (module, slot), info in dump.tensors.items():
            values, rows = namespace["read_tensor"](rank_file(dump_folder.parent), module, slot)
            if info.dtype != "bfloat16":
                values = widen(values, info.dtype)
            assert values.shape == (20, *info.feature_shape)
            assert np.array_equal(values, dump.read(module, slot), equal_nan=values.dtype.kind == "f")
            assert np.array_equal(rows, dump.rows(module, slot))


def columns_on_the_page(heading: str) -> list[str]:
    """Return the column names that a section of the page lists, as table rows or in its first sentence."""
    section = re.split(r"\n##", PAGE.split(heading, 1)[1])[0]
    listed = re.findall(r"^\| ([a-z_, ]+) \|", section, re.MULTILINE)
    return [name for line in listed for name in line.split(", ") if name != "column"]


@pytest.mark.parametrize(
    ("heading", "table"),
    [
        ("### /index", schema.INDEX),
        ("### /rows/NAME", schema.ROW),
        ("### /sequences", schema.SEQUENCE),
        ("### /tokens", schema.TOKEN),
    ],
)
def test_the_page_lists_every_column(heading, table):
    assert columns_on_the_page(heading) == list(table.names)


@pytest.mark.parametrize(
    ("heading", "table"),
    [
        ("### /modules", schema.MODULE),
        ("### /weights", schema.WEIGHT),
        ("### /parameters", schema.PARAMETER),
    ],
)
def test_the_page_names_the_columns_of_small_tables(heading, table):
    section = re.split(r"\n##", PAGE.split(heading, 1)[1])[0]
    assert [name for name in re.findall(r"`([a-z_]+)`", section) if name in table.names][: len(table.names)] == list(
        table.names
    )


def keys_written() -> set[str]:
    """Return the manifest keys that make_manifest sets, that its callers add, and that engines fill in."""
    keys = set(make_manifest("", "", "", {}))
    for path in (ROOT / "hooks").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "make_manifest":
                keys |= {keyword.arg for keyword in node.keywords if keyword.arg}
            elif isinstance(node, ast.Assign):
                targets = " ".join(map(ast.unparse, node.targets))
                keys |= set(re.findall(r"^manifest\['(\w+)'\]$", targets))
    return keys


def test_the_page_lists_every_manifest_key():
    section = PAGE.split("## Manifest", 1)[1].split("\n## ", 1)[0]
    listed = {key for line in section.splitlines() for key in re.findall(r"`(\w+)`", line.split(" | ")[0])}
    assert {"logprobs_mode", "backends", "driver", "schema"} <= keys_written() <= listed


def test_the_capture_page_lists_every_setting():
    page = (ROOT / "docs" / "capture.md").read_text(encoding="utf-8")
    listed = {name for cell in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for name in re.findall(r"\w+", cell)}
    assert {field.name for field in dataclasses.fields(Settings)} | set(ENVIRONMENT.values()) <= listed


def test_the_formula_of_r_is_the_one_on_the_page():
    mask = (1 << 64) - 1
    for j in (0, 1, 2, 12345, 10**9):
        z = (j + 1) * 0x9E3779B97F4A7C15 & mask
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        z = z ^ z >> 31
        assert column_vector(1, start=j)[0] == (z >> 11) / 2**52 - 1 + 2**-53


def test_the_schema_version_is_the_one_on_the_page():
    assert f"# Dump format, version {schema.SCHEMA_VERSION}\n" in PAGE and "`schema` (1)" in PAGE
