"""A Hugging Face folder, read as checked tensors by name.

Whatever can be wrong with a folder (a cut-off download, an index that points nowhere, a name that the model does not
know, a NaN) stops here with one line. Further on, a wrong weight would only show as bad text.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PureWindowsPath
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
LM_HEAD = "lm_head.weight"
NOTHING_TIED: Mapping[str, str] = MappingProxyType({})
Shape = tuple[int, ...]

# safetensors' codes. Integers and 8-bit floats are quantized weights, whose scales follow no common convention.
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# Old transformers versions saved the rotary frequencies, which follow from the config. Nothing else is ignored.
IGNORED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")

# A wrong size in config.json changes the shape of nearly every tensor: the first few tell what is wrong.
SHOWN_SHAPES, SHOWN_NAMES = 2, 4

# Elements looked at in one go where a comparison needs a widened copy (16 MiB in fp32).
CHUNK = 1 << 22


class CheckpointError(ValueError):
    """A folder that cannot be used as a checkpoint. The message is one line: file, field, value and what to do."""


class _Entry(NamedTuple):
    file: Path
    shape: Shape
    dtype: torch.dtype


class Checkpoint(Mapping[str, Tensor]):
    """The tensors of a Hugging Face folder by name, in their stored dtype (fp32, fp16 or bf16); `open` makes one.

    A tensor is mapped from its file and checked for NaN and infinity when it is asked for. A change in place never
    reaches the file, but later reads see it: clone a tensor before changing it.

    Attributes:
        folder: the folder.
        config: `config.json` as parsed.
        ignored: stored names that are no weights and are left out (`rotary_emb.inv_freq` of old files, nothing else).
    """

    def __init__(self, folder: Path, config: dict[str, Any], handles: dict[Path, Any], placed: dict[str, Path]) -> None:
        self.folder, self.config, self._handles = folder, config, handles
        self.ignored = tuple(name for name in placed if IGNORED.search(name))
        kept = {name: path for name, path in placed.items() if name not in self.ignored}
        self._entries = {name: _entry(name, path, handles[path]) for name, path in kept.items()}
        self._placed = placed
        self._finite: set[str] = set()

    def reopened(self) -> Checkpoint:
        """The same folder opened again: pages of its files that were read count as memory until they and their tensors are let go."""
        return type(self)(self.folder, self.config, {path: _open_file(path) for path in self._handles}, self._placed)

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Reads the config, the index and the headers; no tensor yet.

        With both a `model.safetensors` and an index, the single file is read, with a warning: transformers does so, and
        a folder must not mean one model there and another here. An index that uses `model.safetensors` as one of its
        shards is followed. Shards, and copies of tensors, that the index does not use give a warning.

        Raises:
            CheckpointError: a file or the folder is missing, damaged or in another format, or a dtype is not supported.
        """
        folder = Path(folder)
        if not folder.exists():
            raise CheckpointError(f"{folder}: no such folder (`hf download REPO --local-dir FOLDER` fetches a model)")
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: is a file; give the folder that holds {CONFIG} and the weights")
        if not (folder / CONFIG).is_file():
            raise CheckpointError(f"{folder}: has no {CONFIG}; download it from the model's page into this folder")
        config = _read_json(folder / CONFIG)
        weight_map = _weight_map(folder / INDEX) if (folder / INDEX).is_file() else None
        single = folder / SINGLE
        if single.is_file() and (weight_map is None or SINGLE not in weight_map.values()):
            if weight_map is not None:
                warnings.warn(f"{folder}: {INDEX} is not used, since {SINGLE} is there too; delete one", stacklevel=2)
            handle = _open_file(single)
            return cls(folder, config, {single: handle}, dict.fromkeys(handle.keys(), single))
        if weight_map is None:
            raise CheckpointError(_no_weights(folder))
        placed = {name: folder / shard for name, shard in weight_map.items()}
        handles = _open_shards(folder, placed)
        if unused := sorted(set(folder.glob("*.safetensors")) - set(handles)):
            names = ", ".join(repr(path.name) for path in unused)
            warnings.warn(f"{folder}: {INDEX} does not use {names}; delete what is stale", stacklevel=2)
        return cls(folder, config, handles, placed)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries  # Mapping's own would load the tensor

    def __getitem__(self, name: str) -> Tensor:
        """The tensor as stored.

        Raises:
            KeyError: no such name.
            CheckpointError: it holds NaN or an infinity.
        """
        entry = self._entries[name]
        tensor: Tensor = self._handles[entry.file].get_tensor(name)
        if name not in self._finite:
            for value in _extremes(tensor):
                if not torch.isfinite(value):
                    told = f"{entry.file.name}: {name!r} holds {value.item()}"
                    raise CheckpointError(f"{told}; download or save it again")
            self._finite.add(name)
        return tensor

    def shape(self, name: str) -> Shape:
        return self._entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._entries[name].dtype

    def file(self, name: str) -> Path:
        return self._entries[name].file

    def float16(self, name: str) -> Tensor:
        """The tensor in fp16; raises as `__getitem__` and `to_float16_checked` do."""
        return to_float16_checked(name, self[name], file=self.file(name))

    def check(self, expected: Mapping[str, Shape], *, tied: Mapping[str, str] = NOTHING_TIED) -> dict[str, str]:
        """Compares stored names and shapes with the model's, before any weight is read.

        Args:
            expected: parameter name → shape.
            tied: parameter name → the one whose weights it shares: `{"lm_head.weight": "model.embed_tokens.weight"}`.
                A tied name may be absent. If it is stored with other values, the shared weights win, with a warning.

        Returns:
            Expected name → stored name to read it from; a tied name gives its partner's, so that nothing is held twice.

        Raises:
            CheckpointError: names missing tensors, stored ones that are not expected, and wrong shapes: the first of each, and how many
                more there are.
        """
        shapes = dict(expected) | {name: expected[other] for name, other in tied.items() if other in expected}
        problems = []
        missing = [name for name in {*expected, *tied.values()} if name not in self and name not in tied]
        if LM_HEAD in missing:
            said = json.dumps(self.config.get("tie_word_embeddings", "not set")).strip('"')
            problems.append(f"tie_word_embeddings is {said} in {CONFIG}, and {LM_HEAD} is absent")
            missing.remove(LM_HEAD)
        if missing:
            problems.append(f"missing {_names(missing)}")
        if stray := [name for name in self if name not in shapes and name not in tied]:
            problems.append(f"unknown to this model: {_names(stray)}")
        wrong: dict[tuple[Shape, Shape, str], list[str]] = {}
        for name in self:
            if name in shapes and self.shape(name) != tuple(shapes[name]):
                wrong.setdefault((self.shape(name), tuple(shapes[name]), self.file(name).name), []).append(name)
        for (stored, wanted, file), names in list(wrong.items())[:SHOWN_SHAPES]:
            problems.append(f"{_names(names)} has shape {stored} in {file}, expected {wanted}")
        if rest := list(wrong.values())[SHOWN_SHAPES:]:
            problems.append(f"{sum(map(len, rest))} more tensors have other shapes than expected")
        if problems:
            files = ", ".join(sorted(path.name for path in self._handles))
            raise CheckpointError(f"{self.folder} ({files}): {'; '.join(problems)}")
        for name, other in tied.items():
            if name in self and not _same_values(self[name], self[other]):
                told = f"{self.file(name).name}: {name!r} is tied in {CONFIG} but differs from {other!r}"
                warnings.warn(f"{told}, which is used; tie_word_embeddings: false keeps both", stacklevel=2)
        return {name: tied.get(name, name) for name in expected}


