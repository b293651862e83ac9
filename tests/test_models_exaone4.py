"""EXAONE 4 in PyTorch against `transformers`, on random folders that `transformers` wrote."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close

from ane_layers.layers import KVCache, NoCache, causal_mask, folded_columns, folded_rows, merge_heads
from ane_layers.models import Exaone4, Exaone4Config, from_folder
from ane_layers.models.attention import FoldedSelfAttention
from ane_layers.models.step import Step

Folder = Callable[..., Path]
Reference = Callable[[Path], Any]

LAYER = {"atol": 1e-5, "rtol": 0}
LOGITS = {"atol": 1e-4, "rtol": 0}
CONTEXT = 21
PROMPT = 13  # not a multiple of the block of 4

WAYS = {
    "whole": [PROMPT],
    "token by token": [1] * PROMPT,
    "blocks of 4, then one": [4, 4, 4, 1],
    "mixed": [3, 1, 1, 7, 1],
}


def ids(length: int, *, vocab: int = 109, seed: int = 0) -> Tensor:
    return torch.randint(vocab, (1, length), generator=torch.Generator().manual_seed(seed))


def load(folder: Path, **options: Any) -> Exaone4:
    return Exaone4.from_pretrained(folder, **({"context_length": CONTEXT, "head_pieces": 16} | options))


def run(model: Exaone4, tokens: Tensor, blocks: Iterable[int], position: int = 0) -> Tensor:
    logits = []
    for block in tokens.split(list(blocks), dim=1):
        logits.append(model.extend(block, position))
        position += block.shape[1]
    return torch.cat(logits, dim=1)


@torch.no_grad()
def logits_of(reference: Any, tokens: Tensor) -> Tensor:
    return reference(tokens).logits


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "copy"))


# ---- logits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_sharing", ["fold", "repeat_kv"])
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("heads", [(8, 2), (6, 2), (10, 2), (4, 4), (5, 1)])
def test_logits_match_transformers(
    exaone4_folder: Folder,
    exaone4_reference: Reference,
    heads: tuple[int, int],
    way: str,
    fuse: bool,
    head_sharing: str,
) -> None:
    folder = exaone4_folder(heads=heads[0], kv_heads=heads[1])
    model = load(folder, fuse=fuse, head_sharing=head_sharing)
    expected = logits_of(exaone4_reference(folder), ids(PROMPT))
    assert expected.std() > 0.5
    assert_close(run(model, ids(PROMPT), WAYS[way]), expected, **LOGITS)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_logits_of_every_kind_of_folder_match_transformers(
    exaone4_folder: Folder,
    exaone4_reference: Reference,
    dtype: torch.dtype,
    tied: bool,
    sharded: bool,
    fuse: bool,
) -> None:
    folder = exaone4_folder(tied=tied, sharded=sharded, dtype=dtype, layers=3)
    assert (folder / "model.safetensors.index.json").exists() == sharded
    model = load(folder, fuse=fuse)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    expected = logits_of(exaone4_reference(folder), ids(PROMPT))
    assert_close(run(model, ids(PROMPT), [4, 4, 4, 1]), expected, **LOGITS)


@pytest.mark.parametrize(
    ("overrides", "hidden"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, 40),
        ({"rms_norm_eps": 1e-2}, 40),
        ({"rms_norm_eps": 1e-6, "intermediate_size": 33}, 24),
        ({"head_dim": 6, "layers": 1, "vocab": 101}, 7),
    ],
)
def test_logits_of_other_configs_match_transformers(
    exaone4_folder: Folder, exaone4_reference: Reference, overrides: dict[str, Any], hidden: int
) -> None:
    folder = exaone4_folder(hidden=hidden, **overrides)
    tokens = ids(PROMPT, vocab=overrides.get("vocab", 109))
    expected = logits_of(exaone4_reference(folder), tokens)
    assert_close(run(load(folder, head_pieces=3), tokens, [5, 1, 7]), expected, **LOGITS)


@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("scaling", ["llama3", "default"])
def test_folder_written_by_transformers_4_matches_that_of_5(
    tmp_path: Path, exaone4_folder: Folder, exaone4_reference: Reference, scaling: str, key: str
) -> None:
    overrides = {} if scaling == "llama3" else {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    source = exaone4_folder(**overrides)
    folder = copied(source, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert "rope_theta" not in config
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = {key: rope.pop("rope_type"), **rope} if scaling == "llama3" else None
    config["torch_dtype"] = config.pop("dtype")
    config |= {"transformers_version": "4.54.0", "sliding_window_pattern": None}
    del config["layer_types"]
    (folder / "config.json").write_text(json.dumps(config))
    model = load(folder)
    assert_close(run(model, ids(PROMPT), [9, 1, 3]), logits_of(exaone4_reference(source), ids(PROMPT)), **LOGITS)


def test_eps_of_1e_2_changes_the_logits_as_llama_cpp_14630(
    tmp_path: Path, exaone4_folder: Folder, exaone4_reference: Reference
) -> None:
    folder = copied(exaone4_folder(), tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"rms_norm_eps": 1e-2}
    (folder / "config.json").write_text(json.dumps(config))
    actual = run(load(folder), ids(PROMPT), [PROMPT])
    assert_close(actual, logits_of(exaone4_reference(folder), ids(PROMPT)), **LOGITS)
    assert (actual - run(load(exaone4_folder()), ids(PROMPT), [PROMPT])).abs().max() > 0.05


def test_last_only_matches_the_last_position(exaone4_folder: Folder) -> None:
    model = load(exaone4_folder())
    for block in (ids(5), ids(1)):
        assert_close(model.extend(block, last_only=True), model.extend(block)[:, -1:], **LAYER)


def test_full_context_matches_transformers(exaone4_folder: Folder, exaone4_reference: Reference) -> None:
    """Up to the last slot, the block that ends there included."""
    folder = exaone4_folder()
    expected = logits_of(exaone4_reference(folder), ids(CONTEXT))
    assert_close(run(load(folder), ids(CONTEXT), [8, 8, 5]), expected, **LOGITS)


def test_from_folder_matches_the_family(exaone4_folder: Folder) -> None:
    folder = exaone4_folder()
    model = from_folder(folder, context_length=CONTEXT, head_sharing="repeat_kv")
    assert isinstance(model, Exaone4)
    assert model.head_sharing == "repeat_kv"
    assert_close(model.extend(ids(5)), load(folder).extend(ids(5)), **LAYER)


# ---- the cache over several calls ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fuse", [True, False])
def test_second_prefill_after_decode_matches_the_full_forward_as_mlxcel_431(
    exaone4_folder: Folder, exaone4_reference: Reference, fuse: bool
) -> None:
    folder = exaone4_folder()
    model = load(folder, fuse=fuse)
    blocks = [5, 1, 1, 1, 6, 1, 4]
    expected = logits_of(exaone4_reference(folder), ids(sum(blocks)))
    assert_close(run(model, ids(sum(blocks)), blocks), expected, **LOGITS)


def test_prompt_of_5_in_blocks_of_4_matches_one_token_at_a_time_as_anemll_17(exaone4_folder: Folder) -> None:
    model = load(exaone4_folder())
    blocks = run(model, ids(5), [4, 1])
    model.cache.reset()
    assert_close(blocks, run(model, ids(5), [1] * 5), **LOGITS)


def test_a_new_prompt_over_a_used_cache_matches_a_fresh_model(exaone4_folder: Folder) -> None:
    """The mask hides what an earlier, longer prompt left behind."""
    model, fresh = load(exaone4_folder()), load(exaone4_folder())
    model.extend(ids(CONTEXT, seed=5))
    assert_close(run(model, ids(5), [4, 1]), run(fresh, ids(5), [4, 1]), **LOGITS)


def test_rewound_cache_matches_transformers(exaone4_folder: Folder, exaone4_reference: Reference) -> None:
    """Refused draft tokens are overwritten."""
    folder = exaone4_folder()
    model = load(folder)
    model.extend(ids(6))
    model.extend(ids(4, seed=9), 6)
    expected = logits_of(exaone4_reference(folder), ids(12))[:, 6:]
    assert_close(model.extend(ids(12)[:, 6:], 6), expected, **LOGITS)


@pytest.mark.parametrize(("position", "length"), [(CONTEXT, 1), (CONTEXT - 2, 3), (0, CONTEXT + 1), (-1, 1), (3, 0)])
def test_extending_past_the_context_is_refused_with_the_cache_intact(
    exaone4_folder: Folder, position: int, length: int
) -> None:
    model = load(exaone4_folder())
    model.extend(ids(7))
    before = [model.cache.key.clone(), model.cache.value.clone()]
    with pytest.raises(ValueError, match=rf"{length} tokens at position {position}.*context_length.*{CONTEXT}"):
        model.extend(ids(length), position)
    assert_close([model.cache.key, model.cache.value], before, atol=0, rtol=0)


@pytest.mark.parametrize("shape", [(3, 4), (4,), (1, 2, 2)])
def test_ids_of_another_shape_are_refused_with_the_cache_intact(exaone4_folder: Folder, shape: tuple[int, ...]) -> None:
    model = load(exaone4_folder())
    model.extend(ids(7))
    before = model.cache.key.clone()
    with pytest.raises(ValueError, match="input_ids"):
        model.extend(torch.zeros(shape, dtype=torch.int32))
    assert_close(model.cache.key, before, atol=0, rtol=0)


# ---- parts -----------------------------------------------------------------------------------------------------------


def step(model: Exaone4, position: int, length: int, cache: KVCache | NoCache | None = None) -> Step:
    """What the layers get, lined up for them."""
    at = torch.tensor([position], dtype=torch.int32)
    cos, sin = model.rotary(at, length)
    cache = model.cache if cache is None else cache
    slots = length if isinstance(cache, NoCache) else cache.context_length
    mask = causal_mask(position, length, slots)
    return model.model.layers[0].self_attn.align(Step(position=at, mask=mask, cache=cache, cos=cos, sin=sin))


def heads_of(model: Exaone4, layer: int, x: Tensor) -> Tensor:
    """What attention gives before the output projection, `[B, H·D, 1, S]` in the checkpoint's order of heads."""
    attention = model.model.layers[layer].self_attn
    projection = attention.o_proj
    attention.o_proj = torch.nn.Identity()
    out = attention(x, step(model, 0, x.shape[3], NoCache()), layer)
    attention.o_proj = projection
    if isinstance(attention, FoldedSelfAttention):
        out = out[:, folded_columns(8, 2, 16).argsort()]
    return out


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize(("position", "length"), [(0, 1), (0, 7), (4, 1)])
@torch.no_grad()
def test_decoder_layer_matches_transformers(
    exaone4_folder: Folder, exaone4_reference: Reference, position: int, length: int, fuse: bool
) -> None:
    """Attention and whole layer, fed with the same hidden states as the reference's layer."""
    folder = exaone4_folder()
    model, reference = load(folder, fuse=fuse), exaone4_reference(folder)
    total = position + length
    states = torch.randn(1, total, 40, generator=torch.Generator().manual_seed(1))
    inner = reference.model
    embeddings = inner.rotary_emb(states, torch.arange(total)[None])
    mask = causal_mask(0, total, total)
    theirs = inner.layers[1]
    expected = theirs(states, attention_mask=mask, position_embeddings=embeddings)
    expected_attention, _ = theirs.self_attn(states, attention_mask=mask, position_embeddings=embeddings)

    ours = model.model.layers[1]
    x = states.transpose(1, 2).unsqueeze(2)
    for module, wanted in ((ours, expected), (ours.self_attn, expected_attention)):
        for start, size in ((0, position), (position, length)):
            if size:
                out = module(x[..., start : start + size], step(model, start, size), 1)
                assert_close(out.squeeze(2).transpose(1, 2), wanted[:, start : start + size], **LAYER)


