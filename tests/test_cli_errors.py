"""Every mistake a user can make on the command line: one clear sentence, status 2, no traceback, nothing written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import h5py
import pytest
from synthetic_dumps import Scenario, Tiny, actor, prompts, write_dump

ROOT = Path(__file__).parent.parent
ROLLOUT = ("dump", "--stage", "rollout", "-o", "out")
ACTOR = ("dump", "--stage", "actor", "-o", "out")


def probe(
    words: tuple[str, ...], folder: Path, without: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command in ``folder``; the packages in ``without`` cannot be found, as if they were not installed."""
    code = f"""
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {without!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
from probe.cli.main import main
main({list(words)!r})
"""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PROBE_") and k != "PROMPTS_ONLY"}
    inherited["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env={**inherited, **environment})


def write_checkpoint(folder: Path, architecture: str) -> None:
    """Write a checkpoint directory with a config and one empty header; enough to be opened, not to be run."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], "vocab_size": 50}))
    header = b"{}"
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with dumps, checkpoints and prompts, good and bad; each test gets a copy."""
    folder = tmp_path_factory.mktemp("originals")
    write_dump(folder / "a", Scenario())
    write_dump(folder / "b", actor())
    write_dump(folder / "other-prompts", actor(), prompts(seed=99))
    write_dump(folder / "other-model", actor(model=Tiny(layers=2)))
    (folder / "empty").mkdir()
    for name in ("truncated", "foreign", "text"):
        (folder / name / "actor" / "step0").mkdir(parents=True)
    whole = (folder / "b/actor/step0/rank0.h5").read_bytes()
    (folder / "truncated/actor/step0/rank0.h5").write_bytes(whole[: len(whole) // 2])
    with h5py.File(folder / "foreign/actor/step0/rank0.h5", "w") as file:
        file["temperature"] = [20.5, 21.0]
    (folder / "text/actor/step0/rank0.h5").write_text("module,slot\n")
    write_checkpoint(folder / "model", "Qwen2ForCausalLM")
    write_checkpoint(folder / "mamba", "MambaForCausalLM")
    (folder / "prompts.txt").write_text("what is 3 plus 4?\n")
    (folder / "typo.json").write_text('{"layers.{i}.mlp.down_proj": "decoder.layers.{i}.mlp.linear_fc3"}')
    (folder / "good.yaml").write_text("layers.{i}.mlp.down_proj: decoder.layers.{i}.mlp.linear_fc2\n")
    (folder / "blank.txt").write_text("\n\n")
    (folder / "bad.jsonl").write_text('{"text": "fine"}\n\n{"text": \n')
    (folder / "wrong.jsonl").write_text('{"text": "fine"}\n{"txet": "typo"}\n')
    (folder / "notes").mkdir()
    (folder / "notes" / "thesis.txt").write_text("mine")
    return folder


@pytest.fixture
def folder(originals: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals, tmp_path / "here"))


def contents(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_size for p in folder.rglob("*") if p.is_file()} | {
        f"{p.relative_to(folder)}/": 0 for p in folder.rglob("*") if p.is_dir()
    }


@dataclass(frozen=True)
class Case:
    """A command that cannot work and the words its one sentence must hold."""

    words: tuple[str, ...]
    said: tuple[str, ...]
    without: tuple[str, ...] = ()


CASES = {
    "missing dump": Case(("compare", "a", "nowhere"), ("no dump at nowhere", "probe dump -o")),
    "missing dump to show": Case(("show", "nowhere"), ("no dump at nowhere",)),
    "empty folder": Case(("compare", "a", "empty"), ("empty holds no dump file", "probe dump -o")),
    "dump of other prompts": Case(("compare", "a", "other-prompts"), ("no sequence of a", "--from")),
    "dump of another model": Case(("compare", "a", "other-model"), ("different models", "3", "2")),
    "truncated file": Case(("compare", "a", "truncated"), ("truncated/actor/step0/rank0.h5", "truncated")),
    "foreign HDF5 file": Case(("compare", "a", "foreign"), ("foreign/actor/step0/rank0.h5", "not a probe dump")),
    "text renamed to .h5": Case(("show", "text"), ("text/actor/step0/rank0.h5", "not a readable HDF5 file")),
    "unknown module": Case(("show", "a", "layers.1.mlp.downproj"), ("'layers.1.mlp.downproj'", "mlp.down_proj")),
    "unknown slot": Case(("show", "a", "layers.1.mlp.down_proj:output.7"), ("'output.7'", "output.0")),
    "unknown report form": Case(("compare", "a", "b", "--report", "htlm"), ("'htlm'", "html")),
    "explain an unknown name": Case(
        ("compare", "a", "b", "--explain", "layers.0.mlp.dwn_proj"),
        ("'layers.0.mlp.dwn_proj'", "layers.0.mlp.down_proj"),
    ),
    "missing map": Case(("compare", "a", "b", "--map", "map.yaml"), ("mapping file map.yaml", "cannot be read")),
    "map of something else": Case(("compare", "a", "b", "--map", "bad.jsonl"), ("mapping file bad.jsonl", "JSON")),
    "map with a typo": Case(
        ("compare", "a", "b", "--map", "typo.json"),
        ("typo.json", "decoder.layers.{i}.mlp.linear_fc3", "decoder.layers.{i}.mlp.linear_fc2"),
    ),
    "map in yaml without PyYAML": Case(
        ("compare", "a", "b", "--map", "good.yaml"), ("good.yaml needs PyYAML", "JSON"), without=("yaml",)
    ),
    "nothing to write": Case(("compare", "a", "b", "--report", "terminal", "-o", "r"), ("nothing", "--report")),
    "coverage above one": Case(("compare", "a", "b", "--min-coverage", "90"), ("--min-coverage", "0<=x<=1")),
    "report folder is a file": Case(("compare", "a", "b", "-o", "prompts.txt"), ("prompts.txt is a file", "-o")),
    "a dump is missing": Case(("compare", "a"), ("a holds rollout alone", "give the dump to compare it with")),
    "stage is missing": Case(("dump", "-o", "out"), ("--stage", "rollout")),
    "unknown stage": Case(("dump", "--stage", "critc", "-o", "out"), ("--stage", "'critc'", "actor")),
    "no model": Case((*ROLLOUT, "--prompts", "prompts.txt"), ("no model", "--model")),
    "no tokens": Case((*ROLLOUT, "--model", "model"), ("--prompts FILE or --from DUMP",)),
    "actor without a dump": Case((*ACTOR, "--model", "model", "--prompts", "prompts.txt"), ("actor", "--from")),
    "prompts and from": Case(
        (*ROLLOUT, "--model", "model", "--prompts", "prompts.txt", "--from", "a"), ("--prompts and --from",)
    ),
    "source is missing": Case((*ACTOR, "--from", "nowhere"), ("no dump at nowhere",)),
    "source names no model": Case((*ACTOR, "--from", "a"), ("does not say which model", "--model")),
    "unknown engine": Case(
        (*ROLLOUT, "--model", "model", "--prompts", "prompts.txt", "--engine", "vlm"), ("'vlm'", "vllm, megatron")
    ),
    "stage and engine": Case(
        (*ACTOR, "--model", "model", "--from", "a", "--engine", "vllm"), ("vllm cannot run stage 'actor'", "megatron")
    ),
    "vllm not installed": Case(
        (*ROLLOUT, "--model", "model", "--prompts", "prompts.txt"),
        ("engine vllm is not installed", "pip install"),
        without=("vllm",),
    ),
    "megatron not installed": Case(
        (*ACTOR, "--model", "model", "--from", "a"),
        ("engine megatron is not installed", "pip install"),
        without=("megatron",),
    ),
    "demo without an engine": Case(("demo", "-o", "out"), ("vllm is not installed", "pip install"), without=("vllm",)),
    "option of another engine": Case(
        (*ROLLOUT, "--model", "model", "--prompts", "prompts.txt", "--layout", "packed"),
        ("--layout has no effect on engine vllm", "megatron"),
    ),
    "sampling of known tokens": Case(
        (*ACTOR, "--model", "model", "--from", "a", "--n", "2"), ("--n has no effect with --from",)
    ),
    "forced decode elsewhere": Case(
        (*ACTOR, "--model", "model", "--from", "a", "--force-decode"), ("--force-decode", "vllm")
    ),
    "no response at all": Case((*ROLLOUT, "--model", "model", "--n", "0"), ("--n", "x>=1")),
    "negative temperature": Case((*ROLLOUT, "--model", "model", "--temperature", "-1"), ("--temperature", "x>=0")),
    "top-p of nothing": Case((*ROLLOUT, "--model", "model", "--top-p", "0"), ("--top-p", "0<x<=1")),
    "coverage of no number": Case(("compare", "a", "b", "--min-coverage", "nan"), ("--min-coverage", "not a finite")),
    "endless temperature": Case((*ROLLOUT, "--model", "model", "--temperature", "inf"), ("--temperature", "finite")),
    "top-p of no number": Case((*ROLLOUT, "--model", "model", "--top-p", "nan"), ("--top-p", "finite")),
    "seed too large": Case((*ROLLOUT, "--model", "model", "--seed", "4294967295"), ("--seed", "0<=x<=")),
    "seed of the demo too large": Case(("demo", "-o", "out", "--seed", "4294967295"), ("--seed", "0<=x<=")),
    "unknown dtype": Case((*ROLLOUT, "--model", "model", "--dtype", "fp8"), ("--dtype", "bfloat16")),
    "engine argument without value": Case((*ROLLOUT, "--engine-arg", "eager"), ("--engine-arg", "KEY=VALUE")),
    "missing checkpoint": Case((*ROLLOUT, "--model", "gone", "--prompts", "prompts.txt"), ("gone", "not a directory")),
    "missing prompts": Case((*ROLLOUT, "--model", "model", "--prompts", "p.txt"), ("no prompts file p.txt",)),
    "prompts without a prompt": Case(
        (*ROLLOUT, "--model", "model", "--prompts", "blank.txt"), ("blank.txt holds no prompt",)
    ),
    "prompts with broken JSON": Case((*ROLLOUT, "--model", "model", "--prompts", "bad.jsonl"), ("bad.jsonl line 3",)),
    "prompts with a wrong key": Case(
        (*ROLLOUT, "--model", "model", "--prompts", "wrong.jsonl"), ("wrong.jsonl line 2", "'token_ids'")
    ),
    "existing dump": Case(
        ("dump", "--stage", "actor", "-o", "b", "--model", "model", "--from", "a"), ("b already exists", "--force")
    ),
    "output below a file": Case(
        ("dump", "--stage", "actor", "-o", "prompts.txt/x", "--model", "model", "--from", "a"), ("prompts.txt/x", "-o")
    ),
    "report below a file": Case(("compare", "a", "b", "-o", "prompts.txt/x"), ("prompts.txt is a file", "-o")),
    "force over no dump": Case(
        ("dump", "--stage", "actor", "-o", "notes", "--force", "--model", "model", "--from", "a"),
        ("notes is not a dump",),
    ),
}


def check_refusal(done: subprocess.CompletedProcess[str], said: tuple[str, ...]) -> None:
    """Check that the command ended as a user deserves: status 2 and one sentence that holds every word of ``said``."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("probe: error: ")
    assert "internal error" not in done.stderr and "Traceback" not in done.stderr
    for words in said:
        assert words in done.stderr


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_mistake_gets_one_sentence_and_leaves_no_trace(case: Case, folder: Path) -> None:
    before = contents(folder)
    check_refusal(probe(case.words, folder, case.without), case.said)
    assert contents(folder) == before


@pytest.mark.slow
def test_an_unsupported_architecture_is_named(folder: Path) -> None:
    before = contents(folder)
    done = probe((*ACTOR, "--model", "mamba", "--from", "a"), folder)
    check_refusal(
        subprocess.CompletedProcess(done.args, done.returncode, done.stdout, last_line(done.stderr)), ("Mamba",)
    )
    assert contents(folder) == before


def last_line(text: str) -> str:
    """Return the last line: before it stand the progress of the run and whatever the engine itself has to say."""
    return text.splitlines()[-1] + "\n"


MANIFESTS = {
    "cut short": '{"schema": 1,',
    "not an object": "[1]",
    "of another version": '{"schema": 99}',
    "with terminal escapes": json.dumps({"schema": "\x1b]0;owned\x07\x1b[2J"}),
}


@pytest.mark.parametrize("manifest", MANIFESTS.values(), ids=MANIFESTS)
def test_a_damaged_manifest_is_one_printable_sentence(manifest: str, folder: Path) -> None:
    with h5py.File(folder / "b/actor/step0/rank0.h5", "r+") as file:
        del file["manifest"]
        file["manifest"] = manifest
    done = probe(("compare", "a", "b"), folder)
    check_refusal(done, ())
    assert done.stderr.strip().isprintable()


def test_prompts_only_from_the_environment_must_be_a_truth_value(folder: Path) -> None:
    check_refusal(probe((*ROLLOUT, "--model", "model"), folder, PROMPTS_ONLY="maybe"), ("--prompts-only", "maybe"))
