"""Model ids, against a Hub on the loopback: the same bytes, the right revision, one line for whatever goes wrong."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hub_server import Hub, commit_of, serving
from huggingface_hub import constants

from ane_layers import hub as hub_module
from ane_layers.hub import HubError, ModelId, parse_model_id, resolve
from ane_layers.models import from_folder

MODEL = "someone/Tiny-EXAONE_4.0"
OTHERS = {
    "README.md": b"# card",
    "pytorch_model.bin": b"pickle",
    "onnx/model.safetensors": b"other",
    "onnx/config.json": b"{}",
}


@pytest.fixture(scope="module")
def files(exaone4_folder: Callable[..., Path]) -> dict[str, bytes]:
    """A sharded model as it lies in a repository."""
    folder = exaone4_folder(dtype=torch.bfloat16, sharded=True)
    return {path.name: path.read_bytes() for path in folder.iterdir()} | {
        "tokenizer.json": b"{}",
        "chat_template.jinja": b"hi",
    }


@pytest.fixture
def hub(files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A server with one model in two revisions, and huggingface_hub pointed at it and at an empty cache."""
    older = files | {"chat_template.jinja": b"older"}
    with serving(Hub({MODEL: {"main": files | OTHERS, "refs/pr/1": older}})) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.chdir(tmp_path)
        yield hub


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", ("org/name", None)),
        ("LGAI-EXAONE/EXAONE-4.0-1.2B", ("LGAI-EXAONE/EXAONE-4.0-1.2B", None)),
        ("org/name@v1.0", ("org/name", "v1.0")),
        ("org/name@refs/pr/3", ("org/name", "refs/pr/3")),
        *(
            (text, None)
            for text in ("", "name", "./x", "../x", "/a/b", "a/b/c", "a/b/", "~/b", ".a/b", "a/.b", "a/b@", "a/b@../c")
        ),
        *(
            (text, None)
            for text in (
                "a/b c",
                "a/b.mlpackage",
                "a/b.git",
                "a--b/c",
                "a/b..c",
                "a\\b",
                "C:/b",
                "a/b@-c",
                "ä/b",
                "a/b\n",
            )
        ),
    ],
)
def test_what_counts_as_a_model_id(text: str, expected: tuple[str, str | None] | None) -> None:
    assert parse_model_id(text) == (expected and ModelId(*expected))


def test_a_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name") == Path("org/name")
    assert resolve(tmp_path) == tmp_path


def test_a_download_has_the_same_bytes_and_converts(hub: Hub, files: dict[str, bytes]) -> None:
    lines: list[str] = []
    folder = resolve(MODEL, progress=lines.append)
    assert contents(folder) == files  # and nothing of OTHERS
    assert lines[0] == f"downloading {MODEL}"
    assert from_folder(folder, context_length=16).config.num_hidden_layers == 2


def test_the_second_time_nothing_is_downloaded(hub: Hub) -> None:
    first = resolve(MODEL)
    hub.requests.clear()
    assert resolve(MODEL) == first
    assert not [line for line in hub.requests if line.startswith("GET") and "/resolve/" in line]


