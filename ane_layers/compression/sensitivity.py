"""Ranks a model's layers and modules by the harm that compressing each alone does to its output."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

import joblib
import torch
from torch import Tensor

import ane_layers
from ane_layers.compression.calibration import calibration_tokens, has_tokenizer
from ane_layers.compression.harm import Job, Part, PartHarm, measure, parts, release
from ane_layers.compression.rank_agreement import default_top, rank_correlation, top_overlap
from ane_layers.compression.ranking import ModuleHarm, Ranking, model_facts
from ane_layers.compression.setting import Setting
from ane_layers.compression.units import units
from ane_layers.journal import Journal, folder_facts
from ane_layers.models import FAMILIES, CausalLM, longest_context
from ane_layers.models.config import load_config

Method = Literal["kl", "fisher", "both"]

# Tokens times draws of `fisher`: it keeps so many gradients of each layer's input, 1 GB for 30 layers of 2048 channels.
_DRAWN_TOKENS = 4096


def sensitivity(
    folder: str | Path,
    *,
    method: Method = "kl",
    settings: Sequence[Setting] = (Setting(bits=4, group_size=16),),
    text_file: str | Path | None = None,
    count: int = 4,
    length: int = 128,
    tokens: Tensor | None = None,
    samples: int | None = None,
    seed: int = 0,
    n_jobs: int | None = None,
    journal: str | Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> Ranking:
    """Measures the harm of compressing each layer, and each module, alone.

    `"kl"` compresses a part, runs the model from there on, and takes the divergence from the original's next-token distribution.
    `"fisher"` predicts it from gradients of the original (see `ane_layers.compression.fisher`), which costs little for many settings.

    Parts go through `joblib`: on several processes with `n_jobs`, or wherever a `joblib.parallel_config` around the call sends them (a
    dask or ray cluster that sees the same folder). Each process holds the model in fp32.

    Args:
        folder: in Hugging Face's format.
        method: `"both"` gives what `"kl"` does, and how far `"fisher"` agrees.
        settings: that modules are measured at; whole layers at the first.
        text_file: calibration text; by default the bundled one, or random ids for a folder without tokenizer.
        count: of windows of text; see `calibration_tokens`.
        length: of a window, in tokens.
        tokens: windows of ids in place of text.
        samples: draws of `fisher` for each position; by default 4096 over all tokens, at least one for each.
        seed: of the draws.
        n_jobs: as joblib takes it. None is one, in this process, unless a `joblib.parallel_config` says otherwise.
        journal: file that keeps finished parts; a run that finds its own goes on from it. `write_ranking` removes it.
        progress: called with a line of text when a part is finished.

    Shape:
        - tokens: int `[n, S]`

    Raises:
        ValueError: for a folder, text or setting that cannot be used, a journal of another run, or a harm that is no number.
    """
    say = progress or (lambda line: None)
    if method not in get_args(Method):
        raise ValueError(f"method must be one of {', '.join(get_args(Method))}, got {method!r}")
    settings = tuple(dict.fromkeys(settings))
    if not settings or any(setting.scheme == "fp16" for setting in settings):
        raise ValueError(f"settings must compress, got {', '.join(map(str, settings)) or 'none'}")
    if tokens is None:
        if text_file is None and not has_tokenizer(folder):
            say(f"{folder} has no tokenizer.json: ranking on random token ids, which says little about text")
        tokens = calibration_tokens(folder, text_file, count=count, length=length)
    model = _outline(folder, tokens)
    for unit in units(model):
        for path, weight in unit.weights.items():
            for setting in settings:
                setting.fitted(path, tuple(weight.shape))  # refused now rather than after an hour
    methods = ("kl", "fisher") if method == "both" else (method,)
    samples = max(1, _DRAWN_TOKENS // tokens.numel()) if samples is None else samples
    run = {
        "ane_layers": ane_layers.__version__,
        "model": folder_facts(Path(folder)),
        "tokens": [list(tokens.shape), hashlib.sha256(tokens.to(torch.int64).numpy().tobytes()).hexdigest()],
        "settings": [setting.key for setting in settings],
        "methods": list(methods),
        "samples": samples if "fisher" in methods else None,
        "seed": seed if "fisher" in methods else None,
    }
    job = Job(
        key=hashlib.sha256(json.dumps([str(folder), run]).encode()).hexdigest(),
        folder=str(folder),
        tokens=tokens.to(torch.int64).numpy(),
        settings=settings,
        methods=methods,
        samples=samples,
        seed=seed,
    )
    kept = None if journal is None else Journal(Path(journal), run)
    harms = _measured(job, parts(model), n_jobs, kept, say)
    first, *others = (_ranking(name, model, job, harms) for name in methods)
    return replace(first, agreement=agreement(first, others[0])) if others else first


def _outline(folder: str | Path, tokens: Tensor) -> CausalLM:
    """The model as it will be loaded, without its weights."""
    longest_context(folder)  # refuses an unknown family
    family = FAMILIES[load_config(folder)[0]["model_type"]]
    config = family.config_class.from_pretrained(folder)
    if tokens.ndim != 2 or tokens.numel() == 0 or tokens.min() < 0 or tokens.max() >= config.vocab_size:
        raise ValueError(
            f"tokens must be windows [n, S] of ids below {config.vocab_size}, got shape {list(tokens.shape)}"
        )
    with torch.device("meta"):
        model = family(config, context_length=tokens.shape[1])
        model.fuse()
    return model


def _measured(
    job: Job, wanted: Sequence[Part], n_jobs: int | None, journal: Journal | None, say: Callable[[str], None]
) -> list[PartHarm]:
    """Harms of all parts, from the journal or anew, in the order wanted."""
    harms = {} if journal is None else {data["part"]: PartHarm.from_dict(data) for data in journal.finished}
    left = [part for part in wanted if part not in harms]
    if journal is not None and harms:
        say(f"{len(harms)} of {len(wanted)} parts are in {journal.path}")
    if left:
        keys = ", ".join(setting.key for setting in job.settings)
        say(f"measuring {len(left)} parts (layers, head, embedding) on {job.tokens.size} tokens at {keys}")
    try:
        for harm in _results(job, left, n_jobs):
            _check(harm)
            harms[harm.part] = harm
            if journal is not None:
                journal.add(harm.as_dict())
            say(f"{_described(harm, job)} ({len(harms)} of {len(wanted)})")
    finally:
        release()
    return [harms[part] for part in wanted]


def _results(job: Job, wanted: Sequence[Part], n_jobs: int | None) -> Iterator[PartHarm]:
    tasks = [joblib.delayed(measure)(job, part) for part in wanted]
    try:
        parallel = joblib.Parallel(n_jobs=n_jobs, return_as="generator_unordered")
    except ValueError:
        # A backend that gives its results all at once, such as ray's: rounds, so that an interrupt loses no more than one.
        parallel, size = joblib.Parallel(n_jobs=n_jobs), joblib.effective_n_jobs(n_jobs)
        for start in range(0, len(tasks), size):
            yield from parallel(tasks[start : start + size])
    else:
        yield from parallel(tasks)


def _check(harm: PartHarm) -> None:
    for modules in harm.modules.values():
        for name, by_setting in modules.items():
            for key, value in by_setting.items():
                if not math.isfinite(value):
                    raise ValueError(f"{name}: the harm at {key} is {value}; the model's output is no number")


def _described(harm: PartHarm, job: Job) -> str:
    key = job.settings[0].key
    values = harm.layer or {method: modules[str(harm.part)][key] for method, modules in harm.modules.items()}
    name = f"layer {harm.part}" if harm.layer else harm.part
    return f"{name} at {key}: " + ", ".join(f"{method} {value:.3g}" for method, value in values.items())


def _ranking(method: str, model: CausalLM, job: Job, harms: Sequence[PartHarm]) -> Ranking:
    layers = {unit.name: unit.layer for unit in units(model)}
    return Ranking(
        method=method,
        model=model_facts(model.config),
        setting=job.settings[0].key,
        tokens=job.tokens.size,
        layers={harm.part: harm.layer[method] for harm in harms if isinstance(harm.part, int)},
        modules=tuple(
            ModuleHarm(name, layers[name], by_setting)
            for harm in harms
            for name, by_setting in harm.modules[method].items()
        ),
    )


def agreement(first: Ranking, second: Ranking) -> dict[str, float]:
    """How far two rankings of a model agree, at the first one's setting.

    Returns:
        `layers`, `modules`: Spearman's rank correlation, left out where either ranking makes no difference. `top`: share of the
        `top_layers` most harmed layers that both name, as many of the layers as `top8` promotes of 30.
    """
    modules = [{module.name: module.harm[first.setting] for module in ranking.modules} for ranking in (first, second)]
    count = default_top(len(first.layers))
    found = {
        "layers": rank_correlation(first.layers, second.layers),
        "modules": rank_correlation(*modules),
        "top": top_overlap(first.layers, second.layers, count),
        "top_layers": float(count),
    }
    return {name: value for name, value in found.items() if math.isfinite(value)}


def write_ranking(ranking: Ranking, path: str | Path, *, journal: str | Path | None = None) -> None:
    """Writes a ranking as JSON, whole or not at all, and then removes the journal of its run.

    Raises:
        ValueError: if the file cannot be written.
    """
    path = Path(path)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_text(json.dumps(ranking.as_dict(), indent=2) + "\n", encoding="utf-8")
        os.replace(scratch, path)
    except OSError as error:
        raise ValueError(f"{path}: cannot be written ({error.strerror})") from error
    finally:
        scratch.unlink(missing_ok=True)
    if journal is not None:
        Path(journal).unlink(missing_ok=True)


def check_output(output: str | Path) -> None:
    """Whether a ranking can be written there, before an hour is spent on it. Raises `ValueError`."""
    output = Path(output)
    if not output.parent.is_dir():
        raise ValueError(f"{output.parent}: is no folder, so {output.name} cannot be written there")
    if output.is_dir():
        raise ValueError(f"{output}: is a folder; name a file")


def journal_path(output: str | Path) -> Path:
    """Where the journal of a ranking that will be written to `output` lies."""
    output = Path(output)
    return output.with_name(f"{output.name}.partial")
