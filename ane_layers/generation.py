"""Tokens that follow a prompt: prefill in blocks, then decode, one token at a time or several guessed ones."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ane_layers.chunks import Runtime, read_metadata
from ane_layers.sampling import Sampler
from ane_layers.session import Logits, Session

FinishReason = Literal["stop", "length", "context"]


@dataclass
class GenerationStats:
    """What a generation took; complete once it has ended. The time that its caller spends on a token is not in it.

    Attributes:
        prompt_tokens: in the prompt.
        prefill_seconds: until the first new token was chosen.
        new_tokens: given out.
        decode_steps: calls that ran new tokens: one each, or one and its guesses. The first new token needs none.
        guessed: tokens that were guessed and checked, with speculation.
        accepted: of those, the ones that were right.
        decode_seconds: spent in those calls, choosing the tokens included.
    """

    prompt_tokens: int
    prefill_seconds: float = 0.0
    new_tokens: int = 0
    decode_steps: int = 0
    guessed: int = 0
    accepted: int = 0
    decode_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """Of decode; None if no token was decoded."""
        return (self.decode_steps + self.accepted) / self.decode_seconds if self.decode_seconds else None


class Generation(Iterator[int]):
    """Tokens that follow a prompt, each run when the next is asked for; `generate` makes one.

    Attributes:
        stats: figures so far.
        finish_reason: `"stop"` at a stop id, which is not given out; `"length"` after `max_new_tokens`; `"context"` when all slots are
            filled; None before the end.
    """

    def __init__(
        self,
        session: Session,
        prompt: Sequence[int],
        max_new_tokens: int,
        sampler: Sampler,
        stop_ids: Collection[int],
        guess: PromptLookup | None,
    ) -> None:
        self.stats = GenerationStats(prompt_tokens=len(prompt))
        self.finish_reason: FinishReason | None = None
        self._session, self._sampler, self._guess = session, sampler, guess
        self._seen = list(prompt)
        self._tokens = self._run(prompt, max_new_tokens, frozenset(stop_ids))

    def __next__(self) -> int:
        return next(self._tokens)

    def _run(self, prompt: Sequence[int], max_new_tokens: int, stop_ids: frozenset[int]) -> Iterator[int]:
        stats = self.stats
        started = time.perf_counter()
        ready = [self._sample(self._session.extend(prompt)[-1])]
        stats.prefill_seconds = time.perf_counter() - started
        while True:
            for token in ready:
                if token in stop_ids:
                    self.finish_reason = "stop"
                    return
                stats.new_tokens += 1
                self._seen.append(token)
                yield token
                if stats.new_tokens == max_new_tokens:
                    self.finish_reason = "length"
                    return
            # The last slot is used: what it predicts is given out too, and only that token has no slot any more.
            if self._session.position == self._session.context_length:
                self.finish_reason = "context"
                return
            started = time.perf_counter()
            ready = self._step(ready[-1])
            stats.decode_steps += 1
            stats.decode_seconds += time.perf_counter() - started

    def _step(self, token: int) -> list[int]:
        """What follows a token that is not run yet: one token, or several that were guessed, and the one after them."""
        guesses = self._guess.guess(self._seen, self._session.verify_length - 1) if self._guess else []
        if guesses:
            found = self._session.check_guesses(token, guesses)
            if found is not None:
                self.stats.guessed += len(guesses)
                self.stats.accepted += len(found) - 1
                return found
        return [self._sample(self._session.extend([token])[-1])]

    def _sample(self, logits: Logits) -> int:
        return logits.token(-1, self._sampler.sample(logits.values[-1]))


class PromptLookup:
    """Guesses by what followed the last few tokens when they stood in the text before.

    Args:
        longest, shortest: numbers of last tokens that are looked for, the most first.

    Source: Saxena, "Prompt Lookup Decoding", 2023.
    """

    def __init__(self, *, longest: int = 3, shortest: int = 1) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"PromptLookup: shortest must be within 1 … longest ({longest}), got {shortest}")
        self.longest, self.shortest = longest, shortest

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """At most `most` tokens that may follow; none if nothing like it stood there before."""
        for size in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            last = list(tokens[-size:])
            for start in range(len(tokens) - size - 1, -1, -1):
                if list(tokens[start : start + size]) == last:
                    return list(tokens[start + size : start + size + most])
        return []


def generate(
    session: Session,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    sampler: Sampler | None = None,
    stop_ids: Collection[int] = (),
    guess: PromptLookup | None = None,
) -> Generation:
    """Continues a prompt, token by token: prefill in blocks, then decode.

    The session goes on from where it is and stays usable, whether the iteration ends or is given up: its cache then holds the
    prompt and the new tokens, without the last one if that was never run (`session.position` tells), and with `guess` perhaps some that
    were not given out.

    Args:
        session: to continue; `reset` it for a new conversation.
        prompt_ids: at least one.
        max_new_tokens: at most so many are given out.
        sampler: greedy by default.
        stop_ids: end the generation.
        guess: check several guessed tokens in a call; the tokens are those of plain greedy decoding.

    Raises:
        ValueError: at once, for a prompt that the session cannot take, `max_new_tokens` below 1, a sampler or guesses that the package's
            functions do not allow; during the iteration, for logits that are not finite.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    sampler = sampler or Sampler()
    greedy = sampler.temperature == 0
    if session.head == "argmax" and not greedy:
        raise ValueError(f"the package gives tokens, not logits: temperature must be 0, got {sampler.temperature}")
    if guess is not None and not (greedy and session.verify_length):
        what = f"temperature is {sampler.temperature}" if not greedy else "the package has no function verify"
        raise ValueError(f"guesses need greedy decoding and a function verify; {what}")
    session.check(prompt_ids)
    return Generation(session, prompt_ids, max_new_tokens, sampler, stop_ids, guess)


__all__ = [
    "FinishReason",
    "Generation",
    "GenerationStats",
    "Logits",
    "PromptLookup",
    "Runtime",
    "Session",
    "generate",
    "read_metadata",
]
