"""Loss of logits, and their distance from an original's, summed over windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ane_layers.evaluation.attention import torch_attention
from ane_layers.evaluation.windowing import Window
from ane_layers.models import CausalLM

Logits = Callable[[int], Tensor]
"""Number of a window → logits of its scored positions, `[n, V]`."""

# Elements that are widened to fp64 at once: 32 MB, where a window of a large vocabulary would be 400.
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Score:
    """Means over all scored tokens.

    Attributes:
        tokens: scored.
        loss: cross-entropy, in nats a token.
        kl: Kullback-Leibler divergence of the next-token distribution from the original's, KL(original ‖ scored), in nats; None
            without an original.
        top1_agreement: share of positions at which the original's most likely token is the same, 0 … 1; None without an original.
    """

    tokens: int
    loss: float
    kl: float | None
    top1_agreement: float | None


def score(
    parts: Sequence[Window],
    logits: Logits,
    original: Logits | None = None,
    *,
    progress: Callable[[str], None] | None = None,
) -> Score:
    """Scores what a model gives for each window. Sums are taken in fp64.

    Args:
        parts: the windows.
        logits: of the model.
        original: of the model that it is compared with.
        progress: called with a line of text about ten times.

    Raises:
        ValueError: if logits do not have the shape that the windows ask for.
    """
    say = progress or (lambda line: None)
    nats = divergence = 0.0
    agreed = count = 0
    for i, window in enumerate(parts):
        if i % max(1, len(parts) // 10) == 0:
            say(f"window {i + 1} of {len(parts)}")
        actual, targets = logits(i), torch.tensor(window.targets)
        reference = None if original is None else original(i)
        for other in (actual, actual if reference is None else reference):
            if other.shape != (len(targets), actual.shape[-1]):
                raise ValueError(f"logits have shape {list(other.shape)}, expected {[len(targets), actual.shape[-1]]}")
        count += len(targets)
        for rows in torch.arange(len(targets)).split(max(1, _CHUNK // actual.shape[-1])):
            found = actual[rows].double().log_softmax(-1)
            nats -= found.gather(-1, targets[rows, None]).sum().item()
            if reference is not None:
                expected = reference[rows].double().log_softmax(-1)
                agreed += int((expected.argmax(-1) == found.argmax(-1)).sum())
                divergence += (expected.exp() * (expected - found)).sum().item()
    compared = original is not None
    return Score(count, nats / count, divergence / count if compared else None, agreed / count if compared else None)


def model_logits(model: CausalLM, parts: Sequence[Window]) -> Logits:
    """Logits of a model in PyTorch; its weights are fp32, and its context holds a window."""

    def logits(number: int) -> Tensor:
        window = parts[number]
        with torch_attention(model):
            return model.whole(torch.tensor([window.tokens]))[0, window.first :]

    return logits


def kept_logits(logits: Logits, count: int, *, progress: Callable[[str], None] | None = None) -> Logits:
    """The same logits, computed once and kept in fp32."""
    say = progress or (lambda line: None)
    kept = []
    for i in range(count):
        if i % max(1, count // 10) == 0:
            say(f"original: window {i + 1} of {count}")
        kept.append(logits(i).float().clone())  # not a view of what was not asked for
    return kept.__getitem__
