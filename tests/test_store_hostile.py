"""Files that are damaged, foreign or forged end in one DumpError sentence, quickly and in little memory."""

from __future__ import annotations

import json
import random
from pathlib import Path

import h5py
import numpy as np
import pytest
from dump_tools import MANIFEST, open_writer, rank_file, read_everything, refusal, segment, write_dump

from probe.errors import ProbeError
from probe.store import schema
from probe.store.reader import open_dump
from probe.store.schema import TOKEN, ModuleInfo, WeightSketch

BLOCK = "/layers.0.mlp/output.0/block0"


@pytest.fixture
def dump_file(tmp_path: Path) -> Path:
    """A small complete file with every table filled."""
    writer = open_writer(tmp_path, sequences=2)
    values = np.arange(32, dtype=np.float32).reshape(4, 8)
    writer.append("layers.0.mlp", "output.0", values, "float32", segment(4))
    tokens = np.zeros(4, TOKEN)
    tokens["position"] = tokens["token"] = np.arange(4)
    writer.add_tokens(tokens)
    writer.add_module(ModuleInfo("layers.0.mlp", "MLP", 0, {"eps": 1e-6}))
    writer.add_weight(WeightSketch("w", (2, 4), "float32", np.ones((2, 3))))
    return writer.close()


def replace_dataset(file, path, **arguments):
    del file[path]
    return file.create_dataset(path, **arguments)


def edit_table(file, name, row, **columns):
    """Change columns of one row of a table."""
    table = file[name]
    record = table[row]
    for column, value in columns.items():
        record[column] = value
    table[row] = record


def test_the_dump_that_the_forgeries_start_from_is_good(dump_file):
    read_everything(dump_file.parents[1])


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.3, 0.6, 0.9, 0.999])
def test_truncated(dump_file, share):
    whole = dump_file.read_bytes()
    dump_file.write_bytes(whole[: int(share * len(whole))])
    assert "is not a readable HDF5 file" in refusal(dump_file.parents[1])


def test_text_and_foreign_files(dump_file):
    dump_file.write_text("module,slot,rows\n" * 50)
    assert "is not a readable HDF5 file" in refusal(dump_file.parents[1])
    dump_file.unlink()
    with h5py.File(dump_file, "w") as file:
        file["weights"] = np.ones((4, 4))
    assert "/index is missing from the file" in refusal(dump_file.parents[1])
    dump_file.unlink()
    dump_file.mkdir()
    assert "is not a readable HDF5 file" in refusal(dump_file.parents[1])


def _external_link(file):
    with h5py.File(Path(file.filename).with_name("secret.bin"), "w") as other:
        other["x"] = np.arange(32, dtype=np.float32).reshape(4, 8)
    del file[BLOCK]
    file[BLOCK] = h5py.ExternalLink("secret.bin", "/x")


def _external_table(file):
    del file["index"]
    file["index"] = h5py.ExternalLink("../../../elsewhere.h5", "/index")


def _soft_link(file):
    file["elsewhere"] = np.arange(32, dtype=np.float32).reshape(4, 8)
    del file[BLOCK]
    file[BLOCK] = h5py.SoftLink("/elsewhere")


def _soft_group(file):
    file.move("/layers.0.mlp", "/moved")
    file["layers.0.mlp"] = h5py.SoftLink("/moved")


def _soft_link_behind_two_names(file):
    # a walk through the file sees what lies in a group under one of its names only
    file["elsewhere"] = np.arange(32, dtype=np.float32).reshape(4, 8)
    del file[BLOCK]
    file[BLOCK] = h5py.SoftLink("/elsewhere")
    file["layers.00"] = file["layers.0.mlp"]
    edit_table(file, "index", 0, dataset=BLOCK.replace("layers.0.mlp", "layers.00"))


def _external_storage(file):
    secret = Path(file.filename).with_name("secret.bin")
    secret.write_bytes(b"s" * 128)
    replace_dataset(file, BLOCK, shape=(4, 8), dtype="<f4", external=[(str(secret), 0, 128)])


