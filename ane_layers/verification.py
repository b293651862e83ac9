"""A package against the PyTorch model it was converted from."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ane_layers.generation import Logits, Session
from ane_layers.interpreter import Finding, Mode
from ane_layers.models import from_folder
from ane_layers.models.config import load_config
from ane_layers.token_source import DEFAULT_COUNT, default_tokens, random_tokens


@dataclass(frozen=True)
class Verification:
    """How far a package's logits are from PyTorch's.

    Attributes:
        mode: arithmetic of the interpreter.
        tokens: positions compared.
        snr_db: signal-to-noise ratio over all compared logits, `10·log10(Σ reference² ÷ Σ (reference − actual)²)`.
        kl: mean Kullback-Leibler divergence of the package's next-token distribution from PyTorch's, in nats.
        top1_agreement: share of positions with the same most likely token, 0 … 1.
        position_db: signal-to-noise ratio of each position on its own.
        findings: where numbers left fp16 in the package, in order (see `ane_layers.interpreter.Finding`).
    """

    mode: str
    tokens: int
    snr_db: float
    kl: float
    top1_agreement: float
    position_db: tuple[float, ...] = ()
    findings: tuple[Finding, ...] = ()

    def as_dict(self) -> dict[str, str | int | float]:
        """The figures over all positions."""
        return {name: getattr(self, name) for name in ("mode", "tokens", "snr_db", "kl", "top1_agreement")}

    @property
    def worst_position(self) -> tuple[int, float]:
        """The position with the lowest signal-to-noise ratio, one that is NaN before all others, and that ratio in dB."""
        position = min(
            range(self.tokens), key=lambda p: -math.inf if math.isnan(self.position_db[p]) else self.position_db[p]
        )
        return position, self.position_db[position]

    @property
    def first_non_finite(self) -> Finding | None:
        """The first operation in the program that made an infinity or a NaN, or a number beyond fp16 where fp16 is declared."""
        return next((finding for finding in self.findings if finding.kind != "subnormal"), None)


def compare_logits(reference: Tensor, actual: Tensor, *, mode: str) -> Verification:
    """Compares logits position by position.

    Shape:
        - reference, actual: `[n, V]`

    Raises:
        ValueError: if the shapes differ.
    """
    if reference.shape != actual.shape:
        raise ValueError(f"logits have shapes {list(reference.shape)} and {list(actual.shape)}")
    reference, actual = reference.double(), actual.double()
    noise = (reference - actual).square().sum(-1)  # [n]
    signal = reference.square().sum(-1)  # [n]
    expected, found = reference.log_softmax(-1), actual.log_softmax(-1)
    return Verification(
        mode=mode,
        tokens=reference.shape[0],
        snr_db=_decibels(signal.sum().item(), noise.sum().item()),
        kl=(expected.exp() * (expected - found)).sum(-1).mean().item(),
        top1_agreement=(reference.argmax(-1) == actual.argmax(-1)).double().mean().item(),
        position_db=tuple(map(_decibels, signal.tolist(), noise.tolist())),
    )


def _decibels(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    # Infinite logits make infinite noise, for which there is no logarithm of the ratio.
    return -math.inf if signal == 0 or math.isinf(noise) else 10 * math.log10(signal / noise)


def verify(
    package: str | Path,
    folder: str | Path,
    *,
    tokens: Sequence[int] | int | None = None,
    mode: Mode = "fp32",
    seed: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Verification:
    """Executes a package over a token sequence and compares it with the checkpoint in PyTorch.

    Half of the sequence, in whole blocks, goes through `prefill`, the rest through `decode`. Where `prefill` returns its last
    position alone, the others' logits come from a second run, through `decode` only: every position is compared. The reference is
    one forward pass over the whole sequence in fp32, without a cache and with the projections as the checkpoint has them: another path
    through the code than the one that was converted.

    Args:
        package: written by `CausalLM.convert`.
        folder: the Hugging Face folder it was converted from.
        tokens: ids, or how many (256 by default, or the context if that is less) of the bundled held-out text; random ones if the
            folder has no tokenizer.
        mode: arithmetic of the interpreter (see `MLProgram`).
        seed: if given, and `tokens` holds no ids, they are random even where there is a tokenizer.
        progress: called with a line of text at each step.

    Raises:
        ValueError: if the package and the folder do not belong together, or the tokens do not fit the context.
    """
    say = progress or (lambda line: None)
    load_config(folder)  # a mistaken folder is not worth loading a package for
    say("loading the package")
    session = Session(package, mode=mode, diagnose=True)
    ids = _token_ids(tokens, folder, session, seed)
    session.check(ids)
    if session.head != "logits":
        raise ValueError(f"{package}: head is {session.head!r}; a verification needs one that gives logits")
    say("running the reference")
    model = from_folder(folder, context_length=len(ids), rope_length=session.context_length, fuse=False)
    for name in ("vocab_size", "hidden_size", "num_hidden_layers"):
        if getattr(model.config, name) != session.config["model"][name]:
            raise ValueError(
                f"{package}: field {name} is {session.config['model'][name]}, {folder} has {getattr(model.config, name)}"
            )
    reference = model.whole(torch.tensor([ids]))[0]
    del model
    # At least one block, if need be a padded one.
    split = max(1, len(ids) // 2 // session.block) * session.block if len(ids) >= session.block else len(ids) - 1
    say(
        f"running the package: {split} of {len(ids)} tokens through prefill; decode gives the logits that blocks do not"
    )
    results = session.extend(ids[:split])
    results += session.extend(ids[split:], prefill=False) if split < len(ids) else []
    rows = _by_position(results)
    if len(rows) < len(ids):
        session.reset()
        rows = _by_position(session.extend(ids[:split], prefill=False)) | rows
    actual = torch.from_numpy(np.stack([rows[position] for position in range(len(ids))]).astype(np.float32))
    return replace(compare_logits(reference, actual, mode=mode), findings=session.findings)


def _by_position(results: Sequence[Logits]) -> dict[int, np.ndarray]:
    return {result.first + i: row for result in results for i, row in enumerate(result.values)}


def _token_ids(tokens: Sequence[int] | int | None, folder: str | Path, session: Session, seed: int | None) -> list[int]:
    if tokens is not None and not isinstance(tokens, int):
        return list(tokens)
    count = min(DEFAULT_COUNT, session.context_length) if tokens is None else tokens
    if not 2 <= count <= session.context_length:
        raise ValueError(f"tokens must be within 2 … {session.context_length}, the package's context, got {count}")
    vocab_size = session.config["model"]["vocab_size"]
    return default_tokens(folder, count, vocab_size) if seed is None else random_tokens(count, vocab_size, seed)
