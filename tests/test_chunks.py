"""Models in several packages: where they are cut, that they give what the whole gives, and what is refused."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from ane_layers.bundled import bundled_checkpoint
from ane_layers.chunks import open_packages
from ane_layers.cli import app
from ane_layers.evaluation import evaluate
from ane_layers.generation import PromptLookup, Session, generate
from ane_layers.models import Exaone4
from ane_layers.models.part import Part, PartSizes, cut, cut_to, part_bytes
from ane_layers.verification import verify

Folder = Callable[..., Path]

CONTEXT = 64
PATTERN = ["sliding_attention"] * 3 + ["full_attention"]
HYBRID: dict[str, Any] = {
    "layers": 4,
    "sliding_window": 5,
    "sliding_window_pattern": 4,
    "layer_types": PATTERN,
}


# Where a model is cut


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(0, 60), st.integers(0, 60), st.data())
def test_the_largest_part_is_as_small_as_any_cut_makes_it(
    layers: list[int], embedding: int, head: int, data: st.DataObject
) -> None:
    sizes = PartSizes(embedding, layers, head)
    chunks = data.draw(st.integers(1, len(layers)))
    apart = data.draw(st.booleans())
    parts = cut(sizes, chunks, head_apart=apart)
    assert [number for part in parts for number in part.layers] == list(range(len(layers)))
    assert [part.embedding for part in parts] == [True, *[False] * (len(parts) - 1)]
    assert [part.head for part in parts] == [*[False] * (len(parts) - 1), True]
    assert [(part.number, part.count) for part in parts] == [(i, len(parts)) for i in range(chunks + apart)]
    assert all(part.layers for part in parts[:chunks])
    with_layers = max(part_bytes(part, sizes) for part in parts[:chunks])
    items = list(layers)
    items[0] += embedding
    items[-1] += 0 if apart else head
    best = min(
        max(sum(items[a:b]) for a, b in itertools.pairwise([0, *ends, len(items)]))
        for ends in itertools.combinations(range(1, len(items)), chunks - 1)
    )
    assert with_layers == best


def test_a_limit_takes_as_few_parts_as_it_can() -> None:
    sizes = PartSizes(100, [50] * 6, 120)
    assert len(cut_to(sizes, 520)) == 1
    assert [str(part) for part in cut_to(sizes, 270)] == ["layers 0 … 2, embedding", "layers 3 … 5, head"]
    assert [str(part) for part in cut_to(sizes, 200, head_apart=True)] == [
        "layers 0 … 1, embedding",
        "layers 2 … 5",
        "head",
    ]
    with pytest.raises(ValueError, match=r"within 0 MB: layers 0 … 0, embedding alone has 0 MB"):
        cut_to(sizes, 149)
    with pytest.raises(ValueError, match=r"chunks must be within 1 … 6, the number of layers, got 7"):
        cut(sizes, 7)


# Chunks against the whole


@pytest.fixture(scope="module", params=["in_place", "read_only"])
def made(
    request: pytest.FixtureRequest, exaone4_folder: Folder, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, Path]:
    """A model folder, its package and a folder of chunks, the head apart."""
    kv = request.param
    folder = exaone4_folder(dtype=torch.bfloat16, **HYBRID)
    model = Exaone4.from_pretrained(folder, context_length=CONTEXT, dtype=None, kv=kv, block_size=8, head_pieces=3)
    target = tmp_path_factory.mktemp("chunks")
    options: dict[str, Any] = {"prefill": 8, "verify": 5} if kv == "read_only" else {"prefill": 8}
    model.convert(target / "whole.mlpackage", **options)
    model.convert_chunks(target / "parts", chunks=2, head_apart=True, **options)
    return folder, target / "whole.mlpackage", target / "parts"


def test_chunks_give_what_the_whole_gives(made: tuple[Path, Path, Path]) -> None:
    folder, whole, parts = made
    ids = torch.randint(109, (CONTEXT,), generator=torch.Generator().manual_seed(5)).tolist()
    sessions = [Session(path) for path in (whole, parts)]
    for first, last in ((0, 21), (21, 29), (29, CONTEXT)):
        expected, found = (session.extend(ids[first:last]) for session in sessions)
        assert [result.first for result in found] == [result.first for result in expected]
        for one, other in zip(expected, found, strict=True):
            np.testing.assert_allclose(other.values, one.values, atol=3e-5)
    result = verify(parts, folder, tokens=CONTEXT, seed=3)
    assert result.tokens == CONTEXT
    assert result.snr_db >= 60
    prompt = (ids[:6] * 4)[:20]
    for session in sessions:
        session.reset()
    plain = list(generate(sessions[0], prompt, max_new_tokens=60))
    guess = PromptLookup() if sessions[1].verify_length else None
    assert list(generate(sessions[1], prompt, max_new_tokens=60, guess=guess)) == plain


def test_a_padded_block_does_not_run_the_head(made: tuple[Path, Path, Path]) -> None:
    session = Session(made[2])
    session.extend([1] * 6)  # a padded block for five tokens, then decode
    assert [sorted(chunk.programs) for chunk in session._chunks] == [["decode", "prefill"]] * 2 + [["decode"]]


def test_what_the_chunks_hold(made: tuple[Path, Path, Path]) -> None:
    folder, _, parts = made
    packages = open_packages(parts)
    config = json.loads((folder / "config.json").read_text())
    hidden = (1, config["hidden_size"], 1, 1)
    flows = [
        (
            {value.name for value in package.function("decode").inputs} & {"inputIds", "hiddenStates"},
            {value.name for value in package.function("decode").outputs}
            & {"logits", "hiddenStates", "newHiddenStates"},
        )
        for package in packages
    ]
    assert flows == [
        ({"inputIds"}, {"hiddenStates"}),
        ({"hiddenStates"}, {"newHiddenStates"}),
        ({"hiddenStates"}, {"logits"}),
    ]
    # The head is asked for one position, whatever the block.
    assert [value.tensor_type.shape for value in packages[2].function("prefill").inputs] == [hidden]
    ranges = [json.loads(package.metadata["ane_layers.config"])["layers"] for package in packages]
    assert ranges[0][0] == 0
    assert ranges[0][1] == ranges[1][0]
    assert ranges[1][1] == ranges[2][0] == ranges[2][1] == config["num_hidden_layers"]


# The command line, on the bundled model


def model_width(folder: Path) -> int:
    """Elements of a slot's keys."""
    config = json.loads((folder / "config.json").read_text())
    return int(config["num_key_value_heads"]) * int(config["head_dim"])


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_line_converts_in_chunks_as_the_recipe_says(tmp_path: Path) -> None:
    bundled = bundled_checkpoint()
    target = tmp_path / "base"
    result = run("convert", bundled, "-o", target, "--recipe", "base", "--context", 32, "--prefill", 8, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert list(found["chunks"]) == ["chunk_0.mlpackage", "chunk_1.mlpackage"]
    inspected = run("inspect", target, "--json")
    assert json.loads(inspected.stdout)["chunks"] == found["chunks"]
    # Chunks move together what one package does: all of it is read once.
    analyzed = json.loads(run("analyze", target, "--json").stdout)
    assert set(analyzed["functions"]) == {f"chunk_{i}/{name}" for i in (0, 1) for name in ("decode", "prefill")}
    decode = analyzed["together"]["decode"]
    assert decode["traffic"]["kv_read"] == 12 * 2 * 2 * 32 * model_width(bundled)
    assert decode["operations"] == sum(
        found["chunks"][name]["functions"]["decode"]["operations"]["compute"] for name in found["chunks"]
    )
    assert "decode, all chunks: " in run("analyze", target).stdout
    # What the package holds is what PyTorch evaluates.
    ids = list(range(40, 72))
    package = evaluate(target, original=bundled, tokens=ids, window=32)
    model = evaluate(bundled, tokens=ids, window=32, recipe="base", context=32)
    assert package.loss == pytest.approx(model.loss, abs=2e-3)
    assert package.bytes_per_token == pytest.approx(model.bytes_per_token, rel=0.02)
    tensors = found["compression"]["tensors"]
    assert len({tensor["path"] for tensor in tensors}) == len(tensors)
    assert sum(1 for tensor in tensors if tensor["path"].endswith("down_proj.weight")) == 12


def test_a_limit_in_megabytes_holds_for_the_files(tmp_path: Path) -> None:
    target = tmp_path / "parts"
    result = run(
        "convert", bundled_checkpoint(), "-o", target, "--chunk-limit", 5, "--context", 16, "--prefill", 4, "--json"
    )
    assert result.exit_code == 0, result.output
    sizes = [file.stat().st_size for file in sorted(target.rglob("weight.bin"))]
    assert len(sizes) > 1
    assert max(sizes) <= 5e6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("-o", "x.mlpackage", "--recipe", "base"), "recipe base makes 2 chunks, which go into a folder"),
        (("-o", "x.mlpackage", "--chunks", 2), "several chunks go into a folder"),
        (("-o", "x", "--chunks", 40), "chunks must be within 1 … 12, the number of layers, got 40"),
        (
            ("-o", "x", "--chunks", 2, "--chunk-limit", 9),
            "chunks (2) and a limit of bytes (9000000) exclude each other",
        ),
        (("-o", "x", "--chunk-limit", 0.1), "no cut keeps every package within"),
        (("-o", "used", "--chunks", 2), "exists and is no folder of packages, so it is not replaced"),
    ],
)
def test_what_is_refused(
    options: tuple[object, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine")
    result = run("convert", bundled_checkpoint(), *options, "--context", 16)
    assert result.exit_code == 1
    assert message in " ".join(str(result.exception or result.stderr).split()) + " ".join(result.output.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["used"]


def test_a_folder_with_a_chunk_missing_or_of_another_model_is_refused(
    made: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    _, whole, parts = made
    broken = tmp_path / "parts"
    shutil.copytree(parts, broken)
    with pytest.raises(
        ValueError, match=r"chunk_1\.mlpackage: is chunk 1 of 3; give the folder that holds all of them"
    ):
        Session(broken / "chunk_1.mlpackage")
    shutil.rmtree(broken / "chunk_1.mlpackage")
    with pytest.raises(ValueError, match="chunk 1 of 3 is missing"):
        Session(broken)
    shutil.copytree(whole, broken / "whole.mlpackage")
    with pytest.raises(ValueError, match=r"chunk_0\.mlpackage and whole\.mlpackage are both chunk 0"):
        Session(broken)


def test_a_shared_compressed_table_cannot_be_in_two_chunks(tmp_path: Path) -> None:
    from ane_layers.compression import compress, make_plan
    from ane_layers.compression.recipe import parse_recipe

    text = "tied = 'share'\n[head]\nbits = 8\n[embedding]\nbits = 8\n"
    model = Exaone4.from_pretrained(bundled_checkpoint(), context_length=16)
    compression = compress(model, make_plan(model, parse_recipe(text, name="shared", file="shared.toml")))
    with pytest.raises(ValueError, match="recipe shared keeps embedding and head in one table"):
        model.convert_chunks(tmp_path / "x", chunks=2, compression=compression)
    assert list(tmp_path.iterdir()) == []


def test_a_part_shares_the_weights_and_reads_only_its_own(exaone4_folder: Folder) -> None:
    folder = exaone4_folder(layers=3, dtype=torch.bfloat16)
    whole = Exaone4.from_pretrained(folder, context_length=16)
    part = Part(first=1, last=2, embedding=False, head=False, number=1, count=3)
    taken = whole.take_part(part)
    loaded = Exaone4.from_pretrained(folder, context_length=16, part=part)
    assert list(taken.state_dict()) == list(loaded.state_dict())
    assert all(name.startswith("model.layers.1.") for name in taken.state_dict())
    for name, tensor in taken.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])
        assert tensor.data_ptr() == whole.state_dict()[name].data_ptr()
    with pytest.raises(ValueError, match="a part without embedding takes hidden_states"):
        taken(torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), None)


def test_a_model_opened_for_conversion_is_written_as_a_loaded_one_is(exaone4_folder: Folder, tmp_path: Path) -> None:
    """Byte by byte, with a table that embedding and head share and with one that they do not."""
    for tied in (True, False):
        folder = exaone4_folder(layers=1, dtype=torch.bfloat16, tie_word_embeddings=tied)
        loaded = Exaone4.from_pretrained(folder, context_length=16, dtype=None, head_pieces=3)
        opened = Exaone4.open(folder, context_length=16, head_pieces=3)
        assert {name for name, value in opened.named_parameters() if value.is_meta} == {
            name for name, _ in opened.named_parameters() if "norm" not in name
        }
        loaded.convert(tmp_path / "loaded.mlpackage", prefill=4)
        opened.convert(tmp_path / "opened.mlpackage", prefill=4)
        for file in ("model.mlmodel", "weights/weight.bin"):
            one, other = (tmp_path / f"{name}.mlpackage/Data/com.apple.CoreML" / file for name in ("loaded", "opened"))
            assert one.read_bytes() == other.read_bytes()
        with pytest.raises(ValueError, match="opened for conversion, its weights are in its folder"):
            opened.extend(torch.zeros(1, 1, dtype=torch.int32))
