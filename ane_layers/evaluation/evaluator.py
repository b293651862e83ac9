"""Scores many models over one text, against an original that is run once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from ane_layers.chunks import Runtime, open_packages
from ane_layers.compression import Compression
from ane_layers.evaluation.footprint import Footprint, model_footprint, package_footprint
from ane_layers.evaluation.scoring import Logits, Score, kept_logits, model_logits, score
from ane_layers.evaluation.windowing import DEFAULT_WINDOW, Window, checked_ids, text_ids, windows
from ane_layers.interpreter import MLProgram, Mode
from ane_layers.models import FAMILIES, CausalLM, from_folder, longest_context
from ane_layers.models.config import load_config
from ane_layers.session import Session

DEFAULT_CONTEXT = 4096

# Logits of the original are kept if they take no more than this or than its weights, which can then be given up.
_KEPT_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What came of it.

    Attributes:
        loss: cross-entropy in nats a token.
        kl: mean Kullback-Leibler divergence of the next-token distribution from the original's, in nats; None without an original.
        top1_agreement: share of positions with the original's most likely token, 0 … 1; None without an original.
        weight_bytes: of the weights as stored (see `Footprint`).
        bytes_per_token: that a decoded token moves at `context` slots (see `Footprint`).
        tokens: scored.
        window: tokens that were run together.
        context: slots of the cache that `bytes_per_token` is for.
    """

    loss: float
    kl: float | None
    top1_agreement: float | None
    weight_bytes: int
    bytes_per_token: int | None
    tokens: int
    window: int
    context: int

    @property
    def perplexity(self) -> float:
        """`exp(loss)`; infinite where that is no fp64 number."""
        return math.exp(self.loss) if not self.loss > 709 else math.inf

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        values = asdict(self)
        return {"loss": values.pop("loss"), "perplexity": self.perplexity} | values