@pytest.mark.parametrize("fuse", [True, False])
@torch.no_grad()
def test_scaled_query_head_leaves_the_others_unchanged_as_vllm_16311(
    exaone4_folder: Folder, exaone4_reference: Reference, tmp_path: Path, fuse: bool
) -> None:
    """The norm is per head: a norm over all query channels would shrink the other heads a hundredfold."""
    head, size = 3, 16
    folder = copied(exaone4_folder(), tmp_path)
    stored = load_file(folder / "model.safetensors")
    stored["model.layers.0.self_attn.q_proj.weight"][head * size : (head + 1) * size] *= 100
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})

    x = torch.randn(1, 40, 1, 5, generator=torch.Generator().manual_seed(1))
    results = [
        heads_of(model, 0, x).unflatten(1, (8, 16))
        for model in (load(exaone4_folder(), fuse=fuse), load(folder, fuse=fuse))
    ]
    others = [i for i in range(8) if i != head]
    assert_close(results[1][:, others], results[0][:, others], **LAYER)
    assert (results[1][:, head] - results[0][:, head]).abs().max() < 1e-3  # the norm takes the scale away
    assert_close(run(load(folder, fuse=fuse), ids(5), [5]), logits_of(exaone4_reference(folder), ids(5)), **LOGITS)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("kv", ["in_place", "deferred"])
