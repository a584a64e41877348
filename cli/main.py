"""The ``probe`` command: commands imported on first use, and one place where errors become a sentence and a status."""

from __future__ import annotations

import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from probe._version import __version__
from probe.cli import common
from probe.errors import ProbeError
from probe.hooks.activate import stand_down

COMMANDS: dict[str, str] = {
    "dump": "Run a model on an engine and store its tensors, rows and log-probs.",
    "compare": "Compare two dumps and say where they first disagree.",
    "tokens": "Compare log-probs token by token, and what they do to a PPO update.",
    "replay": "Recompute each module of one dump in float64 from its own inputs.",
    "show": "Show what a dump holds, or one module of it.",
    "doctor": "Say what is installed, what works here and what is missing.",
    "demo": "Run the whole loop on a small model, healthy and broken.",
}
"""Name -> the first line of its help. ``probe.cli.NAME`` holds the command; it is imported when it is used."""

INTERRUPTED, BROKEN_PIPE = 130, 141  # 128 + SIGINT, 128 + SIGPIPE, as a shell reports them


class LazyGroup(click.Group):
    """A group that imports a command when it runs, not when it is listed."""

    def list_commands(self, context: click.Context) -> list[str]:
        """Return the names of the commands in the order of a first use."""
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """Import and return a command, or None."""
        if name not in COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(f"probe.cli.{name}"), name)
        return command

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that ``args`` name, or raise with the closest names."""
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            raise common.unknown_name("command", args[0], list(COMMANDS), "see 'probe --help'")
        return super().resolve_command(context, args)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, context: click.Context) -> Any:
        """Run a command; give interruptions the exit status a shell expects of them."""
        try:
            try:
                return super().invoke(context)
            finally:
                sys.stdout.flush()  # here, where a failure can still be reported
        except KeyboardInterrupt:
            click.echo("probe: interrupted", err=True)
            context.exit(INTERRUPTED)
        except BrokenPipeError:
            _silence_stdout()
            context.exit(BROKEN_PIPE)


def _silence_stdout() -> None:
    """Point standard output elsewhere, so that the interpreter's last flush does not fail too."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "PROBE"},
    epilog="Every option can be set in the environment: PROBE_DUMP_DTYPE=float32 is 'probe dump --dtype float32'.",
)
@click.version_option(__version__, "-V", "--version", prog_name="probe", message="%(prog)s %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Find where and why two runs of the same language model disagree.

    Dump the rollout engine (vLLM), dump the training side (Megatron) on the same tokens, compare the two. Exit status:
    0 consistent, 1 the two differ, 2 trouble.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


cli.params += common.verbosity_options()


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line; ends the process with status 0, 1 (the dumps differ) or 2 (trouble)."""
    common.State.verbosity = common.NORMAL
    stand_down()  # under DUMP_ON=1 this process would be recorded twice
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a locale without UTF-8 must not turn a report into an error
            stream.reconfigure(errors="backslashreplace")
    sys.exit(run(args))


def run(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; every error ends here, as one sentence on standard error."""
    try:
        return cli.main(args, prog_name="probe", standalone_mode=False) or 0
    except ProbeError as error:
        return _fail(str(error), error.exit_code)
    except click.ClickException as error:
        return _fail(_usage_sentence(error), 2)
    except click.Abort:
        click.echo("probe: interrupted", err=True)
        return INTERRUPTED
    except OSError as error:
        return _system_error(error)
    except Exception as error:
        return _internal_error(error)


def _fail(sentence: str, status: int) -> int:
    from probe.compare.report.model import visible

    click.echo(f"probe: error: {visible(sentence)}", err=True)
    return status


def _usage_sentence(error: click.ClickException) -> str:
    """Return click's message about an option as one sentence that says where the help is."""
    message = " ".join(error.format_message().split()).rstrip(".").replace(". Choose from: ", ", which is one of ")
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "probe"
    return f"{message[:1].lower()}{message[1:]} (see '{path} --help')."


def _system_error(error: OSError) -> int:
    """Report what the system refused: a path without permission, a full disk; anything vaguer is an internal error."""
    if error.strerror is None:
        return _internal_error(error)
    if common.State.verbosity >= common.VERBOSE:
        traceback.print_exception(error)
    if error.filename is None:
        _silence_stdout()
    where = error.filename or "standard output"
    return _fail(f"{where} cannot be used ({error.strerror}): check the path, its permissions and the free space.", 2)


def _internal_error(error: Exception) -> int:
    """Report an error nobody foresaw: one line, and the traceback with -v."""
    if common.State.verbosity >= common.VERBOSE:
        traceback.print_exception(error)
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    how = "" if common.State.verbosity >= common.VERBOSE else "; run it again with -v for the traceback to report"
    return _fail(f"internal error ({reason}){how}.", 2)
