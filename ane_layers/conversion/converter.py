"""From a PyTorch module to a checked `.mlpackage`."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ane_layers import __version__
from ane_layers.compression import Compression
from ane_layers.conversion.binding import bind_weights, merge_functions
from ane_layers.conversion.check import WEIGHT_LIMIT, Expectations, Feature, Interface, check_package
from ane_layers.conversion.errors import ConversionError
from ane_layers.conversion.files import move_into_place, workspace, write_manifest
from ane_layers.conversion.quiet import collected_at_the_end
from ane_layers.conversion.tracing import Converted, FunctionSpec, constant_names, converted, late_bound_weights
from ane_layers.conversion.weights import WeightWriter
from ane_layers.program import Package

LARGEST_FP16 = 65504.0


def convert(
    module: nn.Module,
    path: str | Path,
    *,
    example_inputs: Mapping[str, Tensor] | None = None,
    functions: Mapping[str, FunctionSpec] | None = None,
    states: Mapping[str, str] | None = None,
    outputs: tuple[str, ...] = ("output",),
    metadata: Mapping[str, str] | None = None,
    expectations: Expectations | None = None,
    compression: Compression | None = None,
    duplicate_tied: bool = False,
    load: Callable[[str], Tensor] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Package:
    """Converts a module into an `.mlpackage` for iOS 18 and macOS 15, fp16, and reads it back to check it.

    The weights of this library's `Linear`, `Embedding` and `OutputHead` are left out of the conversion and streamed into the package
    afterwards, once for all functions; everything else is converted by coremltools as usual.

    Args:
        module: any module; it is traced, in eval mode, and left as it was.
        path: of the package, ending in `.mlpackage`. One that exists is replaced once the new one has passed its checks.
        example_inputs: for a package with one function, `main`: Core ML's name of each input and an example, in `forward`'s order.
        functions: for several functions, in place of `example_inputs` and `outputs`; the first is the default.
        states: Core ML's name of each state and the path of its buffer in the module (`{"keyCache": "cache.key"}`). States are fp16.
        outputs: names of what `forward` returns.
        metadata: further text entries of the package.
        expectations: what the finished package must be; see `Expectations`.
        compression: how weights are stored (see `ane_layers.compression`); fp16 without it.
        duplicate_tied: whether a table that an embedding and a head share is written twice.
        load: gives a weight that is on the meta device, by the path of its parameter, when it is written.
        progress: called with a line of text at each step.

    Returns:
        The package as read back from disk.

    Raises:
        ValueError: for a wrong argument, before anything is converted.
        ConversionError: if tracing, converting or a check of the result fails. Nothing is left on disk.
    """
    target = Path(path)
    say = progress or (lambda line: None)
    check_target(target)
    specs = _functions(example_inputs, functions, outputs)
    states = dict(states or {})
    _check_arguments(module, specs, states)
    with workspace(target) as folder:
        package = folder / target.name
        (package / "Data/com.apple.CoreML/weights").mkdir(parents=True)
        results = _write(module, package, specs, states, metadata or {}, compression, duplicate_tied, load, say)
        say("reading back and checking")
        _check(Package.open(package), module, specs, states, results, expectations or Expectations())
        move_into_place(package, target, folder)
    return Package.open(target)


def _functions(
    example_inputs: Mapping[str, Tensor] | None, functions: Mapping[str, FunctionSpec] | None, outputs: tuple[str, ...]
) -> dict[str, FunctionSpec]:
    if (example_inputs is None) == (functions is None):
        raise ValueError("convert: give either example_inputs, for one function, or functions")
    if functions is not None:
        if not functions:
            raise ValueError("convert: functions is empty")
        return dict(functions)
    assert example_inputs is not None
    return {"main": FunctionSpec(inputs=example_inputs, outputs=tuple(outputs))}


def check_target(target: Path) -> None:
    """Whether a package can be written there. Raises `ValueError` with the reason."""
    if target.suffix != ".mlpackage":
        raise ValueError(f"{target}: a package's name must end in .mlpackage")
    if target.exists() and not (target / "Manifest.json").is_file():
        raise ValueError(f"{target}: exists and is no .mlpackage, so it is not replaced")
    if not target.parent.is_dir():
        raise ValueError(f"{target.parent}: is not a folder, so {target.name} cannot be written there")


def _check_arguments(module: nn.Module, specs: Mapping[str, FunctionSpec], states: Mapping[str, str]) -> None:
    names = [*states, *(name for spec in specs.values() for name in (*spec.inputs, *spec.outputs)), *specs]
    for name in names:
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ValueError(f"convert: {name!r} is no name that Core ML accepts (letters, digits and _)")
    for spec in specs.values():
        if wrong := [name for name, value in spec.inputs.items() if not isinstance(value, Tensor)]:
            raise ValueError(
                f"convert: the example of input {wrong[0]} must be a tensor, got {spec.inputs[wrong[0]]!r}"
            )
        if unknown := [name for name in spec.states or () if name not in states]:
            raise ValueError(f"convert: a function uses state {unknown[0]}, which is not among the states")
    if len(set(states.values())) < len(states):
        raise ValueError(f"convert: two states name the same buffer: {dict(states)}")
    buffers = dict(module.named_buffers(remove_duplicate=False))
    for name, buffer in states.items():
        if buffer not in buffers:
            known = ", ".join(sorted(buffers)) or "none"
            raise ValueError(
                f"convert: state {name} names buffer {buffer!r}, which the module does not have (it has: {known})"
            )
        if not buffers[buffer].is_floating_point():
            raise ValueError(f"convert: state {name} is {buffers[buffer].dtype}; Core ML's states are fp16")
        if any(name in (*spec.inputs, *spec.outputs) for spec in specs.values()):
            raise ValueError(f"convert: {name} is a state and an input or output at once")
    _check_range(module, set(states.values()))


def _check_range(module: nn.Module, states: set[str]) -> None:
    """Small parameters and buffers: what fp16 cannot hold would turn to inf or keep its operation in fp32. Large ones are checked when they
    are written."""
    late = late_bound_weights(module)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if name in late or name in states or not tensor.is_floating_point() or tensor.numel() == 0:
            continue
        if torch.isnan(tensor.detach()).any():
            raise ValueError(f"convert: tensor {name} holds NaN")
        finite = tensor.detach()[torch.isfinite(tensor)].abs()
        if finite.numel() and float(finite.max()) > LARGEST_FP16:
            raise ValueError(
                f"convert: tensor {name} holds {float(finite.max()):g}, which fp16 cannot hold (largest {LARGEST_FP16:g})"
            )


def _write(
    module: nn.Module,
    package: Path,
    specs: Mapping[str, FunctionSpec],
    states: Mapping[str, str],
    metadata: Mapping[str, str],
    compression: Compression | None,
    duplicate_tied: bool,
    load: Callable[[str], Tensor] | None,
    say: Callable[[str], None],
) -> dict[str, list[Feature]]:
    """Fills the package's folder; returns the types of each function's results in the trace."""
    data = package / "Data/com.apple.CoreML"
    weights = {path: weight.detach() for path, weight in late_bound_weights(module).items()}
    taken = {label for spec in specs.values() for label in (*spec.inputs, *spec.outputs)} | set(states)
    names = constant_names(weights, taken)
    functions: dict[str, Converted] = {}
    for i, (name, spec) in enumerate(specs.items()):
        say(f"converting function {name} ({i + 1} of {len(specs)})")
        with collected_at_the_end():
            functions[name] = converted(module, spec, spec.own_states(states), names)
    if compression is not None:
        if duplicate_tied and any(compression.plan.settings[path].scheme != "fp16" for path in compression.plan.shared):
            raise ValueError(
                f"duplicate_tied: recipe {compression.plan.recipe.name} keeps embedding and head in one compressed table; "
                "give it tied = 'split'"
            )
        for path in compression.plan.settings:
            if path not in weights:
                raise ValueError(
                    f"convert: the compression was made for another model: it has {path}, this one has not"
                )
        for path, parameter in module.named_parameters():
            if path not in weights:
                compression.leave(path, parameter, "norms and biases are few, and stay fp16")
    say(f"writing {len(weights)} weights")
    with WeightWriter(data / "weights/weight.bin") as writer:
        bound = bind_weights(
            weights,
            names,
            writer,
            compression=compression,
            duplicate_tied=duplicate_tied,
            load=load,
            progress=say,
        )
        specifications = {name: function.specification for name, function in functions.items()}
        files = {name: function.weights for name, function in functions.items() if function.weights is not None}
        merged = merge_functions(specifications, bound, files, writer)
    if writer.bytes_written > WEIGHT_LIMIT:
        warnings.warn(
            f"the package holds {writer.bytes_written / 1e9:.2f} GB of weights; programs near 2 GB fail to load on devices",
            stacklevel=4,
        )
    merged.description.metadata.userDefined.update({"ane_layers.version": __version__, **metadata})
    (data / "model.mlmodel").write_bytes(merged.SerializeToString(deterministic=True))
    write_manifest(package)
    return {name: function.result_types for name, function in functions.items()}


def _check(
    package: Package,
    module: nn.Module,
    specs: Mapping[str, FunctionSpec],
    states: Mapping[str, str],
    results: Mapping[str, list[Feature]],
    expectations: Expectations,
) -> None:
    wanted = {}
    for name, spec in specs.items():
        inputs = {
            label: ("fp16" if value.is_floating_point() else "int32", tuple(value.shape))
            for label, value in spec.inputs.items()
        }
        outputs = dict(zip(spec.outputs, results[name], strict=True))
        own = {label: tuple(module.get_buffer(path).shape) for label, path in spec.own_states(states).items()}
        wanted[name] = Interface(inputs=inputs, outputs=outputs, states=own)
    check_package(package, wanted, expectations)


__all__ = ["ConversionError", "FunctionSpec", "check_target", "convert"]
