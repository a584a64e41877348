"""Ray: our variables join the runtime environment that the user gave, and never stand in the way of ray.init."""

from __future__ import annotations

import copy
import json
import types
from typing import Any

import pytest

from probe.hooks.jobs import ray as patch_of_ray
from probe.hooks.jobs.log import read_lines

OURS = {"DUMP_ON": "1", "PROBE_DUMP_DIR": "/d", "PROBE_SEQS": "2"}


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PROMPTS_ONLY", "PROBE_CONFIG", patch_of_ray.INJECTED):
        monkeypatch.delenv(name, raising=False)
    for name, value in OURS.items():
        monkeypatch.setenv(name, value)


def stand_in() -> tuple[types.ModuleType, list[tuple[Any, Any]]]:
    """Return a module with an ``init`` that remembers what it is called with."""
    module, calls = types.ModuleType("ray"), []

    def init(*args: Any, **keywords: Any) -> str:
        """Start Ray."""
        calls.append((args, keywords))
        return "context"

    module.init = init  # type: ignore[attr-defined]
    return module, calls


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"env_vars": OURS}),
        ({"runtime_env": None}, {"env_vars": OURS}),
        ({"runtime_env": {"pip": ["x"]}}, {"pip": ["x"], "env_vars": OURS}),
        ({"runtime_env": {"env_vars": {"A": "b"}}}, {"env_vars": {"A": "b", **OURS}}),
        ({"runtime_env": {"env_vars": {"DUMP_ON": "0"}}}, {"env_vars": {**OURS, "DUMP_ON": "0"}}),
        ({"runtime_env": {"env_vars": None}}, {"env_vars": OURS}),
    ],
)
def test_ours_are_added_and_the_user_s_are_kept(given: dict[str, Any], expected: dict[str, Any]) -> None:
    module, calls = stand_in()
    before = copy.deepcopy(given)
    patch_of_ray.patch(module)
    assert module.init("auto", num_cpus=2, **given) == "context"
    assert calls == [(("auto",), {"num_cpus": 2, "runtime_env": expected})]
    assert given == before and module.init.__doc__ == "Start Ray."


def test_the_runtime_environment_of_a_job_config_is_the_start() -> None:
    """Ray lets ``runtime_env`` replace that of ``job_config``, which would lose what the user said there."""
    config = types.SimpleNamespace(runtime_env={"working_dir": "w", "env_vars": {"A": "b"}})
    made = patch_of_ray.with_variables({"job_config": config})
    assert made["runtime_env"] == {"working_dir": "w", "env_vars": {"A": "b", **OURS}}


def test_what_the_job_manager_gave_is_not_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray refuses a variable that both ``ray job submit`` and ``ray.init`` set."""
    injected = {"runtime_env": {"env_vars": {"DUMP_ON": "1", "PROBE_DUMP_DIR": "/e"}}}
    monkeypatch.setenv(patch_of_ray.INJECTED, json.dumps(injected))
    assert patch_of_ray.with_variables({})["runtime_env"] == {"env_vars": {"PROBE_SEQS": "2"}}
    injected["runtime_env"]["env_vars"]["PROBE_SEQS"] = "2"
    monkeypatch.setenv(patch_of_ray.INJECTED, json.dumps(injected))
    assert patch_of_ray.with_variables({"num_cpus": 1}) == {"num_cpus": 1}


@pytest.mark.parametrize("injected", ["", "{}", "[]", "not json", '{"runtime_env": null}'])
def test_an_odd_job_config_changes_nothing(monkeypatch: pytest.MonkeyPatch, injected: str) -> None:
    monkeypatch.setenv(patch_of_ray.INJECTED, injected)
    assert patch_of_ray.with_variables({})["runtime_env"] == {"env_vars": OURS}


def test_trouble_of_ours_leaves_the_call_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("PROBE_DUMP_DIR", str(tmp_path))
    module, calls = stand_in()
    patch_of_ray.patch(module)
    odd = {"runtime_env": object()}
    assert module.init(**odd) == "context"
    assert calls == [((), odd)]
    (line,) = read_lines(tmp_path)
    assert "workers of an existing cluster are not recorded (AttributeError" in line.text


def test_the_user_s_own_error_is_theirs() -> None:
    module, _ = stand_in()

    def init(**keywords: Any) -> None:
        raise ConnectionError("no cluster")

    module.init = init  # type: ignore[attr-defined]
    patch_of_ray.patch(module)
    with pytest.raises(ConnectionError, match="no cluster"):
        module.init()


def test_the_real_merge_of_ray_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN real RuntimeEnv objects, WHEN ours join, THEN they stay valid and merge with a submitted job's."""
    runtime_env = pytest.importorskip("ray.runtime_env")
    from ray.runtime_env.runtime_env import _merge_runtime_env

    made = patch_of_ray.with_variables({"runtime_env": runtime_env.RuntimeEnv(env_vars={"A": "b"})})["runtime_env"]
    assert isinstance(made, runtime_env.RuntimeEnv) and made["env_vars"] == {"A": "b", **OURS}
    job = {"env_vars": {"DUMP_ON": "1"}}
    assert _merge_runtime_env(job, made) is None  # a conflict, if the job's were not left out
    monkeypatch.setenv(patch_of_ray.INJECTED, json.dumps({"runtime_env": job}))
    merged = _merge_runtime_env(job, patch_of_ray.with_variables({})["runtime_env"])
    assert merged == {"env_vars": OURS}
