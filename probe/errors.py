"""Errors that a user can act on: what is wrong, where, and how to fix it.

Every class carries a ``slug`` that docs/errors.md explains. The command line prints the one sentence and exits with
status 2; library users catch :class:`ProbeError`.
"""

from __future__ import annotations


class ProbeError(Exception):
    """Say what is wrong in one sentence, with an optional second one on how to fix it.

    Parameters: ``problem`` (what and where), ``fix`` (what to do). ``str(error)`` joins the two.
    """

    slug = "probe-error"
    exit_code = 2

    def __init__(self, problem: str, fix: str = "") -> None:
        self.problem = problem.rstrip(".")
        self.fix = fix.rstrip(".")
        super().__init__(f"{self.problem}: {self.fix}." if self.fix else f"{self.problem}.")


def first_line(error: BaseException) -> str:
    """Return what a foreign error says in one line, its class where it says nothing: a reason within a sentence."""
    return (str(error).splitlines() or [type(error).__name__])[0]


class UsageError(ProbeError):
    """An option or argument that cannot work."""

    slug = "usage"


class DumpError(ProbeError):
    """A dump that is missing, empty, truncated, foreign or unsafe to read."""

    slug = "bad-dump"


class EmptyDumpError(DumpError):
    """A capture or a dump that holds no tensor."""

    slug = "empty-dump"


class OutputExistsError(ProbeError):
    """An output path that would be overwritten."""

    slug = "output-exists"


class PromptsError(ProbeError):
    """A prompts file with a line that cannot be read."""

    slug = "bad-prompts"


class TokensError(ProbeError):
    """A file of log-probs that is missing, damaged, unsafe to read, or does not hold what a comparison needs."""

    slug = "bad-tokens"


class EngineError(ProbeError):
    """An engine that is unknown, not installed, or cannot run as asked."""

    slug = "engine"


class CheckpointError(ProbeError):
    """A model directory that is incomplete or of an unsupported architecture."""

    slug = "bad-checkpoint"


class CaptureError(ProbeError):
    """A model whose forward cannot be captured as asked."""

    slug = "capture"


class CompareError(ProbeError):
    """Two dumps that cannot be compared at all."""

    slug = "incomparable"
