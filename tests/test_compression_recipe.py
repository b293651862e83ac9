"""Recipes: what is read, what is refused and how, and what a model makes of one."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ane_layers import Embedding, Linear, OutputHead
from ane_layers.compression import Ranking, Recipe, Setting, load_recipe, make_plan, parse_recipe, units
from ane_layers.compression.preparation import read_recipe
from ane_layers.compression.ranking import ModuleHarm
from ane_layers.compression.recipe import Allocation, Promotion, shipped, to_toml


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"q": Linear(64, 64), "o": Linear(64, 64)})
        self.mlp = nn.ModuleDict({"up": Linear(64, 128), "down": Linear(128, 64)})


class Port(nn.Module):
    """Somebody's model: no config, names of its own."""

    def __init__(self, *, vocab: int = 256, pieces: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.table = Embedding(vocab, 64)
        self.blocks = nn.ModuleList(Layer() for _ in range(3))
        self.head = OutputHead(64, vocab, pieces=pieces)
        if tied:
            self.load_state_dict({"head.weight": self.table.weight}, strict=False, assign=True)


def ranking(*order: int) -> Ranking:
    harm = {layer: float(len(order) - place) for place, layer in enumerate(order)}
    return Ranking(method="kl", model={}, setting="lut4", tokens=1, layers=harm, modules=())


def settings(recipe: Recipe, **options: object) -> dict[str, str]:
    plan = make_plan(Port(), recipe, **options)  # type: ignore[arg-type]
    return {path: setting.key for path, setting in plan.settings.items()}


def test_units_are_layers_head_and_embedding() -> None:
    found = {unit.name: unit for unit in units(Port())}
    assert list(found) == [
        "table",
        *(f"blocks.{i}.{part}" for i in range(3) for part in ("attention.q", "attention.o", "mlp.up", "mlp.down")),
        "head",
    ]
    assert (found["table"].kind, found["head"].kind, found["blocks.1.mlp.up"].kind) == ("embedding", "head", "linear")
    assert (found["table"].layer, found["blocks.2.mlp.up"].layer, found["head"].layer) == (None, 2, None)
    assert found["blocks.2.mlp.up"].within == "mlp.up"
    assert list(found["head"].weights) == ["head.pieces.0.weight", "head.pieces.1.weight"]


def test_sections_name_layers_head_and_embedding() -> None:
    recipe = Recipe(
        name="r",
        layers=Setting(bits=4, group_size=16),
        head=Setting(bits=6),
        embedding=Setting(scheme="linear", bits=8),
    )
    found = settings(recipe)
    assert found.pop("table.weight") == "int8"
    assert {found.pop(f"head.pieces.{i}.weight") for i in range(2)} == {"lut6"}
    assert set(found.values()) == {"lut4g16"}


@pytest.mark.parametrize(
    ("modules", "promoted"),
    [("*", {"attention.q", "attention.o", "mlp.up", "mlp.down"}), ("mlp.*", {"mlp.up", "mlp.down"})],
)
def test_promotion_takes_the_most_harmed_layers_whole_or_in_part(modules: str, promoted: set[str]) -> None:
    recipe = Recipe(
        name="r", layers=Setting(bits=4), promoted=Promotion(layers=2, setting=Setting(bits=8), modules=modules)
    )
    found = settings(recipe, ranking=ranking(2, 0, 1))
    eight = {path for path, key in found.items() if key == "lut8"}
    assert eight == {f"blocks.{layer}.{part}.weight" for layer in (0, 2) for part in promoted}


def test_the_last_matching_pattern_wins() -> None:
    recipe = Recipe(
        name="r",
        layers=Setting(bits=4),
        modules=(
            ("blocks.*", Setting(bits=3)),
            ("blocks.1.*", Setting(bits=6)),
            ("*.down", Setting(scheme="fp16", bits=16)),
        ),
    )
    found = settings(recipe)
    assert found["blocks.0.mlp.up.weight"] == "lut3"
    assert found["blocks.1.mlp.up.weight"] == "lut6"
    assert found["blocks.1.mlp.down.weight"] == "fp16"


def test_a_group_that_does_not_divide_is_fitted_or_refused_by_name() -> None:
    assert Setting(group_size=16).fitted("w", (40, 8)) == Setting(group_size=10)
    assert Setting(group_size=64).fitted("w", (40, 8)) == Setting()
    assert Setting(group_size=16).fitted("w", (48, 8)) == Setting(group_size=16)
    assert Setting(scheme="linear", bits=4, block_size=32).fitted("w", (8, 72)).block_size == 24
    with pytest.raises(ValueError, match="w: group_size 16 does not divide its 109 output channels"):
        Setting(group_size=16).fitted("w", (109, 8))
    with pytest.raises(ValueError, match=r"recipe r: head\.pieces\.0\.weight: group_size 16"):
        make_plan(Port(vocab=2 * 109), Recipe(name="r", head=Setting(group_size=16)))


@given(
    scheme=st.sampled_from(["lut", "linear"]),
    bits=st.sampled_from([1, 2, 3, 4, 6, 8]),
    size=st.one_of(st.none(), st.integers(1, 64)),
    rows=st.integers(1, 97),
    columns=st.integers(1, 97),
)
def test_a_fitted_size_always_divides(scheme: str, bits: int, size: int | None, rows: int, columns: int) -> None:
    if scheme == "linear" and bits not in (4, 8):
        return
    sizes = {"group_size": size} if scheme == "lut" else {"block_size": size}
    setting = Setting(scheme=scheme, bits=bits, **sizes)  # type: ignore[arg-type]
    assert Setting.from_key(setting.key) == setting
    try:
        fitted = setting.fitted("w", (rows, columns))
    except ValueError as error:
        assert "does not divide" in str(error)  # noqa: PT017
        return
    assert rows % (fitted.group_size or 1) == 0
    assert columns % (fitted.block_size or 1) == 0
    data, tables = fitted.stored_bytes((rows, columns))
    assert data == -(-rows * columns * bits // 8)
    assert tables > 0


def test_tied_tables_are_shared_only_where_it_can_be() -> None:
    setting = Setting(bits=6, group_size=16)
    shared = Recipe(name="r", tied="share", head=setting, embedding=setting)
    plan = make_plan(Port(tied=True), shared)
    assert plan.shared == {"table.weight", "head.pieces.0.weight", "head.pieces.1.weight"}
    assert make_plan(Port(tied=True), dataclasses.replace(shared, tied="split")).shared == frozenset()
    assert make_plan(Port(tied=False), shared).shared == frozenset()  # two tables, nothing to share
    with pytest.raises(ValueError, match="tied is 'share', but head"):
        Recipe(name="r", tied="share", head=Setting(bits=6), embedding=Setting(bits=4))
    # Pieces of 88 rows, a multiple of 8 but not of 16; and pieces whose tables would begin in the middle of 64 bytes.
    for vocab, bits, size in ((176, 6, 16), (256, 3, 32)):
        wrong = Setting(bits=bits, group_size=size)
        with pytest.raises(
            ValueError, match=r"head\.pieces\.[01]\.weight.* cannot be part of the table of table\.weight"
        ):
            make_plan(
                Port(tied=True, vocab=vocab, pieces=2 if bits == 6 else 8),
                dataclasses.replace(shared, head=wrong, embedding=wrong),
            )


WRONG = {
    "layers = 4": "[layers] must be a table of keys, got 4",
    "[layers]\nscheme = 'lut'": "[layers]: key bits is missing",
    "[layers]\nbits = 5": "[layers]: bits must be 1, 2, 3, 4, 6, 8 with scheme 'lut', got 5",
    "[layers]\nbits = true": "bits must be",
    "[layers]\nbits = 4\nscheme = 'float8'": "scheme must be one of fp16, lut, linear, got 'float8'",
    "[layers]\nbits = 6\nscheme = 'linear'": "bits must be 4, 8 with scheme 'linear', got 6",
    "[layers]\nbits = 4\nblock_size = 32": "block_size belongs to scheme 'linear'",
    "[layers]\nbits = 4\ngroup_size = 0": "group_size must be a positive integer, got 0",
    "[layers]\nbits = 4\ngroupsize = 8": "unknown key 'groupsize'; known are scheme, bits",
    "[layer]\nbits = 4": "unknown key 'layer'; known are",
    "chunks = 0": "chunks must be a positive integer, got 0",
    "tied = 'both'": "tied must be one of split, share, got 'both'",
    "[promoted]\nbits = 8": "[promoted]: layers must be a number of layers, got None",
    "[promoted]\nbits = 8\nlayers = -1": "layers must be a number of layers, got -1",
    "[promoted]\nbits = 8\nlayers = 1\nmodules = 3": "modules must be a pattern",
    "[[modules]]\nbits = 8": "[[modules]] number 1: match must be a pattern",
    "[modules]\nbits = 8": "modules must be written as [[modules]] sections",
    "[allocation]\nbits_per_weight = 40": "bits_per_weight must be within 1 … 16, got 40",
    "[allocation]\nbits_per_weight = 4\nbits = [4, 5]": "bits must be 1, 2, 3, 4, 6, 8",
    "[allocation]\nbits_per_weight = 4\n[promoted]\nlayers = 1\nbits = 8": "allocation and promoted exclude each other",
    "description = 3": "description must be a text",
    "bits = ": "is not valid TOML",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_recipe_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(WRONG[text])) as caught:
        load_recipe(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_patterns_that_match_nothing_are_refused_with_what_there_is() -> None:
    recipe = Recipe(name="r", modules=(("*.gate_proj", Setting()),))
    with pytest.raises(
        ValueError, match=r"recipe r: pattern '\*\.gate_proj' matches no module; there are table, blocks\.\*\.att"
    ):
        make_plan(Port(), recipe)
    promoted = Promotion(layers=1, setting=Setting(bits=8), modules="ffn.*")
    with pytest.raises(ValueError, match=r"'ffn\.\*' matches no module; there are attention\.q, attention\.o, mlp\.up"):
        make_plan(Port(), Recipe(name="r", promoted=promoted), ranking=ranking(0, 1, 2))


def test_rankings_are_asked_for_and_held_against_the_model(tmp_path: Path) -> None:
    recipe = Recipe(name="r", promoted=Promotion(layers=4, setting=Setting(bits=8)))
    with pytest.raises(ValueError, match=r"recipe r: section \[promoted\] needs a ranking"):
        make_plan(Port(), recipe)
    with pytest.raises(ValueError, match=r"\[promoted\] layers is 4, the model has 3"):
        make_plan(Port(), recipe, ranking=ranking(0, 1, 2))
    with pytest.raises(ValueError, match="num_hidden_layers 30, this one has 3"):
        dataclasses.replace(ranking(0), model={"num_hidden_layers": 30}).check_model({"num_hidden_layers": 3})
    path = tmp_path / "ranking.json"
    for text, message in {
        "{": "is not valid JSON",
        "{}": "is no ranking",
        '{"format": "ane_layers.ranking", "version": 9}': "field version is 9, expected 1",
        '{"format": "ane_layers.ranking", "version": 1}': "is a damaged ranking",
    }.items():
        path.write_text(text)
        with pytest.raises(ValueError, match=f"ranking.json: {message}"):
            Ranking.load(path)
    with pytest.raises(ValueError, match=r"none\.json: cannot be read"):
        Ranking.load(tmp_path / "none.json")


def test_a_ranking_survives_json() -> None:
    written = dataclasses.replace(
        ranking(2, 0, 1), modules=(ModuleHarm("a", 0, {"lut4": 0.5}), ModuleHarm("head", None, {"lut4": 1.0}))
    )
    read = Ranking.from_dict(written.as_dict())
    assert read.order == [2, 0, 1]
    assert read.layers == written.layers
    assert [module.name for module in read.modules] == ["head", "a"]  # the most harmed first


def test_unknown_recipes_are_refused_with_the_known_ones() -> None:
    assert {"base", "top8", "top12", "fp16", "int8"} <= set(shipped())
    with pytest.raises(ValueError, match=r"recipe 'top9' is not known; there are base, .*top12, top8"):
        load_recipe("top9")
    with pytest.raises(ValueError, match="recipe base promotes no layers"):
        read_recipe("base", promote=3)
    promoted = read_recipe("top8", promote=3).promoted
    assert promoted is not None
    assert promoted.layers == 3


@pytest.mark.parametrize("name", ["base", "top8", "top12", "fp16", "int8"])
def test_the_articles_recipes(name: str) -> None:
    recipe = load_recipe(name)
    # The article: base had 2 chunks, top8 one; FFN 4-bit, 8 or 12 layers at 8-bit, head 6-bit, embedding 4-bit.
    assert recipe.chunks == (2 if name == "base" else 1)
    if name in ("base", "top8", "top12"):
        assert (recipe.layers.bits, recipe.head.bits, recipe.embedding.bits, recipe.tied) == (4, 6, 4, "split")
        promoted = recipe.promoted
        assert (promoted and (promoted.layers, promoted.setting.bits, promoted.modules)) == {
            "base": None,
            "top8": (8, 8, "*"),
            "top12": (12, 8, "*"),
        }[name]


@pytest.mark.parametrize("name", shipped())
def test_toml_written_is_read_back(name: str) -> None:
    recipe = load_recipe(name)
    assert parse_recipe(to_toml(recipe), name=name, file="f") == recipe
    mine = dataclasses.replace(
        recipe,
        description='a "quoted" \\ text',
        modules=(("a.*", Setting(bits=3, group_size=8)), ("b", Setting(scheme="linear", bits=4, block_size=16))),
        promoted=None,
        allocation=Allocation(bits_per_weight=4.5),
    )
    assert parse_recipe(to_toml(mine), name=name, file="f") == mine


def test_compression_of_one_dtype_model_only_takes_fp16_weights() -> None:
    from ane_layers.compression import compress_weight

    with pytest.raises(ValueError, match=r"w: compression takes fp16 \[out, in, …\], got float32 \[4, 4\]"):
        compress_weight("w", torch.zeros(4, 4).numpy(), Setting())
