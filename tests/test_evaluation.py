"""Loss, distance from the original and bytes: against `transformers`, brute force, and packages against checkpoints."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from text_folders import TEXT, VOCABULARY, byte_level, write_tokenizer
from tokenizers import Tokenizer as ReferenceTokenizer
from torch import Tensor

from ane_layers import bundled_checkpoint
from ane_layers.analysis.counts import weight_bytes
from ane_layers.analysis.traffic import traffic
from ane_layers.compression import Compression, Ranking, Setting, compress, load_recipe, make_plan
from ane_layers.compression.report import report_compressed
from ane_layers.compression.weights import compress_weight
from ane_layers.evaluation import Evaluation, Evaluator, evaluate, model_footprint, score, windows
from ane_layers.evaluation.attention import TorchAttention, TorchFoldedAttention, torch_attention
from ane_layers.evaluation.footprint import _row_bytes
from ane_layers.evaluation.sources import widen_stored
from ane_layers.models import Exaone4, from_folder
from ane_layers.program import Function, Package

CONTEXT, BLOCK, WINDOW = 40, 6, 30
Reference = Callable[[Path], Any]


@pytest.fixture(scope="module")
def folder(exaone4_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a tokenizer that adds a [BOS] by itself."""
    made = exaone4_folder(dtype=torch.bfloat16, vocab=VOCABULARY)
    copied = shutil.copytree(made, tmp_path_factory.mktemp("evaluation") / "model")
    return write_tokenizer(copied, byte_level(adds_bos=True))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("evaluation") / "text.txt"
    file.write_text(TEXT[:60] + TEXT[::-1], encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def package(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[str, Path] = {}

    def convert(recipe: str | None = None, **options: Any) -> Path:
        key = json.dumps([recipe, options])
        if key not in made:
            model = from_folder(folder, context_length=CONTEXT, dtype=None)
            compression = None if recipe is None else compress(model, make_plan(model, load_recipe(recipe)))
            made[key] = tmp_path_factory.mktemp("evaluation") / "m.mlpackage"
            model.convert(made[key], prefill=BLOCK, compression=compression, **options)
        return made[key]

    return convert


def reference_ids(folder: Path, text: Path) -> list[int]:
    encoded = ReferenceTokenizer.from_file(str(folder / "tokenizer.json")).encode(
        text.read_text(encoding="utf-8"), add_special_tokens=False
    )
    return [json.loads((folder / "config.json").read_text())["bos_token_id"], *encoded.ids]


@torch.no_grad()
def scored_logits(model: Any, ids: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
    """The protocol of `text_loss` in `training/exaone4_tiny.py`: logits of `transformers`' model at every scored position, and targets."""
    kept, targets, half = [], [], length // 2
    for start in range(0, len(ids) - 1, half):
        window = torch.tensor(ids[start : start + length + 1])
        logits = model(input_ids=window[None, :-1], use_cache=False).logits[0].float()
        fresh = slice(0 if start == 0 else half, None)
        kept.append(logits[fresh])
        targets.append(window[1:][fresh])
        if start + length + 1 >= len(ids):
            break
    return torch.cat(kept), torch.cat(targets)


def test_loss_of_the_bundled_model_matches_transformers_and_its_record(exaone4_reference: Reference) -> None:
    folder = bundled_checkpoint()
    logits, targets = scored_logits(exaone4_reference(folder), reference_ids(folder, folder / "heldout.txt"), 512)
    result = evaluate(folder)
    record = json.loads((folder / "training.json").read_text())["heldout"]
    assert result.tokens == len(targets) == record["tokens"]
    assert result.loss == pytest.approx(F.cross_entropy(logits.double(), targets).item(), abs=1e-6)
    assert result.loss == pytest.approx(record["nats_per_token"], abs=1e-6)
    assert result.perplexity == pytest.approx(math.exp(record["nats_per_token"]), rel=1e-6)
    # The original's projections are not joined: equal but for rounding.
    assert 0 <= result.kl < 1e-9
    assert result.top1_agreement > 0.999


@pytest.mark.parametrize("window", [WINDOW, 64])
def test_kl_and_agreement_match_transformers(
    folder: Path, text: Path, window: int, exaone4_reference: Reference, tmp_path: Path
) -> None:
    """A checkpoint with one changed matrix, against the one without the change."""
    from safetensors.torch import load_file, save_file

    changed = shutil.copytree(folder, tmp_path / "changed")
    tensors = load_file(changed / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][:9] *= 3  # of all rows, the norm behind it would undo it
    save_file(tensors, changed / "model.safetensors", metadata={"format": "pt"})
    ids = reference_ids(folder, text)
    before, targets = scored_logits(exaone4_reference(folder), ids, window)
    after, _ = scored_logits(exaone4_reference(changed), ids, window)
    result = evaluate(changed, original=folder, text=text, window=window)
    assert result.tokens == len(targets) == len(ids) - 1
    assert result.loss == pytest.approx(F.cross_entropy(after, targets).item(), abs=1e-5)
    expected = F.kl_div(after.log_softmax(-1), before.log_softmax(-1), reduction="batchmean", log_target=True).item()
    assert expected > 1e-3
    assert result.kl == pytest.approx(expected, rel=1e-3)
    agreement = (before.argmax(-1) == after.argmax(-1)).double().mean().item()
    assert 0.1 < agreement < 1
    assert result.top1_agreement == pytest.approx(agreement)


def test_a_model_against_itself_is_no_distance_away(folder: Path, text: Path) -> None:
    evaluator = Evaluator.from_folder(folder, text=text, window=WINDOW)
    result = evaluator.model(from_folder(folder, context_length=WINDOW, fuse=False))
    assert (result.kl, result.top1_agreement) == (0.0, 1.0)


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8])
def test_windows_score_every_token_once(size: int) -> None:
    for count in range(2, 40):
        ids = list(range(100, 100 + count))
        scored = []
        for window in windows(ids, size):
            assert len(window.tokens) <= size
            assert ids[window.tokens[0] - 100 :][: len(window.tokens)] == list(window.tokens)
            assert [token + 1 for token in window.tokens[window.first :]] == list(window.targets)
            assert window.first == (size - size // 2 if window.tokens[0] > 100 else 0)
            scored += window.targets
        assert scored == ids[1:]


def test_loss_does_not_depend_on_how_rows_are_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = windows(torch.randint(0, 11, (40,), generator=generator).tolist(), 16)
    actual, original = ([torch.randn(len(p.targets), 11, generator=generator) for p in parts] for _ in range(2))
    whole = score(parts, actual.__getitem__, original.__getitem__)
    logits, targets = torch.cat(actual), torch.tensor([target for part in parts for target in part.targets])
    assert whole.loss == pytest.approx(F.cross_entropy(logits.double(), targets).item(), rel=1e-12)
    monkeypatch.setattr("ane_layers.evaluation.scoring._CHUNK", 33)
    assert dataclasses.astuple(score(parts, actual.__getitem__, original.__getitem__)) == pytest.approx(
        dataclasses.astuple(whole), rel=1e-12
    )


def test_logits_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"logits have shape \[3, 11\], expected \[4, 11\]"):
        score(windows(range(5), 8), lambda _: torch.zeros(3, 11))


@pytest.mark.parametrize("kept", [0, 1 << 30])
def test_the_original_is_run_once_if_its_logits_may_be_kept(
    folder: Path, text: Path, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ane_layers.evaluation.evaluator._KEPT_BYTES", kept)
    calls: list[int] = []
    run = Exaone4.whole
    monkeypatch.setattr(Exaone4, "whole", lambda model, ids: calls.append(1) or run(model, ids))
    # A long enough text that its logits take more than the weights of this tiny model.
    long = text.parent / "long.txt"
    long.write_text(text.read_text(encoding="utf-8") * 8, encoding="utf-8")
    evaluator = Evaluator.from_folder(folder, text=long, window=WINDOW)
    model = from_folder(folder, context_length=WINDOW)
    results = [evaluator.model(model) for _ in range(3)]
    assert results[0] == results[1] == results[2]
    assert len(calls) == len(evaluator.windows) * (4 if kept else 6)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("kv", ["in_place", "deferred"])
def test_torch_attention_matches_the_layers_own(folder: Path, fuse: bool, kv: str) -> None:
    model = from_folder(folder, context_length=32, fuse=fuse, kv=kv)
    by_torch = TorchFoldedAttention if fuse else TorchAttention
    ids = torch.randint(0, VOCABULARY, (1, 20), generator=torch.Generator().manual_seed(1))
    expected = model.extend(ids)
    with torch_attention(model):
        assert sum(isinstance(module, by_torch) for module in model.modules()) == 2
        assert (model.extend(ids) - expected).abs().max() < 1e-4
    assert not any(isinstance(module, by_torch) for module in model.modules())
    assert torch.equal(model.extend(ids), expected)


@pytest.mark.parametrize(("recipe", "all_logits"), [("fp16", False), ("int8", False), ("base", False), ("int8", True)])
def test_package_matches_its_checkpoint(
    folder: Path, text: Path, package: Callable[..., Path], recipe: str, all_logits: bool
) -> None:
    path = package(recipe, all_logits=all_logits)
    found = evaluate(path, original=folder, text=text, window=WINDOW)
    expected = evaluate(folder, recipe=recipe, text=text, window=WINDOW, context=CONTEXT)
    assert found.loss == pytest.approx(expected.loss, abs=1e-3)
    assert found.kl == pytest.approx(expected.kl, abs=1e-4)
    assert found.top1_agreement == pytest.approx(expected.top1_agreement, abs=0.02)
    assert (found.tokens, found.window, found.context) == (expected.tokens, WINDOW, CONTEXT)
    if recipe != "fp16":
        assert expected.kl > 1e-5  # what is compared is the compressed model, not the original


def test_fp16_arithmetic_and_compact_constants(folder: Path, text: Path, package: Callable[..., Path]) -> None:
    options: dict[str, Any] = {"original": folder, "text": text, "window": WINDOW}
    path = package("int8")
    fp32 = evaluate(path, **options)
    assert evaluate(path, compact=True, **options) == fp32
    fp16 = evaluate(path, mode="fp16", **options)
    assert fp16.loss != fp32.loss
    assert fp16.loss == pytest.approx(fp32.loss, abs=1e-2)


def test_package_without_original_has_no_distance(folder: Path, text: Path, package: Callable[..., Path]) -> None:
    path = package("fp16")
    alone = evaluate(path, tokenizer=folder, text=text, window=WINDOW)
    assert alone.as_dict() == evaluate(path, original=folder, text=text, window=WINDOW).as_dict() | {
        "kl": None,
        "top1_agreement": None,
    }
    contract = {"loss", "perplexity", "kl", "top1_agreement", "weight_bytes", "bytes_per_token"}
    assert set(alone.as_dict()) == contract | {"tokens", "window", "context"}
    ids = reference_ids(folder, text)
    assert evaluate(path, tokens=ids, window=WINDOW) == alone
    assert evaluate(path, tokens=ids[:13], window=WINDOW) == evaluate(
        path, tokenizer=folder, text=text, window=WINDOW, max_tokens=12
    )


def test_runtime_runs_in_place_of_the_interpreter(package: Callable[..., Path]) -> None:
    class Even:
        """All logits equal: the loss is that of chance."""

        def make_state(self) -> None:
            return None

        def predict(self, data: dict[str, np.ndarray], state: Any = None) -> dict[str, np.ndarray]:
            return {"logits": np.zeros((1, 1, VOCABULARY), np.float16)}

    result = evaluate(package("fp16"), tokens=range(20), runtime=lambda path, name: Even())
    assert result.loss == pytest.approx(math.log(VOCABULARY))
    assert result.window == CONTEXT


def test_default_window_and_context(folder: Path, text: Path) -> None:
    assert evaluate(folder, text=text, max_tokens=5).window == 256  # the model's longest context
    result = evaluate(folder, text=text, max_tokens=5, context=16)
    assert (result.window, result.context, result.tokens) == (16, 16, 5)


@pytest.mark.parametrize("recipe", [None, "int8", "base"])
def test_bytes_match_the_package(folder: Path, package: Callable[..., Path], recipe: str | None) -> None:
    model = from_folder(folder, context_length=CONTEXT, dtype=None)
    compression = None if recipe is None else compress(model, make_plan(model, load_recipe(recipe)))
    check_bytes(model, compression, Package.open(package(recipe)).function("decode"))


def test_bytes_of_the_bundled_model_match_its_package_within_a_thousandth(tmp_path: Path) -> None:
    model = from_folder(bundled_checkpoint(), context_length=512, dtype=None)
    compression = compress(model, make_plan(model, load_recipe("int8")))
    function = model.convert(tmp_path / "m.mlpackage", compression=compression).function("decode")
    check_bytes(model, compression, function)
    total = traffic(function).total
    assert model_footprint(model, compression, context=512).bytes_per_token == pytest.approx(total, rel=1e-3)


def check_bytes(model: Exaone4, compression: Compression | None, function: Function) -> None:
    """The package holds what no checkpoint does besides: rotary tables, and the number that q's and k's norms append, once a head."""
    config = model.config
    found = model_footprint(model, compression, context=model.context_length)
    row = 2 * 2 * config.head_dim  # a position's cosines and sines, fp16
    norm = 2 * (config.num_attention_heads + config.num_key_value_heads)
    assert weight_bytes(function) == found.weight_bytes + model.context_length * row + norm
    assert traffic(function).total == found.bytes_per_token + row + config.num_hidden_layers * norm


def test_context_counts_in_bytes_per_token(folder: Path) -> None:
    model = from_folder(folder, context_length=16)
    few, many = (model_footprint(model, context=context) for context in (16, 116))
    assert few.weight_bytes == many.weight_bytes
    assert many.bytes_per_token - few.bytes_per_token == 100 * 2 * sum(
        cache.numel() // 16 * 2 for cache in [model.cache.key]
    )


@pytest.mark.parametrize("tied", [False, True])
def test_weight_bytes_of_an_uncompressed_model_are_two_a_parameter(
    exaone4_folder: Callable[..., Path], exaone4_reference: Reference, tied: bool
) -> None:
    made = exaone4_folder(tied=tied)
    reference = exaone4_reference(made)
    model = from_folder(made, context_length=16, fuse=False)
    slot = 2 * model.cache.key.numel() // 16 * 2
    table = reference.model.embed_tokens.weight.numel()
    count = sum(parameter.numel() for parameter in reference.parameters())  # a tied table once
    found = model_footprint(model, context=16)
    assert found.weight_bytes == 2 * count
    read = count if tied else count - table
    assert found.bytes_per_token == 2 * (read + model.config.hidden_size) + 17 * slot


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (Setting(scheme="linear", bits=8), 48 + 2),
        (Setting(scheme="linear", bits=4, block_size=16), 24 + 2 * 3),
        (Setting(bits=4, group_size=8), 24 + 2 * 16),
        (Setting(bits=6), 36 + 2 * 64),
    ],
)
def test_a_row_of_a_table_brings_its_scales_or_lookup_table(setting: Setting, expected: int) -> None:
    weight = np.random.default_rng(0).standard_normal((24, 48)).astype(np.float16)
    assert _row_bytes(report_compressed("w", compress_weight("w", weight, setting), setting)) == expected


