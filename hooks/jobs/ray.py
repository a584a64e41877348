"""Ray: the environment of a job reaches its workers, also on a cluster that somebody else started before."""

from __future__ import annotations

import copy
import functools
import json
import os
from types import ModuleType
from typing import Any

from probe.hooks.jobs.log import folder, trouble

SWITCHES = ("DUMP_ON", "PROMPTS_ONLY")
PREFIX = "PROBE_"
INJECTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Where Ray's job manager puts the runtime environment of ``ray job submit``; a variable given there and in
``ray.init`` too is refused by Ray, so that there it is left alone."""


def patch(module: ModuleType) -> None:
    """Wrap ``ray.init``: our variables become part of the job's ``runtime_env``; what the user gave there stays."""
    original = module.init

    @functools.wraps(original)
    def init(*args: Any, **keywords: Any) -> Any:
        try:
            keywords = with_variables(keywords)
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            trouble(
                f"ray.init did not take our variables, so workers of an existing cluster are not recorded ({reason})"
            )
        return original(*args, **keywords)

    module.init = init  # type: ignore[attr-defined]


def with_variables(keywords: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords of ``ray.init`` with our variables in ``runtime_env["env_vars"]``, where they are not yet.

    The given objects are not changed. A ``job_config`` that holds a runtime environment is taken as its start, because
    Ray lets ``runtime_env`` replace it.
    """
    given = keywords.get("runtime_env")
    if given is None:
        given = getattr(keywords.get("job_config"), "runtime_env", None)
    environment = copy.deepcopy(given) if given else {}
    theirs = dict(environment.get("env_vars") or {})
    ours = {name: value for name, value in variables().items() if name not in theirs and name not in _injected()}
    if not ours:
        return keywords
    environment["env_vars"] = ours | theirs
    return {**keywords, "runtime_env": environment}


def variables() -> dict[str, str]:
    """Return the variables of this process that switch capture on and say what it records."""
    folder()  # where only a config file says it, it becomes a variable that needs no such file elsewhere
    return {name: value for name, value in os.environ.items() if name in SWITCHES or name.startswith(PREFIX)}


def _injected() -> dict[str, Any]:
    try:
        return dict(json.loads(os.environ.get(INJECTED) or "{}")["runtime_env"]["env_vars"])
    except (ValueError, KeyError, TypeError):
        return {}
