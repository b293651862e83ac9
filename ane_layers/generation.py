"""Runs tokens through a package: prefill in blocks, then decode, over one state."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from ane_layers.interpreter import Finding, MLProgram, Mode
from ane_layers.layers.masks import causal_mask
from ane_layers.program import Package
from ane_layers.sampling import Sampler

CONFIG_KEY = "ane_layers.config"
FinishReason = Literal["stop", "length", "context"]


class Runtime(Protocol):
    """What a session needs of a program; coremltools' `MLModel` has it too."""

    def predict(self, data: dict[str, np.ndarray], state: Any = None) -> dict[str, np.ndarray]: ...

    def make_state(self) -> Any: ...


@dataclass(frozen=True)
class Logits:
    """Logits that a call returned: `values` `[n, V]` belong to the positions `first … first + n - 1`."""

    first: int
    values: np.ndarray


class Session:
    """A conversation with a package that `CausalLM.convert` wrote.

    Args:
        path: of the package.
        mode: arithmetic of the interpreter (see `MLProgram`).
        diagnose: let the interpreter collect `findings`.
        runtime: makes the program of one function from path and name; the interpreter unless another is given, such as
            `ane_layers.coreml.coreml_runtime` on a Mac.

    Raises:
        ValueError: if the package was not written by this library.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        mode: Mode = "fp32",
        diagnose: bool = False,
        runtime: Callable[[str, str], Runtime] | None = None,
    ) -> None:
        package = Package.open(path)
        self.config = read_metadata(package)
        self.context_length: int = self.config["context_length"]
        self.block: int = self.config["prefill"]
        make = runtime or (lambda file, name: MLProgram(file, name, mode, diagnose=diagnose))
        self._decode = make(str(path), "decode")
        self._prefill = make(str(path), "prefill")
        self.reset()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Where numbers left fp16 in `prefill`, then in `decode`; empty without `diagnose` or with another runtime."""
        return tuple(f for program in (self._prefill, self._decode) for f in getattr(program, "findings", ()))

    def reset(self) -> None:
        """Forgets the conversation."""
        self.position = 0
        self._state = self._decode.make_state()

    def extend(self, tokens: Sequence[int], *, prefill: bool = True) -> list[Logits]:
        """Runs further tokens: whole blocks through `prefill`, and the rest in a padded one but for the last token, which `decode` takes.

        Padding writes rows behind the tokens, into slots that the mask hides and that later tokens overwrite. Where a whole block does
        not fit before the end of the context, and for one or two tokens, `decode` does it all.

        Args:
            tokens: ids, at least one.
            prefill: whether blocks are used at all.

        Returns:
            What the calls returned, in order: with every call at least the logits after its last token.

        Raises:
            ValueError: if the tokens do not fit the context, before anything is run; the cache stays as it was.
        """
        self.check(tokens)
        results = []
        start = 0
        while start < len(tokens):
            left = len(tokens) - start
            if prefill and left >= self.block:
                length = self.block
                results.append(self._call(self._prefill, tokens[start : start + length]))
            elif prefill and left > 2 and self.position + self.block <= self.context_length:
                length = left - 1
                self._call(self._prefill, tokens[start : start + length], padding=self.block - length)
            else:
                length = 1
                results.append(self._call(self._decode, tokens[start : start + length]))
            start += length
        return results

    def check(self, tokens: Sequence[int]) -> None:
        """Whether `extend` would take these tokens now.

        Raises:
            ValueError: there are none, they do not fit the context, or one is outside the vocabulary.
        """
        if not tokens:
            raise ValueError("at least one token is needed")
        if self.position + len(tokens) > self.context_length:
            raise ValueError(
                f"{len(tokens)} tokens at position {self.position} exceed the context of {self.context_length} slots"
            )
        vocabulary = self.config["model"]["vocab_size"]
        for token in tokens:
            if not 0 <= token < vocabulary:
                raise ValueError(f"token {token} is outside the vocabulary 0 … {vocabulary - 1}")

    def _call(self, program: Runtime, tokens: Sequence[int], padding: int = 0) -> Logits:
        length = len(tokens) + padding
        mask = causal_mask(self.position, length, self.context_length).numpy().astype(np.float16)
        inputs: dict[str, np.ndarray] = {
            "inputIds": np.asarray([[*tokens, *[0] * padding]], dtype=np.int32),
            "position": np.asarray([self.position], dtype=np.int32),
            "causalMask": mask,
        }
        logits = program.predict(inputs, state=self._state)["logits"][0]  # [S or 1, V]
        self.position += len(tokens)
        return Logits(self.position - len(logits), logits)


