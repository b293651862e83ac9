"""The sections of the page of benchmarks: which script makes each, with which arguments, and what its figures are and are not.

A section is one entry here and, in its script, `tables(result)`: Markdown from what the script gives as JSON.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CHECKPOINT = "CHECKPOINT"
"""Stands for the folder of the 1.2B geometry, in arguments and on the page."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """One script's part of the page.

    Attributes:
        title: of its heading; says: what was measured and what was not.
        script: in this folder.
        arguments, quick: its command line, in full and for a look at whether it works.
        to_file: whether `--json` takes a file; else it prints JSON in place of the table.
    """

    title: str
    script: str
    says: str
    arguments: Sequence[str] = ()
    quick: Sequence[str] = ()
    to_file: bool = True

    @property
    def path(self) -> Path:
        return HERE / self.script

    @property
    def needs_checkpoint(self) -> bool:
        return CHECKPOINT in self.arguments

    def command(self, *, quick: bool) -> list[str]:
        """As on the page: without the interpreter's and the checkpoint's places."""
        return ["python", f"benchmarks/{self.script}", *(self.quick if quick else self.arguments)]

    def tables(self, result: Any) -> list[str]:
        """The script's Markdown of what it measured."""
        lines: list[str] = importlib.import_module(self.path.stem).tables(result)
        return lines


SECTIONS: dict[str, Section] = {
    "conversion": Section(
        title="From a folder to a package",
        script="conversion.py",
        arguments=[CHECKPOINT],
        quick=[CHECKPOINT, "--context", "256", "--prefill", "16", "--promote", "1"],
        says="Time and peak memory of converting random weights of EXAONE 4.0 1.2B's geometry, every step a process of "
        "its own, peak memory as the operating system accounts it. Stock coremltools gets the same graph; it "
        "compresses no package with two functions, so palettizing once is less than it takes. Palettizing is "
        "scaled up from a sample: an estimate for stock, measured for ours.",
    ),
    "clustering": Section(
        title="Clustering",
        script="clustering.py",
        quick=["--quick", "--distribution", "gaussian"],
        says="Lookup tables for one weight, against the call that coremltools' palettizer makes: processor time of one "
        "thread, and squared error. An error of 1 is coremltools' own. The weights are drawn, but for one table "
        "of the bundled model; what a model loses by it is on another page.",
    ),
    "interpreter": Section(
        title="The interpreter",
        script="interpreter_speed.py",
        arguments=[CHECKPOINT],
        quick=[CHECKPOINT, "--context", "256", "--tokens", "3"],
        says="One decode step at the end of the context, and the largest resident size of the whole process, loading "
        "included. The interpreter runs the package's program, with weights in 4-bit tables, on this processor: "
        "that is how long a check takes, and says nothing about a Neural Engine.",
    ),
    "head_sharing": Section(
        title="Ways of sharing KV heads",
        script="head_sharing.py",
        quick=["--quick"],
        to_file=False,
        says="The same attention weights with KV heads shared in several ways, held against PyTorch's own grouped "
        "attention. Counts and bytes are read from the saved files; times are of this processor, with one thread. "
        "Which way an engine prefers only a device can tell.",
    ),
    "graph": Section(
        title="What the graphs are made of",
        script="graph.py",
        quick=["--quick"],
        says="Operations, tiles and bytes by the static accounting of `analyze`, read from saved files with two and "
        "three layers; a layer is the difference. Ratios are to the first row of each table. The vocabulary is "
        "1,024, so the head is left out of the bytes but for a rest, and weights are fp16. Counts are no times: "
        "nothing was run here.",
    ),
    "sensitivity": Section(
        title="Ranking layers",
        script="sensitivity.py",
        arguments=[CHECKPOINT],
        quick=[CHECKPOINT, "--windows", "1", "--length", "16"],
        says="`ane-layers sensitivity` as a user runs it, on random weights of the 1.2B geometry and with random token ids, as a "
        "folder without a tokenizer gets them. Time and memory are what is measured; the ranking itself means "
        "nothing here.",
    ),
    "large": Section(
        title="A model that fits into no memory",
        script="large_model.py",
        quick=["--quick"],
        says="EXAONE 4.0 32B's geometry, random weights in a file a layer, to chunks of at most 1,000 MB of weights; the "
        "conversion is ended in the middle of a chunk, and the same command goes on. A third of the feed-forward rows are "
        "zeros, kept as holes on disk; they are clustered and written like any other. Peak memory is that of the process. "
        "Nothing was executed here.",
    ),
    "families": Section(
        title="Families",
        script="families.py",
        quick=["llama"],
        says="Every family as a tiny random model of two layers against `transformers` in fp32, and its package, "
        "executed by the interpreter, against PyTorch. It speaks of arithmetic and graphs; published weights of "
        "none of them were run.",
    ),
    "fold_existing": Section(
        title="Folding models that exist",
        script="fold_existing.py",
        quick=["--model", "Llama-3.2-1B", "--context", "256", "--block", "8"],
        to_file=False,
        says="Stock `transformers` models at published widths, two layers, converted by plain `ct.convert`, before → "
        "after the graph pass. Figures are read from the saved files, and both packages were run against each "
        "other in the interpreter, on random inputs.",
    ),
}
