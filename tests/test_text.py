"""Tokenizers and chat templates against `transformers` on the same folder; streams against decoding in one go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_folders import SETTINGS, TEXT, VOCABULARY, byte_fallback, byte_level, write_tokenizer

from ane_layers.text import Tokenizer

MESSAGES = [
    {"role": "system", "content": " Be brief.\n"},
    {"role": "user", "content": "말씀 <b>👧</b>", "name": None},
    {"role": "assistant", "content": "In the beginning"},
    {"role": "user", "content": "[|endofturn|] & more"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(write_tokenizer(tmp_path_factory.mktemp("byte_level")))


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("fallback")
    return Tokenizer.from_folder(
        write_tokenizer(folder, byte_fallback(), bos_token=None, eos_token=None, pad_token=None)
    )


def reference(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("text", [TEXT, "", " ", "[BOS]x[|endofturn|]", "한" * 50, "\n\t😀"])
@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("configured", [None, True])
def test_encode_matches_transformers(tmp_path: Path, text: str, adds_bos: bool, configured: bool | None) -> None:
    folder = write_tokenizer(tmp_path / "t", byte_level(adds_bos=adds_bos), add_bos_token=configured)
    tokenizer, expected = Tokenizer.from_folder(folder), reference(folder)
    assert tokenizer.encode(text) == expected(text)["input_ids"]
    assert (tokenizer.encode(text)[:1] == [1]) == (adds_bos or text.startswith("[BOS]"))
    plain = tokenizer.encode(text, add_special_tokens=False)
    assert plain == expected(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(plain) == expected.decode(plain, skip_special_tokens=True)
    assert tokenizer.decode(plain, skip_special_tokens=False) == text


def test_a_training_run_s_truncation_does_not_shorten_prompts(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_tokenizer(tmp_path / "t", byte_level(truncated=True)))
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert 0 not in tokenizer.encode("a")


@pytest.mark.parametrize(
    ("files", "settings", "expected"),
    [
        ({"generation_config.json": [5, 2], "config.json": 3}, {}, {5, 2}),
        ({"generation_config.json": None, "config.json": 3}, {}, {3}),
        ({"config.json": [3, 4]}, {}, {3, 4}),
        ({}, {}, {2}),
        ({}, {"eos_token": None}, set()),
    ],
)
def test_stop_ids_are_those_of_transformers(
    tmp_path: Path, files: dict[str, Any], settings: dict[str, Any], expected: set[int]
) -> None:
    folder = write_tokenizer(tmp_path / "t", **settings)
    for name, value in files.items():
        (folder / name).write_text(json.dumps({"eos_token_id": value}))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.stop_ids == expected
    assert (tokenizer.bos_id, tokenizer.pad_id, tokenizer.largest_id) == (1, 0, VOCABULARY - 1)


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = tokenizer.stream()
    return [*(stream.push(token) for token in ids), stream.finish()]


def test_stream_gives_whole_characters(tokenizer: Tokenizer) -> None:
    pieces = streamed(tokenizer, tokenizer.encode(TEXT))
    assert "".join(pieces) == TEXT
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
    assert "" in pieces  # some tokens only begin a character
    assert "한" in streamed(tokenizer, tokenizer.encode("한국"))  # given as soon as it is whole


def test_incomplete_character_comes_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a👧")[:-1]
    assert streamed(tokenizer, ids) == ["a", *[""] * (len(ids) - 1), "\N{REPLACEMENT CHARACTER}"]
    assert streamed(tokenizer, []) == [""]


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, VOCABULARY - 1), max_size=40))
def test_stream_is_decode_for_any_ids(tokenizer: Tokenizer, ids: list[int]) -> None:
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


BYTES_OF_TEXT = [5 + byte for byte in "é你👧".encode()]


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.sampled_from([0, 1, 2, 3, 4, *BYTES_OF_TEXT]), max_size=30))
def test_stream_is_decode_with_byte_fallback(fallback: Tokenizer, ids: list[int]) -> None:
    assert "".join(streamed(fallback, ids)) == fallback.decode(ids)


def test_byte_fallback_waits_for_the_end_of_a_run(fallback: Tokenizer) -> None:
    assert streamed(fallback, [1, *BYTES_OF_TEXT, 2]) == ["a", *[""] * len(BYTES_OF_TEXT), "é你👧b", ""]
    # One byte too few turns the run into marks, "é" included: it must not have been given before.
    assert "".join(streamed(fallback, [*BYTES_OF_TEXT[:-1], 2])) == fallback.decode([*BYTES_OF_TEXT[:-1], 2])


@pytest.mark.parametrize("prompt", [True, False])
def test_chat_matches_transformers(tokenizer: Tokenizer, prompt: bool) -> None:
    expected = reference(tokenizer.folder)
    options = {"tokenize": False, "add_generation_prompt": prompt}
    assert tokenizer.chat(MESSAGES, add_generation_prompt=prompt) == expected.apply_chat_template(MESSAGES, **options)
    tools = [{"name": "f", "description": "a < b & 'ç'"}]
    given = tokenizer.chat(MESSAGES, add_generation_prompt=prompt, tools=tools)
    assert given == expected.apply_chat_template(MESSAGES, tools=tools, **options)
    ids = expected.apply_chat_template(MESSAGES, add_generation_prompt=prompt)["input_ids"]
    assert tokenizer.encode(tokenizer.chat(MESSAGES, add_generation_prompt=prompt), add_special_tokens=False) == ids


def test_template_file_goes_before_the_field_and_named_ones_are_found(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ messages[0].content }}!"}]
    folder = write_tokenizer(tmp_path / "t", chat_template=named)
    assert Tokenizer.from_folder(folder).chat(MESSAGES[1:]) == "말씀 <b>👧</b>!"
    (folder / "chat_template.jinja").write_text("{{ messages | length }} {{ eos_token }} {{ unknown }}")
    assert Tokenizer.from_folder(folder).chat(MESSAGES) == "4 [EOS] "


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, r"t: has no chat template \(chat_template\.jinja, or field chat_template in tokenizer_config\.json\)"),
        (7, "field chat_template must be text, got 7"),
        ([{"name": "rag", "template": ""}], "field chat_template has 'rag', expected 'default'"),
        ("a\n{% for %}", r"tokenizer_config\.json: field chat_template: .*line 2"),
        ("{{ raise_exception('roles must\n alternate') }}", "template failed: roles must alternate"),
        ("{{ 1 / 0 }}", "template failed: division by zero"),
        ("{{ messages[0].content.missing.deeper }}", "template failed"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "template failed: Range too big"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "does what the sandbox forbids: .*'__class__'"),
        ("{{ raise_exception.__globals__ }}{{ raise_exception.__globals__['json'] }}", "sandbox forbids"),
        ("{{ messages.append(1) }}", "sandbox forbids"),
        ("{% set f = '{0.__class__.__base__}'.format %}{{ f(messages) }}", "sandbox forbids"),
        ("{% include 'tokenizer.json' %}", "template failed: no loader"),
        ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", "sandbox forbids"),
    ],
)
def test_unusable_templates_are_refused_in_one_line(tmp_path: Path, template: Any, expected: str) -> None:
    tokenizer = Tokenizer.from_folder(write_tokenizer(tmp_path / "t", chat_template=template))
    assert tokenizer.encode("plain text works")
    with pytest.raises(ValueError, match=expected) as error:
        tokenizer.chat(MESSAGES)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "expression", ["'{0.__class__}'.format(messages)", "lipsum.__globals__", "messages|attr('__class__')"]
)
def test_internals_are_undefined_in_templates(tmp_path: Path, expression: str) -> None:
    folder = write_tokenizer(tmp_path / "t", chat_template=f"<{{{{ {expression} }}}}>")
    assert Tokenizer.from_folder(folder).chat(MESSAGES) == "<>"


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([{"content": "no role"}], "a chat message must have a role, got"),
        (["text"], "a chat message must have a role, got"),
        ([{"role": "user", "content": Path("x")}], "must be text, numbers, lists and dictionaries: .*Path"),
    ],
)
def test_messages_must_be_plain(tokenizer: Tokenizer, messages: list[Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        tokenizer.chat(messages)


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("tokenizer.json", None, r"tokenizer\.json: is missing"),
        ("tokenizer.json", b'{"model": 1}', r"tokenizer\.json: cannot be read as a tokenizer"),
        ("tokenizer_config.json", b"{,", r"tokenizer_config\.json: is not valid JSON \(.* at line 1\)"),
        ("tokenizer_config.json", b"[]", r"tokenizer_config\.json: a JSON object is expected, found list"),
        ("tokenizer_config.json", b'"\xff"', r"tokenizer_config\.json: is not UTF-8 text"),
        ("tokenizer_config.json", b'{"bos_token": 1}', "field bos_token must be a token, got 1"),
        (
            "tokenizer_config.json",
            b'{"eos_token": "</s>"}',
            r"field eos_token is '</s>', which tokenizer\.json does not",
        ),
        ("generation_config.json", b'{"eos_token_id": "2"}', 'field eos_token_id must be a token id .*, got "2"'),
        ("config.json", b'{"bos_token_id": true, "eos_token_id": [1, -1]}', "got .*-1"),
    ],
)
def test_damaged_folders_are_refused(tmp_path: Path, file: str, content: bytes | None, expected: str) -> None:
    folder = write_tokenizer(tmp_path / "t")
    (folder / file).unlink(missing_ok=True)
    if content is not None:
        (folder / file).write_bytes(content)
    with pytest.raises(ValueError, match=expected) as error:
        Tokenizer.from_folder(folder)
    assert "\n" not in str(error.value)


def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"text is not valid Unicode: '\\udcff' at character 2"):
        tokenizer.encode("ab\udcff")


def test_special_tokens_reach_the_template_as_text(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "t", chat_template="{{ bos_token ~ eos_token ~ pad_token }}")
    assert Tokenizer.from_folder(folder).chat(MESSAGES) == "[BOS][EOS][PAD]"
    assert SETTINGS["eos_token"]["content"] == "[EOS]"
