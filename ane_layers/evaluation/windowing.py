"""A text as overlapping windows of tokens, of which every token is scored once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ane_layers.bundled import bundled_checkpoint
from ane_layers.text import Tokenizer

DEFAULT_WINDOW = 512


@dataclass(frozen=True)
class Window:
    """Tokens that are run together, from an empty cache.

    Attributes:
        tokens: S inputs.
        targets: the token that follows each input from `first` on.
        first: inputs before this one are context only: what follows them is scored in the window before.
    """

    tokens: tuple[int, ...]
    targets: tuple[int, ...]
    first: int


def windows(ids: Sequence[int], size: int) -> list[Window]:
    """Windows of `size` tokens that advance by half of it, the new half of each scored.

    Every token but the first is scored exactly once, and with at least `size − size // 2` tokens before it once there are so many. It is
    the protocol of the bundled model's reported loss (`text_loss` in `training/exaone4_tiny.py`).

    Args:
        ids: of a text, with what precedes it.
        size: tokens in a window, at least 2.

    Raises:
        ValueError: if there are fewer than two ids, and so nothing to score, or for a smaller size.
    """
    if size < 2:
        raise ValueError(f"window must be at least 2 tokens, got {size}")
    if len(ids) < 2:
        raise ValueError(f"nothing can be scored in {len(ids)} tokens; at least 2 are needed, a [BOS] included")
    found: list[Window] = []
    for start in range(0, len(ids), size // 2):
        end = min(start + size, len(ids) - 1)
        first = 0 if start == 0 else size - size // 2
        found.append(Window(tuple(ids[start:end]), tuple(ids[start + first + 1 : end + 1]), first))
        if end == len(ids) - 1:
            break
    return found


def text_ids(
    text: str | Path | None, folder: str | Path, *, bos_id: int | None, vocab_size: int, limit: int | None = None
) -> list[int]:
    """The ids of a text file after one [BOS].

    Args:
        text: the file; the bundled held-out text if None.
        folder: with the tokenizer. What it puts around a text is left out, so that there is one [BOS] whatever the tokenizer does.
        bos_id: the config's; None for a model that has none.
        vocab_size: of the model.
        limit: score at most so many tokens, the first ones.

    Raises:
        ValueError: if the file or the tokenizer cannot be read, the text has no tokens, or one is outside the vocabulary.
    """
    file = bundled_checkpoint() / "heldout.txt" if text is None else Path(text)
    tokenizer = Tokenizer.from_folder(folder)
    ids = tokenizer.encode(_read(file), add_special_tokens=False)
    if not ids:
        raise ValueError(f"{file}: holds no text")
    ids = ids if bos_id is None else [bos_id, *ids]
    return checked_ids(ids, source=f"{file}, by the tokenizer of {folder}", vocab_size=vocab_size, limit=limit)


def checked_ids(ids: Sequence[int], *, source: str, vocab_size: int, limit: int | None = None) -> list[int]:
    """Ids of which `limit` can be scored. Raises `ValueError` naming `source` if there are too few or one is outside the vocabulary."""
    if limit is not None and limit < 1:
        raise ValueError(f"max_tokens must be at least 1, got {limit}")
    kept = list(ids if limit is None else ids[: limit + 1])
    if len(kept) < 2:
        raise ValueError(f"{source}: nothing can be scored in {len(kept)} tokens; at least 2 are needed")
    for token in kept:
        if not 0 <= token < vocab_size:
            raise ValueError(f"{source}: token {token} is outside the model's vocabulary 0 … {vocab_size - 1}")
    return kept


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{file}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: is not UTF-8 text ({error.reason} at byte {error.start})") from error
