"""Runs tokens through a package: prefill in blocks, then decode, over one state."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from ane_layers.interpreter import MLProgram
from ane_layers.layers.masks import causal_mask
from ane_layers.program import Package

CONFIG_KEY = "ane_layers.config"
Mode = Literal["fp32", "fp16"]


class Runtime(Protocol):
    """What a session needs of a program; coremltools' `MLModel` has it too."""

    def predict(self, data: dict[str, np.ndarray], state: Any = None) -> dict[str, np.ndarray]: ...

    def make_state(self) -> Any: ...


@dataclass(frozen=True)
class Logits:
    """Logits that a call returned: `values` `[n, V]` belong to the positions `first … first + n - 1`."""

    first: int
    values: np.ndarray


class Session:
    """A conversation with a package that `CausalLM.convert` wrote.

    Args:
        path: of the package.
        mode: arithmetic of the interpreter, `"fp32"` or `"fp16"`.
        runtime: makes the program of one function; the interpreter unless another is given, such as
            `lambda path, name: coremltools.models.MLModel(path, function_name=name)` on a Mac.

    Raises:
        ValueError: if the package was not written by this library.
    """

    def __init__(
        self, path: str | Path, *, mode: Mode = "fp32", runtime: Callable[[str, str], Runtime] | None = None
    ) -> None:
        package = Package.open(path)
        self.config = read_metadata(package)
        self.context_length: int = self.config["context_length"]
        self.block: int = self.config["prefill"]
        make = runtime or (lambda file, name: MLProgram(file, function_name=name, mode=mode))
        self._decode = make(str(path), "decode")
        self._prefill = make(str(path), "prefill")
        self.reset()

    def reset(self) -> None:
        """Forgets the conversation."""
        self.position = 0
        self._state = self._decode.make_state()

    def extend(self, tokens: Sequence[int], *, prefill: bool = True) -> list[Logits]:
        """Runs further tokens; as many as fill whole blocks through `prefill`, the others through `decode`.

        Args:
            tokens: ids, at least one.
            prefill: whether blocks are used at all.

        Returns:
            What the calls returned, in order: with every call at least the logits after its last token.

        Raises:
            ValueError: if the tokens do not fit the context, before anything is run; the cache stays as it was.
        """
        if not tokens:
            raise ValueError("extend needs at least one token")
        if self.position + len(tokens) > self.context_length:
            raise ValueError(
                f"{len(tokens)} tokens at position {self.position} exceed the context of {self.context_length} slots"
            )
        vocabulary = self.config["model"]["vocab_size"]
        for token in tokens:
            if not 0 <= token < vocabulary:
                raise ValueError(f"token {token} is outside the vocabulary 0 … {vocabulary - 1}")
        results = []
        start = 0
        while start < len(tokens):
            whole = prefill and len(tokens) - start >= self.block
            length = self.block if whole else 1
            results.append(self._call(self._prefill if whole else self._decode, tokens[start : start + length]))
            start += length
        return results

    def _call(self, program: Runtime, tokens: Sequence[int]) -> Logits:
        mask = causal_mask(self.position, len(tokens), self.context_length).numpy().astype(np.float16)
        inputs: dict[str, np.ndarray] = {
            "inputIds": np.asarray([tokens], dtype=np.int32),
            "position": np.asarray([self.position], dtype=np.int32),
            "causalMask": mask,
        }
        logits = program.predict(inputs, state=self._state)["logits"][0]  # [S or 1, V]
        self.position += len(tokens)
        return Logits(self.position - len(logits), logits)


def read_metadata(package: Package) -> dict[str, Any]:
    """What `CausalLM.convert` noted in the package: model config, context, block, modes.

    Raises:
        ValueError: if it is not there or damaged.
    """
    text = package.metadata.get(CONFIG_KEY)
    if text is None:
        raise ValueError(f"{package.path}: has no metadata {CONFIG_KEY}; was it written by ane_layers?")
    try:
        config: dict[str, Any] = json.loads(text)
        _ = config["context_length"], config["prefill"], config["model"]["vocab_size"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{package.path}: metadata {CONFIG_KEY} is damaged: {error}") from error
    return config
