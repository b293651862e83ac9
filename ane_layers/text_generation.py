"""Text from a package, or from a model folder by way of a package: what a command line needs besides printing."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from ane_layers.chunks import is_chunked, is_package
from ane_layers.generation import (
    FinishReason,
    Generation,
    GenerationStats,
    PromptLookup,
    Runtime,
    Session,
    generate,
)
from ane_layers.interpreter import Mode
from ane_layers.sampling import Sampler
from ane_layers.text import Tokenizer

# For a folder that is converted only to be tried: short enough for an interpreter, long enough for a page.
DEFAULT_CONTEXT, DEFAULT_PREFILL = 1024, 64


class TextGeneration(Iterator[str]):
    """Pieces of text as they become whole; none is empty.

    Attributes:
        ids: of the new tokens so far.
    """

    def __init__(self, generation: Generation, tokenizer: Tokenizer) -> None:
        self.ids: list[int] = []
        self._generation = generation
        self._pieces = self._run(tokenizer)

    @property
    def stats(self) -> GenerationStats:
        return self._generation.stats

    @property
    def finish_reason(self) -> FinishReason | None:
        """See `Generation`."""
        return self._generation.finish_reason

    def __next__(self) -> str:
        return next(self._pieces)

    def _run(self, tokenizer: Tokenizer) -> Iterator[str]:
        stream = tokenizer.stream()
        for token in self._generation:
            self.ids.append(token)
            if piece := stream.push(token):
                yield piece
        if piece := stream.finish():
            yield piece


class TextGenerator:
    """A session and the tokenizer that belongs to it.

    Attributes:
        stop_ids: the tokenizer's, or the package's `eos_token_id` if the folder names none.

    Raises:
        ValueError: the tokenizer has ids beyond the package's vocabulary: it belongs to another model.
    """

    def __init__(self, session: Session, tokenizer: Tokenizer) -> None:
        vocabulary = session.config["model"]["vocab_size"]
        if tokenizer.largest_id >= vocabulary:
            raise ValueError(
                f"{tokenizer.folder}: the tokenizer's largest id is {tokenizer.largest_id}, "
                f"but the package's field vocab_size is {vocabulary}"
            )
        self.session, self.tokenizer = session, tokenizer
        eos = session.config.get("eos_token_id")
        of_package = [] if eos is None else eos if isinstance(eos, list) else [eos]
        self.stop_ids: frozenset[int] = tokenizer.stop_ids or frozenset(of_package)

    def encode(self, prompt: str, *, chat: bool = False) -> list[int]:
        """The ids of a prompt; with `chat`, of a user's message in the folder's chat template.

        Raises:
            ValueError: the prompt is empty or not valid text, or there is no usable chat template.
        """
        if chat:
            text = self.tokenizer.chat([{"role": "user", "content": prompt}])
            return self.tokenizer.encode(text, add_special_tokens=False)
        ids = self.tokenizer.encode(prompt)
        if not ids:
            raise ValueError("the prompt is empty")
        return ids

    def generate(
        self,
        prompt: str,
        *,
        chat: bool = False,
        max_new_tokens: int,
        sampler: Sampler | None = None,
        stop_ids: Collection[int] | None = None,
        guess: PromptLookup | None = None,
    ) -> TextGeneration:
        """Continues a prompt in a new conversation.

        Args:
            prompt: text.
            chat: see `encode`.
            max_new_tokens: at most so many.
            sampler: greedy by default.
            stop_ids: instead of `self.stop_ids`.
            guess: see `ane_layers.generation.generate`.

        Raises:
            ValueError: as `encode` and `ane_layers.generation.generate`.
        """
        ids = self.encode(prompt, chat=chat)
        self.session.reset()
        tokens = generate(
            self.session,
            ids,
            max_new_tokens=max_new_tokens,
            sampler=sampler,
            stop_ids=self.stop_ids if stop_ids is None else stop_ids,
            guess=guess,
        )
        return TextGeneration(tokens, self.tokenizer)


@contextmanager
def text_generator(
    source: str | Path,
    *,
    tokenizer: str | Path | None = None,
    context: int | None = None,
    prefill: int | None = None,
    mode: Mode = "fp32",
    runtime: Callable[[str, str], Runtime] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Iterator[TextGenerator]:
    """Opens a package, or converts a model folder into a temporary one: what writes is the package either way.

    Args:
        source: an `.mlpackage`, or a model folder.
        tokenizer: folder with the tokenizer; `source` itself if that is a model folder. A package holds none.
        context: T for a folder; 1024, or `max_position_embeddings` if that is less.
        prefill: S for a folder; 64, or the context if that is less.
        mode: arithmetic of the interpreter.
        runtime: see `Session`.
        progress: called with a line of text at each step.

    Raises:
        ValueError: there is no tokenizer, it belongs to another model, `context` or `prefill` is given for a package, or the folder
            cannot be converted.
    """
    source = Path(source)
    say = progress or (lambda line: None)
    if not source.is_dir():
        raise ValueError(f"{source}: is neither a package nor a model folder")
    if not is_package(source) and not is_chunked(source):
        texts = Tokenizer.from_folder(tokenizer or source)
        with tempfile.TemporaryDirectory(prefix="ane_layers.") as folder:
            package = Path(folder) / "model.mlpackage"
            _convert(source, package, context, prefill, say)
            yield TextGenerator(Session(package, mode=mode, runtime=runtime), texts)
        return
    if tokenizer is None:
        raise ValueError(f"{source}: a package holds no tokenizer; name the folder of its model's (--tokenizer)")
    for name, value in (("context", context), ("prefill", prefill)):
        if value is not None:
            raise ValueError(f"{name} is fixed in a package, got {value}; it is chosen at conversion")
    texts = Tokenizer.from_folder(tokenizer)
    say(f"loading {source}")
    yield TextGenerator(Session(source, mode=mode, runtime=runtime), texts)


def _convert(folder: Path, package: Path, context: int | None, prefill: int | None, say: Callable[[str], None]) -> None:
    from ane_layers.models import open_folder
    from ane_layers.models.config import load_config

    if context is None:
        longest = load_config(folder)[0].get("max_position_embeddings")
        context = min(DEFAULT_CONTEXT, longest) if isinstance(longest, int) else DEFAULT_CONTEXT
    say(f"loading {folder}")
    model = open_folder(folder, context_length=context)
    model.convert(package, prefill=min(DEFAULT_PREFILL, context) if prefill is None else prefill, progress=say)