@pytest.mark.parametrize("by_commit", [False, True])
def test_a_revision_is_followed(hub: Hub, files: dict[str, bytes], by_commit: bool) -> None:
    older = hub.repositories[MODEL]["refs/pr/1"]
    folder = resolve(f"{MODEL}@{commit_of(older) if by_commit else 'refs/pr/1'}")
    assert contents(folder) == older
    assert contents(resolve(MODEL)) == files


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("./missing", "no such folder, and not a model id"),
        ("/missing/model", "no such folder, and not a model id"),
        ("a/b/c", "no such folder, and not a model id"),
        ("name", "no such folder, and not a model id"),
        ("here/model", "no such folder in here, which exists; to download that model, write here/model@main"),
        ("here/file.txt", "is a file"),
        (Path(MODEL), "no such folder, and not a model id"),
    ],
)
def test_a_path_is_not_taken_for_a_model_id(hub: Hub, source: str | Path, expected: str) -> None:
    Path("here").mkdir()
    Path("here/file.txt").touch()
    with pytest.raises(HubError, match=expected) as caught:
        resolve(source)
    assert str(caught.value).startswith(f"{source}: ")
    assert hub.requests == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("someone/missing", "no such folder here, and {endpoint} has no such model, or it is private"),
        (f"{MODEL}@v9", "{endpoint} has " + MODEL + ", but no revision 'v9' of it"),
        (f"{MODEL}@{'0' * 40}", "no revision '" + "0" * 40 + "'"),
        ("someone/gated", "{endpoint} restricts access to someone/gated; accept its terms"),
        ("someone/pickled", "has no safetensors files"),
        ("someone/empty", "has no safetensors files"),
    ],
)
def test_what_the_hub_refuses_is_one_line(hub: Hub, source: str, expected: str) -> None:
    hub.gated.add("someone/gated")
    hub.repositories["someone/pickled"] = {"main": {"config.json": b"{}", "pytorch_model.bin": b"x"}}
    hub.repositories["someone/empty"] = {"main": {"README.md": b"x"}}
    with pytest.raises(HubError) as caught:
        resolve(source)
    message = str(caught.value)
    assert message.startswith(f"{source}: ")
    assert expected.format(endpoint=hub.endpoint) in message
    assert "\n" not in message


def test_a_hub_in_trouble_is_one_line(hub: Hub) -> None:
    hub.status = 500
    with pytest.raises(HubError, match=f"{MODEL}: {hub.endpoint} answered with status 500"):
        resolve(MODEL)


def test_without_a_network(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    with pytest.raises(
        HubError, match=f"{endpoint} cannot be reached, and the cache does not hold the model"
    ) as caught:
        resolve(MODEL)
    assert "\n" not in str(caught.value)


def test_offline_mode_uses_the_cache_or_says_so(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = resolve(MODEL)
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve(MODEL) == folder
    with pytest.raises(HubError, match="and HF_HUB_OFFLINE forbids a download"):
        resolve("someone/else")
    next(folder.glob("*.safetensors")).unlink()
    with pytest.raises(HubError, match="not whole"):
        resolve(MODEL)
    assert hub.requests == []


def test_a_broken_download_goes_on_later(hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    shard = next(name for name in files if name.endswith(".safetensors"))
    hub.cut.add(shard)
    monkeypatch.setattr(time, "sleep", lambda _: None)  # between huggingface_hub's attempts
    with pytest.raises(HubError, match=r"the download failed .* run the same command again") as caught:
        resolve(MODEL)
    assert "\n" not in str(caught.value)
    cache = Path(constants.HF_HUB_CACHE)
    assert not list(cache.rglob(f"snapshots/*/{shard}"))
    hub.cut.clear()
    assert contents(resolve(MODEL)) == files
    assert not list(cache.rglob("*.incomplete"))


def test_progress_in_megabytes(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "_PROGRESS_SECONDS", 0.0)
    lines: list[str] = []
    resolve(MODEL, progress=lines.append)
    assert any(line.startswith(f"downloading {MODEL}: ") and line.endswith(" MB") for line in lines)


def test_an_interrupt_stops_a_download_at_once_and_the_next_run_completes_it(
    hub: Hub, files: dict[str, bytes], tmp_path: Path
) -> None:
    """In a process of its own, which also shows that huggingface_hub's environment variables are obeyed."""
    shard = next(name for name in files if name.endswith(".safetensors"))
    hub.slow.add(shard)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    # Small pieces, as the files are small here.
    code = (
        "import sys; from huggingface_hub import constants; constants.DOWNLOAD_CHUNK_SIZE = 64\n"
        "from ane_layers.hub import resolve; print(resolve(sys.argv[1]))"
    )
    command = [sys.executable, "-c", code, MODEL]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    deadline = time.monotonic() + 60
    while not any(f"GET /{MODEL}/resolve" in line and shard in line for line in hub.requests):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=15)  # the file itself would take 30 s
    assert errors.strip().endswith("KeyboardInterrupt")
    assert not list((tmp_path / "home").rglob(f"snapshots/*/{shard}"))
    hub.slow.clear()
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=True)
    folder = Path(result.stdout.strip())
    assert folder.is_relative_to(tmp_path / "home")
    assert contents(folder) == files
    assert not list(folder.parents[2].rglob("*.incomplete"))
