"""What to run after ``probe dump``."""

from __future__ import annotations

import shlex

from probe.hooks.runners.job import PROCESSED, DumpJob
from probe.settings import STATISTICS
from probe.store.reader import Dump


def next_command(dump: Dump, job: DumpJob) -> str:
    """Return the command that a person will want next."""
    here = shlex.quote(str(dump.path))
    if job.source is not None and job.source.is_file():
        return _other_stage(dump, job)
    if job.source is not None:
        return f"probe compare {shlex.quote(str(job.source))} {here}"
    alike = f" --logprobs-mode {PROCESSED}" if job.sampling.logprobs_mode == PROCESSED else ""
    alike += f" --task {STATISTICS}" if job.task == STATISTICS else ""
    return f"probe dump --stage actor --from {here}{alike} -o {shlex.quote(str(dump.path.with_name('actor')))}"


def _other_stage(dump: Dump, job: DumpJob) -> str:
    """Return what follows a dump of listed sequences: the other side of them, or the comparison where it is there."""
    from probe.hooks.runners.run import is_dump_folder

    stages = ("rollout", "actor" if dump.stage == "rollout" else dump.stage)
    other = stages[dump.stage == "rollout"]
    paths = [dump.path if stage == dump.stage else dump.path.with_name(stage) for stage in stages]
    if all(map(is_dump_folder, paths)):
        return f"probe compare {' '.join(shlex.quote(str(path)) for path in paths)}"
    source, output = (shlex.quote(str(path)) for path in (job.source, dump.path.with_name(other)))
    return f"probe dump --stage {other} --from {source} -o {output}"
