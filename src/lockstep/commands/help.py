"""`lockstep help`: shows the pages of docs/ in the terminal or in a browser.

A wheel contains the pages in the folder `docs` of the package (setup.py copies them). A checkout has them in docs/.
"""

from __future__ import annotations

import difflib
import html
import os
import re
import shutil
import sys
import tempfile
import webbrowser
from itertools import pairwise
from pathlib import Path

from lockstep.errors import Refusal
from lockstep.run.output import write
from lockstep.version import PACKAGE_FOLDER

FENCE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"^<!-- [^>]* -->\n+", re.MULTILINE)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_LANGUAGE_LINK = re.compile(r" *\[(?:中文|English)\]\([^)]+\)[.。]?")
_HEADING = re.compile(r"^(#+) (.+)$")
STYLE = (
    "body{font:16px/1.5 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}pre{background:#f4f4f4;padding:.7rem"
    ";overflow-x:auto}table{border-collapse:collapse;display:block;overflow-x:auto}td,th{border:1px solid #ccc;"
    "padding:.2rem .5rem;text-align:left;vertical-align:top}img{max-width:100%}"
)


def docs_folder() -> Path:
    """Returns the folder with the pages, of an installed package or of a checkout."""
    installed = PACKAGE_FOLDER / "docs"
    return installed if installed.is_dir() else PACKAGE_FOLDER.parents[1] / "docs"


def topics() -> dict[str, Path]:
    """Returns the English page of each topic."""
    pages = sorted(docs_folder().glob("*.md"), key=lambda path: path.stem)
    found = {path.stem: path for path in pages if not path.stem.endswith(".zh")}
    if not found:
        raise Refusal.at(
            str(docs_folder()), "has no pages", "install lockstep again: its wheel contains them", code="missing-file"
        )
    return found


def title(page: Path) -> str:
    """Returns the first heading of a page."""
    return next(line[2:].strip() for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("# "))


def slug(heading: str) -> str:
    """Returns the anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def prefers_chinese() -> bool:
    """Tells whether the language of the terminal is Chinese."""
    named = (os.environ.get(name) for name in ("LC_ALL", "LC_MESSAGES", "LANG"))
    return next((value for value in named if value), "").startswith("zh")


def find_page(topic: str, language: str | None) -> Path:
    """Returns the page of a topic, in Chinese if it is asked for and exists."""
    pages = topics()
    page = pages.get(topic.lower().removeprefix("docs/").removesuffix(".md").replace("_", "-").replace(" ", "-"))
    if page is None:
        near = difflib.get_close_matches(topic.lower(), pages, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise Refusal.at(topic, "is not a topic", f"{hint}`lockstep help` lists the topics", code="unknown-name")
    chinese = page.with_suffix(".zh.md")
    return chinese if (language == "zh" or (language is None and prefers_chinese())) and chinese.is_file() else page


def headings(text: str) -> list[tuple[int, int, str]]:
    """Returns line number, level and text of each heading outside of blocks of code."""
    without_code = FENCE.sub(lambda block: "\n" * block[0].count("\n"), text)
    found = enumerate(_HEADING.match(line) for line in without_code.splitlines())
    return [(number, len(line[1]), line[2]) for number, line in found if line]


def section_of(text: str, section: str, topic: str) -> str:
    """Returns the part of a page under the heading with the anchor `section`, with its subsections."""
    found = headings(text)
    names = [slug(heading) for _, _, heading in found]
    wanted = section.lstrip("#").lower()
    if wanted not in names:
        near = difflib.get_close_matches(wanted, names, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise Refusal.at(
            f"{topic} {section}", "is not a section", f"{hint}sections: {', '.join(names[1:])}", code="unknown-name"
        )
    at = names.index(wanted)
    start, level, _ = found[at]
    end = next((number for number, other, _ in found[at + 1 :] if other <= level), None)
    return "\n".join(text.splitlines()[start:end])


def terminal_text(text: str) -> str:
    """Returns Markdown for a terminal: without the marks of the tests; links to pages name the command that shows
    them."""

    def link(found: re.Match[str]) -> str:
        image, label, target = found.groups()
        path, _, anchor = target.partition("#")
        if image:
            return f"(figure: {label})"
        if "://" in target or (path and not path.endswith(".md")):
            return found[0]
        if path.startswith("../") or not path:
            return label
        topic = Path(path).name.removesuffix(".md").removesuffix(".zh")
        return f"{label} (`lockstep help {topic}{f' {anchor}' if anchor else ''}`)"

    parts, at = [], 0
    text = _LANGUAGE_LINK.sub("", _COMMENT.sub("", text))
    for block in FENCE.finditer(text):
        parts += [_LINK.sub(link, text[at : block.start()]), block[0]]
        at = block.end()
    return "".join([*parts, _LINK.sub(link, text[at:])]).rstrip() + "\n"


def show_topics() -> None:
    """Prints the topics with the titles of their pages."""
    pages = topics()
    width = max(map(len, pages))
    write("Topics (`lockstep help TOPIC [SECTION]` prints a page, `--open` opens it in a browser):")
    for topic, page in pages.items():
        write(f"  {topic:{width}}  {title(page)}")
    write("The options of a command: lockstep COMMAND --help, or lockstep help COMMAND.")


def show_page(topic: str, section: str | None, language: str | None) -> None:
    """Prints a page, or one of its sections: as formatted text in a terminal, otherwise as Markdown."""
    text = find_page(topic, language).read_text(encoding="utf-8")
    shown = terminal_text(section_of(text, section, topic) if section else text)
    if not sys.stdout.isatty():
        write(shown, end="")
        return
    from rich.markdown import Markdown

    from lockstep.run.screen import Screen

    Screen.on_stdout().print(Markdown(shown, hyperlinks=False))


def open_page(topic: str, section: str | None, language: str | None) -> None:
    """Writes all pages as HTML into a temporary folder, and opens one of them in the browser."""
    page = find_page(topic, language)
    if section:
        section_of(page.read_text(encoding="utf-8"), section, topic)
    folder = Path(tempfile.mkdtemp(prefix="lockstep-help-"))
    for source in docs_folder().iterdir():
        if source.suffix == ".md":
            (folder / source.with_suffix(".html").name).write_text(as_html(source), encoding="utf-8")
        elif source.suffix in (".svg", ".png"):
            shutil.copy(source, folder)
    target = folder / page.with_suffix(".html").name
    address = target.as_uri() + (f"#{section.lstrip('#')}" if section else "")
    write(str(target))
    if not webbrowser.open(address):
        write("no browser could be started: open this file yourself", error=True)


def as_html(page: Path) -> str:
    """Returns a page as one HTML file, with links to the other pages."""
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark").enable("table")
    tokens = parser.parse(_COMMENT.sub("", page.read_text(encoding="utf-8")))
    for opening, inline in pairwise(tokens):
        if opening.type == "heading_open":
            opening.attrSet("id", slug(inline.content))
        for child in inline.children or []:
            target = str(child.attrs.get("href", ""))
            if "://" not in target:
                child.attrs["href"] = re.sub(r"\.md(#|$)", r".html\1", target)
    body = parser.renderer.render(tokens, parser.options, {})
    head = f'<meta charset="utf-8"><title>{html.escape(title(page))}</title><style>{STYLE}</style>'
    return f"<!doctype html><html><head>{head}</head><body>{body}</body></html>"
