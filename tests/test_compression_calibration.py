"""Windows of calibration text, and the mean squares of what each layer reads, against `transformers` and brute force."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ane_layers.bundled import bundled_checkpoint
from ane_layers.compression import replay as replay_module
from ane_layers.compression import units
from ane_layers.compression.calibration import calibration_tokens, input_moments
from ane_layers.layers import Linear, OutputHead, folded_columns
from ane_layers.models import from_folder
from ane_layers.text import Tokenizer

Folder = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The bundled model without its weights, to be changed."""
    copy = tmp_path / "model"
    shutil.copytree(bundled_checkpoint(), copy, ignore=shutil.ignore_patterns("*.safetensors"))
    return copy


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("bos", [1, None])
def test_windows_match_slices_of_the_text(folder: Path, bos: int | None) -> None:
    edit_config(folder, bos_token_id=bos)
    first = [] if bos is None else [bos]
    text = bundled_checkpoint() / "calibration.txt"
    ids = Tokenizer.from_folder(folder).encode(text.read_text(encoding="utf-8"), add_special_tokens=False)
    windows = calibration_tokens(folder, count=5, length=100)
    assert windows.shape == (5, 100)
    assert windows.dtype == torch.int64
    size = 100 - len(first)
    starts = [i * (len(ids) - size) // 4 for i in range(5)]  # evenly from the first token to the last
    assert windows.tolist() == [first + ids[start : start + size] for start in starts]
    assert windows[-1, -1] == ids[-1]


def test_default_text_is_not_the_held_out_one() -> None:
    folder = bundled_checkpoint()
    lines = [
        set((folder / f"{name}.txt").read_text(encoding="utf-8").splitlines()) for name in ("calibration", "heldout")
    ]
    assert len(lines[0]) > 100
    assert not {line for line in lines[0] & lines[1] if len(line) > 20}


def test_short_text_gives_fewer_windows_that_do_not_overlap(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("In the beginning God created the heaven and the earth. " * 12, encoding="utf-8")
    ids = Tokenizer.from_folder(folder).encode(text.read_text(), add_special_tokens=False)
    count = len(ids) // 31
    assert count >= 2
    windows = calibration_tokens(folder, text, count=10**6, length=32)
    assert windows.shape == (count, 32)
    starts = [i * (len(ids) - 31) // (count - 1) for i in range(count)]
    assert min(b - a for a, b in itertools.pairwise(starts)) >= 31
    assert windows[:, 1:].tolist() == [ids[start : start + 31] for start in starts]
    assert calibration_tokens(folder, text, count=1, length=32)[0, 1:].tolist() == ids[:31]


def test_folder_without_tokenizer_gets_seeded_random_ids(exaone4_folder: Folder) -> None:
    windows = calibration_tokens(exaone4_folder(), count=7, length=50)
    assert windows.shape == (7, 50)
    assert (windows[:, 0] == 1).all()  # the config's bos_token_id
    assert len(set(windows[:, 1:].flatten().tolist())) > 90  # of 109
    assert windows.max() < 109
    assert torch.equal(windows, calibration_tokens(exaone4_folder(), count=7, length=50))


def test_unusable_text_is_refused_by_name(folder: Path, tmp_path: Path, exaone4_folder: Folder) -> None:
    short = tmp_path / "short.txt"
    short.write_text("In the beginning", encoding="utf-8")
    (tmp_path / "latin.txt").write_bytes("Größe".encode("latin-1"))
    for file, message in (
        (short, r"short\.txt: has \d+ tokens, a window takes 63"),
        (tmp_path / "latin.txt", r"latin\.txt: is not UTF-8 text"),
        (tmp_path / "none.txt", r"none\.txt: cannot be read"),
    ):
        with pytest.raises(ValueError, match=message):
            calibration_tokens(folder, file, count=2, length=64)
    with pytest.raises(ValueError, match=r"tokenizer\.json: is missing"):
        calibration_tokens(exaone4_folder(), short, count=2, length=4)
    edit_config(folder, vocab_size=100)
    with pytest.raises(ValueError, match=r"gives id \d+, the model's vocab_size is 100"):
        calibration_tokens(folder, count=2, length=64)
    for fields, message in (({"count": 0, "length": 8}, "count"), ({"count": 1, "length": 1}, "length")):
        with pytest.raises(ValueError, match=f"{message} must be at least"):
            calibration_tokens(folder, **fields)


def test_input_moments_match_transformers(
    exaone4_folder: Folder, exaone4_reference: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_module, "BATCH_TOKENS", 40)  # two windows at a time, one left over
    folder = exaone4_folder(layers=3)
    tokens = torch.randint(109, (5, 17), generator=torch.Generator().manual_seed(3))
    reference = exaone4_reference(folder)
    read: dict[str, Tensor] = {}
    hooks = [
        module.register_forward_pre_hook(lambda module, args, path=path: read.__setitem__(path, args[0]))
        for path, module in reference.named_modules()
        if isinstance(module, nn.Linear)
    ]
    with torch.no_grad():
        reference(tokens)
    for hook in hooks:
        hook.remove()
    model = from_folder(folder, context_length=64)  # longer than the windows
    moments = input_moments(model, tokens)
    names = {"qkv_proj": "q_proj", "gate_up_proj": "up_proj"}
    assert set(moments) == {path for unit in units(model) for path in unit.weights if unit.kind != "embedding"}
    for path, actual in moments.items():
        *parents, name, _ = path.split(".")
        found = "lm_head" if path.startswith("lm_head") else ".".join([*parents, names.get(name, name)])
        expected = read[found].flatten(0, 1).double().square().mean(0)
        if name == "o_proj":
            expected = expected[folded_columns(8, 2, 16)]  # its inputs come in the folded order
        torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-6, msg=path)
        assert actual.dtype == torch.float32
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_input_moments_of_any_module_match_brute_force() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Linear(5, 7), nn.ReLU(), Linear(7, 3), OutputHead(3, 11, pieces=2)).requires_grad_(False)
    x = torch.randn(4, 5, 1, 6)
    moments = input_moments(model, x)
    assert set(moments) == {"0.weight", "2.weight", "3.pieces.0.weight", "3.pieces.1.weight"}
    hidden = model[1](model[0](x))
    for path, value in {"0.weight": x, "2.weight": hidden, "3.pieces.1.weight": model[2](hidden)}.items():
        torch.testing.assert_close(moments[path], value.square().mean((0, 2, 3)))


def test_input_moments_refuse_what_they_cannot_measure(exaone4_folder: Folder) -> None:
    model = from_folder(exaone4_folder(dtype=torch.bfloat16), context_length=8, dtype=None)
    with pytest.raises(ValueError, match=r"dtype of the weights is torch\.bfloat16"):
        input_moments(model, torch.zeros(1, 8, dtype=torch.int64))

    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = Linear(2, 2), Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    with pytest.raises(ValueError, match="idle: was not called"):
        input_moments(Idle(), torch.zeros(1, 2, 1, 1))
