"""Commands that write text, and the one that looks at the machine."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from ane_layers import console
from ane_layers.cli_options import Json, Mode, ModeOption, Runtime, RuntimeOption, runtime_of


def generate(
    source: Annotated[str, typer.Argument(help="Package, model folder or Hub id; a model is converted first.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    tokenizer: Annotated[Path | None, typer.Option(help="Folder with the tokenizer; required for a package.")] = None,
    chat: Annotated[bool, typer.Option(help="Put the prompt into the folder's chat template.")] = False,
    max_new_tokens: Annotated[int, typer.Option(help="At most so many new tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[
        int | None, typer.Option(help="Keep the k most likely tokens; needs a temperature above 0.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Keep the likeliest tokens up to this share; needs a temperature above 0."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None,
    stop_id: Annotated[
        list[int] | None, typer.Option(help="Token id that ends the text, in place of the model's; repeatable.")
    ] = None,
    context: Annotated[int | None, typer.Option(help="For a model: slots of the KV cache.")] = None,
    prefill: Annotated[int | None, typer.Option(help="For a model: tokens in a prefill block.")] = None,
    guess: Annotated[
        bool, typer.Option("--guess", help="Guess tokens from the text so far and check several in a call; same text.")
    ] = False,
    mode: Mode = ModeOption.fp32,
    runtime: Runtime = RuntimeOption.interpreter,
    as_json: Json = False,
) -> None:
    """Write text with a package: prefill in blocks, then decode."""
    from ane_layers.generation import PromptLookup
    from ane_layers.hub import resolve
    from ane_layers.sampling import Sampler
    from ane_layers.text_generation import text_generator

    sampler = Sampler(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    with ExitStack() as stack:
        with console.progress() as say:
            path = Path(source) if Path(source).is_dir() else resolve(source, progress=say)
            generator = stack.enter_context(
                text_generator(
                    path,
                    tokenizer=tokenizer,
                    context=context,
                    prefill=prefill,
                    mode=mode.value,
                    runtime=runtime_of(runtime),
                    progress=say,
                )
            )
        generation = generator.generate(
            prompt,
            chat=chat,
            max_new_tokens=max_new_tokens,
            sampler=sampler,
            stop_ids=stop_id,
            guess=PromptLookup() if guess else None,
        )
        pieces = []
        for piece in generation:
            pieces.append(piece)
            if not as_json:
                print(piece, end="", flush=True)
    console.print_generation(generation, "".join(pieces), str(runtime), as_json)


def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the trial conversion.")] = False,
    as_json: Json = False,
) -> None:
    """Tell what works on this machine and what does not."""
    from ane_layers.doctor import examine

    with console.progress() as say:
        report = examine(quick=quick, progress=say)
    if as_json:
        console.print_json(report.as_dict())
    else:
        for line in report.lines():
            console.out.print(line, markup=False)
    raise typer.Exit(report.exit_status)


COMMANDS = (generate, doctor)
