"""A checkpoint's tensors into a model's parameters, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from ane_layers.checkpoint import Checkpoint, check_float16
from ane_layers.layers import Embedding, Linear, OutputHead

Shape = tuple[int, ...]
Names = Mapping[str, str]
"""Parts of our parameters' paths, and what a checkpoint has in their place. Several of ours with one name there are its rows, in our
order: `{"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}`."""

Order = Callable[[str], Tensor | None]
"""By a parameter's name, the stored number of each of its rows, int64 `[rows]`; None where they stay as they are stored."""


def stored_name(name: str, names: Names) -> str:
    """A parameter's name in the checkpoint."""
    path = f".{name}."
    for ours, theirs in names.items():
        path = path.replace(f".{ours}.", f".{theirs}.")
    return path.strip(".")


def parameter_shapes(model: nn.Module) -> dict[str, Shape]:
    """Name and shape of every parameter as a checkpoint would have it: a head in one piece, matrices with two axes."""
    shapes: dict[str, Shape] = {}
    heads = [path for path, module in model.named_modules() if isinstance(module, OutputHead)]
    for path, module in model.named_modules():
        if isinstance(module, OutputHead):
            shapes[f"{path}.weight"] = (module.vocab_size, module.hidden_size)
        elif not any(path.startswith(f"{head}.") for head in heads):
            for name, parameter in module.named_parameters(prefix=path, recurse=False):
                # A convolution's [out, in, 1, 1] is a linear layer's [out, in] in the file.
                is_matrix = isinstance(module, Linear) and parameter.ndim == 4
                shapes[name] = tuple(parameter.shape[:2] if is_matrix else parameter.shape)
    return shapes


def stored_shapes(model: nn.Module, names: Names) -> dict[str, Shape]:
    """Name and shape of every tensor that a checkpoint of a model has."""
    stored: dict[str, Shape] = {}
    for name, (rows, *rest) in parameter_shapes(model).items():
        theirs = stored_name(name, names)
        stored[theirs] = (stored.get(theirs, (0,))[0] + rows, *rest)
    return stored


def find_sources(model: nn.Module, checkpoint: Checkpoint, *, names: Names, tied: bool) -> dict[str, str]:
    """Holds a checkpoint against a whole model, and says where each parameter is stored.

    Args:
        model: on any device.
        checkpoint: of which no weight is read.
        names: see `Names`.
        tied: whether the head is the embedding's table.

    Returns:
        Parameter name → stored name.

    Raises:
        ValueError: naming every tensor that is missing, left over or of another shape.
    """
    ties = {"lm_head.weight": stored_name("model.embed_tokens.weight", names)} if tied else {}
    stored = checkpoint.check(stored_shapes(model, names), tied=ties)
    return {name: stored[stored_name(name, names)] for name in parameter_shapes(model)}


def load_weights(
    model: nn.Module,
    checkpoint: Checkpoint,
    sources: Mapping[str, str],
    *,
    dtype: torch.dtype | None,
    large: bool = True,
    order: Order = lambda name: None,
) -> None:
    """Assigns the stored tensors to a model or a part of one. A tied table stays one tensor; parts of a joined one are its rows.

    Args:
        model: without weights, on the meta device.
        checkpoint: to read.
        sources: from `find_sources`.
        dtype: of the weights in memory; None keeps the stored one, and refuses values that fp16 cannot hold.
        large: without, weights of embedding, head and projections have no values.
        order: of the rows, where it is not the stored one.

    Raises:
        ValueError: naming file and tensor, or parameter and order.
    """
    shapes = parameter_shapes(model)
    left = set() if large else _large_weights(model)
    read: dict[str, Tensor] = {}
    used: dict[str, int] = {}
    tensors: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        source = sources[name]
        if source not in read:
            if name in left:
                read[source] = torch.empty(checkpoint.shape(source), dtype=checkpoint.dtype(source), device="meta")
            else:
                tensor = checkpoint[source]
                if dtype is None:  # here the tensor still has the checkpoint's name; later it may be part of another
                    check_float16(source, tensor, file=checkpoint.file(source))
                read[source] = tensor if dtype is None else tensor.to(dtype)
        whole, first = read[source], used.get(source, 0)
        part = whole if len(whole) == shape[0] else whole[first : first + shape[0]]
        tensors[name] = _reordered(name, part, order(name))
        used[source] = first + shape[0]
    model.load_state_dict(tensors, assign=True)
    model.requires_grad_(False).eval()


def _reordered(name: str, tensor: Tensor, rows: Tensor | None) -> Tensor:
    if rows is None:
        return tensor
    if not torch.equal(rows.sort().values, torch.arange(len(tensor))):
        raise ValueError(
            f"parameter {name}: its row order must name each of {len(tensor)} rows once, got {rows.tolist()}"
        )
    return tensor if tensor.is_meta else tensor[rows]


def _large_weights(model: nn.Module) -> set[str]:
    kinds = (Linear, Embedding, OutputHead)
    return {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, kinds)}
