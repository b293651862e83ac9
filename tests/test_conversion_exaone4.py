"""EXAONE 4 from a folder that `transformers` wrote to a package that is executed: converted, read back, run, compared."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ane_layers import RMSNorm
from ane_layers.analysis import inspect
from ane_layers.conversion import ConversionError, convert
from ane_layers.generation import Session, read_metadata
from ane_layers.interpreter import MLProgram
from ane_layers.models import Exaone4
from ane_layers.program import Package
from ane_layers.verification import compare_logits, verify

CONTEXT, BLOCK = 32, 4
Folder = Callable[..., Path]
Reference = Callable[[Path], Any]


@pytest.fixture(scope="module")
def folder(exaone4_folder: Folder) -> Path:
    # bf16, as EXAONE 4 is published: fp16 holds its weights exactly, so that only arithmetic and constants can differ.
    return exaone4_folder(dtype=torch.bfloat16, layers=3)


@pytest.fixture(scope="module")
def packages(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {}
    for sharing in ("fold", "repeat_kv"):
        path = tmp_path_factory.mktemp("packages") / f"{sharing}.mlpackage"
        Exaone4.from_pretrained(
            folder, context_length=CONTEXT, dtype=None, head_sharing=sharing, head_pieces=3
        ).convert(path, prefill=BLOCK)
        paths[sharing] = path
    return paths


def token_ids(count: int, vocabulary: int = 109) -> list[int]:
    return torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.parametrize("sharing", ["fold", "repeat_kv"])
@pytest.mark.parametrize("mode", ["fp32", "fp16"])
def test_executed_package_matches_transformers(
    folder: Path, packages: dict[str, Path], exaone4_reference: Reference, sharing: str, mode: str
) -> None:
    ids = token_ids(CONTEXT)  # to the last slot
    with torch.no_grad():
        reference = exaone4_reference(folder)(torch.tensor([ids])).logits[0]
    session = Session(packages[sharing], mode=mode)
    results = session.extend(ids[:14])  # three blocks, then two tokens
    results += session.extend(ids[14:17], prefill=False)
    results += session.extend(ids[17:])  # prefill again, after decode
    positions = [result.first for result in results]
    assert positions == [3, 7, 11, 12, 13, 14, 15, 16, 20, 24, 28, 29, 30, 31]
    actual = torch.from_numpy(np.concatenate([result.values for result in results]).astype(np.float32))
    compared = compare_logits(reference[positions], actual, mode=mode)
    assert compared.snr_db >= (60 if mode == "fp32" else 45)
    assert compared.top1_agreement == 1.0


def test_both_head_sharings_give_the_same_greedy_tokens(
    folder: Path, packages: dict[str, Path], exaone4_reference: Reference
) -> None:
    prompt, count = token_ids(9), CONTEXT - 9
    written = {}
    for sharing, path in packages.items():
        session = Session(path)
        logits = session.extend(prompt)[-1].values[-1]
        tokens = []
        for _ in range(count):
            tokens.append(int(logits.argmax()))
            logits = session.extend(tokens[-1:])[-1].values[-1]
        written[sharing] = tokens
    assert written["fold"] == written["repeat_kv"]
    ids = list(prompt)
    for _ in range(count):  # transformers' own forward, without its generation settings
        with torch.no_grad():
            ids.append(int(exaone4_reference(folder)(torch.tensor([ids])).logits[0, -1].argmax()))
    assert written["fold"] == ids[len(prompt) :]


def test_a_padded_last_block_leaves_no_trace(packages: dict[str, Path]) -> None:
    """A prompt that does not fill its blocks: the rest but one goes through a padded block, whose extra rows are never seen."""
    ids = token_ids(CONTEXT)
    one_by_one, blocks = Session(packages["fold"]), Session(packages["fold"])
    reference = {result.first: result.values[0] for result in one_by_one.extend(ids, prefill=False)}
    start = 0
    for count in (
        3,
        7,
        5,
        8,
        6,
        3,
    ):  # 3: padded alone; 7: a block and a padded one; the last ones reach the end of the context
        results = blocks.extend(ids[start : start + count])
        start += count
        assert results[-1].first == start - 1
        for result in results:
            np.testing.assert_allclose(result.values[0], reference[result.first], atol=1e-4)
    assert start == CONTEXT
    for name in ("keyCache", "valueCache"):
        rows = (session.states[0].read_state(name) for session in (blocks, one_by_one))
        np.testing.assert_allclose(*rows, atol=1e-4)


def test_verify_always_runs_a_block(folder: Path, packages: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    call = Session._call

    def counted(session: Session, plan: Any, *arguments: Any, **named: Any) -> Any:
        calls.append(plan.length)
        return call(session, plan, *arguments, **named)

    monkeypatch.setattr(Session, "_call", counted)
    for tokens in (4, 5, 9):
        calls.clear()
        assert verify(packages["fold"], folder, tokens=tokens).tokens == tokens
        assert BLOCK in calls


def test_past_the_end_is_refused_and_the_cache_is_kept(folder: Path, packages: dict[str, Path]) -> None:
    ids = token_ids(CONTEXT)
    session = Session(packages["fold"])
    session.extend(ids[:-2])
    kept = session.states[0].read_state("keyCache").copy()
    with pytest.raises(ValueError, match=f"3 tokens at position {CONTEXT - 2} exceed the context of {CONTEXT} slots"):
        session.extend([1, 2, 3])
    np.testing.assert_array_equal(session.states[0].read_state("keyCache"), kept)
    session.extend(ids[-2:])  # still usable, to the last slot
    with pytest.raises(ValueError, match="outside the vocabulary"):
        Session(packages["fold"]).extend([109])


def test_features_follow_the_contract(packages: dict[str, Path]) -> None:
    counts = inspect(Package.open(packages["fold"]))["functions"]
    assert set(counts) == {"decode", "prefill"}
    cache = {"dtype": "fp16", "shape": [3, 2, CONTEXT, 16]}
    for name, length in (("decode", 1), ("prefill", BLOCK)):
        function = counts[name]
        assert function["inputs"] == {
            "inputIds": {"dtype": "int32", "shape": [1, length]},
            "position": {"dtype": "int32", "shape": [1]},
            "causalMask": {"dtype": "fp16", "shape": [1, 1, length, CONTEXT]},
        }
        assert function["outputs"] == {"logits": {"dtype": "fp16", "shape": [1, 1, 109]}}
        assert function["states"] == {"keyCache": cache, "valueCache": cache}
        assert function["state_writes"] == 2 * 3
        assert function["tile"] == {"count": 0, "bytes": 0}
        assert function["highest_rank"] == 4
    package = Package.open(packages["fold"])
    assert package.default_function == "decode"
    assert package.specification_version == 9  # iOS 18, macOS 15


def test_repeat_kv_has_the_tiles_of_the_article(packages: dict[str, Path]) -> None:
    function = inspect(Package.open(packages["repeat_kv"]))["functions"]["decode"]
    # K and V of three layers, from 2 heads to 8: [8, 32, 16] in fp16.
    assert function["tile"] == {"count": 6, "bytes": 6 * 8 * CONTEXT * 16 * 2}
    assert function["highest_rank"] == 5


def test_operations_per_layer(exaone4_folder: Folder, tmp_path: Path) -> None:
    """What a layer costs, from models that differ by one: 1,700 operations at 30 layers leave 55 a layer, 1,800 leave 58."""
    compute = {}
    for layers in (1, 2):
        folder = exaone4_folder(dtype=torch.bfloat16, layers=layers)
        model = Exaone4.from_pretrained(folder, context_length=CONTEXT, dtype=None)
        functions = inspect(model.convert(tmp_path / f"{layers}.mlpackage", prefill=BLOCK))["functions"]
        compute[layers] = {name: function["operations"]["compute"] for name, function in functions.items()}
    assert compute[2]["decode"] - compute[1]["decode"] <= 55
    assert compute[2]["prefill"] - compute[1]["prefill"] <= 58


def test_metadata_describes_the_package(packages: dict[str, Path]) -> None:
    config = read_metadata(Package.open(packages["repeat_kv"]))
    assert config["head_sharing"] == "repeat_kv"
    assert (config["context_length"], config["prefill"], config["kv"], config["recipe"]) == (
        CONTEXT,
        BLOCK,
        "in_place",
        "fp16",
    )
    assert config["model"]["num_key_value_heads"] == 2
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 0)


def test_table_of_a_tied_model_is_stored_once(exaone4_folder: Folder, tmp_path: Path) -> None:
    vocab, hidden = 1024, 32  # rows of 64 bytes: every piece begins where a record may
    folder = exaone4_folder(dtype=torch.bfloat16, vocab=vocab, hidden=hidden)
    sizes = {}
    for duplicate in (False, True):
        model = Exaone4.from_pretrained(folder, context_length=CONTEXT, dtype=None, head_pieces=5)
        package = model.convert(tmp_path / f"{duplicate}.mlpackage", prefill=BLOCK, duplicate_tied=duplicate)
        sizes[duplicate] = (package.path / "Data/com.apple.CoreML/weights/weight.bin").stat().st_size
        assert verify(package.path, folder, tokens=12).snr_db >= 60
    assert 0.99 * 2 * vocab * hidden < sizes[True] - sizes[False] < 1.01 * 2 * vocab * hidden
    functions = inspect(Package.open(tmp_path / "False.mlpackage"))["functions"]
    assert functions["decode"]["weight_bytes"] <= sizes[False]


@pytest.mark.parametrize(
    "options",
    [
        {"tied": False},
        {"dtype": torch.float16, "heads": 6, "kv_heads": 2, "head_dim": 12},
        {"heads": 4, "kv_heads": 4},
        {"heads": 5, "kv_heads": 1},
    ],
)
@pytest.mark.parametrize("fuse", [True, False])
def test_verify_passes_on_other_geometries(
    exaone4_folder: Folder, tmp_path: Path, options: dict[str, Any], fuse: bool
) -> None:
    folder = exaone4_folder(**({"dtype": torch.bfloat16} | options))
    package = Exaone4.from_pretrained(folder, context_length=24, dtype=None, fuse=fuse).convert(
        tmp_path / "m.mlpackage", prefill=5, all_logits=True
    )
    result = verify(package.path, folder, tokens=24)
    assert result.tokens == 24
    assert result.snr_db >= 60
    assert result.top1_agreement == 1.0


def test_verify_sees_a_wrong_weight(folder: Path, packages: dict[str, Path], exaone4_folder: Folder) -> None:
    other = exaone4_folder(dtype=torch.bfloat16, layers=3, seed=5)
    assert verify(packages["fold"], other, tokens=12).snr_db < 10
    with pytest.raises(ValueError, match=r"field num_hidden_layers is 3, .* has 2"):
        verify(packages["fold"], exaone4_folder(dtype=torch.bfloat16), tokens=12)


def test_conversion_mistakes_are_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Exaone4.from_pretrained(folder, context_length=CONTEXT)
    with pytest.raises(ValueError, match=f"prefill must be within 2 … context_length \\({CONTEXT}\\), got 33"):
        model.convert(tmp_path / "m.mlpackage", prefill=33)
    # A layer that forgets to write its cache is found after the conversion.
    layer = model.decoder_layers()[1]
    monkeypatch.setattr(layer.self_attn, "forward", lambda x, *_: x)
    with pytest.raises(ConversionError, match="function decode: state keyCache is written 2 times, expected 3 times"):
        model.convert(tmp_path / "m.mlpackage", prefill=4)
    assert list(tmp_path.iterdir()) == []


def test_weight_beyond_fp16_stops_the_conversion(exaone4_folder: Folder, tmp_path: Path) -> None:
    model = Exaone4.from_pretrained(exaone4_folder(dtype=torch.bfloat16), context_length=CONTEXT, fuse=False)
    model.model.layers[1].mlp.down_proj.weight.data[0, 3] = 70000
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.down_proj\.weight.*70000"):
        model.convert(tmp_path / "m.mlpackage", prefill=4)
    assert list(tmp_path.iterdir()) == []


def test_residual_stream_beyond_fp16_is_reported_with_its_layer(exaone4_folder: Folder, tmp_path: Path) -> None:
    """A norm weight that fp16 holds, and a residual stream that it does not: found in the package, and where."""
    folder = tmp_path / "model"
    shutil.copytree(exaone4_folder(dtype=torch.bfloat16, layers=3), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.post_feedforward_layernorm.weight"].mul_(30000)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    package = Exaone4.from_pretrained(folder, context_length=CONTEXT, dtype=None).convert(
        tmp_path / "m.mlpackage", prefill=4
    )
    for mode in ("fp32", "fp16"):
        finding = verify(package.path, folder, tokens=8, mode=mode).first_non_finite
        assert finding is not None
        assert finding.kind == "overflow"
        assert finding.near == "model_layers_1_mlp_down_proj_weight"
        assert "model_layers_1_mlp_down_proj_weight" in str(finding)


@pytest.mark.parametrize("eps", [1e-5, 1e-6])
@pytest.mark.parametrize("mode", ["fp32", "fp16"])
def test_converted_norm_keeps_its_range(tmp_path: Path, eps: float, mode: str) -> None:
    """Rows of 300s, of mean square 2e-4, of 1e-4s and of zeros, executed with every operation rounded (ET 8641, 19523, nntrainer 4318)."""
    norm = RMSNorm(256, eps=eps, dim=1)
    norm.weight.data.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(0))
    signs = torch.randint(2, (256, 4), generator=torch.Generator().manual_seed(1)) * 2 - 1
    x = (signs * torch.tensor([300.0, 2e-4**0.5, 1e-4, 0.0]))[None, :, None].half()  # [1, 256, 1, 4]
    package = convert(norm, tmp_path / "m.mlpackage", example_inputs={"x": x})
    program = MLProgram(package.path, mode=mode, diagnose=True)
    actual = torch.from_numpy(program.predict({"x": x.numpy()})["output"].astype(np.float32))
    wide = x.float()
    reference = wide / (wide.square().mean(1, keepdim=True) + eps).sqrt() * norm.weight[:, None, None]
    torch.testing.assert_close(actual, reference, rtol=4e-3, atol=1e-4)
    assert (actual[..., 3] == 0).all()
    assert not [finding for finding in program.findings if finding.kind != "subnormal"]


def test_checkpoint_beyond_fp16_is_refused_by_the_tensor_s_name(exaone4_folder: Folder, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(exaone4_folder(dtype=torch.bfloat16), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight"][3, 4] = -70000
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"model\.safetensors: 'model\.layers\.1\.self_attn\.k_proj\.weight' holds -70\d\d\d"
    ):
        Exaone4.from_pretrained(folder, context_length=CONTEXT, dtype=None)
    assert Exaone4.from_pretrained(folder, context_length=CONTEXT) is not None  # fp32 holds it


def test_metadata_is_json(packages: dict[str, Path]) -> None:
    metadata = Package.open(packages["fold"]).metadata
    assert json.loads(metadata["ane_layers.config"])["model"]["model_type"] == "exaone4"
    assert metadata["ane_layers.version"]
