"""Grouped-query attention against torch's own, and what it does to ranks and to K and V."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from ane_layers.layers import (
    GroupedQueryAttention,
    HeadSharing,
    Linear,
    RMSNorm,
    causal_mask,
    contiguous_heads,
    merge_heads,
    split_heads,
)

HEADS = [(4, 4), (8, 2), (6, 2), (10, 2), (5, 1), (1, 1)]  # MHA, 4, 3 and 5 heads a group, MQA, one head
LENGTHS = [(1, 7), (5, 13)]  # (S, T)
TOLERANCE = {"atol": 1e-5, "rtol": 0}


def inputs(h: int, k: int, s: int, t: int, *, b: int = 1, d: int = 12, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(b, h, s, d, generator=generator)
    key, value = torch.randn(2, b, k, t, d, generator=generator)
    return query, key, value


def attention(h: int, k: int, d: int = 12, **options: Any) -> GroupedQueryAttention:
    return GroupedQueryAttention(num_attention_heads=h, num_key_value_heads=k, head_dim=d, **options)


@pytest.mark.parametrize("head_sharing", ["fold", "repeat_kv"])
@pytest.mark.parametrize("b", [1, 3])
@pytest.mark.parametrize(("s", "t"), LENGTHS)
@pytest.mark.parametrize(("h", "k"), HEADS)
def test_attention_matches_torch_sdpa(h: int, k: int, s: int, t: int, b: int, head_sharing: HeadSharing) -> None:
    query, key, value = inputs(h, k, s, t, b=b)
    mask = torch.cat([causal_mask(t - s - i % 2, s, t) for i in range(b)])  # another position in each sequence
    expected = F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
    assert_close(attention(h, k, head_sharing=head_sharing)(query, key, value, mask), expected, **TOLERANCE)


@pytest.mark.parametrize("head_sharing", ["fold", "repeat_kv"])
@pytest.mark.parametrize("s", [1, 4])
def test_attention_without_mask_and_with_scale_matches_torch_sdpa(s: int, head_sharing: HeadSharing) -> None:
    query, key, value = inputs(6, 2, s, 9, b=3)
    expected = F.scaled_dot_product_attention(query, key, value, enable_gqa=True, scale=0.7)
    assert_close(attention(6, 2, scale=0.7, head_sharing=head_sharing)(query, key, value), expected, **TOLERANCE)


@pytest.mark.parametrize(("s", "t"), LENGTHS)
def test_scale_of_one_with_scaled_query_matches_default_scale(s: int, t: int) -> None:
    query, key, value = inputs(8, 2, s, t)
    expected = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    assert_close(attention(8, 2, scale=1.0)(query * 12**-0.5, key, value), expected, **TOLERANCE)


@pytest.mark.parametrize("b", [1, 3])
@pytest.mark.parametrize(("s", "t"), LENGTHS)
@pytest.mark.parametrize(("h", "k"), HEADS)
def test_mask_aligned_once_matches_mask_aligned_inside(h: int, k: int, s: int, t: int, b: int) -> None:
    layer = attention(h, k)
    mask = causal_mask(t - s, s, t)
    aligned = layer.align_mask(mask, s)
    assert aligned.shape == (1, 1, s if s == 1 else s * h // k, t)
    assert_close(layer.align_mask(aligned, s), aligned, atol=0, rtol=0)
    query, key, value = inputs(h, k, s, t, b=b)
    assert_close(layer(query, key, value, aligned), layer(query, key, value, mask), atol=0, rtol=0)


def test_repeat_kv_needs_no_mask_alignment() -> None:
    mask = causal_mask(3, 4, 9)
    assert attention(8, 2, head_sharing="repeat_kv").align_mask(mask, 4) is mask


@pytest.mark.parametrize("head_sharing", ["fold", "repeat_kv"])
@pytest.mark.parametrize("s", [1, 3])
def test_key_value_head_of_each_query_head_matches_onnx_7274(s: int, head_sharing: HeadSharing) -> None:
    query, key, value = inputs(4, 2, s, 7)
    value[:, 0], value[:, 1] = 1.0, 2.0
    out = attention(4, 2, head_sharing=head_sharing)(query, key, value)
    expected = torch.tensor([1.0, 1.0, 2.0, 2.0])[None, :, None, None].expand_as(out)
    assert_close(out, expected, **TOLERANCE)


class Recorder(TorchDispatchMode):
    """Every operation that torch runs, with the size of its inputs and the shape of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[str, int, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read = max((x.numel() for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, Tensor)), default=0)
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.operations.append((func.overloadpacket.__name__, read, tuple(tensor.shape)))
        return out

    def repetitions(self) -> list[str]:
        """Operations that only move data and give more elements than any input has."""
        moving = {"expand", "repeat", "repeat_interleave", "index", "index_select", "gather", "tile", "cat", "stack"}
        return [name for name, read, shape in self.operations if name in moving and torch.Size(shape).numel() > read]


