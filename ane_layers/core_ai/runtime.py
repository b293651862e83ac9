"""Executes an asset with the runtime that comes with `coreai-core`: on Linux Apple's runtime for the CPU, on a Mac the system's."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from ane_layers.chunks import CONFIG_KEY, NEW_ROWS
from ane_layers.core_ai.packages import quiet, require
from ane_layers.layers import causal_mask, sliding_mask


class CoreAIProgram:
    """An asset, loaded. Close it, or use it in a `with` statement: it holds a compiled copy in the system's temporary folder.

    Args:
        path: of an `.aimodel`.

    Attributes:
        metadata: what `export` noted; empty for other assets.
        functions: names.

    Raises:
        ValueError: if it is no asset, or without Core AI's Python packages.
    """

    def __init__(self, path: str | Path) -> None:
        asset_class = require("coreai.authoring").AIModelAsset
        self._array: Any = require("coreai.runtime").NDArray
        if not asset_class.is_valid(Path(path)):
            raise ValueError(f"{path}: is not a Core AI asset")
        self._loop = asyncio.new_event_loop()
        self._exit = contextlib.AsyncExitStack()
        asset = asset_class.load(Path(path))
        self.metadata: dict[str, Any] = json.loads(asset.metadata.creator_defined_metadata.get(CONFIG_KEY, "{}"))
        with quiet():
            model = self._loop.run_until_complete(self._exit.enter_async_context(asset.executable()))
            self._functions = {name: model.load_function(name) for name in model.function_names}
        self.functions = tuple(self._functions)

    def shape(self, function: str, name: str) -> tuple[int, ...]:
        """Of an input."""
        return tuple(self._functions[function].desc.input_descriptor(name).shape)

    def inputs(self, function: str) -> tuple[str, ...]:
        """Their names, in order."""
        return tuple(self._functions[function].desc.input_names)

    def predict(self, function: str, data: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Runs a function on arrays by input, and gives arrays by output.

        Raises:
            ValueError: naming the function or input that is missing, or an array of the wrong shape.
        """
        if function not in self._functions:
            raise ValueError(f"function must be one of {', '.join(self.functions)}, got {function!r}")
        for name in self.inputs(function):
            if name not in data:
                raise ValueError(f"{function}: input {name} is missing")
            if data[name].shape != self.shape(function, name):
                shapes = f"{list(self.shape(function, name))}, got {list(data[name].shape)}"
                raise ValueError(f"{function}: input {name} must be of shape {shapes}")
        arrays = {name: self._array(np.ascontiguousarray(data[name])) for name in self.inputs(function)}
        results = self._loop.run_until_complete(self._functions[function](arrays))
        # Copies: the runtime's buffers may go with its result.
        return {name: np.array(value.numpy()) for name, value in results.items()}

    def close(self) -> None:
        """Unloads it; a second time changes nothing."""
        if not self._loop.is_closed():
            self._functions.clear()
            self._loop.run_until_complete(self._exit.aclose())
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class CoreAISession:
    """A conversation with an asset that `export` wrote: its caches, and what stands in them.

    Args:
        program: loaded.

    Raises:
        ValueError: if the asset was not written by this library.
    """

    def __init__(self, program: CoreAIProgram) -> None:
        if not program.metadata:
            raise ValueError("the asset has no metadata of ane_layers")
        self.program = program
        self.config: dict[str, Any] = program.metadata
        self.context_length = int(self.config["context_length"])
        self.position = 0
        names = [name for name in program.inputs("decode") if name in NEW_ROWS]
        self._caches = {name: np.zeros(program.shape("decode", name), np.float32) for name in names}

    def extend(self, tokens: Sequence[int], *, function: str = "decode") -> np.ndarray:
        """Runs further tokens with one function, whose length must divide their number.

        Shape:
            - output: logits `[n, V]`: of every token, or of the last one of each call

        Raises:
            ValueError: if the tokens do not fit the function or the context.
        """
        plan = self.config["functions"][function]
        length = int(plan["length"])
        if not tokens or len(tokens) % length:
            raise ValueError(f"{function} takes a multiple of {length} tokens, got {len(tokens)}")
        if self.position + len(tokens) > int(plan["slots"]):
            raise ValueError(f"{len(tokens)} tokens at position {self.position} exceed {plan['slots']} slots")
        rows = [
            self._call(function, tokens[first : first + length], int(plan["slots"]))
            for first in range(0, len(tokens), length)
        ]
        return np.concatenate(rows)

    def _call(self, function: str, tokens: Sequence[int], slots: int) -> np.ndarray:
        length, rolling = len(tokens), int(self.config["sliding_slots"])
        if rolling and self.position % rolling + length > rolling:
            raise ValueError(f"{length} tokens at position {self.position} straddle the end of the rolling cache")
        known: dict[str, torch.Tensor] = {"causalMask": causal_mask(self.position, length, slots, two_parts=True)}
        if rolling:
            window = self.config["model"]["sliding_window"]
            known["slidingMask"] = sliding_mask(self.position, length, window=window, slots=rolling, two_parts=True)
        data = {name: mask.numpy() for name, mask in known.items()} | self._caches
        data["inputIds"] = np.asarray([tokens], np.int32)
        data["position"] = np.asarray([self.position], np.int32)
        outputs = self.program.predict(function, data)
        for name, cache in self._caches.items():
            slot = self.position % rolling if name.startswith("sliding") else self.position
            cache[:, :, slot : slot + length] = outputs[NEW_ROWS[name]]
        self.position += length
        return outputs["logits"][0]
