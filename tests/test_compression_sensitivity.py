"""Harm by recomputing, against `transformers` with the same weights put in; harm by gradients, against that; runs that are interrupted."""

from __future__ import annotations

import math
import os
import shutil
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from joblib._parallel_backends import ThreadingBackend
from torch import Tensor

from ane_layers.compression import Ranking, Setting, compress_weight, fisher, harm, replay, sensitivity, units
from ane_layers.compression.fisher import Gradients, layer_gradients, predicted_divergence
from ane_layers.compression.kl import changed_divergence, divergence
from ane_layers.compression.plot import plot_ranking
from ane_layers.compression.rank_agreement import default_top, rank_correlation, top_overlap
from ane_layers.compression.replay import Replay
from ane_layers.compression.sensitivity import agreement, journal_path, write_ranking
from ane_layers.journal import Journal
from ane_layers.layers import folded_rows
from ane_layers.models import from_folder

Folder = Callable[..., Path]
Reference = Callable[[Path], Any]

LAYERS, VOCABULARY = 3, 112  # 14 groups of 8
TWO, THREE = Setting(bits=2, group_size=8), Setting(bits=3)
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@pytest.fixture(scope="module")
def folder(exaone4_folder: Folder) -> Path:
    return exaone4_folder(layers=LAYERS, vocab=VOCABULARY, seed=5)


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (5, 13), generator=torch.Generator().manual_seed(2))


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two windows at a time, and one left over."""
    monkeypatch.setattr(replay, "BATCH_TOKENS", 30)


def compressed_reference(reference: Any, names: dict[str, Setting]) -> dict[str, Tensor]:
    """Parameters of transformers' model with modules of ours compressed, which may be several of its own in one."""
    changed = {}
    for name, setting in names.items():
        parent, _, last = name.rpartition(".")
        parts = [f"{parent}.{part}" for part in FUSED[last]] if last in FUSED else [name]
        weights = [reference.get_parameter(f"{part}.weight").detach() for part in parts]
        whole = torch.cat(weights).half()
        # Groups of the joined projection hold its rows in their folded order; o_proj's columns, permuted too, share its tables.
        rows = folded_rows(8, 2, 16) if last == "qkv_proj" else torch.arange(len(whole))
        dense = torch.from_numpy(compress_weight(name, whole[rows].numpy(), setting).dense()).float()
        dense = dense[rows.argsort()]
        changed |= {
            f"{part}.weight": piece for part, piece in zip(parts, dense.split([len(w) for w in weights]), strict=True)
        }
    return changed


def reference_divergence(reference: Any, tokens: Tensor, changed: dict[str, Tensor]) -> float:
    with torch.no_grad():
        old = reference(tokens).logits.double().log_softmax(-1)
        new = (
            torch.func.functional_call(reference, changed, (tokens,), tie_weights=False).logits.double().log_softmax(-1)
        )
    return F.kl_div(new, old, reduction="none", log_target=True).sum(-1).mean().item()


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("tied", [True, False])
def test_kl_matches_transformers_with_the_same_weights_put_in(
    exaone4_folder: Folder, exaone4_reference: Reference, tokens: Tensor, tied: bool
) -> None:
    folder = exaone4_folder(layers=LAYERS, vocab=VOCABULARY, seed=5, tied=tied)
    reference = exaone4_reference(folder)
    ranking = sensitivity.sensitivity(folder, tokens=tokens, settings=[TWO, THREE])
    assert ranking.method == "kl"
    assert ranking.setting == "lut2g8"
    assert ranking.tokens == tokens.numel()
    assert {module.name for module in ranking.modules} == {
        unit.name for unit in units(from_folder(folder, context_length=13))
    }
    for module in ranking.modules:
        assert set(module.harm) == {"lut2g8", "lut3"}
        for key, value in module.harm.items():
            changed = compressed_reference(reference, {module.name: Setting.from_key(key)})
            assert value == pytest.approx(reference_divergence(reference, tokens, changed), rel=2e-4), (
                module.name,
                key,
            )
    for layer, value in ranking.layers.items():
        together = {module.name: TWO for module in ranking.modules if module.layer == layer}
        assert len(together) == 4
        changed = compressed_reference(reference, together)
        assert value == pytest.approx(reference_divergence(reference, tokens, changed), rel=2e-4), layer
    assert sorted(ranking.layers) == list(range(LAYERS))
    assert len(set(ranking.layers.values())) == LAYERS


