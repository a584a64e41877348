"""Sources of log-probs: every format gives the same tokens, and sides join by identity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_dumps import Scenario, actor, prompts, write_dump
from token_files import (
    A2,
    PADDING,
    Row,
    arrays,
    as_objects,
    folder,
    read,
    rows,
    tokens_of,
    two_tokens,
    write_jsonl,
    write_npz,
    write_parquet,
)

from probe.compare.tokens.batch import TokenBatch
from probe.compare.tokens.read import read_columns
from probe.compare.tokens.read.names import FILE_COLUMNS, resolve
from probe.compare.tokens.run import compare_token_sources
from probe.errors import CompareError, DumpError, TokensError, UsageError
from probe.sampling import Semantics
from probe.store.reader import open_dump
from probe.store.schema import RL, ROW, RowSegment, Sequence
from probe.store.writer import DumpWriter

ONE_SIDE = {"a": "log_probs", "b": "log_probs"}


def assert_holds(batch: TokenBatch, expected: list[Row], order: list[int] | None = None) -> None:
    """The batch holds the tokens of the rows, numbered as ``order`` lists them."""
    listed = [expected[number] for number in order] if order is not None else expected
    wanted = tokens_of(listed)
    assert batch.a is not None and batch.b is not None
    columns = (batch.sequence, batch.position, batch.token, batch.a, batch.b)
    for at, values in enumerate(columns):
        assert np.array_equal(values, np.array([token[at] for token in wanted], values.dtype))
    assert np.array_equal(batch.prob_diff, np.abs(np.exp(batch.a) - np.exp(batch.b)))
    assert batch.valid.tolist() == [sum(row.mask) for row in listed]
    lost = {(entry.side, entry.kind): entry.count for entry in batch.not_finite}
    for side in "ab":
        inside = [value for row in listed for value, kept in zip(getattr(row, side), row.mask) if kept]
        assert lost.get((side, "nan"), 0) == sum(np.isnan(inside))
        assert lost.get((side, "-inf"), 0) == sum(np.isneginf(inside))
    assert batch.start.tolist() == [len(row.prompt) for row in listed]
    for ids, row in zip(batch.ids, listed):
        assert ids[: len(row.prompt)].tolist() == row.prompt
        shown = ids[len(row.prompt) :].tolist()
        assert shown == row.response[: len(shown)] and len(shown) >= max(np.flatnonzero(row.mask), default=-1) + 1


# -- one file ---------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(rows(), st.sampled_from(PADDING), st.integers(0, 3))
def test_every_format_holds_the_same_tokens(batch: list[Row], padding: float, extra: int) -> None:
    here = folder()
    npz = read(write_npz(here / "x.npz", batch, padding=padding, extra=extra))
    jsonl = read(write_jsonl(here / "x.jsonl", as_objects(batch)))
    parquet = read(write_parquet(here / "x.parquet", as_objects(batch)))
    for found, kind in ((npz, "npz"), (jsonl, "jsonl"), (parquet, "parquet")):
        # json and parquet keep float64 where the arrays of a trainer are float32: the values drawn are both
        assert_holds(found, batch)
        assert [origin.kind for origin in found.origins] == [kind, kind]
        assert [origin.key for origin in found.origins] == ["rollout_log_probs", "old_log_probs"]
        assert found.step.tolist() == [row.step for row in batch]
        assert found.columns["advantages"].tolist() == [token[5] for token in tokens_of(batch)]
        assert found.labels == npz.labels and len(set(found.labels)) == len(batch)
        assert found.lone == (0, 0) and found.lone_last == (0, 0)
    assert npz.width == max(len(row.response) for row in batch) + extra


def test_labels_say_uid_sample_and_step(tmp_path: Path) -> None:
    lines = [{"uid": uid, "step": step, "rollout_log_probs": [-1], "old_log_probs": [-1]} for uid, step in UIDS]
    assert read(write_jsonl(tmp_path / "x", lines)).labels == ["step 1 x.s0", "step 1 x.s1", "step 2 x", "step 2 y"]
    for line in lines:
        del line["step"]
    assert read(write_jsonl(tmp_path / "x", lines)).labels == ["x.s0", "x.s1", "x.s2", "y"]
    for line in lines:
        del line["uid"]
    assert read(write_jsonl(tmp_path / "x", lines)).labels == ["s0", "s1", "s2", "s3"]


UIDS = [("x", 1), ("x", 1), ("x", 2), ("y", 2)]


def test_one_value_per_sequence_counts_for_all_its_tokens(tmp_path: Path) -> None:
    lines = [{"rollout_log_probs": [-1, -2], "old_log_probs": [-1, -2], "advantages": 0.5 * n} for n in range(2)]
    assert read(write_jsonl(tmp_path / "x", lines)).columns["advantages"].tolist() == [0, 0, 0.5, 0.5]


def test_the_docs_list_every_name() -> None:
    text = (Path(__file__).parent.parent / "docs" / "tokens.md").read_text()
    assert [name for entry in FILE_COLUMNS.values() for name in entry.names if f"`{name}`" not in text] == []


def test_text_under_the_names_of_ids_is_passed_over(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hello"}]
    objects = [two_tokens(responses="a text", prompts=messages, uid=f"u{n}") for n in range(2)]
    for path in (write_jsonl(tmp_path / "x", objects), write_parquet(tmp_path / "y", objects)):
        batch = read(path)
        assert batch.token.tolist() == [-1] * 4 and batch.labels == ["u0", "u1"]
        assert sum("not token ids" in note for note in batch.notes) == 2


def test_the_names_of_trainers_are_known() -> None:
    names = [name for entry in FILE_COLUMNS.values() for name in entry.names]
    assert len(names) == len(set(names))
    verl = resolve(["prompts", "responses", "input_ids", "attention_mask", "response_mask", "rollout_log_probs"])
    assert set(verl.found) == {*verl.found.values()}
    assert resolve(["ref_log_prob"]).found == {"ref_log_probs": "ref_log_prob"}
    nemo = resolve(["generation_logprobs", "prev_logprobs", "token_mask", "input_ids"]).found
    assert set(nemo) == {"rollout_log_probs", "old_log_probs", "response_mask", "input_ids"}
    trl = resolve(["completion_ids", "completion_mask", "old_per_token_logps", "sampling_per_token_logps"]).found
    assert set(trl) == {"responses", "response_mask", "old_log_probs", "rollout_log_probs"}


def test_a_file_of_slime_has_the_actor_under_log_probs(tmp_path: Path) -> None:
    line = {"tokens": [7, 8, 9], "rollout_log_probs": [-1, -2], "log_probs": [-1.5, -2.5], "loss_masks": [1, 1]}
    batch = read(write_jsonl(tmp_path / "x", [line]))
    assert batch.a is not None and batch.b is not None
    assert (batch.a.tolist(), batch.b.tolist()) == ([-1, -2], [-1.5, -2.5])
    assert (batch.token.tolist(), batch.start.tolist(), batch.ids[0].tolist()) == ([8, 9], [1], [7, 8, 9])


def test_log_probs_over_the_whole_sequence_count_positions_from_its_start(tmp_path: Path) -> None:
    scores = np.array([[0, -1, -2, -3]], np.float32)
    where = tmp_path / "x.npz"
    np.savez(
        where, generation_logprobs=scores, prev_logprobs=scores, input_ids=[[5, 6, 7, 8]], token_mask=[[0, 0, 1, 1]]
    )
    batch = read(where)
    assert (batch.position.tolist(), batch.token.tolist(), batch.start.tolist()) == ([2, 3], [7, 8], [0])


def test_what_was_sampled_with_is_read_or_declared(tmp_path: Path) -> None:
    line = {"rollout_log_probs": [-1], "old_log_probs": [-1], "temperature": 0.7, "top_p": 0.9}
    path = write_jsonl(tmp_path / "x", [line])
    assert read(path).origins[0].sampled_at == Semantics(0.7, 0.9)
    assert read(path, temperature=0.5).origins[0].sampled_at == Semantics(0.5, 1.0)
    assert read(path).origins[0].meaning is None
    batch = read(write_jsonl(tmp_path / "x", [line, line | {"temperature": 1.0}]))
    assert batch.origins[0].sampled_at == Semantics(1.0, 0.9)
    assert any("temperature" in note and "not used" in note for note in batch.notes)


# -- masks ------------------------------------------------------------------------------------------------------------


def test_without_response_mask_the_end_of_attention_mask_counts(tmp_path: Path) -> None:
    mask = [[0, 1, 1, 1, 0], [1, 1, 1, 0, 0]]
    batch = read(arrays(tmp_path / "x.npz", rollout_log_probs=A2, old_log_probs=A2, attention_mask=mask))
    assert batch.valid.tolist() == [2, 1] and any("attention_mask" in note for note in batch.notes)


@pytest.mark.parametrize("padding", [0.0, np.nan, np.inf])
def test_without_any_mask_a_response_ends_where_both_sides_say_nothing(tmp_path: Path, padding: float) -> None:
    a = np.array([[-1.0, 0.0, -2.0, padding], [-1.0, np.nan, padding, padding]])
    b = np.array([[-1.0, 0.0, -2.0, 0.0], [-1.0, -2.0, padding, 0.0]])
    batch = read(arrays(tmp_path / "x.npz", rollout_log_probs=a, old_log_probs=b))
    # a zero between two tokens is a certain token; a NaN beside a log-prob is a fault, not padding
    assert batch.valid.tolist() == [3, 2]
    assert [(entry.side, entry.kind, entry.sequence, entry.position) for entry in batch.not_finite] == [
        ("a", "nan", "s1", 1)
    ]
    assert any("no mask" in note and "3 cells" in note for note in batch.notes)


@pytest.mark.parametrize("padding", [(-1.0, -1.0), (-1.0, 0.0), (151643.0, -100.0), (np.nan, -1.0)])
@pytest.mark.parametrize("together", [True, False])
def test_without_any_mask_a_constant_at_the_end_of_most_rows_is_padding(
    tmp_path: Path, padding: tuple[float, float], together: bool
) -> None:
    rng = np.random.default_rng(0)
    lengths = [3, 8, 5, 5]
    sides = []
    for value in padding:
        sides.append(-rng.exponential(size=(4, 8)))
        for row, length in enumerate(lengths):
            sides[-1][row, length:] = value
    if together:
        batch = read(arrays(tmp_path / "x.npz", rollout_log_probs=sides[0], old_log_probs=sides[1]))
    else:
        batch = read(*(arrays(tmp_path / f"{n}.npz", log_probs=side) for n, side in enumerate(sides)))
    assert batch.valid.tolist() == lengths and not batch.not_finite and batch.lone == (0, 0)
    assert any("11 cells of it at the ends of rows count as padding" in note for note in batch.notes)


def test_without_any_mask_a_constant_in_few_rows_or_whole_rows_is_no_padding(tmp_path: Path) -> None:
    scores = -np.random.default_rng(0).exponential(size=(4, 6))
    few, whole = scores.copy(), np.full((4, 6), -1.0)
    few[:2, 3:] = -1.0
    for own in (few, whole):
        assert read(arrays(tmp_path / "x.npz", rollout_log_probs=own, old_log_probs=scores)).valid.tolist() == [6] * 4


def test_a_mask_without_a_token_gives_an_empty_batch(tmp_path: Path) -> None:
    batch = read(arrays(tmp_path / "x.npz", rollout_log_probs=A2, old_log_probs=A2, response_mask=np.zeros((2, 3))))
    assert len(batch) == 0 and batch.valid.tolist() == [0, 0] and batch.labels == ["s0", "s1"]


def test_tokens_that_one_side_masks_are_counted(tmp_path: Path) -> None:
    ids = [[1, 2, 3], [4, 5, 6]]
    a = arrays(tmp_path / "a.npz", log_probs=A2 - 1, responses=ids, response_mask=[[1, 1, 1], [1, 1, 0]])
    b = arrays(tmp_path / "b.npz", log_probs=A2 - 1, responses=ids, response_mask=[[1, 1, 0], [0, 1, 1]])
    batch = read(a, b)
    assert batch.valid.tolist() == [2, 1]
    assert batch.lone == (2, 1) and batch.lone_last == (1, 1)


@settings(deadline=None, max_examples=40)
@given(rows(finite=True), st.data())
def test_masks_of_two_files_that_differ_leave_what_both_have(batch: list[Row], data: st.DataObject) -> None:
    here = folder()
    bits = st.integers(0, 1)
    other = []
    for number, row in enumerate(batch):
        row.prompt = [*row.prompt, 100 + number]
        length = len(row.response)
        other.append(replace(row, mask=data.draw(st.lists(bits, min_size=length, max_size=length))))
    found = read(
        write_npz(here / "a.npz", batch, "a", ONE_SIDE),
        write_jsonl(here / "b.jsonl", as_objects(data.draw(st.permutations(other)), "b", ONE_SIDE)),
    )
    both = [replace(row, mask=[x & y for x, y in zip(row.mask, two.mask)]) for row, two in zip(batch, other)]
    assert_holds(found, both)
    masks = [(np.array(row.mask, bool), np.array(two.mask, bool)) for row, two in zip(batch, other)]
    assert found.lone == (sum((x & ~y).sum() for x, y in masks), sum((y & ~x).sum() for x, y in masks))
    ends = [[max(np.flatnonzero(mask), default=-1) for mask in pair] for pair in masks]
    assert found.lone_last == (sum(x > y for x, y in ends), sum(y > x for x, y in ends))


@pytest.mark.parametrize("names", [({}, {"uid": "x"}), ({"uid": "y"}, {"uid": "x"}), ({"uid": "x"}, {"uid": "x"})])
def test_ids_join_sequences_whatever_they_are_called(tmp_path: Path, names: tuple[dict[str, str], ...]) -> None:
    rows_of = [{"responses": [1, 2], "log_probs": [-1, -2]}, {"responses": [3], "log_probs": [-3]}]
    a = write_jsonl(tmp_path / "a", [row | names[0] for row in rows_of])
    b = write_jsonl(tmp_path / "b", [row | names[1] for row in reversed(rows_of)])
    batch = read(a, b)
    assert batch.a is not None and batch.a.tolist() == [-1, -2, -3] and np.array_equal(batch.a, batch.b)


def test_a_mask_in_one_of_two_files_counts_for_both(tmp_path: Path) -> None:
    a = arrays(tmp_path / "a.npz", log_probs=A2)
    b = arrays(tmp_path / "b.npz", log_probs=A2, response_mask=[[1, 0, 1], [1, 0, 0]])
    for paths in ((a, b), (b, a)):
        batch = read(*paths)
        assert batch.position.tolist() == [0, 2, 0] and batch.lone == (0, 0)
        assert any("only" in note and "b.npz" in note for note in batch.notes)


def test_files_are_held_against_the_wider_ranges_where_they_are_declared_so(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    a = -2 - rng.exponential(size=(4, 50))
    both = {"rollout_log_probs": a, "old_log_probs": a + rng.normal(0, 0.05, a.shape), "response_mask": a < 0}
    path = arrays(tmp_path / "x.npz", **both)
    for loose, verdict in ((False, "suspect"), (True, "consistent")):
        assert compare_token_sources([path], loose=loose)["verdict"] == verdict


# -- two files --------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(rows(finite=True), st.data())
def test_two_files_join_whatever_the_order_and_padding(batch: list[Row], data: st.DataObject) -> None:
    here, order = folder(), data.draw(st.permutations(range(len(batch))))
    by = data.draw(st.sampled_from(["uid", "ids", "both"]))
    for number, row in enumerate(batch):  # without a uid equal prompts and responses are one sequence
        row.prompt = [*row.prompt, 100 + number]
    without = {"uid": ("responses", "prompts", "input_ids", "attention_mask"), "ids": ("uid",), "both": ()}[by]
    drop = dict.fromkeys(without)
    a = write_npz(here / "a.npz", batch, "a", ONE_SIDE, padding=data.draw(st.sampled_from(PADDING)), **drop)
    other = [batch[number] for number in order]
    extra = data.draw(st.integers(0, 3))
    if data.draw(st.booleans()) and by != "uid":
        b = write_jsonl(here / "b.jsonl", [without_keys(o, without) for o in as_objects(other, "b", ONE_SIDE)])
    else:
        b = write_npz(here / "b.npz", other, "b", ONE_SIDE, extra=extra, **drop)
    found = read(a, b)
    if by == "uid":
        wanted = tokens_of(batch)
        assert found.b is not None and found.b.tolist() == [token[4] for token in wanted]
        assert found.token.tolist() == [-1] * len(wanted)
    else:
        # a response whose last tokens are masked is known by its tokens up to there: equal ones may trade places
        assert_holds(found, batch)


def without_keys(entry: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name not in names}


def test_responses_that_part_are_compared_up_to_there(tmp_path: Path) -> None:
    line = {"prompts": [1, 2], "responses": [3, 4, 5], "log_probs": [-1, -2, -3]}
    a = write_jsonl(tmp_path / "a", [line])
    b = write_jsonl(tmp_path / "b", [line | {"responses": [3, 9, 5]}])
    assert read(a, b).token.tolist() == [3]


@pytest.mark.parametrize("mask", [{}, {"response_mask": [1, 1, 1]}])
def test_the_last_token_that_only_one_side_has_is_counted(tmp_path: Path, mask: dict[str, list[int]]) -> None:
    line = {"responses": [3, 4, 5], "log_probs": [-1, -2, -3], **mask}
    short = {name: values[:2] for name, values in line.items()}
    other = line | {"responses": [6, 7, 8]}
    a, b = write_jsonl(tmp_path / "a", [line, other]), write_jsonl(tmp_path / "b", [short, other])
    batch = read(a, b)
    assert (batch.lone, batch.lone_last, batch.valid.tolist()) == ((1, 0), (1, 0), [2, 3])


def test_a_response_that_goes_on_joins_the_one_that_stops(tmp_path: Path) -> None:
    a = write_jsonl(tmp_path / "a", [{"responses": [3, 4, 5], "log_probs": [-1, -2, -3], "response_mask": [1, 1, 1]}])
    b = write_jsonl(tmp_path / "b", [{"responses": [3, 4], "log_probs": [-1, -2], "response_mask": [1, 1]}])
    batch = read(a, b)
    assert batch.token.tolist() == [3, 4] and batch.width == 3


def test_files_without_identities_join_by_order_where_their_shapes_agree(tmp_path: Path) -> None:
    a, b = arrays(tmp_path / "a.npz", log_probs=A2), arrays(tmp_path / "b.npz", old_log_probs=A2 - 1)
    batch = read(a, b)
    assert len(batch) == 6 and any("their order" in note for note in batch.notes)
    assert [origin.key for origin in batch.origins] == ["log_probs", "old_log_probs"]
    narrow = arrays(tmp_path / "c.npz", log_probs=A2[:, :2])
    with pytest.raises(CompareError, match="no uid and no token ids in common"):
        read(a, narrow)


def test_sequences_without_a_partner_are_left_out_and_noted(tmp_path: Path) -> None:
    lines = [{"uid": uid, "log_probs": [-1]} for uid in ("x", "y", "z")]
    a, b = write_jsonl(tmp_path / "a", lines), write_jsonl(tmp_path / "b", lines[1:])
    batch = read(a, b)
    assert batch.labels == ["y", "z"] and [left.split("/")[-1] for left in batch.left_out] == ["a: no partner"]
    with pytest.raises(CompareError, match="no sequence of"):
        read(a, write_jsonl(tmp_path / "c", [{"uid": "w", "log_probs": [-1]}]))
    with pytest.raises(CompareError, match="two sequences of"):
        read(write_jsonl(tmp_path / "d", [line | {"sample": 0, "uid": "x"} for line in lines]), b)


def sampled(path: Path, lengths: list[int], order: list[int], **fields: list[Any]) -> Path:
    """Write samples of one prompt, log-probs -1, -2, ... by sample, in some order, without sample numbers."""
    lines = [{"uid": "p", "log_probs": [-1.0 - n] * lengths[n], **{k: v[n] for k, v in fields.items()}} for n in order]
    return write_jsonl(path, lines)


def test_samples_without_numbers_join_by_their_length(tmp_path: Path) -> None:
    a, b = (sampled(tmp_path / name, [2, 4, 1], order) for name, order in (("a", [0, 1, 2]), ("b", [2, 1, 0])))
    batch = read(a, b)
    assert batch.a is not None and len(batch) == 7 and np.array_equal(batch.a, batch.b)
    assert any("by their length" in note for note in batch.notes)


def test_samples_without_numbers_join_by_token_ids(tmp_path: Path) -> None:
    ids = [[5], [5, 6], [7, 8]]
    a, b = (sampled(tmp_path / n, [1, 2, 2], o, responses=ids) for n, o in (("a", [0, 1, 2]), ("b", [2, 1, 0])))
    batch = read(a, b)
    assert batch.a is not None and len(batch) == 5 and np.array_equal(batch.a, batch.b)


def test_samples_that_nothing_tells_apart_are_refused_or_joined_by_order_aloud(tmp_path: Path) -> None:
    a, b = (sampled(tmp_path / name, [2, 2, 2], [0, 1, 2]) for name in "ab")
    batch = read(a, b)
    assert len(batch) == 6 and any("wrong if one file was reordered" in note for note in batch.notes)
    other = sampled(tmp_path / "c", [2, 2, 2], [0, 1])
    with pytest.raises(CompareError, match=r"the uid p names 3 sequences of .*add sample numbers or token ids"):
        read(a, other)
    lines = [{"uid": uid, "log_probs": [-1.0, -1.0]} for uid in "ppq"]
    first, second = write_jsonl(tmp_path / "d", lines), write_jsonl(tmp_path / "e", lines[::-1])
    with pytest.raises(CompareError, match="the uid p names 2 sequences"):
        read(first, second)
    longer = sampled(tmp_path / "f", [2, 2, 3], [0, 1, 2])
    with pytest.raises(CompareError, match="nothing tells apart"):
        read(a, longer)
    with pytest.raises(CompareError, match="nothing tells apart"):  # advantages too
        one = read(write_jsonl(tmp_path / "g", [{**line, "old_log_probs": [-1, -1]} | ROLLOUT for line in lines]))
        read_columns(write_jsonl(tmp_path / "h", [{"uid": u, "advantages": [1, 1]} for u in "qpp"]), one)


ROLLOUT = {"rollout_log_probs": [-1, -1]}


def test_sample_numbers_on_both_sides_join_in_any_order(tmp_path: Path) -> None:
    samples = [0, 1, 2]
    a, b = (sampled(tmp_path / n, [2, 2, 2], o, sample=samples) for n, o in (("a", [0, 1, 2]), ("b", [2, 0, 1])))
    batch = read(a, b)
    assert batch.a is not None and len(batch) == 6 and np.array_equal(batch.a, batch.b)


@pytest.mark.parametrize("uid", [True, False])
@pytest.mark.parametrize("cut", [0, 1, 4])
def test_responses_that_part_are_compared_up_to_there_without_prompts(tmp_path: Path, uid: bool, cut: int) -> None:
    lines = [
        {"responses": [10 * n + k for k in range(5)], "log_probs": [-1.0] * 5, **({"uid": f"u{n}"} if uid else {})}
        for n in range(3)
    ]
    empty = {"responses": [], "log_probs": [], **({"uid": "none"} if uid else {})}
    others = [dict(line) for line in lines]
    others[1]["responses"] = [*lines[1]["responses"][:cut], 99, *lines[1]["responses"][cut + 1 :]]
    a = write_jsonl(tmp_path / "a", [*lines, empty])
    b = write_jsonl(tmp_path / "b", [*others, empty][:: -1 if uid else 1])
    batch = read(a, b)
    assert batch.valid.tolist() == ([5, cut, 5, 0] if cut else [5, 5, 0])
    report = compare_token_sources([a, b])
    if cut:
        assert "1 sequence from the first token id on that differs" in report["not_compared"]
    else:
        assert [f"1 sequence of {path}: no partner" in report["not_compared"] for path in (a, b)] == [True, True]


def test_a_file_of_both_sides_can_be_one_side(tmp_path: Path) -> None:
    path = arrays(tmp_path / "x.npz", rollout_log_probs=A2, old_log_probs=A2 - 1, response_mask=A2 < 0)
    batch = read(path, path)
    assert [origin.key for origin in batch.origins] == ["rollout_log_probs", "old_log_probs"]
    assert any("was not" in note for note in batch.notes)


# -- logits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_logits_of_some_tokens_are_read_row_by_row(tmp_path: Path, save: Callable[..., None]) -> None:
    rng = np.random.default_rng(0)
    count, width, vocab = 7, 40, 11
    logits = rng.normal(size=(count, width, vocab)).astype(np.float32)
    ids = rng.integers(0, vocab, (count, width))
    scores = np.take_along_axis(logits - np.log(np.exp(logits).sum(-1, keepdims=True)), ids[..., None], -1)[..., 0]
    fields = {"responses": ids, "response_mask": rng.random((count, width)) < 0.7}
    save(tmp_path / "x.npz", rollout_log_probs=scores, old_log_probs=scores, logits=logits, **fields)
    batch = read(tmp_path / "x.npz")
    assert batch.rows is not None and batch.b is not None and batch.rows_of == "b"
    assert len(batch.rows_at) == len(batch.rows.tokens) == 64
    at = batch.rows_at
    assert np.array_equal(batch.rows.logits, logits[batch.sequence[at], batch.position[at]])
    assert np.array_equal(batch.rows.tokens, batch.token[at]) and np.array_equal(batch.rows.logprobs, batch.b[at])
    save(tmp_path / "a.npz", log_probs=scores, logits=logits[:, :-1], **fields)
    assert read(tmp_path / "a.npz", tmp_path / "a.npz").rows is None
    save(tmp_path / "a.npz", log_probs=scores, logits=logits, **fields)
    save(tmp_path / "b.npz", log_probs=scores[::-1], responses=ids[::-1], response_mask=fields["response_mask"][::-1])
    one = read(tmp_path / "a.npz", tmp_path / "b.npz")
    assert one.rows is not None and one.rows_of == "a"
    assert np.array_equal(one.rows.logits, logits[one.sequence[one.rows_at], one.position[one.rows_at]])


# -- a monitor's folder -----------------------------------------------------------------------------------------------


def write_step(where: Path, suffix: str, gap: np.ndarray, mask: np.ndarray) -> None:
    np.save(where / f"prob_diff{suffix}.npy", gap.astype(np.float32))
    np.save(where / f"prob_mask{suffix}.npy", mask)


def test_a_monitors_folder_is_read_step_by_step(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    parts = {step: (rng.random((2, width)), rng.random((2, width)) < 0.5) for step, width in ((10, 3), (9, 4))}
    for step, (gap, mask) in parts.items():
        write_step(tmp_path, f"_step_{step}", gap, mask)
    np.save(tmp_path / "prob_diff_step_11.npy", np.zeros((2, 3), np.float32))
    batch = read(tmp_path)
    expected = np.concatenate([parts[step][0].astype(np.float32)[parts[step][1]] for step in (9, 10)])
    assert batch.a is None and batch.b is None and np.array_equal(batch.prob_diff, expected)
    assert batch.step.tolist() == [9, 9, 10, 10] and batch.labels[0] == "step 9 s0" and batch.width == 4
    assert any("prob_diff_step_11.npy has no" in note for note in batch.notes)
    one = read(tmp_path / "prob_diff_step_10.npy")
    assert np.array_equal(one.prob_diff, parts[10][0].astype(np.float32)[parts[10][1]]) and one.labels == ["s0", "s1"]


def test_what_the_monitor_in_training_writes_is_read(tmp_path: Path) -> None:
    import torch

    from probe.hooks.engines.verl import calculate_token_level_prob_diff

    scores = torch.tensor([[-1.0, -2.0, float("inf")], [-0.5, float("nan"), 0.0]])
    data = {
        "rollout_log_probs": scores,
        "old_log_probs": scores - 0.5,
        "responses": torch.ones(2, 3, dtype=torch.int64),
        "response_mask": torch.tensor([[1, 1, 0], [1, 0, 0]]),
    }
    for step in (1, 2):
        calculate_token_level_prob_diff(data, save_dir=str(tmp_path), step=step)
    batch = read(tmp_path)
    assert batch.step.tolist() == [1, 1, 2, 2] and batch.valid.tolist() == [2, 1, 2, 1] and not batch.not_finite
    gap = np.exp([-1.0, -2.0, -0.5]) - np.exp([-1.5, -2.5, -1.0])
    assert batch.prob_diff == pytest.approx([*gap, *gap], rel=1e-6)  # float32


def test_a_monitors_files_without_a_step(tmp_path: Path) -> None:
    gap = np.array([[0.5, np.nan, np.inf], [np.nan, 0.25, 0.0]])
    write_step(tmp_path, "", gap, np.array([[True, False, True], [True, True, False]]))
    batch = read(tmp_path)
    assert batch.prob_diff.tolist() == [0.5, 0.25] and batch.step.tolist() == [-1, -1]
    assert batch.valid.tolist() == [2, 2]
    assert {(entry.side, entry.kind, entry.count) for entry in batch.not_finite} == {
        ("unknown", "nan", 1),
        ("unknown", "+inf", 1),
    }


# -- dumps ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    where = tmp_path_factory.mktemp("dumps")
    a, b = write_dump(where / "a", Scenario()), write_dump(where / "b", actor(noise=1))
    return a / "rollout", b / "actor"


def test_two_dumps_have_logits_of_their_tokens(dumps: tuple[Path, Path]) -> None:
    batch = read(*dumps)
    assert batch.a is not None and batch.rows is not None and len(batch) > 8
    assert [origin.kind for origin in batch.origins] == ["dump", "dump"] and batch.rows_of == "a"
    assert np.array_equal(batch.rows.tokens, batch.token[batch.rows_at])
    assert np.array_equal(batch.rows.logprobs, batch.a[batch.rows_at])
    shifted = batch.rows.logits - batch.rows.logits.max(axis=1, keepdims=True)
    own = shifted[np.arange(len(batch.rows_at)), batch.rows.tokens] - np.log(np.exp(shifted).sum(axis=1))
    # fp32 logits and log-probs of them
    assert np.abs(own - batch.rows.logprobs).max() < 1e-5


def test_one_dump_is_compared_with_its_own_logits(dumps: tuple[Path, Path]) -> None:
    batch = read(dumps[0])
    assert batch.a is not None and batch.b is not None
    assert [origin.key for origin in batch.origins] == ["engine", "recomputed"]
    sizes = [(len(ids), prompt) for _, ids, prompt in prompts()]
    assert len(batch) == sum(length - prompt for length, prompt in sizes)
    assert np.array_equal(batch.a, batch.b) and batch.start.tolist() == [prompt for _, prompt in sizes]
    assert batch.labels == [name for name, _, _ in prompts()]


def test_a_dump_joins_a_file(dumps: tuple[Path, Path], tmp_path: Path) -> None:
    whole = read(*dumps)
    assert whole.a is not None and whole.b is not None
    lines = []
    for number in reversed(range(len(whole.labels))):
        mine, start = whole.sequence == number, int(whole.start[number])
        ids = whole.ids[number].tolist()
        lines.append({"prompts": ids[:start], "responses": ids[start:], "old_log_probs": whole.b[mine].tolist()})
    path = write_jsonl(tmp_path / "b.jsonl", lines)
    batch = read(dumps[0], path)
    assert batch.a is not None and batch.b is not None
    assert np.array_equal(batch.a, whole.a) and np.array_equal(batch.b, whole.b)
    assert np.array_equal(batch.position, whole.position) and batch.labels == whole.labels
    assert [(o.kind, o.key) for o in batch.origins] == [("dump", "engine"), ("jsonl", "old_log_probs")]
    with open_dump(dumps[0]) as dump:
        assert batch.origins[0].sampled_at == Semantics(**dump.manifest["sampling"])


def test_dumps_refuse_what_only_files_need(dumps: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--temperature"):
        read(*dumps, temperature=0.7)
    with pytest.raises(DumpError):
        read(tmp_path)


# -- columns of the PPO update ----------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(rows(finite=True), st.randoms(use_true_random=False))
def test_advantages_join_by_identity(batch: list[Row], random: Any) -> None:
    here = folder()
    for number, row in enumerate(batch):
        row.prompt = [*row.prompt, 100 + number]
    path = write_npz(here / "x.npz", batch, advantages=None)
    shuffled = random.sample(batch, len(batch))
    wanted = [token[5] for token in tokens_of(batch)]
    objects = [
        {"advantages": o["advantages"], **{n: o[n] for n in ("responses", "prompts")}} for o in as_objects(shuffled)
    ]
    named = [{n: o[n] for n in ("advantages", "uid", "sample", "step")} for o in as_objects(shuffled)]
    ordered = [{"advantages": o["advantages"]} for o in as_objects(batch)]
    for number, lines in enumerate((objects, named, ordered)):
        found = read(path)
        if not wanted:
            continue
        source = write_jsonl(here / f"{number}.jsonl", lines)
        if number == 2 and any(len(row.response) == 0 for row in batch):
            continue
        if number:  # no ids: the batch must not have any either
            found = read(
                write_npz(here / "y.npz", batch, advantages=None, **NO_IDS, **({} if number == 1 else NO_NAMES))
            )
        assert "advantages" not in found.columns
        read_columns(source, found)
        assert found.columns["advantages"].tolist() == wanted


NO_IDS = dict.fromkeys(("responses", "prompts", "input_ids", "attention_mask"))
NO_NAMES = dict.fromkeys(("uid", "sample", "step"))


def test_a_dump_of_the_trainer_gives_columns(dumps: tuple[Path, Path], tmp_path: Path) -> None:
    known = prompts()
    copy = write_dump(tmp_path / "b", actor(noise=1))
    writer = DumpWriter(copy / "actor" / "step0" / "rank1.h5", {"schema": 1, "stage": "actor", "engine": {"name": "x"}})
    for uid, ids, prompt in known:
        writer.add_sequence(Sequence(0, uid, prompt_len=prompt, length=len(ids), tokens=ids))
    cells = [(n, p, ids[p], 0) for n, (_, ids, prompt) in enumerate(known) for p in range(prompt, len(ids))]
    values = np.array([n + p / 100 for n, p, _, _ in cells], np.float32)
    writer.append(RL, "advantages", values, "float32", RowSegment(np.array(cells, ROW)))
    writer.close()
    batch = read(dumps[0])
    read_columns(copy / "actor", batch)
    assert np.array_equal(batch.columns["advantages"], values)
    with pytest.raises(TokensError, match="holds none of advantages"):
        read_columns(dumps[1], batch)


def test_columns_without_identities_join_by_order_where_they_cover_the_tokens(tmp_path: Path) -> None:
    mask = [[1, 0, 1, 0], [1, 1, 0, 0]]
    scores = np.full((2, 4), -1.0)
    ids = np.arange(8).reshape(2, 4)
    path = arrays(tmp_path / "x.npz", rollout_log_probs=scores, old_log_probs=scores, responses=ids, response_mask=mask)
    batch = read(path)
    read_columns(arrays(tmp_path / "p.npz", advantages=ids, response_mask=mask), batch)
    assert batch.columns["advantages"].tolist() == [0, 2, 4, 5] and any("their order" in n for n in batch.notes)
    for bad in (ids[:1], ids[:, :2]):
        with pytest.raises(CompareError, match=r"sequences? of 2 to 3 tokens of .*x\.npz"):
            read_columns(arrays(tmp_path / "q.npz", advantages=bad), read(path))


def test_columns_join_by_uid_whatever_the_uids_look_like(tmp_path: Path) -> None:
    sides = {"rollout_log_probs": [-1.0], "old_log_probs": [-1.0]}
    for name, uids in (("plain", ("x", "y")), ("like numbers of rows", ("s0", "s1"))):
        batch = read(write_jsonl(tmp_path / name, [{"uid": uid, **sides} for uid in uids]))
        other_order = [{"uid": uid, "advantages": [float(at)]} for at, uid in reversed([*enumerate(uids)])]
        read_columns(write_jsonl(tmp_path / f"{name} ppo", other_order), batch)
        assert batch.columns["advantages"].tolist() == [0.0, 1.0], name


def test_one_advantage_per_sequence_in_a_file_of_its_own(tmp_path: Path) -> None:
    scores, mask = np.full((2, 3), -1.0), [[1, 1, 1], [1, 0, 0]]
    fields = {"rollout_log_probs": scores, "old_log_probs": scores, "response_mask": mask}
    path, named = arrays(tmp_path / "x.npz", **fields), arrays(tmp_path / "y.npz", uid=["x", "y"], **fields)
    lines = [{"uid": uid, "advantages": value} for uid, value in (("y", 7.0), ("x", 5.0), ("z", 6.0))]
    with_ids = arrays(tmp_path / "i.npz", responses=np.arange(6).reshape(2, 3), uid=["x", "y"], **fields)
    for source, columns in (
        (path, arrays(tmp_path / "p.npz", advantages=[5.0, 7.0])),
        (named, write_jsonl(tmp_path / "p.jsonl", lines)),
        (with_ids, write_parquet(tmp_path / "p.parquet", lines)),
    ):
        batch = read(source)
        read_columns(columns, batch)
        assert batch.columns["advantages"].tolist() == [5, 5, 5, 7]
    with pytest.raises(CompareError, match="join by"):
        read_columns(arrays(tmp_path / "q.npz", advantages=[5.0]), read(path))
    with pytest.raises(TokensError, match="no column of the PPO update"):
        read_columns(arrays(tmp_path / "q.npz", uid=["x"]), read(path))
    same = [{"uid": "x", "advantages": value} for value in (1.0, 2.0)]
    batch = read(arrays(tmp_path / "z.npz", uid=["x", "x"], **fields))
    read_columns(write_jsonl(tmp_path / "q", same), batch)
    assert batch.columns["advantages"].tolist() == [1, 1, 1, 2]
    assert any("wrong if one file was reordered" in note for note in batch.notes)


def test_an_update_of_nothing_is_no_trouble(tmp_path: Path) -> None:
    path = arrays(
        tmp_path / "x.npz", rollout_log_probs=A2, old_log_probs=A2, response_mask=0 * A2, advantages=np.ones(2)
    )
    report = compare_token_sources([path], ppo=path)
    assert report["verdict"] == "incomparable" and any("nothing of" in note for note in report["notes"])


def test_tokens_that_the_columns_lack_are_nan(tmp_path: Path) -> None:
    batch = read(
        write_jsonl(tmp_path / "x", [{"uid": u, "rollout_log_probs": [-1], "old_log_probs": [-1]} for u in "xy"])
    )
    read_columns(write_jsonl(tmp_path / "p", [{"uid": "y", "advantages": [2.0], "ref_log_prob": [-3.0]}]), batch)
    assert np.array_equal(batch.columns["advantages"], [np.nan, 2.0], equal_nan=True)
    assert np.array_equal(batch.columns["ref_log_probs"], [np.nan, -3.0], equal_nan=True)
    assert any("lacks 1 token of 2" in note for note in batch.notes)
    with pytest.raises(TokensError, match="holds none of advantages"):
        read_columns(write_jsonl(tmp_path / "q", [{"uid": "y", "log_probs": [2.0]}]), batch)


def test_a_million_tokens_stay_within_a_few_hundred_megabytes(tmp_path: Path) -> None:
    import tracemalloc

    rng = np.random.default_rng(0)
    scores = -rng.exponential(size=(1000, 1000)).astype(np.float32)
    fields = {"responses": rng.integers(0, 150_000, scores.shape), "response_mask": np.ones(scores.shape, bool)}
    np.savez(tmp_path / "x.npz", rollout_log_probs=scores, old_log_probs=scores, **fields)
    tracemalloc.start()
    batch = read(tmp_path / "x.npz")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # what stays is 56 bytes a token, the file's arrays 17, and copies on the way about as much again
    assert len(batch) == 1_000_000 and peak < 250e6
