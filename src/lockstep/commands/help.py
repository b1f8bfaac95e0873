"""`lockstep help`: shows the pages of docs/ in the terminal or in a browser.

A wheel contains the pages in the folder `docs` of the package (setup.py copies them). A checkout has them in docs/.
"""

from __future__ import annotations

import difflib
import html
import math
import os
import re
import shutil
import sys
import tempfile
import webbrowser
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
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
_WORD = re.compile(r"[a-z0-9_]+")
# Pages of names or numbers, which come after the pages that explain a subject.
LISTS = {"glossary", "learning", "measured", "models", "speed", "support", "support-appendix"}
FIRST = "getting-started"
# Pages whose tables have a row per name.
TABLES = ("recipe", "metrics", "errors", "verl-keys", "openrlhf-keys")
# A match in a heading, in the first column of a table or in bold at the start of an item reaches this score. A word
# that is only mentioned does not.
KNOWN = 3.0
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


@dataclass(frozen=True)
class Section:
    """A section without its subsections. The first section of a page has the text of the full page."""

    topic: str
    anchor: str | None
    heading: str
    text: str

    @cached_property
    def words(self) -> Counter[str]:
        return Counter(_stems(self.text))

    @property
    def command(self) -> str:
        """The command that prints this section."""
        return f"`lockstep help {self.topic}{f' {self.anchor}' if self.anchor else ''}`"

    def score(self, query: str) -> float:
        """Scores how well this section answers `query`: a word in the heading counts most, then a definition in a table
        or a list, or a command that trains with it, then how often the text has it."""
        heading, asked = _stems(self.heading), _stems(query)
        length = sum(self.words.values()) + 50
        score = 0.0
        for word in asked:
            score += 3 * self.words[word] / (self.words[word] + 8) + 6 * self.words[word] / length
            if word in heading:
                score += 6 / (0.75 + 0.25 * len(heading)) + 2 * (heading[0] == word or self.anchor is None)
            if word in _stems(self.topic):
                score += 3
        name, flags = re.escape(query), re.MULTILINE | re.IGNORECASE
        if self.anchor:
            score += 3 * bool(re.search(rf"^(\| |- \*\*)`?{name}(`|\*\*| \|)", self.text, flags))
            score += 4 * bool(re.search(rf"^lockstep train {name}[.-]", self.text, flags))
            score += 2 * bool(re.search(rf"^method: {name}$", self.text, flags))
        present = sum(word in heading or self.words[word] > 0 for word in asked) / max(len(asked), 1)
        return score * present * (0.4 if self.topic in {*LISTS, *TABLES} else 1.4 if self.topic == FIRST else 1.0)


def _stems(text: str) -> list[str]:
    """Returns the words without their endings, so that `resume` finds "Resuming"."""
    words = (word.replace("z", "s") for word in _WORD.findall(text.lower()))
    return [re.sub(r"(?<=...)(ing|ed|es|s|e)$", "", word) for word in words]


@cache
def sections_in(folder: Path) -> list[tuple[Section, float]]:
    """Returns the sections of all English pages, each with a factor that is larger if many pages link to it."""
    texts = {topic: page.read_text(encoding="utf-8") for topic, page in topics().items()}
    links = Counter(target for text in texts.values() for target in re.findall(r"\]\(([\w-]+)\.md(#[\w-]+)?\)", text))
    found = []
    for topic, text in texts.items():
        lines = text.splitlines()
        for (start, level, heading), (end, _, _) in pairwise([*headings(text), (len(lines), 0, "")]):
            anchor, own = (None, text) if level == 1 else (slug(heading), "\n".join(lines[start + 1 : end]))
            linked = links[topic, ""] + 2 * links[topic, f"#{anchor}"]
            found.append((Section(topic, anchor, heading, own), 1 + 0.15 * math.log1p(linked)))
    return found


def best_sections(query: str) -> list[tuple[float, Section]]:
    """Returns the sections that mention `query` with their scores, the best first."""
    scored = [(section.score(query) * factor, section) for section, factor in sections_in(docs_folder())]
    return sorted((one for one in scored if one[0] > 0), key=lambda one: -one[0])


