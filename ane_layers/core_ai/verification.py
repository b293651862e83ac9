"""An asset against the PyTorch model it was exported from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from ane_layers.core_ai.runtime import CoreAIProgram, CoreAISession
from ane_layers.models import from_folder
from ane_layers.token_source import default_tokens
from ane_layers.verification import Verification, compare_logits

COUNT = 64


def verify(
    path: str | Path,
    folder: str | Path,
    *,
    tokens: Sequence[int] | int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Verification:
    """Executes an asset with Core AI's runtime and compares every position's logits with PyTorch's.

    All tokens go through `decode`; then, from an empty cache, as many whole blocks as there are through `prefill`, whose own positions
    are compared as well. The reference is one forward pass without a cache and with the checkpoint's own projections, in fp32.

    Args:
        path: of an asset that `export` wrote.
        folder: the Hugging Face folder it was exported from.
        tokens: ids, or how many of the bundled held-out text (64 by default, or the context if that is less).
        progress: called with a line of text at each step.

    Raises:
        ValueError: if the tokens do not fit the context, or without Core AI's Python packages.
    """
    say = progress or (lambda line: None)
    say("loading the asset")
    with CoreAIProgram(path) as program:
        session = CoreAISession(program)
        count = min(COUNT, session.context_length) if tokens is None else tokens
        vocabulary = session.config["model"]["vocab_size"]
        ids = default_tokens(folder, count, vocabulary) if isinstance(count, int) else list(count)
        say("running the reference")
        model = from_folder(folder, context_length=session.context_length, fuse=False)
        reference = model.whole(torch.tensor([ids]))[0]
        say(f"running {len(ids)} tokens in Core AI")
        actual = [session.extend(ids)]
        wanted = [reference]
        block = int(session.config["functions"]["prefill"]["length"])
        whole = len(ids) // block * block
        if whole:
            rows = CoreAISession(program).extend(ids[:whole], function="prefill")
            last_only = session.config["functions"]["prefill"]["last_only"]
            actual.append(rows)
            wanted.append(reference[block - 1 : whole : block] if last_only else reference[:whole])
    return compare_logits(torch.cat(wanted), torch.from_numpy(np.concatenate(actual)), mode="core_ai")
