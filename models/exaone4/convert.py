"""Converts EXAONE 4.0 1.2B; a starting point for a port of your own.

    python models/exaone4/convert.py path/to/EXAONE-4.0-1.2B -o exaone4.mlpackage

The folder comes from LG AI Research, under LG's licence. `ane-layers convert` does the same with more options.
"""

from __future__ import annotations

import argparse
import sys

from ane_layers.models import Exaone4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="model folder in Hugging Face's format")
    parser.add_argument("-o", "--output", default="exaone4.mlpackage")
    parser.add_argument("--context", type=int, default=4096, help="slots of the KV cache")
    parser.add_argument("--head-sharing", choices=["fold", "repeat_kv"], default="fold")
    options = parser.parse_args()

    # dtype=None keeps bf16 and maps the file: the weights go straight into the package, once, as fp16.
    model = Exaone4.from_pretrained(
        options.folder, context_length=options.context, head_sharing=options.head_sharing, dtype=None
    )
    model.convert(options.output, prefill=64, progress=lambda line: print(line, file=sys.stderr))


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
