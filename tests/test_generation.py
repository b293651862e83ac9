"""Tokens and text from an executed package, against `transformers`' own `generate`; Core ML's side of a session by a stand-in."""

from __future__ import annotations

import platform
import shutil
import tempfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from text_folders import VOCABULARY, byte_level, write_tokenizer

from ane_layers.coreml import coreml_runtime
from ane_layers.generation import GenerationStats, Session, generate
from ane_layers.interpreter import MLProgram
from ane_layers.models import Exaone4
from ane_layers.sampling import Sampler
from ane_layers.text_generation import text_generator

CONTEXT, BLOCK = 32, 4
PROMPT = [40, 70, 11, 200, 7, 263]  # a block and two tokens
Reference = Callable[[Path], Any]


@pytest.fixture(scope="module")
def folder(exaone4_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = exaone4_folder(dtype=torch.bfloat16, vocab=VOCABULARY)
    return write_tokenizer(shutil.copytree(made, tmp_path_factory.mktemp("generation") / "model"))


@pytest.fixture(scope="module")
def package(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("generation") / "m.mlpackage"
    Exaone4.from_pretrained(folder, context_length=CONTEXT, dtype=None).convert(path, prefill=BLOCK)
    return path


@pytest.fixture
def session(package: Path) -> Session:
    return Session(package)


@pytest.fixture(scope="module")
def written(folder: Path, exaone4_reference: Reference) -> list[int]:
    """What transformers writes after PROMPT, greedily, to the end of the context and one token on."""
    with torch.no_grad():
        ids = exaone4_reference(folder).generate(
            torch.tensor([PROMPT]), do_sample=False, max_length=CONTEXT + 1, eos_token_id=None, pad_token_id=0
        )
    return ids[0, len(PROMPT) :].tolist()


def test_greedy_matches_transformers_generate(session: Session, written: list[int]) -> None:
    generation = generate(session, PROMPT, max_new_tokens=20)
    assert list(generation) == written[:20]
    assert generation.finish_reason == "length"
    assert session.position == len(PROMPT) + 19  # the last token was not run
    assert list(generation) == []


def test_stop_ids_match_transformers(
    session: Session, written: list[int], folder: Path, exaone4_reference: Reference
) -> None:
    stop = next(token for i, token in enumerate(written) if i >= 3 and token not in written[:i])
    with torch.no_grad():
        ids = exaone4_reference(folder).generate(
            torch.tensor([PROMPT]), do_sample=False, max_length=CONTEXT, eos_token_id=[stop, 0], pad_token_id=0
        )
    generation = generate(session, PROMPT, max_new_tokens=100, stop_ids=[stop, 0])
    tokens = list(generation)
    assert [*tokens, stop] == ids[0, len(PROMPT) :].tolist()
    assert generation.finish_reason == "stop"
    assert session.position == len(PROMPT) + len(tokens)
    assert generation.stats.new_tokens == generation.stats.decode_steps == len(tokens)


def test_context_is_used_to_the_last_slot(session: Session, written: list[int]) -> None:
    generation = generate(session, PROMPT, max_new_tokens=1000)
    assert list(generation) == written  # the last of these was predicted from the last slot
    assert generation.finish_reason == "context"
    assert session.position == CONTEXT
    with pytest.raises(ValueError, match=f"1 tokens at position {CONTEXT} exceed the context of {CONTEXT} slots"):
        generate(session, [1], max_new_tokens=1)
    session.reset()
    assert list(generate(session, PROMPT, max_new_tokens=3)) == written[:3]


def test_prompt_of_the_whole_context_gives_one_token(session: Session, written: list[int]) -> None:
    generation = generate(session, PROMPT + written[:-1], max_new_tokens=5)
    assert list(generation) == written[-1:]
    assert (generation.finish_reason, generation.stats.tokens_per_second) == ("context", None)


def test_session_goes_on_after_a_generation_that_was_given_up(session: Session, written: list[int]) -> None:
    assert list(islice(generate(session, PROMPT, max_new_tokens=20), 3)) == written[:3]
    assert session.position == len(PROMPT) + 2
    # The third was not run: it comes first in what follows.
    assert list(generate(session, written[2:7], max_new_tokens=4)) == written[7:11]


@pytest.mark.parametrize(
    ("prompt", "count", "expected"),
    [
        ([], 1, "at least one token is needed"),
        ([1] * (CONTEXT + 1), 1, "33 tokens at position 0 exceed the context of 32 slots"),
        ([5, VOCABULARY], 1, "token 280 is outside the vocabulary 0 … 279"),
        ([1], 0, "max_new_tokens must be at least 1, got 0"),
    ],
)
def test_mistakes_are_refused_before_anything_runs(
    session: Session, prompt: list[int], count: int, expected: str
) -> None:
    with pytest.raises(ValueError, match=expected):
        generate(session, prompt, max_new_tokens=count)
    assert session.position == 0


def test_seed_decides_what_is_drawn(session: Session) -> None:
    runs = []
    for seed in (1, 1, 2):
        session.reset()
        sampler = Sampler(temperature=1.5, top_k=50, top_p=0.95, seed=seed)
        runs.append(list(generate(session, PROMPT, max_new_tokens=16, sampler=sampler)))
    assert runs[0] == runs[1] != runs[2]


def test_stats_count(session: Session) -> None:
    generation = generate(session, PROMPT, max_new_tokens=5)
    assert generation.stats == GenerationStats(prompt_tokens=len(PROMPT))
    list(generation)
    stats = generation.stats
    assert (stats.prompt_tokens, stats.new_tokens, stats.decode_steps) == (len(PROMPT), 5, 4)
    assert stats.prefill_seconds > 0
    assert stats.tokens_per_second == 4 / stats.decode_seconds


class Proxy:
    """Stands for coremltools' native half, `_MLModelProxy`: Core ML's types in and out, computed by the interpreter.

    The other half, `MLModel`, is coremltools' own.
    """

    made: list[Proxy]
    fails = ""

    def __init__(self, path: str, compute_units: str, function_name: str, hints: Any, _: Any) -> None:
        if self.fails:
            raise RuntimeError(self.fails)
        self.path, self.compute_units, self.function_name = path, compute_units, function_name
        self.program = MLProgram(path, function_name)
        self.calls: list[dict[str, tuple[str, list[int]]]] = []
        self.made.append(self)

    @staticmethod
    def maximum_supported_specification_version() -> int:
        return 9

    def newState(self) -> Any:  # noqa: N802 - Core ML's name
        return self.program.make_state()

    def predict(self, data: dict[str, np.ndarray], state: Any) -> dict[str, np.ndarray]:
        self.calls.append({name: (str(value.dtype), list(value.shape)) for name, value in data.items()})
        return {name: value.astype(np.float32) for name, value in self.program.predict(data, state).items()}


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> type[Proxy]:
    import coremltools.models.model as module

    made = type("Made", (Proxy,), {"made": []})
    monkeypatch.setattr(module, "_MLModelProxy", made)
    monkeypatch.setattr(module, "_is_macos", lambda: True)
    monkeypatch.setattr(module, "_macos_version", lambda: (15, 1))
    monkeypatch.setattr(platform, "mac_ver", lambda: ("15.1", ("", "", ""), "arm64"))
    return made


def test_coreml_s_own_interface_gives_the_same_tokens(
    package: Path, written: list[int], mac: type[Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, str]] = []
    import coremltools

    predict = coremltools.models.MLModel.predict

    def recorded(model: Any, data: dict[str, np.ndarray], state: Any = None) -> Any:
        given.append({name: str(value.dtype) for name, value in data.items()})
        return predict(model, data, state)

    monkeypatch.setattr(coremltools.models.MLModel, "predict", recorded)
    session = Session(package, runtime=coreml_runtime)
    assert list(generate(session, PROMPT, max_new_tokens=8)) == written[:8]
    # What the package declares; coremltools widens fp16 on its way to Core ML.
    assert given == [{"inputIds": "int32", "position": "int32", "causalMask": "float16"}] * (1 + 2 + 7)
    by_name = {proxy.function_name: proxy for proxy in mac.made}
    assert {proxy.compute_units for proxy in mac.made} == {"CPU_AND_NE"}
    for name, length, calls in (("prefill", BLOCK, 1), ("decode", 1, 2 + 7)):
        shapes = {
            "inputIds": ("int32", [1, length]),
            "position": ("int32", [1]),
            "causalMask": ("float32", [1, 1, length, CONTEXT]),
        }
        assert by_name[name].calls == [shapes] * calls


def test_package_that_coreml_does_not_load_is_one_line(package: Path, mac: type[Proxy]) -> None:
    mac.fails = "compiler error:\n no space"
    with pytest.raises(ValueError, match=r"m\.mlpackage: Core ML did not load function 'decode': .*no space") as error:
        Session(package, runtime=coreml_runtime)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("release", "system"), [("", "Linux"), ("14.6.1", "macOS 14.6.1")])
def test_coreml_needs_a_recent_mac(package: Path, monkeypatch: pytest.MonkeyPatch, release: str, system: str) -> None:
    monkeypatch.setattr(platform, "mac_ver", lambda: (release, ("", "", ""), ""))
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    with pytest.raises(ValueError, match=f"--runtime coreml needs macOS 15 or later, this is {system};"):
        Session(package, runtime=coreml_runtime)


def test_text_from_a_package(package: Path, folder: Path) -> None:
    with text_generator(package, tokenizer=folder) as generator:
        assert generator.stop_ids == {2}
        texts = generator.tokenizer
        for _ in range(2):  # a conversation each
            generation = generator.generate("태초에", max_new_tokens=12, stop_ids=())
            pieces = list(generation)
            assert "".join(pieces) == texts.decode(generation.ids)
            assert all(pieces)
            assert len(generation.ids) == generation.stats.new_tokens == 12
            assert generation.finish_reason == "length"
        generator.session.reset()
        assert list(generate(generator.session, texts.encode("태초에"), max_new_tokens=12)) == generation.ids
        chat = generator.encode("태초에", chat=True)
        assert chat == texts.encode(texts.chat([{"role": "user", "content": "태초에"}]), add_special_tokens=False)
        with pytest.raises(ValueError, match="the prompt is empty"):
            generator.generate("", max_new_tokens=1)


def test_text_from_a_folder_is_the_package_s(package: Path, folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with text_generator(package, tokenizer=folder) as generator:
        expected = "".join(generator.generate("In the", max_new_tokens=8))
    said: list[str] = []
    with text_generator(folder, context=CONTEXT, prefill=BLOCK, progress=said.append) as generator:
        assert any(temporary.iterdir())
        assert generator.session.context_length == CONTEXT
        assert "".join(generator.generate("In the", max_new_tokens=8)) == expected
    assert list(temporary.iterdir()) == []
    assert any(line.startswith("converting") for line in said)
    with text_generator(folder) as generator:
        assert (generator.session.context_length, generator.session.block) == (256, 64)  # all the model has
    with pytest.raises(ValueError, match=r"prefill must be within 2 … "), text_generator(folder, context=8, prefill=9):
        pass
    assert list(temporary.iterdir()) == []


def test_package_s_stop_ids_serve_a_tokenizer_without(package: Path, tmp_path: Path) -> None:
    bare = write_tokenizer(tmp_path / "t", eos_token=None)
    with text_generator(package, tokenizer=bare) as generator:
        assert generator.tokenizer.stop_ids == frozenset()
        assert generator.stop_ids == {2}


def test_what_does_not_belong_together_is_refused(package: Path, folder: Path, tmp_path: Path) -> None:
    larger = byte_level()
    larger.add_tokens(["[more]"])
    other = write_tokenizer(tmp_path / "t", larger)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"source": package}, r"m\.mlpackage: a package holds no tokenizer; .*--tokenizer"),
        ({"source": tmp_path / "no"}, "no: is neither a package nor a model folder"),
        ({"source": package, "tokenizer": tmp_path}, r"tokenizer\.json: is missing"),
        ({"source": package, "tokenizer": other}, "largest id is 280, but the package's field vocab_size is 280"),
        ({"source": package, "tokenizer": folder, "context": 64}, "context is fixed in a package, got 64"),
        ({"source": package, "tokenizer": folder, "prefill": 8}, "prefill is fixed in a package, got 8"),
        ({"source": other}, r"config\.json: cannot be read"),
    ]
    for options, expected in cases:
        with pytest.raises(ValueError, match=expected), text_generator(**options):
            pass


def test_logits_that_are_not_finite_stop_the_generation(session: Session) -> None:
    broken = SimpleNamespace(predict=lambda *_, **__: {"logits": np.full((1, 1, 9), np.nan, np.float32)})
    session._chunks[0].programs["decode"] = broken
    with pytest.raises(ValueError, match="9 of 9 logits are not finite"):
        list(generate(session, [1], max_new_tokens=1))
