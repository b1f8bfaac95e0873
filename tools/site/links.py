"""Checks a built site: every link and anchor leads to a page of it, and nothing is loaded from a network."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "src")}
"""Attributes whose files a browser loads with the page. Links that a reader may follow are in `a`."""
REMOTE = re.compile(r"url\(\s*['\"]?(?:https?:)?//|@import\s+['\"](?:https?:)?//")


class PageLinks(HTMLParser):
    """Collects the links and anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and (name == "id" or (tag, name) == ("a", "name")):
                self.anchors.add(value)
            elif value and ((tag, name) in LOADED or (tag, name) == ("a", "href")):
                self.links.append((tag, value))


@cache
def read(page: Path) -> PageLinks:
    return PageLinks(page.read_text(encoding="utf-8"))


def problems_of(site: Path) -> list[str]:
    """Returns a line for each broken link, and for each file that a page would load from a network."""
    found = [f"{page.relative_to(site)}: {line}" for page in sorted(site.rglob("*.html")) for line in _page(page, site)]
    for style in sorted(site.rglob("*.css")):
        if REMOTE.search(style.read_text(encoding="utf-8")):
            found.append(f"{style.relative_to(site)}: loads a file from a network")
    return found


def _page(page: Path, site: Path) -> Iterator[str]:
    for tag, link in read(page).links:
        parts = urlsplit(link)
        if parts.scheme in ("mailto", "data") or (tag == "a" and parts.scheme in ("http", "https")):
            continue
        if parts.scheme or parts.netloc:
            yield f"loads {link} from a network"
            continue
        target = (page.parent / unquote(parts.path)).resolve() if parts.path else page.resolve()
        if not target.is_file() or not target.is_relative_to(site.resolve()):
            yield f"{link} leads nowhere"
        elif parts.fragment and target.suffix == ".html" and not _has_anchor(target, unquote(parts.fragment)):
            yield f"{link}: the page has no such anchor"


def _has_anchor(page: Path, anchor: str) -> bool:
    return anchor in read(page).anchors or anchor == "__top"
