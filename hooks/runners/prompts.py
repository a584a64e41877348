"""Read what a run computes: prompts (text, chats or ids), or the whole sequences that ``probe tokens`` lists."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from probe.errors import PromptsError
from probe.hooks.runners.job import TokenSequence

TEXT_KEYS = ("text", "prompt")
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
UNLIMITED = 10**30
SAMPLING_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda value: value >= 0, ">= 0"),
    "top_p": (lambda value: 0 < value <= 1, "above 0 and at most 1"),
}
TOKEN_KEYS = ("token_ids", "prompt_token_ids", "tokens")


@dataclass
class Prompt:
    """One prompt: exactly one of ``text``, ``messages`` and ``tokens`` is set until :func:`tokenize` fills tokens."""

    uid: str
    text: str | None = None
    messages: list[dict[str, str]] | None = None
    tokens: list[int] = field(default_factory=list)


def read_prompts(path: Path) -> list[Prompt]:
    """Read a ``.txt`` file (one prompt a line) or a ``.jsonl`` file; raise PromptsError that numbers a bad line."""
    as_json = Path(path).suffix in (".jsonl", ".json")
    prompts: list[Prompt] = []
    for number, line in _lines(path):
        where = f"{path} line {number}"
        uid = f"p{len(prompts):04d}"
        prompts.append(_parse(line, where, uid) if as_json else Prompt(uid, text=line))
    if not prompts:
        raise PromptsError(f"the prompts file {path} holds no prompt", "write one prompt a line")
    uid, count = Counter(prompt.uid for prompt in prompts).most_common(1)[0]
    if count > 1:
        raise PromptsError(f"{path} uses the id {uid!r} more than once", "give each prompt its own id")
    return prompts


@dataclass(frozen=True)
class ListedSequence:
    """One line of a file that ``probe tokens --worst`` wrote: a whole sequence, the model and how it was sampled."""

    sequence: TokenSequence
    model: str
    sampling: dict[str, float]


def read_sequences(path: Path) -> list[ListedSequence]:
    """Read whole sequences from JSON lines (docs/tokens.md); raise PromptsError that numbers a bad line."""
    found: list[ListedSequence] = []
    for number, line in _lines(path, "file of sequences", "a dump's folder, or what 'probe tokens --worst' wrote"):
        where = f"{path} line {number}"
        record = _object(line, where)
        tokens = _token_ids(record.get("tokens"), where, "tokens")
        prompt_len, sample = (_whole(record.get(key, 0), where, key) for key in ("prompt_len", "sample"))
        if not 0 < prompt_len <= len(tokens):
            raise PromptsError(f"{where}: 'prompt_len' is {prompt_len} of {len(tokens)} tokens", "use 1 to all of them")
        texts = {key: _optional(record, key, str, "", where) for key in ("uid", "trajectory", "model")}
        stated = _optional(record, "sampling", dict, {}, where)
        sampling = {key: _sampled(stated[key], where, key) for key in SAMPLING_RANGES if stated.get(key) is not None}
        uid = texts["uid"] or f"p{len(found):04d}"
        sequence = TokenSequence(uid, tokens, prompt_len, sample, texts["trajectory"])
        found.append(ListedSequence(sequence, texts["model"], sampling))
    if not found:
        raise PromptsError(f"{path} holds no sequence", "write it with 'probe tokens D --worst N -o FILE'")
    return found


def model_of_sequences(path: Path) -> str:
    """Return the model that the sequences of a file were made by, empty where they do not agree on one."""
    models = {entry.model for entry in read_sequences(path)}
    return models.pop() if len(models) == 1 else ""


def _optional(record: dict[str, Any], key: str, kind: type, default: Any, where: str) -> Any:
    value = record.get(key, default)
    if not isinstance(value, kind):
        raise PromptsError(f"{where}: {key!r} is {type(value).__name__}, not {kind.__name__}", "correct it")
    return value


def _sampled(value: Any, where: str, key: str) -> float:
    """Return the temperature or top-p of a line, a finite number of the range in which one can sample."""
    lies, words = SAMPLING_RANGES[key]
    if type(value) not in (int, float) or not abs(value) < UNLIMITED or not lies(value):
        raise PromptsError(f"{where}: {key!r} is {value!r:.40}, not a number {words}", "correct it")
    return float(value)


def _whole(value: Any, where: str, key: str) -> int:
    if type(value) is not int or value < 0:
        raise PromptsError(f"{where}: {key!r} is {value!r:.40}, not a whole number >= 0", "correct it")
    return value


def _lines(path: Path, what: str = "prompts file", fix: str = "a UTF-8 .txt or .jsonl") -> list[tuple[int, str]]:
    """Return (number, line) of the lines of a UTF-8 file that are not blank; ``what`` and ``fix`` go into an error."""
    try:
        # only a line feed ends a line: JSON strings may hold other separators that str.splitlines cuts at
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError:
        raise PromptsError(f"there is no {what} {path}", "give a .txt or .jsonl file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PromptsError(f"the {what} {path} cannot be read ({error})", f"give {fix}") from None
    return [(number, line.removesuffix("\r")) for number, line in enumerate(lines, 1) if line.strip()]


def _object(line: str, where: str) -> dict[str, Any]:
    record = _json(line, where)
    if not isinstance(record, dict):
        raise PromptsError(f"{where} holds {type(record).__name__}, not an object", "write one JSON object a line")
    return {key: value for key, value in record.items() if value is not None}


def _json(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptsError(f"{where} is not valid JSON ({error})", "write one JSON object a line") from None


def _parse(line: str, where: str, uid: str) -> Prompt:
    record = _json(line, where)
    if isinstance(record, str):
        return Prompt(uid, text=record)
    record = _object(line, where)
    uid = str(record.get("uid", record.get("id", uid)))
    for key in TEXT_KEYS:
        if key in record:
            return Prompt(uid, text=_text(record[key], where, key))
    for key in TOKEN_KEYS:
        if key in record:
            return Prompt(uid, tokens=_token_ids(record[key], where, key))
    if "messages" in record:
        return Prompt(uid, messages=_messages(record["messages"], where))
    raise PromptsError(f"{where} has none of 'text', 'messages' and 'token_ids'", "add one of them")


def _text(value: Any, where: str, key: str) -> str:
    if not isinstance(value, str) or not value:
        raise PromptsError(f"{where}: {key!r} is not a text", "use a non-empty string")
    return value


def _token_ids(value: Any, where: str, key: str) -> list[int]:
    whole = isinstance(value, list) and value and all(type(t) is int and t >= 0 for t in value)
    if not whole:
        raise PromptsError(f"{where}: {key!r} is not a list of token ids", "use a non-empty list of whole numbers >= 0")
    return value


def _messages(value: Any, where: str) -> list[dict[str, str]]:
    turns = value if isinstance(value, list) else []
    if not turns or not all(isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in turns):
        raise PromptsError(f"{where}: 'messages' is not a chat", 'use [{"role": "user", "content": "..."}]')
    return turns


def tokenize(prompts: list[Prompt], model: Path, vocab_size: int) -> None:
    """Fill the token ids of every prompt with the model's own tokenizer and check them against its vocabulary."""
    waiting = [prompt for prompt in prompts if not prompt.tokens]
    tokenizer = load_tokenizer(model) if waiting else None
    for prompt in waiting:
        assert tokenizer is not None
        if prompt.messages is not None:
            if not getattr(tokenizer, "chat_template", None):
                raise PromptsError(
                    f"prompt {prompt.uid} is a chat but {model} has no chat template", "give text instead"
                )
            text = _chat_text(tokenizer, prompt)
            prompt.tokens = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        else:
            prompt.tokens = list(tokenizer(prompt.text)["input_ids"])
    for prompt in prompts:
        if not prompt.tokens:
            raise PromptsError(f"prompt {prompt.uid} becomes no token at all", "give it some text")
        highest = max(prompt.tokens)
        if highest >= vocab_size:
            raise PromptsError(
                f"prompt {prompt.uid} holds token {highest}, but the vocabulary of {model} has {vocab_size}",
                "use ids of this model's tokenizer",
            )


def _chat_text(tokenizer: Any, prompt: Prompt) -> str:
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(prompt.messages, tokenize=False, add_generation_prompt=True)
    except (TemplateError, TypeError, ValueError) as error:
        raise PromptsError(f"prompt {prompt.uid} does not fit the chat template ({error})", "see its roles") from None


def load_tokenizer(model: Path) -> Any:
    """Return the tokenizer saved with a checkpoint, or raise PromptsError."""
    from transformers import AutoTokenizer

    if not any(file for pattern in TOKENIZER_FILES for file in Path(model).glob(pattern)):
        raise PromptsError(f"{model} has no tokenizer", "give prompts as token_ids")  # transformers makes an empty one
    try:
        # the length is checked where the response is known too; the tokenizer would only warn about the prompt
        return AutoTokenizer.from_pretrained(str(model), local_files_only=True, model_max_length=UNLIMITED)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        reason = " ".join(str(error).split())[:200]
        raise PromptsError(f"{model} has no usable tokenizer ({reason})", "give prompts as token_ids") from None
