"""Weights kept in fp16: the same results, half the memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ane_layers import Embedding, Linear
from ane_layers.conversion import FunctionSpec, convert
from ane_layers.interpreter import MLProgram


class Mixed(nn.Module):
    """A lookup, products with and without bias, a grouped and a strided convolution: large constants in every kind of use."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding(512, 64)
        self.up = Linear(64, 512)
        self.biased = Linear(512, 64, bias=True)
        self.plain = nn.Linear(64, 512)
        self.grouped = nn.Conv2d(512, 512, (1, 3), padding=(0, 1), groups=8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.biased(torch.relu(self.up(self.embedding(ids))))
        return self.grouped(self.plain(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    module = Mixed()
    module.biased.bias.data.normal_()  # type: ignore[union-attr]
    functions = {f"s{s}": FunctionSpec(inputs={"ids": torch.zeros(1, s, dtype=torch.int32)}) for s in (1, 6)}
    return convert(module, tmp_path_factory.mktemp("compact") / "m.mlpackage", functions=functions).path


def constants(program: MLProgram) -> list[Tensor]:
    steps = program._plan.steps
    values = [value for step in steps for value in step.template] + program._plan.slots
    return [value for value in values if isinstance(value, Tensor) and value.numel() >= 1 << 14]


@pytest.mark.parametrize("name", ["s1", "s6"])
def test_compact_equals_decoded_in_fp32(package: Path, name: str) -> None:
    ids = {"ids": np.arange(int(name[1:]), dtype=np.int32)[None] * 85}
    decoded, compact = (MLProgram(package, name, compact=compact) for compact in (False, True))
    np.testing.assert_array_equal(compact.predict(ids)["output"], decoded.predict(ids)["output"])
    sizes = [sum(value.nbytes for value in constants(program)) for program in (decoded, compact)]
    assert sizes[1] * 2 == sizes[0] > 0
    assert {value.dtype for value in constants(compact)} == {torch.float16}


@pytest.mark.parametrize("name", ["s1", "s6"])
def test_compact_is_within_rounding_in_fp16(package: Path, name: str) -> None:
    ids = {"ids": np.arange(int(name[1:]), dtype=np.int32)[None] * 85}
    decoded, compact = (
        MLProgram(package, name, "fp16", compact=c).predict(ids)["output"].astype(float) for c in (False, True)
    )
    # Sums in another order may round another way in the last bit.
    assert np.abs(compact - decoded).max() <= 2**-9 * np.abs(decoded).max()
    assert np.mean(compact == decoded) > 0.9


def test_large_constants_are_mapped_not_read(package: Path) -> None:
    program = MLProgram(package, "s1", compact=True)
    pointers = {value.data_ptr() for value in constants(program)}
    again = {value.data_ptr() for value in constants(MLProgram(package, "s6", compact=True))}
    assert len(pointers & again) >= 3  # both functions look at the same bytes of the file
