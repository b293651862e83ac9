"""Compressed packages: the values in the file are PyTorch's, bit for bit, for every recipe; sizes are what was promised."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ane_layers import Embedding, Linear, OutputHead, bundled_checkpoint
from ane_layers.analysis import inspect
from ane_layers.compression import (
    Compression,
    Plan,
    Ranking,
    Recipe,
    ScaledIntegers,
    Setting,
    compress,
    compress_weight,
    load_recipe,
    make_plan,
    units,
)
from ane_layers.compression.ranking import ModuleHarm, model_facts
from ane_layers.compression.recipe import Allocation, Promotion, shipped
from ane_layers.conversion import FunctionSpec, convert
from ane_layers.conversion.causal_lm import STATES
from ane_layers.conversion.quiet import quiet_coremltools
from ane_layers.generation import Session, read_metadata
from ane_layers.models import Exaone4
from ane_layers.program import Package
from ane_layers.program.constexpr import compressed

Folder = Callable[..., Path]
CONTEXT, BLOCK = 16, 4


def load(folder: Path, **options: Any) -> Exaone4:
    return Exaone4.from_pretrained(folder, context_length=CONTEXT, **options)


def ranking_of(model: Exaone4) -> Ranking:
    """Harms that fall with bits and rise with the layer's number, so that the last layers are promoted."""
    layers = {layer: float(layer) for layer in range(model.config.num_hidden_layers)}
    modules = []
    for number, unit in enumerate(units(model)):
        harm = {
            Setting(bits=bits, group_size=size).key: (number % 5 + 1) * 4.0**-bits * (1 if size else 1.5)
            for bits in (2, 3, 4, 6, 8)
            for size in (4, None)
        }
        modules.append(ModuleHarm(unit.name, unit.layer, harm))
    return Ranking(
        method="kl",
        model=model_facts(model.config),
        setting="lut4g4",
        tokens=1,
        layers=layers,
        modules=tuple(modules),
    )


GROUPED = Setting(bits=4, group_size=4)
RECIPES = {
    "fp16": load_recipe("fp16"),
    "int8": load_recipe("int8"),
    "base": load_recipe("base"),
    "promoted": dataclasses.replace(
        load_recipe("top8"), promoted=Promotion(layers=1, setting=Setting(bits=8), modules="mlp.*")
    ),
    "allocated": Recipe(
        name="allocated", allocation=Allocation(bits_per_weight=5, group_size=4), embedding=Setting(bits=6)
    ),
    "odd bits": Recipe(
        name="odd",
        layers=Setting(bits=3, group_size=8),
        head=Setting(bits=1),
        embedding=Setting(scheme="linear", bits=4),
        modules=(
            ("*.o_proj", Setting(scheme="linear", bits=4, block_size=32)),
            ("model.layers.0.mlp.down_proj", Setting(bits=2)),
            ("model.layers.1.*", Setting(bits=6)),
        ),
    ),
    "one table for both, grouped": Recipe(name="shared", tied="share", layers=GROUPED, head=GROUPED, embedding=GROUPED),
    "one table for both, per tensor": Recipe(
        name="shared", tied="share", head=Setting(bits=6), embedding=Setting(bits=6)
    ),
}


def plan_of(model: Exaone4, recipe: Recipe) -> Plan:
    return make_plan(model, recipe, ranking=ranking_of(model) if recipe.needs_ranking else None)


def stored(package: Package, function: str) -> dict[str, np.ndarray]:
    """Every tensor constant of a function by name, decompressed."""
    known: dict[str, Any] = {}
    for operation in package.function(function).block.operations:
        if operation.type == "const":
            known[operation.outputs[0].name] = operation.attributes["val"]
        elif operation.type.startswith("constexpr_"):
            known.update(compressed(operation, known))
    return {name: constant.array() for name, constant in known.items() if hasattr(constant.type, "shape")}


def in_file(name: str) -> str:
    return name.replace(".", "_")


