"""What the ways of writing the cache, buckets, guesses and an int8 cache cost and bring.

python benchmarks/make_checkpoint.py --out /tmp/exaone4-1.2b
python benchmarks/cache_modes.py full-size /tmp/exaone4-1.2b     # operations, writes and bytes at the real geometry
python benchmarks/cache_modes.py bundled                        # every mode against PyTorch, over a whole context
python benchmarks/cache_modes.py guesses                        # how many guessed tokens are right
python benchmarks/cache_modes.py int8                           # what Core ML's states take, and what int8 rows cost in loss
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from torch import Tensor

from ane_layers import bundled_checkpoint
from ane_layers.layers.kv_cache import Context, NoCache

app = typer.Typer(add_completion=False, help=__doc__)
MODES = ("in_place", "deferred", "read_only")
ARTICLE_WEIGHTS = 834.7  # MB a token, of the article's top8 recipe


def table(*heads: str) -> None:
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")


def row(*cells: object) -> None:
    print(f"| {' | '.join(str(cell) for cell in cells)} |", flush=True)


def command(*arguments: object) -> Any:
    """The JSON that the command line prints."""
    result = subprocess.run(
        [sys.executable, "-m", "ane_layers.cli", *map(str, arguments), "--json"], stdout=subprocess.PIPE, check=True
    )
    return json.loads(result.stdout)


def counted(folder: Path, mode: str, context: int, block: int, buckets: list[int]) -> dict[str, dict[str, float]]:
    """Figures of every function that a folder becomes."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "m.mlpackage"
        shorter = [part for size in buckets for part in ("--bucket", size)]
        command("convert", folder, "-o", path, "--kv", mode, "--context", context, "--prefill", block, *shorter)
        functions = command("analyze", path)["functions"]
    return {
        name: {
            "compute": found["operations"]["compute"],
            "writes": found["state_writes"],
            "tile": found["tile"]["count"],
            "rank": found["highest_rank"],
            **{key: found["traffic"][key] for key in ("weights", "kv_read", "kv_written", "total")},
            **found["materialised"],
        }
        for name, found in functions.items()
    }


@app.command()
def full_size(
    two: Annotated[Path, typer.Argument(help="Checkpoint with two layers.")],
    three: Annotated[Path, typer.Argument(help="The same with three.")],
    layers: Annotated[int, typer.Option(help="Of the model: two layers, and so many differences to three.")] = 30,
    context: int = 4096,
    block: int = 64,
    bucket: Annotated[list[int] | None, typer.Option(help="Repeatable.")] = None,
) -> None:
    """Counts every mode with its buckets, in fp16. The last column puts the article's weights in place of these."""
    buckets = bucket or [512, 1024, 2048]
    table(
        "mode",
        "function",
        "operations",
        "writes",
        "tile",
        "rank",
        "weights MB",
        "cache read MB",
        "rows written MB",
        "total MB",
        "materialised MB, read + written",
        "tok/s",
        "tok/s, article's weights",
    )
    for mode in MODES:
        small, larger = (counted(folder, mode, context, block, buckets) for folder in (two, three))
        for name, first in small.items():
            found = {key: first[key] + (layers - 2) * (larger[name][key] - first[key]) for key in first}
            length = 1 if name.startswith("decode") else block
            article = 55_900 / (ARTICLE_WEIGHTS + (found["total"] - found["weights"]) / 1e6) * length
            row(
                mode,
                name,
                *(found[key] for key in ("compute", "writes", "tile", "rank")),
                *(f"{found[key] / 1e6:,.1f}" for key in ("weights", "kv_read", "kv_written", "total")),
                f"{found['read'] / 1e6:,.0f} + {found['written'] / 1e6:,.0f}",
                f"{55_900e6 / found['total'] * length:.1f}",
                f"{article:.1f}",
            )


@app.command()
def bundled(tokens: int = 512, block: int = 64) -> None:
    """Verifies the bundled model's packages over the whole context."""
    table("mode", "arithmetic", "tokens", "signal to noise, dB", "worst position, dB", "KL, nats", "same token")
    from ane_layers.verification import verify

    for mode in MODES:
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "m.mlpackage"
            command("convert", bundled_checkpoint(), "-o", path, "--kv", mode, "--context", tokens, "--prefill", block)
            for arithmetic in ("fp32", "fp16"):
                found = verify(path, bundled_checkpoint(), tokens=tokens, mode=arithmetic)
                _, worst = found.worst_position
                row(
                    mode,
                    arithmetic,
                    found.tokens,
                    f"{found.snr_db:.1f}",
                    f"{worst:.1f}",
                    f"{found.kl:.1e}",
                    f"{found.top1_agreement:.1%}",
                )


