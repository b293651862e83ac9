"""Every family against `transformers`, on tiny random folders: whole sequences, token by token, converted and executed."""

from __future__ import annotations

import functools
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from ane_layers import models
from ane_layers.analysis import inspect
from ane_layers.layers import folded_columns, folded_rows, rotary_factor, rotary_frequencies
from ane_layers.models import CausalLM, from_folder, open_folder, outline
from ane_layers.models.part import Part
from ane_layers.verification import verify

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from tiny_families import FAMILIES, LLAMA3, reference, write_family

Folder = Callable[..., Path]

LOGITS = {"atol": 1e-4, "rtol": 0}
CONTEXT = 80  # windows of 5 in caches of 32 slots, passed more than twice
SLIDING = {"mistral", "gemma3", "exaone4"}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """`folder(family, **options of write_family)`, made once: do not write into it."""
    made: dict[str, Path] = {}

    def make(family: str, **options: Any) -> Path:
        key = json.dumps([family, options], sort_keys=True, default=str)
        if key not in made:
            made[key] = write_family(tmp_path_factory.mktemp(family), family, **options)
        return made[key]

    return make


def ids(length: int = CONTEXT, seed: int = 0) -> Tensor:
    return torch.randint(109, (1, length), generator=torch.Generator().manual_seed(seed))


loaded = functools.cache(reference)


@torch.no_grad()
def logits_of(folder: Path, tokens: Tensor) -> Tensor:
    logits: Tensor = loaded(folder)(tokens).logits
    assert logits.std() > 0.5
    return logits


def load(folder: Path, **options: Any) -> CausalLM:
    return from_folder(folder, **({"context_length": CONTEXT, "block_size": 8} | options))


def one_by_one(model: CausalLM, tokens: Tensor) -> Tensor:
    return torch.cat([model.extend(tokens[:, i : i + 1], i) for i in range(tokens.shape[1])], dim=1)


def in_blocks(model: CausalLM, tokens: Tensor, sizes: list[int]) -> Tensor:
    pieces, position = [], 0
    for size in sizes:
        pieces.append(model.extend(tokens[:, position : position + size], position))
        position += size
    assert position == tokens.shape[1]
    return torch.cat(pieces, dim=1)


# ---- logits ----------------------------------------------------------------------------------------------------------

# 3, 5 and 1 query heads a KV head.
HEADS = [(6, 2), (5, 1), (4, 4)]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_match_transformers(folder: Folder, family: str, heads: tuple[int, int]) -> None:
    sizes = {"hidden_size": 8 * heads[0]} if family == "phi3" else {}
    made = folder(family, heads=heads[0], kv_heads=heads[1], **sizes)
    expected = logits_of(made, ids())
    model, plain = load(made), load(made, fuse=False)
    assert type(model) is getattr(models, type(model).__name__)
    for found in (model, plain):
        assert_close(found.whole(ids()), expected, **LOGITS)
    assert_close(one_by_one(model, ids()), expected, **LOGITS)
    assert_close(in_blocks(plain, ids(), [7, 1, 1, 71]), expected, **LOGITS)


