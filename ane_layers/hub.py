"""Where a model comes from: a folder that is there, or a model id that is downloaded into huggingface_hub's cache."""

from __future__ import annotations

import io
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

# What converting and generating read. `*` matches `/` too in these patterns.
ALLOWED = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "*.tiktoken", "merges.txt", "vocab.txt"]
# Subfolders hold other formats of the same weights (onnx, original), and so do consolidated files: gigabytes that nothing reads.
IGNORED = ["*/*", "consolidated*"]

_NAME = r"[A-Za-z0-9](?:[\w.-]{0,94}[A-Za-z0-9_])?"
_MODEL_ID = re.compile(rf"(?P<name>{_NAME}/{_NAME})(?:@(?P<revision>\w[\w./-]*\w|\w))?", re.ASCII)
# Endings that are never a model's on the Hub: whoever writes them means a file of theirs.
_FILES = (".git", ".json", ".mlmodel", ".mlpackage", ".safetensors")
_PROGRESS_SECONDS = 5.0


class HubError(ValueError):
    """The source is neither a folder nor a model that can be downloaded. The message is one line."""


class ModelId(NamedTuple):
    """A model on the Hub: `name` is `org/name`; `revision` is a branch, a tag, a commit or None for the default branch."""

    name: str
    revision: str | None


def resolve(source: str | Path, *, progress: Callable[[str], None] | None = None) -> Path:
    """The folder of a model, downloaded first if `source` is a model id.

    A download goes to huggingface_hub's cache and obeys its settings (`HF_HOME`, `HF_ENDPOINT`, `HF_TOKEN`, `HF_HUB_OFFLINE`). An
    interrupted one leaves no file there that looks whole; the next call goes on with it.

    Args:
        source: an existing folder, returned as it is, or `org/name[@revision]`. A `Path` always means a folder, and so does text that
            can be no model id (`./x`, `/x/y`, `a/b/c`) or whose parent folder exists; a revision makes it an id nevertheless.
        progress: called with a line of text at each step; from another thread while files come in.

    Raises:
        HubError: naming `source`, what is wrong, and what to do.
    """
    path = Path(source)
    if path.is_dir():
        return path
    if path.exists():
        raise HubError(f"{source}: is a file; give the folder that holds it")
    wanted = parse_model_id(source) if isinstance(source, str) else None
    if wanted is None:
        raise HubError(
            f"{source}: no such folder, and not a model id, which has the form org/name or org/name@revision"
        )
    if wanted.revision is None and path.parent.is_dir():
        raise HubError(
            f"{source}: no such folder in {path.parent}, which exists; to download that model, write {source}@main"
        )
    say = progress or (lambda line: None)
    say(f"downloading {source}")
    folder = _downloaded(str(source), wanted, say)
    if not any(folder.glob("*.safetensors")):
        how = "save it as such with save_pretrained of transformers, or name a revision that has them"
        raise HubError(f"{source}: has no safetensors files (they are missing from {folder}); {how}")
    return folder


def parse_model_id(source: str) -> ModelId | None:
    """`org/name[@revision]` in its parts; None if the text is no model id."""
    match = _MODEL_ID.fullmatch(source)
    if match is None or ".." in source or "--" in match["name"] or match["name"].endswith(_FILES):
        return None
    return ModelId(match["name"], match["revision"])


def _downloaded(source: str, wanted: ModelId, say: Callable[[str], None]) -> Path:
    from huggingface_hub import snapshot_download

    stop = threading.Event()
    # huggingface_hub waits for its running files before it lets an interrupt through, and they may be gigabytes. From a thread of its
    # own it can be told to stop, which it does when the next piece arrives.
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(
            snapshot_download,
            wanted.name,
            revision=wanted.revision,
            allow_patterns=ALLOWED,
            ignore_patterns=IGNORED,
            tqdm_class=_progress_bar(source, say, stop),
        )
        try:
            return Path(future.result())
        except Exception as error:
            raise HubError(f"{source}: {_explained(wanted, error)}") from error
        finally:
            stop.set()


def _explained(wanted: ModelId, error: Exception) -> str:
    """What went wrong, for a reader who knows neither this library nor huggingface_hub."""
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    if isinstance(error, errors.GatedRepoError):
        return f"{hub} restricts access to {wanted.name}; accept its terms on its page, then run `hf auth login`"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"no such folder here, and {hub} has no such model, or it is private (`hf auth login`)"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{hub} has {wanted.name}, but no revision {wanted.revision or 'main'!r} of it"
    if isinstance(error, errors.LocalEntryNotFoundError):
        if constants.HF_HUB_OFFLINE:
            return f"not (or not whole) in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE forbids a download; unset it"
        reason = error.__cause__ or error
        if not isinstance(reason, errors.HfHubHTTPError):
            return f"{hub} cannot be reached, and the cache does not hold the model; is there a network? ({_short(reason)})"
        error = reason
    if isinstance(error, errors.HfHubHTTPError) and (response := getattr(error, "response", None)) is not None:
        return f"{hub} answered with status {response.status_code}; try again later"
    return f"the download failed ({_short(error)}); run the same command again, it goes on where it stopped"


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}{'…' if len(text) > 200 else ''}" if text else type(error).__name__


def _progress_bar(source: str, say: Callable[[str], None], stop: threading.Event) -> type[Any]:
    """A bar for huggingface_hub that writes lines to `say` in place of drawing, and stops the download at `stop`."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    spoken = time.monotonic()

    class Lines(tqdm):
        monitor_interval = 0  # no thread that redraws

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **(options | {"file": io.StringIO(), "disable": False}))

        def update(self, n: float | None = 1) -> Any:
            if stop.is_set():
                raise InterruptedError("stopped")
            return super().update(n)

        def display(self, *_: Any, **__: Any) -> None:
            nonlocal spoken
            now = time.monotonic()
            if self.unit == "B" and self.total and now - spoken >= _PROGRESS_SECONDS:
                spoken = now
                say(f"downloading {source}: {self.n / 1e6:,.0f} of {self.total / 1e6:,.0f} MB")

    return Lines
