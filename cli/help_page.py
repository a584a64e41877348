"""Write docs/cli.md from the real help texts: ``python -m probe.cli.help_page > docs/cli.md``."""

from __future__ import annotations

import sys

import click

from probe.cli.main import COMMANDS, cli

WIDTH = 80
HEAD = """# Command line

Made by `python -m probe.cli.help_page > docs/cli.md`; a test compares it with the real help.

Standard output carries data, standard error progress, log lines and errors. Exit status: 0 consistent, 1 the two dumps
differ, 2 trouble (one sentence on standard error says what, where and how to fix it), 130 interrupted. Colours follow
`NO_COLOR`. Options on the command line go before `PROBE_<COMMAND>_<OPTION>` in the environment, which goes before the
defaults.
"""


def help_page() -> str:
    """Return the text of docs/cli.md."""
    with click.Context(cli, info_name="probe", terminal_width=WIDTH, **cli.context_settings) as context:
        parts = [HEAD, _section("probe", cli.get_help(context))]
        for name in COMMANDS:
            command = cli.get_command(context, name)
            assert command is not None
            with click.Context(command, parent=context, info_name=name, terminal_width=WIDTH) as inner:
                parts.append(_section(f"probe {name}", command.get_help(inner)))
    return "\n".join(parts)


def _section(title: str, text: str) -> str:
    return f"## {title}\n\n```text\n{text.rstrip()}\n```\n"


if __name__ == "__main__":
    sys.stdout.write(help_page())