def _virtual(file):
    layout = h5py.VirtualLayout(shape=(4, 8), dtype="<f4")
    layout[...] = h5py.VirtualSource(".", "/elsewhere", shape=(4, 8))
    file["elsewhere"] = np.ones((4, 8), np.float32)
    del file[BLOCK]
    file.create_virtual_dataset(BLOCK, layout)


def _unstored_gigabytes(file):
    replace_dataset(file, BLOCK, shape=(1 << 30, 8), dtype="<f4")
    edit_table(file, "index", 0, shape=json.dumps([1 << 30, 8]))


def _unstored_chunks(file):
    replace_dataset(file, BLOCK, shape=(1 << 30, 8), dtype="<f4", chunks=(1024, 8))[:4] = 1
    edit_table(file, "index", 0, shape=json.dumps([1 << 30, 8]))


def _overflowing_size(file):  # 2^40 x 2^40 elements are 0 modulo 2^64
    replace_dataset(file, BLOCK, shape=(1 << 40, 1 << 40), dtype="<f4", chunks=(1, 1024))
    edit_table(file, "index", 0, shape=json.dumps([1 << 40, 1 << 40]))


def _compressed_gigabytes(file):
    replace_dataset(file, BLOCK, data=np.zeros((1 << 18, 8), np.float32), chunks=(1 << 14, 8), compression="gzip")
    edit_table(file, "index", 0, shape=json.dumps([1 << 18, 8]))


def _huge_table(file):
    del file["tokens"]
    file.create_dataset("tokens", shape=(1 << 33,), maxshape=(None,), chunks=(64,), dtype=TOKEN)


STORAGE = {
    _external_link: "is a soft or external link",
    _external_table: "is a soft or external link",
    _soft_link: "is a soft or external link",
    _soft_group: "is a soft or external link",
    _soft_link_behind_two_names: "block0 is",
    _external_storage: "keeps its bytes in another file",
    _virtual: "keeps its bytes in another file",
    _unstored_gigabytes: "declares 34359738368 bytes but holds 0",
    _unstored_chunks: "declares 34359738368 bytes but holds",
    _overflowing_size: "declares",
    _compressed_gigabytes: "is compressed or filtered",
    _huge_table: "declares",
}


def _missing_block(file):
    del file[BLOCK]


def _group_for_block(file):
    del file[BLOCK]
    file.create_group(BLOCK)


def _empty_space(file):
    replace_dataset(file, BLOCK, data=h5py.Empty("<f4"))


def _other_type(file):
    replace_dataset(file, BLOCK, data=np.zeros((4, 8), np.float64))


def _text_block(file):
    replace_dataset(file, BLOCK, data=[["x"] * 8] * 4, dtype=h5py.string_dtype())


def _other_size(file):
    replace_dataset(file, BLOCK, data=np.zeros((4, 9), np.float32))


def _other_columns(file):
    replace_dataset(file, "index", data=np.zeros(1, [("module", "i4"), ("slot", "i4")]), maxshape=(None,))


def _other_column_types(file):
    forged = np.dtype([(name, "<f8") for name in schema.ROW.fields or ()])
    replace_dataset(file, "rows/t0", data=np.zeros(4, forged))


def _text_as_numbers(file):
    forged = np.dtype([(n, "<i4" if n == "path" else schema.MODULE[n]) for n in schema.MODULE.fields or ()])
    replace_dataset(file, "modules", data=np.array([(1, b"MLP", 0, b"{}")], forged))


def _two_axes(file):
    replace_dataset(file, "rows/t0", data=np.zeros((4, 1), schema.ROW))


def _fewer_rows(file):
    rows = file["rows/t0"][:3]
    replace_dataset(file, "rows/t0", data=rows)


def _no_columns(file):
    replace_dataset(file, "sequences", data=np.zeros(3))


def _no_manifest(file):
    del file["manifest"]


STRUCTURE = {
    _missing_block: "block0 is missing from the file",
    _group_for_block: "is not a dataset",
    _empty_space: "has no shape",
    _other_type: "is not stored as float32",
    _text_block: "is not stored as float32",
    _other_size: r"has shape (4, 9), the index says (4, 8)",
    _other_columns: "has columns ('module', 'slot'), expected ('module', 'slot', 'block'",
    _other_column_types: "has columns of other types",
    _text_as_numbers: "has columns of other types",
    _two_axes: "has columns of other types",
    _fewer_rows: "has 4 rows, /rows/t0 3",
    _no_columns: "has columns None",
    _no_manifest: "/manifest is missing",
}
FORGERIES = STORAGE | STRUCTURE