@pytest.mark.parametrize("name", RECIPES)
def test_every_weight_in_the_file_is_bit_equal_to_pytorchs(exaone4_folder: Folder, tmp_path: Path, name: str) -> None:
    # 3 pieces of 64 rows: groups and bytes of a shared table begin where its pieces do.
    folder = exaone4_folder(dtype=torch.bfloat16, vocab=192, hidden=64)
    model = load(folder, head_pieces=3)
    compression = compress(model, plan_of(model, RECIPES[name]))
    package = model.convert(tmp_path / "kept.mlpackage", prefill=BLOCK, compression=compression)
    for function in ("decode", "prefill"):
        constants = stored(package, function)
        for unit in units(model):
            for path, weight in unit.weights.items():
                array = constants[in_file(path)]
                assert array.dtype == np.float16
                assert np.array_equal(array.astype(np.float32), weight.detach().numpy()), path
    # Compressed while writing, from the checkpoint's own bf16 tensors: the same file.
    streamed = load(folder, head_pieces=3, dtype=None)
    streaming = Compression(plan_of(streamed, RECIPES[name]))
    again = streamed.convert(tmp_path / "streamed.mlpackage", prefill=BLOCK, compression=streaming)
    assert weight_file(again) == weight_file(package)
    assert streaming.report.as_dict() == compression.report.as_dict()
    logits = [Session(path.path).extend([5, 3, 8, 1, 7])[-1].values for path in (package, again)]
    assert np.array_equal(*logits)
    expected = model.extend(torch.tensor([[5, 3, 8, 1, 7]]))[0, -1].numpy()
    assert np.abs(logits[0][-1] - expected).max() < 2e-3 * np.abs(expected).max()