class Evaluator:
    """One text, cut into windows, and the original's logits for it.

    The original is a checkpoint in PyTorch, in fp32 and with its projections as the checkpoint has them, as in verification. It is run
    when the first model is compared; its logits are kept if they take less than 1 GiB or than its weights, otherwise it is run again for
    every model.

    Args:
        ids: of the text, with what precedes it.
        original: folder of the model to compare with; None scores without.
        window: tokens that are run together; see `windows`.
        rope_length: of the original, see `CausalLM`: that of the models it is compared with.
        progress: called with a line of text now and then.

    Raises:
        ValueError: if there is nothing to score, an id is outside the original's vocabulary, or the window exceeds what it can do.

    Example:
        >>> evaluator = Evaluator.from_folder(bundled_checkpoint())
        >>> compression = compress(model, make_plan(model, recipe))
        >>> evaluator.model(model, compression).loss
    """

    def __init__(
        self,
        ids: Sequence[int],
        *,
        original: str | Path | None = None,
        window: int = DEFAULT_WINDOW,
        rope_length: int | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self._folder, self._say, self._original = original, progress or (lambda line: None), None
        self._logits: Logits | None = None
        self.window = window
        self._rope_length = rope_length
        self.windows = windows(ids, window)
        if original is not None:
            config = config_of(original)
            checked_ids(ids, source="tokens", vocab_size=config.vocab_size)
            if window > config.max_position_embeddings:
                raise ValueError(
                    f"window must be within 2 … {config.max_position_embeddings}, the longest context of {original}, got {window}"
                )

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        *,
        text: str | Path | None = None,
        max_tokens: int | None = None,
        window: int | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> Self:
        """With the folder's model as the original, and its tokenizer.

        Args:
            folder: in Hugging Face's format.
            text: file; the bundled held-out text if None.
            max_tokens: score at most so many, the first ones.
            window: 512 by default, or the model's longest context if that is less.
            progress: see above.
        """
        config = config_of(folder)
        ids = text_ids(text, folder, bos_id=config.bos_token_id, vocab_size=config.vocab_size, limit=max_tokens)
        size = min(DEFAULT_WINDOW, config.max_position_embeddings) if window is None else window
        return cls(ids, original=folder, window=size, progress=progress)

    def model(
        self, model: CausalLM, compression: Compression | None = None, *, context: int | None = None
    ) -> Evaluation:
        """Evaluates a model in PyTorch, as its weights are.

        Args:
            model: with weights in fp32 and a context of at least a window.
            compression: that its weights went through, for the bytes; without, they count as fp16.
            context: slots of the cache for `bytes_per_token`; 4096 by default, or the model's longest if that is less.

        Raises:
            ValueError: if the model is of another vocabulary or its context is shorter than a window.
        """
        if model.context_length < self.window:
            raise ValueError(
                f"the model's context_length ({model.context_length}) is below the window of {self.window}"
            )
        self._check(model.config.vocab_size, "the model")
        slots = default_context(model.config) if context is None else context
        footprint = model_footprint(model, compression, context=slots)
        return self._evaluation(self.score(model_logits(model, self.windows), "model"), footprint, slots)

    def package(
        self,
        path: str | Path,
        *,
        mode: Mode = "fp32",
        compact: bool = False,
        runtime: Callable[[str, str], Runtime] | None = None,
    ) -> Evaluation:
        """Evaluates a package that `CausalLM.convert` wrote.

        Context goes through `prefill`; what is scored goes through `decode`, or through `prefill` too where that returns every
        position's logits.

        Args:
            path: of the package, or of a folder of chunks.
            mode: arithmetic of the interpreter (see `MLProgram`).
            compact: keep large constants in fp16 (see `MLProgram`): half the memory; the same result in the mode `"fp32"`, but slower.
            runtime: what runs the package in place of the interpreter; see `Session`.

        Raises:
            ValueError: if it is not such a package, gives no logits, is of another vocabulary, or its context is shorter than a window.
        """
        made = runtime or (lambda file, name: MLProgram(file, name, mode, compact=compact))
        session = Session(path, runtime=made)
        if session.config.get("head", "logits") != "logits":
            raise ValueError(f"{path}: head is {session.config['head']!r}; an evaluation needs one that gives logits")
        if self.window > session.context_length:
            raise ValueError(f"{path}: window {self.window} exceeds the package's context of {session.context_length}")
        self._check(session.config["model"]["vocab_size"], str(path))
        footprint = package_footprint(open_packages(path))
        found = self.score(lambda number: package_logits(session, self.windows[number]), Path(path).name)
        return self._evaluation(found, footprint, session.context_length)

    def score(self, logits: Logits, name: str = "model") -> Score:
        """Scores logits from anywhere, against the original if there is one."""
        original = None if self._folder is None else self.original_logits()
        return score(self.windows, logits, original, progress=lambda line: self._say(f"{name}: {line}"))

    def original_logits(self) -> Logits:
        """The original's logits by window; run now if they were not before."""
        if self._folder is None:
            raise ValueError("there is no original to compare with")
        if self._logits is None:
            self._say(f"loading {self._folder}")
            model = from_folder(self._folder, context_length=self.window, rope_length=self._rope_length, fuse=False)
            logits = model_logits(model, self.windows)
            scored = sum(len(window.targets) for window in self.windows)
            weights = sum(part.numel() * part.element_size() for part in model.parameters())
            if 4 * scored * model.config.vocab_size <= max(_KEPT_BYTES, weights):
                logits = kept_logits(logits, len(self.windows), progress=self._say)
            self._logits = logits
        return self._logits

    def _check(self, vocab_size: int, what: str) -> None:
        if self._folder is not None and vocab_size != config_of(self._folder).vocab_size:
            expected = config_of(self._folder).vocab_size
            raise ValueError(f"{what}: field vocab_size is {vocab_size}, the original {self._folder} has {expected}")

    def _evaluation(self, found: Score, footprint: Footprint, context: int) -> Evaluation:
        return Evaluation(**asdict(found), **asdict(footprint), window=self.window, context=context)


def package_logits(session: Session, window: Window) -> Tensor:
    """Runs a window from an empty cache and returns the logits of its scored positions.

    Shape:
        - output: `[n, V]`
    """
    session.reset()
    if window.first:
        session.extend(window.tokens[: window.first])
    scored = window.tokens[window.first :]
    # A padded block gives no logits away, and other blocks only if the package was made to.
    whole = len(scored) // session.block * session.block if session.config.get("all_logits") else 0
    results = session.extend(scored[:whole]) if whole else []
    if whole < len(scored):
        results += session.extend(scored[whole:], prefill=False)
    return torch.from_numpy(np.concatenate([result.values for result in results]).astype(np.float32))


def config_of(folder: str | Path) -> Any:
    """The family's checked config of a folder. Raises `ValueError` naming the file, the field and the value."""
    longest_context(folder)  # refuses an unknown family
    return FAMILIES[load_config(folder)[0]["model_type"]].config_class.from_pretrained(folder)


def default_context(config: Any) -> int:
    """Slots of the cache that `convert` makes unless told otherwise."""
    return min(DEFAULT_CONTEXT, int(config.max_position_embeddings))
