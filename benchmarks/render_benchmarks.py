"""The page of benchmarks, from the results that `run_all.py` keeps."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from sections import SECTIONS, Section

INTRODUCTION = """\
Everything here was measured by one command, section by section, and this page is written by it:

```console
$ pip install '.[benchmarks]'
$ python benchmarks/run_all.py                         # everything; hours on two cores
$ python benchmarks/run_all.py conversion clustering   # some sections; the others stay as they were
$ python benchmarks/run_all.py --quick                 # small sizes, to see that it works
```

**Nothing on this page was measured on an Apple device.** Times and memory are of the machine that a section names; counts and bytes are
read from saved packages. `CHECKPOINT` is a folder with random weights in EXAONE 4.0 1.2B's geometry, from
`python benchmarks/make_checkpoint.py --out CHECKPOINT`. A GB is 10⁹ bytes, a MB 10⁶, a MiB 2²⁰.
"""


def page(results: Mapping[str, Any]) -> str:
    """Markdown of all sections that have results, and a line about those that have none."""
    done = results.get("sections", {})
    parts = ["# Benchmarks", "", INTRODUCTION]
    for name, section in SECTIONS.items():
        if name in done:
            parts += [*section_lines(section, done[name]), ""]
    missing = [f"`{name}`" for name in SECTIONS if name not in done]
    if missing:
        parts += [f"Left out, because there are no results yet: {', '.join(missing)}.", ""]
    return "\n".join(parts)


def section_lines(section: Section, entry: Mapping[str, Any]) -> list[str]:
    """A heading, what was measured and on what, and the script's tables."""
    lines = [f"## {section.title}", "", *textwrap.wrap(section.says, 140, break_on_hyphens=False), ""]
    if entry["quick"]:
        lines += ["**A quick run at small sizes: it shows that the script works, and no figure of it counts.**", ""]
    lines += ["```console", f"$ {' '.join(entry['command'])}", "```", "", conditions(entry), ""]
    return [*lines, *section.tables(entry["result"])]


def conditions(entry: Mapping[str, Any]) -> str:
    machine = entry["machine"]
    cores = f"{machine['cores']} core{'s' if machine['cores'] != 1 else ''}"
    versions = ", ".join(f"{name} {number}" for name, number in entry["versions"].items())
    took = f"{entry['seconds'] / 60:.0f} minutes" if entry["seconds"] >= 90 else f"{entry['seconds']:.0f} seconds"
    return f"{entry['date']}, in {took}; {machine['system']}, {machine['cpu']}, {cores}, {machine['memory_gb']:g} GB; {versions}."
