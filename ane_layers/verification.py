"""A package against the PyTorch model it was converted from."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ane_layers.generation import Logits, Mode, Session
from ane_layers.models import from_folder
from ane_layers.text import Tokenizer


@dataclass(frozen=True)
class Verification:
    """How far a package's logits are from PyTorch's.

    Attributes:
        mode: arithmetic of the interpreter.
        tokens: positions compared.
        snr_db: signal-to-noise ratio over all compared logits, `10·log10(Σ reference² ÷ Σ (reference − actual)²)`.
        kl: mean Kullback-Leibler divergence of the package's next-token distribution from PyTorch's, in nats.
        top1_agreement: share of positions with the same most likely token, 0 … 1.
    """

    mode: str
    tokens: int
    snr_db: float
    kl: float
    top1_agreement: float

    def as_dict(self) -> dict[str, str | int | float]:
        return asdict(self)


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
    noise = (reference - actual).square().sum().item()
    signal = reference.square().sum().item()
    expected, found = reference.log_softmax(-1), actual.log_softmax(-1)
    return Verification(
        mode=mode,
        tokens=reference.shape[0],
        snr_db=math.inf if noise == 0 else 10 * math.log10(signal / noise),
        kl=(expected.exp() * (expected - found)).sum(-1).mean().item(),
        top1_agreement=(reference.argmax(-1) == actual.argmax(-1)).double().mean().item(),
    )


def verify(
    package: str | Path,
    folder: str | Path,
    *,
    tokens: Sequence[int] | int | None = None,
    mode: Mode = "fp32",
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Verification:
    """Executes a package over a token sequence and compares it with the checkpoint in PyTorch.

    Half of the sequence, in whole blocks, goes through `prefill`, the rest through `decode`. Where `prefill` returns its last
    position alone, the others' logits come from a second run, through `decode` only: every position is compared. The reference is
    one forward pass over the whole sequence in fp32, with the projections as the checkpoint has them: another path through the
    code than the one that was converted.

    Args:
        package: written by `CausalLM.convert`.
        folder: the Hugging Face folder it was converted from.
        tokens: ids, or how many random ones; twice the prefill block by default.
        mode: `"fp32"`, or `"fp16"`, in which every operation's result is rounded.
        seed: of the random ids.
        progress: called with a line of text at each step.

    Raises:
        ValueError: if the package and the folder do not belong together, or the tokens do not fit the context.
    """
    say = progress or (lambda line: None)
    say("loading the package")
    session = Session(package, mode=mode)
    ids = _token_ids(tokens, session, seed)
    say("running the reference")
    model = from_folder(folder, context_length=len(ids), fuse=False)
    for name in ("vocab_size", "hidden_size", "num_hidden_layers"):
        if getattr(model.config, name) != session.config["model"][name]:
            raise ValueError(
                f"{package}: field {name} is {session.config['model'][name]}, {folder} has {getattr(model.config, name)}"
            )
    reference = model.extend(torch.tensor([ids]))[0]
    del model
    blocks = max(1, len(ids) // 2 // session.block) if len(ids) > session.block else 0
    split = blocks * session.block
    say(f"running the package: {split} tokens in blocks, {len(ids) - split} one by one")
    results = session.extend(ids[:split]) if split else []
    results += session.extend(ids[split:], prefill=False)
    rows = _by_position(results)
    if len(rows) < len(ids):
        session.reset()
        rows = _by_position(session.extend(ids[:split], prefill=False)) | rows
    actual = torch.from_numpy(np.stack([rows[position] for position in range(len(ids))]).astype(np.float32))
    return compare_logits(reference, actual, mode=mode)


def _by_position(results: Sequence[Logits]) -> dict[int, np.ndarray]:
    return {result.first + i: row for result in results for i, row in enumerate(result.values)}


def _token_ids(tokens: Sequence[int] | int | None, session: Session, seed: int) -> list[int]:
    if tokens is None:
        tokens = min(2 * session.block, session.context_length)
    if not isinstance(tokens, int):
        return list(tokens)
    if not 2 <= tokens <= session.context_length:
        raise ValueError(f"tokens must be within 2 … {session.context_length}, the package's context, got {tokens}")
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(session.config["model"]["vocab_size"], (tokens,), generator=generator).tolist()


def text_tokens(file: str | Path, folder: str | Path, count: int) -> list[int]:
    """The first tokens of a text, by the folder's tokenizer.

    Raises:
        ValueError: if the text cannot be read or has fewer tokens.
    """
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: cannot be read as UTF-8 text ({error})") from error
    ids = Tokenizer.from_folder(folder).encode(text)
    if len(ids) < count:
        raise ValueError(f"{file}: has {len(ids)} tokens, {count} are wanted")
    return ids[:count]
