"""``probe tokens``: sources, forms and exit statuses as a user types them, in one process where that is enough."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import report_tokens_fixture
from synthetic_dumps import Scenario, actor, write_dump
from test_cli import HEAVY, ROOT, loaded_after

from probe.cli.main import run
from probe.cli.tokens import UPDATE
from probe.cli.tokens import tokens as command
from probe.compare.ppo import PPOConfig
from probe.compare.tokens.section import POSITIONS, SAMPLES

ROWS, WIDTH = 6, 20


def arrays(noise: float = 0.002, seed: int = 0) -> dict[str, np.ndarray]:
    """Return both sides' log-probs of ROWS sequences, which differ by ``noise`` nats."""
    rng = np.random.default_rng(seed)
    a = -rng.exponential(0.7, (ROWS, WIDTH))
    mask = np.arange(WIDTH) < rng.integers(4, WIDTH, (ROWS, 1))
    return {
        "rollout_log_probs": a,
        "old_log_probs": -np.abs(a + rng.normal(0, noise, a.shape)),
        "response_mask": mask,
        "responses": rng.integers(0, 50, a.shape),
    }


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files of a healthy pair and of a far one, one with advantages, one with NaN, and a monitor's folder."""
    folder = tmp_path_factory.mktemp("sources")
    contents = {
        "near": arrays(),
        "far": arrays(0.3),
        "ppo": arrays() | {"advantages": np.random.default_rng(1).normal(size=(ROWS, WIDTH))},
        "nan": arrays(),
        "same": arrays(0.0),
    }
    contents["nan"]["old_log_probs"][2, 1] = np.nan
    paths = {name: folder / f"{name}.npz" for name in contents}
    for name, content in contents.items():
        np.savez(paths[name], **content)
    paths["monitor"] = folder / "monitor"
    paths["monitor"].mkdir()
    near = arrays()
    gap = np.abs(np.exp(near["rollout_log_probs"]) - np.exp(near["old_log_probs"])) * near["response_mask"]
    for step in (3, 4):
        np.save(paths["monitor"] / f"prob_diff_step_{step}.npy", (gap * step / 10).astype(np.float32))
        np.save(paths["monitor"] / f"prob_mask_step_{step}.npy", near["response_mask"])
    return paths


