"""What a figure depends on besides the code: versions and the machine."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

LIBRARIES = ("torch", "coremltools", "transformers", "numpy")


def versions() -> dict[str, str]:
    """Of Python and of the libraries that do the work."""
    return {"Python": platform.python_version()} | {name: _version(name) for name in LIBRARIES}


def machine() -> dict[str, str | int | float]:
    """Processor, number of processors that this process may use, and memory in GB."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": cores,
        "memory_gb": round(memory, 1),
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _cpu() -> str:
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout.strip() or "unknown"
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"