@pytest.mark.parametrize("forge", FORGERIES, ids=lambda forge: forge.__name__.strip("_"))
def test_forged_structure(dump_file, forge):
    with h5py.File(dump_file, "r+") as file:
        forge(file)
    assert FORGERIES[forge] in refusal(dump_file.parents[1])


DEEP = "[" * 100_000 + "]" * 100_000
COLUMNS = [
    ("index", {"shape": "[-4, 8]"}, "has the shape '[-4, 8]', which no tensor has"),
    ("index", {"shape": json.dumps([1 << 62, 1 << 62])}, "the index says"),
    ("index", {"shape": "[4, 8.0]"}, "which no tensor has"),
    ("index", {"shape": "[true, 32]"}, "which no tensor has"),
    ("index", {"shape": "[]"}, "which no tensor has"),
    ("index", {"shape": json.dumps([1] * 33)}, "which no tensor has"),
    ("index", {"shape": '{"a": 1}'}, "which no tensor has"),
    ("index", {"shape": "4, 8"}, "which no tensor has"),
    ("index", {"shape": DEEP}, "which no tensor has"),
    ("index", {"shape": ""}, "which no tensor has"),
    ("index", {"shape": "[2, 16]"}, "has 2 rows, /rows/t0 4"),
    ("index", {"dtype": "float33"}, "has the dtype 'float33'"),
    ("index", {"dtype": "int32"}, "is not stored as int32"),
    ("index", {"dataset": "/nowhere/block0"}, "is missing from the file"),
    ("index", {"dataset": "/layers.0.mlp/../../secret"}, "is missing from the file"),
    ("index", {"dataset": BLOCK + "/deeper"}, "is missing from the file"),
    ("index", {"dataset": ""}, "is not a dataset"),
    ("index", {"dataset": "/index"}, "is not stored as float32"),
    ("index", {"rows": "t9"}, "/rows/t9 is missing from the file"),
    ("index", {"rows": "../index"}, "is missing from the file"),
    ("index", {"rows": ""}, "is not a dataset"),
    ("index", {"module": b"\xff\xfe"}, "cannot be read"),
    ("rows/t0", {"sequence": 2}, "names a sequence that the file does not list"),
    ("rows/t0", {"sequence": 2**31 - 1}, "names a sequence that the file does not list"),
    ("rows/t0", {"sequence": -2}, "rows of other ranks' tokens without expert parallelism"),
    ("rows/t0", {"position": -5}, "holds a negative position"),
    ("sequences", {"id": 1}, "does not number its sequences 0 to 1"),
    ("sequences", {"id": 2**31 - 1}, "does not number its sequences 0 to 1"),
    ("sequences", {"id": -1}, "does not number its sequences 0 to 1"),
    ("sequences", {"length": -1}, "holds a negative length"),
    ("sequences", {"prompt_len": -7}, "holds a negative length"),
    ("tokens", {"sequence": 2}, "names a sequence that the file does not list"),
    ("tokens", {"sequence": -1}, "names a sequence that the file does not list"),
    ("tokens", {"position": 1}, "does not hold the positions 0, 1, ... of each sequence once"),
    ("tokens", {"position": 9}, "does not hold the positions 0, 1, ... of each sequence once"),
    ("modules", {"info": "{"}, "/modules layers.0.mlp is not valid JSON"),
    ("modules", {"info": "[1]"}, "does not hold a JSON object"),
    ("modules", {"info": DEEP}, "is not valid JSON"),
    ("weights", {"shape": "[2, -1]"}, "which no tensor has"),
    ("weights", {"dataset": "/index"}, "is not the sketch of a parameter"),
    ("weights", {"dataset": BLOCK}, "is not the sketch of a parameter"),
]


