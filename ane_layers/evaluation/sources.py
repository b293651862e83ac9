"""Evaluates a checkpoint, compressed by a recipe or not, or a package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ane_layers.checkpoint import to_float16_checked
from ane_layers.chunks import Runtime, is_chunked, is_package, open_packages, read_metadata
from ane_layers.compression import Ranking, Recipe, compress, load_recipe, make_plan
from ane_layers.compression.plan import Importance
from ane_layers.evaluation.evaluator import Evaluation, Evaluator, config_of, default_context
from ane_layers.evaluation.windowing import DEFAULT_WINDOW, checked_ids, text_ids
from ane_layers.interpreter import Mode
from ane_layers.models import from_folder


def evaluate(
    source: str | Path,
    *,
    original: str | Path | None = None,
    tokenizer: str | Path | None = None,
    text: str | Path | None = None,
    tokens: Sequence[int] | None = None,
    max_tokens: int | None = None,
    window: int | None = None,
    recipe: str | Path | Recipe | None = None,
    ranking: str | Path | Ranking | None = None,
    importance: Importance | None = None,
    context: int | None = None,
    mode: Mode = "fp32",
    compact: bool = False,
    runtime: Callable[[str, str], Runtime] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Evaluation:
    """Loss of a model over a text, its distance from the original, and its bytes.

    A model folder is run in PyTorch as it would be converted: with projections joined, and with a recipe every weight has exactly the
    values that the package holds; without one, weights are the checkpoint's in fp32. A package is executed.

    Args:
        source: a model folder in Hugging Face's format, or a package or folder of chunks that `CausalLM.convert` wrote.
        original: folder of the model to compare with, in fp32; a model folder by default is its own. A package without one has no
            `kl` and no `top1_agreement`.
        tokenizer: folder with the tokenizer; by default `original`, or the model folder.
        text: file to run; the bundled held-out text by default.
        tokens: ids in place of a text, as they are: no [BOS] is added.
        max_tokens: score at most so many, the first ones.
        window: tokens that are run together (see `windows`); 512 by default, or the context if that is less.
        recipe: for a model folder: name, file ending in `.toml`, or a `Recipe`.
        ranking: that the recipe needs.
        importance: for the recipe's lookup tables; see `make_plan`.
        context: for a model folder: slots of the cache that `bytes_per_token` is for; 4096, or the model's longest if that is less.
        mode, compact, runtime: for a package; see `Evaluator.package`.
        progress: called with a line of text now and then.

    Raises:
        ValueError: naming the file, the field or the option, and the value.
    """
    if text is not None and tokens is not None:
        raise ValueError("text and tokens exclude each other")
    read = _Reading(source, original, tokenizer, text, tokens, max_tokens, window, progress)
    if is_package(source) or is_chunked(source):
        _refuse(source, "package", recipe=recipe, ranking=ranking, importance=importance, context=context)
        return read.package(mode, compact, runtime)
    _refuse(source, "model folder", mode=None if mode == "fp32" else mode, compact=compact or None, runtime=runtime)
    if recipe is None and (ranking is not None or importance is not None):
        raise ValueError("ranking and importance are for a recipe, and there is none")
    return read.folder(
        load_recipe(recipe) if isinstance(recipe, str | Path) else recipe,
        Ranking.load(ranking) if isinstance(ranking, str | Path) else ranking,
        importance,
        context,
    )


@dataclass(frozen=True)
class _Reading:
    """What is evaluated, over what: arguments of `evaluate`."""

    source: str | Path
    original: str | Path | None
    tokenizer: str | Path | None
    text: str | Path | None
    tokens: Sequence[int] | None
    max_tokens: int | None
    window: int | None
    progress: Callable[[str], None] | None

    def package(self, mode: Mode, compact: bool, runtime: Callable[[str, str], Runtime] | None) -> Evaluation:
        config = read_metadata(open_packages(self.source)[0])
        bos_id, vocab_size = config.get("bos_token_id"), config["model"]["vocab_size"]
        evaluator = self._evaluator(config["context_length"], bos_id, vocab_size, self.original)
        return evaluator.package(self.source, mode=mode, compact=compact, runtime=runtime)

    def folder(
        self, recipe: Recipe | None, ranking: Ranking | None, importance: Importance | None, context: int | None
    ) -> Evaluation:
        config = config_of(self.source)
        slots, longest = default_context(config) if context is None else context, config.max_position_embeddings
        if not 1 <= slots <= longest:
            raise ValueError(f"context must be within 1 … {longest}, the longest of {self.source}, got {slots}")
        original = self.source if self.original is None else self.original
        evaluator = self._evaluator(slots, config.bos_token_id, config.vocab_size, original)
        if recipe is None:
            return evaluator.model(
                from_folder(self.source, context_length=evaluator.window, rope_length=slots), context=slots
            )
        # As convert loads it: mapped from the file, and refused if fp16 cannot hold a weight.
        model = from_folder(self.source, context_length=evaluator.window, rope_length=slots, dtype=None)
        plan = make_plan(model, recipe, ranking=ranking, importance=importance)
        evaluator.original_logits()  # before the weights are widened: one model in fp32 at a time
        compression = compress(model, plan, progress=self.progress)
        widen_stored(model)
        return evaluator.model(model, compression, context=slots)

    def _evaluator(self, slots: int, bos_id: int | None, vocab_size: int, original: str | Path | None) -> Evaluator:
        size = min(DEFAULT_WINDOW, slots) if self.window is None else self.window
        if original is not None:
            config_of(original)  # a mistaken folder is told as such, before a file is missed in it
        if not 2 <= size <= slots:
            raise ValueError(f"window must be within 2 … {slots}, the context of {self.source}, got {size}")
        if self.tokens is not None:
            ids = checked_ids(self.tokens, source="tokens", vocab_size=vocab_size, limit=self.max_tokens)
        else:
            folder = original if self.tokenizer is None else self.tokenizer
            if folder is None:
                raise ValueError(f"{self.source}: a package has no tokenizer; give original, tokenizer or tokens")
            ids = text_ids(self.text, folder, bos_id=bos_id, vocab_size=vocab_size, limit=self.max_tokens)
        return Evaluator(ids, original=original, window=size, rope_length=slots, progress=self.progress)


def _refuse(source: str | Path, kind: str, **options: Any) -> None:
    """An option that would have no effect is a mistake."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{source}: is a {kind}, for which there is no {name}")


def widen_stored(model: nn.Module) -> None:
    """Replaces every parameter by its fp16 values, in fp32: norms and biases, and what a recipe leaves alone, are stored so too.

    Raises:
        ValueError: naming the parameter, if fp16 cannot hold it.
    """
    for path, parameter in list(model.named_parameters()):
        owner, _, name = path.rpartition(".")
        value = to_float16_checked(path, parameter.detach()).float()
        setattr(model.get_submodule(owner), name, nn.Parameter(value, requires_grad=False))
