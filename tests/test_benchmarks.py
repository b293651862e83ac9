"""The command that runs the benchmarks: what a process took, the registry, the page, and one section from end to end."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import conversion
import graph
from measure import measured
from render_benchmarks import page
from sections import CHECKPOINT, HERE, SECTIONS

ROW = {
    "asked": "default",
    "method": "kl",
    "setting": "lut4g16",
    "tokens": 512,
    "layers": 30,
    "seconds": 61.4,
    "cpu_seconds": 118.0,
    "peak_gb": 5.25,
}
ENTRY = {
    "command": ["python", "benchmarks/sensitivity.py", CHECKPOINT],
    "quick": False,
    "date": "2024-02-29",
    "versions": {"Python": "3.11.9", "torch": "2.13.0"},
    "machine": {"system": "Linux x86_64", "cpu": "Some CPU", "cores": 2, "memory_gb": 16.0},
    "seconds": 300.0,
    "result": [ROW],
}


def python(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code]


def test_a_small_childs_peak_is_not_that_of_its_parent_or_of_another_child() -> None:
    held = bytearray(300_000_000)
    held[::4096] = b"x" * len(held[::4096])  # resident
    large = measured(python("held = b'x' * 200_000_000; print('large')"))
    small = measured(python("print('small')"))
    assert (large.output, small.output) == ("large\n", "small\n")
    assert 0.2 < large.peak_gb < 0.3
    assert small.peak_gb < 0.1


def test_a_failing_command_raises_with_its_status() -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        measured(python("raise SystemExit(7)"))
    assert caught.value.returncode == 7
    with pytest.raises(subprocess.CalledProcessError) as caught:
        measured(python("import os; os.kill(os.getpid(), 9)"))
    assert caught.value.returncode == 128 + 9


def test_a_command_that_measures_another_ends_with_it(tmp_path: Path) -> None:
    inner = python("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    code = f"import sys; sys.path.insert(0, {str(HERE)!r}); from measure import measured; measured({inner!r}, capture=False)"
    command = [sys.executable, str(HERE / "measure.py"), str(tmp_path / "figures.json"), *python(code)]
    # What a terminated process leaves in the temporary folder goes with the test's.
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as outer:
        assert outer.stdout is not None
        running = Path(f"/proc/{int(outer.stdout.readline())}")
        outer.terminate()
        assert outer.wait() == 128 + signal.SIGTERM
        outer.stdout.read()  # ends when the last process that could write has ended
    assert not running.exists() or "Z" in (running / "stat").read_text().split()[2]


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_has_its_script(name: str) -> None:
    section = SECTIONS[name]
    assert section.path.is_file()
    assert callable(importlib.import_module(section.path.stem).tables)
    source = section.path.read_text(encoding="utf-8")
    assert '"--json"' in source
    assert all(
        f'"{option}"' in source or option[2:].replace("-", "_") in source
        for option in section.quick
        if option[:2] == "--"
    )
    # One checkpoint is made for both.
    assert (CHECKPOINT in section.quick) == section.needs_checkpoint


def test_the_page_shows_what_there_is_and_says_what_is_missing() -> None:
    text = page({"sections": {"sensitivity": ENTRY}})
    assert "$ python benchmarks/sensitivity.py CHECKPOINT" in text
    assert "2024-02-29, in 5 minutes; Linux x86_64, Some CPU, 2 cores, 16 GB; Python 3.11.9, torch 2.13.0." in text
    assert "| kl, the default | lut4g16 | 30 | 512 | 61 | 118 | 5.25 |" in text
    assert "not measured" not in text.lower()
    assert "**Nothing on this page was measured on an Apple device.**" in text
    missing = text.splitlines()[-1]
    assert missing.startswith("Left out, because there are no results yet:")
    assert {name for name in SECTIONS if f"`{name}`" in missing} == set(SECTIONS) - {"sensitivity"}
    assert "A quick run" not in text
    assert "A quick run" in page({"sections": {"sensitivity": {**ENTRY, "quick": True}}})


def test_stock_is_scaled_by_kind_of_layer_and_counted_once_and_twice() -> None:
    def took(seconds: float, peak: float = 1.0) -> dict[str, float]:
        return {"seconds": seconds, "cpu_seconds": 2 * seconds, "peak_gb": peak}

    # Every call takes a second whatever it compresses; a sample of three layers has two at 4 bits.
    kinds = {"nothing": took(1), "lut8": took(3), "lut4g16": took(9), "head": took(5), "embedding": took(6)}
    scaled = conversion.scale(kinds, sample=3, layers=30, promoted=8)
    assert scaled == {"seconds": 1 + 8 * 2 + 22 * 4 + 4 + 5, "cpu_seconds": 2 * (1 + 8 * 2 + 22 * 4 + 4 + 5)}
    steps = {"convert decode": took(100, 13), "convert prefill": took(110, 14), "merge": took(20, 5)}
    found = conversion.totals({**steps, "palettize, sample": took(24, 15)}, scaled)["totals"]
    assert found["fp16"] == took(230, 14)
    assert found["top8, palettized once"] == took(230 + 114, 15)
    assert found["top8, palettized twice"] == took(230 + 228, 15)


def test_a_model_is_two_layers_and_so_many_differences() -> None:
    def counts(layers: int) -> dict[str, Any]:
        return {
            "operations": 10 + 41 * layers,
            "tiles": 2 * layers,
            "tile_bytes": 0,
            "bytes_a_token": 7.0,
            "highest_rank": 4,
        }

    found = graph.row("model", "ours", "decode", [counts(2), counts(3)], 30)
    assert found["model"] == {key: value for key, value in counts(30).items() if key != "highest_rank"}
    assert found["a_layer"]["operations"] == 41
    refused = graph.row("model", "stock", "decode", [counts(2), "ValueError: a | b"], 30)
    assert graph.cells(refused, found)[1] == "refused: ValueError: a \\| b"


def run_all(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HERE / "run_all.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_quick_section_goes_into_the_results_and_onto_the_page(tmp_path: Path) -> None:
    results, out = tmp_path / "results.json", tmp_path / "page.md"
    results.write_text(json.dumps({"sections": {"sensitivity": ENTRY}}))
    done = run_all("families", "--quick", "--results", results, "--out", out)
    assert done.returncode == 0, done.stderr
    kept = json.loads(results.read_text())["sections"]
    assert kept["sensitivity"] == ENTRY
    assert kept["families"]["result"][0]["family"] == "llama"
    assert kept["families"]["versions"]["torch"]
    text = out.read_text(encoding="utf-8")
    assert text == page({"sections": kept})
    assert "$ python benchmarks/families.py llama" in text
    assert str(tmp_path) not in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["clusters"], "'clusters' is no section"),
        (["--checkpoint", "nowhere"], "--checkpoint nowhere: has no config.json"),
        (["--render", "--results", "{bad}"], "field sections is missing"),
        (["--results", "no/where.json"], "--results no/where.json: no is not a folder"),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], said: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("[]")
    done = run_all(*(argument.format(bad=bad) for argument in arguments), "--out", tmp_path / "page.md")
    assert done.returncode == 2
    assert said in " ".join(done.stderr.replace("│", " ").split())
    assert not (tmp_path / "page.md").exists()
