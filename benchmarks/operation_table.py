"""Writes `docs/operations.md`: every operation of coremltools' registry, and what the interpreter makes of it.

    python benchmarks/operation_table.py

The registry tells since which opset an operation is there, the interpreter what it carries out. What each was tested
against stands below; a test holds the names against the tests themselves, and the file against this script.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs/operations.md"

# Operations of the registry that stay out, and why.
LEFT_OUT = {
    "_const_symbolic": "for coremltools' own tests; it is never written to a file",
    "conv_quantized": "called experimental where it is defined; how its tables and biases are stored is not",
}

# What the tests compare with: coremltools' own value of the operation, torch, or a plain program in numpy.
REFERENCES = {
    "coremltools": """
        abs acos asin atan atanh ceil cos cosh erf exp exp2 floor identity inverse log relu relu6 round rsqrt sigmoid sign sin sinh
        softplus softsign sqrt square tan tanh add sub mul maximum minimum floor_div mod real_div pow equal not_equal greater
        greater_equal less less_equal logical_and logical_or logical_xor logical_not cond quantize non_zero const
        constexpr_affine_dequantize constexpr_blockwise_shift_scale constexpr_cast constexpr_lut_to_dense
        constexpr_lut_to_sparse constexpr_sparse_blockwise_shift_scale constexpr_sparse_to_dense
    """,
    "torch": """
        silu gelu clamped_relu elu leaky_relu linear_activation prelu scaled_tanh sigmoid_hard thresholded_relu clip threshold
        softmax softplus_parametric conv conv_transpose layer_norm batch_norm instance_norm l2_norm local_response_norm linear
        scaled_dot_product_attention pixel_shuffle pixel_unshuffle lstm gru rnn affine resample max_pool avg_pool
        upsample_nearest_neighbor upsample_bilinear while_loop
    """,
}
REFERENCE = {name: source for source, names in REFERENCES.items() for name in names.split()}

# What a user of the interpreter has to know about one operation.
NOTES = {
    "classify": "gives a label and a dictionary, as `MLModel` does",
    "crop_resize": "sampling mode UNALIGN_CORNERS is refused: what it means for a box is not documented",
    "gru": "without `reset_after` the reset gate meets h before the product, as in coremltools' tests",
    "gather": "an index out of range is refused, also without `validate_indices`",
    "gather_along_axis": "an index out of range is refused",
    "gather_nd": "an index out of range is refused",
    "list_gather": "an element that was never written is refused",
    "list_read": "an element that was never written is refused",
    "scatter": "an index out of range is refused; division of integers too",
    "scatter_along_axis": "an index out of range is refused; division of integers too",
    "scatter_nd": "an index out of range is refused; division of integers too",
    "resize": "linear interpolation of integers is refused",
    "slice_update": "a slice that leaves its axis is refused",
    "while_loop": "nothing bounds the number of rounds",
} | dict.fromkeys(
    ("random_bernoulli", "random_categorical", "random_normal", "random_uniform"),
    "right distribution, never Core ML's numbers; a seed repeats them here",
)


def registry() -> dict[str, list[str]]:
    """Every core operation, with the opsets in which it is defined or defined anew."""
    logging.getLogger("coremltools").setLevel(logging.CRITICAL)
    from coremltools.converters.mil.mil.ops.registry import SSAOpRegistry

    operations: dict[str, list[str]] = {}
    for name, versions in SSAOpRegistry.core_ops.items():
        opsets: list[str] = []
        last: Any = None
        for target in sorted(versions):
            # An ML Program has no opset before iOS15.
            opset = max(target.name.lower(), "ios15").replace("ios", "iOS")
            if versions[target] is not last and opset not in opsets:
                opsets.append(opset)
            last = versions[target]
        operations[name] = opsets
    operations["write_state"] = ["iOS18"]  # in the file; coremltools' builder calls it coreml_update_state
    return operations


def supported() -> set[str]:
    """The operations that the interpreter carries out, constants included."""
    import ane_layers.interpreter.operations  # noqa: F401 - fills the table
    from ane_layers.interpreter.registry import implementations
    from ane_layers.program.constexpr import schemes

    return {*implementations(), *schemes(), "const"}


def page() -> str:
    """The text of `docs/operations.md`."""
    known, done = registry(), supported()
    rows = []
    for name in sorted(known):
        if name in done:
            note = NOTES.get(name, "")
            rows.append(f"| `{name}` | {', '.join(known[name])} | yes | {REFERENCE.get(name, 'numpy')} | {note} |")
        else:
            rows.append(f"| `{name}` | {', '.join(known[name])} | no | | {LEFT_OUT.get(name, '')} |")
    count = sum(name in done for name in known)
    return "\n".join(
        [
            "# Operations",
            "",
            f"The interpreter carries out {count} of the {len(known)} operations that coremltools' registry has for iOS15 to iOS18.",
            "A program that uses another one is refused when it is loaded, and all of them are named. A mode of an operation that",
            "coremltools does not define is refused when it runs. This table is written by `benchmarks/operation_table.py`.",
            "",
            "| operation | defined in | carried out | tested against | note |",
            "| --- | --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
