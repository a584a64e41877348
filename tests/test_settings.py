"""Settings from keywords, environment and config files: the documented order, and a clear word on what cannot work."""

from __future__ import annotations

import json
import sys

import pytest
import yaml

from probe.errors import UsageError
from probe.hooks.debugger import PrecisionDebugger
from probe.settings import load_settings
from probe.store.schema import STAGES


def write_config(path, values):
    path.write_text(json.dumps(values) if path.suffix == ".json" else yaml.safe_dump(values))
    return path


@pytest.mark.parametrize("suffix", ["json", "yaml", "yml"])
def test_precedence(tmp_path, suffix):
    config = write_config(tmp_path / f"c.{suffix}", {"dump_path": "file", "stage": "reference", "step": [5], "rank": 1})
    environ = {"PROBE_DUMP_DIR": "environment", "PROBE_STAGE": "", "DUMP_ON": "1", "PROBE_STEPS": "1, 2"}
    settings = load_settings(config, {"dump_path": "keyword", "step": None}, environ)
    assert (settings.dump_path, settings.stage, settings.step, settings.rank) == ("keyword", "reference", (1, 2), (1,))
    assert settings.enabled
    assert load_settings(config, {}, environ).dump_path == "environment"
    assert load_settings(config, {}, {}).dump_path == "file"
    assert load_settings(None, {}, {}).dump_path == "probe-dump"
    assert not load_settings(config, {}, {}).enabled


@pytest.mark.parametrize(
    ("keyword", "environ", "in_file", "enabled"),
    [
        (None, None, None, False),
        (None, "0", None, False),
        (None, "1", None, True),
        (None, "1", False, True),
        (None, "0", True, True),  # a config file that says so needs no DUMP_ON
        (False, "1", True, False),
        (True, "0", False, True),
    ],
)
def test_what_switches_it_on(tmp_path, keyword, environ, in_file, enabled):
    config = write_config(tmp_path / "c.json", {} if in_file is None else {"enabled": in_file})
    found = load_settings(config, {"enabled": keyword}, {} if environ is None else {"DUMP_ON": environ})
    assert found.enabled is enabled


def test_an_msprobe_config_works_as_it_is(tmp_path):
    sections = {
        "statistics": {"scope": [], "list": ["never"], "data_mode": ["input"], "summary_mode": "md5"},
        "tensor": {"scope": [], "list": ["mlp"], "data_mode": ["output"], "file_format": "npy", "backward_input": []},
    }
    common = {"dump_path": "d", "rank": [], "step": [0], "level": "L0", "async_dump": False, "extra_info": True}
    for task in ({"task": "tensor"}, {}):  # tensor is the default here
        settings = load_settings(write_config(tmp_path / "c.json", {**task, **common, **sections}), {}, {})
        assert (settings.list, settings.data_mode, settings.step, settings.rank) == (("mlp",), ("output",), (0,), ())
    statistics = write_config(tmp_path / "s.json", {"task": "statistics", **common, **sections})
    settings = load_settings(statistics, {}, {})
    assert (settings.task, settings.list, settings.data_mode) == ("statistics", ("never",), ("input",))
    other = write_config(tmp_path / "o.json", {"task": "overflow_check", **common})
    with pytest.raises(UsageError, match=r"task 'overflow_check' is not supported: use tokens, statistics, tensor"):
        load_settings(other, {}, {})
    assert load_settings(statistics, {"task": "tensor"}, {}).list == ("mlp",)
    sections["tensor"]["scope"] = ["Module.a", "Module.b"]
    with pytest.raises(UsageError, match="sets 'scope', which probe does not have"):
        load_settings(write_config(tmp_path / "c.json", {**common, **sections}), {}, {})


@pytest.mark.parametrize(
    ("keywords", "problem"),
    [
        ({"task": "hash"}, "task 'hash' is not supported"),
        ({"level": "L1"}, "level 'L1' is not supported"),
        ({"level": "mix"}, "use L0"),
        ({"data_mode": ["backward"]}, "data_mode 'backward' is not supported"),
        ({"step": "first"}, "step holds 'first', which is not a whole number"),
        ({"rank": [None]}, "rank holds None"),
        ({"block_bytes": "big"}, "block_bytes holds 'big'"),
        ({"enabled": "maybe"}, "DUMP_ON is 'maybe'"),
        ({"wrong": 1}, "unknown setting 'wrong'"),
        ({"stage": "../../evil"}, "stage '../../evil' is not supported: use rollout, actor, reference"),
        ({"stage": "critic"}, "stage 'critic' is not supported"),
        ({"stage": "Actor"}, "stage 'Actor' is not supported"),
    ],
)
def test_settings_that_cannot_work(keywords, problem):
    with pytest.raises(UsageError, match=problem):
        PrecisionDebugger(**keywords)


def test_stages_of_the_environment_are_checked_too():
    for stage in ("", *STAGES):
        assert load_settings(None, {"stage": stage}, {}).stage == stage
    with pytest.raises(UsageError, match="stage '/tmp' is not supported"):
        load_settings(None, {}, {"PROBE_STAGE": "/tmp"})


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("c.json", b"{", "is not valid JSON"),
        ("c.json", b"[" * 100_000, "is not valid JSON"),
        ("c.json", b"[1]", "does not hold an object"),
        ("c.json", b"\xff\xfe", "is not UTF-8 text"),
        ("c.json", b'{"wrong": 1}', "unknown setting 'wrong'"),
        ("c.json", b'{"task": ["tensor"]}', "is not supported"),
        ("c.yaml", b"a: [1", "is not valid YAML"),
        ("c.yaml", b"just text", "does not hold an object"),
        ("c.yaml", b"!!python/object:os.system {}", "is not valid YAML"),
        ("none.json", None, "cannot be read"),
    ],
    ids=range(10),
)
def test_config_files_that_cannot_work(tmp_path, name, content, problem):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=problem) as caught:
        PrecisionDebugger(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_yaml_without_pyyaml(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "c.yaml").write_text("level: L0")
    with pytest.raises(UsageError, match="needs PyYAML"):
        PrecisionDebugger(tmp_path / "c.yaml")
