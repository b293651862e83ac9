"""What compression did to each weight: achieved bits, bytes and error, and what was left alone and why."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ane_layers.compression.setting import FP16, Setting
from ane_layers.compression.weights import CompressedWeight


@dataclass(frozen=True, kw_only=True)
class TensorReport:
    """One weight as stored.

    Attributes:
        path: of the parameter.
        shape: of the weight.
        setting: that it was stored with, after fitting groups to the channels.
        bits_per_weight: achieved: all its stored bytes, tables included, over its elements.
        data_bytes: of indices, integers or fp16 numbers.
        table_bytes: of lookup tables or scales.
        error: squared error over the squares of the fp16 weight; 0 for one that is left alone.
        note: why it was left alone, or what was fitted or shared.
    """

    path: str
    shape: tuple[int, ...]
    setting: Setting
    bits_per_weight: float
    data_bytes: int
    table_bytes: int
    error: float
    note: str = ""

    @property
    def stored_bytes(self) -> int:
        return self.data_bytes + self.table_bytes

    @property
    def snr_db(self) -> float:
        """Signal over squared error, in dB; infinite for an exact weight."""
        return math.inf if self.error == 0 else -10 * math.log10(self.error)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"shape": list(self.shape), "setting": self.setting.key, "snr_db": self.snr_db}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TensorReport:
        """What `as_dict` gave."""
        given = {name: value for name, value in values.items() if name != "snr_db"}
        return cls(**given | {"shape": tuple(values["shape"]), "setting": Setting.from_key(values["setting"])})


@dataclass(frozen=True)
class CompressionReport:
    """All weights of a model, in order."""

    recipe: str
    tensors: tuple[TensorReport, ...]

    @property
    def weight_bytes(self) -> int:
        """As stored; a table that is shared counts once."""
        return sum(tensor.stored_bytes for tensor in self.tensors)

    @property
    def table_bytes(self) -> int:
        """Of lookup tables and scales, which are part of `weight_bytes`."""
        return sum(tensor.table_bytes for tensor in self.tensors)

    @property
    def bits_per_weight(self) -> float:
        elements = sum(math.prod(tensor.shape) for tensor in self.tensors if tensor.stored_bytes)
        return 8 * self.weight_bytes / elements if elements else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe,
            "weight_bytes": self.weight_bytes,
            "table_bytes": self.table_bytes,
            "bits_per_weight": self.bits_per_weight,
            "tensors": [tensor.as_dict() for tensor in self.tensors],
        }


def report_compressed(path: str, compressed: CompressedWeight, setting: Setting, *, note: str = "") -> TensorReport:
    """What became of a weight."""
    data = int(compressed.packed.nbytes)
    return TensorReport(
        path=path,
        shape=compressed.shape,
        setting=setting,
        bits_per_weight=8 * compressed.stored_bytes / math.prod(compressed.shape),
        data_bytes=data,
        table_bytes=compressed.stored_bytes - data,
        error=compressed.error,
        note=note,
    )


def report_plain(path: str, shape: tuple[int, ...], note: str, *, shared: bool = False) -> TensorReport:
    """A weight that stays fp16, or, if `shared`, one whose bytes are counted with another."""
    count = math.prod(shape)
    return TensorReport(
        path=path,
        shape=shape,
        setting=FP16,
        bits_per_weight=0.0 if shared else 16.0,
        data_bytes=0 if shared else 2 * count,
        table_bytes=0,
        error=0.0,
        note=note,
    )
