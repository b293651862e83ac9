"""Whole programs as other projects convert them, against the PyTorch and `transformers` models they came from.

Nothing here was written for this package: the recipes are those of stateful Llama, of convolutional networks, of
Stable Diffusion and of ml-ane-transformers, each as small as still shows what is particular to it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters import mil
from coremltools.converters.mil.mil import Function, Program, get_new_symbol, types
from mil_programs import quiet, save_program
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import repeat_kv

from ane_layers.interpreter import MLProgram
from ane_layers.program import Package

mb = mil.Builder

LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB, CONTEXT = 2, 4, 2, 16, 61, 16
CACHE = (LAYERS, 1, KV_HEADS, CONTEXT, HEAD_DIM)
STATES = ("keyCache", "valueCache")
# Renamed in the course of transformers 5.
CACHE_ARGUMENT = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"

FLOAT16, FLOAT32 = ct.precision.FLOAT16, ct.precision.FLOAT32


def decibels(expected: Any, actual: Any) -> float:
    """Power of what is expected over that of the error; 60 dB are three correct digits."""
    expected, actual = (np.asarray(values, np.float64) for values in (expected, actual))
    assert expected.shape == actual.shape
    assert np.isfinite(expected).all()
    assert np.isfinite(actual).all()
    power = np.square(expected).sum()
    assert power > 0
    error = np.square(actual - expected).sum()
    return float("inf") if error == 0 else float(10 * np.log10(power / error))


def randomize(module: nn.Module, seed: int) -> None:
    """Random values everywhere: biases, norms and running statistics too, which start as zeros and ones.

    All are fp16 numbers, so that what a conversion to fp16 does to them is no part of the outcome.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if not tensor.is_floating_point() or name in STATES or "inv_freq" in name:
                continue
            if tensor.ndim > 1:
                tensor.normal_(0, tensor[0].numel() ** -0.5, generator=generator)
            elif name.endswith(("weight", "running_var")):
                tensor.uniform_(0.5, 1.5, generator=generator)
            else:
                tensor.normal_(0, 0.3, generator=generator)
            tensor.copy_(tensor.half())


def operation_types(path: Path) -> set[str]:
    return {operation.type for operation in Package.open(path).function(None).block.walk()}


# Llama with a cache kept in states


class SliceCache(Cache):
    """Keys and values of all layers in two buffers, written and read by slices."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__(layers=[])
        self.buffers = (keys, values)
        self.begin: Any = 0
        self.end: Any = 0
        self.whole = False

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        end = self.end
        for buffer, new in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[layer_idx, :, :, self.begin : end, :] = new
        read = CONTEXT if self.whole else end
        return tuple(buffer[layer_idx, :, :, :read, :] for buffer in self.buffers)

    def get_seq_length(self, *_: Any, **__: Any) -> Any:
        return self.begin

    def get_max_cache_shape(self, *_: Any, **__: Any) -> int:
        return CONTEXT

    def __len__(self) -> int:
        return LAYERS


class StatefulLlama(nn.Module):
    """What is traced: one token at a given position, or any number of them, the mask's width telling where they end."""

    def __init__(self, model: LlamaForCausalLM, flexible: bool) -> None:
        super().__init__()
        self.model = model
        self.flexible = flexible
        self.register_buffer("keyCache", torch.zeros(CACHE))
        self.register_buffer("valueCache", torch.zeros(CACHE))
        self.cache = SliceCache(self.keyCache, self.valueCache)
        self.cache.whole = not flexible

    def forward(self, ids: Tensor, mask: Tensor, position: Tensor | None = None) -> Tensor:
        S = ids.shape[-1]
        begin = mask.shape[-1] - S if position is None else position[0]
        self.cache.begin, self.cache.end = begin, begin + S
        positions = (torch.arange(S) + begin).unsqueeze(0)
        arguments = {"attention_mask": mask, "position_ids": positions, CACHE_ARGUMENT: self.cache, "use_cache": True}
        return self.model(ids, **arguments).logits


def fused_attention(module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor, **_: Any) -> Any:
    """transformers names the scale, and with a named scale the converter takes attention apart; without, it stays whole."""
    k, v = (repeat_kv(x, module.num_key_value_groups) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attention_mask).transpose(1, 2).contiguous(), None


# A name of these tests' own, in a register of the whole process.
AttentionInterface.register("ane_layers_fused", fused_attention)


