"""Prompt files: every form that is read, and one clear sentence with the line for every one that is not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from probe.errors import PromptsError
from probe.hooks.runners.prompts import Prompt, read_prompts, tokenize


def write(tmp_path: Path, *lines, name: str = "p.jsonl") -> Path:
    """Write lines (objects as JSON) and return the file."""
    path = tmp_path / name
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def test_text_lines(tmp_path):
    path = tmp_path / "p.txt"
    path.write_bytes("\ufeffFirst  prompt \r\n\r\n  \nséc\u2028ond\r\nlast".encode())
    assert read_prompts(path) == [
        Prompt("p0000", text="First  prompt "),
        Prompt("p0001", text="séc\u2028ond"),
        Prompt("p0002", text="last"),
    ]


def test_json_lines(tmp_path):
    chat = [{"role": "user", "content": "hi"}]
    path = write(
        tmp_path,
        {"text": "a"},
        '"b"',
        {"prompt": "c", "id": 7},
        "",
        {"token_ids": [1, 2], "uid": "mine", "id": "other"},
        {"prompt_token_ids": [3], "text": None, "uid": None},
        {"tokens": [4]},
        {"messages": chat, "answer": "ignored"},
        '{"text": "two\u2028lines"}',
    )
    assert read_prompts(path) == [
        Prompt("p0000", text="a"),
        Prompt("p0001", text="b"),
        Prompt("7", text="c"),
        Prompt("mine", tokens=[1, 2]),
        Prompt("p0004", tokens=[3]),
        Prompt("p0005", tokens=[4]),
        Prompt("p0006", messages=chat),
        Prompt("p0007", text="two\u2028lines"),
    ]
    assert read_prompts(write(tmp_path, {"text": "a"}, name="p.json")) == [Prompt("p0000", text="a")]


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ("{", "line 3 is not valid JSON"),
        ("[" * 100_000, "line 3 is not valid JSON"),
        ([1, 2], "line 3 holds list, not an object"),
        ("3", "line 3 holds int, not an object"),
        ("null", "line 3 holds NoneType, not an object"),
        ({}, "line 3 has none of 'text', 'messages' and 'token_ids'"),
        ({"text": ""}, "line 3: 'text' is not a text"),
        ({"prompt": 5}, "line 3: 'prompt' is not a text"),
        ({"token_ids": []}, "line 3: 'token_ids' is not a list of token ids"),
        ({"token_ids": [1, -2]}, "line 3: 'token_ids' is not a list of token ids"),
        ({"token_ids": [1, True]}, "line 3: 'token_ids' is not a list of token ids"),
        ({"tokens": [1.0]}, "line 3: 'tokens' is not a list of token ids"),
        ({"tokens": "1 2"}, "line 3: 'tokens' is not a list of token ids"),
        ({"messages": []}, "line 3: 'messages' is not a chat"),
        ({"messages": [{"role": "user"}]}, "line 3: 'messages' is not a chat"),
        ({"messages": "hi"}, "line 3: 'messages' is not a chat"),
    ],
    ids=range(16),
)
def test_bad_lines_are_numbered(tmp_path, bad, problem):
    with pytest.raises(PromptsError) as caught:
        read_prompts(write(tmp_path, {"text": "good"}, "", bad))
    assert problem in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_files_that_hold_no_prompts(tmp_path):
    with pytest.raises(PromptsError, match="there is no prompts file"):
        read_prompts(tmp_path / "none.txt")
    with pytest.raises(PromptsError, match="cannot be read"):
        read_prompts(tmp_path)
    with pytest.raises(PromptsError, match="holds no prompt"):
        read_prompts(write(tmp_path, "", "  "))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(PromptsError, match="cannot be read"):
        read_prompts(tmp_path / "latin.txt")


def test_ids_are_unique(tmp_path):
    path = write(tmp_path, {"text": "a", "id": "x"}, {"text": "b", "id": "y"}, {"text": "c", "id": "x"})
    with pytest.raises(PromptsError, match="uses the id 'x' more than once"):
        read_prompts(path)
    with pytest.raises(PromptsError, match="uses the id 'p0001' more than once"):
        read_prompts(write(tmp_path, {"text": "a", "id": "p0001"}, {"text": "b"}))


class FakeTokenizer:
    """One token per letter, and a chat template that wants users only."""

    chat_template = "template"

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [0] * add_special_tokens + [ord(letter) % 50 for letter in text.strip()]}

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        from jinja2 import TemplateError

        if messages[0]["role"] != "user":
            raise TemplateError("roles must alternate")
        return "".join(m["content"] for m in messages) + ">" * add_generation_prompt


@pytest.fixture
def tokenizer(monkeypatch):
    """Replace the loading of a tokenizer from a checkpoint."""
    fake = FakeTokenizer()
    monkeypatch.setattr("probe.hooks.runners.prompts.load_tokenizer", lambda model: fake)
    return fake


def test_tokens(tokenizer):
    prompts = [
        Prompt("a", text="ab"),
        Prompt("b", tokens=[3]),
        Prompt("c", messages=[{"role": "user", "content": "d"}]),
    ]
    tokenize(prompts, Path("m"), 64)
    # a chat template writes its special tokens itself, so that none is added
    assert [p.tokens for p in prompts] == [[0, 47, 48], [3], [0, 12]]


def test_tokens_the_model_does_not_have(tokenizer):
    with pytest.raises(PromptsError, match="prompt b holds token 64, but the vocabulary of m has 64"):
        tokenize([Prompt("a", tokens=[63]), Prompt("b", tokens=[5, 64])], Path("m"), 64)


def test_prompts_the_tokenizer_cannot_take(tokenizer, monkeypatch):
    with pytest.raises(PromptsError, match=r"prompt a does not fit the chat template \(roles must alternate"):
        tokenize([Prompt("a", messages=[{"role": "system", "content": "d"}])], Path("m"), 64)
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(PromptsError, match="is a chat but m has no chat template"):
        tokenize([Prompt("a", messages=[{"role": "user", "content": "d"}])], Path("m"), 64)
    monkeypatch.setattr(FakeTokenizer, "__call__", lambda self, text: {"input_ids": []})
    with pytest.raises(PromptsError, match="prompt a becomes no token at all"):
        tokenize([Prompt("a", text=" ")], Path("m"), 64)


def test_token_ids_need_no_tokenizer(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    prompts = [Prompt("a", tokens=[1, 2])]
    tokenize(prompts, Path("nowhere"), 64)
    assert prompts[0].tokens == [1, 2]


def test_a_model_without_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(PromptsError, match=r"has no tokenizer: give prompts as token_ids\.$"):
        tokenize([Prompt("a", text="b")], tmp_path, 64)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(PromptsError, match=r"has no usable tokenizer .*: give prompts as token_ids\.$") as caught:
        tokenize([Prompt("a", text="b")], tmp_path, 64)
    assert "\n" not in str(caught.value)
