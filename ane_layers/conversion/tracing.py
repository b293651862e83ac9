"""Traces a module with its large weights as inputs, and converts the trace."""

from __future__ import annotations

import contextlib
import inspect
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ane_layers.conversion.errors import ConversionError
from ane_layers.conversion.python_values import refuse_read_values
from ane_layers.conversion.quiet import converted_once, quiet_coremltools
from ane_layers.layers import Embedding, Linear

# The modules whose weights are bound late. Only ours: for others, passes that fold a constant weight with its neighbours must be able to
# fire as they do in a stock conversion.
_LATE_BOUND = (Linear, Embedding)


@dataclass(frozen=True, kw_only=True)
class FunctionSpec:
    """One function of a package.

    Args:
        inputs: Core ML's name of each input, with an example of its shape and type. Names that are all parameters of `forward` are passed
            by name, others in order. Floating-point inputs become fp16, integers and booleans int32.
        outputs: names of what `forward` returns, in order. Floating-point outputs become fp16.
        arguments: further keyword arguments of `forward`, fixed for this function.
        states: names of the states that this function uses; all of them by default.
        parameters: for inputs whose name is not that of a parameter of `forward`: which it is.
    """

    inputs: Mapping[str, Tensor]
    outputs: tuple[str, ...] = ("output",)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    states: tuple[str, ...] | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)

    def own_states(self, states: Mapping[str, str]) -> dict[str, str]:
        """Those of a package's states that this function uses."""
        return {name: path for name, path in states.items() if self.states is None or name in self.states}


def late_bound_weights(module: nn.Module) -> dict[str, Tensor]:
    """The weights that are left out while tracing, by the name of the constant that they become."""
    weights: dict[str, Tensor] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, _LATE_BOUND):
            weights[f"{path}.weight" if path else "weight"] = part.weight
    return weights


def constant_names(paths: Iterable[str], taken: Iterable[str]) -> dict[str, str]:
    """Parameters' paths as names in a program: `model.layers.0.mlp.down_proj.weight` → `model_layers_0_mlp_down_proj_weight`.

    Core ML wants names that begin with a letter and differ from each other and from those that are `taken`.
    """
    used = set(taken)
    names = {}
    for path in paths:
        name = re.sub(r"\W", "_", path)
        name = name if name[0].isalpha() or name[0] == "_" else f"weight_{name}"
        while name in used:
            name += "_"
        used.add(name)
        names[path] = name
    return names


class Traceable(nn.Module):
    """Takes weights and inputs, and calls the module with the weights in their places."""

    def __init__(self, module: nn.Module, weights: list[str], spec: FunctionSpec) -> None:
        super().__init__()
        self.module = module
        self.result_types: list[tuple[str, tuple[int, ...]]] = []
        self._weights = weights
        self._spec = spec
        parameters = inspect.signature(module.forward).parameters
        self._by_name = all(spec.parameters.get(name, name) in parameters for name in spec.inputs)

    def forward(self, *values: Tensor) -> Any:
        count = len(self._weights)
        for path, value in zip(self._weights, values[:count], strict=True):
            owner, _, name = path.rpartition(".")
            self.module.get_submodule(owner).__dict__[name] = value
        inputs = {
            self._spec.parameters.get(name, name): value != 0 if example.dtype == torch.bool else value
            for (name, example), value in zip(self._spec.inputs.items(), values[count:], strict=True)
        }
        by_order, by_name = ((), inputs) if self._by_name else (tuple(inputs.values()), {})
        result = self.module(*by_order, **by_name, **self._spec.arguments)
        parts = result if isinstance(result, tuple) else (result,)
        if not all(isinstance(part, Tensor) for part in parts):
            raise TypeError(f"forward returns {type(result).__name__}; return a tensor or a tuple of tensors")
        self.result_types = [
            ("fp16" if part.is_floating_point() else "int32", tuple(int(size) for size in part.shape)) for part in parts
        ]
        return result


