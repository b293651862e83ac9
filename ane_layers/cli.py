"""The command line: parses, calls, prints. What each command does stands in `ane_layers.commands`."""

from __future__ import annotations

import signal
import sys
import warnings
from typing import Annotated, Any

import typer

from ane_layers import __version__, console
from ane_layers.commands import analysis, compression, core_ai, packages, rewriting, text

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

# What the parser raises: click's own, or that of the copy in newer typers.
USAGE_ERROR: Any = typer.BadParameter.__base__
USAGE_STATUS = 2


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    """Neural-Engine-friendly transformer layers: convert, inspect, verify and run Core ML packages on any machine."""
    if version:
        console.out.print(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(USAGE_STATUS)


for _module in (packages, rewriting, analysis, compression, text, core_ai):
    for _command in _module.COMMANDS:
        app.command()(_command)


def main() -> None:
    """Entry point of `ane-layers`: a user's mistake becomes one line on stderr and a non-zero exit status."""
    # A terminated run cleans up like an interrupted one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    warnings.showwarning = lambda message, *_, **__: console.err.print(f"warning: {message}", markup=False)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    try:
        status = app(prog_name="ane-layers", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        status = console.INTERRUPTED
    except USAGE_ERROR as error:
        console.fail(usage_line(error), USAGE_STATUS)
    except (ValueError, OSError) as error:
        console.fail(str(error) or type(error).__name__)
    if status == console.INTERRUPTED:  # newer typers catch the interrupt themselves
        console.fail("interrupted; nothing was written", console.INTERRUPTED)
    sys.exit(status)


def usage_line(error: Any) -> str:
    """What is wrong with a command line, and where to read how it should be."""
    command = error.ctx.command_path if error.ctx is not None else "ane-layers"
    message = error.format_message().rstrip(".")
    return f"{command}: {message[:1].lower()}{message[1:]} (see {command} --help)"


if __name__ == "__main__":
    main()
