"""Options that several commands take."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

import typer


class HeadSharingOption(StrEnum):
    fold = "fold"
    repeat_kv = "repeat_kv"


class KvOption(StrEnum):
    in_place = "in_place"
    deferred = "deferred"
    read_only = "read_only"


class ModeOption(StrEnum):
    fp32 = "fp32"
    fp16 = "fp16"
    fp16_pessimistic = "fp16_pessimistic"


class RuntimeOption(StrEnum):
    interpreter = "interpreter"
    coreml = "coreml"


Json = Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")]
Folder = Annotated[str, typer.Argument(help="Model folder in Hugging Face's format, or a Hub id org/name[@revision].")]
Mode = Annotated[
    ModeOption,
    typer.Option(
        help="Interpreter: fp32; fp16, every operation's result rounded; fp16_pessimistic, sums in norms, softmax and "
        "reductions rounded too."
    ),
]
Runtime = Annotated[RuntimeOption, typer.Option(help="What runs the package; coreml needs a Mac.")]


def runtime_of(option: RuntimeOption) -> Callable[[str, str], Any] | None:
    """What makes the program of a function; None stands for the interpreter."""
    if option is RuntimeOption.interpreter:
        return None
    from ane_layers.coreml import coreml_runtime

    return coreml_runtime
