"""Runs a command and says what it took: wall and processor seconds, and the peak memory of that process as the operating system accounts
it.

The figures are those of GNU time: `wait4` gives them for one child and for what that child has waited for itself. `RUSAGE_CHILDREN`
would give the largest of all children so far. And on Linux a process starts with the peak of the one it was started from, so a parent
that holds a model would hide what a small child needs: the command is started by a launcher that holds nothing, which is this file
run as a program.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a command wrote to standard output, and what it took.

    Attributes:
        seconds: of wall time; cpu_seconds: of processor time, user and system, of all its threads.
        peak_gb: the largest resident size, in 10⁹ bytes.
    """

    output: str
    seconds: float
    cpu_seconds: float
    peak_gb: float

    @property
    def figures(self) -> dict[str, float]:
        return {"seconds": self.seconds, "cpu_seconds": self.cpu_seconds, "peak_gb": self.peak_gb}


def measured(command: Sequence[str], *, capture: bool = True) -> Measured:
    """Runs a command to its end. Its standard output is kept, or with `capture=False` passed on.

    Raises:
        subprocess.CalledProcessError: its exit status was not 0.
    """
    with tempfile.TemporaryDirectory(prefix="measure-") as scratch:
        figures = Path(scratch) / "figures.json"
        with subprocess.Popen(
            launcher(figures, command), stdout=subprocess.PIPE if capture else None, text=True
        ) as process:
            try:
                output = process.communicate()[0]
            except BaseException:
                process.terminate()  # the launcher passes it on to the command
                raise
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, list(command))
        return Measured(output=output or "", **json.loads(figures.read_text()))


def launcher(figures: Path, command: Sequence[str]) -> list[str]:
    """A command that runs another and writes what it took, as JSON, into a file; terminated, it ends the other first."""
    return [sys.executable, "-I", "-S", __file__, str(figures), *command]


def launch(figures: Path, command: Sequence[str]) -> int:
    """Runs the command and writes what it took; gives its exit status, as a shell does."""
    started = time.monotonic()
    # A group of its own, so that a command that measures others ends with all of them.
    process = subprocess.Popen(command, process_group=0)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: os.killpg(process.pid, received))
    _, status, usage = os.wait4(process.pid, 0)
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes
    took = {
        "seconds": time.monotonic() - started,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_gb": usage.ru_maxrss * unit / 1e9,
    }
    figures.write_text(json.dumps(took))
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(launch(Path(sys.argv[1]), sys.argv[2:]))
