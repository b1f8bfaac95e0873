"""Builds the documentation site in site/: `make docs`. A broken link or anchor is an error.

The site shows docs/ and every file of the repository to which a page links. Its sources are collected in build/docs:

- The home page is README.md.
- A link out of docs/ (`../bench/results/soak_cpu.json`) leads to a copy under `files/`; a folder becomes a list of
  its files.
- The links between a page and its translation are left out, because the site has a language switch.
- The references of the commands and of the Python API are generated from the code and exist only on the site.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import typer.main
from links import problems_of

import lockstep
from lockstep.cli import app

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
FENCE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
OTHER_LANGUAGE = re.compile(r" *\[(?:中文|English)\]\([^)]+\)[.。]?")
HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)
MARKS = r"\u3000-\u303f\uff00-\uffef"  # Chinese punctuation
CHINESE = rf"{MARKS}\u4e00-\u9fff"
CHINESE_LINE_END = re.compile(
    rf"(?<=[{CHINESE}])\n *(?=[{CHINESE}])|(?<=[{MARKS}])\n *(?=[\w`\[(])(?!\d+\. )|(?<=\S)\n *(?=[{MARKS}])"
)
HOME = {"README.md": "index.md", "README.zh.md": "index.zh.md"}


def is_ours(target: str) -> bool:
    return bool(target.partition("#")[0]) and "://" not in target and not target.startswith("mailto:")


def site_path(source: str) -> str:
    """Returns the place on the site of a file or folder of the repository."""
    place = source.removeprefix("docs/") if source.startswith("docs/") else f"files/{source}"
    return HOME.get(source, f"{place}/index.md" if (ROOT / source).is_dir() else place)


def outside_of_code(change: Callable[[str], str], text: str) -> str:
    """Applies `change` to the parts of a page that are not blocks of code."""
    done, at = [], 0
    for block in FENCE.finditer(text):
        done += [change(text[at : block.start()]), block[0]]
        at = block.end()
    return "".join([*done, change(text[at:])])


def targets(text: str, source: str) -> Iterator[str]:
    """Yields the files and folders of the repository to which a page links."""
    for _, target, _ in LINK.findall(FENCE.sub("", text)):
        if is_ours(target):
            yield posixpath.normpath(posixpath.join(posixpath.dirname(source), target.partition("#")[0]))


def page_text(source: str) -> str:
    """Returns the Markdown of a file, or a list of the files of a folder."""
    path = ROOT / source
    if not path.is_dir():
        return path.read_text(encoding="utf-8")
    names = sorted(entry.name for entry in path.iterdir() if entry.is_file())
    return "\n".join([f"# {source}", "", *(f"- [{name}]({path.name}/{name})" for name in names), ""])


@cache
def sources() -> tuple[str, ...]:
    """Returns the pages, and the files and folders to which they link, directly or through other pages."""
    waiting = [*HOME, *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
    found: dict[str, None] = {}
    while waiting:
        source = waiting.pop()
        if source in found or not (ROOT / source).exists():
            continue
        found[source] = None
        if source.endswith(".md") or (ROOT / source).is_dir():
            waiting += targets(page_text(source), source)
    return tuple(found)


def with_site_links(text: str, source: str) -> str:
    """Rewrites the links of a page for its place on the site. A link to a translation becomes one to the page."""
    here = posixpath.dirname(site_path(source)) or "."

    def link(found: re.Match[str]) -> str:
        path, mark, anchor = found[2].partition("#")
        if not is_ours(found[2]):
            return found[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        place = re.sub(r"\.zh\.md$", ".md", site_path(target))
        return f"{found[1]}{posixpath.relpath(place, here)}{mark}{anchor}{found[3]}"

    return outside_of_code(lambda part: LINK.sub(link, part), OTHER_LANGUAGE.sub("", text))


def slug(title: str) -> str:
    """Returns the anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def with_english_anchors(text: str, source: str) -> str:
    """Gives each heading of a translation the anchor of the English page too. Untranslated pages link to it."""
    english = ROOT / source.replace(".zh.md", ".md")
    if not source.endswith(".zh.md"):
        return text
    titles = iter(HEADING.findall(FENCE.sub("", english.read_text(encoding="utf-8"))))

    def heading(found: re.Match[str]) -> str:
        anchor = slug(next(titles)[1])
        return found[0] if anchor == slug(found[2]) else f'<div id="{anchor}"></div>\n\n{found[0]}'

    return outside_of_code(lambda part: HEADING.sub(heading, part), text)


