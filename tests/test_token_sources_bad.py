"""Sources of log-probs that are pickles, damaged, hostile or not what they say: one sentence each, nothing is run."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from token_files import (
    A2,
    NAMES,
    Row,
    arrays,
    as_objects,
    folder,
    read,
    two_tokens,
    write_jsonl,
    write_npz,
    write_parquet,
)

from probe.compare.tokens.read import read_sources
from probe.errors import ProbeError, TokensError, UsageError
from probe.sampling import Semantics

# -- verl's batches ---------------------------------------------------------------------------------------------------


def proto(**changes: Any) -> Any:
    import torch
    from verl.protocol import DataProto

    score = torch.tensor([[-1.0, -2.0, 0.0], [-3.0, float("nan"), 0.0]])
    tensors = {
        "prompts": torch.tensor([[0, 5], [6, 7]]),
        "responses": torch.tensor([[1, 2, 0], [3, 4, 0]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 0]]),
        "response_mask": torch.tensor([[1, 1, 0], [1, 1, 0]]),
        "rollout_log_probs": score,
        "old_log_probs": (score - 0.25).bfloat16(),
        **changes,
    }
    tensors["input_ids"] = torch.cat([tensors["prompts"], tensors["responses"]], dim=1)
    uid = np.array(["x", "x"], dtype=object)
    return DataProto.from_dict(tensors, {"uid": uid}, {"temperature": 0.7, "global_steps": 4})


@pytest.mark.parametrize("method", ["", "numpy"])
def test_verls_batch_is_read_without_running_it(tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_DATAPROTO_SERIALIZATION_METHOD", method)
    path = tmp_path / "gen_batch.dp"
    proto().save_to_disk(path)
    with pytest.raises(UsageError, match="--trust"):
        read(path)
    batch = read(path, trust=True)
    assert batch.a is not None and batch.b is not None
    assert (batch.a.tolist(), batch.b.tolist()) == ([-1, -2, -3], [-1.25, -2.25, -3.25])
    assert batch.labels == ["x.s0", "x.s1"] and batch.step.tolist() == [4, 4] and batch.start.tolist() == [1, 2]
    assert [ids.tolist() for ids in batch.ids] == [[5, 1, 2], [6, 7, 3, 4]]
    assert batch.origins[0].sampled_at == Semantics(0.7) and batch.origins[0].kind == "verl-batch"
    assert any("nothing in it was run" in note for note in batch.notes)


def test_verls_jagged_batch_is_read(tmp_path: Path) -> None:
    import torch
    from verl.protocol import DataProto

    def jagged(*values: list[float]) -> Any:
        return torch.nested.as_nested_tensor([torch.tensor(v) for v in values], layout=torch.jagged)

    scores = {name: jagged([-1.0, -2.0, -3.0], [-4.0]) for name in NAMES.values()}
    DataProto.from_dict({**scores, "responses": jagged([1, 2, 3], [4])}).save_to_disk(tmp_path / "x.dp")
    batch = read(tmp_path / "x.dp", trust=True)
    assert batch.a is not None and batch.a.tolist() == [-1, -2, -3, -4] and batch.token.tolist() == [1, 2, 3, 4]


class Hostile:
    """Runs code when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def test_a_hostile_pickle_runs_only_where_it_is_trusted(tmp_path: Path) -> None:
    path, marker = tmp_path / "x.dp", tmp_path / "ran"
    path.write_bytes(pickle.dumps(Hostile(marker)))
    with pytest.raises(UsageError, match="can run any code"):
        read(path)
    assert not marker.exists()
    with pytest.raises(TokensError):  # trusted, it runs, and is no verl batch
        read(path, trust=True)
    assert marker.exists()


def test_an_array_of_raw_pointers_is_no_plain_batch(tmp_path: Path) -> None:
    # numpy.ndarray((1,), "O", bytes) makes objects of any bytes: reading one ends the process
    code = b"\x80\x04cnumpy\nndarray\n(K\x01\x85\x8c\x01OC\x08AAAAAAAAtR."
    (tmp_path / "x").write_bytes(code)
    with pytest.raises(TokensError, match="built by hand"):
        read(tmp_path / "x", trust=True)


def test_what_is_not_plain_is_unpickled_in_full_with_a_warning(tmp_path: Path) -> None:
    data = proto()
    data.meta_info["path"] = Path("somewhere")
    data.save_to_disk(tmp_path / "x.dp")
    batch = read(tmp_path / "x.dp", trust=True)
    assert batch.a is not None and batch.a.tolist() == [-1, -2, -3]
    assert any(note.startswith("WARNING") and "pathlib" in note for note in batch.notes)


# -- files that are not what they should be ---------------------------------------------------------------------------


