"""Capture on real Hugging Face models: whatever the batching, each row equals that of its sequence run alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from capture_tools import by_row, captured, hook_count
from checkpoints import make_checkpoint

from probe.errors import CaptureError
from probe.hooks.rows import Announced
from probe.settings import Settings

# One fp32 forward of two layers, batched or not: matrix kernels sum in another order for another number of rows.
TOLERANCE = 2e-5
SEQUENCES = [[5, 6, 7, 8, 9], [11, 12, 13, 14, 15, 16, 17, 18], [21, 22, 23]]


@pytest.fixture(scope="module", params=["qwen3"])
def model(request, tmp_path_factory):
    """A tiny Hugging Face model in fp32 with eager attention."""
    from transformers import AutoModelForCausalLM

    path = make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def alone(folder, model, sequences=SEQUENCES):
    """Return the dump of each sequence run by itself, without padding."""

    def run(rows):
        for number, tokens in enumerate(sequences):
            rows.announce([Announced(uid=f"s{number}")])
            model(input_ids=torch.tensor([tokens]), use_cache=False)

    return captured(folder, model, run)


def padded(sequences, side):
    """Return ids and mask of a batch padded on one side (token 0 is also a real token: the mask alone decides)."""
    width = max(map(len, sequences))
    fill = [[0] * (width - len(s)) for s in sequences]
    ids = [f + s if side == "left" else s + f for s, f in zip(sequences, fill)]
    ones = [
        [0] * len(f) + [1] * len(s) if side == "left" else [1] * len(s) + [0] * len(f) for s, f in zip(sequences, fill)
    ]
    return torch.tensor(ids), torch.tensor(ones)


def assert_same_rows(dump, reference, *, rows=None):
    """Compare every hidden tensor of two dumps row by row; ``rows`` are those that must be there (all by default)."""
    compared = 0
    for key, info in reference.tensors.items():
        other = dump.tensors.get(key)
        # the rotary tables have one row per column of the batch, and a decode step's mask grows: not rows of tokens
        if "rotary" in key[0] or not info.has_rows or not key[1].startswith(("input", "output")) or other is None:
            continue
        if info.dtype != "float32" or info.feature_shape != other.feature_shape:
            continue
        expected, found = by_row(reference, *key), by_row(dump, *key)
        assert set(found) == set(expected if rows is None else rows), key
        for place, values in found.items():
            assert np.abs(values - expected[place]).max() <= TOLERANCE * max(1, np.abs(expected[place]).max()), key
        compared += 1
    assert compared > 40  # two layers of norms, projections, activations, attention and the head


@pytest.mark.parametrize("side", ["right", "left"])
def test_padded_batches(tmp_path, model, side):
    ids, mask = padded(SEQUENCES, side)
    dump = captured(tmp_path / "b", model, lambda rows: model(input_ids=ids, attention_mask=mask, use_cache=False))
    assert [s.length for s in dump.sequences] == [5, 8, 3]
    assert [s.tokens.tolist() for s in dump.sequences] == SEQUENCES
    assert_same_rows(dump, alone(tmp_path / "a", model))


def test_left_padding_with_positions_that_ignore_it(tmp_path, model):
    ids, mask = padded(SEQUENCES, "left")
    positions = torch.arange(ids.shape[1]).expand(len(ids), -1)

    def run(rows):
        model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)

    assert_same_rows(captured(tmp_path / "b", model, run), alone(tmp_path / "a", model))


def test_packed_sequences(tmp_path, model):
    ids = torch.tensor([[token for tokens in SEQUENCES for token in tokens]])
    positions = torch.cat([torch.arange(len(s)) for s in SEQUENCES])[None]
    dump = captured(tmp_path / "b", model, lambda rows: model(input_ids=ids, position_ids=positions, use_cache=False))
    assert [s.tokens.tolist() for s in dump.sequences] == SEQUENCES
    assert_same_rows(dump, alone(tmp_path / "a", model))


def test_embeddings_instead_of_ids(tmp_path, model):
    ids, mask = padded(SEQUENCES, "right")
    embedded = model.get_input_embeddings()(ids)
    reference = alone(tmp_path / "a", model)
    dump = captured(tmp_path / "b", model, lambda rows: model(inputs_embeds=embedded, attention_mask=mask))
    assert [len(s.tokens) for s in dump.sequences] == [0, 0, 0]
    assert_same_rows(dump, reference)


def test_decode_steps_over_a_cache(tmp_path, model):
    ids, mask = padded(SEQUENCES, "left")
    generated: list[list[int]] = []

    def run(rows):
        out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=4, min_new_tokens=4, do_sample=False)
        generated.extend(row[row_mask.argmax() :].tolist() for row, row_mask in zip(out, mask))

    dump = captured(tmp_path / "b", model, run)
    assert [s.prompt_len for s in dump.sequences] == [5, 8, 3]
    # the last generated token never enters the model
    assert [s.tokens.tolist() for s in dump.sequences] == [s[:-1] for s in generated]
    reference = alone(tmp_path / "a", model, [s[:-1] for s in generated])
    executed = {(f"s{n}", p) for n, s in enumerate(generated) for p in range(len(s) - 1)}
    logits = {(f"s{n}", p) for n, s in enumerate(generated) for p in range(len(SEQUENCES[n]) - 1, len(s) - 1)}
    head = {
        key: dump.tensors.pop(key) for key in [("lm_head", "input.0"), ("lm_head", "output.0"), ("", "output.logits")]
    }
    assert_same_rows(dump, reference, rows=executed)
    dump.tensors |= head
    found, expected = by_row(dump, "lm_head", "output.0"), by_row(reference, "lm_head", "output.0")
    assert set(found) == logits
    for place in logits:
        assert np.abs(found[place] - expected[place]).max() <= TOLERANCE * max(1, np.abs(expected[place]).max())


def test_a_hand_written_decode_loop_without_mask(tmp_path, model):
    tokens = SEQUENCES[1]

    def run(rows):
        cache = model(input_ids=torch.tensor([tokens[:3]]), use_cache=True).past_key_values
        for token in tokens[3:]:
            cache = model(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True).past_key_values

    dump = captured(tmp_path / "b", model, run)
    assert [(s.prompt_len, s.tokens.tolist()) for s in dump.sequences] == [(3, tokens)]
    assert_same_rows(dump, alone(tmp_path / "a", model, [tokens]))


def test_batch_as_long_as_its_sequences(tmp_path, model):
    square = [[5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16], [17, 18, 19, 20]]
    dump = captured(tmp_path / "b", model, lambda rows: model(input_ids=torch.tensor(square), use_cache=False))
    assert_same_rows(dump, alone(tmp_path / "a", model, square))


def test_prompt_rows_alone_are_a_slice_of_all_rows(tmp_path, model):
    ids, mask = padded(SEQUENCES, "right")
    prompts = [Announced(uid=f"s{n}", prompt_len=p) for n, p in enumerate((2, 8, 1))]

    def run(rows):
        rows.announce(prompts)
        model(input_ids=ids, attention_mask=mask, use_cache=False)

    every = captured(tmp_path / "all", model, run)
    only = captured(tmp_path / "only", model, run, prompts_only=True)
    assert list(only.tensors) == list(every.tensors)
    for key, info in only.tensors.items():
        if info.has_rows:
            rows = every.rows(*key)
            prompt = rows["position"] < np.array([2, 8, 1])[rows["sequence"]]
            assert np.array_equal(only.rows(*key), rows[prompt])
            assert only.read_raw(*key).tobytes() == every.read_raw(*key)[prompt].tobytes()


def test_labels_say_where_the_response_starts(tmp_path, model):
    ids, mask = padded(SEQUENCES, "left")
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, :-2], labels[1, :-3] = -100, -100  # two and three response tokens; all of the third sequence is scored
    dump = captured(tmp_path, model, lambda rows: model(input_ids=ids, attention_mask=mask, labels=labels))
    assert [s.prompt_len for s in dump.sequences] == [3, 5, 0]


def test_a_head_that_computes_some_rows(tmp_path, model):
    ids = torch.tensor([SEQUENCES[0], SEQUENCES[1][:5]])
    dump = captured(tmp_path, model, lambda rows: model(input_ids=ids, logits_to_keep=2, use_cache=False))
    assert set(by_row(dump, "lm_head", "output.0")) == {(f"s{n}", p) for n in (0, 1) for p in (3, 4)}


def test_announcing_another_number_of_sequences_is_an_error(tmp_path, model):
    def run(rows):
        rows.announce([Announced(uid="a")])
        model(input_ids=torch.tensor([[1, 2], [3, 4]]))

    with pytest.raises(CaptureError, match="1 sequences were announced but the forward has 2"):
        captured(tmp_path, model, run)
    assert hook_count(model) == 0


def test_one_sequence_in_prefill_chunks(tmp_path, model):
    def run(rows):
        cache = None
        for chunk in ([11, 12, 13], [14, 15, 16], [17, 18]):
            cache = model(input_ids=torch.tensor([chunk]), past_key_values=cache, use_cache=True).past_key_values
        model(input_ids=torch.tensor([[1, 2]]))  # positions start again: a new sequence

    dump = captured(tmp_path, model, run)
    assert [s.tokens.tolist() for s in dump.sequences] == [SEQUENCES[1], [1, 2]]


def test_modules_called_outside_the_forward_are_not_given_its_rows(tmp_path, model):
    def run(rows):
        model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False)
        model.model(input_ids=torch.tensor([[4, 5, 6]]), use_cache=False)

    dump = captured(tmp_path, model, run)
    assert len(dump.read("model.layers.0", "output.0")) == 3
    assert [s.tokens.tolist() for s in dump.sequences] == [[1, 2, 3]]


def test_filters(tmp_path, model):
    settings = Settings(list=("layers.1.mlp",), data_mode=("output",))
    run = model.config and (lambda rows: model(input_ids=torch.tensor([[1, 2]]), use_cache=False))
    dump = captured(tmp_path, model, run, settings=settings)
    assert {slot for _, slot in dump.tensors} == {"output.0"}
    assert all("layers.1.mlp" in module for module, _ in dump.tensors) and len(dump.tensors) == 5
