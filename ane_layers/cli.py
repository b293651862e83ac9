"""The command line: parses, calls, prints. What each command does stands in `ane_layers.commands`."""

from __future__ import annotations

import signal
import sys
import warnings
from typing import Annotated

import typer

from ane_layers import __version__, console
from ane_layers.commands import analysis, compression, packages, text

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Neural-Engine-friendly transformer layers: convert, inspect, verify and run Core ML packages on any machine."""
    if version:
        console.out.print(__version__)
        raise typer.Exit


for _module in (packages, analysis, compression, text):
    for _command in _module.COMMANDS:
        app.command()(_command)


def main() -> None:
    """Entry point of `ane-layers`: a user's mistake becomes one line on stderr and a non-zero exit status."""
    # A terminated run cleans up like an interrupted one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    warnings.showwarning = lambda message, *_, **__: console.err.print(f"warning: {message}", markup=False)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    try:
        app()
    except KeyboardInterrupt:
        console.fail("interrupted; nothing was written", 130)
    except (ValueError, OSError) as error:
        console.fail(str(error) or type(error).__name__)


if __name__ == "__main__":
    main()
