"""Commands that make, count and execute packages."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ane_layers import console
from ane_layers.cli_options import (
    CalibrationOption,
    Folder,
    HeadOption,
    HeadSharingOption,
    ImportanceOption,
    Json,
    KvOption,
    Mode,
    ModeOption,
    PromoteOption,
    RankingOption,
    RecipeOption,
    Runtime,
    RuntimeOption,
    measured_importance,
    recipe_of,
    runtime_of,
)
from ane_layers.writing import write_json

if TYPE_CHECKING:
    from ane_layers.program import Package


def convert(
    folder: Folder,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="Package to write, ending in .mlpackage; with several chunks, a folder for them."
        ),
    ],
    context: Annotated[
        int | None, typer.Option(help="Slots of the KV cache; 4096, or the model's longest if that is less.")
    ] = None,
    prefill: Annotated[
        list[int] | None,
        typer.Option(help="Tokens in a prefill block; 64. Repeatable, for functions of several sizes."),
    ] = None,
    bucket: Annotated[
        list[int] | None, typer.Option(help="Add functions that read only so many slots of the cache; repeatable.")
    ] = None,
    head_sharing: Annotated[
        HeadSharingOption, typer.Option(help="How query heads share KV heads.")
    ] = HeadSharingOption.fold,
    kv: Annotated[KvOption, typer.Option(help="When the cache is written.")] = KvOption.in_place,
    head: Annotated[
        HeadOption, typer.Option(help="What a call gives: logits, the likeliest token, or the likeliest ones.")
    ] = HeadOption.logits,
    top_k: Annotated[int | None, typer.Option(help="With --head top_k: how many; 8.")] = None,
    verify_tokens: Annotated[
        int | None, typer.Option(help="Add a function that checks so many guessed tokens at once.")
    ] = None,
    fuse: Annotated[bool, typer.Option(help="Join projections that read the same input.")] = True,
    head_pieces: Annotated[int | None, typer.Option(help="Convolutions that the output head is split into.")] = None,
    all_logits: Annotated[bool, typer.Option(help="Let prefill return every position's logits.")] = False,
    duplicate_tied: Annotated[bool, typer.Option(help="Store a table shared by embedding and head twice.")] = False,
    chunks: Annotated[
        int | None, typer.Option(help="Packages that the layers are divided into; as the recipe says, or 1.")
    ] = None,
    chunk_limit: Annotated[
        float | None, typer.Option(help="MB of weights that a package may have, in place of --chunks.")
    ] = None,
    head_apart: Annotated[bool, typer.Option(help="Put the output head into a package of its own.")] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Keep finished chunks of an interrupted conversion in OUTPUT.unfinished, and go on from those that are there.",
        ),
    ] = False,
    recipe: RecipeOption = None,
    ranking: RankingOption = None,
    promote: PromoteOption = None,
    importance: ImportanceOption = False,
    calibration: CalibrationOption = None,
    report: Annotated[
        Path | None, typer.Option(help="With a recipe: write bits, bytes and error of every tensor to this JSON file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Convert a model to a Core ML package with functions `decode` and `prefill`, and check the result."""
    if top_k is not None and head is not HeadOption.top_k:
        raise ValueError(f"--top-k {top_k} needs --head top_k")
    from ane_layers.conversion.folder import Chunking, Loading, check_output, convert_folder
    from ane_layers.hub import resolve
    from ane_layers.models import longest_context

    chosen = recipe_of(recipe, ranking, promote, importance, calibration, report)
    limit = None if chunk_limit is None else int(chunk_limit * 1e6)
    chunking = Chunking(chunks=chunks, limit=limit, head_apart=head_apart).of(chosen)
    check_output(output, chunking, chosen, resume=resume)  # before anything is loaded
    started = time.monotonic()
    with console.progress() as say, _notes_told():
        say(f"loading {folder}")
        source = resolve(folder, progress=say)
        slots = min(4096, longest_context(source)) if context is None else context
        blocks = prefill or [min(64, slots)]
        model_options: dict[str, Any] = {
            "head_sharing": head_sharing.value,
            "head_pieces": head_pieces,
            "kv": kv.value,
            "block_size": max(*blocks, verify_tokens or 1),
        }
        result = convert_folder(
            source,
            output,
            Loading(context_length=slots, fuse=fuse, options=model_options),
            chunking=chunking,
            recipe=chosen,
            ranking=ranking,
            importance=measured_importance(source, importance, calibration, say),
            prefill=blocks,
            contexts=bucket or (),
            head=head.value,
            top_k=top_k or 8,
            verify=verify_tokens,
            all_logits=all_logits,
            duplicate_tied=duplicate_tied,
            resume=resume,
            progress=say,
        )
    compression = result.compression
    if compression is not None and report is not None:
        write_json(compression.report.as_dict(), report)
    console.err.print(f"{output}: written and checked in {time.monotonic() - started:.0f} s", markup=False)
    inspection = _inspect_all(result.packages, several=chunking.several)
    if compression is None:
        _inspection(inspection, as_json)
    elif as_json:
        console.print_json(inspection | {"compression": compression.report.as_dict()})
    else:
        _inspection(inspection, False)
        console.out.print()
        console.print_compression(compression.report, compression.plan)


@contextlib.contextmanager
def _notes_told() -> Iterator[None]:
    """Prints what an error's notes say: of finished chunks that an interrupted or failed conversion keeps (`--resume`)."""
    try:
        yield
    except BaseException as error:
        for note in getattr(error, "__notes__", ()):
            if isinstance(error, KeyboardInterrupt):
                console.fail(f"interrupted; {note}", console.INTERRUPTED)
            console.err.print(note, markup=False)
        raise


