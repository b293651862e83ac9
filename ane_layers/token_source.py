"""Where the tokens of a verification come from: a text, a file of ids, the bundled held-out text, or chance."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from ane_layers.bundled import bundled_checkpoint
from ane_layers.text import Tokenizer

DEFAULT_COUNT = 256


def text_tokens(file: str | Path, folder: str | Path, count: int) -> list[int]:
    """The first `count` tokens of a text, by the folder's tokenizer.

    Raises:
        ValueError: if the text cannot be read or has fewer tokens.
    """
    ids = Tokenizer.from_folder(folder).encode(_read(file))
    if len(ids) < count:
        raise ValueError(f"{file}: has {len(ids)} tokens, {count} are wanted")
    return ids[:count]


def file_tokens(file: str | Path) -> list[int]:
    """Ids written in a file, apart by spaces, commas or line ends; brackets around them do no harm.

    Raises:
        ValueError: if the file cannot be read or holds anything else.
    """
    words = [word for word in re.split(r"[\s,\[\]]+", _read(file)) if word]
    if wrong := [word for word in words if not re.fullmatch(r"\d{1,9}", word)]:
        raise ValueError(f"{file}: {wrong[0]!r} is no token id")
    if not words:
        raise ValueError(f"{file}: holds no token ids")
    return [int(word) for word in words]


def random_tokens(count: int, vocab_size: int, seed: int = 0) -> list[int]:
    """Ids drawn evenly from the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(vocab_size, (count,), generator=generator).tolist()
    return ids


def default_tokens(folder: str | Path, count: int, vocab_size: int) -> list[int]:
    """The beginning of the bundled held-out text where the folder has a tokenizer, random ids where not.

    Real text drives a model where it will be used; chance alone can leave it in places that text never reaches.
    """
    if (Path(folder) / "tokenizer.json").is_file():
        ids = Tokenizer.from_folder(folder).encode(_read(bundled_checkpoint() / "heldout.txt"))
        if len(ids) >= count and max(ids[:count]) < vocab_size:
            return ids[:count]
    return random_tokens(count, vocab_size)


def _read(file: str | Path) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{file}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: is not UTF-8 text ({error.reason} at byte {error.start})") from error
