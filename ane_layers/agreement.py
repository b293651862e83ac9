"""Do two packages write the same? The article's check of folded against repeated heads: greedy tokens over 30 prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ane_layers.chunks import Runtime, open_packages
from ane_layers.interpreter import Mode
from ane_layers.session import Session
from ane_layers.text import Tokenizer
from ane_layers.text_generation import TextGenerator


@dataclass(frozen=True)
class Difference:
    """Where two packages part: after `position` equal new tokens of prompt number `prompt` (from 0)."""

    prompt: int
    position: int


@dataclass(frozen=True)
class Agreement:
    """What came of it.

    Attributes:
        prompts: how many were run.
        identical: prompts whose new tokens are all equal.
        tokens: new tokens of the first package.
        differences: one per prompt that is not identical.
        tokens_per_second: of decode, mean over the prompts, for each package; None if nothing was decoded. On the interpreter it says
            nothing about a device.
    """

    prompts: int
    identical: int
    tokens: int
    differences: tuple[Difference, ...]
    tokens_per_second: tuple[float | None, float | None]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_prompts(file: str | Path) -> list[str]:
    """One prompt a line; blank lines are left out.

    Raises:
        ValueError: if the file cannot be read or holds none.
    """
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"{file}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: is not UTF-8 text ({error.reason} at byte {error.start})") from error
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise ValueError(f"{file}: holds no prompt")
    return prompts


def agreement(
    first: str | Path,
    second: str | Path,
    *,
    tokenizer: str | Path,
    prompts: Sequence[str],
    new_tokens: int = 32,
    mode: Mode = "fp32",
    runtime: Callable[[str, str], Runtime] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Agreement:
    """Continues every prompt greedily with both packages and compares the tokens.

    Args:
        first: a package.
        second: another one of the same model.
        tokenizer: folder with the model's tokenizer.
        prompts: texts.
        new_tokens: for each prompt; generation does not stop at a stop id, so that as many are compared everywhere.
        mode: arithmetic of the interpreter.
        runtime: see `Session`.
        progress: called with a line of text at each step.

    Raises:
        ValueError: if a prompt is empty or does not fit a package's context together with its new tokens.
    """
    say = progress or (lambda line: None)
    texts = Tokenizer.from_folder(tokenizer)
    for path in (first, second):
        open_packages(path)  # before the first of them writes for minutes
    written: list[list[list[int]]] = []
    speeds: list[float | None] = []
    for path in (first, second):
        generator = TextGenerator(Session(path, mode=mode, runtime=runtime), texts)
        steps, seconds = 0, 0.0
        tokens = []
        for i, prompt in enumerate(prompts):
            say(f"{Path(path).name}: prompt {i + 1} of {len(prompts)}")
            generation = generator.generate(prompt, max_new_tokens=new_tokens, stop_ids=())
            for _ in generation:
                pass
            if generation.finish_reason == "context":
                raise ValueError(f"{path}: prompt {i + 1} and {new_tokens} new tokens exceed the package's context")
            tokens.append(generation.ids)
            steps += generation.stats.decode_steps
            seconds += generation.stats.decode_seconds
        written.append(tokens)
        speeds.append(steps / seconds if seconds else None)
    differences = [
        Difference(i, next(n for n, (x, y) in enumerate(zip(a, b, strict=True)) if x != y))
        for i, (a, b) in enumerate(zip(*written, strict=True))
        if a != b
    ]
    return Agreement(
        prompts=len(prompts),
        identical=len(prompts) - len(differences),
        tokens=sum(map(len, written[0])),
        differences=tuple(differences),
        tokens_per_second=(speeds[0], speeds[1]),
    )
