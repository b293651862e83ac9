"""The head-sharing benchmark: every way agrees with PyTorch, costs what it should, and the script for a Mac counts rightly."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import coremltools
import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import head_sharing
import measure_on_mac
from head_sharing_cpu import measure
from head_sharing_ways import WAYS, Geometry, KVHeadLoop, attend

from ane_layers import causal_mask
from ane_layers.interpreter import MLProgram

# Three query heads a KV head, a head size other than hidden / heads, and a context that is no power of two.
ODD = Geometry(hidden=24, heads=6, kv_heads=2, head_dim=16, context=37, block=5, layers=2)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packages of all ways, with `.mlpackage` names of the ways."""
    folder = tmp_path_factory.mktemp("ways")
    for way in WAYS:
        head_sharing.write_package(ODD, way, folder)
    return folder


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("way", WAYS)
def test_attention_matches_torch_sdpa(way: str, tokens: int) -> None:
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(1, 6, tokens, 16, generator=generator)
    key, value = (torch.randn(1, 2, 37, 16, generator=generator) for _ in range(2))
    mask = causal_mask(20, tokens, 37)
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    module = attend(way, ODD)
    torch.testing.assert_close(module(query, key, value, module.align_mask(mask, tokens)), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_package_matches_torch_sdpa(way: str, packages: Path) -> None:
    package = head_sharing.Package.open(packages / f"{way}.mlpackage")
    reference = head_sharing.expected(ODD, way)
    for mode, gate in head_sharing.GATES.items():
        levels = head_sharing.agreement(package, ODD, reference, mode)
        assert levels.keys() == {"prefill", "decode"}
        assert min(levels.values()) >= gate


def test_packages_cost_what_their_shapes_say(packages: Path) -> None:
    """fp16: a repeated K or V is H·T·D·2 bytes, and so is what a loop over query heads reads."""
    repeated, cache, layers = 6 * 37 * 16 * 2, 2 * 37 * 16 * 2, 2
    found = {
        way: head_sharing.counted(head_sharing.Package.open(packages / f"{way}.mlpackage"), layers)["decode"]
        for way in WAYS
    }
    tiles = {way: (row["tile"]["count"], row["tile"]["bytes"]) for way, row in found.items()}
    assert tiles == dict.fromkeys(WAYS, (0, 0)) | {"repeat_kv": (2 * layers, 2 * layers * repeated)}
    reads = {way: row["traffic"]["kv_read"] for way, row in found.items()}
    assert reads == dict.fromkeys(WAYS, 2 * layers * cache) | {"head_loop": 2 * layers * repeated}
    ranks = {way: row["highest_rank"] for way, row in found.items()}
    assert ranks == dict.fromkeys(WAYS, 4) | {"repeat_kv": 5, "broadcast_rank5": 5}
    products = {way: row["by_type"].get("matmul", 0) // layers for way, row in found.items()}
    assert products == dict.fromkeys(WAYS, 2) | {"kv_head_loop": 4, "head_loop": 12, "fused": 0}
    assert found["fused"]["by_type"]["scaled_dot_product_attention"] == layers


def test_a_wrong_kv_head_is_far_below_the_gates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = KVHeadLoop.forward

    def crossed(self: KVHeadLoop, query: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        order = torch.tensor([0, 1, 3, 2, 4, 5])  # heads 2 and 3 change places, and with them their KV heads
        return forward(self, query[:, order], *rest)[:, order]

    monkeypatch.setattr(KVHeadLoop, "forward", crossed)
    package = head_sharing.write_package(ODD, "kv_head_loop", tmp_path)
    levels = head_sharing.agreement(package, ODD, head_sharing.expected(ODD, "kv_head_loop"), "fp32")
    assert max(levels.values()) < 15


def test_disagreement_makes_the_exit_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(head_sharing, "WAYS", {"fold": "fold"})
    monkeypatch.setattr(head_sharing, "QUICK", ODD)
    monkeypatch.setattr(head_sharing, "GATES", {"fp32": 500.0})
    with pytest.raises(head_sharing.typer.Exit) as exit_:
        head_sharing.main(quick=True, cpu=False, out=None, as_json=False)
    assert exit_.value.exit_code == 1
    assert "fold, decode, fp32" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sizes", "message"), [({"heads": 7}, "heads"), ({"block": 1}, "block"), ({"layers": 0}, "layers")]
)
def test_impossible_geometry_is_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Geometry(**sizes)


def test_measure_takes_ratios_within_a_round() -> None:
    """A machine that becomes three times as slow halfway: medians mix both, ratios do not."""
    now, calls = 0.0, 0

    def call(cost: float) -> None:
        nonlocal now, calls
        calls += 1
        now += cost * (3 if calls > 8 else 1)

    two = {"first": lambda: call(1), "second": lambda: call(2)}
    result = measure(two, rounds=2, seconds=0.5, clock=lambda: now)
    assert (calls, result["first"]["best"], result["second"]["best"]) == (8, 1000, 2000)
    calls = 0
    result = measure(two, rounds=4, seconds=0.5, clock=lambda: now)
    assert {name: (row["ms"], row["ratio"], row["ratio_low"], row["ratio_high"]) for name, row in result.items()} == {
        "first": (2000, 1, 1, 1),
        "second": (4000, 2, 2, 2),
    }


# measure_on_mac.py, with the interpreter in Core ML's place.


class FakeModel:
    """`MLModel` as far as the script uses it."""

    def __init__(
        self, path: str, function_name: str | None = None, compute_units: Any = None, skip_model_load: bool = False
    ) -> None:
        self.spec = coremltools.utils.load_spec(path)
        self.units = compute_units
        if not skip_model_load:
            self.program = MLProgram(path, function_name, "fp32")

    def get_spec(self) -> Any:
        return self.spec

    def make_state(self) -> Any:
        return self.program.make_state()

    def predict(self, data: dict[str, np.ndarray], state: Any = None) -> dict[str, np.ndarray]:
        return self.program.predict(data, state)

    def get_compiled_model_path(self) -> str:
        return str(self.program.package.path)


class MLNeuralEngineComputeDevice: ...


class MLCPUComputeDevice: ...


class FakePlan:
    """Plans matmul for the CPU, nothing for a concat, and the rest for the engine."""

    @staticmethod
    def load_from_path(path: str, compute_units: Any) -> FakePlan:
        assert compute_units == "cpu and ne"
        plan = FakePlan()
        functions = head_sharing.Package.open(path).functions
        plan.model_structure = SimpleNamespace(  # type: ignore[attr-defined]
            program=SimpleNamespace(
                functions={name: SimpleNamespace(block=block(function.block)) for name, function in functions.items()}
            )
        )
        return plan

    @staticmethod
    def get_compute_device_usage_for_mlprogram_operation(operation: Any) -> Any:
        if operation.operator_name == "ios18.concat":
            return None
        device = MLCPUComputeDevice() if operation.operator_name == "ios18.matmul" else MLNeuralEngineComputeDevice()
        return SimpleNamespace(preferred_compute_device=device)


def block(source: Any) -> Any:
    return SimpleNamespace(
        operations=[
            SimpleNamespace(
                operator_name=f"ios18.{operation.type}", blocks=[block(inner) for inner in operation.blocks]
            )
            for operation in source.operations
        ]
    )


FAKE = SimpleNamespace(
    __version__="fake",
    ComputeUnit=SimpleNamespace(CPU_AND_NE="cpu and ne"),
    models=SimpleNamespace(MLModel=FakeModel, compute_plan=SimpleNamespace(MLComputePlan=FakePlan)),
)


@pytest.mark.parametrize("extra", [[], ["--one-at-a-time", "--function", "prefill"]])
def test_mac_script_measures_packages_and_appends(packages: Path, tmp_path: Path, extra: list[str]) -> None:
    table = tmp_path / "table.csv"
    names = [str(packages / f"{way}.mlpackage") for way in ("fold", "repeat_kv")]
    for _ in range(2):
        arguments = [*names, "--calls", "3", "--warmup", "1", "--rounds", "2", "--table", str(table), *extra]
        assert measure_on_mac.main(arguments, FAKE) == 0
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["package"] for row in rows] == ["fold.mlpackage", "repeat_kv.mlpackage"] * 2
    function = "prefill" if extra else "decode"
    counts = head_sharing.counted(head_sharing.Package.open(names[0]), 2)[function]
    for row in rows:
        assert (row["function"], row["context"], row["calls"]) == (function, "37", "6")
        assert float(row["dB to first"]) > 100
        assert float(row["tok/s"]) == pytest.approx((5 if extra else 1) / float(row["ms"]) * 1e3, rel=0.1)
    first = rows[0]
    assert (float(first["of first"]), first["off the NE"], first["CPU"], first["GPU"]) == (1, "matmul:4", "4", "0")
    assert int(first["unplanned"]) == counts["by_type"]["concat"]
    assert sum(int(first[device]) for device in ("NE", "GPU", "CPU", "unplanned")) == counts["operations"]


def test_mac_script_counts_nested_operations_and_no_constants() -> None:
    def operation(kind: str, *inner: Any) -> Any:
        blocks = [SimpleNamespace(operations=list(inner))] if inner else []
        return SimpleNamespace(operator_name=f"ios18.{kind}", blocks=blocks)

    nested = operation("cond", operation("add"), operation("const"), operation("cond", operation("mul")))
    found = measure_on_mac.placement(
        [operation("constexpr_lut_to_dense"), operation("const"), nested],
        lambda _: SimpleNamespace(preferred_compute_device=MLCPUComputeDevice()),
    )
    assert found == {"NE": 0, "GPU": 0, "CPU": 4, "unplanned": 0, "off the NE": "cond:2 add:1 mul:1"}


def test_mac_script_keeps_times_without_a_plan(packages: Path, tmp_path: Path) -> None:
    broken = SimpleNamespace(**vars(FAKE.models) | {"compute_plan": SimpleNamespace()})
    table = tmp_path / "table.md"
    arguments = [str(packages / "fold.mlpackage"), "--calls", "2", "--rounds", "1", "--table", str(table)]
    assert measure_on_mac.main(arguments, SimpleNamespace(**vars(FAKE) | {"models": broken})) == 0
    head, rule, row = table.read_text().splitlines()
    assert head.count("|") == rule.count("|") == row.count("|") == len(measure_on_mac.COLUMNS) + 1
    assert "no plan: AttributeError" in row


def test_mac_script_sees_results_that_differ(packages: Path, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    head_sharing.write_package(ODD, "fold", folder, seed=1)
    paths = [packages / "repeat_kv.mlpackage", folder / "fold.mlpackage"]
    loads = [lambda path=path: measure_on_mac.Loaded(FAKE, path, "decode", "CPU_AND_NE") for path in paths]
    first, second = measure_on_mac.measure(loads, calls=2, warmup=0, rounds=1, together=True)
    assert first["dB to first"] == np.inf
    assert second["dB to first"] < 5


def test_mac_script_times_calls_after_the_warmup() -> None:
    ticks = iter([0.0, 100.0, 101.0, 200.0, 203.0, 300.0, 308.0])
    seen: list[Any] = []
    inputs: list[Any] = [{"n": i} for i in range(4)]
    times = measure_on_mac.time_calls(seen.append, inputs, warmup=1, clock=lambda: next(ticks))
    assert (times, seen) == ([1.0, 3.0, 8.0], inputs)
    assert measure_on_mac.speed(times, 6) == {"ms": 3000, "ms low": 1000, "ms high": 8000, "tok/s": 2}


def test_mac_script_builds_the_inputs_of_a_session(packages: Path) -> None:
    description = coremltools.utils.load_spec(str(packages / "fold.mlpackage")).description
    interface = measure_on_mac.read_interface(description, "prefill")
    assert interface.mask_shape == (5, 37)
    assert measure_on_mac.positions(interface, 9) == [0, 5, 10, 15, 20, 25, 30, 0, 5]
    data = measure_on_mac.call_inputs(interface, 30)
    np.testing.assert_array_equal(data["causalMask"], causal_mask(30, 5, 37).numpy())
    assert data["position"].tolist() == [30]
    assert data["hiddenStates"].shape == (1, 24, 1, 5)
    assert measure_on_mac.read_interface(description, None).function == "decode"
    with pytest.raises(ValueError, match="verify"):
        measure_on_mac.read_interface(description, "verify")


def test_mac_script_refuses_to_run_elsewhere(packages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if sys.platform == "darwin":
        pytest.skip("this is a Mac")
    with pytest.raises(SystemExit):
        measure_on_mac.main([str(packages / "fold.mlpackage")])
    assert "macOS 15" in capsys.readouterr().err
