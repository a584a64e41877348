"""The command line: help, versions, output that other programs can read, exit statuses, and what it never imports."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from synthetic_dumps import Scenario, actor, write_dump

from probe import __version__
from probe.cli.help_page import help_page
from probe.cli.main import COMMANDS, cli

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "h5py", "bokeh", "vllm", "megatron", "transformers", "numpy", "rich", "jinja2")


def probe(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does, in a process of its own."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PROBE_") and k != "PROMPTS_ONLY"}
    command = [sys.executable, "-m", "probe", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env={**inherited, **environment}, cwd=ROOT)


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_after(words: list[str], watched: tuple[str, ...]) -> set[str]:
    """Return which of the watched packages are imported once the command has run."""
    code = f"""
import sys
from probe.cli.main import run
status = run({words!r})
print("LOADED", status, *[name for name in {watched!r} if name in sys.modules])
"""
    *_, line = [line for line in python(code).splitlines() if line.startswith("LOADED")]
    return set(line.split()[2:])


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A rollout, an actor that agrees with it and one whose layer 1 is broken."""
    folder = tmp_path_factory.mktemp("dumps")
    fault = {"layers.1.mlp.down_proj:output.0": lambda values: values * 1.03}
    return {
        "rollout": write_dump(folder / "rollout", Scenario(noise=1)),
        "actor": write_dump(folder / "actor", actor(noise=2)),
        "broken": write_dump(folder / "broken", actor(noise=2, faults=fault)),
    }


# -- help -------------------------------------------------------------------------------------------------------------


def test_help_imports_nothing_heavy() -> None:
    assert loaded_after(["--help"], HEAVY) == set()


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_lists_every_command_with_its_first_line(flag: str) -> None:
    text = probe(flag).stdout
    for name, summary in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(summary)}$", text, re.MULTILINE), name


def test_no_command_at_all_shows_the_help() -> None:
    done = probe()
    assert (done.returncode, done.stdout) == (0, probe("--help").stdout)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_examples(name: str) -> None:
    done = probe(name, "--help")
    assert done.returncode == 0
    assert COMMANDS[name] in done.stdout
    examples = done.stdout.partition("Examples:\n")[2].splitlines()
    assert examples and all(line.startswith(f"  probe {name}") for line in examples)


def test_the_command_page_is_the_real_help() -> None:
    written = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert written == help_page(), "run: python -m probe.cli.help_page > docs/cli.md"


@pytest.mark.parametrize("flag", ["-V", "--version"])
def test_version(flag: str) -> None:
    assert probe(flag).stdout == f"probe {__version__}\n"


def test_a_mistyped_command_gets_a_suggestion() -> None:
    done = probe("comapre")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "probe: error: there is no command 'comapre': did you mean compare.\n"


def test_a_command_unlike_any_other_gets_the_way_to_the_list() -> None:
    assert probe("xyzzy").stderr == "probe: error: there is no command 'xyzzy': see 'probe --help'.\n"


def test_a_mistyped_option_gets_a_suggestion() -> None:
    done = probe("compare", "a", "b", "--reprot", "html")
    assert done.returncode == 2
    assert "--report" in done.stderr and "probe compare --help" in done.stderr


# -- compare ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("other", "status", "verdict"), [("actor", 0, "consistent"), ("broken", 1, "divergent")])
def test_compare_exits_with_its_verdict(dumps: dict[str, Path], other: str, status: int, verdict: str) -> None:
    done = probe("compare", dumps["rollout"], dumps[other])
    assert done.returncode == status, done.stderr
    assert done.stdout.startswith(f"verdict: {verdict}")


def test_too_little_coverage_is_trouble(dumps: dict[str, Path], tmp_path: Path) -> None:
    half = write_dump(tmp_path / "half", actor(noise=2, drop=("layers.0", "layers.1")))
    assert probe("compare", dumps["rollout"], half).returncode == 2
    assert probe("compare", dumps["rollout"], half, "--min-coverage", "0").returncode == 0


def test_json_is_the_only_thing_on_standard_output(dumps: dict[str, Path]) -> None:
    done = probe("compare", dumps["rollout"], dumps["broken"], "--json", "-v")
    report = json.loads(done.stdout, parse_constant=pytest.fail)
    assert report["verdict"] == "divergent"
    assert report["first_divergence"]["name"] == "layers.1.mlp.down_proj"