def inspect(
    package: Annotated[Path, typer.Argument(help="An .mlpackage, ours or not; or a folder of chunks.")],
    as_json: Json = False,
) -> None:
    """Count what is in a package, from its own files."""
    from ane_layers.chunks import is_chunked, open_packages
    from ane_layers.program import Package

    several = is_chunked(package)
    packages = open_packages(package) if several else [Package.open(package)]
    _inspection(_inspect_all(packages, several=several), as_json)


def _inspect_all(packages: Sequence[Package], *, several: bool) -> dict[str, Any]:
    """The figures of a package, or those of each chunk under its file name."""
    from ane_layers.analysis import inspect as inspect_package

    found = {package.path.name: inspect_package(package) for package in packages}
    return {"chunks": found} if several else next(iter(found.values()))


def _inspection(inspection: dict[str, Any], as_json: bool) -> None:
    if as_json:
        console.print_json(inspection)
        return
    for name, part in inspection.get("chunks", {"": inspection}).items():
        if name:
            console.out.print(f"{name}:", markup=False)
        console.print_inspection(part)


def verify(
    package: Annotated[Path, typer.Argument(help="Package that `convert` wrote.")],
    folder: Annotated[Path, typer.Argument(help="Model folder it was converted from.")],
    tokens: Annotated[
        str | None,
        typer.Option(help="How many tokens (256 by default, at most the context), or a file of token ids."),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="Text to run; the bundled held-out text by default, random ids without a tokenizer."),
    ] = None,
    mode: Mode = ModeOption.fp32,
    seed: Annotated[int | None, typer.Option(help="Run random tokens of this seed.")] = None,
    gate: Annotated[
        float | None,
        typer.Option(
            help="Least signal-to-noise ratio in dB, below which the exit status is 1; 40 in fp32 and 25 in fp16 by default."
        ),
    ] = None,
    positions: Annotated[bool, typer.Option("--positions", help="Print the ratio of every position too.")] = False,
    findings: Annotated[
        bool, typer.Option("--findings", help="List on stderr where numbers leave fp16, underflow included.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Execute a package and compare its logits with PyTorch's."""
    from ane_layers.token_source import DEFAULT_COUNT, file_tokens, text_tokens
    from ane_layers.verification import verify as verify_package

    with console.progress() as say:
        count = int(tokens) if tokens is not None and tokens.isascii() and tokens.lstrip("-").isdigit() else None
        ids: int | list[int] | None = count
        if text is not None:
            ids = text_tokens(text, folder, DEFAULT_COUNT if count is None else count)
        elif tokens is not None and count is None:
            ids = file_tokens(tokens)
        result = verify_package(package, folder, tokens=ids, mode=mode.value, seed=seed, progress=say)
    console.print_verification(result, positions=positions, findings=findings, as_json=as_json)
    # A swapped head or a wrong scale costs far more than rounding does.
    least = gate if gate is not None else 40.0 if mode is ModeOption.fp32 else 25.0
    if not result.snr_db >= least:
        console.fail(f"{package}: {result.snr_db:.1f} dB is below the gate of {least:g} dB")


def run(
    package: Annotated[Path, typer.Argument(help="An .mlpackage, ours or not.")],
    inputs: Annotated[
        list[str] | None, typer.Option("--input", help="NAME=FILE.npy, an array for an input; repeatable.")
    ] = None,
    function: Annotated[
        str | None, typer.Option(help="Function to run; the package's default one if not given.")
    ] = None,
    output_dir: Annotated[Path | None, typer.Option(help="Write each output as NAME.npy into this folder.")] = None,
    mode: Mode = ModeOption.fp32,
    findings: Annotated[bool, typer.Option("--findings", help="List on stderr where numbers leave fp16.")] = False,
    as_json: Json = False,
) -> None:
    """Run one function of a package on arrays from files, with states that are zero."""
    from ane_layers.running import parse_inputs
    from ane_layers.running import run as run_package

    arrays = parse_inputs(inputs or [])
    summary, found = run_package(
        package, arrays, function=function, mode=mode.value, output_dir=output_dir, diagnose=findings
    )
    (console.print_json if as_json else console.print_outputs)(summary)
    console.print_findings(found)


def agree(
    first: Annotated[Path, typer.Argument(help="A package.")],
    second: Annotated[Path, typer.Argument(help="Another package of the same model.")],
    tokenizer: Annotated[Path, typer.Option(help="Folder with the model's tokenizer.")],
    prompts: Annotated[Path, typer.Option(help="Text file, one prompt a line.")],
    new_tokens: Annotated[int, typer.Option(help="Greedy tokens to compare for each prompt.")] = 32,
    mode: Mode = ModeOption.fp32,
    runtime: Runtime = RuntimeOption.interpreter,
    as_json: Json = False,
) -> None:
    """Continue prompts greedily with two packages and compare the tokens."""
    from ane_layers.agreement import agreement, read_prompts

    with console.progress() as say:
        result = agreement(
            first,
            second,
            tokenizer=tokenizer,
            prompts=read_prompts(prompts),
            new_tokens=new_tokens,
            mode=mode.value,
            runtime=runtime_of(runtime),
            progress=say,
        )
    console.print_agreement(result, as_json)
    if result.differences:
        console.fail(f"{len(result.differences)} of {result.prompts} prompts differ")


COMMANDS = (convert, inspect, verify, run, agree)