def raw(content: bytes) -> Callable[[Path], Path]:
    def write(where: Path) -> Path:
        (where / "x").write_bytes(content)
        return where / "x"

    return write


def lines(*entries: Any) -> Callable[[Path], Path]:
    return raw("".join(json.dumps(entry) + "\n" for entry in entries).encode())


def npz(**fields: Any) -> Callable[[Path], Path]:
    both = {"rollout_log_probs": A2, "old_log_probs": A2}
    return lambda where: arrays(where / "x.npz", **{n: v for n, v in (both | fields).items() if v is not None})


def zipped(**members: bytes) -> Callable[[Path], Path]:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in members.items():
            archive.writestr(name.replace("__", "."), content)
    return raw(stream.getvalue())


def header(shape: tuple[int, ...], dtype: str = "<f4") -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": dtype, "fortran_order": False, "shape": shape})
    return stream.getvalue()


def parquet(**columns: Any) -> Callable[[Path], Path]:
    def write(where: Path) -> Path:
        import pyarrow as arrow
        from pyarrow import parquet as files

        files.write_table(arrow.table(columns), where / "x.parquet")
        return where / "x.parquet"

    return write


def steps(gap: Any, mask: Any) -> Callable[[Path], Path]:
    def write(where: Path) -> Path:
        np.save(where / "prob_diff.npy", gap)
        np.save(where / "prob_mask.npy", mask)
        return where

    return write


SCORES2 = [[-1.0], [-2.0]]

BAD: dict[str, tuple[Callable[[Path], Path], str]] = {
    "no file": (lambda where: where / "none.npz", "there is no"),
    "empty": (raw(b""), "is empty"),
    "text": (raw(b"hello"), "no kind of file"),
    "an hdf5 file": (raw(b"\x89HDF\r\n\x1a\n"), "name the folder of its stage"),
    "a bare array": (lambda where: _save(where / "x.npy"), "one bare array"),
    "gzip": (raw(b"\x1f\x8b\x08"), "unpack it"),
    "a JSON list": (raw(b"[1, 2]"), "one object per line"),
    "a zip of text": (zipped(x__txt=b""), "zip archive without arrays"),
    "torch.save": (lambda where: _zip(where, "archive/data.pkl"), "torch.save"),
    "half a zip": (raw(b"PK\x03\x04abc"), "cannot be read as an npz file"),
    "half an array": (zipped(rollout_log_probs__npy=header((2, 3))), "cannot be read as an npz file"),
    "a bomb": (zipped(rollout_log_probs__npy=header((2**20, 2**20))), "split the file"),
    "objects": (npz(uid=np.array([{}, {}], object)), "Python objects"),
    "no log-probs": (npz(rollout_log_probs=None, old_log_probs=None, x=A2), "holds no log-probs"),
    "one side": (npz(old_log_probs=None), "not both rollout_log_probs and old_log_probs"),
    "other width": (npz(old_log_probs=A2[:, :2]), "values in sequence 0"),
    "other count": (npz(old_log_probs=A2[:1]), "1 sequence"),
    "three axes": (npz(old_log_probs=A2[..., None]), "shape"),
    "one axis": (npz(rollout_log_probs=A2[0], old_log_probs=A2[0]), "has the shape (3,): it must be [sequences"),
    "short mask": (npz(response_mask=np.ones((2, 2))), "values in sequence 0"),
    "NaN in the mask": (npz(response_mask=A2 * np.nan), "whole numbers"),
    "text as log-probs": (npz(old_log_probs=np.array([["a"] * 3] * 2)), "must hold numbers"),
    "fractional ids": (npz(responses=A2 - 0.5), "whole numbers"),
    "short attention": (npz(attention_mask=np.ones((2, 2))), "cover the response"),
    "uids of others": (npz(uid=["x"]), "one value per sequence"),
    "no sequence": (npz(rollout_log_probs=A2[:0], old_log_probs=A2[:0]), "no sequence"),
    "half a line": (raw(b'{"log_probs": [1'), "line 1"),
    "a number": (raw(b'{"a": 1}\n5\n'), "line 2"),
    "latin-1": (raw(b'{"uid": "\xe9"}'), "UTF-8"),
    "deep": (raw(b'{"log_probs": ' + b"[" * 100_000), "line 1"),
    "nested": (lines(two_tokens(old_log_probs=[[-1.0, -2.0]])), "not a list of numbers"),
    "words": (lines(two_tokens(old_log_probs=["-1", "-2"])), "not a list of numbers"),
    "dicts": (lines(two_tokens(old_log_probs=[{"logprob": -1}, {"logprob": -2}])), "not a list of numbers"),
    "a missing list": (lines(two_tokens(), {"rollout_log_probs": [-1.0]}), "line 2"),
    "a value for a list": (lines(two_tokens(), two_tokens(old_log_probs=-1.0)), "line 2"),
    "ragged": (lines(two_tokens(old_log_probs=[-1.0])), "values in sequence 0"),
    "a pickle cut short": (raw(b"\x80\x04\x95"), "--trust"),
    "parquet cut short": (raw(b"PAR1abc"), "as a parquet file"),
    "parquet of text": (parquet(rollout_log_probs=["a"], old_log_probs=["b"]), "log-probs"),
    "parquet of words": (parquet(rollout_log_probs=[["a"]], old_log_probs=[[-1.0]]), "must hold numbers"),
    "parquet without a list": (parquet(rollout_log_probs=[None, [-1.0]], old_log_probs=SCORES2), "no list in row 0"),
    "a pipe": (lambda where: _pipe(where / "x"), "no regular file"),
    "verl's cache": (lambda where: _cache(where), "name the file gen_batch.dp"),
    "a uid bomb": (zipped(uid__npy=header((1,), "<U400000000")), "bytes"),
    "a monitor of two shapes": (steps(A2.astype("f4"), np.ones((2, 2), bool)), "are not one step's"),
    "a monitor of log-probs": (steps(A2.astype("f4"), np.ones((2, 3), bool)), "lie in 0 to 1"),
    "a monitor of integers": (steps(np.ones((2, 3), int), np.ones((2, 3), bool)), "are not one step's"),
    "a monitor of vectors": (steps(np.ones(3, "f4"), np.ones(3, bool)), "[sequences, tokens]"),
    "a monitor of objects": (steps(np.array([[{}]], object), np.ones((1, 1), bool)), "npy"),
}


