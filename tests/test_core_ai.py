"""Models as Core AI assets, executed by the runtime that comes with `coreai-core`. Needs the extra `coreai`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from ane_layers import bundled_checkpoint, core_ai
from ane_layers.models import Exaone4
from ane_layers.token_source import default_tokens

installed = importlib.util.find_spec("coreai_torch") is not None
needs_core_ai = pytest.mark.skipif(not installed, reason="the extra coreai is not installed")
CONTEXT, BLOCK = 64, 16


def bundled(**options: object) -> Exaone4:
    return Exaone4.from_pretrained(bundled_checkpoint(), context_length=CONTEXT, **{"kv": "read_only", **options})


@pytest.fixture(scope="module")
def asset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = bundled()
    path = core_ai.export(model, tmp_path_factory.mktemp("core_ai") / "m.aimodel", prefill=BLOCK)
    # Exporting leaves the model as it was.
    assert model.cache is not None
    assert type(model.cache.key) is torch.Tensor
    assert not model.cache.key.any()
    return path


@pytest.fixture
def program(asset: Path) -> Iterator[core_ai.CoreAIProgram]:
    with core_ai.CoreAIProgram(asset) as program:
        yield program


@needs_core_ai
def test_asset_matches_pytorch(asset: Path) -> None:
    result = core_ai.verify(asset, bundled_checkpoint(), tokens=CONTEXT)
    assert result.snr_db > 100
    assert result.top1_agreement == 1
    # Every position through decode, and the last of each block through prefill.
    assert result.tokens == CONTEXT + CONTEXT // BLOCK


@needs_core_ai
def test_blocks_then_single_tokens_match_pytorch_one_by_one(program: core_ai.CoreAIProgram) -> None:
    model = bundled()
    ids = default_tokens(bundled_checkpoint(), 2 * BLOCK + 5, model.config.vocab_size)
    session = core_ai.CoreAISession(program)
    session.extend(ids[: 2 * BLOCK], function="prefill")
    actual = session.extend(ids[2 * BLOCK :])
    wanted = model.whole(torch.tensor([ids]))[0, 2 * BLOCK :]
    np.testing.assert_allclose(actual, wanted, atol=1e-4, rtol=0)


@needs_core_ai
def test_interface_is_that_of_the_contract(program: core_ai.CoreAIProgram) -> None:
    assert set(program.functions) == {"decode", "prefill"}
    assert program.inputs("decode") == ("inputIds", "position", "causalMask", "keyCache", "valueCache")
    assert program.shape("prefill", "inputIds") == (1, BLOCK)
    assert program.shape("prefill", "causalMask") == (1, 1, BLOCK, CONTEXT + BLOCK)


@needs_core_ai
def test_wrong_calls_are_refused(program: core_ai.CoreAIProgram, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="function must be one of"):
        program.predict("encode", {})
    with pytest.raises(ValueError, match="input inputIds is missing"):
        program.predict("decode", {})
    with pytest.raises(ValueError, match="inputIds must be of shape"):
        program.predict("decode", {"inputIds": np.zeros((1, 2), np.int32)})
    session = core_ai.CoreAISession(program)
    with pytest.raises(ValueError, match="multiple of 16 tokens, got 5"):
        session.extend([1] * 5, function="prefill")
    with pytest.raises(ValueError, match="65 tokens at position 0 exceed 64 slots"):
        session.extend([1] * 65)
    with pytest.raises(ValueError, match="is not a Core AI asset"):
        core_ai.CoreAIProgram(tmp_path)


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "coreai_torch", None)
    with pytest.raises(ValueError, match=r"pip install 'ane-layers\[coreai\]'"):
        core_ai.export(bundled(), tmp_path / "m.aimodel", prefill=BLOCK)


@pytest.mark.parametrize(
    ("options", "name", "message"),
    [
        ({}, "m.mlpackage", "must end in .aimodel"),
        ({"kv": "in_place"}, "m.aimodel", "kv must be 'read_only'"),
        ({"dtype": None}, "m.aimodel", "weights in fp32"),
    ],
)
def test_what_cannot_be_exported_is_refused(
    options: dict[str, object], name: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        core_ai.export(bundled(**options), tmp_path / name)
    assert not list(tmp_path.iterdir())
