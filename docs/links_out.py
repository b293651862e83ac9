"""Lets documents link out of docs/ as they do on GitHub: what they link to becomes a page, or a file, of the site."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"(^(`{3,})[^\n]*\n.*?^\2[ ]*$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\[[^\]]*\])\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds READMEs as pages: the project's as `overview.md`, every model's as `models/NAME.md`."""
    files.append(File.generated(config, "overview.md", abs_src_path=str(ROOT / "README.md")))
    for readme in sorted(ROOT.glob("models/*/README.md")):
        files.append(File.generated(config, f"models/{readme.parent.name}.md", abs_src_path=str(readme)))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Points links at what they lead to from the place where a document is kept; code is left as it is."""
    source = Path(page.file.abs_src_path or "").resolve()
    places = {Path(file.abs_src_path).resolve(): file.src_uri for file in files if file.abs_src_path}

    def target(match: re.Match[str]) -> str:
        path, anchor, rest = match[2].partition("#")
        found = (source.parent / path).resolve()
        if not path or ":" in path or not found.exists():
            return match[0]  # a web address, or for mkdocs to complain about
        if found not in places:
            if not found.is_file() or not found.is_relative_to(ROOT):
                return match[0]
            # As text, which browsers show rather than save.
            name = f"files/{found.relative_to(ROOT)}" + ("" if found.suffix == ".txt" else ".txt")
            files.append(File.generated(config, name, abs_src_path=str(found)))
            places[found] = name
        there = os.path.relpath(places[found], os.path.dirname(page.file.src_uri) or ".")
        return f"{match[1]}({there}{anchor}{rest})"

    parts = FENCE.split(markdown)  # text, a fenced block, its fence, text, …
    for number in range(0, len(parts), 3):
        parts[number] = LINK.sub(target, parts[number])
    del parts[2::3]
    return "".join(parts)
