"""The documentation site: links are rewritten for it, and its checker sees broken links and files of a network.

`make docs` builds the site. These tests need no mkdocs.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools" / "site"))
import build  # noqa: E402
import links  # noqa: E402


def pages_of(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in pages_of(part)]  # type: ignore[attr-defined]


def configuration() -> dict:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    return yaml.safe_load(re.sub(r"!!python/\S+", "", text))


def test_the_navigation_has_every_page_once() -> None:
    nav = pages_of(configuration()["nav"])
    pages = {path.name for path in (ROOT / "docs").glob("*.md") if not path.name.endswith(".zh.md")}
    assert len(nav) == len(set(nav))
    assert pages - set(nav) == set()
    places = {build.site_path(source) for source in build.sources()} | {"options.md", "api.md"}
    assert set(nav) - places == set()


def test_every_title_of_the_navigation_is_translated() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    nav = text[text.index("\nnav:") : text.index("\nextra:")]
    titles = {title.strip('"') for title in re.findall(r'^ +- ("[^"]+"|[^:]+):', nav, re.MULTILINE)}
    i18n = next(plugin["i18n"] for plugin in configuration()["plugins"] if "i18n" in plugin)
    translated = set(i18n["languages"][1]["nav_translations"])
    assert translated <= titles
    assert {title for title in titles - translated if not re.fullmatch(r"[A-Z][A-Za-z]+( API)?", title)} == set()


def test_links_are_rewritten_for_the_site() -> None:
    page = (
        "[a](data.md#rows) [b](../bench/results/soak_cpu.json) [c](sft.zh.md) [中文](sft.zh.md).\n```\n[d](e.md)\n```\n"
    )
    expected = "[a](data.md#rows) [b](files/bench/results/soak_cpu.json) [c](sft.md)\n```\n[d](e.md)\n```\n"
    assert build.with_site_links(page, "docs/x.md") == expected
    assert build.with_site_links("[a](docs/data.md)", "README.md") == "[a](data.md)"
    assert build.with_site_links("[a](../docs/view.md)", "bench/README.md") == "[a](../../view.md)"
    assert build.with_site_links("[a](../bench/results)", "docs/x.md") == "[a](files/bench/results/index.md)"


def test_headings_of_a_translation_have_the_english_anchors() -> None:
    page = build.with_english_anchors((ROOT / "docs/sft.zh.md").read_text(encoding="utf-8"), "docs/sft.zh.md")
    assert '<div id="sft-on-your-data"></div>\n\n# 用自己的数据做 SFT' in page
    assert build.with_english_anchors("# x\n", "docs/sft.md") == "# x\n"


def test_lines_of_chinese_paragraphs_are_joined() -> None:
    page = "一，\nb\n二。\n1. 三\n四 a\nb\n- 五\n（六）\n```\n七\n八\n```\n"
    expected = "一，b\n二。\n1. 三四 a\nb\n- 五（六）\n```\n七\n八\n```\n"
    assert build.with_joined_lines(page, "docs/x.zh.md") == expected
    assert build.with_joined_lines(page, "docs/x.md") == page


def test_the_search_index_has_both_languages_and_no_copies(tmp_path: Path) -> None:
    entries = [
        {"location": page} for page in ("data.html#rows", "zh/data.html#rows", "zh/sft.html#安装", "zh/index.html")
    ]
    (tmp_path / "search_index.json").write_text(json.dumps({"docs": entries}), encoding="utf-8")
    build.write_search_index(tmp_path)
    script = (tmp_path / "search_index.js").read_text(encoding="utf-8")
    kept = json.loads(script.removeprefix("var __index = "))["docs"]
    assert [entry["location"] for entry in kept] == ["data.html#rows", "zh/sft.html#安装", "zh/index.html"]


def test_the_reference_of_the_commands_has_every_command() -> None:
    text = build.command_reference()
    assert "## lockstep train\n" in text
    assert "## lockstep data show\n" in text
    assert "`--resume-from PATH`" in text


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        ('<a href="b.html#here">b</a> <a href="https://example.org">e</a>', None),
        ('<a href="b.html#gone">b</a>', "the page has no such anchor"),
        ('<a href="c.html">c</a>', "leads nowhere"),
        ('<img src="c.svg">', "leads nowhere"),
        ('<script src="https://example.org/x.js"></script>', "from a network"),
        ('<link rel="stylesheet" href="//example.org/x.css">', "from a network"),
    ],
)
def test_the_checker_sees_what_is_broken(tmp_path: Path, other: str, problem: str | None) -> None:
    (tmp_path / "a.html").write_text(other, encoding="utf-8")
    (tmp_path / "b.html").write_text('<h2 id="here">b</h2>', encoding="utf-8")
    found = links.problems_of(tmp_path)
    assert len(found) == (problem is not None)
    assert all(problem is not None and problem in line for line in found)


def test_the_checker_reads_styles(tmp_path: Path) -> None:
    (tmp_path / "a.css").write_text("@font-face{src:url(https://example.org/f.woff2)}", encoding="utf-8")
    assert links.problems_of(tmp_path) == ["a.css: loads a file from a network"]


def test_a_start_takes_under_15_minutes_to_read() -> None:
    """200 words a minute: home page, getting started, and the first tutorial."""
    pages = ("README.md", "docs/getting-started.md", "docs/sft.md")
    assert sum(len((ROOT / page).read_text(encoding="utf-8").split()) for page in pages) < 15 * 200