def rows_named(name: str, *, full: bool) -> list[str]:
    """Returns the rows of `TABLES` for a key, metric or error code. Without `full`, its last part is enough."""
    rows = []
    for topic in TABLES:
        columns: list[str] = []
        for line in topics()[topic].read_text(encoding="utf-8").splitlines():
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            columns = columns or cells if cells else []
            keys = re.findall(r"`([^`]+)`", cells[0]) if cells else []
            if name in (keys if full else [key.rpartition(".")[2] for key in keys]):
                values = [f"- {column}: {cell}" for column, cell in zip(columns[1:], cells[1:], strict=True) if cell]
                rows.append("\n".join([cells[0], "", *values, f"- page: `lockstep help {topic}`", ""]))
    return rows


def find_page(topic: str, language: str | None) -> Path:
    """Returns the page of a topic, in Chinese if it is asked for and exists."""
    page = topics()[topic]
    chinese = page.with_suffix(".zh.md")
    return chinese if (language == "zh" or (language is None and prefers_chinese())) and chinese.is_file() else page


@dataclass(frozen=True)
class Found:
    """What `lockstep help` shows: a page or one of its sections, or rows of tables. `more` are other sections."""

    topic: str
    section: str | None
    more: Sequence[Section] = ()
    rows: Sequence[str] = ()


def _hint(query: str, near: Sequence[Section]) -> str:
    """Names up to three pages: those that mention the words, or those with a word of similar spelling in a heading."""
    if not near:
        known = {word for section, _ in sections_in(docs_folder()) for word in _stems(section.heading)}
        near = [best_sections(word)[0][1] for word in difflib.get_close_matches("".join(_stems(query)), known, n=3)]
    pages = {section.topic: section for section in reversed(near)}
    three = list(reversed(pages.values()))[:3]
    return f"did you mean {', '.join(section.command for section in three)}? " if three else ""


def look_up(topic: str, section: str | None) -> Found:
    """Returns the page of a topic. Other words are looked up in the tables, the headings and the text of all pages."""
    page = topic.lower().removeprefix("docs/").removesuffix(".md").replace("_", "-").replace(" ", "-")
    if page in topics():
        return Found(page, section)
    query = f"{topic} {section or ''}".strip().lower()
    ranked = best_sections(query)
    near = [section for _, section in ranked]
    if rows := rows_named(query, full=True):
        return Found(TABLES[0], None, near[:3], rows)
    if ranked and ranked[0][0] >= KNOWN:
        return Found(near[0].topic, near[0].anchor, near[1:4])
    if rows := rows_named(query, full=False):
        return Found(TABLES[0], None, near[:3], rows)
    raise Refusal.at(
        query, "is not a topic", f"{_hint(query, near)}`lockstep help` lists the topics", code="unknown-name"
    )


def anchor_in(page: Path, found: Found) -> str:
    """Returns the anchor of the section in `page`. In a translation, its heading has the place of the English one."""
    wanted = (found.section or "").lstrip("#").lower()
    names = [
        [slug(heading) for _, _, heading in headings(path.read_text(encoding="utf-8"))]
        for path in (topics()[found.topic], page)
    ]
    return names[1][names[0].index(wanted)] if wanted in names[0] else wanted


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
    found = look_up(topic, section)
    page = find_page(found.topic, language)
    text = "\n".join(found.rows) or page.read_text(encoding="utf-8")
    shown = terminal_text(section_of(text, anchor_in(page, found), found.topic) if found.section else text)
    if found.more:
        here = "" if found.rows else f"This is {Section(found.topic, found.section, '', '').command}. "
        shown += f"\n{here}See also: {', '.join(other.command for other in found.more)}.\n"
    if not sys.stdout.isatty():
        write(shown, end="")
        return
    from rich.markdown import Markdown

    from lockstep.run.screen import Screen

    Screen.on_stdout().print(Markdown(shown, hyperlinks=False))


def open_page(topic: str, section: str | None, language: str | None) -> None:
    """Writes all pages as HTML into a temporary folder, and opens one of them in the browser."""
    found = look_up(topic, section)
    page = find_page(found.topic, language)
    anchor = anchor_in(page, found)
    if anchor:
        section_of(page.read_text(encoding="utf-8"), anchor, found.topic)
    folder = Path(tempfile.mkdtemp(prefix="lockstep-help-"))
    for source in docs_folder().iterdir():
        if source.suffix == ".md":
            (folder / source.with_suffix(".html").name).write_text(as_html(source), encoding="utf-8")
        elif source.suffix in (".svg", ".png"):
            shutil.copy(source, folder)
    target = folder / page.with_suffix(".html").name
    address = target.as_uri() + (f"#{anchor}" if anchor else "")
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
