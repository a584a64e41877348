"""``probe dump`` as a user runs it, on transformers: what it prints, and what it keeps to itself."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import make_checkpoint

from probe.hooks.runners.prompts import Prompt, tokenize

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The words of a small rollout, all but -o."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "p.jsonl").write_text(json.dumps({"token_ids": [1, 2, 3]}))
    model = make_checkpoint(folder / "model")
    sampling = ("--max-tokens", "2", "--device", "cpu")
    command = ("dump", "--stage", "rollout", "--engine", "transformers")
    return [str(w) for w in (*command, "--model", model, "--prompts", folder / "p.jsonl", *sampling)]


def probe(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PROBE_", "HF_")) and k != "PROMPTS_ONLY"}
    command = [sys.executable, "-m", "probe", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env={**kept, **environment}, cwd=ROOT)


def test_quiet_shows_no_bar_of_the_engine(words: list[str], tmp_path: Path) -> None:
    done = probe("-q", *words, "-o", tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_source_can_come_from_the_environment(words: list[str], tmp_path: Path) -> None:
    rollout = tmp_path / "rollout"
    assert probe(*words, PROBE_DUMP_OUTPUT=str(rollout)).returncode == 0
    actor = ("dump", "--stage", "actor", "--engine", "transformers", "-o", tmp_path / "actor")
    done = probe(*actor, PROBE_DUMP_FROM=str(rollout))
    assert done.returncode == 0 and f"next: probe compare {rollout} {tmp_path / 'actor'}" in done.stdout


def test_an_engine_argument_that_does_not_exist_is_one_sentence(words: list[str], tmp_path: Path) -> None:
    done = probe("-q", *words, "--engine-arg", "foo=bar", "-o", tmp_path / "out")
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    assert done.stderr.startswith("probe: error: transformers could not load ") and done.stderr.count("\n") == 1


def test_long_prompts_get_no_advice_from_the_tokenizer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?", model_max_length=4).save_pretrained(tmp_path)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    prompt = Prompt("p", text="a " * 9)
    tokenize([prompt], tmp_path, 2)
    assert prompt.tokens == [0] * 9
    assert caplog.text == ""
