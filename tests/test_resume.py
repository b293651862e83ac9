"""A conversion in chunks that was stopped goes on from its finished chunks, and from nothing else."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import begun
from typer.testing import CliRunner

from ane_layers.cli import app
from ane_layers.compression.recipe import Recipe, parse_recipe
from ane_layers.conversion.folder import Chunking, Conversion, Loading, convert_folder

Folder = Callable[..., Path]

LOADING = Loading(context_length=16, options={"head_pieces": 3})
CHUNKING = Chunking(chunks=3, head_apart=True)


@pytest.fixture(scope="module")
def folder(exaone4_folder: Folder) -> Path:
    return exaone4_folder(dtype=torch.bfloat16, layers=3, sharded=True)


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    text = "[layers]\nbits = 4\ngroup_size = 4\n[head]\nscheme = 'linear'\nbits = 8\n[embedding]\nbits = 8\n"
    return parse_recipe(text, name="mixed", file="mixed.toml")


def files(target: Path) -> dict[str, bytes]:
    return {str(path.relative_to(target)): path.read_bytes() for path in sorted(target.rglob("*")) if path.is_file()}


def convert(folder: Path, target: Path, recipe: Recipe | None, **options: Any) -> Conversion:
    return convert_folder(
        folder, target, LOADING, **{"chunking": CHUNKING, "recipe": recipe, "prefill": 4, "resume": True} | options
    )


def stopped(folder: Path, target: Path, recipe: Recipe | None, *, at: str, error: type[BaseException]) -> None:
    """Converts until a line of progress begins with `at`."""

    def say(line: str) -> None:
        if line.startswith(at):
            raise error("stopped")

    with pytest.raises(error, match="stopped"):
        convert(folder, target, recipe, progress=say)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_finished_chunks_are_kept_and_not_made_again(
    folder: Path, recipe: Recipe, tmp_path: Path, error: type[BaseException]
) -> None:
    whole = convert(folder, tmp_path / "whole", recipe, resume=False)
    target = tmp_path / "resumed"
    stopped(folder, target, recipe, at="chunk 3 of 4: writing weights", error=error)
    kept = tmp_path / "resumed.unfinished"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["resumed.unfinished", "whole"]
    assert sorted(path.name for path in (kept / "chunks").iterdir()) == ["chunk_0.mlpackage", "chunk_1.mlpackage"]
    made = [path.stat() for path in sorted(kept.rglob("*.mlpackage"))]
    # A run that was killed leaves its workspace and a chunk that no line of the journal speaks of.
    for left in (".chunk_2.mlpackage.abc", "chunk_2.mlpackage"):
        (kept / "chunks" / left).mkdir()
    lines: list[str] = []
    resumed = convert(folder, target, recipe, progress=lines.append)
    assert [line for line in lines if "finished by an earlier run" in line] == [
        f"chunk {number} of 4: finished by an earlier run" for number in (1, 2)
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["resumed", "whole"]
    for stat, package in zip(made, resumed.packages[:2], strict=True):
        found = package.path.stat()
        assert (found.st_ino, found.st_mtime_ns) == (stat.st_ino, stat.st_mtime_ns)
    assert files(target) == files(tmp_path / "whole")
    assert resumed.compression is not None
    assert whole.compression is not None
    assert resumed.compression.report == whole.compression.report


def test_a_first_run_that_finishes_no_chunk_leaves_nothing(folder: Path, recipe: Recipe, tmp_path: Path) -> None:
    stopped(folder, tmp_path / "x", recipe, at="chunk 1 of 4: writing weights", error=KeyboardInterrupt)
    assert list(tmp_path.iterdir()) == []


def test_without_resume_nothing_is_kept(folder: Path, tmp_path: Path) -> None:
    def say(line: str) -> None:
        if line.startswith("chunk 3"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(folder, tmp_path / "x", None, resume=False, progress=say)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_chunk_is_made_again(folder: Path, tmp_path: Path) -> None:
    convert(folder, tmp_path / "whole", None, resume=False)
    target = tmp_path / "resumed"
    stopped(folder, target, None, at="chunk 3", error=KeyboardInterrupt)
    weights = next(target.with_name("resumed.unfinished").glob("chunks/chunk_1.mlpackage/**/weight.bin"))
    weights.write_bytes(weights.read_bytes()[:-64])
    lines: list[str] = []
    convert(folder, target, None, progress=lines.append)
    assert sum("finished by an earlier run" in line for line in lines) == 1
    assert files(target) == files(tmp_path / "whole")


def test_chunks_of_another_conversion_are_not_taken(
    folder: Path, recipe: Recipe, exaone4_folder: Folder, tmp_path: Path
) -> None:
    target = tmp_path / "x"
    stopped(folder, target, recipe, at="chunk 3", error=KeyboardInterrupt)
    before = files(tmp_path)
    other = exaone4_folder(dtype=torch.bfloat16, layers=3, sharded=True, seed=1)
    importance = {"model.layers.0.mlp.down_proj.weight": torch.ones(72)}
    cases: list[tuple[str, Callable[[], Any]]] = [
        ("model", lambda: convert(other, target, recipe)),
        ("settings", lambda: convert(folder, target, recipe, prefill=8)),
        ("parts", lambda: convert(folder, target, recipe, chunking=Chunking(chunks=3))),
        ("recipe", lambda: convert(folder, target, None)),
        ("importance", lambda: convert(folder, target, recipe, importance=importance)),
        (
            "loading",
            lambda: convert_folder(
                folder,
                target,
                dataclasses.replace(LOADING, context_length=32),
                chunking=CHUNKING,
                recipe=recipe,
                prefill=4,
                resume=True,
            ),
        ),
    ]
    for field, call in cases:
        expected = (
            rf"x\.unfinished/journal\.jsonl: was left by a run with other {field}; finish that run, or delete the file"
        )
        with pytest.raises(ValueError, match=expected) as refused:
            call()
        assert not hasattr(refused.value, "__notes__")  # that the same command goes on would not be true
    assert files(tmp_path) == before


def test_one_package_cannot_be_resumed(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"x\.mlpackage: is one package, and only finished chunks can be resumed"):
        convert(folder, tmp_path / "x.mlpackage", None, chunking=None)
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_is_interrupted_and_goes_on(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "x"
    arguments = ["convert", str(folder), "-o", str(target), "--context", "16", "--prefill", "4", "--chunks", "3"]
    arguments += ["--resume", "--json"]
    code = (
        "import sys, time, ane_layers.conversion.converter as c, ane_layers.cli as cli\n"
        "bind, calls = c.bind_weights, []\n"
        "def slow(*a, **k):\n"
        "    calls.append(1)\n"
        "    if len(calls) == 3: print('begun', flush=True); time.sleep(60)\n"
        "    return bind(*a, **k)\n"
        "c.bind_weights = slow\n"
        f"sys.argv = ['ane-layers', *{arguments!r}]\n"
        "cli.main()\n"
    )
    process = begun(code)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    told = f"error: interrupted; 2 finished chunks are kept in {target}.unfinished; the same command with --resume goes on from there"
    assert errors.splitlines()[-1] == told
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert list(json.loads(result.stdout)["chunks"]) == [f"chunk_{number}.mlpackage" for number in range(3)]
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
