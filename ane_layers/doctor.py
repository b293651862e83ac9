"""Says what works on this machine before a long run finds it out: versions, native libraries, room, and a trial conversion."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

DISTRIBUTION = "ane-layers"
CONVERT, COREML, CORE_AI = "convert", "generate --runtime coreml", "export-core-ai"
READING = ("inspect", "analyze", "compare")
INTERPRETER = ("verify", "run", "agree", "fold", "evaluate PACKAGE", "generate --runtime interpreter")
# Models from folders in PyTorch alone.
WEIGHTS = ("evaluate FOLDER", "sensitivity", "allocate", "recipes")
PACKAGES = (CONVERT, *READING, *INTERPRETER, COREML)
ABILITIES = (CONVERT, *READING, *INTERPRETER, *WEIGHTS, COREML, CORE_AI)
# EXAONE 4.0 1.2B has 1.28 G weights: 2.6 GB to download and as much to write; 5.1 GB in fp32, in which verification computes.
DISK_GB, MEMORY_GB = 5.2, 5.2
# Module and class of coremltools' native libraries, and what goes wrong without them.
NATIVE = {
    "libmilstoragepython": (
        "_BlobStorageWriter",
        "a conversion would end with 'BlobWriter not loaded' (coremltools issue 2361)",
    ),
    "libmodelpackage": ("ModelPackage", "a conversion could not save its package"),
}
NUMPY_FAILS = "the converter's int cast fails on one-element arrays from numpy 2.4 on (coremltools issue 2633)"
REINSTALL = "install a coremltools wheel that was built for this Python and platform (`pip install --force-reinstall coremltools`)"

Status = Literal["ok", "warning", "problem", "absent"]


@dataclass(frozen=True)
class Row:
    """One finding.

    Attributes:
        name: what was looked at.
        found: version, size or answer.
        status: `absent` is what this system has not, and need not have.
        note: what it means, and what to do; may be empty.
        prevents: those of `ABILITIES` that do not work because of it.
    """

    name: str
    found: str
    status: Status = "ok"
    note: str = ""
    prevents: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    rows: tuple[Row, ...]

    def reasons(self, ability: str) -> list[str]:
        """Why something does not work, one line each; empty if it does."""
        return [f"{row.name}: {row.note or row.found}" for row in self.rows if ability in row.prevents]

    @property
    def exit_status(self) -> int:
        """1 if nothing can be converted here, else 0."""
        return 1 if self.reasons(CONVERT) else 0

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON: `{"rows": [...], "works": {ability: bool}, "reasons": {ability: [line]}}`."""
        reasons = {ability: self.reasons(ability) for ability in ABILITIES}
        works = {ability: not reasons[ability] for ability in ABILITIES}
        return {"rows": [asdict(row) for row in self.rows], "works": works, "reasons": reasons}

    def lines(self) -> Iterator[str]:
        """For a terminal: the findings, then what works."""
        width = max(len(row.name) for row in self.rows)
        for row in self.rows:
            yield f"{row.status:<7}  {row.name:<{width}}  {row.found}{f': {row.note}' if row.note else ''}"
        yield ""
        for ability in ABILITIES:
            reasons = self.reasons(ability)
            yield f"{ability}: {'does not work: ' + '; '.join(reasons) if reasons else 'works'}"


def examine(*, quick: bool = False, folder: str | Path = ".", progress: Callable[[str], None] | None = None) -> Report:
    """Looks at everything, and changes nothing.

    Args:
        quick: leaves out the trial conversion, which takes a few seconds.
        folder: where packages are going to be written; its file system is asked for free space.
        progress: called with a line of text at each step.
    """
    say = progress or (lambda line: None)
    say("reading versions")
    rows = [_python(), _system(), *_dependencies(), *_room(Path(folder))]
    say("loading coremltools")
    rows += [*_native_libraries(), _core_ml(), _core_ai()]
    tried = False
    if not quick and not Report(tuple(rows)).exit_status:
        say("converting and running a small layer")
        trial = _trial()
        rows += trial
        tried = all(row.status == "ok" for row in trial)
    rows += _torch_tested(tried)
    return Report(tuple(rows))


def _python() -> Row:
    from packaging.specifiers import SpecifierSet

    found = platform.python_version()
    try:
        wanted = importlib.metadata.metadata(DISTRIBUTION)["Requires-Python"] or ""
    except importlib.metadata.PackageNotFoundError:
        return Row("Python", found, "warning", f"{DISTRIBUTION} is not installed, so what it requires is not known")
    if not SpecifierSet(wanted).contains(found, prereleases=True):
        return Row("Python", found, "problem", f"{DISTRIBUTION} requires {wanted}", ABILITIES)
    return Row("Python", found)


def _system() -> Row:
    name = f"macOS {platform.mac_ver()[0]}" if sys.platform == "darwin" else f"{platform.system()} {platform.release()}"
    return Row("system", f"{name}, {platform.machine()}")


