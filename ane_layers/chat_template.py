"""Chat templates: jinja2 programs that come with a model, so they are run in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

FILE = "chat_template.jinja"
FIELD = "chat_template"
CONFIG = "tokenizer_config.json"


class ChatTemplate:
    """Turns messages into the text that a model was trained to continue, by the conventions of `transformers`.

    Args:
        text: of the template.
        source: file and field it comes from, for messages.

    Raises:
        ValueError: the template is broken.
    """

    def __init__(self, text: str, *, source: str) -> None:
        self.source = source
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        try:
            self._template = environment.from_string(text)
        except Exception as error:  # a syntax error as a rule; deep nesting fails in Python's own compiler
            line = getattr(error, "lineno", None)
            raise ValueError(f"{source}: {_line(error)}{f' (line {line})' if line else ''}") from error

    @classmethod
    def from_folder(cls, folder: str | Path, settings: Mapping[str, Any]) -> ChatTemplate:
        """Reads `chat_template.jinja`, which goes first, or the field of tokenizer_config.json.

        Args:
            folder: of the tokenizer.
            settings: content of its tokenizer_config.json.

        Raises:
            ValueError: there is none, none named "default" among several, or it is broken.
        """
        path = Path(folder) / FILE
        if path.is_file():
            try:
                return cls(path.read_text(encoding="utf-8"), source=str(path))
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start})") from error
        source = f"{Path(folder) / CONFIG}: field {FIELD}"
        found = settings.get(FIELD)
        if found is None:
            raise ValueError(f"{folder}: has no chat template ({FILE}, or field {FIELD} in {CONFIG})")
        if isinstance(found, list):  # several, by name
            named = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}
            if "default" not in named:
                raise ValueError(f"{source} has {', '.join(map(repr, named)) or 'nothing'}, expected 'default'")
            found = named["default"]
        if not isinstance(found, str):
            raise ValueError(f"{source} must be text, got {json.dumps(found)[:80]}")
        return cls(found, source=source)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text of a conversation.

        Args:
            messages: each with `role` and, as a rule, `content`.
            add_generation_prompt: whether the text ends where the model's next message begins.
            variables: what else the template knows, such as `bos_token`, `tools` or `enable_thinking`.

        Raises:
            ValueError: messages are not plain data, or the template fails, refuses them, or tries to leave the sandbox.
        """
        given = {"tools": None, "documents": None} | variables
        plain = _plain({"messages": list(messages), "add_generation_prompt": add_generation_prompt} | given)
        for message in plain["messages"]:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise ValueError(f"a chat message must have a role, got {json.dumps(message)[:80]}")
        # null and a missing key mean the same to callers, but templates print null as "None".
        plain["messages"] = [{k: v for k, v in message.items() if v is not None} for message in plain["messages"]]
        try:
            return self._template.render(plain)
        except SecurityError as error:
            raise ValueError(f"{self.source}: template does what the sandbox forbids: {_line(error)}") from error
        except Exception as error:  # it is a program: it can fail in any way
            raise ValueError(f"{self.source}: template failed: {_line(error)}") from error


class _Generation(Extension):
    """`{% generation %}` marks what the model wrote, for training; here its content is simply printed."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _plain(data: dict[str, Any]) -> dict[str, Any]:
    # The sandbox guards Python's own types. Another object's methods would be open to the template.
    try:
        plain: dict[str, Any] = json.loads(json.dumps(data))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"chat messages must be text, numbers, lists and dictionaries: {_line(error)}") from error
    return plain


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own would escape <, > and & for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