def to_float16_checked(name: str, tensor: Tensor, *, file: Path | None = None) -> Tensor:
    """`tensor` in fp16, of any shape. Raises as `check_float16`."""
    check_float16(name, tensor, file=file)
    return tensor.to(torch.float16)


def check_float16(name: str, tensor: Tensor, *, file: Path | None = None) -> None:
    """Whether fp16 can hold a tensor; no copy of it is made.

    Raises:
        CheckpointError: a value would become infinite, as bf16's 70000 does. The message names file, tensor and value.
    """
    # Rounding keeps the order, so that the two extremes answer for all values.
    for value in _extremes(tensor):
        if torch.isnan(value):
            raise CheckpointError(f"{f'{file.name}: ' if file else ''}{name!r} holds NaN")
        if not torch.isfinite(value.to(torch.float16)):
            told = f"{f'{file.name}: ' if file else ''}{name!r} holds {value.item():g}, beyond fp16's 65504"
            raise CheckpointError(f"{told}; scale it down, or keep it in {tensor.dtype} for a check in fp32")


def _extremes(tensor: Tensor) -> tuple[Tensor, ...]:
    """Least and greatest value in the tensor's dtype, without a copy; NaN if there is one, nothing if empty."""
    return tuple(torch.aminmax(tensor)) if tensor.numel() else ()


