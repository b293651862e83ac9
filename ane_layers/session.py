"""A conversation with a package that this library wrote: which function takes which tokens, over one cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ane_layers.chunks import HIDDEN_STATES, Chunk, FunctionPlan, Runtime, open_packages, read_metadata
from ane_layers.interpreter import Finding, MLProgram, Mode
from ane_layers.layers.masks import causal_mask, sliding_mask


@dataclass(frozen=True)
class Logits:
    """What a call returned for the positions `first … first + n - 1`.

    Attributes:
        first: position of the first row.
        values: logits `[n, V]`; or of the tokens in `tokens` alone, `[n, k]`, the largest first.
        tokens: ids `[n, k]` that the columns of `values` stand for; None if they stand for all tokens in order.
    """

    first: int
    values: np.ndarray
    tokens: np.ndarray | None = None

    def token(self, row: int, column: int) -> int:
        """The id that a column of a row stands for."""
        return column if self.tokens is None else int(self.tokens[row, column])


@dataclass(frozen=True, kw_only=True)
class _Plan(FunctionPlan):
    """A function of the package, with its name."""

    name: str


class Session:
    """A conversation with a package that `CausalLM.convert` wrote, or with the chunks of a model in a folder.

    Of the functions for different context lengths, each call takes the shortest that holds it.

    Args:
        path: of the package, or of the folder.
        mode: arithmetic of the interpreter (see `MLProgram`).
        diagnose: let the interpreter collect `findings`.
        compact: let the interpreter keep large constants in fp16 (see `MLProgram`).
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
        compact: bool = False,
        runtime: Callable[[str, str], Runtime] | None = None,
    ) -> None:
        packages = open_packages(path)
        self.config = read_metadata(packages[0])
        self.context_length: int = self.config["context_length"]
        self.block: int = self.config["prefill"]
        self.kv: str = self.config.get("kv", "in_place")
        self.head: str = self.config.get("head", "logits")
        self._window: int | None = self.config["model"].get("sliding_window")
        self._sliding_slots: int = self.config.get("sliding_slots", 0)
        self._plans = {name: _Plan(name=name, **plan) for name, plan in self.config["functions"].items()}
        make = runtime or (lambda file, name: MLProgram(file, name, mode, diagnose=diagnose, compact=compact))
        self._chunks = [Chunk(package, make) for package in packages]
        self.position = 0

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Where numbers left fp16: functions of prefill first, each chunk by chunk, in the order of their operations.

        Empty without `diagnose` or with another runtime.
        """
        found = [item for chunk in self._chunks for item in chunk.programs.items()]
        programs = sorted(found, key=lambda item: not item[0].startswith("prefill"))
        return tuple(finding for _, program in programs for finding in getattr(program, "findings", ()))

    @property
    def states(self) -> list[Any]:
        """The runtime's states, one for each chunk; None for one without."""
        return [chunk.state for chunk in self._chunks]

    @property
    def verify_length(self) -> int:
        """Tokens that `check_guesses` takes at once; 0 if the package has no function for it."""
        return self._plans["verify"].length if "verify" in self._plans else 0

    def reset(self) -> None:
        """Forgets the conversation."""
        self.position = 0
        for chunk in self._chunks:
            chunk.reset()

    def extend(self, tokens: Sequence[int], *, prefill: bool = True) -> list[Logits]:
        """Runs further tokens: whole blocks through `prefill`, and the rest in a padded one but for the last token, which `decode` takes.

        Padding writes rows behind the tokens, into slots that the mask hides and that later tokens overwrite. Where a whole block does
        not fit before the end of the context or of a rolling cache, and for one or two tokens, `decode` does it all.

        Args:
            tokens: ids, at least one.
            prefill: whether blocks are used at all.

        Returns:
            What the calls returned, in order: with every call at least the result for its last token.

        Raises:
            ValueError: if the tokens do not fit the context, before anything is run; the cache stays as it was.
        """
        self.check(tokens)
        results = []
        start = 0
        while start < len(tokens):
            left = len(tokens) - start
            plan, count = self._next(left) if prefill else (self._decode(), 1)
            # What a padded block gives is of its padding.
            result = self._call(plan, tokens[start : start + count], wanted=count == plan.length)
            if result is not None:
                results.append(result)
            start += count
        return results

    def _next(self, left: int) -> tuple[_Plan, int]:
        """The function for the next tokens, and how many it takes: the longest whole block, or a padded one for all but the last token,
        whose result `decode` gives."""
        blocks = [plan for plan in self._plans.values() if plan.name.startswith("prefill") and self._fits(plan)]
        if whole := [plan for plan in blocks if plan.length <= left]:
            plan = max(whole, key=lambda plan: (plan.length, -plan.slots))
            return plan, plan.length
        padded = [plan for plan in blocks if plan.length >= left - 1]
        if left > 2 and padded:
            return min(padded, key=lambda plan: (plan.length, plan.slots)), left - 1
        return self._decode(), 1

    def _decode(self) -> _Plan:
        able = [plan for plan in self._plans.values() if plan.name.startswith("decode") and self._fits(plan)]
        return min(able, key=lambda plan: plan.slots)

    def _fits(self, plan: _Plan) -> bool:
        """Whether a call now stays within what it reads, and on one side of a rolling cache's end."""
        straddles = self._sliding_slots and self.position % self._sliding_slots + plan.length > self._sliding_slots
        return self.position + plan.length <= plan.slots and not straddles

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

    def check_guesses(self, token: int, guesses: Sequence[int]) -> list[int] | None:
        """Runs a token with guesses of what follows, in one call, and keeps the guesses that greedy decoding would have made.

        Refused guesses leave rows behind the kept ones, in slots that are hidden and overwritten, as padding does.

        Args:
            token: that follows the conversation.
            guesses: of the tokens after it, at most `verify_length - 1`; more are left out.

        Returns:
            What greedy decoding gives after `token`: the guesses that were right, and one token more, which has not been run. None if
            there is no room for such a call.

        Raises:
            ValueError: the package has no function `verify`, or as `check`.
        """
        if "verify" not in self._plans:
            raise ValueError("the package has no function verify; convert with verify=N (--verify N)")
        plan = self._plans["verify"]
        self.check([token])
        if not self._fits(plan):
            return None
        tried = [token, *guesses[: plan.length - 1]]
        self.check(tried)
        position = self.position
        result = self._call(plan, tried)
        assert result is not None
        assert result.tokens is not None
        found = [int(number) for number in result.tokens[:, 0]]
        right = 0
        while right < len(tried) - 1 and tried[right + 1] == found[right]:
            right += 1
        self.position = position + right + 1
        return found[: right + 1]

    def _call(self, plan: _Plan, tokens: Sequence[int], *, wanted: bool = True) -> Logits | None:
        """Runs a function of every chunk; a head in a chunk of its own only if its results are wanted."""
        padding = plan.length - len(tokens)
        known: dict[str, np.ndarray] = {
            "inputIds": np.asarray([[*tokens, *[0] * padding]], dtype=np.int32),
            "position": np.asarray([self.position], dtype=np.int32),
            **self._masks(plan),
        }
        sliding_slot = self.position % self._sliding_slots if self._sliding_slots else 0
        outputs: dict[str, np.ndarray] = {}
        for chunk in self._chunks:
            if chunk.keeps_nothing and not wanted:
                continue
            outputs = chunk.call(plan.name, known, count=len(tokens), slot=self.position, sliding_slot=sliding_slot)
            if HIDDEN_STATES in outputs:
                known[HIDDEN_STATES] = outputs[HIDDEN_STATES]
        self.position += len(tokens)
        return self._result(plan, outputs, len(tokens)) if wanted else None

    def _masks(self, plan: _Plan) -> dict[str, np.ndarray]:
        masks = {}
        two_parts = self.kv != "in_place"
        if any(chunk.takes(plan.name, "causalMask") for chunk in self._chunks):
            masks["causalMask"] = causal_mask(self.position, plan.length, plan.slots, two_parts=two_parts)
        if self._sliding_slots:
            assert self._window is not None
            masks["slidingMask"] = sliding_mask(
                self.position, plan.length, window=self._window, slots=self._sliding_slots, two_parts=two_parts
            )
        return {name: mask.numpy().astype(np.float16) for name, mask in masks.items()}

    def _result(self, plan: _Plan, outputs: dict[str, np.ndarray], count: int) -> Logits:
        rows = slice(None) if plan.last_only else slice(count)
        if plan.head == "argmax":
            tokens = outputs["token"][0][rows, None]
            values = np.zeros(tokens.shape, np.float32)
        elif plan.head == "top_k":
            tokens, values = outputs["topTokens"][0][rows], outputs["topLogits"][0][rows]
        else:
            tokens, values = None, outputs["logits"][0][rows]
        return Logits(self.position - len(values), values, tokens)
