"""What the documents say to run, run; what they link to, there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import write_exaone4

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "models").rglob("*.md")])
FENCE = re.compile(r"^(?P<fence>`{3,})(?P<kind>[^\n`]*)\n(?P<code>.*?)^(?P=fence)[ ]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def python_blocks(text: str) -> Iterator[tuple[int, str]]:
    """Line number and code of every block that is marked as exactly `python`."""
    for match in FENCE.finditer(text):
        if match["kind"].strip() == "python":
            yield text.count("\n", 0, match.start("code")), match["code"]


def anchors(text: str) -> set[str]:
    """What GitHub makes of a document's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


RUNNABLE = [path for path in DOCUMENTS if any(python_blocks(path.read_text(encoding="utf-8")))]


def test_the_documents_have_code_to_run() -> None:
    assert {"README.md", "docs/why_folding_works.md"} <= {name(path) for path in RUNNABLE}


@pytest.mark.parametrize("path", RUNNABLE, ids=name)
def test_python_blocks_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A document's blocks, in order, in one namespace, in an empty folder but for the model that the README converts."""
    write_exaone4(tmp_path / "path/to/EXAONE-4.0-1.2B", max_position_embeddings=4096)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for line, code in python_blocks(path.read_text(encoding="utf-8")):
        # Blank lines in front, so that a traceback gives the line in the document.
        exec(compile("\n" * line + code, str(path), "exec"), names)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_relative_links_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for target in (match["target"] for match in LINK.finditer(FENCE.sub("", text))):
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue  # a web address; tests use no network
        file, _, anchor = target.partition("#")
        found = path.parent / file if file else path
        assert found.exists(), f"{name(path)} links to {target}"
        if anchor and found.suffix == ".md":
            assert anchor in anchors(found.read_text(encoding="utf-8")), f"{name(path)} links to {target}"


def test_extraction_sees_what_it_should() -> None:
    text = "# A b: `c`\n\n```python\nx = 1\n```\n```python no\n```\n```console\n```\n[a](b.md#c) ```\n"
    assert list(python_blocks(text)) == [(3, "x = 1\n")]
    assert anchors(text) == {"a-b-c"}
    assert [match["target"] for match in LINK.finditer(text)] == ["b.md#c"]
