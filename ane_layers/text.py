"""Between text and token ids, with nothing but a Hugging Face folder's tokenizer files and the `tokenizers` library."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from ane_layers.chat_template import CONFIG, ChatTemplate

FILE, GENERATION, MODEL = "tokenizer.json", "generation_config.json", "config.json"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class Tokenizer:
    """A folder's tokenizer; `from_folder` makes one.

    Attributes:
        folder: it was read from.
        bos_id, eos_id, pad_id: of the special tokens that tokenizer_config.json names, else config.json; None without.
        stop_ids: where generation ends: `eos_token_id` of generation_config.json, else of config.json, else `eos_id`. The
            order is that of `transformers`.
        largest_id: that `encode` can give; the model's vocabulary must hold it.
    """

    def __init__(self, folder: Path, backend: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> None:
        self.folder = folder
        self._backend = backend
        self._settings = settings
        # Settings of training runs: they would shorten a prompt without a word.
        backend.no_truncation()
        backend.no_padding()
        self.largest_id = max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        model = _read_json(folder / MODEL)
        self.bos_id, self.eos_id, self.pad_id = (
            self._special_id(name, model, folder / MODEL) for name in ("bos", "eos", "pad")
        )
        stops = _ids(_read_json(folder / GENERATION), "eos_token_id", folder / GENERATION)
        stops = stops or _ids(model, "eos_token_id", folder / MODEL)
        self.stop_ids = frozenset(stops or ([] if self.eos_id is None else [self.eos_id]))
        self._falls_back_to_bytes = "ByteFallback" in json.dumps(json.loads(backend.to_str())["decoder"])

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Reads tokenizer.json and, where they exist, tokenizer_config.json, generation_config.json and config.json.

        Raises:
            ValueError: tokenizer.json is missing, or one of the files is damaged.
        """
        folder = Path(folder)
        path = folder / FILE
        if not path.is_file():
            raise ValueError(f"{path}: is missing; give the folder with the model's {FILE}")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare exceptions
            raise ValueError(f"{path}: cannot be read as a tokenizer: {' '.join(str(error).split())}") from error
        return cls(folder, backend, _read_json(folder / CONFIG))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text. Special tokens that are spelt out in it become their ids.

        Args:
            text: any Unicode text.
            add_special_tokens: whether what tokenizer.json puts around a text is added, a [BOS] for instance. It alone decides, as
                in `transformers` 5: `add_bos_token` of tokenizer_config.json is for tokenizers without that file. What `chat`
                returns has its own special tokens: then False.

        Raises:
            ValueError: the text holds half of a surrogate pair, as undecodable bytes of a command line do.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"text is not valid Unicode: {text[error.start]!r} at character {error.start}") from error
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids, with U+FFFD for bytes that are no character; ids that no token has give nothing."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def stream(self, *, skip_special_tokens: bool = True) -> TextStream:
        """A decoder for ids that come one by one."""
        return TextStream(self, skip_special_tokens=skip_special_tokens)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text of a conversation through the folder's chat template; see `ChatTemplate.render`.

        Raises:
            ValueError: there is no template, it is broken, or it fails on these messages.
        """
        return self._chat_template.render(
            messages, add_generation_prompt=add_generation_prompt, **(self._special_tokens | variables)
        )

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        # Read when asked for: a broken template is no reason to refuse plain text.
        return ChatTemplate.from_folder(self.folder, self._settings)

    @cached_property
    def _special_tokens(self) -> dict[str, str]:
        names = [name for name in self._settings if re.fullmatch(r"[a-z]+_token", name)]
        return {name: token for name in names if (token := self._special_token(name)) is not None}

    def _special_token(self, name: str) -> str | None:
        value = self._settings.get(name)
        content = value.get("content") if isinstance(value, dict) else value  # a token with its flags, or its text
        if value is not None and not isinstance(content, str):
            raise ValueError(f"{self.folder / CONFIG}: field {name} must be a token, got {json.dumps(value)}")
        return content

    def _special_id(self, name: str, model: Mapping[str, Any], file: Path) -> int | None:
        token = self._special_token(f"{name}_token")
        if token is None:
            return next(iter(_ids(model, f"{name}_token_id", file)), None)
        found: int | None = self._backend.token_to_id(token)
        if found is None:
            raise ValueError(f"{self.folder / CONFIG}: field {name}_token is {token!r}, which {FILE} does not have")
        return found

    def _is_byte(self, token_id: int) -> bool:
        return self._falls_back_to_bytes and bool(BYTE_TOKEN.fullmatch(self._backend.id_to_token(token_id) or ""))


class TextStream:
    """Decodes ids one by one: only whole characters, and all pieces together are what `Tokenizer.decode` gives.

    Everything is decoded anew at each step, since what a decoder does with a token may depend on its neighbours: 0.6 ms at 4,096
    tokens, little beside the model.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._ids: list[int] = []
        self._given = ""

    def push(self, token_id: int) -> str:
        """The text that this id completes; empty while a character is incomplete."""
        self._ids.append(token_id)
        # A run of byte tokens is one unit: a single wrong byte at its end turns all of it into U+FFFD.
        return "" if self._tokenizer._is_byte(token_id) else self._take(whole=False)

    def finish(self) -> str:
        """What was still held back, with U+FFFD for an incomplete character."""
        return self._take(whole=True)

    def _take(self, *, whole: bool) -> str:
        text = self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)
        if not whole:
            text = text.rstrip(REPLACEMENT)  # may be the beginning of a character
        if not text.startswith(self._given):
            return ""
        new = text[len(self._given) :]
        self._given += new
        return new


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file, empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: is not valid JSON ({error.msg} at line {error.lineno})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: a JSON object is expected, found {type(value).__name__}")
    return value


def _ids(values: Mapping[str, Any], field: str, file: Path) -> list[int]:
    value = values.get(field)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in ids):
        raise ValueError(f"{file}: field {field} must be a token id or a list of them, got {json.dumps(value)}")
    return ids
