"""``probe demo``: the whole loop on a small model, once healthy and once with a weight broken on purpose."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from probe._version import __version__
from probe.cli import common
from probe.cli.progress import observing
from probe.errors import EngineError, OutputExistsError
from probe.hooks.runners.job import MAX_SEED, DumpJob, check_job

MARKER = "probe_demo.json"
MADE = ("prompts.txt", "rollout", "actor", "model-broken", "actor-broken", "report", "report-broken")
"""What a demo puts into its folder beside the model, and so what --force may replace."""
PARAMETER, SCALE = "model.layers.2.mlp.down_proj.weight", 1.03
"""The damage: 3 % on one matrix in the middle of the model. Rounding is far smaller, spoilt text needs far more."""
BROKEN_MODULE = PARAMETER.removeprefix("model.").removesuffix(".weight")
CAUSE = "scaled-weight"
SAMPLING = ("--n", "2", "--max-tokens", "32", "--temperature", "1.0")
FORMS = ["json", "html", "markdown", "csv"]
STEPS = 5


@click.command(cls=common.Command, examples="probe demo\nprobe demo -o /tmp/probe-demo --force")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("probe-demo"),
    show_default=True,
    cls=common.GroupedOption,
    help="Folder for the model, the dumps and the reports.",
)
@click.option("--force", is_flag=True, cls=common.GroupedOption, help="Replace what an earlier demo left there.")
@click.option(
    "--seed",
    metavar="N",
    type=click.IntRange(0, MAX_SEED),
    default=0,
    show_default=True,
    cls=common.GroupedOption,
    help="Seed of the model and of the sampling.",
)
@click.pass_context
def demo(context: click.Context, output: Path, force: bool, seed: int) -> None:
    """Run the whole loop on a small model, healthy and broken.

    Trains a tiny model, generates with vLLM, recomputes the tokens with Megatron-core, and compares. Then breaks one
    weight of a copy, recomputes again, and compares again: the report has to name the broken module. Exit status: 0
    when both verdicts are right, 1 when one is not.
    """
    started = time.monotonic()
    _require_engines(output)
    claim_folder(output, force)
    run = Demo(output, seed)
    run.make_model()
    run.dump("rollout on vLLM", "rollout", "rollout", "--model", output / "model", "--prompts", output / "prompts.txt")
    run.dump("actor on Megatron-core", "actor", "actor", "--from", output / "rollout")
    run.dump_broken()
    healthy, broken = run.compare()
    right = _print_result(output, healthy, broken)
    common.say(f"took {time.monotonic() - started:.0f} s")
    context.exit(0 if right else 1)


def _require_engines(output: Path) -> None:
    """Refuse before the first minute is spent when an engine is not installed."""
    rollout = output / "rollout"
    check_job(DumpJob("rollout", "vllm", output / "model", rollout, prompts=output / "prompts.txt"))
    check_job(DumpJob("actor", "megatron", output / "model", output / "actor", source=rollout))


def claim_folder(folder: Path, force: bool) -> None:
    """Make the demo's folder; with ``force`` delete what an earlier demo made there, and nothing else."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        if not (folder / MARKER).is_file():
            raise OutputExistsError(f"{folder} already exists and is not of a demo", "choose another -o")
        if not force:
            raise OutputExistsError(f"{folder} holds an earlier demo", "choose another -o or add --force")
        for name in MADE:
            path = folder / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).write_text(json.dumps({"made_by": f"probe demo {__version__}"}) + "\n", encoding="utf-8")