def test_coremltools_decompresses_the_same_values(exaone4_folder: Folder, tmp_path: Path) -> None:
    """Apple's own reader and its value inference, on all kinds at once, shared records of less than a byte included."""
    import coremltools as ct
    from coremltools.converters.mil.frontend.milproto.load import load as load_program

    settings = [
        Setting(bits=1),
        Setting(bits=2, group_size=4),
        Setting(bits=3, group_size=8),
        Setting(bits=6),
        Setting(bits=8, group_size=16),
        Setting(scheme="linear", bits=4, block_size=32),
        Setting(scheme="linear", bits=8),
    ]

    class Stack(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = Embedding(192, 64)
            self.layers = torch.nn.ModuleList(Linear(64, 64) for _ in settings)
            self.head = OutputHead(64, 192, pieces=3)
            table = self.embedding.weight
            self.load_state_dict({"head.weight": table}, assign=True, strict=False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embedding(ids)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    torch.manual_seed(0)
    model = Stack().requires_grad_(False)
    shared = Setting(bits=3, group_size=16)
    modules = tuple((f"layers.{i}", setting) for i, setting in enumerate(settings))
    recipe = Recipe(name="all", tied="share", head=shared, embedding=shared, modules=modules)
    compression = compress(model, make_plan(model, recipe))
    ids = {"ids": torch.zeros(1, 1, dtype=torch.int32)}
    package = convert(model, tmp_path / "m.mlpackage", example_inputs=ids, compression=compression)
    loaded = ct.models.MLModel(str(package.path), skip_model_load=True)
    program = load_program(loaded.get_spec(), loaded.get_spec().specificationVersion, loaded.weights_dir)
    values = {
        op.outputs[0].name: op.materialized_val_inference()
        for op in program.functions["main"].operations
        if op.op_type.startswith("constexpr")
    }
    paths = {path: weight for unit in units(model) for path, weight in unit.weights.items()}
    assert set(values) == {in_file(path) for path in paths}
    for path, weight in paths.items():
        np.testing.assert_array_equal(values[in_file(path)], weight.half().numpy())
    # The table of embedding and head is in the file once.
    table = 192 * 64 * 3 // 8 + 12 * 8 * 2
    others = sum(sum(setting.stored_bytes((64, 64))) for setting in settings)
    assert inspect(package)["functions"]["main"]["weight_bytes"] == table + others


def test_functions_share_the_compressed_weights(exaone4_folder: Folder, tmp_path: Path) -> None:
    folder = exaone4_folder(dtype=torch.bfloat16, vocab=192, hidden=64)
    model = load(folder, head_pieces=3)
    compression = compress(model, make_plan(model, load_recipe("base")))
    package = model.convert(tmp_path / "m.mlpackage", prefill=BLOCK, compression=compression)
    counts = inspect(package)["functions"]
    together = (package.path / "Data/com.apple.CoreML/weights/weight.bin").stat().st_size
    assert together < 1.2 * max(counts[name]["weight_bytes"] for name in ("decode", "prefill"))
    kinds = counts["decode"]["operations"]["by_type"]
    # 4 projections a layer, 3 pieces of the head, the embedding.
    assert kinds["constexpr_lut_to_dense"] == 4 * 2 + 3 + 1
    assert read_metadata(package)["recipe"] == "base"


def test_report_gives_achieved_bits_bytes_and_what_was_left_alone(exaone4_folder: Folder, tmp_path: Path) -> None:
    model = load(exaone4_folder(dtype=torch.bfloat16), head_pieces=3)
    before = {path: weight.clone() for unit in units(model) for path, weight in unit.weights.items()}
    recipe = Recipe(name="r", layers=Setting(bits=4, group_size=16), embedding=Setting(scheme="linear", bits=8))
    compression = compress(model, make_plan(model, recipe))
    report = {tensor.path: tensor for tensor in compression.report.tensors}
    assert set(report) == {name for name, _ in model.named_parameters()}
    down = report["model.layers.0.mlp.down_proj.weight"]
    # 40 output channels: groups of 16 do not divide them, groups of 10 do.
    assert down.setting == Setting(bits=4, group_size=10)
    assert "4-bit table per 16 channels" in down.note
    assert down.data_bytes == 40 * 72 // 2
    assert down.table_bytes == 4 * 16 * 2
    assert down.bits_per_weight == 8 * (down.data_bytes + down.table_bytes) / (40 * 72)
    weight = before[down.path].half().float()
    after = dict(model.named_parameters())[down.path]
    assert down.error == pytest.approx(float((weight - after).square().sum() / weight.square().sum()), rel=1e-5)
    table = report["model.embed_tokens.weight"]
    assert (table.data_bytes, table.table_bytes) == (109 * 40, 109 * 2)
    head = report["lm_head.pieces.0.weight"]
    assert (head.setting.scheme, head.error) == ("fp16", 0)
    assert "fp16" in head.note
    norm = report["model.layers.0.post_attention_layernorm.weight"]
    assert "norm" in norm.note
    package = model.convert(tmp_path / "m.mlpackage", prefill=BLOCK, compression=compression)
    # Beside the report's bytes there are the rotary tables and masks; nothing else of size.
    constants = inspect(package)["functions"]["decode"]["weight_bytes"]
    assert compression.report.weight_bytes < constants < compression.report.weight_bytes + 2 * 2 * CONTEXT * 16 + 600


@pytest.mark.parametrize("setting", [Setting(bits=4, group_size=4), Setting(scheme="linear", bits=4), Setting(bits=8)])
def test_zero_tiny_and_constant_channels_survive(setting: Setting) -> None:
    """cm 2853: no scale is zero, nothing is NaN; zeros stay zeros."""
    weight = torch.randn(16, 24, generator=torch.Generator().manual_seed(0)).half()
    weight[0] = 0
    weight[4:8] = 0
    weight[8] = 1e-6
    weight[9] = 6e-8  # the smallest fp16 there is
    weight[12:16] = 0.25
    compressed_ = compress_weight("w", weight.numpy(), setting)
    dense = compressed_.dense().astype(np.float64)
    assert np.isfinite(dense).all()
    assert np.abs(dense[4:8]).max() == 0
    np.testing.assert_allclose(dense[12:16], 0.25, rtol=2e-3)
    if isinstance(compressed_, ScaledIntegers):
        assert (compressed_.scale > 0).all()
        assert np.abs(dense[0]).max() == 0
        # Half a step, and what rounding the scale to fp16's grid of 2**-24 does to the largest integer.
        largest = 2 ** (setting.bits - 1) - 1
        np.testing.assert_allclose(dense[8], 1e-6, rtol=0, atol=compressed_.scale[8, 0] / 2 + largest * 2.0**-25)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block", [None, 32])
def test_linear_integers_match_coremltools(bits: int, block: int | None, tmp_path: Path) -> None:
    """Same scheme, same squared error as `linear_quantize_weights`."""
    import coremltools as ct
    from coremltools.optimize import coreml

    torch.manual_seed(bits)
    layer = torch.nn.Conv2d(64, 48, 1, bias=False).requires_grad_(False).half().float()
    granularity = {"granularity": "per_block", "block_size": block} if block else {"granularity": "per_channel"}
    config = coreml.OpLinearQuantizerConfig(
        mode="linear_symmetric", dtype=f"int{bits}", weight_threshold=0, **granularity
    )
    with quiet_coremltools():
        model = ct.convert(
            torch.jit.trace(layer.eval(), torch.zeros(1, 64, 1, 2)),
            inputs=[ct.TensorType("x", (1, 64, 1, 2))],
            minimum_deployment_target=ct.target.iOS18,
            skip_model_load=True,
        )
        coreml.linear_quantize_weights(model, coreml.OptimizationConfig(config)).save(str(tmp_path / "q.mlpackage"))
    theirs = next(
        value
        for value in stored(Package.open(tmp_path / "q.mlpackage"), "main").values()
        if value.ndim == 4 and value.size == 3072
    )
    weight = layer.weight.detach().half().numpy()
    ours = compress_weight("w", weight, Setting(scheme="linear", bits=bits, block_size=block)).dense()

    def error(dense: np.ndarray) -> float:
        return float(np.square(dense.astype(np.float64) - weight).sum())

    assert error(ours) <= 1.002 * error(theirs)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 70000.0])