@pytest.mark.parametrize("kv", ["in_place", "deferred", "read_only"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_way_of_writing_the_cache_matches_transformers(folder: Folder, family: str, kv: str) -> None:
    model = load(folder(family), kv=kv)
    for cache in model.caches():  # what a slot held before does not matter
        cache.key.fill_(7.0)
        cache.value.fill_(-7.0)
    assert (model.sliding_slots == 32) == (family in SLIDING)
    expected = logits_of(folder(family), ids())
    assert_close(in_blocks(model, ids(), [40, 1, 1, 3, 35]), expected, **LOGITS)


@pytest.mark.parametrize("family", FAMILIES)
def test_repeated_heads_match_folded_ones(folder: Folder, family: str) -> None:
    for fuse in (True, False):
        model = load(folder(family), head_sharing="repeat_kv", fuse=fuse)
        assert_close(in_blocks(model, ids(), [50, 1, 29]), load(folder(family)).whole(ids()), **LOGITS)


@pytest.mark.parametrize("family", FAMILIES)
def test_tied_and_untied_heads_match_transformers(folder: Folder, family: str) -> None:
    tied = not FAMILIES[family][1].get("tie_word_embeddings", False)
    made = folder(family, tie_word_embeddings=tied)
    model = load(made)
    same = model.lm_head.pieces[0].weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert same == tied
    assert_close(model.whole(ids()), logits_of(made, ids()), **LOGITS)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"rope_parameters": YARN}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}}),
        ("qwen2", {"rope_parameters": YARN | {"attention_factor": 1.3, "beta_fast": 16, "truncate": False}}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
        ("qwen3", {"attention_bias": True, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
        ("qwen3", {"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 0}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 256}),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 2, "attention_bias": True, "mlp_bias": True}),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 5}),
        ("olmo2", {"attention_bias": True, "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.4}}),
        (
            "granite",
            {"attention_bias": True, "mlp_bias": True, "attention_multiplier": 1.0, "residual_multiplier": 1.0},
        ),
        ("gemma3", {"attention_bias": True, "final_logit_softcapping": None}),
        ("gemma3", {"layer_types": ["full_attention", "full_attention"]}),
        ("gemma3", {"layer_types": ["sliding_attention", "sliding_attention"]}),
        ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
        ("phi3", {"sliding_window": 5}),
        ("exaone", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    ],
)
def test_what_a_config_can_say_matches_transformers(folder: Folder, family: str, options: dict[str, Any]) -> None:
    made = folder(family, **options)
    model = load(made)
    expected = logits_of(made, ids())
    assert_close(model.whole(ids()), expected, **LOGITS)
    assert_close(in_blocks(model, ids(), [7, 1, 40, 1, 31]), expected, **LOGITS)


def capped_by_transformers(module: Any, *args: Any, **options: Any) -> Any:
    from transformers.models.gemma3 import modeling_gemma3

    return modeling_gemma3.eager_attention_forward(module, *args, softcap=module.attn_logit_softcapping, **options)


def capped_by_hand(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """One head at a time: cap · tanh(scores / cap), then the mask, then softmax."""
    groups, cap = query.shape[1] // key.shape[1], module.attn_logit_softcapping
    heads = []
    for head in range(query.shape[1]):
        scores = scaling * (query[:, head] @ key[:, head // groups].mT)
        scores = cap * torch.tanh(scores / cap) + mask[:, 0]
        heads.append(torch.softmax(scores, dim=-1) @ value[:, head // groups])  # [B, S, D]
    return torch.stack(heads, dim=2), None  # [B, S, H, D]


@pytest.mark.parametrize("capped", [capped_by_transformers, capped_by_hand])
def test_capped_scores_match(folder: Folder, capped: Any) -> None:
    """Gemma 3's class leaves `attn_logit_softcapping` out; it is given an attention here that applies it."""
    from transformers.models.gemma3 import modeling_gemma3

    made = folder("gemma3", attn_logit_softcapping=0.7)
    theirs = reference(made)
    plain = logits_of(made, ids())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_gemma3.ALL_ATTENTION_FUNCTIONS, "get_interface", lambda *_: capped)
        with torch.no_grad():
            expected = theirs(ids()).logits
    assert (expected - plain).abs().max() > 0.05
    for options in ({}, {"fuse": False}, {"kv": "deferred"}, {"head_sharing": "repeat_kv"}):
        model = load(made, **options)
        assert_close(model.whole(ids()), expected, **LOGITS)
        assert_close(in_blocks(model, ids(), [50, 1, 29]), expected, **LOGITS)


@pytest.mark.parametrize(("context", "length"), [(32, 32), (33, 33), (80, 80)])
def test_longrope_frequencies_are_those_of_the_context(folder: Folder, context: int, length: int) -> None:
    """Up to 32 positions the short ones, beyond that the long ones, at every position, as `transformers` has it for such a length."""
    model = load(folder("phi3"), context_length=context)
    assert_close(model.whole(ids(length)), logits_of(folder("phi3"), ids(length)), **LOGITS)
    assert_close(one_by_one(model, ids(length)), logits_of(folder("phi3"), ids(length)), **LOGITS)
    other = load(folder("phi3"), context_length=80 if context == 32 else 32)
    assert (other.whole(ids(32)) - model.whole(ids(32))).abs().max() > 0.01


@pytest.mark.parametrize("family", FAMILIES)
def test_batches_of_whole_sequences_match_transformers(folder: Folder, family: str) -> None:
    tokens = torch.cat([ids(40), ids(40, seed=1)])
    assert_close(load(folder(family)).whole(tokens), logits_of(folder(family), tokens), **LOGITS)


@pytest.mark.parametrize("family", FAMILIES)
def test_joined_projections_hold_the_stored_values(folder: Folder, family: str) -> None:
    """Bit by bit, in the stored type: no scale is put into weights, which would be rounded and share lookup tables with others."""
    made = folder(family, dtype=torch.bfloat16)
    plain, fused = (load(made, dtype=None, fuse=fuse).decoder_layers()[1] for fuse in (False, True))
    parts = torch.cat([getattr(plain.self_attn, f"{name}_proj").weight for name in "qkv"])
    sizes = [plain.self_attn.attention.num_attention_heads, plain.self_attn.attention.num_key_value_heads, 0]
    sizes[2] = plain.self_attn.attention.head_dim
    rows = folded_rows(*sizes)
    if family == "olmo2":  # queries, keys and values one after another
        queries = sizes[0] * sizes[2]
        rows = torch.cat([folded_columns(*sizes), torch.arange(queries, len(rows))])
    assert torch.equal(fused.self_attn.qkv_proj.weight, parts[rows])
    assert torch.equal(fused.self_attn.o_proj.weight, plain.self_attn.o_proj.weight[:, folded_columns(*sizes)])
    assert torch.equal(fused.mlp.gate_up_proj.weight, torch.cat([plain.mlp.gate_proj.weight, plain.mlp.up_proj.weight]))


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_model_in_two_parts_matches_the_whole(folder: Folder, family: str) -> None:
    """A part's layers keep their numbers, by which some families know what they are."""
    model = load(folder(family))
    first = model.take_part(Part(first=0, last=1, head=False, count=2))
    second = model.take_part(Part(first=1, last=2, embedding=False, number=1, count=2))
    position = torch.zeros(1, dtype=torch.int32)
    hidden = first(ids(8), position, *first.masks(0, 8))
    logits = second(None, position, *second.masks(0, 8), hidden_states=hidden)
    assert_close(logits, model.whole(ids(8)), **LOGITS)


# ---- conversion ------------------------------------------------------------------------------------------------------


# EXAONE 4 has tests of its own. One layer is enough where all are alike: the converter's time goes by operations.
CONVERTED: dict[str, dict[str, Any]] = {"gemma3": {}, "smollm3": {}} | {
    family: {"num_hidden_layers": 1} for family in FAMILIES if family not in ("exaone4", "gemma3", "smollm3")
}
KV = {"gemma3": "deferred", "qwen2": "deferred", "granite": "read_only"}


@pytest.mark.parametrize("family", CONVERTED)
def test_converted_package_matches_pytorch(folder: Folder, tmp_path: Path, family: str) -> None:
    """bf16, as models are published: fp16 holds the weights exactly, so that only arithmetic and constants differ."""
    made = folder(family, dtype=torch.bfloat16, **CONVERTED[family])
    model = open_folder(made, context_length=48, block_size=8, kv=KV.get(family, "in_place"))
    package = model.convert(tmp_path / "m.mlpackage", prefill=8)
    for function in inspect(package)["functions"].values():
        assert (function["tile"]["count"], function["highest_rank"]) == (0, 4)
    for mode, gate in (("fp32", 54), ("fp16", 48)):
        # Phi-3: so few that a reference which went by their number would have the frequencies of a short context.
        result = verify(package.path, made, tokens=24 if family == "phi3" else 40, mode=mode)
        assert result.snr_db >= gate
        assert result.top1_agreement >= 0.97


# ---- what is refused -------------------------------------------------------------------------------------------------


def changed(source: Path, to: Path, **changes: Any) -> Path:
    """A copy of a folder with other fields in its config.json: `...` takes one away."""
    shutil.copytree(source, to / "copy")
    path = to / "copy" / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))
    return to / "copy"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_field_that_is_not_handled_is_refused(folder: Folder, tmp_path: Path, family: str) -> None:
    made = changed(folder(family), tmp_path, attention_sinks=4)
    with pytest.raises(ValueError, match=r"config\.json: \w+Config does not handle attention_sinks = 4$"):
        outline(made)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_field_is_refused(folder: Folder, tmp_path: Path, family: str) -> None:
    name = "layer_norm_epsilon" if family == "exaone" else "rms_norm_eps"
    with pytest.raises(ValueError, match=rf"config\.json: field {name} is missing"):
        outline(changed(folder(family), tmp_path, **{name: ...}))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_unknown_rope_type_is_refused(folder: Folder, tmp_path: Path, family: str) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    changes: dict[str, Any] = {"rope_parameters": rope}
    if family == "gemma3":
        changes = {"rope_parameters": {"full_attention": rope, "sliding_attention": {"rope_theta": 1e4}}}
    if family == "exaone":
        changes = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    with pytest.raises(
        ValueError, match=r"'dynamic' is not supported; known: 'default', 'linear', 'llama3', 'yarn', 'long"
    ):
        outline(changed(folder(family), tmp_path, **changes))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"hidden_act": "gelu"}, "field hidden_act must be 'silu', got 'gelu'"),
        ("llama", {"rope_parameters": LLAMA3 | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5 is not"),
        ("llama", {"sliding_window": 4}, "LlamaConfig does not handle sliding_window = 4"),
        ("qwen2", {"use_mrope": True}, "field use_mrope is true"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "but sliding_window is null"),
        ("qwen3", {"layer_types": ["chunked"] * 2}, "field layer_types must hold"),
        ("mistral", {"sliding_window": ...}, "field sliding_window is missing"),
        ("mistral", {"sliding_window": 0}, "field sliding_window must be above 0, got 0"),
        ("mistral", {"layer_types": ["full_attention"] * 2}, "MistralConfig does not handle layer_types"),
        ("smollm3", {"no_rope_layers": [1]}, r"field no_rope_layers must have 2 entries of 0 or 1, got \[1\]"),
        ("smollm3", {"no_rope_layers": [1, 2]}, "field no_rope_layers must have 2 entries"),
        ("granite", {"logits_scaling": 0}, "field logits_scaling must be above 0, got 0"),
        ("granite", {"residual_multiplier": ...}, "field residual_multiplier is missing"),
        ("gemma3", {"hidden_activation": "silu"}, "field hidden_activation must be 'gelu_pytorch_tanh', got 'silu'"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
        ("gemma3", {"attn_logit_softcapping": -1.0}, r"field attn_logit_softcapping must be above 0, got -1\.0"),
        ("gemma3", {"rope_local_base_freq": 3.0}, "field rope_parameters: sliding_attention is .* not understood"),
        ("phi3", {"lm_head_bias": True}, "field lm_head_bias must be false, got true"),
        ("phi3", {"full_attn_mod": 2}, "field full_attn_mod must be 1, got 2"),
        ("phi3", {"partial_rotary_factor": 0.25}, "field partial_rotary_factor contradicts rope_parameters"),
        ("exaone", {"num_hidden_layers": 3}, "field num_hidden_layers is 3, but num_layers says 2"),
        ("exaone", {"activation_function": "gelu"}, "field hidden_act must be 'silu', got 'gelu'"),
    ],
)
def test_what_a_family_cannot_do_is_refused(
    folder: Folder, tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        outline(changed(folder(family), tmp_path, **changes))
    assert str(error.value).count("config.json: ") == 1
    assert "\n" not in str(error.value)


def test_an_unknown_family_is_refused_with_those_that_there_are(folder: Folder, tmp_path: Path) -> None:
    made = changed(folder("llama"), tmp_path, model_type="mamba")
    with pytest.raises(ValueError, match=r"field model_type is 'mamba'; supported: (.*)$") as error:
        from_folder(made, context_length=8)
    listed = str(error.value).rpartition("supported: ")[2].split(", ")
    assert listed == sorted(models.FAMILIES)
    assert len(listed) == len(FAMILIES)


def test_gemma_with_its_vision_tower_is_refused_by_name(folder: Folder, tmp_path: Path) -> None:
    made = changed(folder("gemma3"), tmp_path, model_type="gemma3")
    with pytest.raises(ValueError, match=r"model_type is 'gemma3' .*vision tower.*gemma3_text"):
        from_folder(made, context_length=8)


# ---- files of transformers 4 -----------------------------------------------------------------------------------------


def as_v4(config: dict[str, Any]) -> dict[str, Any]:
    """The fields as transformers 4 spelled them."""
    config = dict(config)
    rope = config.pop("rope_parameters")
    if "full_attention" in rope:  # Gemma 3
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        config["sliding_window_pattern"] = config.pop("_sliding_window_pattern")
        rope = rope["full_attention"]
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else {"type": rope.pop("rope_type"), **rope}
    config["torch_dtype"] = config.pop("dtype")
    return config


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "exaone"])
def test_config_of_transformers_4_means_the_same(folder: Folder, tmp_path: Path, family: str) -> None:
    source = folder(family)
    made = changed(source, tmp_path)
    (made / "config.json").write_text(json.dumps(as_v4(json.loads((source / "config.json").read_text()))))
    assert_close(load(made).whole(ids(40)), load(source).whole(ids(40)), atol=0, rtol=0)


# Fields of published files, as far as they matter for what is read and refused.
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama": {"pretraining_tp": 1, "attention_bias": False, "mlp_bias": False},
    "qwen2": {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 28, "use_mrope": False},
    "qwen3": {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 36, "attention_bias": False},
    "mistral": {"sliding_window": None},
    "smollm3": {"max_window_layers": 28, "pretraining_tp": 2, "use_sliding_window": False, "sliding_window": None},
    "gemma3": {"cache_implementation": "hybrid", "attn_logit_softcapping": None},
    "phi3": {
        "full_attn_mod": 1,
        "interpolate_factor": 1,
        "lm_head_bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "sliding_window": 262144,
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    },
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_fields_of_published_files_are_read(folder: Folder, tmp_path: Path, family: str) -> None:
    model = outline(changed(folder(family), tmp_path, **PUBLISHED[family]), context_length=64)
    assert (model.sliding_slots > 0) == (family == "gemma3")


# ---- rows in another order -------------------------------------------------------------------------------------------


def neighbours(heads: int, size: int) -> Tensor:
    """Where rows are stored that belong to neighbouring elements of a head: even ones first, then odd ones."""
    return (torch.arange(heads)[:, None] * size + torch.arange(size).view(-1, 2).T.flatten()).flatten()


def interleaved(family: type[CausalLM]) -> type[CausalLM]:
    class Interleaved(family):  # type: ignore[misc, valid-type]
        def row_order(self, name: str) -> Tensor | None:
            heads = {"q_proj": self.config.num_attention_heads, "k_proj": self.config.num_key_value_heads}
            projection = name.split(".")[-2]
            return neighbours(heads[projection], self.config.head_dim) if projection in heads else None

    return Interleaved


@pytest.mark.parametrize("family", ["llama", "phi3"])  # with biases; with joined projections
def test_rows_are_put_in_order_on_every_way_of_loading(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """A checkpoint whose heads' elements are interleaved gives the logits of the one that it was made from."""
    from safetensors.torch import load_file, save_file

    usual = folder(family, **({"attention_bias": True} if family == "llama" else {}))
    expected, config = logits_of(usual, ids()), load(usual).config
    query, plain = "model.layers.0.self_attn.q_proj.weight", load(usual, fuse=False).state_dict()
    shutil.copytree(usual, tmp_path / "stored")
    tensors = load_file(tmp_path / "stored" / "model.safetensors")
    ends = [0, config.num_attention_heads, config.num_attention_heads + config.num_key_value_heads]
    for name, tensor in tensors.items():
        for projection, first, last in (("q", 0, 1), ("k", 1, 2)):
            heads, joined = ends[last] - ends[first], ".qkv_proj." in name
            if joined or f".{projection}_proj." in name:
                rows = tensor[ends[first] * config.head_dim if joined else 0 :][: heads * config.head_dim]
                rows[neighbours(heads, config.head_dim)] = rows.clone()
    save_file(tensors, tmp_path / "stored" / "model.safetensors", metadata={"format": "pt"})
    assert (load(tmp_path / "stored").whole(ids()) - expected).abs().max() > 0.1
    monkeypatch.setitem(models.FAMILIES, family, interleaved(models.FAMILIES[family]))
    for options in ({}, {"fuse": False}, {"fuse": False, "head_sharing": "repeat_kv"}, {"dtype": None}):
        model = load(tmp_path / "stored", **options)
        assert_close(model.float().whole(ids()), expected, **LOGITS)
    first = load(tmp_path / "stored", fuse=False).take_part(Part(first=0, last=1))
    assert torch.equal(first.state_dict()[query], plain[query])
    for fuse in (True, False):
        package = tmp_path / f"{fuse}.mlpackage"
        open_folder(tmp_path / "stored", context_length=16, block_size=4, fuse=fuse).convert(package, prefill=4)
        assert verify(package, tmp_path / "stored", tokens=11).snr_db > 45


@pytest.mark.parametrize("rows", [[0, 1, 1], [0, 1], [1, 2, 3]])
def test_an_order_that_loses_rows_is_refused(folder: Folder, monkeypatch: pytest.MonkeyPatch, rows: list[int]) -> None:
    order = torch.tensor(rows)
    monkeypatch.setattr(
        models.Llama, "row_order", lambda self, name: order if name.endswith("0.mlp.up_proj.weight") else None
    )
    with pytest.raises(
        ValueError, match=r"parameter model\.layers\.0\.mlp\.up_proj\.weight: its row order must name each of"
    ):
        load(folder("llama"))


# ---- rotary scalings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 8.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        {
            "rope_type": "yarn",
            "factor": 0.5,
            "original_max_position_embeddings": 2048,
            "beta_slow": 2,
            "truncate": False,
        },
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "mscale": 0.707,
            "mscale_all_dim": 1.0,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4, "attention_factor": 0.9},
        {
            "rope_type": "longrope",
            "original_max_position_embeddings": 4096,
            "short_factor": [1.0 + i / 9 for i in range(24)],
            "long_factor": [1.0 + i for i in range(24)],
            "factor": 32.0,
        },
    ],
)
def test_rotary_scalings_match_transformers(theta: float, scaling: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(head_dim=48, rope_parameters={"rope_theta": theta, **scaling}, max_position_embeddings=131072)
    for length in (4096, 4097):
        expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, seq_len=length)
        actual = rotary_frequencies(48, rope_theta=theta, rope_scaling=scaling, context_length=length)
        assert_close(actual, expected, rtol=1e-6, atol=0)
        assert rotary_factor(scaling) == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "linear"}, "'linear' lacks factor"),
        ({"rope_type": "yarn", "factor": 4.0}, "'yarn' lacks original_max_position_embeddings"),
        (
            YARN | {"rope_theta": None, "truncate": 1},
            "rope_theta = None is not supported|truncate must be true or false",
        ),
        ({"rope_type": "linear", "factor": -1.0}, r"factor must be above 0, got -1\.0"),
        ({"rope_type": "proportional", "factor": 2.0}, "'proportional' is not supported"),
        (
            {"rope_type": "longrope", "original_max_position_embeddings": 8, "short_factor": [1, 1], "long_factor": 3},
            "long_factor must be a list",
        ),
        (
            {
                "rope_type": "longrope",
                "original_max_position_embeddings": 8,
                "short_factor": [1, 1],
                "long_factor": [1, 1],
                "factor": 2,
            },
            "short_factor must have 4 entries|long_factor must have 4 entries",
        ),
    ],
)
def test_impossible_scalings_are_refused(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rotary_frequencies(8, rope_theta=1e4, rope_scaling=scaling, context_length=8)


def test_family_files_stay_short() -> None:
    for name in FAMILIES:
        text = (Path(models.__file__).parent / f"{name}.py").read_text()
        assert len(text.splitlines()) <= 200
        assert re.search(r'^"""', text)
