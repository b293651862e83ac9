"""The lint's rules about states: a minimal program that each finds, and its nearest neighbour that it leaves alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from coremltools.converters import mil
from lint_checks import Fires, Make, check_fires, check_silent, flat, program

mb = mil.Builder

CACHE = (3, 2, 64, 32)


def reading(**states: tuple[int, ...]) -> Make:
    """A program that does no more than read its states."""

    def build(values: Any) -> list[Any]:
        return [mb.add(x=values["x"], y=mb.reduce_sum(x=mb.read_state(input=values[name]))) for name in states]

    return program(build, states, x=(1, 2))


def writing(update: tuple[int, ...], cache: tuple[int, ...] = CACHE, whole: bool = False) -> Make:
    """A program that writes its input to a state, into its first slots or as a whole, and gives something else."""

    def build(values: Any) -> list[Any]:
        old = mb.read_state(input=values["cache"])
        new = (
            mb.add(x=old, y=values["x"])
            if whole
            else mb.slice_update(x=old, update=values["x"], begin=[0, 0, 0, 0], end=update)
        )
        written = mb.coreml_update_state(state=values["cache"], value=new)
        return [mb.reduce_sum(x=written)]

    return program(build, {"cache": cache}, x=update)


def giving(what: str) -> Make:
    """A program that writes an update to a state, and gives this update, the new state, or a value of its own."""

    def build(values: Any) -> list[Any]:
        heads = mb.exp(x=mb.reshape(x=values["x"], shape=[6, 4, 32]))
        update = mb.reshape(x=heads, shape=[3, 2, 4, 32])
        old = mb.read_state(input=values["cache"])
        new = mb.slice_update(x=old, update=update, begin=[0, 0, 0, 0], end=[3, 2, 4, 32])
        written = mb.coreml_update_state(state=values["cache"], value=new)
        results = {
            "update": update,
            "view of the update": mb.expand_dims(x=update, axes=[0]),
            "source of the update": heads,
            "written": new,
            "state": written,
            "old state": old,
            "own": mb.mul(x=update, y=mb.reduce_sum(x=written)),
        }
        return [results[what]]

    return program(build, {"cache": CACHE}, x=(3, 2, 4, 32))


def read_only(values: Any) -> list[Any]:
    return [mb.read_state(input=values["cache"])]


def updating_no_state(values: Any) -> list[Any]:
    return [mb.slice_update(x=values["x"], update=values["y"], begin=[0, 0], end=[128, 8])]


FIRES = {
    "state-axis-not-multiple-of-32": [
        # A head_dim of 40 and a context of 270: coremltools issue 2631.
        Fires(reading(cache=(3, 2, 270, 40)), 1, ["cache fp16[3, 2, 270, 40]: axis 2 is 270, axis 3 is 40"]),
        Fires(reading(keys=(3, 2, 64, 40), values=(3, 2, 64, 40)), 2, ["keys", "values", "axis 3 is 40"]),
        Fires(reading(cache=(3, 80, 1, 270)), 1, ["axis 3 is 270"]),
        Fires(reading(cache=(3, 2, 48, 32)), 1, ["axis 2 is 48"]),
        Fires(reading(cache=(31,)), 1, ["axis 0 is 31"]),
    ],
    "state-axis-not-power-of-2": [
        Fires(reading(cache=(3, 2, 256, 80)), 1, ["cache fp16[3, 2, 256, 80]: axis 3 is 80"]),
        Fires(reading(cache=(3, 3, 256, 64)), 1, ["axis 1 is 3"]),
        Fires(reading(cache=(3, 2, 96, 64)), 1, ["axis 2 is 96"], expected="multiples of 32"),
        # Heads have no other report to fall back on.
        Fires(reading(cache=(3, 96, 96, 64)), 1, ["axis 1 is 96, axis 2 is 96"]),
    ],
    "more-than-2-states": [
        Fires(reading(a=CACHE, b=CACHE, c=CACHE), 3, ["a fp16[3, 2, 64, 32]"]),
        Fires(reading(a=CACHE, b=CACHE, c=CACHE, d=CACHE), 4),
        Fires(reading(a=CACHE, b=CACHE, c=(3, 2, 32, 32)), 3),
        # 16 full layers and 48 with a window, as in a hybrid model of 64 layers.
        Fires(
            reading(
                keys=(16, 2, 64, 32), values=(16, 2, 64, 32), window_keys=(48, 2, 32, 32), window_values=(48, 2, 32, 32)
            ),
            4,
            ["keys fp16[16, 2, 64, 32]", "window_keys fp16[48, 2, 32, 32]"],
            expected="2 kinds of cache",
        ),
    ],
    "state-shapes-differ": [
        Fires(
            reading(keys=(16, 2, 64, 32), window_keys=(48, 2, 32, 32)),
            2,
            ["keys fp16[16, 2, 64, 32]", "window_keys fp16[48, 2, 32, 32]"],
            expected="different length",
        ),
        Fires(reading(keys=(3, 2, 64, 32), values=(3, 2, 64, 64)), 2),
        Fires(reading(keys=(3, 2, 64, 32), values=(3, 4, 64, 32)), 2),
        Fires(reading(keys=(64, 32), values=(32, 32)), 2),
    ],
    "wide-state-update": [
        Fires(writing((3, 2, 128, 32), (3, 2, 256, 32)), 1, ["fp16[3, 2, 128, 32] into fp16[3, 2, 256, 32]"]),
        Fires(writing((1, 2, 129, 32), (3, 2, 256, 32)), 1),
    ],
    "output-also-written-to-state": [
        Fires(giving("update"), 1, ["fp16[3, 2, 4, 32] goes to cache"]),
        Fires(giving("view of the update"), 1, ["fp16[1, 3, 2, 4, 32] goes to cache"]),
        Fires(giving("source of the update"), 1, ["fp16[6, 4, 32] goes to cache"]),
        Fires(giving("written"), 1, ["fp16[3, 2, 64, 32] goes to cache"]),
        Fires(giving("state"), 1, ["fp16[3, 2, 64, 32] is cache itself"]),
        Fires(giving("old state"), 1, ["fp16[3, 2, 64, 32] is cache itself"]),
    ],
}

SILENT = {
    "state-axis-not-multiple-of-32": [
        reading(cache=(3, 2, 256, 32)),
        reading(cache=(5, 7, 96, 160)),
        reading(cache=(3, 80, 1, 256)),
    ],
    "state-axis-not-power-of-2": [reading(cache=(3, 2, 256, 64)), reading(cache=(30, 8, 4096, 128))],
    "more-than-2-states": [reading(keys=CACHE, values=CACHE)],
    "state-shapes-differ": [reading(keys=CACHE, values=CACHE), reading(cache=CACHE)],
    "wide-state-update": [
        writing((3, 2, 127, 32), (3, 2, 256, 32)),
        writing((1, 2, 4, 256), (3, 2, 64, 256)),  # narrow, over heads of 256
        writing((3, 2, 256, 32), (3, 2, 256, 32), whole=True),
        program(updating_no_state, x=(256, 8), y=(128, 8)),
    ],
    "output-also-written-to-state": [giving("own"), program(read_only, {"cache": CACHE}, x=(1, 2))],
}


@pytest.mark.parametrize(("rule", "case"), flat(FIRES))
def test_fires_with_the_right_count(tmp_path: Path, rule: str, case: Fires) -> None:
    check_fires(tmp_path, rule, case)


@pytest.mark.parametrize(("rule", "make"), flat(SILENT))
def test_near_miss_is_left_alone(tmp_path: Path, rule: str, make: Make) -> None:
    check_silent(tmp_path, rule, make)