@pytest.mark.parametrize("b", [1, 3])
@torch.no_grad()
def test_attention_of_several_sequences_matches_one_at_a_time(
    exaone4_folder: Folder, b: int, kv: str, fuse: bool
) -> None:
    """The layers take any batch; only conversion wants one sequence."""
    model = load(exaone4_folder(), fuse=fuse)
    attention = model.model.layers[0].self_attn
    sizes = {"num_layers": 1, "num_key_value_heads": 2, "head_dim": 16, "context_length": 9}

    def run_rows(x: Tensor) -> Tensor:
        cache = KVCache(**sizes, batch_size=x.shape[0], kv=kv)
        at, cos_sin = torch.tensor([2], dtype=torch.int32), model.rotary(torch.tensor([2], dtype=torch.int32), 5)
        mask = causal_mask(2, 5, 9, two_parts=cache.two_parts)
        shared = Step(position=at, mask=mask, cache=cache, cos=cos_sin[0], sin=cos_sin[1])
        out = attention(x, attention.align(shared), 0)
        cache.finish(at)
        return torch.cat([out.flatten(), cache.key.flatten(), cache.value.flatten()]) if x.shape[0] == 1 else out

    x = torch.randn(b, 40, 1, 5, generator=torch.Generator().manual_seed(1))
    together = run_rows(x)
    single = [run_rows(row[None]) for row in x]
    size = 40 * 5
    assert_close(together.reshape(b, -1)[:, :size], torch.stack([row[:size] for row in single]), **LAYER)


