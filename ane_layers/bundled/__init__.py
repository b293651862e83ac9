"""The small model that ships with the package: a real EXAONE 4, trained on public-domain text by `training/` in the repository."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def bundled_checkpoint() -> Path:
    """The folder of `exaone4-tiny`, in Hugging Face's format, with a tokenizer, held-out text and 30 prompts.

    Random weights say nothing about quantization or about text; this model has learned something.
    """
    folder = Path(str(files("ane_layers") / "bundled" / "exaone4-tiny"))
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder}: the bundled model is missing from this installation")
    return folder