def _dependencies() -> Iterator[Row]:
    """Installed versions against the ranges that the package declares."""
    from packaging.requirements import Requirement

    try:
        declared = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return
    for requirement in map(Requirement, declared):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        advice = f"pip install '{requirement.name}{requirement.specifier}'"
        try:
            found = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            yield Row(requirement.name, "not installed", "problem", advice, ABILITIES)
            continue
        if requirement.specifier.contains(found, prereleases=True):
            yield Row(requirement.name, found)
        elif requirement.name == "numpy":
            yield Row("numpy", found, "problem", f"{advice}; {NUMPY_FAILS}", (CONVERT,))
        else:
            # Another version may well work; that is for the trial to find out.
            yield Row(requirement.name, found, "warning", f"not a version this was made for; {advice}")


def _native_libraries() -> Iterator[Row]:
    from ane_layers.conversion.quiet import quiet_coremltools

    with quiet_coremltools():
        try:
            importlib.import_module("coremltools")
        except Exception as error:
            yield Row("coremltools import", "fails", "problem", _short(error), PACKAGES)
            return
        for library, (name, without) in NATIVE.items():
            try:
                getattr(importlib.import_module(f"coremltools.{library}"), name)
            except Exception as error:
                note = f"{without}; {REINSTALL} ({_short(error)})"
                yield Row(library, "cannot be loaded", "problem", note, (CONVERT,))
            else:
                yield Row(library, "loaded")


def _core_ml() -> Row:
    """Whether packages can be run by Core ML itself. States need macOS 15."""
    if sys.platform != "darwin":
        return Row("Core ML", "none", "absent", f"needs macOS 15 or later, this is {platform.system()}", (COREML,))
    version = platform.mac_ver()[0]
    if int(version.split(".")[0] or 0) < 15:
        return Row("Core ML", f"of macOS {version}", "problem", "states need macOS 15 or later", (COREML,))
    try:
        importlib.import_module("coremltools.libcoremlpython")
    except Exception as error:
        return Row("Core ML", "cannot be called", "problem", f"{REINSTALL} ({_short(error)})", (COREML,))
    return Row("Core ML", f"of macOS {version}")


def _core_ai() -> Row:
    """Whether its optional packages are there; whether they load, the command itself finds out."""
    from ane_layers.core_ai.packages import EXTRA

    try:
        return Row("Core AI", importlib.metadata.version("coreai-torch"))
    except importlib.metadata.PackageNotFoundError:
        return Row("Core AI", "not installed", "absent", f"an optional extra: {EXTRA}", (CORE_AI,))


def _room(folder: Path) -> Iterator[Row]:
    existing = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.is_dir())
    disk = shutil.disk_usage(existing).free / 1e9
    yield _at_least("free disk", disk, DISK_GB, "downloading and converting EXAONE 4.0 1.2B")
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    except (ValueError, OSError, AttributeError):
        return  # not every system tells
    yield _at_least("memory in all", memory, MEMORY_GB, "verifying EXAONE 4.0 1.2B")


def _at_least(name: str, found: float, wanted: float, purpose: str) -> Row:
    if found < wanted:
        return Row(name, f"{found:,.1f} GB", "warning", f"{purpose} needs {wanted} GB or more; small models do not")
    return Row(name, f"{found:,.1f} GB")


def _trial() -> Iterator[Row]:
    """The real thing, small: one layer through torch, converter, package, reader, analysis and interpreter."""
    import torch

    from ane_layers.analysis import analyze
    from ane_layers.conversion import convert
    from ane_layers.interpreter import MLProgram
    from ane_layers.layers import Linear

    layer = Linear(64, 32)
    torch.nn.init.normal_(layer.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    x = torch.linspace(-1, 1, 64).reshape(1, 64, 1, 1).half().float()
    with tempfile.TemporaryDirectory(prefix="ane_layers.") as folder:
        try:
            package = convert(layer, Path(folder) / "trial.mlpackage", example_inputs={"x": x})
        except Exception as error:
            yield Row("trial conversion", "failed", "problem", _short(error), (CONVERT,))
            return
        yield Row("trial conversion", "passed")
        try:
            analyze(package)
        except Exception as error:
            yield Row("trial analysis", "failed", "problem", _short(error), READING)
        else:
            yield Row("trial analysis", "passed")
        try:
            actual = torch.from_numpy(MLProgram(package).predict({"x": x.numpy()})["output"])
        except Exception as error:
            yield Row("trial run", "failed", "problem", _short(error), INTERPRETER)
            return
    with torch.no_grad():
        difference = float((actual - layer(x)).abs().max())
    if difference < 0.01:
        yield Row("trial run", "passed")
    else:
        note = f"the interpreter's result differs from PyTorch's by {difference:.3g}"
        yield Row("trial run", "wrong", "problem", note, (CONVERT, *INTERPRETER))


def _torch_tested(tried: bool) -> Iterator[Row]:
    """coremltools warns of every newer torch. Where the trial has passed there is nothing left to warn of."""
    import torch
    from packaging.version import Version

    newest = getattr(sys.modules.get("coremltools._deps"), "_TORCH_MAX_VERSION", None)
    if newest is None or Version(torch.__version__).release <= Version(newest).release:
        return
    note = f"newer than {newest}, the newest that coremltools was tested with; "
    note += "the trial passed" if tried else "a trial conversion (without --quick) tells whether that matters"
    yield Row("torch for coremltools", torch.__version__, "ok" if tried else "warning", note)


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}{'…' if len(text) > 200 else ''}" if text else type(error).__name__
