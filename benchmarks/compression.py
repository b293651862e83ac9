"""Recipes on the bundled model: bytes, loss, KL and agreement; whether a measured ranking beats chance and a rule; what importance brings.

    python benchmarks/compression.py --out /tmp/compression

Everything is measured on the bundled held-out text (5,678 tokens) in PyTorch, with exactly the values that packages hold; ranking and
importance come from the bundled calibration text, which is another one. The article promotes 8 of 30 layers: here 3 of 12.
"""

from __future__ import annotations

import dataclasses
import json
import random
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ane_layers import bundled_checkpoint
from ane_layers.compression import Ranking, Recipe, Setting, compress, load_recipe, make_plan
from ane_layers.compression.budget import allocated_recipe
from ane_layers.compression.plot import plot_ranking
from ane_layers.compression.preparation import measure_importance, read_recipe
from ane_layers.compression.sensitivity import journal_path, sensitivity, write_ranking
from ane_layers.evaluation import Evaluation, Evaluator
from ane_layers.models import CausalLM, from_folder

CONTEXT = 512
PROMOTED = 3


class Bench:
    """Evaluates recipes on one model over one text."""

    def __init__(self, folder: Path, max_tokens: int | None) -> None:
        self.folder = folder
        self.evaluator = Evaluator.from_folder(folder, max_tokens=max_tokens)

    def fresh(self) -> CausalLM:
        return from_folder(self.folder, context_length=CONTEXT)

    def evaluate(self, recipe: Recipe, ranking: Ranking, importance: Any = None) -> Evaluation:
        model = self.fresh()
        needed = ranking if recipe.needs_ranking else None
        compression = compress(model, make_plan(model, recipe, ranking=needed, importance=importance))
        return self.evaluator.model(model, compression, context=CONTEXT)

    def promotions(self, choices: list[tuple[int, ...]], recipe: Recipe, ranking: Ranking) -> list[tuple[float, float]]:
        """Loss and KL of `recipe` with each choice of promoted layers; every layer is compressed twice, however many choices there are."""
        assert recipe.promoted is not None
        low, high = self.fresh(), self.fresh()
        compress(low, make_plan(low, dataclasses.replace(recipe, promoted=None)))
        every = dataclasses.replace(recipe.promoted, layers=len(ranking.layers))
        compress(high, make_plan(high, dataclasses.replace(recipe, promoted=every), ranking=ranking))
        layers = list(low.get_submodule("model.layers").children())
        promoted = list(high.get_submodule("model.layers").children())
        found = []
        for choice in choices:
            mixed = torch.nn.ModuleList(promoted[i] if i in choice else layer for i, layer in enumerate(layers))
            low.get_submodule("model")._modules["layers"] = mixed
            result = self.evaluator.model(low, context=CONTEXT)
            assert result.kl is not None
            found.append((result.loss, result.kl))
        return found


def row(name: str, result: Evaluation) -> str:
    moved = result.bytes_per_token or 0
    return (
        f"| {name} | {result.weight_bytes / 1e6:.3f} | {moved / 1e6:.3f} | {result.loss:.4f} | {result.perplexity:.3f} | "
        f"{result.kl:.2e} | {result.top1_agreement:.2%} |"
    )