@dataclass
class GenerationStats:
    """What a generation took; complete once it has ended. The time that its caller spends on a token is not in it.

    Attributes:
        prompt_tokens: in the prompt.
        prefill_seconds: until the first new token was chosen.
        new_tokens: given out.
        decode_steps: calls that ran one new token each. The first new token needs none.
        decode_seconds: spent in those calls, choosing the tokens included.
    """

    prompt_tokens: int
    prefill_seconds: float = 0.0
    new_tokens: int = 0
    decode_steps: int = 0
    decode_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """Of decode; None if no token was decoded."""
        return self.decode_steps / self.decode_seconds if self.decode_seconds else None


class Generation(Iterator[int]):
    """Tokens that follow a prompt, each run when the next is asked for; `generate` makes one.

    Attributes:
        stats: figures so far.
        finish_reason: `"stop"` at a stop id, which is not given out; `"length"` after `max_new_tokens`; `"context"` when all slots are
            filled; None before the end.
    """

    def __init__(
        self, session: Session, prompt: Sequence[int], max_new_tokens: int, sampler: Sampler, stop_ids: Collection[int]
    ) -> None:
        self.stats = GenerationStats(prompt_tokens=len(prompt))
        self.finish_reason: FinishReason | None = None
        self._session, self._sampler = session, sampler
        self._tokens = self._run(prompt, max_new_tokens, frozenset(stop_ids))

    def __next__(self) -> int:
        return next(self._tokens)

    def _run(self, prompt: Sequence[int], max_new_tokens: int, stop_ids: frozenset[int]) -> Iterator[int]:
        stats = self.stats
        token, stats.prefill_seconds = self._step(prompt)
        while token not in stop_ids:
            stats.new_tokens += 1
            yield token
            if stats.new_tokens == max_new_tokens:
                self.finish_reason = "length"
                return
            # The last slot is used: what it predicts is given out too, and only that token has no slot any more.
            if self._session.position == self._session.context_length:
                self.finish_reason = "context"
                return
            token, seconds = self._step([token])
            stats.decode_steps += 1
            stats.decode_seconds += seconds
        self.finish_reason = "stop"

    def _step(self, tokens: Sequence[int]) -> tuple[int, float]:
        started = time.perf_counter()
        token = self._sampler.sample(self._session.extend(tokens)[-1].values[-1])
        return token, time.perf_counter() - started


def generate(
    session: Session,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    sampler: Sampler | None = None,
    stop_ids: Collection[int] = (),
) -> Generation:
    """Continues a prompt, token by token: prefill in blocks, then decode.

    The session goes on from where it is and stays usable, whether the iteration ends or is given up: its cache then holds the
    prompt and the new tokens, without the last one if that was never run (`session.position` tells).

    Args:
        session: to continue; `reset` it for a new conversation.
        prompt_ids: at least one.
        max_new_tokens: at most so many are given out.
        sampler: greedy by default.
        stop_ids: end the generation.

    Raises:
        ValueError: at once, for a prompt that the session cannot take or `max_new_tokens` below 1; during the iteration, for
            logits that are not finite.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    session.check(prompt_ids)
    return Generation(session, prompt_ids, max_new_tokens, sampler or Sampler(), stop_ids)


def read_metadata(package: Package) -> dict[str, Any]:
    """What `CausalLM.convert` noted in the package: model config, context, block, modes.

    Raises:
        ValueError: if it is not there or damaged.
    """
    text = package.metadata.get(CONFIG_KEY)
    if text is None:
        raise ValueError(f"{package.path}: has no metadata {CONFIG_KEY}; was it written by ane_layers?")
    try:
        config: dict[str, Any] = json.loads(text)
        _ = config["context_length"], config["prefill"], config["model"]["vocab_size"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{package.path}: metadata {CONFIG_KEY} is damaged: {error}") from error
    return config
