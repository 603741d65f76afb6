"""What a page of a report has, as a browser takes it apart."""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64decode, b64encode
from html.parser import HTMLParser
from typing import Any, NamedTuple


class Page(NamedTuple):
    """A page."""

    tags: list[str]  #: of its elements, in order
    title: str
    script: str  #: what of it runs
    values: dict[str, Any]


class Broken(Exception):
    """A page that is not whole, or needs a network."""


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.elements: list[list[str]] = []  #: tag, id, text
        self.open: list[list[str]] = []
        self.policy = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes an element. Raises Broken for one that has something loaded."""
        given = dict(attrs)
        if loads := given.keys() & {"src", "href", "srcset", "data", "action"}:
            raise Broken(f"<{tag}> has {sorted(loads)[0]}")
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"] or ""
        self.elements.append([tag, given.get("id") or "", ""])
        if tag != "meta":
            self.open.append(self.elements[-1])

    def handle_endtag(self, tag: str) -> None:
        """Notes the end of one. Raises Broken for one that has not begun."""
        if not self.open or self.open.pop()[0] != tag:
            raise Broken(f"</{tag}> ends what has not begun")

    def handle_data(self, data: str) -> None:
        """Notes a text."""
        if self.open:
            self.open[-1][2] += data

    def text(self, tag: str, name: str = "") -> str:
        """The text of the only element of this kind."""
        (found,) = (text for kind, its, text in self.elements if (kind, its) == (tag, name))
        return found


def read_page(data: bytes) -> Page:
    """The parts of a page. Raises Broken."""
    reader = _Reader()
    reader.feed(data.decode())
    reader.close()
    if reader.open:
        raise Broken(f"<{reader.open[-1][0]}> does not end")
    script, style = reader.text("script"), reader.text("style")
    if re.search(r"@import|url\(", style) or re.search(r"\bimport\b|fetch\(|https?:", script):
        raise Broken("it loads something")
    own = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    if reader.policy != f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{own}'":
        raise Broken(f"its policy is {reader.policy}")
    tags = [tag for tag, _, _ in reader.elements]
    return Page(tags, reader.text("title"), script, json.loads(reader.text("script", "run")))


def shares_in(row: dict[str, Any], name: str) -> list[float]:
    """The shares of a row's buckets."""
    return [each / 255 for each in b64decode(row[name])]


def longest_in(values: dict[str, Any], row: dict[str, Any]) -> list[tuple[str, str] | None]:
    """The name that has taken most of each of a row's buckets, with its line."""
    data = b64decode(row["longest"])
    numbers = [int.from_bytes(data[at : at + 2], "little") - 1 for at in range(0, len(data), 2)]
    return [tuple(values["names"][n]) if n >= 0 else None for n in numbers]


def slices_in(values: dict[str, Any], row: dict[str, Any]) -> list[dict[str, Any]]:
    """The slices of a row, with words in the place of numbers."""
    return [
        {
            "began": at / 1e6,
            "took": took / 1e6,
            "kind": values["kinds"][kind],
            "what": values["names"][name][0],
            "line": values["names"][name][1],
            "bytes": size,
        }
        for at, took, kind, name, size in row["slices"]
    ]