def test_a_recipe_rounds_what_it_leaves_alone(exaone4_folder: Callable[..., Path]) -> None:
    """Norms, and with this recipe all the rest, are fp16 in the package; without a recipe a checkpoint in fp32 stays as it is."""
    made = exaone4_folder()
    ids = torch.randint(0, 109, (50,), generator=torch.Generator().manual_seed(2)).tolist()
    evaluator = Evaluator(ids, original=made, window=WINDOW)
    model = from_folder(made, context_length=WINDOW)
    exact = evaluator.model(model)
    assert evaluate(made, tokens=ids, window=WINDOW) == exact
    for parameter in model.parameters():
        parameter.copy_(parameter.half())  # in place: a tied head stays a part of the table
    rounded = evaluator.model(model)
    assert rounded.kl is not None
    assert rounded.kl > 1e-9 > abs(exact.kl or 0)
    assert evaluate(made, tokens=ids, window=WINDOW, recipe="fp16") == rounded


def test_a_weight_that_fp16_cannot_hold_is_named(folder: Path, tmp_path: Path) -> None:
    model = from_folder(folder, context_length=8)
    model.model.norm.weight[3] = 70000
    with pytest.raises(ValueError, match=r"'model\.norm\.weight' holds 70144, beyond fp16's 65504|holds 70000"):
        widen_stored(model)