def main(
    out: Annotated[Path, typer.Option(help="Folder for ranking, picture and figures.")],
    draws: Annotated[int, typer.Option(help="Random choices of promoted layers.")] = 50,
    max_tokens: Annotated[int | None, typer.Option(help="Score at most so many tokens.")] = None,
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    folder = bundled_checkpoint()
    started = time.monotonic()
    settings = [Setting(bits=bits, group_size=size) for bits in (4, 2, 3, 6, 8) for size in (16, None)]
    file = out / "ranking.json"
    ranking = (
        Ranking.load(file)
        if file.exists()
        else sensitivity(folder, method="both", settings=settings, count=16, length=256, journal=journal_path(file))
    )
    write_ranking(ranking, file, journal=journal_path(file))
    plot_ranking(ranking, out / "ranking.png")
    print(
        f"ranking: {time.monotonic() - started:.0f} s, order {ranking.order}, agreement {dict(ranking.agreement)}\n",
        flush=True,
    )

    bench = Bench(folder, max_tokens)
    importance = measure_importance(folder)
    top = read_recipe("top8", promote=PROMOTED)
    assert top.promoted is not None
    part = dataclasses.replace(top, promoted=dataclasses.replace(top.promoted, modules="mlp.*"))
    recipes = {"fp16": load_recipe("fp16"), "int8": load_recipe("int8"), "base": load_recipe("base")}
    recipes |= {f"top{PROMOTED}": top, f"top{PROMOTED}, feed-forward only": part}
    print(
        "| recipe | weights MB | MB a token | loss | perplexity | KL | top-1 |\n| --- | --- | --- | --- | --- | --- | --- |"
    )
    figures: dict[str, Any] = {}
    for name, recipe in recipes.items():
        result = bench.evaluate(recipe, ranking)
        figures[name] = result.as_dict()
        print(row(name, result), flush=True)
        if recipe.layers.scheme == "lut":
            weighted = bench.evaluate(recipe, ranking, importance)
            figures[f"{name}, importance"] = weighted.as_dict()
            print(row(f"{name}, importance", weighted), flush=True)
    for name in ("base", f"top{PROMOTED}", f"top{PROMOTED}, feed-forward only"):
        budget = figures[name]["bytes_per_token"]
        recipe, spent = allocated_recipe(
            folder, ranking, bytes_per_token=budget - norms(bench.fresh()), context=CONTEXT
        )
        for label, moments in (("", None), (", importance", importance)):
            result = bench.evaluate(recipe, ranking, moments)
            figures[f"allocated at {name}{label}"] = result.as_dict()
            print(row(f"allocated, bytes of {name}{label}", result), flush=True)
        print(f"  {spent.as_dict()}")

    generator = random.Random(0)
    count = len(ranking.layers)
    choices = [tuple(sorted(generator.sample(range(count), PROMOTED))) for _ in range(draws)]
    rules = {
        "ranking": tuple(sorted(ranking.order[:PROMOTED])),
        "ranking, reversed": tuple(sorted(ranking.order[-PROMOTED:])),
        "first two and last": (0, 1, count - 1),
        "first and last two": (0, count - 2, count - 1),
    }
    results = bench.promotions([*choices, *rules.values()], top, ranking)
    drawn = results[:draws]
    print("\n| promoted layers | loss | KL |\n| --- | --- | --- |")
    for (name, choice), (loss, kl) in zip(rules.items(), results[draws:], strict=True):
        worse = sum(other[1] > kl for other in drawn)
        print(f"| {name} {choice} | {loss:.4f} | {kl:.3e} (better than {worse} of {draws} drawn) |")
    for label, values in (("loss", [r[0] for r in drawn]), ("KL", [r[1] for r in drawn])):
        print(
            f"{draws} drawn, {label}: mean {statistics.mean(values):.4e}, standard deviation {statistics.stdev(values):.1e}, "
            f"least {min(values):.4e}, greatest {max(values):.4e}"
        )
    figures["drawn"] = [{"layers": c, "loss": r[0], "kl": r[1]} for c, r in zip(choices, drawn, strict=True)]
    figures["rules"] = {
        n: {"layers": c, "loss": r[0], "kl": r[1]} for (n, c), r in zip(rules.items(), results[draws:], strict=True)
    }
    (out / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(f"{time.monotonic() - started:.0f} s in all")


def norms(model: CausalLM) -> int:
    """Bytes of norms, which a token reads and no allocation touches; and a row of the embedding, at most."""
    few = sum(
        2 * parameter.numel() for parameter in model.parameters() if parameter.ndim == 1 or parameter.shape[0] == 1
    )
    return few + 2 * model.config.hidden_size


if __name__ == "__main__":
    typer.run(main)
