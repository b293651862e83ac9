"""Grouped-query attention in one Triton kernel, decode and prefill: a program instance reads a KV head's tile once for its whole group.

    pip install triton          # Linux; no GPU is needed for Triton's own interpreter
    python benchmarks/gqa_triton.py

Runs in Triton's CPU interpreter (`TRITON_INTERPRET=1`, set here), which shows that the kernel is right and counts what it loads. It shows
nothing about speed: the interpreter is slow, and no GPU was used. The kernel is there to show the mapping, not to compete.

`share=True` gives one instance the G·S query rows of a KV head: the folding, done by index arithmetic. `share=False` gives every query head
an instance of its own, which finds its KV head by h // G: nothing is copied there either, but every K and V tile is loaded G times.
"""

from __future__ import annotations

import os
import platform
import sys

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
import torch.nn.functional as F
from torch import Tensor

from ane_layers import causal_mask

try:
    import triton
    import triton.language as tl
except ImportError:
    sys.exit("gqa_triton.py needs Triton: pip install triton")


@triton.jit
def attention_kernel(
    query,  # [H, S, D]
    key,  # [K, T, D]
    value,  # [K, T, D]
    out,  # [H, S, D]
    loaded,  # [1], elements of K and V that were loaded
    first,  # cache slot of the first new token
    scale,
    S: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,  # query heads of one instance: G, or 1
    G: tl.constexpr,
    ROWS: tl.constexpr,  # rows of one instance, a power of two of at least 16
    TILE: tl.constexpr,  # cache slots read at a time
):
    head = tl.program_id(0) * HEADS  # the instance's first query head
    kv_head = head // G
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)  # group-major, as in the folding: row = g·S + s
    token = row % S
    live = row < HEADS * S
    d = tl.arange(0, D)
    q_at = ((head + row // S) * S + token)[:, None] * D + d[None, :]
    q = tl.load(query + q_at, mask=live[:, None], other=0.0) * scale  # [ROWS, D]

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, D], tl.float32)
    # Slots behind the last new token are read by nobody.
    for start in range(0, first + S, TILE):
        slot = start + tl.arange(0, TILE)
        there = slot < T
        kv_at = (kv_head * T + slot)[:, None] * D + d[None, :]
        k = tl.load(key + kv_at, mask=there[:, None], other=0.0)  # [TILE, D]: once, for all rows of the group
        v = tl.load(value + kv_at, mask=there[:, None], other=0.0)
        tl.atomic_add(loaded, 2 * D * tl.sum(there.to(tl.int64)))
        scores = tl.dot(q, tl.trans(k))  # [ROWS, TILE]
        visible = there[None, :] & (slot[None, :] <= (first + token)[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        # Softmax in one pass: sums and results so far are scaled down whenever a larger score turns up. Slot 0 is visible to all rows,
        # so `top` is finite after the first tile.
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp(scores - new_top[:, None])
        shrink = tl.exp(top - new_top)
        total = total * shrink + tl.sum(weights, axis=1)
        result = result * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
        top = new_top
    tl.store(out + q_at, (result / total[:, None]).to(out.dtype.element_ty), mask=live[:, None])


def attention(
    query: Tensor, key: Tensor, value: Tensor, first: int, *, share: bool = True, tile: int = 64
) -> tuple[Tensor, int]:
    """Causal attention of S new tokens, the first in cache slot `first`.

    Shape:
        - query: `[H, S, D]`; key, value: `[K, T, D]`; D a power of two of at least 16
        - output: `[H, S, D]`, and the number of elements of K and V that were loaded
    """
    (heads, tokens, size), (kv_heads, slots, _) = query.shape, key.shape
    if heads % kv_heads or first + tokens > slots:
        raise ValueError(f"{heads} query heads, {kv_heads} KV heads, {tokens} tokens from slot {first} of {slots}")
    group = heads // kv_heads
    each = group if share else 1
    rows = min(128, max(16, triton.next_power_of_2(each * tokens)))
    grid = (heads // each, triton.cdiv(each * tokens, rows))
    out, loaded = torch.empty_like(query), torch.zeros(1, dtype=torch.int64)
    attention_kernel[grid](
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        out,
        loaded,
        first,
        size**-0.5,
        S=tokens,
        T=slots,
        D=size,
        HEADS=each,
        G=group,
        ROWS=rows,
        TILE=tile,
    )
    return out, int(loaded)


def check(heads: int, kv_heads: int, size: int, slots: int, tokens: int, first: int) -> dict[bool, tuple[float, int]]:
    """Largest difference from PyTorch and elements loaded, with and without sharing."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(heads, tokens, size, generator=generator)
    key, value = (torch.randn(kv_heads, slots, size, generator=generator) for _ in range(2))
    mask = causal_mask(first, tokens, slots)
    wanted = F.scaled_dot_product_attention(query[None], key[None], value[None], attn_mask=mask, enable_gqa=True)[0]
    result = {}
    for share in (True, False):
        out, loaded = attention(query, key, value, first, share=share)
        result[share] = ((out - wanted).abs().max().item(), loaded)
    return result


def main() -> None:
    print(
        f"{platform.machine()}, no GPU, Triton {triton.__version__} in its CPU interpreter, torch {torch.__version__}, fp32"
    )
    print(
        "| query heads, KV heads, D | cache | tokens | grouped: error, MiB of K and V | an instance a head: error, MiB |"
    )
    print("| --- | --- | --- | --- | --- |")
    errors: list[float] = []
    for case in (
        (32, 8, 64, 4096, 1, 4095),  # decode, EXAONE 4.0 1.2B
        (32, 8, 64, 4096, 64, 4032),  # a prefill block
        (40, 8, 128, 512, 1, 100),  # EXAONE 4.0 32B's heads
        (6, 2, 16, 37, 5, 20),  # sizes that fill no tile
        (8, 8, 32, 100, 3, 0),  # no groups
        (8, 1, 32, 100, 7, 93),  # one KV head for all
    ):
        heads, kv_heads, size, slots, tokens, _ = case
        found = check(*case)
        errors += [error for error, _ in found.values()]
        cells = [f"{error:.1e}, {count * 4 / 2**20:.3g}" for error, count in found.values()]
        print(f"| {heads}, {kv_heads}, {size} | {slots} | {tokens} | {cells[0]} | {cells[1]} |", flush=True)
    if wrong := [error for error in errors if not error < 1e-5]:
        sys.exit(f"differs from PyTorch by {wrong[0]:.1e}")


if __name__ == "__main__":
    main()
