"""What families derive from: loading a Hugging Face folder, running, converting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from ane_layers.checkpoint import Checkpoint
from ane_layers.models.graph import Head
from ane_layers.models.part import Part
from ane_layers.models.running import RunnableModel
from ane_layers.models.stored import StoredWeights
from ane_layers.models.weights import find_sources, load_weights, stored_shapes

if TYPE_CHECKING:
    from ane_layers.compression import Compression
    from ane_layers.program import Package


class CausalLM(RunnableModel):
    """A language model with KV caches. A family sets `config_class` and writes `decoder_layer`; `norm`, `stored_names` and `row_order`
    where its own are not the usual ones.

    Arguments and shapes are those of `DecoderModel`.
    """

    def take_part(self, part: Part) -> Self:
        """A part of this model as a model of its own, with caches of its own. Weights are shared, not copied."""
        with torch.device("meta"):
            model = type(self)(
                self.config,
                context_length=self.context_length,
                kv=self.kv,
                block_size=self.block_size,
                head_sharing=self.head_sharing,
                head_pieces=self.head_pieces,
                part=part,
                rope_length=self.rope_length,
            )
            if self.fused:
                model.fuse()
        model.allocate()
        state = self.state_dict()
        model.load_state_dict({name: state[name] for name in model.state_dict()}, assign=True)
        model.stored = self.stored
        return model.requires_grad_(False).eval()

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
        model = cls._empty(config, context_length=context_length, **options)
        load_weights(model, checkpoint, cls._sources(config, checkpoint), dtype=dtype, order=model.row_order)
        if fuse:
            model.fuse()
        return model

    @classmethod
    def open(cls, folder: str | Path, *, context_length: int, fuse: bool = True, **options: Any) -> Self:
        """Opens a folder for conversion: large weights stay in its files, and are read, a layer at a time, when they are written.

        Takes the arguments of `from_pretrained`, and refuses what it refuses; values that fp16 cannot hold, during the conversion.
        """
        config = cls.config_class.from_pretrained(folder)
        checkpoint = Checkpoint.open(folder)
        sources = cls._sources(config, checkpoint)
        options |= {"context_length": context_length}

        def load(source: Checkpoint, options: dict[str, Any], *, large: bool) -> Any:
            model = cls._empty(config, **options)
            load_weights(model, source, sources, dtype=None, large=large, order=model.row_order)
            if fuse:
                model.fuse()
            return model

        model: Self = load(checkpoint, options, large=False)
        model.stored = StoredWeights(lambda part: load(checkpoint.reopened(), options | {"part": part}, large=True))
        return model

    @classmethod
    def _empty(cls, config: Any, **options: Any) -> Self:
        """A model whose parameters are assigned later: none is drawn or allocated first."""
        with torch.device("meta"):
            model = cls(config, **options)
        model.allocate()
        return model

    @classmethod
    def _sources(cls, config: Any, checkpoint: Checkpoint) -> dict[str, str]:
        """Holds a folder against the whole model: parameter name → name that it is stored under."""
        with torch.device("meta"):
            whole = cls(config, context_length=1)
        return find_sources(whole, checkpoint, names=cls.stored_names, tied=config.tie_word_embeddings)

    def row_order(self, name: str) -> Tensor | None:
        """The order in which a parameter's rows are loaded, for families whose checkpoints have another one than the layers.

        Unlike `fuse`, which a loaded model can do without, it is part of every loading.

        Args:
            name: the parameter's, such as `model.layers.3.self_attn.q_proj.weight`; a head's table is `lm_head.weight`.

        Returns:
            int64 `[rows]`, the stored number of each row; None, as here, for the stored order.
        """
        return None

    def checkpoint_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that a checkpoint of this model must have, before `fuse`."""
        return stored_shapes(self, self.stored_names)

    def convert(
        self,
        path: str | Path,
        *,
        prefill: int | Sequence[int] = 64,
        contexts: Sequence[int] = (),
        head: Head = "logits",
        top_k: int = 8,
        verify: int | None = None,
        all_logits: bool = False,
        compression: Compression | None = None,
        duplicate_tied: bool = False,
        progress: Callable[[str], None] | None = None,
    ) -> Package:
        """Writes a multifunction `.mlpackage` with `decode` and `prefill`, reads it back and checks it.

        Args:
            path: of the package; replaced only once the new one is complete and checked.
            prefill: S, tokens in a prefill block; several sizes give a function each.
            contexts: further, shorter context lengths: functions that read only the first so many slots of the same cache.
            head: `"argmax"` gives tokens in place of logits, `"top_k"` the most likely ones with their logits.
            top_k: how many.
            verify: S of a function `verify` that gives the most likely token of each position, to check several guessed tokens at once.
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
            contexts=contexts,
            head=head,
            top_k=top_k,
            verify=verify,
            all_logits=all_logits,
            compression=compression,
            duplicate_tied=duplicate_tied,
            progress=progress,
        )

    def convert_chunks(
        self,
        folder: str | Path,
        *,
        chunks: int | None = None,
        limit: int | None = None,
        head_apart: bool = False,
        compression: Compression | None = None,
        progress: Callable[[str], None] | None = None,
        **options: Any,
    ) -> list[Package]:
        """Writes the model as several packages into a folder: for sizes that one package should not have.

        `Session`, and what is built on it, takes the folder as it takes a package. A model that is too large to be loaded whole is
        converted by `ane_layers.conversion.chunks.convert_chunks`, which loads a part at a time.

        Args:
            folder: of the packages; appears once all of them are complete and checked.
            chunks: how many packages have layers.
            limit: bytes of weights that each package may have, in place of a number of chunks.
            head_apart: whether norm and head are a package of their own.
            compression, progress, options: see `convert`.

        Raises:
            ValueError, ConversionError: as `convert`; nothing is left on disk.
        """
        from ane_layers.conversion.chunks import choose_parts, convert_chunks

        plan = None if compression is None else compression.plan
        parts = choose_parts(self, plan, chunks=chunks, limit=limit, head_apart=head_apart)
        return convert_chunks(
            self.take_part,
            parts,
            folder,
            compression=compression,
            progress=progress,
            **options,
        )
