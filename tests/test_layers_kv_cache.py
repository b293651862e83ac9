"""The key-value cache against plain concatenation and `transformers`' static cache."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from ane_layers.layers import KVCache

LAYERS, K, D, T = 3, 2, 5, 11


def cache(b: int = 1) -> KVCache:
    return KVCache(num_layers=LAYERS, num_key_value_heads=K, head_dim=D, context_length=T, batch_size=b)


def tokens(b: int, s: int, seed: int) -> tuple[Tensor, Tensor]:
    key, value = torch.randn(2, b, K, s, D, generator=torch.Generator().manual_seed(seed))
    return key, value


def at(position: int) -> Tensor:
    return torch.tensor([position], dtype=torch.int32)


@pytest.mark.parametrize("b", [1, 3])
@pytest.mark.parametrize("blocks", [[4, 4, 3], [1] * 11, [4, 1, 1, 5], [7]])
def test_cache_matches_concatenation(b: int, blocks: list[int]) -> None:
    store = cache(b)
    seen: dict[int, list[tuple[Tensor, Tensor]]] = {layer: [] for layer in range(LAYERS)}
    position = 0
    for block in blocks:
        for layer in range(LAYERS):
            new = tokens(b, block, seed=10 * position + layer)
            seen[layer].append(new)
            for out, written in zip(
                store.update(layer, *new, at(position)), zip(*seen[layer], strict=True), strict=True
            ):
                expected = torch.cat(written, dim=2)
                assert out.shape == (b, K, T, D)
                assert_close(out[:, :, : position + block], expected, atol=0, rtol=0)
                assert (out[:, :, position + block :] == 0).all()
        position += block


def test_writes_at_0_and_then_at_5_fill_both_slots() -> None:
    store = cache()
    first, second = tokens(1, 1, 0), tokens(1, 1, 1)
    store.update(1, *first, at(0))
    key, value = store.update(1, *second, at(5))
    for out, a, b in ((key, first[0], second[0]), (value, first[1], second[1])):
        assert_close(out[:, :, [0, 5]], torch.cat([a, b], dim=2), atol=0, rtol=0)
        assert out.count_nonzero() == 2 * K * D
    assert not store.key[[0, 2]].any()
    assert not store.value[[0, 2]].any()


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_traced_position_stays_an_input() -> None:
    """Read by `int(position)`, it would become a constant of the trace."""

    class Update(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cache = cache()

        def forward(self, key: Tensor, value: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
            return self.cache.update(0, key, value, position)

    traced = torch.jit.trace(Update(), (*tokens(1, 1, 0), at(0)), check_trace=False)
    traced.cache.key.zero_()
    traced.cache.value.zero_()
    traced(*tokens(1, 1, 1), at(0))
    key, _ = traced(*tokens(1, 1, 2), at(5))
    assert_close(key[:, :, [0, 5]], torch.cat([tokens(1, 1, 1)[0], tokens(1, 1, 2)[0]], dim=2), atol=0, rtol=0)
    assert key.count_nonzero() == 2 * K * D


def test_an_overwritten_slot_keeps_the_last_value() -> None:
    store = cache(3)
    store.update(0, *tokens(3, 4, 0), at(2))
    new = tokens(3, 2, 1)
    key, _ = store.update(0, *new, at(3))
    assert_close(key[:, :, 3:5], new[0], atol=0, rtol=0)
    assert_close(key[:, :, [2, 5]], tokens(3, 4, 0)[0][:, :, [0, 3]], atol=0, rtol=0)


def test_reset_forgets_everything() -> None:
    store = cache(3)
    store.update(2, *tokens(3, 4, 0), at(2))
    assert store.key.any()
    assert store.value.any()
    store.reset()
    assert not store.key.any()
    assert not store.value.any()


def test_shape_of_the_buffers_matches_the_contract() -> None:
    assert cache().key.shape == cache().value.shape == (LAYERS, K, T, D)
    assert cache(3).key.shape == (LAYERS, 3 * K, T, D)
    assert cache().context_length == T
    assert cache().state_dict() == {}


@pytest.mark.parametrize("name", ["num_layers", "num_key_value_heads", "head_dim", "context_length", "batch_size"])
def test_sizes_below_one_are_refused(name: str) -> None:
    sizes = dict.fromkeys(("num_layers", "num_key_value_heads", "head_dim", "context_length", "batch_size"), 2)
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        KVCache(**(sizes | {name: 0}))


def test_a_block_past_the_end_is_an_error_and_changes_nothing() -> None:
    store = cache()
    with pytest.raises(RuntimeError):
        store.update(0, *tokens(1, 4, 0), at(T - 2))
    assert not store.key.any()