@app.command()
def guesses(new_tokens: int = 96, prompts: int = 30, verify: int = 8) -> None:
    """Greedy text of the bundled model with prompt lookup: how often a guess was right, and that the text stays the same."""
    from ane_layers.agreement import read_prompts
    from ane_layers.generation import PromptLookup, Session, generate
    from ane_layers.models import Exaone4
    from ane_layers.text import Tokenizer

    tokenizer = Tokenizer.from_folder(bundled_checkpoint())
    asked = read_prompts(bundled_checkpoint() / "prompts.txt")[:prompts]
    repeated = [f"{prompt} {prompt}" for prompt in asked]
    table("mode", "prompts", "tokens", "calls", "guessed", "right", "tokens a call", "differ from plain greedy")
    for mode in MODES:
        with tempfile.TemporaryDirectory() as scratch:
            model = Exaone4.from_pretrained(bundled_checkpoint(), context_length=512, dtype=None, kv=mode)
            session = Session(model.convert(Path(scratch) / "m.mlpackage", prefill=32, verify=verify).path)
            for name, texts in (("as they are", asked), ("said twice", repeated)):
                total = dict.fromkeys(("tokens", "calls", "guessed", "right", "differ"), 0)
                for text in texts:
                    ids = tokenizer.encode(text)
                    session.reset()
                    plain = list(generate(session, ids, max_new_tokens=new_tokens))
                    session.reset()
                    running = generate(session, ids, max_new_tokens=new_tokens, guess=PromptLookup())
                    total["differ"] += list(running) != plain
                    stats = running.stats
                    total["tokens"] += stats.new_tokens - 1  # the first comes from the prompt
                    total["calls"] += stats.decode_steps
                    total["guessed"] += stats.guessed
                    total["right"] += stats.accepted
                row(
                    mode,
                    f"{len(texts)} {name}",
                    total["tokens"],
                    total["calls"],
                    total["guessed"],
                    f"{total['right']} ({total['right'] / max(1, total['guessed']):.0%})",
                    f"{total['tokens'] / total['calls']:.2f}",
                    total["differ"],
                )


class Rounded(NoCache):
    """Keys and values as a cache of few bits would give them back."""

    def __init__(self, bits: int, over: str) -> None:
        self.largest = 2 ** (bits - 1) - 1
        self.over = over

    def _rounded(self, new: Tensor) -> Tensor:
        # [B, K, D, S]: a scale for each row of each head, for each of a head's channels, or for each head.
        axes = {"row": (2,), "channel": (3,), "head": (2, 3)}[self.over]
        scale = new.abs().amax(dim=axes, keepdim=True).clamp(min=1e-8) / self.largest
        scale = scale.half().float()
        return (new / scale).round().clamp(-self.largest, self.largest) * scale

    def extend(self, layer: int, key: Tensor, value: Tensor, position: Tensor, *, slots: int | None = None) -> Context:
        return super().extend(layer, self._rounded(key), self._rounded(value), position, slots=slots)


def attempts() -> Iterator[tuple[str, str]]:
    """What coremltools says to states of other types."""
    import coremltools as ct
    import numpy as np

    class Counter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(1, 2, 8, 4))

        def forward(self, x: Tensor) -> Tensor:
            self.cache[:, :, 0:1, :] = x
            return self.cache.sum(dim=2) + 0

    traced = torch.jit.trace(Counter(), torch.zeros(1, 2, 1, 4), check_trace=False)
    for name in ("float16", "int8", "uint8", "int32"):
        for target in ("iOS18", "iOS26"):
            try:
                model = ct.convert(
                    traced,
                    inputs=[ct.TensorType("x", (1, 2, 1, 4), dtype=np.float16)],
                    states=[ct.StateType(ct.TensorType(shape=(1, 2, 8, 4), dtype=getattr(np, name)), name="cache")],
                    minimum_deployment_target=getattr(ct.target, target),
                    skip_model_load=True,
                )
                kind = model.get_spec().description.state[0].type.stateType.arrayType.dataType
                yield f"{name}, {target}", f"accepted; the file says data type {kind}"
            except Exception as error:
                yield f"{name}, {target}", f"{type(error).__name__}: {str(error).splitlines()[0]}"


@app.command()
def int8(max_tokens: int = 4096) -> None:
    """What is tried with states of 8 bits, and the loss of the bundled model with keys and values rounded."""
    import logging

    logging.disable(logging.WARNING)
    table("state", "coremltools")
    for what, said in attempts():
        row(what, said)
    print()
    from ane_layers.evaluation import Evaluator
    from ane_layers.models import from_folder, running

    evaluator = Evaluator.from_folder(bundled_checkpoint(), max_tokens=max_tokens)
    model = from_folder(bundled_checkpoint(), context_length=512)
    table("keys and values", "bytes a slot, of fp16's", "loss", "KL, nats", "same token")
    found = evaluator.model(model)
    row("fp32, as they are", "-", f"{found.loss:.4f}", f"{found.kl:.1e}", f"{found.top1_agreement:.1%}")
    for bits, over in ((8, "row"), (8, "head"), (8, "channel"), (4, "row"), (4, "channel")):
        with patch.object(running, "NoCache", lambda bits=bits, over=over: Rounded(bits, over)):
            found = evaluator.model(model)
        size = bits / 16 + (1 / model.config.head_dim if over == "row" else 0)
        row(
            f"{bits} bits, a scale for each {over}",
            f"{size:.0%}",
            f"{found.loss:.4f}",
            f"{found.kl:.1e}",
            f"{found.top1_agreement:.1%}",
        )


if __name__ == "__main__":
    app()