@pytest.mark.parametrize(("s", "t"), [(1, 64), (6, 64)])
@pytest.mark.parametrize(("h", "k"), [(8, 2), (6, 2), (5, 1)])
def test_fold_repeats_nothing_where_repeat_kv_does(h: int, k: int, s: int, t: int) -> None:
    query, key, value = inputs(h, k, s, t)
    found = {}
    for head_sharing in ("fold", "repeat_kv"):
        layer = attention(h, k, head_sharing=head_sharing)
        mask = layer.align_mask(causal_mask(t - s, s, t), s)
        with Recorder() as found[head_sharing]:
            layer(query, key, value, mask)
    assert found["fold"].repetitions() == []
    assert found["repeat_kv"].repetitions() == ["expand", "expand"]  # K and V
    # Nothing that the folding makes is as large as one repeated K; the scores are the largest.
    sizes = [torch.Size(shape).numel() for _, _, shape in found["fold"].operations]
    assert max(sizes) <= max(key.numel(), h * s * t)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(("s", "t"), [(1, 9), (6, 9)])
@pytest.mark.parametrize(("h", "k"), HEADS)
def test_fold_stays_at_rank_4_in_a_trace(h: int, k: int, s: int, t: int) -> None:
    """The graph that a converter sees."""
    layer = attention(h, k).eval()
    with torch.no_grad():
        traced = torch.jit.trace(layer, (*inputs(h, k, s, t), causal_mask(t - s, s, t)))
    assert max(ranks(traced)) == 4
    assert not {"aten::expand", "aten::repeat", "aten::repeat_interleave", "aten::index_select"} & operations(traced)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_repeat_kv_reaches_rank_5_in_a_trace() -> None:
    """That the two checks above can fail."""
    traced = torch.jit.trace(attention(8, 2, head_sharing="repeat_kv"), (*inputs(8, 2, 1, 9), causal_mask(8, 1, 9)))
    assert max(ranks(traced)) == 5
    assert "aten::expand" in operations(traced)


def ranks(traced: Any) -> set[int]:
    values = itertools.chain.from_iterable(node.outputs() for node in traced.inlined_graph.nodes())
    return {value.type().dim() for value in values if value.type().kind() == "TensorType" and value.type().dim()}


def operations(traced: Any) -> set[str]:
    return {node.kind() for node in traced.inlined_graph.nodes()}


class Projected(nn.Module):
    """Projections with bias, a norm over all query channels, attention, output projection: the layers in a port."""

    def __init__(self, h: int, k: int, d: int, channels: int, generator: torch.Generator) -> None:
        super().__init__()
        self.attention = attention(h, k, d)
        self.q_proj = Linear(channels, h * d, bias=True)
        self.k_proj = Linear(channels, k * d, bias=True)
        self.v_proj = Linear(channels, k * d, bias=True)
        self.o_proj = Linear(h * d, channels)
        self.q_norm = RMSNorm(h * d, eps=1e-5, dim=1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0, 0.3, generator=generator)
            self.q_norm.weight.uniform_(0.5, 1.5, generator=generator)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h, k = self.attention.num_attention_heads, self.attention.num_key_value_heads
        query = split_heads(self.q_norm(self.q_proj(x)), h)
        key, value = split_heads(self.k_proj(x), k), split_heads(self.v_proj(x), k)
        return self.o_proj(merge_heads(self.attention(query, key, value, mask)))


