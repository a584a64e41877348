"""What every command shares: two consoles, verbosity, grouped options, lazily imported commands, errors, numbers."""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from probe.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

PIPED_WIDTH = 120
"""Columns of text that does not go to a terminal (COLUMNS overrides it)."""
WHOLE_ROW = 1000
"""Columns of a listing that does not go to a terminal: one line per row, so that grep and awk can read it."""

QUIET, NORMAL, VERBOSE = -1, 0, 1
_LEVELS = {QUIET: logging.ERROR, NORMAL: logging.WARNING, VERBOSE: logging.INFO}

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


class State:
    """What -q and -v asked for; one per process, because the last resort for errors has no click context left."""

    verbosity = NORMAL


# -- consoles ---------------------------------------------------------------------------------------------------------


@functools.cache
def stdout() -> Console:
    """Return the console for data."""
    return _console(stderr=False)


@functools.cache
def stderr() -> Console:
    """Return the console for progress, log lines and errors."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    from rich.console import Console

    class PipeConsole(Console):
        def on_broken_pipe(self) -> None:
            raise  # rich calls this while it handles the error; main() decides on the exit status

    console = PipeConsole(stderr=stderr, highlight=False, soft_wrap=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPED_WIDTH
    return console


def say(text: str, style: str = "") -> None:
    """Print a line of data to standard output: no markup, no wrapping, control characters spelled out."""
    from probe.compare.report.model import visible

    stdout().print(visible(text), style=style or None, markup=False, highlight=False, soft_wrap=True)


def paragraph(text: str) -> None:
    """Print an indented paragraph of data to standard output, wrapped at words."""
    from rich.padding import Padding
    from rich.text import Text

    from probe.compare.report.model import visible

    stdout().print(Padding(Text(visible(text)), (0, 0, 0, 2), expand=False))


def note(text: str) -> None:
    """Print a line about what is going on to standard error, unless -q."""
    if State.verbosity > QUIET:
        stderr().print(f"probe: {text}", markup=False, highlight=False, soft_wrap=True)


# -- log lines --------------------------------------------------------------------------------------------------------


class _ConsoleHandler(logging.Handler):
    """Print records of the ``probe`` logger above a progress bar that may be running."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = f"probe: {record.levelname.lower()}: {record.getMessage()}"
            stderr().print(line, markup=False, highlight=False, soft_wrap=True)
        except Exception:
            self.handleError(record)


def configure_logging() -> None:
    """Send the ``probe`` logger to standard error at the level that -q or -v asked for."""
    logger = logging.getLogger("probe")
    logger.setLevel(_LEVELS[State.verbosity])
    logger.handlers = [_ConsoleHandler()]
    logger.propagate = False


# -- commands and options ---------------------------------------------------------------------------------------------


class GroupedOption(click.Option):
    """An option that the help lists under a heading of its own."""

    def __init__(self, *args: Any, group: str = "Options", **kwargs: Any) -> None:
        self.group = group
        super().__init__(*args, **kwargs)

    def resolve_envvar_value(self, context: click.Context) -> str | None:
        """Return the value of ``PROBE_<COMMAND>_<LONG OPTION>``, or of the option's own variable, or None."""
        name = max(self.opts, key=len).lstrip("-").replace("-", "_").upper()  # click would use the parameter's name
        value = os.environ.get(f"{context.auto_envvar_prefix}_{name}") if context.auto_envvar_prefix else None
        return value or (super().resolve_envvar_value(context) if self.envvar else None)


def option(group: str) -> Callable[..., Callable[[Decorated], Decorated]]:
    """Return ``click.option`` for options under the heading ``group``."""

    def decorate(*declarations: str, **attributes: Any) -> Callable[[Decorated], Decorated]:
        return click.option(*declarations, cls=GroupedOption, group=group, **attributes)

    return decorate


class FiniteRange(click.FloatRange):
    """A number in a range; NaN, which is in every range as it compares with nothing, and infinity are refused."""

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        """Return the number."""
        number = super().convert(value, parameter, context)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", parameter, context)
        return number


def verbosity_options() -> list[click.Option]:
    """Return -q and -v, which work before and after the name of a command."""

    def remember(level: int) -> Callable[[click.Context, click.Parameter, bool], None]:
        def callback(context: click.Context, parameter: click.Parameter, given: bool) -> None:
            if given:
                State.verbosity = level

        return callback

    common: dict[str, Any] = {"is_flag": True, "expose_value": False, "is_eager": True}
    return [
        click.Option(["-q", "--quiet"], help="No progress and no warnings.", callback=remember(QUIET), **common),
        click.Option(["-v", "--verbose"], help="Say more; show tracebacks.", callback=remember(VERBOSE), **common),
    ]


class Command(click.Command):
    """A command with -q and -v, options listed by group, and examples written as they are typed."""

    def __init__(self, *args: Any, examples: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = [line.strip() for line in examples.strip().splitlines()]
        self.params += verbosity_options()

    def invoke(self, context: click.Context) -> Any:
        """Set the log level, then run the command."""
        configure_logging()
        return super().invoke(context)

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one list of options per group, in the order in which the groups first appear."""
        groups: dict[str, list[tuple[str, str]]] = {}
        options = [p for p in self.get_params(context) if isinstance(p, click.Option)]
        for parameter in sorted(options, key=lambda p: not isinstance(p, GroupedOption)):
            record = parameter.get_help_record(context)
            if record is not None:
                groups.setdefault(getattr(parameter, "group", "Other options"), []).append(record)
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records)

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples unwrapped, so that each can be pasted."""
        if self.examples:
            with formatter.section("Examples"):
                for line in self.examples:
                    formatter.write(f"  {line}\n")


# -- checks and numbers -----------------------------------------------------------------------------------------------


BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


def one_blas_thread() -> None:
    """Let BLAS multiply on one thread, unless OMP_NUM_THREADS or its own variable says otherwise; before numpy loads.

    A replay makes thousands of small products: on cores that have something else to do, threads that wait for each
    other made a comparison of 6 s take 30 to 40.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        for name in BLAS_THREADS:
            os.environ.setdefault(name, "1")


def unknown_name(kind: str, name: str, known: list[str], where: str) -> UsageError:
    """Return the error for a name that nothing has, with the known names closest to it."""
    import difflib

    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    fix = f"did you mean {' or '.join(close)}" if close else where
    return UsageError(f"there is no {kind} {name!r}", fix)


def count(number: int, noun: str) -> str:
    """Return a count with its noun: ``1 tensor``, ``2,000 tensors``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def size(number: int) -> str:
    """Return a number of bytes with a decimal unit: ``999 B``, ``1.2 MB``."""
    value = float(number)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def table(title: str, columns: dict[str, str], rows: list[tuple[Any, ...]], *, left_out: int = 0) -> None:
    """Print a table to standard output; ``columns`` maps a heading to left or right, ``left_out`` adds a note."""
    from rich.table import Table
    from rich.text import Text

    from probe.compare.report.model import visible

    say("")
    say(title, "bold")
    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading, justify in columns.items():
        drawn.add_column(heading, justify="right" if justify == "right" else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(visible(cell)) for cell in row))
    console = stdout()
    console.print(drawn, width=None if console.is_terminal else WHOLE_ROW)
    if left_out:
        say(f"... and {left_out:,} more (--all shows them)", "dim")
