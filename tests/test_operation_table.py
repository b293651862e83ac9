"""Which operations are carried out, which stay out and why, and the page that says so."""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import operation_table

TESTS = [
    path.read_text(encoding="utf-8")
    for path in Path(__file__).parent.glob("test_*.py")
    if path.name != Path(__file__).name
]


def test_what_stays_out_is_what_has_a_reason() -> None:
    left_out = set(operation_table.registry()) - operation_table.supported()
    assert left_out == set(operation_table.LEFT_OUT)
    assert all(operation_table.LEFT_OUT.values())


def test_nothing_is_carried_out_that_coremltools_does_not_know() -> None:
    assert operation_table.supported() <= set(operation_table.registry())


def test_every_operation_stands_in_a_test() -> None:
    text = "\n".join(TESTS)
    untested = [name for name in operation_table.supported() if not re.search(rf"(?<!\w){name}(?!\w)", text)]
    # The builder writes these under other names: a classifier, and an update of a state.
    assert set(untested) <= {"classify", "write_state"}


def test_references_and_notes_name_operations_once() -> None:
    named = [name for names in operation_table.REFERENCES.values() for name in names.split()]
    assert len(named) == len(set(named))
    assert {*named, *operation_table.NOTES} <= operation_table.supported()


def test_the_page_is_up_to_date() -> None:
    assert operation_table.PAGE.read_text(encoding="utf-8") == operation_table.page(), (
        "run benchmarks/operation_table.py"
    )