def with_joined_lines(text: str, source: str) -> str:
    """Joins the lines of Chinese paragraphs. A browser would show each line end as a space."""
    if not source.endswith(".zh.md"):
        return text
    return outside_of_code(lambda part: CHINESE_LINE_END.sub("", part), text)


def command_reference() -> str:
    """Returns a page with the arguments and options of every command."""
    lines = ["# Options of the commands", "", "[Commands](commands.md) describes what each command is for.", ""]
    root = typer.main.get_command(app)
    with root.context_class(root, info_name="lockstep") as context:
        lines += _commands(context)
    return "\n".join(lines)


def _commands(parent: Any) -> Iterator[str]:
    """Yields the lines of all commands of a group. (Typer has its own copy of click, so its types are not click's.)"""
    for name, command in parent.command.commands.items():
        with command.context_class(command, info_name=name, parent=parent) as context:
            usage = command.collect_usage_pieces(context)
            yield from (f"## {context.command_path}", "", command.help or "", "")
            yield from ("```", " ".join([context.command_path, *usage]), "```", "")
            rows = [record for one in command.get_params(context) if (record := one.get_help_record(context))]
            if rows:
                yield from ("| option | |", "|---|---|")
                yield from (f"| `{option}` | {help_} |".replace("\n", " ") for option, help_ in rows)
            yield ""
            if hasattr(command, "commands"):
                yield from _commands(context)


def python_reference() -> str:
    """Returns a page for mkdocstrings with all public names of `lockstep`."""
    lines = ["# Python API", "", "[Python](python.md) has examples. All names are attributes of `lockstep`.", ""]
    for name in lockstep.__all__:
        module = lockstep._MODULES.get(name, "lockstep.train.start")
        lines += [f"::: {module}.{name}", ""]
    return "\n".join(lines)


def collect(folder: Path) -> None:
    """Writes the sources of the site into an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder)
    for source in sources():
        place = folder / site_path(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.suffix == ".md":
            text = with_joined_lines(with_english_anchors(page_text(source), source), source)
            place.write_text(with_site_links(text, source), encoding="utf-8")
        elif not source.startswith("docs/"):
            shutil.copy(ROOT / source, place)
    (folder / "options.md").write_text(command_reference(), encoding="utf-8")
    (folder / "api.md").write_text(python_reference(), encoding="utf-8")
    (folder / "assets").mkdir()
    for name in ("iframe-worker.js", "site.css"):
        shutil.copy(Path(__file__).with_name(name), folder / "assets")


def write_search_index(folder: Path) -> None:
    """Leaves out the copies of English pages in the Chinese part.

    The plugin `offline` wrote search_index.js before the Chinese pages were indexed, so it is written again.
    """
    index = json.loads((folder / "search_index.json").read_text(encoding="utf-8"))
    translated = {site_path(source).replace(".zh.md", ".html") for source in sources() if source.endswith(".zh.md")}

    def wanted(location: str) -> bool:
        page = location.partition("#")[0]
        return not page.startswith("zh/") or page.removeprefix("zh/") in translated

    index["docs"] = [entry for entry in index["docs"] if wanted(entry["location"])]
    text = json.dumps(index, ensure_ascii=False, separators=(",", ":"))
    (folder / "search_index.json").write_text(text, encoding="utf-8")
    (folder / "search_index.js").write_text(f"var __index = {text}", encoding="utf-8")


def main() -> int:
    collect(ROOT / "build" / "docs")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    if subprocess.run(words, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=False).returncode:
        return 1
    write_search_index(ROOT / "site" / "search")
    for page in (ROOT / "site").rglob("404.html"):  # only a web server would show it, at any address
        page.unlink()
    problems = problems_of(ROOT / "site")
    print(*problems or [f"site/index.html: {len(list((ROOT / 'site').rglob('*.html')))} pages"], sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
