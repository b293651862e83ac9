"""The steps of stock coremltools from our model's graph to a compressed package with two functions, each a command of its own.

    python benchmarks/stock_conversion.py convert FOLDER decode.mlpackage --tokens 1
    python benchmarks/stock_conversion.py convert FOLDER prefill.mlpackage --tokens 64
    python benchmarks/stock_conversion.py merge decode.mlpackage prefill.mlpackage both.mlpackage
    python benchmarks/stock_conversion.py palettize FOLDER decode.mlpackage smaller.mlpackage --ranking ranking.json

For `conversion.py`, which measures them. `convert` is the same graph as ours with its weights in it, `torch.jit.trace` and plain
`ct.convert`; `merge` is `save_multifunction`; `palettize` gives every weight the setting that our recipe `top8` gives it.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from ane_layers.conversion.quiet import quiet_coremltools

app = typer.Typer(add_completion=False, help=__doc__)
KINDS = ("lut4g16", "lut8", "head", "embedding")


@app.command()
def convert(
    folder: Path,
    output: Path,
    tokens: Annotated[int, typer.Option(help="S: 1 is decode.")] = 1,
    context: Annotated[int, typer.Option(help="T.")] = 4096,
) -> None:
    """Traces and converts one function, and saves it."""
    with quiet_coremltools():
        import coremltools as ct
        import numpy as np
        import torch

        from ane_layers.models import Exaone4

        model = Exaone4.from_pretrained(folder, context_length=context, block_size=tokens)

        class Step(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = model
                # The converter looks states up among the outermost module's buffers.
                for name in ("key", "value"):
                    buffer = model.cache._buffers.pop(name)
                    model.cache.__dict__[name] = buffer
                    self.register_buffer(f"{name}Cache", buffer)

            def forward(self, ids: torch.Tensor, position: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
                return self.model(ids, position, mask, last_only=True)

        shapes = {"inputIds": (1, tokens), "position": (1,), "causalMask": (1, 1, tokens, context)}
        types = {"inputIds": np.int32, "position": np.int32, "causalMask": np.float16}
        examples = tuple(
            torch.zeros(shape, dtype=torch.float32 if types[name] is np.float16 else torch.int32)
            for name, shape in shapes.items()
        )
        states = [
            ct.StateType(ct.TensorType(shape=tuple(getattr(model.cache, name).shape), dtype=np.float16), f"{name}Cache")
            for name in ("key", "value")
        ]
        with torch.no_grad():
            traced = torch.jit.trace(Step().eval(), examples, check_trace=False)
        converted = ct.convert(
            traced,
            inputs=[ct.TensorType(name, shape, dtype=types[name]) for name, shape in shapes.items()],
            outputs=[ct.TensorType("logits", dtype=np.float16)],
            states=states,
            minimum_deployment_target=ct.target.iOS18,
            skip_model_load=True,
        )
        converted.save(str(output))


@app.command()
def merge(decode: Path, prefill: Path, output: Path) -> None:
    """Joins two packages as functions of one."""
    with quiet_coremltools():
        import coremltools as ct

        functions = ct.utils.MultiFunctionDescriptor()
        for path, name in ((decode, "decode"), (prefill, "prefill")):
            functions.add_function(str(path), "main", name)
        functions.default_function_name = "decode"
        ct.utils.save_multifunction(functions, str(output))


@app.command()
def palettize(
    folder: Path,
    package: Path,
    output: Path,
    ranking: Annotated[Path, typer.Option()],
    promote: Annotated[int, typer.Option(help="Layers at 8 bits.")] = 1,
) -> None:
    """Compresses each kind of weight apart, saves, and prints the seconds of each kind as JSON."""
    with quiet_coremltools():
        import coremltools as ct
        from coremltools.optimize.coreml import OptimizationConfig, palettize_weights

        kinds = configs(folder, package, ranking, promote)
        model = ct.models.MLModel(str(package), skip_model_load=True)
        found = {}
        # A call reads the program and writes it again, whatever it compresses: taken off every kind, counted once.
        for kind, own in {"nothing": {}, **kinds}.items():
            wall, cpu = time.monotonic(), time.process_time()
            model = palettize_weights(model, OptimizationConfig(op_name_configs=own))
            found[kind] = {"seconds": time.monotonic() - wall, "cpu_seconds": time.process_time() - cpu}
        model.save(str(output))
    print(json.dumps(found))


def configs(folder: Path, package: Path, ranking: Path, promote: int) -> dict[str, dict[str, Any]]:
    """Kind → name of a constant in the package → coremltools' setting for it, as `top8` stores that weight."""
    from coremltools.optimize.coreml import OpPalettizerConfig

    from ane_layers.compression import Ranking, load_recipe, make_plan
    from ane_layers.compression.preparation import read_recipe
    from ane_layers.models import Exaone4
    from ane_layers.program import Package

    model = Exaone4.open(folder, context_length=64)
    plan = make_plan(model, read_recipe(load_recipe("top8"), promote=promote), ranking=Ranking.load(ranking))
    operations = Package.open(package).function("main").block.walk()
    constants = [operation.name for operation in operations if operation.type == "const"]
    kinds: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
    for path, setting in plan.settings.items():
        place = path.removesuffix(".weight").replace(".", "_")
        name = next(constant for constant in constants if constant.startswith(f"model_{place}_weight"))
        kind = {"lm_head": "head", "model.embed_tokens": "embedding"}.get(plan.units[path], setting.key)
        grouped = {"granularity": "per_grouped_channel", "group_size": setting.group_size} if setting.group_size else {}
        kinds[kind][name] = OpPalettizerConfig(mode="kmeans", nbits=setting.bits, weight_threshold=0, **grouped)
    return kinds


if __name__ == "__main__":
    app()
