"""What every family has in common: loading a Hugging Face folder, running with a cache, converting."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from ane_layers.checkpoint import Checkpoint, check_float16
from ane_layers.layers import HeadSharing, Linear, OutputHead, causal_mask

if TYPE_CHECKING:
    from ane_layers.compression import Compression
    from ane_layers.program import Package


class CausalLM(nn.Module):
    """A decoder with a KV cache. A family sets `config_class`, builds its layers and writes `allocate`, `forward` and `fuse`.

    Args:
        config: the family's config.
        context_length: T, the slots of the cache; at most the config's `max_position_embeddings`.

    Shape:
        - input_ids: int `[B, S]`
        - position: int32 `[1]`, cache slot of the first of the S tokens
        - causal_mask: `[1, 1, S, T]`, see `causal_mask`
        - output: logits `[B, S, V]`, or `[B, 1, V]` of the last position with `last_only`
    """

    config_class: Any
    head_sharing: HeadSharing

    def __init__(self, config: Any, *, context_length: int) -> None:
        super().__init__()
        if not 1 <= context_length <= config.max_position_embeddings:
            raise ValueError(
                f"context_length must be within 1 … max_position_embeddings ({config.max_position_embeddings}), "
                f"got {context_length}"
            )
        self.config = config
        self.context_length = context_length

    def allocate(self) -> None:
        """Builds caches and constant tables, which no checkpoint holds."""
        raise NotImplementedError

    def fuse(self) -> None:
        """Joins projections that read the same input. Changes the weights' layout, not the result."""
        raise NotImplementedError

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        context_length: int,
        dtype: torch.dtype | None = torch.float32,
        fuse: bool = True,
        **options: Any,
    ) -> Self:
        """Loads a folder in Hugging Face's format; every tensor is checked, none may be left over or missing.

        Args:
            folder: with config.json and safetensors files.
            context_length: T.
            dtype: of the weights in memory. None keeps the stored type and maps the file, for conversion without a second copy; values
                that fp16 cannot hold are then refused.
            fuse: whether projections are joined (see `fuse`).
            options: further arguments of the family's constructor, such as `head_sharing`.

        Raises:
            ValueError: naming file, field or tensor, and value.
        """
        config = cls.config_class.from_pretrained(folder)
        checkpoint = Checkpoint.open(folder)
        with torch.device("meta"):  # parameters are assigned below; nothing is drawn or allocated first
            model = cls(config, context_length=context_length, **options)
        model.allocate()
        tied = {"lm_head.weight": "model.embed_tokens.weight"} if config.tie_word_embeddings else {}
        expected = model.checkpoint_shapes()
        tensors: dict[str, Tensor] = {}
        for name, source in checkpoint.check(expected, tied=tied).items():
            if source not in tensors:
                tensor = checkpoint[source]
                if dtype is None:  # here the tensor still has the checkpoint's name; later it may be part of another
                    check_float16(source, tensor, file=checkpoint.file(source))
                tensors[source] = tensor if dtype is None else tensor.to(dtype)
            tensors[name] = tensors[source]  # a tied table stays one tensor
        model.load_state_dict(tensors, assign=True)
        model.requires_grad_(False).eval()
        if fuse:
            model.fuse()
        return model

    def checkpoint_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that a checkpoint of this model must have, before `fuse`."""
        shapes: dict[str, tuple[int, ...]] = {}
        for path, module in self.named_modules():
            if isinstance(module, OutputHead):
                shapes[f"{path}.weight"] = (module.vocab_size, module.hidden_size)
            elif not path.startswith("lm_head."):
                for name, parameter in module.named_parameters(prefix=path, recurse=False):
                    # A convolution's [out, in, 1, 1] is a linear layer's [out, in] in the file.
                    is_matrix = isinstance(module, Linear) and parameter.ndim == 4
                    shapes[name] = tuple(parameter.shape[:2] if is_matrix else parameter.shape)
        return shapes

    @torch.no_grad()
    def extend(self, input_ids: Tensor, position: int = 0, *, last_only: bool = False) -> Tensor:
        """Runs further tokens through the cache in PyTorch and returns their logits.

        Args:
            input_ids: the S tokens that follow the `position` already in the cache.
            position: cache slot of the first.
            last_only: whether only the last position's logits are wanted.

        Shape:
            - input_ids: int `[1, S]`
            - output: `[1, S, V]`, or `[1, 1, V]` with `last_only`

        Raises:
            ValueError: for another shape, weights that are not fp32, or tokens that do not fit the context; the cache is left as it
                was.
        """
        if input_ids.ndim != 2 or input_ids.shape[0] != 1:
            raise ValueError(f"input_ids must be of shape [1, S], got {list(input_ids.shape)}")
        types = {parameter.dtype for parameter in self.parameters()} - {torch.float32}
        if types:
            raise ValueError(
                f"dtype of the weights is {types.pop()}, kept for conversion; load with dtype=torch.float32 to run them"
            )
        length = input_ids.shape[1]
        mask = causal_mask(position, length, self.context_length)
        logits: Tensor = self(input_ids, torch.tensor([position], dtype=torch.int32), mask, last_only=last_only)
        return logits

    def convert(
        self,
        path: str | Path,
        *,
        prefill: int = 64,
        all_logits: bool = False,
        compression: Compression | None = None,
        duplicate_tied: bool = False,
        progress: Callable[[str], None] | None = None,
    ) -> Package:
        """Writes a multifunction `.mlpackage` with `decode` and `prefill`, reads it back and checks it.

        Args:
            path: of the package; replaced only once the new one is complete and checked.
            prefill: S, tokens in a prefill block.
            all_logits: whether `prefill` returns every position's logits rather than the last one's.
            compression: how weights are stored: from `ane_layers.compression.compress`, which has changed this model's weights already, or
                `Compression(plan)`, which compresses each when it is written.
            duplicate_tied: whether a table that embedding and head share is written twice.
            progress: called with a line of text at each step.

        Raises:
            ValueError: for a setting or weight that cannot be converted.
            ConversionError: if the finished program fails a check; nothing is left on disk.
        """
        from ane_layers.conversion.causal_lm import convert_causal_lm

        return convert_causal_lm(
            self,
            path,
            prefill=prefill,
            all_logits=all_logits,
            compression=compression,
            duplicate_tied=duplicate_tied,
            progress=progress,
        )
