"""One row a family: length of its file, distance from `transformers`, operations, tiles, and the executed package against PyTorch.

    python benchmarks/families.py [FAMILY …] [--json families.json]

Models are tiny and random, of two layers (`tiny_families.py`): the figures speak of arithmetic and of graphs, not of published weights.
Parity is the largest difference of logits from `transformers` in fp32, over 80 tokens as a whole and one by one through the cache. The
package is converted from bf16 with a context of 48 and prefill blocks of 8; `verify` runs 40 tokens through it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from tiny_families import FAMILIES, reference, write_family

from ane_layers import models
from ane_layers.analysis import inspect
from ane_layers.models import from_folder
from ane_layers.verification import verify

COLUMNS = {
    "family": "family",
    "lines": "lines",
    "parity_whole": "parity, whole",
    "parity_cache": "parity, cache",
    "decode_operations": "decode operations",
    "tiles": "tiles",
    "highest_rank": "rank",
    "snr_fp32_db": "verify dB, fp32",
    "snr_fp16_db": "verify dB, fp16",
}


def measure(family: str, scratch: Path) -> dict[str, Any]:
    """A family's figures, by the keys of `COLUMNS`."""
    wide = write_family(scratch / "fp32", family)
    narrow = write_family(scratch / "bf16", family, dtype=torch.bfloat16)
    source = Path(models.__file__).parent / f"{family}.py"
    whole, cached = parity(wide)
    package = from_folder(narrow, context_length=48, block_size=8, dtype=None).convert(
        scratch / "m.mlpackage", prefill=8
    )
    functions = inspect(package)["functions"]
    return {
        "family": family,
        "lines": len(source.read_text(encoding="utf-8").splitlines()),
        "parity_whole": whole,
        "parity_cache": cached,
        "decode_operations": functions["decode"]["operations"]["compute"],
        "tiles": sum(function["tile"]["count"] for function in functions.values()),
        "highest_rank": max(function["highest_rank"] for function in functions.values()),
        "snr_fp32_db": verify(package.path, narrow, tokens=40).snr_db,
        "snr_fp16_db": verify(package.path, narrow, tokens=40, mode="fp16").snr_db,
    }


@torch.no_grad()
def parity(folder: Path) -> tuple[float, float]:
    """The largest difference of logits: of a whole sequence, and of tokens one by one."""
    tokens = torch.randint(109, (1, 80), generator=torch.Generator().manual_seed(0))
    expected = reference(folder)(tokens).logits
    model = from_folder(folder, context_length=80, block_size=8)
    steps = torch.cat([model.extend(tokens[:, i : i + 1], i) for i in range(80)], dim=1)
    whole, cached = ((actual - expected).abs().max().item() for actual in (model.whole(tokens), steps))
    return whole, cached


def shown(key: str, value: Any) -> str:
    if key.startswith("parity"):
        return f"{value:.1e}"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def tables(result: Sequence[Mapping[str, Any]]) -> list[str]:
    """Markdown, a line a family."""
    lines = [
        list(COLUMNS.values()),
        ["---"] * len(COLUMNS),
        *([shown(key, row[key]) for key in COLUMNS] for row in result),
    ]
    return ["| " + " | ".join(line) + " |" for line in lines]


def main(
    families: Annotated[list[str] | None, typer.Argument(help="Files in ane_layers/models; all by default.")] = None,
    output: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    unknown = sorted(set(families or ()) - set(FAMILIES))
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is no family; there are {', '.join(FAMILIES)}")
    out, err = Console(width=200), Console(stderr=True)
    out.print("\n".join(tables([])), markup=False)
    rows = []
    for family in families or FAMILIES:
        with err.status(family), tempfile.TemporaryDirectory(prefix="families-") as scratch:
            rows.append(measure(family, Path(scratch)))
        out.print(tables(rows)[-1], markup=False)
    if output is not None:
        output.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
