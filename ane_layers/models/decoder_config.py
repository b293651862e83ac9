"""The config fields that every decoder family has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from ane_layers.layers import rotary_factor, rotary_frequencies
from ane_layers.models.config import (
    FULL,
    SLIDING,
    canonical,
    check_model_type,
    check_positive,
    load_config,
    read_fields,
)


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Fields of a config.json that the arithmetic depends on, under Hugging Face's names; a family adds its own.

    What transformers 4 and 5 write differently is brought to one form first (`canonical`). A field without a default must be in the
    file; one that is not listed is refused.

    Attributes:
        model_type: of the family.
        harmless: fields that a file of this family may hold and that nobody reads.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    hidden_act: str = "silu"
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    model_type: ClassVar[str]
    harmless: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        check_positive(self, "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")
        check_positive(self, "num_attention_heads", "num_key_value_heads", "rope_theta", "max_position_embeddings")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"field num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.rms_norm_eps < 0:
            raise ValueError(f"field rms_norm_eps must not be negative, got {self.rms_norm_eps}")
        if self.hidden_act != "silu":
            raise ValueError(f"field hidden_act must be 'silu', got {self.hidden_act!r}")
        for kind in (FULL, SLIDING):  # refuses an odd head_dim and scaling that is unknown or incomplete
            theta, scaling = self.rope(kind)
            longest = self.max_position_embeddings
            rotary_frequencies(self.rotary_dim, rope_theta=theta, rope_scaling=scaling, context_length=longest)
            rotary_factor(scaling)

    def rope(self, kind: str) -> tuple[float, dict[str, Any] | None]:
        """Base and scaling of the rotary frequencies of layers with a kind of attention."""
        return self.rope_theta, self.rope_scaling

    @property
    def rotary_dim(self) -> int:
        """How many elements of a query or key are rotated, the first ones."""
        return self.head_dim

    @property
    def embedding_scale(self) -> float:
        """Factor on the embedding's vectors."""
        return 1.0

    @property
    def logit_scale(self) -> float:
        """Factor on the logits."""
        return 1.0

    @property
    def logit_softcap(self) -> float | None:
        """Cap of the logits; see `soft_cap`."""
        return None

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], *, file: str | Path = "config.json") -> Self:
        """From the contents of a config.json, written by transformers 4 or 5.

        Raises:
            ValueError: naming the file, the field and the value.
        """
        check_model_type(cls, config, file=file)
        return read_fields(cls, cls.canonical(config, file=file), file=file, ignore=cls.harmless)

    @classmethod
    def canonical(cls, config: Mapping[str, Any], *, file: str | Path) -> dict[str, Any]:
        """The file's fields under one spelling; see `ane_layers.models.config.canonical`."""
        return canonical(config, file=file)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Self:
        """From a Hugging Face model folder. Raises `ValueError` naming the file, the field and the value."""
        config, path = load_config(folder)
        return cls.from_dict(config, file=path)