@pytest.mark.parametrize("b", [1, 3])
@pytest.mark.parametrize("s", [1, 5])
@pytest.mark.parametrize(("h", "k"), [(6, 2), (6, 3), (15, 3), (5, 1), (4, 4)])
def test_interleaved_heads_made_contiguous_match_gathered_heads(h: int, k: int, s: int, b: int) -> None:
    d, channels = 6, 20
    generator = torch.Generator().manual_seed(h * k)
    model = Projected(h, k, d, channels, generator)
    x, mask = torch.randn(b, channels, 1, s, generator=generator), causal_mask(0, s, s)

    # The reference keeps the interleaved checkpoint: query head i takes KV head i % K.
    rows = x.squeeze(2).transpose(1, 2)  # [B, S, C]
    linear = {
        n: F.linear(rows, p.weight.flatten(1), p.bias)
        for n, p in model.named_children()
        if n.endswith("_proj") and n != "o_proj"
    }
    query = F.rms_norm(linear["q_proj"], (h * d,), model.q_norm.weight, 1e-5).view(b, s, h, d).transpose(1, 2)
    key, value = (
        linear[name].view(b, s, k, d).transpose(1, 2)[:, torch.arange(h) % k] for name in ("k_proj", "v_proj")
    )
    out = F.scaled_dot_product_attention(query, key, value, mask).transpose(1, 2).reshape(b, s, h * d)
    expected = F.linear(out, model.o_proj.weight.flatten(1)).transpose(1, 2).unsqueeze(2)

    order = contiguous_heads(h, k, d)
    assert sorted(order.tolist()) == list(range(h * d))
    with torch.no_grad():
        for parameter in (model.q_proj.weight, model.q_proj.bias, model.q_norm.weight):
            parameter.copy_(parameter[order])
        model.o_proj.weight.copy_(model.o_proj.weight[:, order])
        assert_close(model(x, mask), expected, **TOLERANCE)


@pytest.mark.parametrize("b", [1, 3])
@pytest.mark.parametrize("s", [1, 5])
def test_split_and_merge_heads_match_view_and_transpose(b: int, s: int) -> None:
    x = torch.randn(b, 21, 1, s, generator=torch.Generator().manual_seed(0))
    heads = split_heads(x, 3)
    assert_close(heads, x.squeeze(2).transpose(1, 2).view(b, s, 3, 7).transpose(1, 2), atol=0, rtol=0)
    assert_close(merge_heads(heads), x, atol=0, rtol=0)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("s", [1, 5])
def test_split_and_merge_heads_stay_at_rank_4_in_a_trace(s: int) -> None:
    traced = torch.jit.trace(lambda x: merge_heads(split_heads(x, 3)), torch.randn(1, 21, 1, s))
    assert max(ranks(traced)) == 4


@pytest.mark.parametrize("head_sharing", ["fold", "repeat_kv"])
@pytest.mark.parametrize("s", [1, 3])
def test_fully_masked_fp16_row_matches_the_mean_of_the_values(s: int, head_sharing: HeadSharing) -> None:
    query, key, value = (x.half() for x in inputs(4, 2, s, 7))
    mask = torch.full((1, 1, s, 7), -4e4, dtype=torch.float16)
    out = attention(4, 2, scale=1.0, head_sharing=head_sharing)(query * 0, key, value, mask)
    mean = value.float().mean(2).repeat_interleave(2, dim=1)[:, :, None].expand_as(out)
    assert_close(out.float(), mean, atol=2e-3, rtol=0)


@pytest.mark.parametrize(("h", "k"), [(6, 4), (4, 0), (2, 4), (0, -1)])
def test_heads_that_do_not_divide_are_refused(h: int, k: int) -> None:
    for make in (attention, contiguous_heads):
        with pytest.raises(ValueError, match=rf"num_attention_heads \({h}\).*num_key_value_heads \({k}\)"):
            make(h, k, 8)


def test_unknown_head_sharing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"head_sharing.*'fold', 'repeat_kv'.*'broadcast'"):
        attention(4, 2, head_sharing="broadcast")
