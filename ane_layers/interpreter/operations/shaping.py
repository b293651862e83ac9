"""Shapes, joining and splitting, and tensors made from nothing but a shape."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ane_layers.interpreter.registry import Context, operation
from ane_layers.interpreter.values import carrier


@operation("identity", view=True)
def identity(x: Tensor) -> Tensor:
    return x


@operation("shape")
def shape(x: Tensor) -> Tensor:
    return torch.tensor(x.shape, dtype=torch.int32)


@operation("reshape", view=True)
def reshape(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    # A 0 keeps the size of the axis that is as far from the right; beyond the axes of x it makes a 1.
    shift = x.ndim - len(shape)
    sizes = [(x.shape[i + shift] if i + shift >= 0 else 1) if size == 0 else size for i, size in enumerate(shape)]
    if x.numel() == 0 and 0 in shape and -1 not in shape:
        sizes = list(shape)
    return x.reshape(sizes)


@operation("reshape_like", view=True)
def reshape_like(
    x: Tensor,
    ref_tensors: tuple[Tensor, ...],
    begins: tuple[Tensor, ...],
    ends: tuple[Tensor, ...],
    end_masks: tuple[Tensor, ...],
) -> Tensor:
    sizes: list[int] = []
    for reference, begin, end, whole in zip(ref_tensors, begins, ends, end_masks, strict=True):
        sizes.extend(reference.shape[int(begin) : None if bool(whole) else int(end)])
    return x.reshape(sizes)


@operation("transpose", view=True)
def transpose(x: Tensor, perm: tuple[int, ...]) -> Tensor:
    return x.permute(perm)


@operation("expand_dims", view=True)
def expand_dims(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    rank = x.ndim + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        x = x.unsqueeze(axis)
    return x


@operation("squeeze", view=True)
def squeeze(x: Tensor, axes: tuple[int, ...] | None = None) -> Tensor:
    if axes is None:
        return x.squeeze()
    wrong = [axis for axis in axes if x.shape[axis] != 1]
    if wrong:
        raise ValueError(f"axes names axis {wrong[0]} of size {x.shape[wrong[0]]}, only 1 can be squeezed")
    return x.squeeze(tuple(axes))


@operation("flatten2d", view=True)
def flatten2d(x: Tensor, axis: int = 1) -> Tensor:
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@operation("concat", exact=True)
def concat(values: tuple[Tensor, ...], axis: int, interleave: bool = False) -> Tensor:
    # Scalars give a vector: so the converter puts a shape together that is known only when the program runs.
    values = tuple(value.reshape(1) if value.ndim == 0 else value for value in values)
    if not interleave:
        return torch.cat(values, axis)
    axis %= values[0].ndim
    return torch.stack(values, axis + 1).flatten(axis, axis + 1)


@operation("stack", exact=True)
def stack(values: tuple[Tensor, ...], axis: int) -> Tensor:
    return torch.stack(values, axis)


@operation("split", view=True)
def split(
    x: Tensor, axis: int, num_splits: int | None = None, split_sizes: tuple[int, ...] | None = None
) -> tuple[Tensor, ...]:
    if split_sizes is not None:
        return torch.split(x, list(split_sizes), axis)
    if num_splits is None:
        raise ValueError("num_splits and split_sizes are both missing")
    if x.shape[axis] % num_splits:
        raise ValueError(f"num_splits is {num_splits}, which does not divide an axis of {x.shape[axis]}")
    return torch.split(x, x.shape[axis] // num_splits, axis)


@operation("tile", exact=True)
def tile(x: Tensor, reps: tuple[int, ...]) -> Tensor:
    return x.repeat(reps)


@operation("reverse", exact=True)
def reverse(x: Tensor, axes: tuple[int, ...] | None = None) -> Tensor:
    return torch.flip(x, list(range(x.ndim)) if axes is None else list(axes))


@operation("reverse_sequence", exact=True)
def reverse_sequence(x: Tensor, lengths: Tensor, seq_axis: int = 0, batch_axis: int = 0) -> Tensor:
    """Turns round the first `lengths[b]` elements of the sequence in each place of the batch axis."""
    size = x.shape[seq_axis]
    if lengths.numel() != x.shape[batch_axis]:
        raise ValueError(f"lengths has {lengths.numel()} entries for a batch of {x.shape[batch_axis]}")
    lengths = lengths.reshape([-1 if axis == batch_axis % x.ndim else 1 for axis in range(x.ndim)])
    if bool(((lengths < 0) | (lengths > size)).any()):
        raise ValueError(f"lengths is {lengths.reshape(-1).tolist()} for sequences of {size}")
    places = torch.arange(size).reshape([-1 if axis == seq_axis % x.ndim else 1 for axis in range(x.ndim)])
    places = torch.where(places < lengths, lengths - 1 - places, places)
    return torch.gather(x, seq_axis, places.expand(x.shape))


@operation("pad", view=True)
def pad(x: Tensor, pad: tuple[int, ...], mode: str = "constant", constant_val: float = 0.0) -> Tensor:
    # The pairs belong to the last axes, in their order; torch names the last axis first.
    pairs = [pad[i : i + 2] for i in range(0, len(pad), 2)]
    if mode == "constant":
        return F.pad(x, [amount for pair in reversed(pairs) for amount in pair], value=constant_val)
    if mode not in ("reflect", "replicate"):
        raise ValueError(f"mode is {mode!r}, expected constant, reflect or replicate")
    for axis, (before, after) in enumerate(pairs, x.ndim - len(pairs)):
        if before or after:
            size = x.shape[axis]
            places = torch.arange(-before, size + after)
            if mode == "reflect":
                # Mirrored at the border elements, which are not repeated.
                places = places.abs()
                places = size - 1 - (size - 1 - places).abs()
            x = torch.index_select(x, axis, places.clamp(0, size - 1) if mode == "replicate" else places)
    return x


@operation("fill", exact=True)
def fill(shape: tuple[int, ...], context: Context, value: Tensor | None = None) -> Tensor:
    filled = torch.zeros(shape, dtype=carrier(context.output.dtype))
    return filled if value is None else filled.copy_(value)


@operation("fill_like", exact=True)
def fill_like(ref_tensor: Tensor, context: Context, value: Tensor | None = None) -> Tensor:
    return fill(tuple(ref_tensor.shape), context, value)


@operation("range_1d")
def range_1d(end: Tensor, start: Tensor, step: Tensor) -> Tensor:
    return torch.arange(start.item(), end.item(), step.item(), dtype=end.dtype)


@operation("band_part", exact=True)
def band_part(x: Tensor, lower: int = -1, upper: int = -1) -> Tensor:
    row = torch.arange(x.shape[-2]).unsqueeze(-1)
    column = torch.arange(x.shape[-1])
    keep = torch.ones(x.shape[-2:], dtype=torch.bool)
    if lower >= 0:
        keep &= row - column <= lower
    if upper >= 0:
        keep &= column - row <= upper
    return torch.where(keep, x, torch.zeros((), dtype=x.dtype))


@operation("cumsum")
def cumsum(x: Tensor, axis: int = 0, exclusive: bool = False, reverse: bool = False) -> Tensor:
    if reverse:
        return torch.flip(cumsum(torch.flip(x, [axis]), axis, exclusive), [axis])
    # Starting from a zero keeps the exclusive sum right where the elements are infinite.
    if exclusive:
        zero = torch.zeros_like(x.narrow(axis, 0, min(1, x.shape[axis])))
        x = torch.cat([zero, x.narrow(axis, 0, max(x.shape[axis] - 1, 0))], axis)
    return torch.cumsum(x, axis)


@operation("sliding_windows", view=True)
def sliding_windows(x: Tensor, axis: int, size: int, stride: int = 1) -> Tensor:
    """Shape: the axis becomes (windows, size)."""
    axis %= x.ndim
    return x.unfold(axis, size, stride).movedim(-1, axis + 1).contiguous()
