"""The catalogue entry runs as its card says, on a tiny model in the real one's place."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import write_exaone4
from text_folders import VOCABULARY, write_tokenizer

from ane_layers.agreement import agreement, read_prompts
from ane_layers.models import Exaone4

ENTRY = Path(__file__).parents[1] / "models" / "exaone4"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("catalogue") / "model"
    write_exaone4(path, dtype=torch.bfloat16, vocab=VOCABULARY)
    return write_tokenizer(path)


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ENTRY / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_there_are_30_prompts() -> None:
    prompts = read_prompts(ENTRY / "prompts.txt")
    assert len(prompts) == len(set(prompts)) == 30


def test_convert_script_runs(folder: Path, tmp_path: Path) -> None:
    result = run("convert.py", folder, "-o", tmp_path / "m.mlpackage", "--context", 64)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "m.mlpackage" / "Manifest.json").is_file()
    result = run("convert.py", tmp_path / "missing")
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1


def test_check_files_a_result(folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("naïve\n\n태초에 말씀\n", encoding="utf-8")
    results = tmp_path / "results"
    options = [
        "--context",
        64,
        "--prefill",
        8,
        "--tokens",
        20,
        "--prompts",
        prompts,
        "--new-tokens",
        6,
        "--results",
        results,
    ]
    result = run("check.py", folder, *options)
    assert result.returncode == 0, result.stderr
    (file,) = results.iterdir()
    filed = json.loads(file.read_text())
    assert filed["verify"]["snr_db"] >= 60
    assert filed["agreement"]["prompts"] == filed["agreement"]["identical"] == 2
    assert filed["agreement"]["tokens"] == 12
    assert filed["counts"]["fold"]["decode"]["tile"]["count"] == 0
    assert filed["counts"]["repeat_kv"]["decode"]["tile"]["count"] == 4
    assert str(tmp_path) not in file.read_text()


def test_agreement_finds_where_packages_part(folder: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first.mlpackage", tmp_path / "second.mlpackage"
    model = Exaone4.from_pretrained(folder, context_length=48)
    model.convert(first, prefill=8)
    # Another norm before the head, such as a wrong weight would be.
    model.model.norm.weight.data.uniform_(0.2, 2, generator=torch.Generator().manual_seed(0))
    model.convert(second, prefill=8)
    prompts = ["the word", "In the beginning"]
    assert agreement(first, first, tokenizer=folder, prompts=prompts, new_tokens=8).identical == 2
    parted = agreement(first, second, tokenizer=folder, prompts=prompts, new_tokens=8)
    assert parted.identical == 2 - len(parted.differences) < 2
    assert all(0 <= difference.position < 8 for difference in parted.differences)
    with pytest.raises(ValueError, match=r"prompt 1 and 60 new tokens exceed the package's context"):
        agreement(first, second, tokenizer=folder, prompts=prompts, new_tokens=60)


def test_prompts_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(ValueError, match=r"empty\.txt: holds no prompt"):
        read_prompts(tmp_path / "empty.txt")
    with pytest.raises(ValueError, match=r"missing\.txt: cannot be read"):
        read_prompts(tmp_path / "missing.txt")
