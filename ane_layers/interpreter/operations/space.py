"""Moving elements between space and channels, and between space and the batch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from ane_layers.interpreter.registry import operation


@operation("depth_to_space", view=True)
def depth_to_space(x: Tensor, block_size: int) -> Tensor:
    """Shape: (B, C · b², H, W) → (B, C, H · b, W · b); the block's place is the outer part of the channel."""
    B, C, height, width = x.shape
    x = x.reshape(B, block_size, block_size, C // block_size**2, height, width)
    return x.permute(0, 3, 4, 1, 5, 2).reshape(B, -1, height * block_size, width * block_size)


@operation("space_to_depth", view=True)
def space_to_depth(x: Tensor, block_size: int) -> Tensor:
    """Undoes `depth_to_space`."""
    B, C, height, width = x.shape
    x = x.reshape(B, C, height // block_size, block_size, width // block_size, block_size)
    return x.permute(0, 3, 5, 1, 2, 4).reshape(B, -1, height // block_size, width // block_size)


@operation("pixel_shuffle", view=True)
def pixel_shuffle(x: Tensor, upscale_factor: int) -> Tensor:
    return F.pixel_shuffle(x, upscale_factor)


@operation("pixel_unshuffle", view=True)
def pixel_unshuffle(x: Tensor, downscale_factor: int) -> Tensor:
    return F.pixel_unshuffle(x, downscale_factor)


@operation("space_to_batch", exact=True)
def space_to_batch(x: Tensor, block_shape: tuple[int, ...], paddings: tuple[int, ...]) -> Tensor:
    """Shape: (B, C, H, W) → (h · w · B, C, H / h, W / w), H and W with their padding; a block's place is the outer part."""
    top, bottom, left, right = paddings
    x = F.pad(x, (left, right, top, bottom))
    B, C, height, width = x.shape
    h, w = block_shape
    if height % h or width % w:
        raise ValueError(
            f"block_shape is {list(block_shape)}, which does not divide a padded image of {height} by {width}"
        )
    x = x.reshape(B, C, height // h, h, width // w, w)
    return x.permute(3, 5, 0, 1, 2, 4).reshape(h * w * B, C, height // h, width // w)


@operation("batch_to_space", exact=True)
def batch_to_space(x: Tensor, block_shape: tuple[int, ...], crops: tuple[int, ...]) -> Tensor:
    """Undoes `space_to_batch`, whose paddings are the crops."""
    top, bottom, left, right = crops
    B, C, height, width = x.shape
    h, w = block_shape
    x = x.reshape(h, w, B // (h * w), C, height, width).permute(2, 3, 4, 0, 5, 1)  # (B / (h · w), C, H, h, W, w)
    x = x.reshape(B // (h * w), C, height * h, width * w)
    return x[:, :, top : height * h - bottom, left : width * w - right]