def _pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def _cache(path: Path) -> Path:
    (path / "gen_batch.dp").write_bytes(b"")
    return path


def _save(path: Path) -> Path:
    np.save(path, A2)
    return path


def _zip(where: Path, name: str) -> Path:
    with zipfile.ZipFile(where / "x", "w") as archive:
        archive.writestr(name, b"")
    return where / "x"


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_gets_one_sentence(tmp_path: Path, case: str) -> None:
    write, words = BAD[case]
    with pytest.raises(ProbeError) as caught:
        read(write(tmp_path))
    assert words in str(caught.value) and "\n" not in str(caught.value) and caught.value.exit_code == 2


@settings(deadline=None, max_examples=40)
@given(st.binary(max_size=60), st.sampled_from([b"", b"PK\x03\x04", b"PAR1", b"\x80\x04", b"{", b"\x93NUMPY"]))
def test_bytes_never_raise_anything_but_a_sentence(content: bytes, magic: bytes) -> None:
    path = folder() / "x"
    path.write_bytes(magic + content)
    with pytest.raises(ProbeError):
        read(path)
    if magic == b"PAR1":
        with pytest.raises(ProbeError):
            read(path, path)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_a_damaged_archive_gets_a_sentence_or_is_read(data: st.DataObject) -> None:
    here = folder()
    kind = data.draw(st.sampled_from(["npz", "parquet"]))
    entry = Row("u", 0, 0, [1], [2, 3], [1, 1], [-1.0, -2.0], [-1.0, -2.0], [0.0, 0.0])
    path = write_npz(here / "x", [entry]) if kind == "npz" else write_parquet(here / "x", as_objects([entry]))
    path = path if path.exists() else path.with_name("x.npz")
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        read(path)
    except ProbeError as error:
        assert "\n" not in str(error)


def test_parquet_without_pyarrow_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "x.parquet", [two_tokens()])
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(TokensError, match="pip install pyarrow"):
        read(path)


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"temperature": -1.0}, {"top_p": 1.5}, {"top_p": float("nan")}]
)
def test_sampling_that_cannot_be_is_refused(tmp_path: Path, options: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="above 0"):
        read(write_jsonl(tmp_path / "x", [two_tokens()]), **options)


def test_a_tokenizer_decodes_and_a_bad_one_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    path = write_jsonl(tmp_path / "x", [two_tokens()])
    Tokenizer(models.WordLevel({"yes": 0, "no": 1}, unk_token="no")).save(str(tmp_path / "tokenizer.json"))
    for given_path in (tmp_path, tmp_path / "tokenizer.json"):
        decode = read_sources([path], tokenizer=given_path)[1]
        assert decode is not None and decode([0]) == "yes"
    assert read_sources([path])[1] is None
    for bad, words in ((path, "no tokenizer"), (tmp_path / "none", "there is no")):
        with pytest.raises(UsageError, match=words):
            read_sources([path], tokenizer=bad)