def llama(attention: str) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=40,  # not heads · head_dim
        intermediate_size=72,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=64,
        rms_norm_eps=2.0**-14,  # an fp16 number, as the weights are
        attn_implementation=attention,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    randomize(model, seed=7)
    # The converter makes fp16 constants of the frequencies. Rounded beforehand, the model and the package mean the same
    # and the comparison below has no limit but fp32; `test_unrounded_llama…` is the one that leaves them as they are.
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq.half().float()
    return model


def causal_mask(begin: int, S: int, width: int) -> np.ndarray:
    rows, columns = np.arange(begin, begin + S)[:, None], np.arange(width)
    return np.where(columns <= rows, 0, -np.inf)[None, None].astype(np.float16)


def save_llama(path: Path, model: LlamaForCausalLM, flexible: bool, precision: Any = FLOAT16) -> Path:
    wrapper = StatefulLlama(model, flexible).eval()
    S, width = (2, 5) if flexible else (1, CONTEXT)
    example = [torch.zeros(1, S, dtype=torch.int32), torch.zeros(1, 1, S, width)]
    sizes: tuple[Any, Any] = (1, CONTEXT)
    if flexible:
        sizes = (ct.RangeDim(1, CONTEXT, default=1), ct.RangeDim(1, CONTEXT, default=1))
    inputs = [
        ct.TensorType("ids", (1, sizes[0]), np.int32),
        ct.TensorType("mask", (1, 1, *sizes), np.float16),
    ]
    if not flexible:
        example.append(torch.tensor([3], dtype=torch.int32))
        inputs.append(ct.TensorType("position", (1,), np.int32))
    with quiet(), torch.no_grad():
        ct.convert(
            torch.jit.trace(wrapper, tuple(example), check_trace=False),
            inputs=inputs,
            outputs=[ct.TensorType("logits", dtype=np.float16)],
            states=[ct.StateType(ct.TensorType(shape=CACHE, dtype=np.float16), name=name) for name in STATES],
            minimum_deployment_target=ct.target.iOS18,
            compute_precision=precision,
            skip_model_load=True,
        ).save(str(path))
    return path


IDS = np.random.default_rng(11).integers(0, VOCAB, (1, 12)).astype(np.int32)
PREFILL_AND_DECODE = [(0, 5), (5, 3), *((begin, 1) for begin in range(8, 12))]
DECODE = [(begin, 1) for begin in range(12)]


def generate(program: MLProgram, steps: Sequence[tuple[int, int]], flexible: bool) -> tuple[np.ndarray, Any]:
    """The logits of all steps, one after the other, and the state after them."""
    state = program.make_state()
    logits = []
    for begin, S in steps:
        data = {
            "ids": IDS[:, begin : begin + S],
            "mask": causal_mask(begin, S, begin + S if flexible else CONTEXT),
        }
        if not flexible:
            data["position"] = np.array([begin], np.int32)
        logits.append(program.predict(data, state)["logits"])
        assert logits[-1].shape == (1, S, VOCAB)
    return np.concatenate(logits, axis=1), state


