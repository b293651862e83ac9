"""The command that writes Core AI assets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ane_layers import console
from ane_layers.cli_options import Folder, Json


def export_core_ai(
    folder: Folder,
    output: Annotated[Path, typer.Option("--output", "-o", help="Asset to write, ending in .aimodel.")],
    context: Annotated[int, typer.Option(help="Slots of the KV cache.")] = 512,
    prefill: Annotated[int, typer.Option(help="Tokens in a prefill block.")] = 64,
    tokens: Annotated[
        int | None,
        typer.Option(help="Tokens to compare with PyTorch afterwards; 64, or the context if that is less. 0 for none."),
    ] = None,
    gate: Annotated[
        float, typer.Option(help="Least signal-to-noise ratio in dB, below which the exit status is 1.")
    ] = 90.0,
    as_json: Json = False,
) -> None:
    """Write a model as a Core AI asset in fp32, run it with Core AI's own runtime, and compare its logits with PyTorch's."""
    from ane_layers import core_ai
    from ane_layers.hub import resolve
    from ane_layers.models import from_folder

    with console.progress() as say:
        core_ai.require("coreai_torch")  # what is missing is told before a model is loaded
        path = resolve(folder, progress=say)
        model = from_folder(path, context_length=context, kv="read_only")
        core_ai.export(model, output, prefill=prefill, progress=say)
        del model
        if tokens == 0:
            return
        result = core_ai.verify(output, path, tokens=tokens, progress=say)
    console.print_verification(result, positions=False, findings=False, as_json=as_json)
    if not result.snr_db >= gate:
        console.fail(f"{output}: {result.snr_db:.1f} dB is below the gate of {gate:g} dB")


COMMANDS = (export_core_ai,)
