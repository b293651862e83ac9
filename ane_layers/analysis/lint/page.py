"""The page `docs/lint.md`, from the rules themselves.

python -m ane_layers.analysis.lint.page > docs/lint.md
"""

from __future__ import annotations

from ane_layers.analysis.lint import Rule, rules, rules_by_subject

_HEADINGS = {
    "shapes": "Shapes",
    "states": "States",
    "weights": "Size of the weights",
    "compression": "Compression",
    "operations": "Operations",
    "numerics": "Numbers",
}

# What packages of this project may be told without an explanation, and why.
UNEXPLAINED = {
    "compression-folded-on-old-chips": "with `--recipe int8` and other integers: a choice that costs bandwidth on M1 and M2",
    "palettized-stateful-coremltools-9": "with tables of 4 bits: nothing in the graph tells whether a package is concerned",
    "head-in-one-piece": "with `--head-pieces 1` over a large vocabulary: disputed",
    "lut-group-size": "with a recipe of other groups than 8 or 16",
}

# Public claims that no rule stands for, and why.
UNCHECKED = {
    "A matrix product whose result reaches about 32,752 turns to inf (ANEForge; low confidence)": (
        "values are known only when the program runs; `ane-layers verify` and the interpreter's diagnosis name the first operation "
        "that leaves fp16's range"
    ),
    "A slice past the start of the last axis turns values above 4,094 to inf (ANEForge; low)": (
        "the slices are listed, the values in them are known only when the program runs"
    ),
    "A mask of -inf turns rows to NaN (Apple; high)": (
        "only where the mask is a constant or made in the graph; one that comes as an input is up to the caller"
    ),
    "Decoding costs what the cache is long: half the context gave 2.56 times the speed (CoreML-LLM; medium)": (
        "no fault of a file; the bandwidth model of `ane-layers analyze` shows it"
    ),
    "Lookup tables of 4 bits stream on every chip from M1 (ANEForge; medium)": (
        "no fault; its reverse is compression-folded-on-old-chips"
    ),
    "Splitting the head costs speed (CoreML-LLM measured 4.6 % at a vocabulary of 262k; disputed)": (
        "a setting: a head in one piece is mentioned, one in pieces is not"
    ),
    "Where an operation runs, and how fast": (
        "Core ML decides when the model is loaded; on a Mac, `MLComputePlan` tells"
    ),
}

_INTRODUCTION = """\
# Lint

Holds a saved package against what others have reported about the Neural Engine and the tool chain. It reads the package's own files,
takes any ML Program, whoever made it, and says nothing about speed. **None of the claims was measured by this project.** Each rule names
its source and how far to trust it; where sources disagree, both are given. This page is written by
`python -m ane_layers.analysis.lint.page` from the {count} rules themselves.

```python
import coremltools as ct
import numpy as np
import torch

from ane_layers.analysis.lint import fails, lint
from ane_layers.program import Package


class Repeated(torch.nn.Module):
    def forward(self, keys):
        return keys.repeat_interleave(4, dim=1).exp()


ct.convert(
    torch.jit.trace(Repeated().eval(), torch.zeros(1, 2, 8, 64)),
    inputs=[ct.TensorType("keys", (1, 2, 8, 64), np.float16)],
    outputs=[ct.TensorType("out", dtype=np.float16)],
    minimum_deployment_target=ct.target.iOS18,
    skip_model_load=True,
).save("repeated.mlpackage")

package = Package.open("repeated.mlpackage")
findings = lint(package, package.function())
found = {{finding.rule for finding in findings}}
assert found == {{"matmul-above-rank-4", "rank-above-4", "repeated-data"}}
assert fails(findings, "warning")

left_out = lint(package, package.function(), suppress=found)
assert all(finding.suppressed for finding in left_out) and not fails(left_out, "warning")
```

## Reading a finding

There is one finding a rule and function. Its message names the function, the worst three cases with their shapes or bytes, and how many
there are; `operations` has the names of the worst five.

| severity | meaning |
| --- | --- |
| error | reported to fail, or to give wrong results |
| warning | reported to leave the engine, to cost much, or to lose precision |
| info | disputed, or nothing in the graph needs to change |

| confidence | meaning |
| --- | --- |
| high | Apple says so, several independent reports agree, or the code of the tool chain shows it |
| medium | one careful report |
| low | one report with few details |
| disputed | reports contradict each other |

**Expected findings.** Some cases cannot be otherwise in the function at hand: the hidden states of a single token are `[1, C, 1, 1]`. Where
facts in the file show that, the finding says why in `expected`; who made the package plays no part. If all cases of a rule are expected,
so is the finding; else it counts the others only and mentions these.

**This project's own packages.** With folded heads, every way of writing the cache, every head and function, and layers with windows, they
have no finding but expected ones (tested, with a head size and a context that are powers of two). Options may add these, of severity info:

{unexplained}

`--head-sharing repeat_kv` is told what it repeats, `--no-fuse` that it transposes the heads of a single token; sizes that a rule minds
(of states, weights, the vocabulary) are told as well.

**Failing a build.** `fails(findings, "warning")`, and `--fail-on warning` on the command line, look for a finding of that severity or
above. Expected and suppressed findings do not fail.

**Suppressing.** A rule is left out by its id. Its findings stay in the list, marked as suppressed. An unknown id is an error.
"""


def page() -> str:
    """The page as Markdown."""
    own = "\n".join(f"- {rule}: {reason}" for rule, reason in UNEXPLAINED.items())
    parts = [_INTRODUCTION.format(count=len(rules()), unexplained=own)]
    subjects = rules_by_subject()
    for subject, heading in _HEADINGS.items():
        parts.append(f"## {heading}\n")
        parts.extend(_section(rule) for rule in subjects[subject])
    parts.append("## Not checkable from the file\n")
    rows = "\n".join(f"| {claim} | {reason} |" for claim, reason in UNCHECKED.items())
    parts.append(f"| claim | why no rule checks it, or not all of it |\n| --- | --- |\n{rows}\n")
    return "\n".join(parts)


def _section(rule: Rule) -> str:
    return (
        f"### {rule.id}\n\n{rule.title[0].upper()}{rule.title[1:]}.\n\n"
        f"| severity | confidence | chips | source |\n| --- | --- | --- | --- |\n"
        f"| {rule.severity} | {rule.confidence} | {rule.chips} | {rule.source} |\n\n"
        f"*Why.* {rule.reason}\n\n*What to do.* {rule.remedy}\n"
    )


if __name__ == "__main__":
    print(page(), end="")