@pytest.mark.parametrize("command", ["compare", "show"])
def test_reading_dumps_never_imports_torch(dumps: dict[str, Path], command: str) -> None:
    paths = [str(dumps["rollout"]), *([str(dumps["actor"])] if command == "compare" else [])]
    assert loaded_after(["-q", command, *paths], ("torch", "vllm", "megatron")) == set()


def test_report_forms_go_to_the_folder(dumps: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "report"
    done = probe("compare", dumps["rollout"], dumps["actor"], "--report", "html,csv,markdown,json", "-o", folder)
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in folder.iterdir()) == ["report.csv", "report.html", "report.json", "report.md"]
    assert done.stdout == "verdict: consistent on 45 tensors\n"
    assert done.stderr.count("probe: wrote ") == 4


def test_an_output_folder_alone_asks_for_files(dumps: dict[str, Path], tmp_path: Path) -> None:
    done = probe("compare", dumps["rollout"], dumps["actor"], "-o", tmp_path / "report")
    assert done.stdout.startswith("verdict: consistent")
    assert sorted(p.name for p in (tmp_path / "report").iterdir()) == ["report.html", "report.json"]


def test_reports_are_replaced_only_with_force(dumps: dict[str, Path], tmp_path: Path) -> None:
    words = ("compare", dumps["rollout"], dumps["actor"], "--report", "json", "-o", tmp_path)
    (tmp_path / "report.json").write_text("mine")
    refused = probe(*words)
    assert refused.returncode == 2 and "report.json already exists" in refused.stderr
    assert (tmp_path / "report.json").read_text() == "mine"
    assert probe(*words, "--force").returncode == 0
    assert json.loads((tmp_path / "report.json").read_text())["verdict"] == "consistent"


def test_an_option_can_come_from_the_environment(dumps: dict[str, Path]) -> None:
    done = probe("compare", dumps["rollout"], dumps["actor"], PROBE_COMPARE_JSON="1")
    assert json.loads(done.stdout)["verdict"] == "consistent"


OPTIONS = [
    (name, option)
    for name in COMMANDS
    for option in cli.get_command(click.Context(cli), name).params
    if isinstance(option, click.Option)
]