def test_recipe_and_ranking_from_files(folder: Path, text: Path, tmp_path: Path) -> None:
    toml, file = tmp_path / "mine.toml", tmp_path / "ranking.json"
    toml.write_text("[layers]\nbits = 4\n[promoted]\nlayers = 1\nbits = 8\n", encoding="utf-8")
    names = {"model_type": "exaone4", "num_hidden_layers": 2, "hidden_size": 40, "vocab_size": VOCABULARY}
    options: dict[str, Any] = {"text": text, "window": WINDOW}
    kl = []
    for first in (0, 1):
        ranking = Ranking(
            method="kl", model=names, setting="lut4", tokens=9, layers={first: 2.0, 1 - first: 1.0}, modules=()
        )
        file.write_text(json.dumps(ranking.as_dict()), encoding="utf-8")
        found = evaluate(folder, recipe=toml, ranking=file, **options)
        assert found == evaluate(folder, recipe=load_recipe(toml), ranking=ranking, **options)
        kl.append(found.kl)
    assert kl[0] != kl[1]


def test_perplexity_beyond_fp64_is_infinite() -> None:
    figures = dict(kl=None, top1_agreement=None, weight_bytes=0, bytes_per_token=0, tokens=1, window=2, context=2)
    assert Evaluation(loss=800.0, **figures).perplexity == math.inf
    assert math.isnan(Evaluation(loss=math.nan, **figures).perplexity)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text": "nowhere.txt"}, r"nowhere\.txt: cannot be read"),
        ({"text": "empty.txt"}, r"empty\.txt: holds no text"),
        ({"text": "latin.txt"}, r"latin\.txt: is not UTF-8 text"),
        ({"text": "text.txt", "tokens": [1, 2]}, "text and tokens exclude each other"),
        ({"tokens": [1]}, "tokens: nothing can be scored in 1 tokens"),
        ({"tokens": [1, VOCABULARY]}, rf"tokens: token {VOCABULARY} is outside the model's vocabulary"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"window": 1}, r"window must be within 2 … 256, the context of .*model, got 1"),
        ({"window": 257}, r"window must be within 2 … 256, the context of .*model, got 257"),
        ({"window": 32, "context": 16}, r"window must be within 2 … 16"),
        ({"context": 300}, r"context must be within 1 … 256, the longest of .*model, got 300"),
        ({"recipe": "top99"}, "recipe 'top99' is not known"),
        ({"recipe": "top8"}, r"recipe top8: section \[promoted\] needs a ranking"),
        ({"ranking": "ranking.json"}, "ranking and importance are for a recipe, and there is none"),
        ({"mode": "fp16"}, r"model: is a model folder, for which there is no mode"),
        ({"compact": True}, r"model: is a model folder, for which there is no compact"),
        ({"tokenizer": "."}, r"tokenizer\.json: is missing"),
        ({"original": "."}, r"config\.json: cannot be read"),
    ],
)
def test_mistakes_with_a_folder_are_one_line(
    folder: Path, options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    Path("latin.txt").write_bytes(b"na\xefve")
    with pytest.raises(ValueError, match=message) as caught:
        evaluate(folder, **options)
    assert "\n" not in str(caught.value)


def test_mistakes_with_a_package_are_one_line(
    folder: Path, package: Callable[..., Path], exaone4_folder: Callable[..., Path]
) -> None:
    path = package("fp16")
    for options, message in (
        ({}, r"m\.mlpackage: a package has no tokenizer; give original, tokenizer or tokens"),
        ({"recipe": "int8"}, r"m\.mlpackage: is a package, for which there is no recipe"),
        ({"context": 16}, r"m\.mlpackage: is a package, for which there is no context"),
        ({"tokens": range(9), "window": CONTEXT + 1}, rf"window must be within 2 … {CONTEXT}, the context of"),
        ({"tokens": range(9), "mode": "fp8"}, "mode is 'fp8'"),
        ({"tokens": range(9), "original": exaone4_folder()}, "field vocab_size is 280, the original .* has 109"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            evaluate(path, **options)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"window 60 exceeds the package's context of 40"):
        Evaluator(range(9), window=60).package(path)
    with pytest.raises(ValueError, match="context_length \\(8\\) is below the window of 60"):
        Evaluator(range(9), window=60).model(from_folder(folder, context_length=8))


def test_package_of_others_is_refused(package: Callable[..., Path], tmp_path: Path) -> None:
    from coremltools.proto import Model_pb2

    foreign = shutil.copytree(package("fp16"), tmp_path / "foreign.mlpackage")
    (file,) = foreign.rglob("*.mlmodel")
    model = Model_pb2.Model.FromString(file.read_bytes())
    del model.description.metadata.userDefined["ane_layers.config"]
    file.write_bytes(model.SerializeToString())
    with pytest.raises(ValueError, match=r"foreign\.mlpackage: has no metadata ane_layers\.config"):
        evaluate(foreign, tokens=[1, 2])
    config = json.loads(Package.open(package("fp16")).metadata["ane_layers.config"])
    model.description.metadata.userDefined["ane_layers.config"] = json.dumps(config | {"head": "argmax"})
    file.write_bytes(model.SerializeToString())
    with pytest.raises(ValueError, match=r"foreign\.mlpackage: head is 'argmax'"):
        evaluate(foreign, tokens=[1, 2])
