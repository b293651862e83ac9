"""What every family has in common: loading a Hugging Face folder, running with a cache, converting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from ane_layers.checkpoint import Checkpoint
from ane_layers.layers import (
    Embedding,
    HeadSharing,
    KVCache,
    KvMode,
    NoCache,
    OutputHead,
    RMSNorm,
    RotaryEmbedding,
    causal_mask,
    rolling_slots,
    rotary_factor,
    rotary_frequencies,
    sliding_mask,
)
from ane_layers.models.config import FULL, SLIDING
from ane_layers.models.part import Part
from ane_layers.models.step import Step
from ane_layers.models.stored import StoredWeights
from ane_layers.models.weights import Names, find_sources, load_weights, stored_shapes

if TYPE_CHECKING:
    from ane_layers.compression import Compression
    from ane_layers.program import Package


Head = Literal["logits", "argmax", "top_k"]
"""What a model gives: logits, the most likely token, or the k most likely ones with their logits."""


class DecoderLayers(nn.ModuleList):
    """Layers that keep their numbers, and so their names, in a part of a model."""

    def __init__(self, layers: Iterable[nn.Module], *, first: int) -> None:
        super().__init__()
        for number, layer in enumerate(layers, first):
            self.add_module(str(number), layer)


class Decoder(nn.Module):
    """Embedding, decoder layers and final norm, named as in Hugging Face's checkpoints; or a part of them."""

    def __init__(self, config: Any, layers: Iterable[nn.Module], norm: RMSNorm, part: Part) -> None:
        super().__init__()
        if part.embedding:
            self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, scale=config.embedding_scale)
        self.layers = DecoderLayers(layers, first=part.first)
        if part.head:
            self.norm = norm