@contextlib.contextmanager
def _prepared(module: nn.Module, states: Mapping[str, str], weights: list[str], traceable: Traceable) -> Iterator[None]:
    """Moves what tracing must see elsewhere, and puts everything back.

    Late-bound weights leave their modules; other parameters and buffers are seen in fp32, which the converter's front end wants; states
    become buffers of the outermost module under Core ML's names, since the converter looks them up there.
    """
    saved = [(part, part.training, dict(part._parameters), dict(part._buffers)) for part in module.modules()]
    try:
        module.eval()
        traceable.eval()
        for name, path in states.items():
            owner, _, leaf = path.rpartition(".")
            part = module.get_submodule(owner)
            buffer = part._buffers.pop(leaf)
            assert buffer is not None
            # A copy: tracing writes into it.
            buffer = buffer.to(torch.float32, copy=True)
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
                if buffer is not None:
                    part._buffers[leaf] = buffer.to(
                        torch.float32 if buffer.is_floating_point() else buffer.dtype, copy=True
                    )
        yield
    finally:
        for part, training, parameters, buffers in saved:
            part.training = training
            for leaf in (*parameters, *buffers):
                part.__dict__.pop(leaf, None)
            part._parameters.clear()
            part._parameters.update(parameters)
            part._buffers.clear()
            part._buffers.update(buffers)


@dataclass(frozen=True)
class Converted:
    """What coremltools made of one function.

    Attributes:
        specification: of its model; late-bound weights are still inputs.
        weights: the file of its other weights; None if it has none.
        result_types: of its outputs, in the trace.
    """

    specification: Any
    weights: Path | None
    result_types: list[tuple[str, tuple[int, ...]]]


def converted(module: nn.Module, spec: FunctionSpec, states: Mapping[str, str], names: Mapping[str, str]) -> Converted:
    """Traces and converts one function.

    Args:
        module: to trace.
        spec: of the function.
        states: those it uses, by name, with their buffers' paths.
        names: of the late-bound weights' constants, by path.

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
    traceable = Traceable(module, list(shapes), spec)
    with _prepared(module, states, list(shapes), traceable):
        versions = {name: buffer._version for name, buffer in traceable.named_buffers()}

        def trace() -> Any:
            try:
                with torch.no_grad():
                    return torch.jit.trace(traceable, (*placeholders, *examples), check_trace=False)
            except Exception as error:
                raise ConversionError(f"tracing {type(module).__name__} failed: {error}") from error

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            traced = trace()
        refuse_read_values(caught, states, trace)
        _check_changed_buffers(traceable, versions, states)
        inputs = [ct.TensorType(name=names[path], shape=shape, dtype=np.float16) for path, shape in shapes.items()]
        for (name, value), example in zip(spec.inputs.items(), examples, strict=True):
            dtype = np.float16 if value.is_floating_point() else np.int32
            inputs.append(ct.TensorType(name=name, shape=tuple(example.shape), dtype=dtype))
        try:
            with quiet_coremltools(), converted_once():
                model = ct.convert(
                    traced,
                    inputs=inputs,
                    outputs=[ct.TensorType(name=name) for name in spec.outputs],
                    states=state_types,
                    minimum_deployment_target=ct.target.iOS18,
                    pass_pipeline=pipeline(),
                    skip_model_load=True,
                )
            model._mil_program.validate()
        except Exception as error:
            raise ConversionError(f"converting {type(module).__name__} failed: {error}") from error
    file = Path(model.weights_dir) / "weight.bin" if model.weights_dir else None
    return Converted(model.get_spec(), file if file is not None and file.is_file() else None, traceable.result_types)


def _check_changed_buffers(traceable: nn.Module, versions: Mapping[str, int], states: Mapping[str, str]) -> None:
    """Refuses a buffer that `forward` changes and that is no state: converted, it would be a constant, and the change forgotten."""
    for name, buffer in traceable.named_buffers():
        if name not in states and buffer._version != versions[name]:
            path = name.removeprefix("module.")
            raise ConversionError(
                f"forward changes buffer {path}, which is not among the states: its contents would be lost between calls "
                f"(coremltools issue 1726); pass states={{'{path.rpartition('.')[2]}': '{path}'}}"
            )
