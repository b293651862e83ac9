"""The command line as a user meets it: exit status, one line of error, results on stdout, nothing half-written."""

from __future__ import annotations

import io
import json
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import begun
from rich.console import Console

from ane_layers import __version__, cli, console

Folder = Callable[..., Path]
COMMAND = [sys.executable, "-m", "ane_layers.cli"]


def ane_layers(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=300, check=False)


class InProcess:
    """The same without starting Python anew: for the many small mistakes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        errors = io.StringIO()
        self._monkeypatch.setattr(console, "err", Console(file=errors, soft_wrap=True))
        self._monkeypatch.setattr(sys, "argv", ["ane-layers", *map(str, arguments)])
        self._monkeypatch.setattr(signal, "signal", lambda *_: None)
        with pytest.raises(SystemExit) as stop, warnings.catch_warnings():
            cli.main()
        return subprocess.CompletedProcess(
            sys.argv, int(stop.value.code or 0), self._capsys.readouterr().out, errors.getvalue()
        )


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> InProcess:
    return InProcess(monkeypatch, capsys)


@pytest.fixture(scope="module")
def folder(exaone4_folder: Folder) -> Path:
    return exaone4_folder(dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def package(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "tiny.mlpackage"
    result = ane_layers("convert", folder, "-o", path, "--context", 32, "--prefill", 4)
    assert result.returncode == 0, result.stderr
    assert "converting function prefill (2 of 2)" in result.stderr
    assert "Failed to load" not in result.stderr  # coremltools' harmless noise (cm 2465)
    assert "tile operations" in result.stdout
    return path


def test_version() -> None:
    assert ane_layers("--version").stdout.strip() == __version__


def test_inspect_prints_the_contract_s_json(package: Path) -> None:
    result = ane_layers("inspect", package, "--json")
    functions = json.loads(result.stdout)["functions"]
    keys = {"operations", "tile", "highest_rank", "weight_bytes", "state_writes", "inputs", "outputs", "states"}
    assert set(functions["decode"]) == keys
    assert functions["decode"]["operations"]["compute"] < functions["decode"]["operations"]["total"]
    assert ane_layers("inspect", package).returncode == 0


def test_verify_prints_the_contract_s_json(package: Path, folder: Path) -> None:
    result = ane_layers("verify", package, folder, "--tokens", 12, "--json")
    assert result.returncode == 0, result.stderr
    values = json.loads(result.stdout)
    assert set(values) == {"mode", "tokens", "snr_db", "kl", "top1_agreement"}
    assert (values["mode"], values["tokens"], values["top1_agreement"]) == ("fp32", 12, 1.0)
    assert values["snr_db"] >= 60


def test_verify_takes_a_file_of_ids(package: Path, folder: Path, tmp_path: Path, in_process: InProcess) -> None:
    file = tmp_path / "ids.txt"
    file.write_text("[3, 5, 8]\n13 21, 34\n")
    result = in_process("verify", package, folder, "--tokens", file, "--json")
    assert json.loads(result.stdout)["tokens"] == 6
    file.write_text("3 999999 5")
    result = in_process("verify", package, folder, "--tokens", file)
    assert (result.returncode, result.stdout) == (1, "")
    assert "token 999999 is outside the vocabulary" in result.stderr
    assert "tokens must be within 2" in in_process("verify", package, folder, "--tokens", "-5").stderr
    file.write_text("3 five")
    result = in_process("verify", package, folder, "--tokens", file)
    assert result.returncode == 1
    assert "ids.txt: 'five' is no token id" in result.stderr
    assert "cannot be read" in in_process("verify", package, folder, "--tokens", tmp_path / "no.txt").stderr


def test_verify_fails_below_its_gate(package: Path, folder: Path) -> None:
    result = ane_layers("verify", package, folder, "--tokens", 12, "--mode", "fp16", "--gate", 150)
    assert result.returncode == 1
    assert "below the gate of 150 dB" in result.stderr


def test_verify_prints_positions_beside_its_json(package: Path, folder: Path) -> None:
    options = ["--tokens", 8, "--mode", "fp16_pessimistic", "--positions", "--json"]
    result = ane_layers("verify", package, folder, *options)
    values = json.loads(result.stdout)
    assert set(values) == {"mode", "tokens", "snr_db", "kl", "top1_agreement"}
    assert values["mode"] == "fp16_pessimistic"
    assert [line.split(":")[0] for line in result.stderr.splitlines() if line.startswith("position")] == [
        f"position {i}" for i in range(8)
    ]
    assert "worst is position" in ane_layers("verify", package, folder, "--tokens", 8, "--findings").stdout


def test_verify_names_the_operation_that_overflows(exaone4_folder: Folder, tmp_path: Path) -> None:
    # A feed-forward block whose product is beyond fp16, in the second layer of the package alone.
    from safetensors.torch import load_file, save_file

    source = exaone4_folder(dtype=torch.float32)
    folder = tmp_path / "large"
    shutil.copytree(source, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in ("gate_proj", "up_proj"):
        tensors[f"model.layers.1.mlp.{name}.weight"] *= 1000
    save_file(tensors, file, metadata={"format": "pt"})
    package = tmp_path / "m.mlpackage"
    assert ane_layers("convert", folder, "-o", package, "--context", 16, "--prefill", 4).returncode == 0
    result = ane_layers("verify", package, folder, "--tokens", 8, "--mode", "fp16", "--gate", 20, "--json")
    assert result.returncode == 1
    assert json.loads(result.stdout)["snr_db"] is None
    found = [line for line in result.stderr.splitlines() if line.startswith("first operation out of range: ")]
    assert len(found) == 1
    assert "function 'prefill', operation " in found[0]
    assert "(mul): " in found[0]
    # In fp32 the numbers go on, and it is told all the same.
    result = ane_layers("verify", package, folder, "--tokens", 8, "--gate", 20)
    assert result.returncode == 0
    assert "first operation out of range: function 'prefill'" in result.stderr


def test_run_executes_any_function_on_files(package: Path, tmp_path: Path) -> None:
    arrays = {
        "inputIds": np.array([[5]], np.int32),
        "position": np.array([0], np.int32),
        "causalMask": np.where(np.arange(32) == 0, 0, -4e4).astype(np.float16).reshape(1, 1, 1, 32),
    }
    options: list[object] = []
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
        options += ["--input", f"{name}={tmp_path / name}.npy"]
    result = ane_layers(
        "run", package, "--function", "decode", *options, "--output-dir", tmp_path / "out", "--mode", "fp16", "--json"
    )
    assert result.returncode == 0, result.stderr
    values = json.loads(result.stdout)
    assert (values["function"], values["mode"]) == ("decode", "fp16")
    logits = np.load(tmp_path / "out/logits.npy")
    assert values["outputs"]["logits"] == {
        "dtype": "float16",
        "shape": list(logits.shape),
        "min": logits.min().item(),
        "max": logits.max().item(),
    }
    text = ane_layers("run", package, "--function", "decode", *options)
    assert text.stdout.startswith("logits: float32 [1, 1, 109], min ")


def test_verify_has_a_gate_by_itself(package: Path, exaone4_folder: Folder, in_process: InProcess) -> None:
    other = exaone4_folder(dtype=torch.bfloat16, seed=7)
    result = in_process("verify", package, other, "--tokens", 12)
    assert result.returncode == 1
    assert "below the gate of 40 dB" in result.stderr


def test_head_sharing_is_one_flag(folder: Path, package: Path, tmp_path: Path) -> None:
    path = tmp_path / "repeat.mlpackage"
    options = ["--context", 32, "--prefill", 4, "--head-sharing", "repeat_kv", "--json"]
    functions = json.loads(ane_layers("convert", folder, "-o", path, *options).stdout)["functions"]
    assert functions["decode"]["tile"] == {"count": 4, "bytes": 4 * 8 * 32 * 16 * 2}
    folded = json.loads(ane_layers("inspect", package, "--json").stdout)["functions"]
    assert folded["decode"]["tile"] == {"count": 0, "bytes": 0}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["convert", "{missing}", "-o", "{out}"], "no such folder"),
        (
            ["convert", "{folder}", "-o", "{out}", "--context", "4096"],
            "context_length must be within 1 … max_position_embeddings (256), got 4096",
        ),
        (["convert", "{folder}", "-o", "{out}", "--context", "32", "--prefill", "33"], "prefill must be within 2 …"),
        (["convert", "{folder}", "-o", "{dir}/model", "--context", "32", "--prefill", "4"], "must end in .mlpackage"),
        (
            ["convert", "{folder}", "-o", "{dir}/no/m.mlpackage", "--context", "32", "--prefill", "4"],
            "no: is not a folder",
        ),
        (["convert", "{folder}", "-o", "{out}", "--context", "32", "--top-k", "3"], "--top-k 3 needs --head top_k"),
        (
            ["convert", "{folder}", "-o", "{out}", "--context", "32", "--bucket", "64"],
            "contexts must be within 1 … context_length (32), got 64",
        ),
        (
            ["convert", "{folder}", "-o", "{out}", "--context", "32", "--head-pieces", "200"],
            "pieces must be within 1 … 109, got 200",
        ),
        (["inspect", "{missing}"], "missing"),
        (["inspect", "{folder}"], "no .mlpackage"),
        (["run", "{missing}"], "missing"),
        (["run", "{package}", "--function", "encode"], "no function 'encode'; it has decode, prefill"),
        (["run", "{package}", "--input", "inputIds"], "--input is 'inputIds', expected NAME=FILE.npy"),
        (["run", "{package}", "--input", "ids={missing}"], "cannot be read as an .npy array"),
        (["run", "{package}", "--output-dir", "{dir}/o"], "input 'inputIds' is missing, a int32[1, 1]"),
        (["run", "{package}", "--output-dir", "{dir}/no/o"], "no: is not a folder, so o cannot be made there"),
        (["run", "{package}", "--output-dir", "{folder}/config.json"], "config.json: is a file, not a folder"),
        (["verify", "{missing}", "{folder}"], "missing"),
        (["verify", "{package}", "{folder}", "--tokens", "33"], "tokens must be within 2 … 32"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    in_process: InProcess, arguments: list[str], expected: str, folder: Path, package: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out" / "m.mlpackage"
    out.parent.mkdir()
    values = {"missing": tmp_path / "missing", "folder": folder, "out": out, "dir": out.parent, "package": package}
    result = in_process(*(argument.format(**values) for argument in arguments))
    assert result.returncode == 1
    assert result.stdout == ""
    errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert expected in errors[0]
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["convert", "model"], "ane-layers convert: missing option '--output' / '-o' (see ane-layers convert --help)"),
        (["convert", "model", "-o"], "ane-layers: option '-o' requires an argument (see ane-layers --help)"),
        (["inspect"], "ane-layers inspect: missing argument 'package' (see ane-layers inspect --help)"),
        (["inspect", "p", "--jsom"], "ane-layers inspect: no such option: --jsom"),
        (["generate", "p", "--prompt", "a", "--seed", "one"], "ane-layers generate: invalid value for '--seed'"),
        (["convert", "m", "-o", "o", "--kv", "somehow"], "ane-layers convert: invalid value for '--kv'"),
        (["convertt"], "ane-layers: no such command 'convertt'"),
    ],
)
def test_a_wrong_command_line_is_one_line(in_process: InProcess, arguments: list[str], expected: str) -> None:
    result = in_process(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.lower().replace("`", "").startswith(f"error: {expected}".lower())


def test_without_a_command_the_help_is_shown() -> None:
    result = ane_layers()
    assert (result.returncode, result.stdout) == (2, "")
    assert "Commands:" in result.stderr


def test_unknown_model_type_lists_the_known_ones(in_process: InProcess, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    result = in_process("convert", tmp_path, "-o", tmp_path / "m.mlpackage")
    assert result.returncode == 1
    known = "exaone, exaone4, gemma3_text, granite, llama, mistral, olmo2, phi3, qwen2, qwen3, smollm3"
    assert f"field model_type is 'gpt2'; supported: {known}" in result.stderr


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupt_leaves_nothing(folder: Path, tmp_path: Path, number: signal.Signals, status: int) -> None:
    out = tmp_path / "m.mlpackage"
    # A short stop in the middle, so that the signal comes while a workspace exists.
    code = (
        "import sys, time, ane_layers.conversion.converter as c, ane_layers.cli as cli\n"
        "convert = c.converted\n"
        "c.converted = lambda *a: (print('begun', flush=True), time.sleep(60), convert(*a))[2]\n"
        f"sys.argv = ['ane-layers', 'convert', {str(folder)!r}, '-o', {str(out)!r}, '--context', '32', '--prefill', '4']\n"
        "cli.main()\n"
    )
    process = begun(code)
    assert any(tmp_path.iterdir())
    time.sleep(0.2)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == status
    assert "Traceback" not in errors
    assert ("error: interrupted; nothing was written" in errors.splitlines()) is (number is signal.SIGINT)
    assert list(tmp_path.iterdir()) == []