class CausalLM(nn.Module):
    """A decoder with KV caches. A family sets `config_class` and writes `decoder_layer`.

    A layer has `kind` (`"full_attention"` or `"sliding_attention"`), `self_attn` with `align(step)`, `fuse()` and
    `forward(x, step, number)`, where `number` counts the layers of its kind; see `ane_layers.models.blocks`.

    Args:
        config: the family's config.
        context_length: T, the slots of the cache; at most the config's `max_position_embeddings`.
        kv: when the cache is written; see `KVCache`.
        block_size: the most tokens that run at once, from which the slots of a rolling cache follow.
        head_sharing: see `GroupedQueryAttention`.
        head_pieces: convolutions that the output head is split into; see `OutputHead`.
        part: the layers that are built, of a model that is run in several parts; all by default.
        rope_length: positions that rotary frequencies are for, where a config has several sets of them (longrope); `context_length` by
            default.

    Shape:
        - input_ids: int `[B, S]`; for a part without embedding None, and instead
        - hidden_states: `[B, C, 1, S]`, which a part without head also gives in place of logits
        - position: int32 `[1]`, position of the first of the S tokens
        - causal_mask: `[1, 1, S, T]`, see `causal_mask`; `[1, 1, S, T + S]` unless `kv` is `"in_place"`. With fewer than all slots,
          attention reads only these, the first ones.
        - sliding_mask: `[1, 1, S, W']` or `[1, 1, S, W' + S]`, see `sliding_mask`; for models with sliding-window layers
        - output: logits `[B, S, V]`, or `[B, 1, V]` of the last position with `last_only`; with `head="argmax"` tokens `[B, S]`, with
          `head="top_k"` tokens and logits `[B, S, k]`; read-only, then new keys and values of each cache
    """

    config_class: Any
    stored_names: ClassVar[Names] = {}

    def __init__(
        self,
        config: Any,
        *,
        context_length: int,
        kv: KvMode = "in_place",
        block_size: int = 64,
        head_sharing: HeadSharing = "fold",
        head_pieces: int | None = None,
        part: Part | None = None,
        rope_length: int | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= context_length <= config.max_position_embeddings:
            raise ValueError(
                f"context_length must be within 1 … max_position_embeddings ({config.max_position_embeddings}), "
                f"got {context_length}"
            )
        self.config = config
        self.context_length = context_length
        self.rope_length = context_length if rope_length is None else rope_length
        self.kv: KvMode = kv
        self.block_size = block_size
        self.head_sharing = head_sharing
        self.head_pieces = head_pieces
        self.part = Part(first=0, last=config.num_hidden_layers) if part is None else part
        kinds = getattr(config, "layer_types", None) or (FULL,) * config.num_hidden_layers
        self.kinds: tuple[str, ...] = tuple(kinds[self.part.first : self.part.last])
        self.fused = False
        self.stored: StoredWeights | None = None
        layers = (self.decoder_layer(number, kind) for number, kind in enumerate(self.kinds, self.part.first))
        self.model = Decoder(config, layers, self.norm(config.hidden_size, dim=1), self.part)
        if self.part.head:
            self.lm_head = OutputHead(
                config.hidden_size,
                config.vocab_size,
                pieces=head_pieces,
                scale=config.logit_scale,
                softcap=config.logit_softcap,
            )
        self.allocate()

    def decoder_layer(self, number: int, kind: str) -> nn.Module:
        """A layer of the family, by its number and its kind of attention."""
        raise NotImplementedError

    def norm(self, size: int, *, dim: int) -> RMSNorm:
        """A norm of the family."""
        return RMSNorm(size, eps=self.config.rms_norm_eps, dim=dim)

    def allocate(self) -> None:
        """Builds caches and constant tables, which no checkpoint holds."""
        self.rotary = self._rotary(FULL)
        # One table, unless sliding-window layers have frequencies of their own.
        shared = self.config.rope(SLIDING) == self.config.rope(FULL)
        self.sliding_rotary = self.rotary if shared else self._rotary(SLIDING)
        self.cache = self._cache(FULL, self.context_length)
        self.sliding_cache = self._cache(SLIDING, self.sliding_slots)

    def _rotary(self, kind: str) -> RotaryEmbedding:
        theta, scaling = self.config.rope(kind)
        frequencies = rotary_frequencies(
            self.config.rotary_dim, rope_theta=theta, rope_scaling=scaling, context_length=self.rope_length
        )
        return RotaryEmbedding(
            frequencies,
            max_positions=self.context_length,
            head_dim=self.config.head_dim,
            factor=rotary_factor(scaling),
        )

    def _cache(self, kind: str, slots: int) -> KVCache | None:
        layers = self.kinds.count(kind)
        if not layers:
            return None
        config = self.config
        return KVCache(
            num_layers=layers,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            context_length=slots,
            kv=self.kv,
        )

    @property
    def sliding_slots(self) -> int:
        """W', the slots of the rolling cache; 0 without sliding-window layers."""
        return rolling_slots(self.config.sliding_window, self.block_size) if SLIDING in self.kinds else 0

    def forward(
        self,
        input_ids: Tensor | None = None,
        position: Tensor | None = None,
        causal_mask: Tensor | None = None,
        sliding_mask: Tensor | None = None,
        key_cache: Tensor | None = None,
        value_cache: Tensor | None = None,
        sliding_key_cache: Tensor | None = None,
        sliding_value_cache: Tensor | None = None,
        *,
        hidden_states: Tensor | None = None,
        last_only: bool = False,
        head: Head = "logits",
        top_k: int = 1,
    ) -> Any:
        for cache, key, value in (
            (self.cache, key_cache, value_cache),
            (self.sliding_cache, sliding_key_cache, sliding_value_cache),
        ):
            if cache is not None and key is not None and value is not None:
                cache.key, cache.value = key, value
        x = self.model.embed_tokens(input_ids) if self.part.embedding else hidden_states
        if x is None:
            raise ValueError(f"{type(self).__name__}: a part without embedding takes hidden_states")
        length = x.shape[3]
        steps = self._steps(position, length, {FULL: causal_mask, SLIDING: sliding_mask})
        numbers = dict.fromkeys(steps, 0)
        for layer in self.decoder_layers():
            x = layer(x, steps[layer.kind], numbers[layer.kind])
            numbers[layer.kind] += 1
        rows = [part for step in steps.values() for part in step.cache.finish(step.position)]
        if last_only and length > 1 and self.part.last == self.config.num_hidden_layers:
            # By a split, not a slice from the end: a slice that begins late on the last axis is said to lose large values on M1.
            x = x.split([length - 1, 1], dim=3)[1]
        given = self._results(self.model.norm(x), head, top_k) if self.part.head else (x,)
        results = (*given, *rows)
        return results if len(results) > 1 else results[0]

    def _results(self, x: Tensor, head: Head, top_k: int) -> tuple[Tensor, ...]:
        if head == "argmax":
            return (self.lm_head.argmax(x),)
        return self.lm_head.top_k(x, top_k) if head == "top_k" else (self.lm_head(x),)

    def _steps(self, position: Tensor | None, length: int, masks: Mapping[str, Tensor | None]) -> dict[str, Step]:
        """What the layers of each kind share, done once for all of them."""
        if not self.kinds:
            return {}
        if position is None:
            raise ValueError(f"{type(self).__name__} has layers and needs the position of the first token")
        steps = {}
        for kind, cache, rotary in (
            (FULL, self.cache, self.rotary),
            (SLIDING, self.sliding_cache, self.sliding_rotary),
        ):
            if cache is None:
                continue
            mask = masks[kind]
            if mask is None:
                raise ValueError(f"{type(self).__name__} has {kind} layers and needs their mask")
            slots = mask.shape[3] - (length if cache.two_parts else 0)
            slot = position if kind == FULL else position % self.sliding_slots
            cos, sin = rotary(position, length)
            step = Step(position=slot, mask=mask, cache=cache, cos=cos, sin=sin, slots=slots)
            first = next(layer for layer in self.decoder_layers() if layer.kind == kind)
            steps[kind] = first.self_attn.align(step)
        return steps

    def decoder_layers(self) -> list[Any]:
        return list(self.model.layers)

    def fuse(self) -> None:
        """Joins projections that read the same input. Changes the weights' layout, not the result."""
        for layer in self.decoder_layers():
            layer.fuse()
        self.fused = True

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
        names = model.state_dict().keys()
        model.load_state_dict({name: self.state_dict()[name] for name in names}, assign=True)
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
        with torch.device("meta"):  # parameters are assigned below; nothing is drawn or allocated first
            model = cls(config, context_length=context_length, **options)
        model.allocate()
        load_weights(model, checkpoint, cls._sources(config, checkpoint), dtype=dtype)
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
        with torch.device("meta"):
            model = cls(config, context_length=context_length, **options)
        model.allocate()
        load_weights(model, checkpoint, sources, dtype=None, large=False)
        if fuse:
            model.fuse()

        def load(part: Part) -> CausalLM:
            with torch.device("meta"):
                loaded = cls(config, context_length=context_length, **(options | {"part": part}))
            loaded.allocate()
            load_weights(loaded, checkpoint.reopened(), sources, dtype=None)
            if fuse:
                loaded.fuse()
            return loaded

        model.stored = StoredWeights(load)
        return model

    @classmethod
    def _sources(cls, config: Any, checkpoint: Checkpoint) -> dict[str, str]:
        """Holds a folder against the whole model: parameter name → name that it is stored under."""
        with torch.device("meta"):
            whole = cls(config, context_length=1)
        return find_sources(whole, checkpoint, names=cls.stored_names, tied=config.tie_word_embeddings)

    def checkpoint_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that a checkpoint of this model must have, before `fuse`."""
        return stored_shapes(self, self.stored_names)

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
        if self.stored is not None:
            raise ValueError(
                "the model was opened for conversion, its weights are in its folder; load it with from_pretrained"
            )
        types = {parameter.dtype for parameter in self.parameters()} - {torch.float32}
        if types:
            raise ValueError(
                f"dtype of the weights is {types.pop()}, kept for conversion; load with dtype=torch.float32 to run them"
            )
        pieces = []
        for first, length in self.blocks(position, input_ids.shape[1]):
            masks = self.masks(first, length)
            tokens = input_ids[:, first - position : first - position + length]
            pieces.append(self._call_in_torch(tokens, first, masks, last_only))
        return pieces[-1] if last_only else torch.cat(pieces, dim=1)

    def _call_in_torch(
        self, tokens: Tensor, position: int, masks: tuple[Tensor | None, Tensor | None], last_only: bool
    ) -> Tensor:
        results = self(tokens, torch.tensor([position], dtype=torch.int32), *masks, last_only=last_only)
        if self.kv != "read_only":
            return results
        logits, *rows = results
        for cache, keys, values in zip(self.caches(), rows[0::2], rows[1::2], strict=True):
            cache.store(keys, values, position % cache.context_length)
        return logits

    def caches(self) -> list[KVCache]:
        """The full-attention cache, then the rolling one; those that there are."""
        return [cache for cache in (self.cache, self.sliding_cache) if cache is not None]

    def blocks(self, position: int, length: int) -> list[tuple[int, int]]:
        """How tokens are run: position and number of each call. All at once, unless a rolling cache bounds how many and where they begin.

        Raises:
            ValueError: if they do not fit the context.
        """
        if position < 0 or length < 1 or position + length > self.context_length:
            raise ValueError(
                f"{length} tokens at position {position} do not fit a context_length of {self.context_length}"
            )
        found = []
        while length:
            count = length
            if SLIDING in self.kinds:
                count = min(length, self.block_size, self.sliding_slots - position % self.sliding_slots)
            found.append((position, count))
            position, length = position + count, length - count
        return found

    def masks(self, position: int, length: int, *, slots: int | None = None) -> tuple[Tensor | None, Tensor | None]:
        """The masks of a call: causal and sliding; None for a kind of layer that there is not.

        Args:
            position: of the first new token.
            length: S.
            slots: of the full-attention cache that are read; all by default.
        """
        two_parts = self.kv != "in_place"
        full = None
        if FULL in self.kinds:
            full = causal_mask(position, length, slots or self.context_length, two_parts=two_parts)
        if SLIDING not in self.kinds:
            return full, None
        window, rolling = self.config.sliding_window, self.sliding_slots
        return full, sliding_mask(position, length, window=window, slots=rolling, two_parts=two_parts)

    @torch.no_grad()
    def whole(self, input_ids: Tensor) -> Tensor:
        """Logits of whole sequences from their beginning, without a cache.

        Shape:
            - input_ids: int `[B, S]`
            - output: `[B, S, V]`
        """
        with self.without_cache():
            return self(input_ids, torch.zeros(1, dtype=torch.int32), *self.whole_masks(input_ids.shape[1]))

    def whole_masks(self, length: int) -> tuple[Tensor | None, Tensor | None]:
        """The masks of a sequence that begins at position 0 and is its own context."""
        full = causal_mask(0, length, length) if FULL in self.kinds else None
        if SLIDING not in self.kinds:
            return full, None
        window = min(self.config.sliding_window, length)
        slots = length + window - 1  # none of them rolls
        return full, sliding_mask(0, length, window=window, slots=slots)[..., :length]

    @contextmanager
    def without_cache(self) -> Iterator[None]:
        """Attention reads the tokens of the call themselves, which must begin at position 0; several sequences may run at once."""
        caches = {name: getattr(self, name) for name in ("cache", "sliding_cache")}
        try:
            for name, cache in caches.items():
                if cache is not None:
                    del self._modules[name]
                    self.__dict__[name] = NoCache()
            yield
        finally:
            for name, cache in caches.items():
                self.__dict__.pop(name, None)
                setattr(self, name, cache)

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
        prefill: int | Sequence[int] = 64,
        contexts: Sequence[int] = (),
        head: Head = "logits",
        top_k: int = 8,
        verify: int | None = None,
        all_logits: bool = False,
        compression: Compression | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> list[Package]:
        """Writes the model as several packages into a folder: for sizes that one package should not have.

        `Session`, and what is built on it, takes the folder as it takes a package. A model that is too large to be loaded whole is
        converted by `ane_layers.conversion.chunks.convert_chunks`, which loads a part at a time.

        Args:
            folder: of the packages; appears once all of them are complete and checked.
            chunks: how many packages have layers.
            limit: bytes of weights that each package may have, in place of a number of chunks.
            head_apart: whether norm and head are a package of their own.
            prefill, contexts, head, top_k, verify, all_logits, compression, progress: see `convert`.

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
            prefill=prefill,
            contexts=contexts,
            head=head,
            top_k=top_k,
            verify=verify,
            all_logits=all_logits,
            compression=compression,
            duplicate_tied=False,
            progress=progress,
        )