@pytest.mark.parametrize(("command", "option"), OPTIONS, ids=[f"{name} {option.opts[-1]}" for name, option in OPTIONS])
def test_every_option_has_a_variable_named_after_it(
    command: str, option: click.Option, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = next(word for word in option.opts if word.startswith("--"))
    variable = f"PROBE_{command}_{long[2:]}".replace("-", "_").upper()
    outer = click.Context(cli, info_name="probe", **cli.context_settings)
    context = click.Context(cli.get_command(outer, command), parent=outer, info_name=command)
    monkeypatch.delenv(variable, raising=False)
    assert option.value_from_envvar(context) is None
    monkeypatch.setenv(variable, "1")
    assert option.value_from_envvar(context) in ("1", ["1"])


def test_prompts_only_has_a_short_variable_too(monkeypatch: pytest.MonkeyPatch) -> None:
    (option,) = [option for name, option in OPTIONS if option.name == "prompts_only"]
    context = click.Context(cli.get_command(click.Context(cli), "dump"), auto_envvar_prefix="PROBE_DUMP")
    monkeypatch.setenv("PROMPTS_ONLY", "1")
    assert option.resolve_envvar_value(context) == "1"
    monkeypatch.setenv("PROBE_DUMP_PROMPTS_ONLY", "0")
    assert option.resolve_envvar_value(context) == "0"


def test_quiet_leaves_standard_error_empty(dumps: dict[str, Path], tmp_path: Path) -> None:
    words = (dumps["rollout"], dumps["actor"], "--report", "json", "-o", tmp_path)
    assert probe("compare", *words).stderr != ""
    assert probe("compare", *words, "--force", "-q").stderr == ""
    assert probe("-q", "compare", *words, "--force").stderr == ""


def test_no_colour_codes_reach_a_pipe(dumps: dict[str, Path]) -> None:
    done = probe("compare", dumps["rollout"], dumps["broken"])
    assert "\x1b" not in done.stdout + done.stderr


def test_no_color_is_obeyed_where_colours_would_be_shown(dumps: dict[str, Path]) -> None:
    coloured = probe("show", dumps["rollout"], FORCE_COLOR="1", TERM="xterm-256color").stdout
    plain = probe("show", dumps["rollout"], FORCE_COLOR="1", TERM="xterm-256color", NO_COLOR="1").stdout
    colour = re.compile(r"\x1b\[[0-9;]*3[0-9]")  # SGR 30-39: foreground colours; NO_COLOR allows bold and dim
    assert "\x1b[" in coloured
    assert not colour.search(plain)


# -- show -------------------------------------------------------------------------------------------------------------


def test_show_lists_one_tensor_a_line(dumps: dict[str, Path]) -> None:
    lines = probe("show", dumps["rollout"]).stdout.splitlines()
    assert lines[0] == f"{dumps['rollout']}: rollout on vllm 1.0"
    (line,) = [line for line in lines if line.startswith("model.layers.2.mlp.down_proj") and "output.0" in line]
    assert "float32" in line and line.rstrip().endswith("0/0")


def test_show_json_has_every_tensor(dumps: dict[str, Path]) -> None:
    data = json.loads(probe("show", dumps["rollout"], "--json").stdout, parse_constant=pytest.fail)
    assert {"module", "slot", "dtype", "rows", "features", "norm", "nan", "inf"} <= set(data["tensors"][0])
    assert len(data["sequences"]) == 4
    assert data["manifest"]["engine"]["name"] == "vllm"


@pytest.mark.parametrize("pattern", ["model.layers.1.mlp.down_proj", "layers.1.mlp.down_proj", "*.1.mlp.down_proj"])
def test_show_finds_a_module_by_path_part_and_pattern(dumps: dict[str, Path], pattern: str) -> None:
    data = json.loads(probe("show", dumps["rollout"], pattern, "--json").stdout)
    (module,) = data["modules"]
    assert module["module"] == "model.layers.1.mlp.down_proj"
    assert [tensor["slot"] for tensor in module["tensors"]] == ["input.0", "output.0"]
    assert [weight["name"] for weight in module["weights"]] == ["model.layers.1.mlp.down_proj.weight"]


def test_show_values_are_those_of_the_dump(dumps: dict[str, Path]) -> None:
    from probe.store.reader import open_dump

    module = "model.layers.1.mlp.down_proj"
    data = json.loads(probe("show", dumps["rollout"], f"{module}:output.0", "--json").stdout)
    (tensor,) = data["modules"][0]["tensors"]
    with open_dump(dumps["rollout"]) as dump:
        values, rows = dump.read(module, "output.0"), dump.rows(module, "output.0")
        uids = [dump.sequences[int(n)].uid for n in rows["sequence"]]
    shown = [0, 1, 2, len(values) - 1]
    assert [row["values"] for row in tensor["values"]] == values[shown, :6].tolist()
    assert [row["position"] for row in tensor["values"]] == rows["position"][shown].tolist()
    assert [row["sequence"] for row in tensor["values"]] == [uids[n] for n in shown]


def test_a_full_disk_is_one_sentence(dumps: dict[str, Path]) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "probe", "show", str(dumps["rollout"]), "--json"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr.startswith("probe: error: standard output cannot be used (No space left on device)")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("words", ["compare {0} {1} --json", "show {0} --json", "--help"])
def test_a_reader_that_stops_before_json_ends_is_no_error(dumps: dict[str, Path], words: str) -> None:
    command = f"{sys.executable} -m probe {words.format(dumps['rollout'], dumps['actor'])} -q | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT)
    assert done.stderr == ""


def test_a_reader_that_stops_early_is_no_error(dumps: dict[str, Path]) -> None:
    command = f"{sys.executable} -m probe show {dumps['rollout']} '*' --all | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "141"  # 128 + SIGPIPE, as of any program in a pipe
    assert done.stderr == ""


# -- doctor and demo --------------------------------------------------------------------------------------------------


def test_doctor_reports_a_broken_torch_npu_without_falling_over(tmp_path: Path) -> None:
    package = tmp_path / "torch_npu"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')")
    done = probe("doctor", "--json", PYTHONPATH=str(tmp_path))
    report = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert "libhccl.so" in report["devices"]["npu"]
    assert any("TORCH_DEVICE_BACKEND_AUTOLOAD=0" in sentence for sentence in report["trouble"])
    assert report["devices"]["cpu"] == "works"


def test_doctor_survives_a_torch_that_kills_its_process(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os; os.abort()")
    done = probe("doctor", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "trouble: the check of torch ended with status -6" in done.stdout
    assert "not ready: megatron (actor, reference): torch cannot be imported: pip install" in done.stdout


def test_doctor_names_what_would_make_runs_differ() -> None:
    environment = {"HCCL_DETERMINISTIC": "FALSE", "CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    done = probe("doctor", "--strict", **environment)
    assert "HCCL_DETERMINISTIC=FALSE makes runs differ" in done.stdout
    assert "CUBLAS_WORKSPACE_CONFIG=" not in done.stdout
    assert done.returncode == 1
    assert re.search(r"^(not )?ready: vllm ", done.stdout, re.MULTILINE)


def test_every_switch_of_the_doctor_is_recorded_in_dumps() -> None:
    from probe import manifest
    from probe.cli.doctor import SWITCHES

    assert set(SWITCHES) <= set(manifest.SWITCHES)


def test_demo_keeps_out_of_folders_it_did_not_make(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    done = probe("demo", "-o", tmp_path, "--force")
    assert done.returncode == 2
    assert "is not of a demo" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_demo_replaces_only_what_a_demo_makes(tmp_path: Path) -> None:
    from probe.cli.demo import MARKER, claim_folder
    from probe.errors import OutputExistsError

    (tmp_path / MARKER).write_text("{}")
    for name in ("model", "rollout", "notes"):
        (tmp_path / name).mkdir()
    with pytest.raises(OutputExistsError, match="holds an earlier demo"):
        claim_folder(tmp_path, force=False)
    claim_folder(tmp_path, force=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([MARKER, "model", "notes"])


# -- errors nobody foresaw --------------------------------------------------------------------------------------------

FAILING = """
import sys
from probe.cli import show
from probe.cli.main import main
def fail(*args):
    raise {error}
show.describe_dump = fail
main({words!r})
"""


def failing(error: str, *words: str) -> subprocess.CompletedProcess[str]:
    code = FAILING.format(error=error, words=list(words))
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)


def test_an_unforeseen_error_is_one_line_and_says_how_to_see_more(dumps: dict[str, Path]) -> None:
    done = failing("ValueError('odd')", "show", str(dumps["rollout"]))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "probe: error: internal error (ValueError: odd); run it again with -v for the traceback to report.\n"
    )


def test_an_unforeseen_error_shows_its_traceback_with_v(dumps: dict[str, Path]) -> None:
    done = failing("ValueError('odd')", "show", str(dumps["rollout"]), "-v")
    assert done.returncode == 2
    assert "Traceback (most recent call last)" in done.stderr


def test_an_interruption_exits_as_a_shell_expects(dumps: dict[str, Path]) -> None:
    done = failing("KeyboardInterrupt", "show", str(dumps["rollout"]))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "probe: interrupted\n")


@pytest.mark.parametrize(
    ("given", "expected"), [({}, "1"), ({"OMP_NUM_THREADS": "4"}, None), ({"OPENBLAS_NUM_THREADS": "3"}, "3")]
)
@pytest.mark.parametrize("command", ["compare", "replay"])
def test_blas_has_one_thread_unless_the_user_says_otherwise(tmp_path, command, given, expected):
    """Set before numpy loads, where it would come too late."""
    dump = write_dump(tmp_path / "a", Scenario())
    words = [command, str(dump), *([str(dump)] if command == "compare" else [])]
    code = f"""
import builtins, os
seen = []
true_import = builtins.__import__
def watch(name, *rest, **more):
    if name == "numpy" and not seen:
        seen.append(os.environ.get("OPENBLAS_NUM_THREADS"))
    return true_import(name, *rest, **more)
builtins.__import__ = watch
from probe.cli.main import run
run({words!r})
print("SEEN", seen)
"""
    free = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=free | given, cwd=ROOT)
    assert f"SEEN [{expected!r}]" in done.stdout, done.stderr