@pytest.mark.usefixtures("small_batches")
def test_replay_from_any_layer_matches_transformers(folder: Path, exaone4_reference: Reference, tokens: Tensor) -> None:
    with torch.no_grad():
        expected = exaone4_reference(folder)(tokens).logits
    model = from_folder(folder, context_length=40)  # longer than the windows
    found = Replay(model, tokens)
    assert [len(batch) for batch in found.batches] == [2, 2, 1]
    torch.testing.assert_close(torch.cat(found.logits), expected, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        for start in range(LAYERS + 1):
            again = torch.cat([found.run(batch, start) for batch in range(3)])
            assert torch.equal(again, torch.cat(found.logits)), start
        for layer in range(LAYERS):
            after = found.calls[1][layer + 1].x if layer + 1 < LAYERS else found.last[1]
            assert torch.equal(found.run_layer(1, layer, found.calls[1][layer].x), after)
        assert torch.equal(found.embedded(2), found.calls[2][0].x)
        twice = found.run(0, 1, 2 * found.calls[0][1].x)
    assert not torch.equal(twice, found.logits[0])
    assert torch.equal(model.extend(tokens[:1]), from_folder(folder, context_length=40).extend(tokens[:1]))
    assert int(model.cache.key.count_nonzero()) > 0  # the cache is back


@pytest.mark.usefixtures("small_batches")
def test_layers_before_the_changed_one_are_not_computed(folder: Path, tokens: Tensor) -> None:
    model = from_folder(folder, context_length=13)
    found = Replay(model, tokens)
    calls: list[int] = []
    for number, layer in enumerate(model.decoder_layers()):
        layer.mlp.register_forward_hook(lambda *args, number=number: calls.append(number))
    found.run(0, 1)
    assert calls == [1, 2]
    calls.clear()
    found.run(0, LAYERS)
    found.embedded(0)
    assert calls == []


def test_weights_come_back_as_they_were(folder: Path, tokens: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    model = from_folder(folder, context_length=13)
    before = dict(model.named_parameters(remove_duplicate=False))
    copies = {path: value.clone() for path, value in before.items()}
    found = Replay(model, tokens)
    path = "model.layers.1.mlp.down_proj.weight"
    other = {path: torch.zeros_like(before[path])}
    changed_divergence(found, other, 1)

    def failing(*args: Any) -> Tensor:
        assert model.get_parameter(path).abs().max() == 0
        raise KeyboardInterrupt

    hook = model.get_submodule("model.layers.2").register_forward_pre_hook(failing)
    with pytest.raises(KeyboardInterrupt):
        changed_divergence(found, other, 1)
    hook.remove()
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[path] is before[path] and torch.equal(after[path], copies[path]) for path in before)
    with torch.no_grad():
        assert torch.equal(found.run(0), found.logits[0])  # no layer is skipped any more


@pytest.mark.parametrize("size", [1e-7, 1e-3, 3.0])
def test_divergence_matches_fp64_of_the_definition(size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    original = 3 * torch.randn(3, 23, 50, generator=generator, dtype=torch.float64)  # 69 rows, more than two chunks
    d = size * torch.randn(3, 23, 50, generator=generator, dtype=torch.float64)
    changed = original + d + 4  # what is added to all logits changes nothing
    p = original.softmax(-1)
    second = 0.5 * ((p * d * d).sum(-1) - (p * d).sum(-1) ** 2)
    actual = divergence(original, changed)
    if size < 1e-5:  # the definition itself loses it to rounding: its series
        torch.testing.assert_close(actual, second, rtol=1e-6, atol=0)
    else:
        expected = (p * (p.log() - changed.log_softmax(-1))).sum(-1)
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-15)
    torch.testing.assert_close(divergence(original, changed, second_order=True), second, rtol=1e-6, atol=1e-15)


@pytest.mark.usefixtures("small_batches")
def test_fisher_predicts_small_divergences(folder: Path, tokens: Tensor) -> None:
    """At 8 bits harm is far below 1e-2 nats, where the second order is all there is; draws and spans cost up to a sixth."""
    ranking = {
        method: sensitivity.sensitivity(
            folder, method=method, tokens=tokens, settings=[Setting(bits=8)], samples=400, seed=3
        )
        for method in ("kl", "fisher")
    }
    measured, predicted = ({m.name: m.harm["lut8"] for m in ranking[method].modules} for method in ("kl", "fisher"))
    assert ranking["fisher"].method == "fisher"
    assert set(measured) == set(predicted)
    assert max(measured.values()) < 1e-2
    for name, value in measured.items():
        assert predicted[name] == pytest.approx(value, rel=0.02 if name == "lm_head" else 0.25), name
    for layer, value in ranking["kl"].layers.items():
        assert ranking["fisher"].layers[layer] == pytest.approx(value, rel=0.25), layer


@pytest.mark.usefixtures("small_batches")
def test_fisher_over_whole_windows_is_unbiased(folder: Path, tokens: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of one position alone, and one that adds up over positions: only whole windows are right about both."""
    monkeypatch.setattr(fisher, "SPAN", tokens.shape[1])
    model = from_folder(folder, context_length=13)
    found = Replay(model, tokens)
    gradients = Gradients(found, samples=800, seed=0)
    path = "model.layers.0.self_attn.qkv_proj"
    inside = layer_gradients(found, gradients, 0, [path])
    weight = model.get_parameter(f"{path}.weight")
    change = 1e-3 * torch.ones_like(weight)  # the same for all outputs: errors of all positions point one way
    measured = changed_divergence(found, {f"{path}.weight": weight + change}, 0)
    assert predicted_divergence(inside.terms(path, change)) == pytest.approx(measured, rel=0.1)


@pytest.mark.usefixtures("small_batches")
def test_fisher_terms_match_finite_differences(folder: Path, tokens: Tensor) -> None:
    """The sum of a window's terms is the change of its labels' log-probability, whatever the labels; drawn anew from the same seed."""
    model = from_folder(folder, context_length=13)
    found = Replay(model, tokens)
    gradients = Gradients(found, samples=2, seed=7)
    generator = torch.Generator().manual_seed(7)
    path = "model.layers.1.mlp.gate_up_proj"
    terms = layer_gradients(found, gradients, 1, [path])
    weight = model.get_parameter(f"{path}.weight")
    change = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    actual = terms.terms(path, change).sum(2)  # [K, n]
    assert actual.shape == (2, 5)
    double = from_folder(folder, context_length=13).double()
    expected = []
    for batch, logits in zip(found.batches, found.logits, strict=True):
        labels = torch.multinomial(logits.softmax(-1).flatten(0, 1), 2, replacement=True, generator=generator)
        labels = labels.T.reshape(2, *batch.shape)  # [K, b, S]

        def log_probability(step: float, batch: Tensor = batch, labels: Tensor = labels) -> Tensor:
            double.get_parameter(f"{path}.weight").data = weight.double() + step * change
            with double.without_cache(), torch.no_grad():
                mask = double.whole_masks(batch.shape[1])[0].double()
                found = double(batch, torch.zeros(1, dtype=torch.int32), mask).log_softmax(-1)
            return found.expand(2, -1, -1, -1).gather(3, labels[..., None])[..., 0].sum(2)

        expected.append((log_probability(1e-5) - log_probability(-1e-5)) / 2e-5)
    torch.testing.assert_close(actual.double(), torch.cat(expected, dim=1), rtol=1e-3, atol=1e-3)


@pytest.fixture
def compressions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths of the weights that are compressed, as it happens."""
    seen: list[str] = []
    real = harm.compress_weight
    monkeypatch.setattr(harm, "compress_weight", lambda path, *args: seen.append(path) or real(path, *args))
    return seen


@pytest.fixture(scope="module")
def uninterrupted(folder: Path, tokens: Tensor) -> Ranking:
    return sensitivity.sensitivity(folder, method="both", tokens=tokens, settings=[TWO, THREE], samples=2)


class StopError(Exception):
    pass


def interrupted(folder: Path, tokens: Tensor, journal: Path, after: int, **options: Any) -> None:
    """A run that is stopped when so many parts are finished."""

    def stop(line: str) -> None:
        if f"({after} of 5)" in line:
            raise StopError

    with pytest.raises(StopError):
        sensitivity.sensitivity(
            folder, tokens=tokens, settings=[TWO, THREE], journal=journal, progress=stop, **(FISHER | options)
        )


FISHER: dict[str, Any] = {"method": "both", "samples": 2}


def test_interrupted_run_goes_on_and_gives_the_same(
    folder: Path, tokens: Tensor, tmp_path: Path, compressions: list[str], uninterrupted: Ranking
) -> None:
    journal = journal_path(tmp_path / "ranking.json")
    assert journal == tmp_path / "ranking.json.partial"
    interrupted(folder, tokens, journal, 2)
    assert {path.split(".")[2] for path in compressions} == {"0", "1"}
    with journal.open("ab") as file:
        file.write(b'{"part": 2, "layer": {"kl": 0.')  # torn
    for after in (3, 4):
        compressions.clear()
        interrupted(folder, tokens, journal, after)
        expected = {3: "model.layers.2.", 4: "model.embed_tokens."}[after]
        assert compressions
        assert all(path.startswith(expected) for path in compressions)
    compressions.clear()
    lines: list[str] = []
    ranking = sensitivity.sensitivity(
        folder, tokens=tokens, settings=[TWO, THREE], journal=journal, progress=lines.append, **FISHER
    )
    assert set(compressions) == {"lm_head.pieces.0.weight"}
    assert ranking == uninterrupted
    assert lines[0] == f"4 of 5 parts are in {journal}"
    assert lines[-1].startswith("lm_head at lut2g8: kl ")
    assert lines[-1].endswith("(5 of 5)")
    compressions.clear()
    assert sensitivity.sensitivity(folder, tokens=tokens, settings=[TWO, THREE], journal=journal, **FISHER) == ranking
    assert compressions == []
    write_ranking(ranking, tmp_path / "ranking.json", journal=journal)
    assert Ranking.load(tmp_path / "ranking.json").as_dict() == ranking.as_dict()
    assert [path.name for path in tmp_path.iterdir()] == ["ranking.json"]


def test_journal_of_another_run_is_refused(
    exaone4_folder: Folder, tokens: Tensor, tmp_path: Path, uninterrupted: Ranking
) -> None:
    folder = shutil.copytree(exaone4_folder(layers=LAYERS, vocab=VOCABULARY, seed=5), tmp_path / "model")
    journal = tmp_path / "ranking.json.partial"
    interrupted(folder, tokens, journal, 1)
    kept = journal.read_bytes()
    same: dict[str, Any] = {"tokens": tokens, "settings": [TWO, THREE], "journal": journal, **FISHER}
    for other, named in (
        ({"tokens": tokens.roll(1)}, "tokens"),
        ({"settings": [THREE, TWO]}, "settings"),
        ({"method": "kl"}, "methods, samples, seed"),
        ({"seed": 1}, "seed"),
    ):
        with pytest.raises(ValueError, match=f"partial: was left by a run with other {named}; finish that run"):
            sensitivity.sensitivity(folder, **(same | other))
    weights = folder / "model.safetensors"
    os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 1))
    with pytest.raises(ValueError, match="run with other model;"):
        sensitivity.sensitivity(folder, **same)
    assert journal.read_bytes() == kept


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"my notes", "is no journal"),
        (b"my notes\n", "line 1 is damaged, or this is no journal"),
        (b'{"format": "ane_layers.ranking"}\n', "is no journal"),
        (b'{"format": "ane_layers.journal", "run": {"a": 1}}\n{"part"\n{"part": 1}\n', "line 2 is damaged"),
    ],
)
def test_what_is_no_journal_is_left_alone(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "journal"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        Journal(path, {"a": 1})
    assert path.read_bytes() == content


def test_journal_survives_a_cut_at_any_byte(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path, {"a": (1, 2)})
    for part in range(3):
        journal.add({"part": part, "harm": 0.1 + part})
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        again = Journal(path, {"a": [1, 2]})
        kept = sum(1 for i in range(2, 5) if cut >= len(b"".join(lines[:i])))
        assert [result["part"] for result in again.finished] == list(range(kept))
        assert path.read_bytes() == whole[:cut]
        again.add({})  # shorter than what may have been torn
        again.add({"part": 7})
        assert path.read_bytes() == b"".join(lines[: 1 + kept]) + b'{}\n{"part": 7}\n'


def test_two_processes_match_one(folder: Path, tokens: Tensor, uninterrupted: Ranking) -> None:
    ranking = sensitivity.sensitivity(folder, tokens=tokens, settings=[TWO, THREE], n_jobs=2, **FISHER)
    assert ranking == uninterrupted


class Cluster(ThreadingBackend):
    """As a user's cluster may be: no results before all are done, as ray's; parts at the same time in one process, as dask's threads."""

    supports_return_generator = False
    used = 0

    def submit(self, *args: Any, **kwargs: Any) -> Any:
        type(self).used += 1
        return super().submit(*args, **kwargs)


def test_users_backend_matches_one_process(
    folder: Path, tokens: Tensor, tmp_path: Path, uninterrupted: Ranking
) -> None:
    joblib.register_parallel_backend("cluster", Cluster)
    journal = tmp_path / "journal"
    with joblib.parallel_config(backend="cluster", n_jobs=2):
        # Rounds of two: what is finished before an interrupt is kept.
        interrupted(folder, tokens, journal, 3)
        assert len(journal.read_bytes().splitlines()) == 4
        ranking = sensitivity.sensitivity(folder, tokens=tokens, settings=[TWO, THREE], journal=journal, **FISHER)
    assert Cluster.used == 4 + 2
    assert ranking == uninterrupted


def test_threads_of_a_process_take_turns(
    folder: Path, tokens: Tensor, uninterrupted: Ranking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share one model, whose weights each part changes."""
    real = harm.Meter.measure
    at_once: list[int] = []
    busy: set[int] = set()

    def measure(meter: harm.Meter, part: harm.Part) -> harm.PartHarm:
        busy.add(threading.get_ident())
        time.sleep(0.02)
        at_once.append(len(busy))
        found = real(meter, part)
        busy.remove(threading.get_ident())
        return found

    monkeypatch.setattr(harm.Meter, "measure", measure)
    with joblib.parallel_config(backend="threading", n_jobs=2):
        ranking = sensitivity.sensitivity(folder, tokens=tokens, settings=[TWO, THREE], **FISHER)
    assert at_once == [1] * 5
    assert ranking == uninterrupted


def test_results_in_any_order_give_the_same(
    folder: Path, tokens: Tensor, uninterrupted: Ranking, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = sensitivity._results
    monkeypatch.setattr(sensitivity, "_results", lambda *args: iter(list(real(*args))[::-1]))
    assert sensitivity.sensitivity(folder, tokens=tokens, settings=[TWO, THREE], **FISHER) == uninterrupted


def test_nothing_stays_in_memory(folder: Path, tokens: Tensor, uninterrupted: Ranking) -> None:
    assert harm._loaded == {}


def test_agreement_of_both_methods_is_reported(folder: Path, tokens: Tensor, uninterrupted: Ranking) -> None:
    fisher_alone = sensitivity.sensitivity(folder, method="fisher", tokens=tokens, settings=[TWO, THREE], samples=2)
    assert uninterrupted.method == "kl"
    expected = agreement(uninterrupted, fisher_alone)
    assert uninterrupted.agreement == expected
    harms = [[module.harm["lut2g8"] for module in ranking.modules] for ranking in (uninterrupted, fisher_alone)]
    ranks = [[sorted(values).index(value) for value in values] for values in harms]
    assert expected["modules"] == pytest.approx(np.corrcoef(*ranks)[0, 1])
    assert expected["top_layers"] == 1
    assert expected["top"] == float(uninterrupted.order[0] == fisher_alone.order[0])


def test_rank_correlation_matches_brute_force() -> None:
    generator = np.random.default_rng(0)
    for ties in (2, 5, 1000):
        first, second = (generator.integers(ties, size=31).astype(float) for _ in range(2))
        ranks = [[sum(y < x for y in v) + (sum(y == x for y in v) - 1) / 2 for x in v] for v in (first, second)]
        names = [f"m{i}" for i in range(31)]
        shuffled = dict(sorted(zip(names, second, strict=True)))  # by name, in another order
        actual = rank_correlation(dict(zip(names, first, strict=True)), shuffled)
        assert actual == pytest.approx(np.corrcoef(*ranks)[0, 1])
    assert rank_correlation({"a": 1, "b": 2, "c": 9}, {"a": 1e-9, "b": 1, "c": 5}) == pytest.approx(1)
    assert rank_correlation({"a": 1, "b": 2, "c": 9}, {"a": 3, "b": 2, "c": 1}) == pytest.approx(-1)
    assert math.isnan(rank_correlation({"a": 1, "b": 1}, {"a": 1, "b": 2}))


def test_top_overlap_counts_common_layers() -> None:
    assert top_overlap({0: 5, 1: 4, 2: 3, 3: 2}, {0: 1, 1: 9, 2: 8, 3: 0}, 2) == 0.5
    assert top_overlap({0: 1, 1: 1, 2: 1}, {0: 1, 1: 1, 2: 1}, 2) == 1.0
    assert [default_top(layers) for layers in (1, 2, 12, 30, 64)] == [1, 1, 3, 8, 17]


def test_impossible_arguments_are_refused_before_anything_is_loaded(
    folder: Path, exaone4_folder: Folder, tokens: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harm, "from_folder", None)
    arguments: list[tuple[dict[str, Any], str]] = [
        ({"method": "gradient"}, "method must be one of kl, fisher, both, got 'gradient'"),
        ({"settings": []}, "settings must compress, got none"),
        ({"settings": [Setting(scheme="fp16", bits=16)]}, "settings must compress, got fp16"),
        ({"tokens": tokens[0]}, r"windows \[n, S\] of ids below 112, got shape \[13\]"),
        ({"tokens": tokens + VOCABULARY}, "ids below 112"),
        ({"tokens": torch.zeros(1, 300, dtype=torch.int64)}, "context_length must be within 1 … max_position"),
        ({"journal": tmp_path / "none" / "journal"}, "none: is not a folder"),
    ]
    for options, message in arguments:
        with pytest.raises(ValueError, match=message):
            sensitivity.sensitivity(folder, **({"tokens": tokens} | options))
    with pytest.raises(ValueError, match=r"embed_tokens\.weight: group_size 8 does not divide its 109 output channels"):
        sensitivity.sensitivity(exaone4_folder(), tokens=tokens % 109, settings=[TWO])


def test_harm_that_is_no_number_is_refused_by_name(
    folder: Path, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harm, "changed_divergence", lambda *args, **options: math.nan)
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.qkv_proj: the harm at lut2g8 is nan"):
        sensitivity.sensitivity(folder, tokens=tokens, settings=[TWO])


def test_folder_without_tokenizer_is_told_about(folder: Path) -> None:
    lines: list[str] = []
    ranking = sensitivity.sensitivity(folder, count=2, length=6, settings=[TWO], progress=lines.append)
    assert ranking.tokens == 12
    assert "has no tokenizer.json: ranking on random token ids" in lines[0]
    assert ranking.model == {
        "model_type": "exaone4",
        "num_hidden_layers": LAYERS,
        "hidden_size": 40,
        "vocab_size": VOCABULARY,
    }


def test_failed_write_keeps_the_older_ranking(uninterrupted: Ranking, tmp_path: Path) -> None:
    path, journal = tmp_path / "ranking.json", tmp_path / "journal"
    write_ranking(uninterrupted, path)
    journal.touch()
    older = path.read_bytes()
    broken = Ranking(**(vars(uninterrupted) | {"model": {"model_type": object()}}))
    with pytest.raises(TypeError):
        write_ranking(broken, path, journal=journal)
    with pytest.raises(ValueError, match=r"none/ranking\.json: cannot be written"):
        write_ranking(uninterrupted, tmp_path / "none" / "ranking.json", journal=journal)
    assert path.read_bytes() == older
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["journal", "ranking.json"]


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_picture_shows_every_layer(uninterrupted: Ranking, tmp_path: Path, suffix: str) -> None:
    from matplotlib import rc_context

    path = tmp_path / f"ranking{suffix}"
    with rc_context({"svg.fonttype": "none"}):
        plot_ranking(uninterrupted, path, top=2)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    if suffix == ".png":
        assert path.read_bytes().startswith(b"\x89PNG")
        return
    texts = [
        "".join(element.itertext()) for element in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")
    ]
    assert {"0", "1", "2", "self_attn.qkv_proj", "mlp.down_proj", "layer", "nats"} <= set(texts)
    joined = "\n".join(texts)
    assert "measured on 65 tokens" in joined
    assert "lm_head" in joined


def test_pictures_that_cannot_be_drawn_are_refused(uninterrupted: Ranking, tmp_path: Path) -> None:
    bare = Ranking(**(vars(uninterrupted) | {"layers": {}}))
    for ranking, name, top, message in (
        (uninterrupted, "a.jpg", 1, r"must end in \.png or \.svg"),
        (uninterrupted, "a.png", 4, r"top must be within 0 … 3"),
        (bare, "a.png", 0, "no layers"),
        (uninterrupted, "none/a.png", 1, r"none/a\.png: cannot be written"),
    ):
        with pytest.raises(ValueError, match=message):
            plot_ranking(ranking, tmp_path / name, top=top)
    assert list(tmp_path.iterdir()) == []