@dataclass
class Demo:
    """The steps of one demo; each says what it does and how long it took."""

    folder: Path
    seed: int
    done: int = 0

    def make_model(self) -> None:
        """Train the model, or reuse the one that is there, and write the prompts."""
        from probe.hooks.demo_model import DEMO_PROMPTS, make_demo_model

        with self._step("a small model, trained here unless it is there already"), observing() as observer:
            make_demo_model(
                self.folder / "model",
                seed=self.seed,
                observer=lambda step, total, loss: observer("training", step, total),
            )
        (self.folder / "prompts.txt").write_text("\n".join(DEMO_PROMPTS) + "\n", encoding="utf-8")

    def dump(self, what: str, stage: str, name: str, *options: str | Path) -> None:
        """Run ``probe dump`` in a process of its own: two engines in one process would share torch.distributed."""
        sampling = (*SAMPLING, "--seed", str(self.seed)) if stage == "rollout" else ()
        words = ["dump", "--stage", stage, *options, *sampling, "--dtype", "float32", "-o", self.folder / name]
        with self._step(what):
            self._probe([str(word) for word in words], what)

    def dump_broken(self) -> None:
        """Break one weight of a copy of the model and recompute the same tokens with it."""
        from probe.hooks.demo_model import corrupt_checkpoint

        model = corrupt_checkpoint(
            self.folder / "model", self.folder / "model-broken", parameter=PARAMETER, scale=SCALE
        )
        what = f"actor again, with {PARAMETER} x {SCALE}"
        self.dump(what, "actor", "actor-broken", "--from", self.folder / "rollout", "--model", model)

    def compare(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Compare the rollout with both actors, write the reports and return them (healthy, broken)."""
        with self._step("comparing both actors with the rollout"):
            return self._compare("actor", "report"), self._compare("actor-broken", "report-broken")

    def _compare(self, actor: str, report_folder: str) -> dict[str, Any]:
        """Compare an actor with the rollout; both should hold the weights of the model that the rollout loaded."""
        from probe.compare.report import write_report

        common.one_blas_thread()
        from probe.compare.run import compare_dumps

        report = compare_dumps(self.folder / "rollout", self.folder / actor, weights=self.folder / "model")
        write_report(report, FORMS, self.folder / report_folder)
        return report

    @contextlib.contextmanager
    def _step(self, what: str) -> Iterator[None]:
        self.done += 1
        common.note(f"[{self.done}/{STEPS}] {what}")
        started = time.monotonic()
        yield
        common.note(f"[{self.done}/{STEPS}] took {time.monotonic() - started:.1f} s")

    def _probe(self, words: list[str], what: str) -> None:
        common.note(f"$ probe {shlex.join(words)}")
        # What a user has set for dumps of their own would make this one another dump than the demo describes.
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PROBE_") and k != "PROMPTS_ONLY"}
        kept.setdefault("OMP_NUM_THREADS", "1")  # so small a model gains nothing from threads that wait for each other
        verbosity = {common.QUIET: ["-q"], common.VERBOSE: ["-v"]}.get(common.State.verbosity, [])
        # The child's standard output joins its progress: that of the demo holds the demo's result only.
        done = subprocess.run([sys.executable, "-m", "probe", *verbosity, *words], env=kept, stdout=2)
        if done.returncode:
            raise EngineError(
                f"the step '{what}' of the demo ended with status {done.returncode}",
                "its message is above; 'probe doctor' says what is missing",
            )


def _print_result(folder: Path, healthy: dict[str, Any], broken: dict[str, Any]) -> bool:
    """Print both verdicts, what was broken, whether the report named it, and where the reports are."""
    suspect = next(iter(broken["suspects"]), {"name": "nothing", "cause": "", "side": ""})
    named = f"{suspect['cause']} in {suspect['name']} of side {suspect['side']}"
    found = (suspect["cause"], suspect["name"], suspect["side"]) == (CAUSE, BROKEN_MODULE, "b")
    checks = {
        "the healthy pair was not judged consistent": healthy["verdict"] == "consistent",
        "the broken pair was not judged divergent": broken["verdict"] == "divergent",
        f"the report names {named}, not {CAUSE} in {BROKEN_MODULE} of side b": found,
    }
    for title, report in (("healthy", healthy), ("broken", broken)):
        common.say(f"{title}: {report['verdict']}", "bold")
        common.paragraph(report["summary"])
    common.say(f"injected: {PARAMETER} x {SCALE} in {folder / 'model-broken'}")
    common.say(f"named by the report: {named}" + (", which is what was broken" if found else ""))
    for report_folder in ("report", "report-broken"):
        common.say(f"report: {folder / report_folder / 'report.html'}")
    for problem in [problem for problem, right in checks.items() if not right]:
        common.say(f"the demo failed: {problem}", "bold red")
    common.say(f"next: probe show {shlex.quote(str(folder / 'actor-broken'))} decoder.layers.2.mlp.linear_fc2")
    return all(checks.values())
