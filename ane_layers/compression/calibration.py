"""Calibration text as windows of tokens, and what a model's layers read on it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from ane_layers.bundled import bundled_checkpoint
from ane_layers.compression.replay import batches, run_windows
from ane_layers.layers import Linear, OutputHead
from ane_layers.models.base import CausalLM
from ane_layers.models.config import load_config
from ane_layers.text import Tokenizer
from ane_layers.token_source import random_tokens


def calibration_tokens(folder: str | Path, text_file: str | Path | None = None, *, count: int, length: int) -> Tensor:
    """Windows of text, spread evenly over it, by a folder's tokenizer.

    Each begins with the config's `bos_token_id` where it has one: attention sinks to the first token, and a model expects that one.

    Args:
        folder: in Hugging Face's format. Without a tokenizer.json, and without a text, ids are drawn at random.
        text_file: UTF-8; by default the bundled calibration text, which is apart from the held-out one.
        count: of windows at most; a shorter text gives fewer, of the same length.
        length: S, tokens in a window.

    Shape:
        - output: int64 `[n, S]`, n ≤ count

    Raises:
        ValueError: if the text cannot be read, is shorter than a window, or has tokens that the model does not know.
    """
    for name, value, least in (("count", count, 1), ("length", length, 2)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    config, path = load_config(folder)
    vocab_size, bos = config.get("vocab_size"), config.get("bos_token_id")
    if not isinstance(vocab_size, int):
        raise ValueError(f"{path}: field vocab_size must be an integer, got {vocab_size!r}")
    first = [bos] if isinstance(bos, int) else []
    size = length - len(first)  # tokens of text in a window
    if text_file is None and not has_tokenizer(folder):
        ids = random_tokens(count * size, vocab_size)
    else:
        text_file = bundled_checkpoint() / "calibration.txt" if text_file is None else Path(text_file)
        ids = _text_ids(folder, text_file, vocab_size)
    count = min(count, len(ids) // size)
    if count < 1:
        raise ValueError(f"{text_file}: has {len(ids)} tokens, a window takes {size}; give a longer text")
    starts = [i * (len(ids) - size) // max(1, count - 1) for i in range(count)]
    return torch.tensor([first + ids[start : start + size] for start in starts])


def has_tokenizer(folder: str | Path) -> bool:
    """Whether a folder has a tokenizer.json."""
    return (Path(folder) / "tokenizer.json").is_file()


def _text_ids(folder: str | Path, file: Path, vocab_size: int) -> list[int]:
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{file}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: is not UTF-8 text ({error.reason} at byte {error.start})") from error
    ids = Tokenizer.from_folder(folder).encode(text, add_special_tokens=False)
    if ids and max(ids) >= vocab_size:
        raise ValueError(f"{folder}: the tokenizer gives id {max(ids)}, the model's vocab_size is {vocab_size}")
    return ids


@torch.no_grad()
def input_moments(model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    """Mean square of each input channel of every `Linear`, over all windows and positions.

    Args:
        model: fp32. A `CausalLM` runs over the windows from position 0, without its cache; any other module is called with them.
        tokens: windows; for another module than a `CausalLM` whatever it takes, along a first axis.

    Shape:
        - tokens: int `[n, S]`
        - output: by the weight's path, fp32 `[in]`. The pieces of an output head share one tensor.

    Raises:
        ValueError: if the weights are not fp32, or a layer was never called.
    """
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def add(path: str, x: Tensor) -> None:
        squares = x.double().square().sum((0, 2, 3))
        sums[path] = sums[path] + squares if path in sums else squares
        counts[path] = counts.get(path, 0) + x.shape[0] * x.shape[2] * x.shape[3]

    readers = _readers(model)
    hooks = [
        model.get_submodule(path).register_forward_pre_hook(lambda module, args, path=path: add(path, args[0]))
        for path in readers
    ]
    try:
        if isinstance(model, CausalLM):
            for batch in batches(tokens):
                run_windows(model, batch)
        else:
            for example in tokens.split(1):
                model(example)
    finally:
        for hook in hooks:
            hook.remove()
    if unused := [path for path in readers if path not in sums]:
        raise ValueError(f"{unused[0]}: was not called on the calibration text")
    means = {path: (sums[path] / counts[path]).float() for path in readers}
    return {weight: means[path] for path, weights in readers.items() for weight in weights}


def _readers(model: nn.Module) -> dict[str, list[str]]:
    """Paths of what reads hidden states once, with the weights that see them: each `Linear`, and a head for all its pieces."""
    readers: dict[str, list[str]] = {}
    heads = [path for path, module in model.named_modules() if isinstance(module, OutputHead)]
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(module, OutputHead):
            readers[path] = [f"{prefix}pieces.{i}.weight" for i in range(len(module.pieces))]
        elif isinstance(module, Linear) and not any(path.startswith(f"{head}.") for head in heads):
            readers[path] = [f"{prefix}weight"]
    return readers
