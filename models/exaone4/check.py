"""Checks your own package of the real weights, and files what came of it.

    python models/exaone4/check.py path/to/EXAONE-4.0-1.2B [--context 4096] [--runtime interpreter|coreml]

For owners of the weights, which this project does not have. It converts the folder with folded and with repeated heads, counts what is
in both packages, compares the folded one with PyTorch over a few tokens, continues the 30 prompts of `prompts.txt` greedily with both
and compares the tokens. On a Mac with macOS 15, `--runtime coreml` lets Core ML run the prompts and measures tokens per second. The
result is one JSON file in `models/exaone4/results/`, ready for a pull request; it holds figures, versions and the machine's type, no
weights and no text.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ane_layers.agreement import agreement, read_prompts
from ane_layers.analysis import inspect
from ane_layers.models import Exaone4
from ane_layers.verification import verify

HERE = Path(__file__).parent


def say(line: str) -> None:
    print(line, file=sys.stderr)


def check(
    folder: Path, *, context: int, prompts: list[str], new_tokens: int, tokens: int, prefill: int, runtime: str
) -> dict[str, Any]:
    """Converts, counts, verifies and compares; the figures as they are filed."""
    run = None
    if runtime == "coreml":
        from ane_layers.coreml import coreml_runtime

        run = coreml_runtime
    with tempfile.TemporaryDirectory(prefix="exaone4-check-") as scratch:
        packages, counts = {}, {}
        for sharing in ("fold", "repeat_kv"):
            say(f"converting with head_sharing {sharing}")
            model = Exaone4.from_pretrained(folder, context_length=context, head_sharing=sharing, dtype=None)
            package = model.convert(Path(scratch) / f"{sharing}.mlpackage", prefill=prefill, progress=say)
            functions = inspect(package)["functions"]
            counts[sharing] = {
                name: {
                    key: function[key] for key in ("operations", "tile", "highest_rank", "state_writes", "weight_bytes")
                }
                for name, function in functions.items()
            }
            packages[sharing] = package.path
            del model
        verified = verify(packages["fold"], folder, tokens=tokens, progress=say)
        agreed = agreement(
            packages["fold"],
            packages["repeat_kv"],
            tokenizer=folder,
            prompts=prompts,
            new_tokens=new_tokens,
            runtime=run,
            progress=say,
        )
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "config_sha256": hashlib.sha256((folder / "config.json").read_bytes()).hexdigest(),
        "context": context,
        "runtime": runtime,
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.mac_ver()[0] or platform.release()}",
        "versions": {name: version(name) for name in ("ane-layers", "coremltools", "torch")},
        "counts": counts,
        "verify": verified.as_dict(),
        "agreement": agreed.as_dict(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="model folder in Hugging Face's format, with its tokenizer")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--prefill", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=96, help="tokens of the comparison with PyTorch")
    parser.add_argument("--prompts", type=Path, default=HERE / "prompts.txt")
    parser.add_argument("--new-tokens", type=int, default=32, help="greedy tokens for each prompt")
    parser.add_argument("--runtime", choices=["interpreter", "coreml"], default="interpreter")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder for the result")
    options = parser.parse_args()
    result = check(
        options.folder,
        context=options.context,
        prompts=read_prompts(options.prompts),
        new_tokens=options.new_tokens,
        tokens=options.tokens,
        prefill=options.prefill,
        runtime=options.runtime,
    )
    options.results.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=2) + "\n"
    file = options.results / f"{result['date'][:10]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.json"
    file.write_text(text, encoding="utf-8")
    print(json.dumps({key: result[key] for key in ("verify", "agreement")}, indent=2))
    say(f"filed as {file}; open a pull request with it")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