@torch.no_grad()
def test_norm_before_rotary_is_what_transformers_does(exaone4_folder: Folder, exaone4_reference: Reference) -> None:
    """That random norm weights make the order visible: a model that rotates first gives other logits."""
    model = load(exaone4_folder(), fuse=False)
    for layer in model.decoder_layers():
        attention = layer.self_attn
        weight = attention.q_norm.weight.clone()
        attention.q_norm.weight.fill_(1.0)
        inner = attention.attention.forward
        attention.attention.forward = lambda query, *rest, inner=inner, weight=weight: inner(query * weight, *rest)
    swapped = run(model, ids(PROMPT), [PROMPT])
    assert (swapped - logits_of(exaone4_reference(exaone4_folder()), ids(PROMPT))).abs().max() > 0.1


# ---- weights ---------------------------------------------------------------------------------------------------------


def rewritten(folder: Path, to: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    folder = copied(folder, to)
    stored = load_file(folder / "model.safetensors")
    change(stored)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def refusal(folder: Path, *parts: str) -> None:
    with pytest.raises(ValueError, match=re.escape(parts[0])) as error:
        load(folder)
    message = str(error.value)
    assert "\n" not in message
    assert all(part in message for part in parts), message


def test_stray_input_layernorm_is_refused_as_tt_metal_54334(tmp_path: Path, exaone4_folder: Folder) -> None:
    name = "model.layers.1.input_layernorm.weight"
    folder = rewritten(exaone4_folder(), tmp_path, lambda stored: stored.update({name: torch.ones(40)}))
    refusal(folder, name, "unknown")


@pytest.mark.parametrize("fuse", [True, False])
def test_every_missing_parameter_is_refused_by_name(tmp_path: Path, exaone4_folder: Folder, fuse: bool) -> None:
    source = exaone4_folder(layers=1)
    names = sorted(load_file(source / "model.safetensors"))
    assert len(names) == 13
    for i, name in enumerate(names):
        (tmp_path / str(i)).mkdir()
        refusal(rewritten(source, tmp_path / str(i), lambda stored, name=name: stored.pop(name)), name, "missing")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.self_attn.q_norm.weight", (128,)),
        ("model.layers.0.self_attn.k_proj.weight", (128, 40)),
        ("model.layers.0.mlp.down_proj.weight", (72, 40)),
        ("model.embed_tokens.weight", (110, 40)),
    ],
)
def test_weight_of_another_shape_is_refused(
    tmp_path: Path, exaone4_folder: Folder, name: str, shape: tuple[int, ...]
) -> None:
    folder = rewritten(exaone4_folder(), tmp_path, lambda stored: stored.update({name: torch.ones(shape)}))
    refusal(folder, name, str(shape[0]))