@pytest.fixture
def called(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Return a function that runs the command in an empty folder: (status, standard output, standard error)."""
    from probe.cli import common

    monkeypatch.chdir(tmp_path)

    def call(*words: object) -> tuple[int, str, str]:
        for console in (common.stdout, common.stderr):
            console.cache_clear()  # rich keeps the stream of the test before
        capsys.readouterr()
        status = run(["tokens", *map(str, words)])
        return status, *capsys.readouterr()

    yield call
    for console in (common.stdout, common.stderr):
        console.cache_clear()


# -- verdicts ---------------------------------------------------------------------------------------------------------


def test_experts_are_held_against_the_wider_ranges(called: Any, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", **arrays(0.05))
    assert [called("x.npz", *words)[0] for words in ([], ["--loose"])] == [1, 0]
    status, out, _ = called("x.npz", "--loose", "--json")
    assert status == 0 and "--loose" in json.loads(out)["next_commands"][-1]


@pytest.mark.parametrize(
    ("name", "status", "verdict"),
    [
        ("near", 0, "consistent"),
        ("far", 1, "suspect"),
        ("nan", 1, "divergent"),
        ("same", 2, "incomparable"),
        ("monitor", 0, "consistent"),
    ],
)
def test_exit_status_and_first_line_follow_the_verdict(
    called: Any, files: Mapping[str, Path], name: str, status: int, verdict: str
) -> None:
    code, out, _ = called(files[name])
    assert out.startswith(f"verdict: {verdict}")
    assert code == status


def test_two_dumps_show_the_figures_that_compare_shows(called: Any, tmp_path: Path) -> None:
    from probe.compare.run import compare_dumps

    paths = write_dump(tmp_path / "rollout", Scenario(noise=1)), write_dump(tmp_path / "actor", actor(noise=2))
    _, out, _ = called(*paths, "--json")
    mine, theirs = json.loads(out)["tokens"], compare_dumps(*paths)["tokens"]
    assert mine["compared"] > 0
    added = {"unexplained_mean", "unexplained_max"}
    assert {key: value for key, value in theirs.items() if key not in added and key != "worst"} == {
        key: value for key, value in mine.items() if key != "worst"
    }
    joined = {"first_layer", "curve", "lies_in"}
    assert [{k: v for k, v in token.items() if k not in joined} for token in theirs["worst"]] == mine["worst"]


def test_advantages_from_a_file_split_the_update(called: Any, files: Mapping[str, Path]) -> None:
    words = (files["far"], "--ppo", files["ppo"], "--clip-epsilon", "0.1", "--kl-coef", "0")
    code, out, _ = called(*words, "--json")
    ppo = json.loads(out)["ppo"]
    assert code == 1 and ppo["given"] == ["advantages"]
    assert (ppo["config"]["clip_epsilon"], ppo["config"]["kl_coef"], ppo["config"]["vf_coef"]) == (0.1, 0.0, 0.5)
    assert ppo["scalars"]["policy_loss"] is not None and ppo["carriers"]
    _, shown, _ = called(*words)
    assert "of the gradient weight of the policy loss comes from the mismatch" in " ".join(shown.split())


# -- forms ------------------------------------------------------------------------------------------------------------


def test_a_folder_gets_json_and_html_and_is_not_overwritten(called: Any, files: Mapping[str, Path]) -> None:
    code, out, err = called(files["near"], "-o", "made")
    assert code == 0 and out.startswith("verdict: consistent")
    assert sorted(path.name for path in Path("made").iterdir()) == ["tokens.html", "tokens.json"]
    assert "wrote made/tokens.html" in err
    before = Path("made/tokens.json").read_text()
    code, out, err = called(files["far"], "-o", "made")
    assert (code, out) == (2, "") and "already exists" in err and "--force" in err
    assert Path("made/tokens.json").read_text() == before
    assert called(files["far"], "-o", "made", "--force")[0] == 1
    assert json.loads(Path("made/tokens.json").read_text())["verdict"] == "suspect"


def test_json_is_all_that_standard_output_holds(called: Any, files: Mapping[str, Path]) -> None:
    _, out, _ = called(files["near"], "--json", "--report", "csv")
    report = json.loads(out, parse_constant=lambda word: pytest.fail(f"{word} in the report"))
    assert report["kind"] == "tokens" and Path("probe-report/tokens.csv").is_file()


def test_grid_has_the_size_that_was_asked_for(called: Any, files: Mapping[str, Path]) -> None:
    _, out, _ = called(files["near"], "--json", "--samples", 2, "--positions", 3)
    grid = json.loads(out)["tokens"]["grid"]
    assert (len(grid["labels"]), grid["positions"]) == (2, [0, 1, 2])


def test_the_command_to_run_next_repeats_the_options(called: Any, files: Mapping[str, Path]) -> None:
    _, out, _ = called(files["near"], "--ppo", files["ppo"], "--kl-coef", "0.5", "--samples", "3", "--json")
    (again,) = json.loads(out)["next_commands"]
    assert again.startswith(f"probe tokens {files['near']} --ppo {files['ppo']} --kl-coef 0.5 --samples 3")
    import shlex

    assert called(*shlex.split(again)[2:])[0] == 0


def test_the_fixture_of_the_form_tests_has_the_keys_of_a_real_report(called: Any, files: Mapping[str, Path]) -> None:
    def shape(value: Any, path: str = "") -> set[str]:
        if isinstance(value, dict):
            return {f"{path}.{key}" for key in value}.union(*(shape(v, f"{path}.{k}") for k, v in value.items()))
        return set().union(*(shape(item, f"{path}[]") for item in value)) if isinstance(value, list) else set()

    real = shape(json.loads(called(files["far"], "--ppo", files["ppo"], "--json")[1]))
    made = shape(report_tokens_fixture.suspect())
    unlike = (".findings", ".counts.not_finite", ".a.", ".b.", ".tokens.by_step")
    assert {key for key in real ^ made if not key.startswith(unlike)} == set()


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("missing.npz",), "missing.npz"),
        (("{near}", "--report", "htlm"), "did you mean html"),
        (("{near}", "{near}"), "is given twice"),
        (("{near}", "--clip-epsilon", "nan"), "--clip-epsilon"),
        (("{near}", "--accumulation-steps", "0"), "--accumulation-steps"),
        (("{near}", "--early-stop-kl", "-1"), "--early-stop-kl"),
        (("{near}", "--temperature", "-1"), "--temperature"),
        (("{near}", "--top-p", "1.5"), "--top-p"),
        (("{near}", "--samples", "0"), "--samples"),
        (("{near}", "--ppo", "{monitor}"), "monitor"),
        (("{near}", "--ppo", "missing.npz"), "missing.npz"),
        (("{near}", "--tokenizer", "missing"), "missing"),
        (("{near}", "-o", "{near}/x"), "is a file"),
        ((), "Missing argument 'SOURCE'"),
    ],
)
def test_bad_input_is_one_sentence(called: Any, files: Mapping[str, Path], words: tuple[str, ...], part: str) -> None:
    code, out, err = called(*(word.format(**{k: str(v) for k, v in files.items()}) for word in words))
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and err.startswith("probe: error: ") and part.lower() in err.lower(), err
    assert list(Path().iterdir()) == []


def test_help_states_the_defaults_that_hold() -> None:
    said = {option.name: option.help or "" for option in command.params if hasattr(option, "help")}
    for name in UPDATE:
        assert f"[default: {getattr(PPOConfig(), name):g}]" in said[name]
    assert f"[default: {SAMPLES}]" in said["samples"] and f"[default: {POSITIONS}]" in said["positions"]


def test_help_imports_nothing_heavy() -> None:
    assert loaded_after(["tokens", "--help"], HEAVY) == set()


def test_tokens_run_without_torch_and_pyarrow(files: Mapping[str, Path]) -> None:
    assert loaded_after(["tokens", str(files["near"])], ("torch", "verl", "pandas", "pyarrow", "vllm")) == {"0"} - {"0"}


def test_a_terminal_without_unicode_gets_ascii(files: Mapping[str, Path]) -> None:
    code = f"from probe.cli.main import main; main(['tokens', {str(files['near'])!r}])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, cwd=ROOT, env={"PYTHONIOENCODING": "ascii", "PATH": ""}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii() and b"verdict: consistent" in done.stdout