def test_weights_that_fp16_cannot_hold_are_refused_by_name(exaone4_folder: Folder, value: float) -> None:
    model = load(exaone4_folder(vocab=192))
    model.model.layers[1].mlp.down_proj.weight[0, 0] = value
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.down_proj\.weight"):
        compress(model, make_plan(model, load_recipe("base")))


def test_a_weight_that_changed_after_compression_is_refused(exaone4_folder: Folder, tmp_path: Path) -> None:
    model = load(exaone4_folder(vocab=192))
    compression = compress(model, make_plan(model, load_recipe("base")))
    model.model.layers[1].mlp.down_proj.weight[0, 0] += 1
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj\.weight: was changed after it was compressed"):
        model.convert(tmp_path / "m.mlpackage", prefill=BLOCK, compression=compression)
    assert list(tmp_path.iterdir()) == []


def test_another_models_compression_is_refused(exaone4_folder: Folder, tmp_path: Path) -> None:
    three = load(exaone4_folder(layers=3, vocab=192))
    plan = make_plan(three, load_recipe("base"))
    with pytest.raises(ValueError, match=r"another model: it has model\.layers\.2"):
        load(exaone4_folder(vocab=192)).convert(tmp_path / "m.mlpackage", prefill=BLOCK, compression=Compression(plan))


@pytest.mark.parametrize("name", shipped())
def test_shipped_recipes_fit_the_bundled_model(name: str) -> None:
    model = Exaone4.from_pretrained(bundled_checkpoint(), context_length=8, dtype=None)
    recipe = load_recipe(name)
    ranking = None
    if recipe.needs_ranking:
        with pytest.raises(ValueError, match="needs a ranking"):
            make_plan(model, recipe)
        if recipe.allocation is not None:
            return
        ranking = ranking_of(model)
    plan = make_plan(model, recipe, ranking=ranking)
    assert set(plan.settings) == {path for unit in units(model) for path in unit.weights}
    promoted = {"top8": 8, "top12": 12}.get(name, 0)
    eight = [path for path, setting in plan.settings.items() if setting.bits == 8 and setting.scheme == "lut"]
    assert len(eight) == 4 * promoted
    assert plan.promoted == tuple(range(11, 11 - promoted, -1))


def weight_file(package: Package) -> bytes:
    return (Path(package.path) / "Data/com.apple.CoreML/weights/weight.bin").read_bytes()


def test_nothing_here_needs_scikit_learn(tmp_path: Path) -> None:
    """ET 22269: a missing package that shows at the end of a long run. Clustering is this library's own."""
    program = (
        "import sys; sys.modules['sklearn'] = sys.modules['scipy'] = None\n"
        "from ane_layers import bundled_checkpoint\n"
        "from ane_layers.compression import compress, load_recipe, make_plan\n"
        "from ane_layers.models import from_folder\n"
        "model = from_folder(bundled_checkpoint(), context_length=8)\n"
        "print(compress(model, make_plan(model, load_recipe('base'))).report.weight_bytes)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert 2_100_000 < int(done.stdout) < 2_300_000


def test_more_functions_add_no_weights(exaone4_folder: Folder, tmp_path: Path) -> None:
    """cm 2351: with many functions, weights are still written once, and only one is held at a time."""
    model = load(exaone4_folder(dtype=torch.bfloat16, vocab=192, hidden=64), dtype=None, head_pieces=3)
    compression = Compression(make_plan(model, load_recipe("base")))
    sizes = []
    for lengths in ((1,), (1, 2, 3, 4)):
        functions = {
            f"f{length}": FunctionSpec(
                inputs={
                    "inputIds": torch.zeros(1, length, dtype=torch.int32),
                    "position": torch.zeros(1, dtype=torch.int32),
                    "causalMask": torch.zeros(1, 1, length, CONTEXT),
                },
                outputs=("logits",),
            )
            for length in lengths
        }
        package = convert(
            model,
            tmp_path / "m.mlpackage",
            functions=functions,
            states={name: STATES[name] for name in ("keyCache", "valueCache")},
            compression=compression,
        )
        sizes.append(len(weight_file(package)))
    assert not compression.kept
    assert sizes[1] < 1.1 * sizes[0]