@pytest.mark.parametrize(("table", "columns", "problem"), COLUMNS)
def test_forged_entries(dump_file, table, columns, problem):
    with h5py.File(dump_file, "r+") as file:
        edit_table(file, table, 0, **columns)
    assert problem in refusal(dump_file.parents[1])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "/manifest is not valid JSON"),
        ("[1]", "/manifest does not hold a JSON object"),
        (DEEP, "/manifest is not valid JSON"),
        (b"\xff\xff", "/manifest is not valid JSON"),
        (np.arange(3), "/manifest is not valid JSON"),
        ('{"schema": 99}', "has dump format 99"),
        ("{}", "has dump format None"),
        (json.dumps({**MANIFEST, "engine": "vllm"}), "holds 'engine' as something else than an object"),
        (json.dumps({**MANIFEST, "layout": [1]}), "holds 'layout' as something else than an object"),
        (json.dumps({**MANIFEST, "engine": ""}), "holds 'engine' as something else than an object"),
        (json.dumps({**MANIFEST, "engine": None}), "holds 'engine' as something else than an object"),
        (json.dumps({**MANIFEST, "model": []}), "holds 'model' as something else than an object"),
        (json.dumps({**MANIFEST, "layout": 0}), "holds 'layout' as something else than an object"),
        (json.dumps({**MANIFEST, "sampling": ""}), "holds 'sampling' as something else than an object"),
        (json.dumps({**MANIFEST, "model": {"config": "x"}}), "holds 'model.config' as something else than an object"),
    ],
    ids=range(15),
)
def test_forged_manifest(dump_file, text, problem):
    with h5py.File(dump_file, "r+") as file:
        replace_dataset(file, "manifest", data=text)
    assert problem in refusal(dump_file.parents[1])


def test_sections_that_a_dump_may_leave_open_are_fine(dump_file):
    with h5py.File(dump_file, "r+") as file:
        open_ones = {"sampling": None, "backends": None, "batching": {}, "model": {"config": None}}
        replace_dataset(file, "manifest", data=json.dumps({**MANIFEST, **open_ones}))
    read_everything(dump_file.parents[1])


def test_the_manifest_of_every_file_is_checked(dump_file):
    other = open_writer(dump_file.parents[2], 1)
    other.append("layers.1.mlp", "output.0", np.zeros((4, 8), np.float32), "float32", segment(4))
    with h5py.File(other.close(), "r+") as file:
        replace_dataset(file, "manifest", data=json.dumps({**MANIFEST, "layout": "x"}))
    assert "rank1.h5:/manifest holds 'layout'" in refusal(dump_file.parents[1])


def test_rows_and_tokens_in_any_order_are_fine(dump_file):
    with h5py.File(dump_file, "r+") as file:
        file["tokens"][...] = file["tokens"][...][::-1]
        file["sequences"][...] = file["sequences"][...][::-1]
        file["rows/t0"][...] = file["rows/t0"][...][[2, 0, 3, 0]]  # one logits row asked for twice, as vLLM does
    with open_dump(dump_file.parents[1]) as dump:
        assert dump.sequences[[s.uid for s in dump.sequences].index("s0")].tokens.tolist() == [0, 1, 2, 3]
        rows = dump.rows("layers.0.mlp", "output.0")
        assert rows["position"].tolist() == [2, 0, 3, 0]
        assert {dump.sequences[number].uid for number in rows["sequence"]} == {"s0"}


def test_random_damage_is_refused_or_harmless(dump_file):
    """Whatever byte is hit: the dump opens, or a ProbeError says why not; nothing else is ever raised."""
    whole = dump_file.read_bytes()
    rng = random.Random(0)
    refused = 0
    for _ in range(120):
        damaged = bytearray(whole)
        for _ in range(rng.choice([1, 8])):
            damaged[rng.randrange(len(whole))] = rng.randrange(256)
        dump_file.write_bytes(damaged)
        try:
            read_everything(dump_file.parents[1])
        except ProbeError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused  # the damage was not confined to bytes that nobody reads


def test_rank_files_that_disagree_are_merged_or_refused(tmp_path):
    write_dump(tmp_path)
    rank_file(tmp_path, 1).write_bytes(b"not HDF5")
    assert "rank1.h5 is not a readable HDF5 file" in refusal(tmp_path / "rollout")