def llama_reference(model: LlamaForCausalLM) -> tuple[np.ndarray, list[np.ndarray]]:
    """`transformers`' own logits of the whole text in one pass, its own mask, and the cache it makes of it."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(torch.from_numpy(IDS).long(), use_cache=True)
    layers = output[CACHE_ARGUMENT].layers
    caches = [
        torch.stack([layer.keys for layer in layers]),
        torch.stack([layer.values for layer in layers]),
    ]
    return output.logits.numpy(), [cache.numpy() for cache in caches]


@pytest.mark.parametrize("attention", ["sdpa", "eager", "ane_layers_fused"])
@pytest.mark.parametrize("flexible", [False, True], ids=["one_token", "any_length"])
def test_stateful_llama_matches_transformers(attention: str, flexible: bool, tmp_path: Path) -> None:
    model = llama(attention)
    path = save_llama(tmp_path / "llama.mlpackage", model, flexible)
    logits, caches = llama_reference(model)
    found = operation_types(path)
    assert {"read_state", "slice_update"} <= found
    assert ("scaled_dot_product_attention" in found) == (attention == "ane_layers_fused")
    steps = PREFILL_AND_DECODE if flexible else DECODE
    length = IDS.shape[1]
    for mode, least in (("fp32", 100), ("fp16", 50), ("fp16_pessimistic", 48)):
        actual, state = generate(MLProgram(path, mode=mode), steps, flexible)
        assert decibels(logits, actual) >= least
        for name, cache in zip(STATES, caches, strict=True):
            kept = state.read_state(name)
            assert decibels(cache, kept[..., :length, :]) >= least
            assert not kept[..., length:, :].any()


def test_unrounded_llama_in_float32_matches_transformers(tmp_path: Path) -> None:
    model = llama("sdpa")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(torch.empty_like(parameter).uniform_(0.9, 1.1, generator=generator))
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.original_inv_freq.clone()
    assert (rotary.inv_freq != rotary.inv_freq.half()).any()
    path = save_llama(tmp_path / "llama.mlpackage", model, flexible=True, precision=FLOAT32)
    actual, _ = generate(MLProgram(path), PREFILL_AND_DECODE, flexible=True)
    assert decibels(llama_reference(model)[0], actual) >= 100


def joined_scalars(program: MLProgram) -> list[str]:
    """The names of all `concat`s that take a scalar which the program computes."""
    block = program.function.block
    rank = {value.name: value.tensor_type.rank for operation in block.walk() for value in operation.outputs}
    computed = {value.name for each in block.walk() if each.type != "const" for value in each.outputs}
    return [
        operation.outputs[0].name
        for operation in block.walk()
        if operation.type == "concat"
        and any(value.name in computed and rank[value.name] == 0 for value in operation.inputs["values"])
    ]


def test_flexible_llama_writes_where_the_shapes_say(tmp_path: Path) -> None:
    """The ends of the slices are computed, scalars joined to vectors; a text split otherwise gives the same."""
    model = llama("sdpa")
    path = save_llama(tmp_path / "llama.mlpackage", model, flexible=True)
    program = MLProgram(path)
    assert joined_scalars(program)
    once, _ = generate(program, [(0, 12)], flexible=True)
    for steps in (DECODE, [(0, 1), (1, 11)], [(0, 7), (7, 5)]):
        assert decibels(once, generate(program, steps, flexible=True)[0]) >= 100
    # The cache is what makes that so: the same token over an empty one gives other logits.
    state = program.make_state()
    data = {"ids": IDS[:, 4:5], "mask": causal_mask(4, 1, 5)}
    assert decibels(once[:, 4:5], program.predict(data, state)["logits"]) < 30
    with pytest.raises(ValueError, match="'ids' has shape"):
        program.predict({"ids": np.zeros((1, CONTEXT + 1), np.int32), "mask": data["mask"]}, state)


# Modules without a state


def check_module(
    path: Path,
    module: nn.Module,
    shapes: Sequence[tuple[int, ...]],
    expects: set[str],
    gates: dict[tuple[Any, str], float],
    seed: int,
) -> None:
    """Converts at both precisions and compares what each mode computes with the module's own results."""
    module.eval()
    randomize(module, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    x = [torch.randn(shape, generator=generator).half().float() for shape in shapes]
    with quiet(), torch.no_grad():
        expected = module(*x).numpy()
        traced = torch.jit.trace(module, tuple(x), check_trace=False)
    for precision in dict.fromkeys(precision for precision, _ in gates):
        dtype = np.float16 if precision is FLOAT16 else np.float32
        with quiet():
            ct.convert(
                traced,
                inputs=[ct.TensorType(f"x{i}", shape, dtype) for i, shape in enumerate(shapes)],
                outputs=[ct.TensorType("y", dtype=dtype)],
                minimum_deployment_target=ct.target.iOS18,
                compute_precision=precision,
                skip_model_load=True,
            ).save(str(path))
        missing = expects - operation_types(path)
        assert not missing, missing
        for (gated, mode), least in gates.items():
            if gated is precision:
                data = {f"x{i}": each.numpy().astype(dtype) for i, each in enumerate(x)}
                y = MLProgram(path, mode=mode).predict(data)["y"]
                assert decibels(expected, y) >= least, (precision, mode)


class Residual(nn.Module):
    def __init__(self, C: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(C, out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, groups=2, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.downsample = nn.Sequential(nn.Conv2d(C, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.downsample(x))


class ResidualNet(nn.Module):
    """The beginning, two stages and the end of torchvision's ResNet; a norm before the first convolution cannot be fused."""

    def __init__(self, pool: nn.Module, features: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 7, 2, padding=3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        self.stages = nn.Sequential(Residual(8, 8, 1), Residual(8, 12, 2))
        self.pool = pool
        self.fc = nn.Linear(features, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x).relu()
        return self.fc(torch.flatten(self.pool(self.stages(self.maxpool(self.stem(x)))), 1))


# 35 × 29 becomes 18 × 15, 9 × 8 and 5 × 4: odd sizes show which side padding and strides begin from.
@pytest.mark.parametrize(
    ("pool", "features", "type_"),
    [
        (nn.AdaptiveAvgPool2d(1), 12, "reduce_mean"),
        (nn.AvgPool2d(2, 2, padding=(0, 1), ceil_mode=False, count_include_pad=False), 12 * 2 * 3, "avg_pool"),
        (nn.AvgPool2d(3, 2, padding=1), 12 * 3 * 2, "avg_pool"),
    ],
    ids=["global", "excluding_padding", "including_padding"],
)
def test_residual_network_matches_torch(pool: nn.Module, features: int, type_: str, tmp_path: Path) -> None:
    # In fp16 the norms are fused into the convolutions' weights, which are rounded after that.
    check_module(
        tmp_path / "net.mlpackage",
        ResidualNet(pool, features),
        [(2, 3, 35, 29)],
        {"conv", "max_pool", "linear", "relu", "batch_norm", type_},
        {(FLOAT32, "fp32"): 110, (FLOAT16, "fp32"): 60, (FLOAT16, "fp16"): 55},
        seed=21,
    )


class DiffusionBlock(nn.Module):
    """Stable Diffusion's spatial transformer: group norm, 1×1 convolutions, self and cross attention, GEGLU."""

    def __init__(self, attention: str, C: int = 16, context: int = 12, heads: int = 2) -> None:
        super().__init__()
        self.attention, self.heads = attention, heads
        self.norm = nn.GroupNorm(4, C, eps=2.0**-14)
        self.proj_in, self.proj_out = nn.Conv2d(C, C, 1), nn.Conv2d(C, C, 1)
        self.norms = nn.ModuleList([nn.LayerNorm(C, eps=2.0**-14) for _ in range(3)])
        self.q = nn.ModuleList([nn.Linear(C, C, bias=False) for _ in range(2)])
        self.k = nn.ModuleList([nn.Linear(width, C, bias=False) for width in (C, context)])
        self.v = nn.ModuleList([nn.Linear(width, C, bias=False) for width in (C, context)])
        self.out = nn.ModuleList([nn.Linear(C, C) for _ in range(2)])
        self.geglu, self.down = nn.Linear(C, 8 * C), nn.Linear(4 * C, C)

    def split(self, x: Tensor) -> Tensor:
        B, S, C = x.shape
        return x.reshape(B, S, self.heads, C // self.heads).permute(0, 2, 1, 3).reshape(B * self.heads, S, -1)

    def attend(self, number: int, x: Tensor, context: Tensor) -> Tensor:
        B, S, C = x.shape
        q, k, v = (
            self.split(layer(each))
            for layer, each in ((self.q[number], x), (self.k[number], context), (self.v[number], context))
        )
        scale = (C // self.heads) ** -0.5
        if self.attention == "einsum":
            weights = (torch.einsum("bid,bjd->bij", q, k) * scale).softmax(-1)
            y = torch.einsum("bij,bjd->bid", weights, v)
        else:
            room = torch.zeros(q.shape[0], q.shape[1], k.shape[1])
            weights = torch.baddbmm(room, q, k.transpose(-1, -2), beta=0, alpha=scale).softmax(-1)
            y = torch.bmm(weights, v)
        y = y.reshape(B, self.heads, S, -1).permute(0, 2, 1, 3).reshape(B, S, C)
        return self.out[number](y)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        B, C, height, width = x.shape
        y = self.proj_in(self.norm(x)).permute(0, 2, 3, 1).reshape(B, height * width, C)
        normed = self.norms[0](y)
        y = self.attend(0, normed, normed) + y
        y = self.attend(1, self.norms[1](y), context) + y
        value, gate = self.geglu(self.norms[2](y)).chunk(2, dim=-1)
        y = self.down(value * F.gelu(gate)) + y
        return self.proj_out(y.reshape(B, height, width, C).permute(0, 3, 1, 2)) + x


# In fp32, 106 dB are the most a group norm can give: the converter makes a batch norm of its weight and bias, with mean 0,
# variance 1 and the default epsilon of 1e-5, which divides by √1.00001.
@pytest.mark.parametrize("attention", ["einsum", "baddbmm"])
def test_diffusion_block_matches_torch(attention: str, tmp_path: Path) -> None:
    check_module(
        tmp_path / "block.mlpackage",
        DiffusionBlock(attention),
        [(2, 16, 3, 5), (2, 7, 12)],
        {"conv", "layer_norm", "linear", "softmax", "gelu", "split", "matmul"},
        {(FLOAT32, "fp32"): 100, (FLOAT16, "fp32"): 75, (FLOAT16, "fp16"): 55},
        seed=31,
    )


class ChannelsFirstNorm(nn.Module):
    """ml-ane-transformers' norm over the channels of [B, C, 1, S]: the bias is added before the weight multiplies."""

    def __init__(self, C: int, eps: float = 2.0**-14) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(C)), nn.Parameter(torch.zeros(C)), eps

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(dim=1, keepdim=True)
        normed = centred * (centred.pow(2).mean(dim=1, keepdim=True) + self.eps).rsqrt()
        C = self.bias.numel()
        return (normed + self.bias.view(1, C, 1, 1)) * self.weight.view(1, C, 1, 1)


class ChannelsFirstBlock(nn.Module):
    """ml-ane-transformers' layout: [B, C, 1, S] throughout, 1×1 convolutions, each head on its own."""

    def __init__(self, C: int = 24, heads: int = 3) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, C // heads
        self.norm1, self.norm2 = ChannelsFirstNorm(C), ChannelsFirstNorm(C)
        self.q, self.k, self.v, self.o = (nn.Conv2d(C, C, 1) for _ in range(4))
        self.up, self.down = nn.Conv2d(C, 2 * C, 1), nn.Conv2d(2 * C, C, 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        normed = self.norm1(x)
        qs = self.q(normed).split(self.head_dim, dim=1)  # [B, D, 1, S]
        ks = self.k(normed).transpose(1, 3).split(self.head_dim, dim=3)  # [B, K, 1, D]
        vs = self.v(normed).split(self.head_dim, dim=1)  # [B, D, 1, K]
        heads = []
        for q, k, v in zip(qs, ks, vs, strict=True):
            scores = torch.einsum("bchq,bkhc->bkhq", q, k) * self.head_dim**-0.5 + mask
            heads.append(torch.einsum("bkhq,bchk->bchq", scores.softmax(dim=1), v))
        x = x + self.o(torch.cat(heads, dim=1))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class MaskedChannelsFirstBlock(ChannelsFirstBlock):
    """With the mask as the original takes it: [1, K, 1, S], large and negative where a key may not be seen."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        S = x.shape[-1]
        hidden = torch.arange(S).view(1, S, 1, 1) > torch.arange(S).view(1, 1, 1, S)
        return super().forward(x, hidden.float() * -1e4)


def test_channels_first_block_matches_torch(tmp_path: Path) -> None:
    check_module(
        tmp_path / "block.mlpackage",
        MaskedChannelsFirstBlock(),
        [(2, 24, 1, 9)],
        {"conv", "split", "einsum", "softmax", "concat", "gelu"},
        {(FLOAT32, "fp32"): 110, (FLOAT16, "fp32"): 80, (FLOAT16, "fp16"): 55},
        seed=41,
    )


def test_channels_first_block_is_causal_and_equals_multi_head_attention(tmp_path: Path) -> None:
    """The same weights in torch's own attention and layer norm: an oracle that shares no code with the block."""
    block = MaskedChannelsFirstBlock().eval()
    randomize(block, seed=43)
    x = torch.randn(2, 24, 1, 9, generator=torch.Generator().manual_seed(44))
    with quiet():
        ct.convert(
            torch.jit.trace(block, x, check_trace=False),
            inputs=[ct.TensorType("x", x.shape, np.float32)],
            outputs=[ct.TensorType("y", dtype=np.float32)],
            minimum_deployment_target=ct.target.iOS16,
            compute_precision=FLOAT32,
            skip_model_load=True,
        ).save(str(tmp_path / "block.mlpackage"))
    program = MLProgram(tmp_path / "block.mlpackage")
    y = program.predict({"x": x.numpy()})["y"]

    attention = nn.MultiheadAttention(24, 3, batch_first=True).eval()
    with torch.no_grad():
        attention.in_proj_weight.copy_(torch.cat([conv.weight.flatten(1) for conv in (block.q, block.k, block.v)]))
        attention.in_proj_bias.copy_(torch.cat([conv.bias for conv in (block.q, block.k, block.v)]))
        attention.out_proj.weight.copy_(block.o.weight.flatten(1))
        attention.out_proj.bias.copy_(block.o.bias)

        def norm(layer: ChannelsFirstNorm, x: Tensor) -> Tensor:
            return F.layer_norm(x, (24,), layer.weight, layer.weight * layer.bias, layer.eps)

        rows = x.squeeze(2).transpose(1, 2)  # [B, S, C]
        normed = norm(block.norm1, rows)
        hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
        rows = rows + attention(normed, normed, normed, attn_mask=hidden, need_weights=False)[0]
        inner = F.gelu(F.linear(norm(block.norm2, rows), block.up.weight.flatten(1), block.up.bias))
        rows = rows + F.linear(inner, block.down.weight.flatten(1), block.down.bias)
    assert decibels(rows.transpose(1, 2).unsqueeze(2).numpy(), y) >= 100

    later = x.clone()
    later[..., 5:] += 1
    changed = program.predict({"x": later.numpy()})["y"]
    np.testing.assert_array_equal(changed[..., :5], y[..., :5])
    assert (changed[..., 5:] != y[..., 5:]).any()


# What these programs need of single operations


def test_scalars_join_to_a_vector(tmp_path: Path) -> None:
    def build(values: Any) -> list[Any]:
        first, second = (mb.squeeze(x=values[name]) for name in ("a", "b"))
        assert first.rank == second.rank == 0
        vector = mb.concat(values=[first, second], axis=0)
        assert vector.shape == (2,)
        return [vector, mb.add(x=vector, y=np.int32([10, 20]))]

    path = save_program(tmp_path / "c.mlpackage", {"a": ((1,), np.int32), "b": ((1,), np.int32)}, build)
    for mode in ("fp32", "fp16"):
        data = {"a": np.array([3], np.int32), "b": np.array([-4], np.int32)}
        vector, moved = MLProgram(path, mode=mode).predict(data).values()
        np.testing.assert_array_equal(vector, np.int32([3, -4]))
        np.testing.assert_array_equal(moved, np.int32([13, 16]))
        assert vector.dtype == moved.dtype == np.int32


@pytest.mark.parametrize("constant", [True, False], ids=["constant", "computed"])
def test_a_scalar_index_picks_a_scalar(constant: bool, tmp_path: Path) -> None:
    def build(values: Any) -> list[Any]:
        index = np.int32(2) if constant else mb.squeeze(x=values["i"])
        picked = mb.gather(x=values["x"], indices=index, axis=0)
        assert picked.rank == 0
        return [mb.expand_dims(x=picked, axes=[0]), mb.mul(x=values["x"], y=picked)]

    path = save_program(tmp_path / "g.mlpackage", {"x": ((4,), np.float32), "i": ((1,), np.int32)}, build)
    x = np.float32([5, 6, 7, 8])
    for place in (2,) if constant else (0, 2, 3):
        data = {"x": x, "i": np.array([place], np.int32)}
        picked, product = MLProgram(path).predict(data).values()
        np.testing.assert_array_equal(picked, x[[place]])
        np.testing.assert_array_equal(product, x * x[place])


def flexible_model(path: Path, function: Callable[[Tensor], Tensor], shape: Any, example: tuple[int, ...]) -> Path:
    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    with quiet():
        ct.convert(
            torch.jit.trace(Module().eval(), torch.zeros(example)),
            inputs=[ct.TensorType("x", shape, np.float32)],
            outputs=[ct.TensorType("y", dtype=np.float32)],
            minimum_deployment_target=ct.target.iOS18,
            compute_precision=FLOAT32,
            skip_model_load=True,
        ).save(str(path))
    return path


def test_a_shape_computed_from_a_flexible_input(tmp_path: Path) -> None:
    def heads(x: Tensor) -> Tensor:
        B, S, C = x.shape
        return x.reshape(B * S, 3, C // 3).transpose(0, 1).reshape(3 * S, B, C // 3)

    shape = (ct.RangeDim(1, 4, default=1), ct.RangeDim(2, 8, default=2), 6)
    path = flexible_model(tmp_path / "r.mlpackage", heads, shape, (2, 5, 6))
    assert {"shape", "gather", "concat", "reshape"} <= operation_types(path)
    program = MLProgram(path)
    rng = np.random.default_rng(5)
    for B, S in ((1, 2), (2, 5), (4, 8), (3, 7)):
        x = rng.standard_normal((B, S, 6), np.float32)
        np.testing.assert_array_equal(program.predict({"x": x})["y"], heads(torch.from_numpy(x)).numpy())
    with pytest.raises(ValueError, match="'x' has shape"):
        program.predict({"x": np.zeros((5, 2, 6), np.float32)})


def test_a_shape_built_by_hand_from_a_flexible_input(tmp_path: Path) -> None:
    size = get_new_symbol()
    program = Program()
    with Function({"x": mb.placeholder(shape=(size, 6), dtype=types.fp32)}, opset_version=ct.target.iOS18) as function:
        x = function.inputs["x"]
        count = mb.gather(x=mb.shape(x=x), indices=np.int32(0), axis=0)
        assert count.rank == 0
        shape = mb.concat(values=[np.int32(2), np.int32(3), count], axis=0)
        function.set_outputs([mb.reshape(x=mb.transpose(x=x, perm=[1, 0]), shape=shape, name="y")])
    program.add_function("main", function)
    with quiet():
        ct.convert(
            program,
            source="milinternal",
            convert_to="mlprogram",
            inputs=[ct.TensorType("x", (ct.RangeDim(1, 9, default=1), 6), np.float32)],
            minimum_deployment_target=ct.target.iOS18,
            pass_pipeline=ct.PassPipeline.EMPTY,
            skip_model_load=True,
        ).save(str(tmp_path / "r.mlpackage"))
    for rows in (1, 4, 9):
        x = np.arange(rows * 6, dtype=np.float32).reshape(rows, 6)
        (y,) = MLProgram(tmp_path / "r.mlpackage").predict({"x": x}).values()
        np.testing.assert_array_equal(y, x.T.reshape(2, 3, rows))


def save_gathers(path: Path, target: Any) -> Path:
    def build(values: Any) -> list[Any]:
        first = mb.squeeze(x=mb.slice_by_index(x=values["i"], begin=[0], end=[1]))
        return [
            mb.gather(x=values["x"], indices=values["i"], axis=0),
            mb.gather(x=values["x"], indices=first, axis=1),
        ]

    return save_program(path, {"x": ((3, 4), np.float32), "i": ((2,), np.int32)}, build, target=target)


@pytest.mark.parametrize("target", [ct.target.iOS15, ct.target.iOS16])
def test_a_negative_index_counts_from_the_end_up_to_ios16(target: Any, tmp_path: Path) -> None:
    program = MLProgram(save_gathers(tmp_path / "g.mlpackage", target))
    x = np.random.default_rng(9).standard_normal((3, 4), np.float32)
    for indices in ([-1, 0], [-3, -2], [2, -1]):
        rows, column = program.predict({"x": x, "i": np.array(indices, np.int32)}).values()
        np.testing.assert_array_equal(rows, x[indices])
        np.testing.assert_array_equal(column, x[:, indices[0]])
    with pytest.raises(ValueError, match=r"\(gather\): "):
        program.predict({"x": x, "i": np.array([0, -4], np.int32)})


@pytest.mark.parametrize("target", [ct.target.iOS17, ct.target.iOS18])
def test_a_negative_index_is_refused_from_ios17_on(target: Any, tmp_path: Path) -> None:
    program = MLProgram(save_gathers(tmp_path / "g.mlpackage", target))
    x = np.random.default_rng(9).standard_normal((3, 4), np.float32)
    rows, column = program.predict({"x": x, "i": np.array([2, 0], np.int32)}).values()
    np.testing.assert_array_equal(rows, x[[2, 0]])
    np.testing.assert_array_equal(column, x[:, 2])
    for indices in ([-1, 0], [0, -1], [3, 0]):
        with pytest.raises(ValueError, match=r"\(gather\): "):
            program.predict({"x": x, "i": np.array(indices, np.int32)})
