"""Traces a module with its large weights as inputs, and converts the trace."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ane_layers.conversion.errors import ConversionError
from ane_layers.conversion.quiet import quiet_coremltools
from ane_layers.layers import Embedding, Linear

# The modules whose weights are bound late. Only ours: for others, passes that fold a constant weight with its neighbours must be able to
# fire as they do in a stock conversion.
_LATE_BOUND = (Linear, Embedding)


@dataclass(frozen=True, kw_only=True)
class FunctionSpec:
    """One function of a package.

    Args:
        inputs: Core ML's name of each input, in the order of `forward`'s arguments, with an example of its shape and type. Floating-point
            inputs become fp16, integers int32.
        outputs: names of what `forward` returns, in order. Floating-point outputs become fp16.
        arguments: further keyword arguments of `forward`, fixed for this function.
    """

    inputs: Mapping[str, Tensor]
    outputs: tuple[str, ...] = ("output",)
    arguments: Mapping[str, Any] = field(default_factory=dict)


def late_bound_weights(module: nn.Module) -> dict[str, Tensor]:
    """The weights that are left out while tracing, by the name of the constant that they become."""
    weights: dict[str, Tensor] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, _LATE_BOUND):
            weights[f"{path}.weight" if path else "weight"] = part.weight
    return weights


def constant_name(path: str) -> str:
    """A parameter's path as a name in the program: `model.layers.0.mlp.down_proj.weight` → `model_layers_0_mlp_down_proj_weight`."""
    return re.sub(r"\W", "_", path)


class _Traceable(nn.Module):
    """Takes weights and inputs, and calls the module with the weights in their places."""

    def __init__(self, module: nn.Module, weights: list[str], arguments: Mapping[str, Any]) -> None:
        super().__init__()
        self.module = module
        self._weights = weights
        self._arguments = dict(arguments)

    def forward(self, *values: Tensor) -> Any:
        count = len(self._weights)
        for path, value in zip(self._weights, values[:count], strict=True):
            owner, _, name = path.rpartition(".")
            self.module.get_submodule(owner).__dict__[name] = value
        return self.module(*values[count:], **self._arguments)


@contextlib.contextmanager
def _prepared(
    module: nn.Module, states: Mapping[str, str], weights: list[str], traceable: _Traceable
) -> Iterator[None]:
    """Moves what tracing must see elsewhere, and puts everything back.

    Late-bound weights leave their modules; other parameters and buffers are seen in fp32, which the converter's front end wants; states
    become buffers of the outermost module under Core ML's names, since the converter looks them up there.
    """
    saved = [(part, dict(part._parameters), dict(part._buffers)) for part in module.modules()]
    training = module.training
    try:
        module.eval()
        traceable.eval()
        for name, path in states.items():
            owner, _, leaf = path.rpartition(".")
            part = module.get_submodule(owner)
            buffer = part._buffers.pop(leaf)
            assert buffer is not None
            buffer = buffer.float()
            part.__dict__[leaf] = buffer
            traceable.register_buffer(name, buffer)
        late = set(weights)
        for path, part in module.named_modules(remove_duplicate=False):
            for leaf, parameter in list(part._parameters.items()):
                if (f"{path}.{leaf}" if path else leaf) in late:
                    del part._parameters[leaf]
                elif parameter is not None and parameter.is_floating_point():
                    part._parameters[leaf] = nn.Parameter(parameter.float(), requires_grad=False)
            for leaf, buffer in list(part._buffers.items()):
                if buffer is not None and buffer.is_floating_point():
                    part._buffers[leaf] = buffer.float()
        yield
    finally:
        for part, parameters, buffers in saved:
            for leaf in (*parameters, *buffers):
                part.__dict__.pop(leaf, None)
            part._parameters.clear()
            part._parameters.update(parameters)
            part._buffers.clear()
            part._buffers.update(buffers)
        module.train(training)


def converted(module: nn.Module, spec: FunctionSpec, states: Mapping[str, str]) -> Any:
    """The coremltools model of one function, its late-bound weights still inputs.

    Raises:
        ConversionError: if the module cannot be traced or converted.
    """
    with quiet_coremltools():
        import coremltools as ct

        from ane_layers.conversion.passes import pipeline

    late = late_bound_weights(module)
    shapes = {path: tuple(weight.shape) for path, weight in late.items()}
    # One zero, viewed in every shape: a placeholder costs nothing however large its weight.
    placeholders = [torch.zeros(()).expand(shape) for shape in shapes.values()]
    examples = [value.float() if value.is_floating_point() else value.int() for value in spec.inputs.values()]
    state_types = [
        ct.StateType(
            wrapped_type=ct.TensorType(shape=tuple(module.get_buffer(path).shape), dtype=np.float16), name=name
        )
        for name, path in states.items()
    ]
    traceable = _Traceable(module, list(shapes), spec.arguments)
    with _prepared(module, states, list(shapes), traceable), quiet_coremltools():
        versions = {name: buffer._version for name, buffer in traceable.named_buffers()}
        try:
            with torch.no_grad():
                traced = torch.jit.trace(traceable, (*placeholders, *examples), check_trace=False)
        except Exception as error:
            raise ConversionError(f"tracing {type(module).__name__} failed: {error}") from error
        _check_changed_buffers(traceable, versions, states)
        inputs = [
            ct.TensorType(name=constant_name(path), shape=shape, dtype=np.float16) for path, shape in shapes.items()
        ]
        for (name, value), example in zip(spec.inputs.items(), examples, strict=True):
            dtype = np.float16 if value.is_floating_point() else np.int32
            inputs.append(ct.TensorType(name=name, shape=tuple(example.shape), dtype=dtype))
        try:
            return ct.convert(
                traced,
                inputs=inputs,
                outputs=[ct.TensorType(name=name) for name in spec.outputs],
                states=state_types,
                minimum_deployment_target=ct.target.iOS18,
                pass_pipeline=pipeline(),
                skip_model_load=True,
            )
        except Exception as error:
            raise ConversionError(f"converting {type(module).__name__} failed: {error}") from error


def _check_changed_buffers(traceable: nn.Module, versions: Mapping[str, int], states: Mapping[str, str]) -> None:
    """Refuses a buffer that `forward` changes and that is no state: converted, it would be a constant, and the change forgotten."""
    for name, buffer in traceable.named_buffers():
        if name not in states and buffer._version != versions[name]:
            path = name.removeprefix("module.")
            raise ConversionError(
                f"forward changes buffer {path}, which is not among the states: its contents would be lost between calls "
                f"(coremltools issue 1726); pass states={{'{path.rpartition('.')[2]}': '{path}'}}"
            )