def test_untied_folder_without_head_is_refused_naming_both_facts(tmp_path: Path, exaone4_folder: Folder) -> None:
    folder = rewritten(exaone4_folder(tied=False), tmp_path, lambda stored: stored.pop("lm_head.weight"))
    refusal(folder, "tie_word_embeddings", "lm_head.weight")


def test_checkpoint_shapes_match_the_file(exaone4_folder: Folder) -> None:
    folder = exaone4_folder(tied=False)
    stored = {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
    assert load(folder, fuse=False).checkpoint_shapes() == stored


@pytest.mark.parametrize("dtype", [torch.float32, None])
def test_tied_head_shares_the_storage_of_the_embedding(exaone4_folder: Folder, dtype: torch.dtype | None) -> None:
    model = load(exaone4_folder(dtype=torch.bfloat16), dtype=dtype)
    table = model.model.embed_tokens.weight
    assert table.dtype == (dtype or torch.bfloat16)
    pieces = [piece.weight for piece in model.lm_head.pieces]
    assert len(pieces) == 16
    assert {piece.untyped_storage().data_ptr() for piece in pieces} == {table.untyped_storage().data_ptr()}
    assert pieces[0].data_ptr() == table.data_ptr()


def test_no_parameter_is_left_unassigned_or_trainable(exaone4_folder: Folder) -> None:
    for fuse in (True, False):
        model = load(exaone4_folder(), fuse=fuse)
        assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        assert not any(parameter.requires_grad for parameter in model.parameters())
        assert not model.training


def test_fused_model_has_two_projections_less_a_layer_and_keeps_the_weights(exaone4_folder: Folder) -> None:
    plain, fused = (load(exaone4_folder(), fuse=fuse) for fuse in (False, True))
    attention, folded = plain.model.layers[0].self_attn, fused.model.layers[0].self_attn
    parts = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
    back = folded_rows(8, 2, 16).argsort()
    assert_close(folded.qkv_proj.weight[back], parts, atol=0, rtol=0)
    assert_close(folded.o_proj.weight[:, folded_columns(8, 2, 16).argsort()], attention.o_proj.weight, atol=0, rtol=0)
    fused.fuse()  # a second time changes nothing
    assert_close(fused.extend(ids(5)), plain.extend(ids(5)), **LOGITS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, None])
@pytest.mark.parametrize("fuse", [True, False])
def test_half_precision_weights_match_transformers_or_are_refused(
    exaone4_folder: Folder, exaone4_reference: Reference, dtype: torch.dtype | None, fuse: bool
) -> None:
    """Weights kept in half precision either run in PyTorch, or say that they do not."""
    folder = exaone4_folder(dtype=dtype or torch.bfloat16)
    model = load(folder, dtype=dtype, fuse=fuse)
    try:
        logits = model.extend(ids(PROMPT))
    except ValueError as error:
        told = str(error)
    else:
        told = None
    if told is not None:
        assert "dtype" in told
        return
    expected = logits_of(exaone4_reference(folder), ids(PROMPT))
    error_power = (logits.float() - expected).pow(2).mean() / expected.pow(2).mean()
    assert -10 * error_power.log10() > (45 if dtype == torch.float16 else 28)


# ---- caches and hybrid models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", ["in_place", "deferred", "read_only"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fuse", [True, False])
def test_every_way_of_writing_the_cache_matches_transformers(
    exaone4_folder: Folder, exaone4_reference: Reference, kv: str, way: str, fuse: bool
) -> None:
    folder = exaone4_folder()
    model = load(folder, kv=kv, fuse=fuse)
    # What a slot held before does not matter: it is hidden until it is written.
    model.cache.key.fill_(7.0)
    model.cache.value.fill_(-7.0)
    expected = logits_of(exaone4_reference(folder), ids(PROMPT))
    assert_close(run(model, ids(PROMPT), WAYS[way]), expected, **LOGITS)


HYBRID = {"sliding_window": 4, "sliding_window_pattern": 4, "layers": 5, "layer_types": None}


def hybrid(folder: Folder, **options: Any) -> Path:
    pattern = ["sliding_attention"] * 3 + ["full_attention"]
    layers = HYBRID["layers"]
    types = (pattern * layers)[:layers]
    return folder(**(HYBRID | {"layer_types": types} | options))