def _same_values(a: Tensor, b: Tensor) -> bool:
    chunks = zip(a.flatten().split(CHUNK), b.flatten().split(CHUNK), strict=True)
    return all(bool((x == y).all()) for x, y in chunks)


def _entry(name: str, path: Path, handle: Any) -> _Entry:
    header = handle.get_slice(name)
    if (code := header.get_dtype()) not in DTYPES:
        told = f"{path.name}: {name!r} is stored as {code}, not as float32, float16 or bfloat16"
        raise CheckpointError(f"{told}; use the checkpoint that it was quantized from")
    return _Entry(path, tuple(header.get_shape()), DTYPES[code])


def _open_file(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            pointer = file.read(64).startswith(b"version https://git-lfs")
        if not pointer:
            return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: is not a whole safetensors file ({error}); download it again") from None
    raise CheckpointError(f"{path}: is a git-lfs pointer, not the weights; run `git lfs pull`")


def _open_shards(folder: Path, placed: Mapping[str, Path]) -> dict[Path, Any]:
    shards = dict.fromkeys(placed.values())
    for path in shards:
        if not path.is_file():
            raise CheckpointError(f"{INDEX}: shard {path.name!r} is not in the folder {folder}; download it")
    handles = {path: _open_file(path) for path in shards}
    for path, handle in handles.items():
        stored, wanted = set(handle.keys()), {name for name in placed if placed[name] == path}
        if lacking := wanted - stored:
            told = f"{INDEX}: maps {_names(lacking)} to {path.name!r}, which does not hold it"
            raise CheckpointError(f"{told}; download the index and its shards again")
        if extra := stored - wanted:
            warnings.warn(f"{path}: holds {_names(extra)}, which {INDEX} does not place there", stacklevel=3)
    return handles


def _read_json(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error}); download it again") from None
    if not isinstance(read, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(read).__name__}, not an object; download it again")
    return read


def _weight_map(path: Path) -> dict[str, str]:
    weight_map = _read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map does not give tensor names and their files; download it again")
    for name, shard in weight_map.items():
        # Windows' reading takes both separators and drive letters; an index must not reach outside of its folder.
        if not isinstance(shard, str) or shard in ("", ".", "..") or PureWindowsPath(shard).name != shard:
            raise CheckpointError(f"{path}: weight_map gives {shard!r} for {name!r}, not a plain file name")
    return weight_map


def _no_weights(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    if other := [name for name in names if name.endswith(".safetensors")]:
        return f"{folder}: has {', '.join(map(repr, other))}, but no {SINGLE} and no {INDEX}; download what is missing"
    if pickled := [name for name in names if name.endswith((".bin", ".pt", ".pth"))]:
        how = "`AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)` of transformers"
        return f"{folder}: has {', '.join(map(repr, pickled))} but no safetensors; convert it: {how}"
    return f"{folder}: has no weights, neither {SINGLE} nor {INDEX}; download them"


def _names(names: Iterable[str]) -> str:
    """The first names on one line, and how many tensors more; those that differ in their layer only are one, as in
    `'layers.{0…3,7}.norm.weight'`."""
    grouped: dict[tuple[str, ...], list[str]] = {}
    for name in sorted(names, key=lambda name: (len(name), name)):
        head, *rest = re.split(r"(?<=\.)(\d+)(?=\.)", name, maxsplit=1)
        grouped.setdefault((head, *rest[1:]), []).extend(rest[:1])
    shown = [repr(_numbers(layers).join(parts)) for parts, layers in list(grouped.items())[:SHOWN_NAMES]]
    more = sum(max(1, len(layers)) for layers in list(grouped.values())[SHOWN_NAMES:])
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _numbers(layers: list[str]) -> str:
    """Numbers in rising order, three or more in a row as the first and the last; in braces if there are several."""
    runs: list[list[str]] = []
    for layer in layers:
        if runs and int(layer) == int(runs[-1][-1]) + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    text = ",".join(f"{run[0]}…{run[-1]}" if len(run) > 2 else ",".join(run) for run in runs)
    return f"{{{text}}}" if len(layers) > 1 else text
