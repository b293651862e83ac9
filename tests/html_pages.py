"""Reads a page with Python's own parser: its elements, its tables, and whether it is well formed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from itertools import pairwise

VOID = {"br", "hr", "img", "input", "link", "meta"}
NO_END_NEEDED = {"circle", "line", "path", "polyline", "rect"}


@dataclass(eq=False)
class Element:
    tag: str
    attributes: dict[str, str]
    children: list[Element | str] = field(default_factory=list)

    def walk(self) -> Iterator[Element]:
        yield self
        for child in self.children:
            if isinstance(child, Element):
                yield from child.walk()

    def all(self, *tags: str, **attributes: str) -> list[Element]:
        """Elements below of these tags; `kind` stands for one of the classes."""
        kind = attributes.pop("kind", None)
        return [
            element
            for element in self.walk()
            if element is not self
            and (not tags or element.tag in tags)
            and (kind is None or kind in element.attributes.get("class", "").split())
            and all(element.attributes.get(name) == value for name, value in attributes.items())
        ]

    @property
    def text(self) -> str:
        parts = [child if isinstance(child, str) else child.text for child in self.children]
        return " ".join("".join(parts).split())

    @property
    def values(self) -> list[str]:
        """Exact figures of the `data` elements below."""
        return [element.attributes["value"] for element in self.all("data")]


class Page(Element):
    """The whole, with its elements by their ids, of which each should have one."""

    ids: dict[str, list[Element]]


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Page("", {})
        self.root.ids = {}
        self.open: list[Element] = [self.root]
        self.doctype = ""

    def handle_decl(self, decl: str) -> None:
        self.doctype = decl

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"<{tag}> has an attribute twice: {names}"
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(element)
        if "id" in element.attributes:
            self.root.ids.setdefault(element.attributes["id"], []).append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in NO_END_NEEDED, f"<{tag}/> would be left open"
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].tag == tag, f"</{tag}> ends <{self.open[-1].tag}> at {self.getpos()}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def parse(page: str) -> Page:
    """The page as a tree; an assertion fails where a tag does not end what is open."""
    parser = _Parser()
    parser.feed(page)
    parser.close()
    assert parser.doctype == "DOCTYPE html"
    assert parser.open == [parser.root], f"<{parser.open[-1].tag}> is left open"
    return parser.root


def by_id(page: Page, id: str) -> Element:
    (found,) = page.ids[id]
    return found


def table(page: Page, caption: str) -> dict[str, dict[str, Element]]:
    """The rows of a table by the text of their header, the cells of each by the header of their column."""
    (found,) = [table_ for table_ in page.all("table") if caption_id(table_) == caption]
    columns = [cell.text for cell in found.all("thead")[0].all("th")]
    assert len(columns) == len(set(columns))
    rows = {}
    for row in found.all("tbody")[0].all("tr"):
        header, *cells = [child for child in row.children if isinstance(child, Element)]
        assert header.tag == "th"
        assert len(cells) == len(columns) - 1
        assert header.text not in rows
        rows[header.text] = dict(zip(columns, [header, *cells], strict=True))
    return rows


def caption_id(table_: Element) -> str:
    (caption,) = table_.all("caption")
    return caption.attributes["id"]


def check_page(page: Page) -> None:
    """What holds for every page: it loads nothing, and everything in it has a name."""
    assert all(len(elements) == 1 for elements in page.ids.values())
    for element in page.walk():
        _check_loads_nothing(element)
        for id in element.attributes.get("aria-labelledby", "").split():
            assert by_id(page, id).text, id
        if element.attributes.get("href", "").startswith("#"):
            assert element.attributes["href"][1:] in page.ids
    (html,) = page.all("html")
    assert html.attributes["lang"] == "en"
    assert len(page.all("main")) == len(page.all("h1")) == 1
    levels = [int(element.tag[1]) for element in page.all("h1", "h2", "h3", "h4")]
    assert all(after <= before + 1 for before, after in pairwise(levels))
    for table_ in page.all("table"):
        assert by_id(page, caption_id(table_)).text
        assert all(cell.attributes["scope"] in ("col", "row") for cell in table_.all("th"))
    for box in page.all("div", kind="scroll"):
        assert (box.attributes["tabindex"], box.attributes["role"]) == ("0", "region")
        assert box.attributes["aria-labelledby"]
    for picture in page.all("svg"):
        _check_picture(picture)
    for details in page.all("details"):
        assert next(child.tag for child in details.children if isinstance(child, Element)) == "summary"


def _check_loads_nothing(element: Element) -> None:
    assert element.tag not in {
        "script",
        "iframe",
        "object",
        "embed",
        "img",
        "image",
        "use",
        "form",
        "base",
        "audio",
        "video",
    }
    if element.tag == "link":
        assert element.attributes == {"rel": "icon", "href": "data:,"}
    for name, value in element.attributes.items():
        assert not name.startswith("on")
        assert name not in {"src", "srcset", "style", "xlink:href", "action", "poster", "background"}
        if name == "href" and element.tag != "link":
            assert element.tag == "a"
            assert value.startswith(("#", "https://github.com/"))
        elif name != "href":
            assert "url(" not in value
            assert "://" not in value
    if element.tag == "style":
        assert "@import" not in element.text
        assert "://" not in element.text
        assert element.text.count("url(") == element.text.count('url("#hatch")') == 1


def _check_picture(picture: Element) -> None:
    if picture.attributes.get("role") == "img":
        title, description = [child for child in picture.children if isinstance(child, Element)][:2]
        assert (title.tag, description.tag) == ("title", "desc")
        assert title.text
        assert description.text
        named = [title.attributes["id"], description.attributes["id"]]
        assert picture.attributes["aria-labelledby"].split() == named
    elif "marker" not in picture.attributes.get("class", ""):
        assert picture.attributes["aria-hidden"] == "true"
