"""The packages of a model: one, or several chunks that hand hidden states over to each other."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ane_layers.program import Package

if TYPE_CHECKING:
    from ane_layers.models.graph import Head

CONFIG_KEY = "ane_layers.config"
HIDDEN_STATES = "hiddenStates"
NEW_HIDDEN_STATES = "newHiddenStates"
"""What a chunk hands over, if it takes hidden states too: a function cannot give an output the name of an input."""

NEW_ROWS = {
    "keyCache": "newKeys",
    "valueCache": "newValues",
    "slidingKeyCache": "newSlidingKeys",
    "slidingValueCache": "newSlidingValues",
}
"""Outputs of a read-only function with the rows that belong into each cache."""


@dataclass(frozen=True, kw_only=True)
class FunctionPlan:
    """One function of a package, as its metadata tells a runner.

    Attributes:
        length: S, tokens that a call takes.
        slots: T, of the full-attention cache that it reads, from the first on.
        last_only: whether it gives the last position's result alone.
        head: what it gives.
    """

    length: int
    slots: int
    last_only: bool
    head: Head


class Runtime(Protocol):
    """What a session needs of a program; coremltools' `MLModel` has it too."""

    def predict(self, data: dict[str, np.ndarray], state: Any = None) -> dict[str, np.ndarray]: ...

    def make_state(self) -> Any: ...


def is_package(path: str | Path) -> bool:
    """Whether a path is a package, or by its name should be one."""
    return Path(path).suffix == ".mlpackage" or (Path(path) / "Manifest.json").is_file()


def is_chunked(path: str | Path) -> bool:
    """Whether a path is a folder of chunks."""
    return not is_package(path) and any(Path(path).glob("*.mlpackage"))


def open_packages(path: str | Path) -> list[Package]:
    """A package that `CausalLM.convert` wrote, or the chunks in a folder, in their order.

    Raises:
        ValueError: if it is neither, a chunk is missing, or the folder holds chunks of two models.
    """
    if not is_chunked(path):
        package = Package.open(path)
        config = read_metadata(package)
        if config.get("chunks", 1) > 1:
            raise ValueError(
                f"{path}: is chunk {config['chunk']} of {config['chunks']}; give the folder that holds all of them"
            )
        return [package]
    found: dict[int, Package] = {}
    for file in sorted(Path(path).glob("*.mlpackage")):
        package = Package.open(file)
        number = read_metadata(package).get("chunk", 0)
        if number in found:
            raise ValueError(f"{path}: {found[number].path.name} and {file.name} are both chunk {number}")
        found[number] = package
    packages = [found[number] for number in sorted(found)]
    configs = [read_metadata(package) for package in packages]
    count = configs[0].get("chunks", 1)
    if missing := [number for number in range(count) if number not in found]:
        raise ValueError(f"{path}: chunk {missing[0]} of {count} is missing")
    for package, config in zip(packages, configs, strict=True):
        for field in ("model", "context_length", "functions", "kv", "chunks"):
            if config[field] != configs[0][field]:
                raise ValueError(f"{package.path}: field {field} is not that of {packages[0].path.name}")
    return packages


def read_metadata(package: Package) -> dict[str, Any]:
    """What `CausalLM.convert` noted in the package: model config, context, functions, modes.

    Raises:
        ValueError: if it is not there or damaged.
    """
    text = package.metadata.get(CONFIG_KEY)
    if text is None:
        raise ValueError(f"{package.path}: has no metadata {CONFIG_KEY}; was it written by ane_layers?")
    try:
        config: dict[str, Any] = json.loads(text)
        slots, block, _ = config["context_length"], config["prefill"], config["model"]["vocab_size"]
        if "functions" not in config:  # written by version 0.1.0
            decode = {"length": 1, "slots": slots, "last_only": False, "head": "logits"}
            more = {"length": block, "last_only": not config.get("all_logits", False)}
            config["functions"] = {"decode": decode, "prefill": decode | more}
        for plan in config["functions"].values():
            FunctionPlan(**plan)
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{package.path}: metadata {CONFIG_KEY} is damaged: {error}") from error
    return config


class Chunk:
    """A package that is run: its programs, made when they are first needed, and its caches.

    Args:
        package: written by `CausalLM.convert`.
        runtime: makes the program of one function from path and name.

    Attributes:
        state: of the runtime; None for a package without states.
        programs: those made so far, by function.
        keeps_nothing: whether there is neither a state nor a cache, as for a head on its own.
    """

    def __init__(self, package: Package, runtime: Callable[[str, str], Runtime]) -> None:
        self._path = str(package.path)
        self._runtime = runtime
        functions = {name: package.function(name) for name in package.functions}
        self._inputs = {name: {value.name: value for value in function.inputs} for name, function in functions.items()}
        self._stateful = any(function.states for function in functions.values())
        self.programs: dict[str, Runtime] = {}
        caches = any(name in NEW_ROWS for inputs in self._inputs.values() for name in inputs)
        self.keeps_nothing = not self._stateful and not caches
        self.program("decode")  # what cannot be loaded is told now
        self.reset()

    def takes(self, function: str, name: str) -> bool:
        """Whether a function has an input."""
        return name in self._inputs[function]

    def program(self, name: str) -> Runtime:
        if name not in self.programs:
            self.programs[name] = self._runtime(self._path, name)
        return self.programs[name]

    def reset(self) -> None:
        """Empties the caches."""
        self.state = self.program("decode").make_state() if self._stateful else None
        self._caches = {
            name: np.zeros([size or 0 for size in value.tensor_type.shape], np.float16)
            for name, value in self._inputs["decode"].items()
            if name in NEW_ROWS
        }

    def call(
        self, function: str, known: Mapping[str, np.ndarray], *, count: int, slot: int, sliding_slot: int
    ) -> dict[str, np.ndarray]:
        """Runs a function; new rows of caches that are inputs are put into them.

        Args:
            function: its name.
            known: arrays by input; more than the function takes.
            count: of new tokens, from the first on; what follows is padding.
            slot, sliding_slot: of the first token in each cache.

        Returns:
            Arrays by output; hidden states as the next chunk's input.
        """
        inputs = {name: self._caches[name] if name in self._caches else known[name] for name in self._inputs[function]}
        outputs = self.program(function).predict(inputs, state=self.state)
        for name, cache in list(self._caches.items()):
            rows = outputs[NEW_ROWS[name]]
            if cache.dtype != rows.dtype:  # the interpreter's fp32 mode does not round them
                cache = self._caches[name] = cache.astype(rows.dtype)
            first = sliding_slot if name.startswith("sliding") else slot
            cache[:, :, first : first + count] = rows[:, :, :count]
        if NEW_HIDDEN_STATES in outputs:
            outputs[HIDDEN_STATES] = outputs.pop(NEW_HIDDEN_STATES)
        return outputs