@pytest.mark.parametrize("kv", ["in_place", "deferred", "read_only"])
@pytest.mark.parametrize("block", [1, 3, 4, 7, 16])
@pytest.mark.parametrize("window", [1, 3, 4, 33])
def test_hybrid_logits_match_transformers_past_the_window(
    exaone4_folder: Folder, exaone4_reference: Reference, kv: str, block: int, window: int
) -> None:
    """Windows smaller and larger than a block; far enough for the rolling cache to wrap several times (32 or 64 slots)."""
    folder = hybrid(exaone4_folder, sliding_window=window)
    model = load(folder, kv=kv, block_size=block, context_length=150)
    model.sliding_cache.key.fill_(7.0)
    tokens = ids(150)
    expected = logits_of(exaone4_reference(folder), tokens)
    actual = torch.cat(
        [model.extend(tokens[:, :90]), model.extend(tokens[:, 90:91], 90), model.extend(tokens[:, 91:], 91)], 1
    )
    assert not actual.isnan().any()
    assert_close(actual, expected, **LOGITS)


def test_whole_sequences_match_transformers(exaone4_folder: Folder, exaone4_reference: Reference) -> None:
    for folder in (exaone4_folder(), hybrid(exaone4_folder), hybrid(exaone4_folder, sliding_window=40)):
        for fuse in (True, False):
            model = load(folder, fuse=fuse)
            tokens = torch.cat([ids(PROMPT), ids(PROMPT, seed=1)])
            before = model.cache.key.clone()
            assert_close(model.whole(tokens), logits_of(exaone4_reference(folder), tokens), **LOGITS)
            assert_close(model.cache.key, before, atol=0, rtol=0)
            assert_close(run(model, ids(PROMPT), [4, 4, 4, 1]), model.whole(ids(PROMPT)), **LOGITS)


def test_windows_of_another_model_have_48_rolling_and_16_full_layers(exaone4_folder: Folder) -> None:
    """vllm-metal 676: the 32B model's pattern, from `sliding_window_pattern` alone."""
    config = Exaone4Config.from_pretrained(hybrid(exaone4_folder))
    large = dataclasses.replace(
        config,
        num_hidden_layers=64,
        sliding_window=4096,
        sliding_window_pattern="LLLG",
        layer_types=None,
        max_position_embeddings=8192,
    )
    with torch.device("meta"):
        model = Exaone4(large, context_length=8192)
    assert model.cache.key.shape[0] == 16
    assert model.sliding_cache.key.shape[:3] == (48, 2, 4160)  # 4096 + 64 − 1, to a multiple of 32
    assert [bool(layer.self_attn.rotated) for layer in model.decoder_layers()[:4]] == [True, True, True, False]


@torch.no_grad()
def test_position_4_of_a_window_of_3_depends_on_tokens_2_to_4_only(exaone4_folder: Folder) -> None:
    """Megatron-Bridge 2656, in prefill and in decode."""
    folder = exaone4_folder(layers=1, sliding_window=3, sliding_window_pattern=1, layer_types=["sliding_attention"])
    tokens = ids(5)
    for blocks in ([5], [1] * 5, [4, 1]):
        model = load(folder)
        first = run(model, tokens, blocks)[:, 4]
        for place in range(5):
            changed = tokens.clone()
            changed[0, place] = (changed[0, place] + 1) % 109
            same = torch.equal(run(load(folder), changed, blocks)[:, 4], first)
            assert same == (place < 2)


@pytest.mark.parametrize("context", [0, 257])
def test_context_length_out_of_range_is_refused(exaone4_folder: Folder, context: int) -> None:
    with pytest.raises(ValueError, match=rf"context_length.*256.*{context}"):
        load(exaone4_folder(), context_length=context)


def test_a_mistyped_option_is_refused(exaone4_folder: Folder) -> None:
    with pytest.raises(TypeError, match="head_sharin"):
        load(exaone4_folder(), head_sharin="fold")


def test_merged_heads_keep_the_order_of_o_proj(exaone4_folder: Folder) -> None:
    """Channel h·D + d of o_proj's input is element d of head h."""
    heads = torch.arange(8 * 16.0).view(1, 8, 1, 16)
    assert_close(merge_heads(heads).flatten(), torch.arange(128.0), atol=0, rtol=0)
