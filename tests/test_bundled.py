"""The model that ships: complete, small, as good as its card says, and the same in the package."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as ReferenceTokenizer

from ane_layers import bundled_checkpoint
from ane_layers.agreement import agreement, read_prompts
from ane_layers.models import Exaone4
from ane_layers.text_generation import text_generator
from ane_layers.token_source import text_tokens
from ane_layers.verification import verify

Reference = Callable[[Path], Any]


@pytest.fixture(scope="module")
def folder() -> Path:
    return bundled_checkpoint()


@pytest.fixture(scope="module")
def packages(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {}
    for sharing in ("fold", "repeat_kv"):
        path = tmp_path_factory.mktemp("bundled") / f"{sharing}.mlpackage"
        model = Exaone4.from_pretrained(folder, context_length=512, dtype=None, head_sharing=sharing)
        paths[sharing] = model.convert(path).path
    return paths


def test_it_is_small_and_of_the_shape_that_matters(folder: Path) -> None:
    assert sum(file.stat().st_size for file in folder.rglob("*")) <= 8e6
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "exaone4"
    assert config["num_hidden_layers"] >= 12
    assert config["num_attention_heads"] >= 4 * config["num_key_value_heads"]
    assert config["num_key_value_heads"] > 1
    assert config["head_dim"] != config["hidden_size"] // config["num_attention_heads"]
    assert config["tie_word_embeddings"]


def test_tokenizer_loads_with_tokenizers_alone(folder: Path) -> None:
    tokenizer = ReferenceTokenizer.from_file(str(folder / "tokenizer.json"))
    text = (folder / "heldout.txt").read_text(encoding="utf-8")
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_there_are_30_prompts(folder: Path) -> None:
    assert len(set(read_prompts(folder / "prompts.txt"))) == 30


def test_held_out_loss_is_what_the_record_says(folder: Path) -> None:
    """The record's own protocol, computed by this library: windows of 512 that advance by 256, the new half scored."""
    record = json.loads((folder / "training.json").read_text())["heldout"]
    bos = json.loads((folder / "config.json").read_text())["bos_token_id"]
    text = (folder / "heldout.txt").read_text(encoding="utf-8")
    ids = torch.tensor([bos, *ReferenceTokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids])
    model = Exaone4.from_pretrained(folder, context_length=512)
    total, count = 0.0, 0
    for start in range(0, len(ids) - 257, 256):
        window = ids[start : start + 513]
        model.cache.reset()
        logits = model.extend(window[None, :-1])[0]
        new = slice(0 if start == 0 else 256, None)
        total += float(torch.nn.functional.cross_entropy(logits[new], window[1:][new], reduction="sum"))
        count += len(window[1:][new])
    assert count == record["tokens"]
    assert total / count == pytest.approx(record["nats_per_token"], abs=1e-3)


def test_logits_match_transformers(folder: Path, exaone4_reference: Reference) -> None:
    ids = torch.tensor([text_tokens(folder / "heldout.txt", folder, 64)])
    with torch.no_grad():
        reference = exaone4_reference(folder)(ids).logits
    torch.testing.assert_close(
        Exaone4.from_pretrained(folder, context_length=64).extend(ids), reference, atol=1e-4, rtol=0
    )


def test_package_matches_pytorch_on_held_out_text(folder: Path, packages: dict[str, Path]) -> None:
    result = verify(packages["fold"], folder)  # the first 256 tokens of the held-out text
    assert result.tokens == 256
    assert result.snr_db >= 60
    assert result.top1_agreement == 1.0


def test_both_head_sharings_write_the_same(folder: Path, packages: dict[str, Path]) -> None:
    """`make demo` compares all 30 prompts; a few of them here."""
    prompts = read_prompts(folder / "prompts.txt")[::6]
    result = agreement(packages["fold"], packages["repeat_kv"], tokenizer=folder, prompts=prompts, new_tokens=12)
    assert (result.identical, result.tokens) == (5, 60)


def test_it_writes_words_of_its_training_text(folder: Path, packages: dict[str, Path]) -> None:
    known = set(
        (folder / "heldout.txt").read_text(encoding="utf-8").lower().replace(",", " ").replace(".", " ").split()
    )
    with text_generator(packages["fold"], tokenizer=folder) as generator:
        text = "".join(generator.generate("And the LORD said unto", max_new_tokens=40))
    words = text.lower().replace(",", " ").replace(".", " ").replace(":", " ").replace(";", " ").split()[1:-1]
    assert len(words) >= 15
    assert sum(word in known for word in words) >= 0.6 * len(words)
