"""Runs a model over whole windows of tokens, from its beginning or from any layer on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ane_layers.compression.units import units
from ane_layers.models.base import CausalLM

BATCH_TOKENS = 512
"""Tokens that run at a time: enough to keep a processor's matrix products busy, few enough that their logits fit in memory."""


def run_windows(model: CausalLM, tokens: Tensor) -> Tensor:
    """Logits of windows that begin at position 0.

    Shape:
        - tokens: int `[n, S]`
        - output: `[n, S, V]`

    Raises:
        ValueError: if the weights are not fp32.
    """
    types = {parameter.dtype for parameter in model.parameters()} - {torch.float32}
    if types:
        raise ValueError(f"dtype of the weights is {types.pop()}; load with dtype=torch.float32 to run them")
    with model.without_cache():
        logits: Tensor = model(tokens, torch.zeros(1, dtype=torch.int32), *model.whole_masks(tokens.shape[1]))
    return logits


def batches(tokens: Tensor) -> Sequence[Tensor]:
    """The windows, as many at a time as `BATCH_TOKENS` holds, at least one."""
    found: Sequence[Tensor] = tokens.split(max(1, BATCH_TOKENS // tokens.shape[1]))
    return found


@contextlib.contextmanager
def replaced(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Puts other values in place of parameters, by path; the parameters themselves come back on every exit."""
    owners = {path: model.get_submodule(path.rpartition(".")[0]) for path in weights}
    originals = {path: model.get_parameter(path) for path in weights}
    try:
        for path, value in weights.items():
            setattr(owners[path], path.rpartition(".")[2], nn.Parameter(value, requires_grad=False))
        yield
    finally:
        for path, original in originals.items():
            setattr(owners[path], path.rpartition(".")[2], original)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that `Unit.layer` counts.

    Raises:
        ValueError: if there are none, or layers of several lists.
    """
    inside = {unit.name: unit.layer for unit in units(model) if unit.layer is not None}
    lists = {name.split(f".{layer}.", 1)[0] for name, layer in inside.items()}
    if len(lists) != 1:
        raise ValueError(f"the model must have one list of layers with weights, found {sorted(lists) or 'none'}")
    return list(model.get_submodule(lists.pop()).children())


@dataclass(eq=False)
class Call:
    """How a layer was called: `layer(x, *args, **kwargs)`."""

    x: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _ReachedError(Exception):
    """Ends a forward pass that has been followed far enough."""


class Replay:
    """A model and what entered each of its layers, so that a change in a late layer costs only what comes after it.

    It goes by the order in which layers are called, and knows no family: each layer takes the hidden states first and returns them.

    Args:
        model: fp32.
        tokens: windows, each beginning at position 0.

    Shape:
        - tokens: int `[n, S]`

    Attributes:
        layers: the decoder layers.
        batches: the windows, some at a time (see `batches`).
        calls: of each batch, how each layer was called.
        last: of each batch, what the last layer returned, `[b, C, 1, S]`.
        logits: of each batch, `[b, S, V]`.
    """

    def __init__(self, model: CausalLM, tokens: Tensor) -> None:
        self.model = model
        self.layers = decoder_layers(model)
        self.batches = batches(tokens)
        self.calls: list[list[Call]] = []
        self.last: list[Tensor] = []
        self.logits: list[Tensor] = []
        with torch.no_grad():
            for batch in self.batches:
                self._record(batch)

    def _record(self, batch: Tensor) -> None:
        calls: list[Call] = []
        results: list[Tensor] = []
        hooks = [
            layer.register_forward_pre_hook(
                lambda module, args, kwargs: calls.append(Call(args[0], args[1:], kwargs)), with_kwargs=True
            )
            for layer in self.layers
        ]
        hooks.append(self.layers[-1].register_forward_hook(lambda module, args, result: results.append(result)))
        try:
            self.logits.append(run_windows(self.model, batch))
        finally:
            for hook in hooks:
                hook.remove()
        self.calls.append(calls)
        self.last.append(results[0])

    def run(self, batch: int, start: int = 0, x: Tensor | None = None) -> Tensor:
        """Logits of a batch, computed from layer `start` on; the number of layers means from what follows the last.

        Args:
            batch: its number.
            start: the first layer that runs.
            x: what enters it, in place of what was recorded.

        Shape:
            - x: `[b, C, 1, S]`
            - output: `[b, S, V]`
        """
        if x is None:
            x = self.last[batch] if start == len(self.layers) else self.calls[batch][start].x
        skipped = self.layers[:start]
        for layer in skipped:
            layer.__dict__["forward"] = lambda *args, **kwargs: x
        try:
            return run_windows(self.model, self.batches[batch])
        finally:
            for layer in skipped:
                del layer.__dict__["forward"]

    def run_layer(self, batch: int, layer: int, x: Tensor) -> Tensor:
        """What one layer makes of `x`, called as it was."""
        call = self.calls[batch][layer]
        result: Tensor = self.layers[layer](x, *call.args, **call.kwargs)
        return result

    def embedded(self, batch: int) -> Tensor:
        """What enters the first layer."""
        reached: list[Tensor] = []

        def stop(module: nn.Module, args: tuple[Any, ...]) -> None:
            reached.append(args[0])
            raise _ReachedError

        hook = self.layers[0].register_forward_pre_hook(stop)
        try:
            with contextlib.suppress(_ReachedError):
                run_windows(self.model, self.batches[batch])
        finally:
            hook.remove()
        return reached[0]
