"""`lockstep help`: the topics are the pages, error messages name topics that exist, and pages print and open."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import webbrowser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from typer.testing import CliRunner

from lockstep.cli import app
from lockstep.commands import help as help_pages
from lockstep.errors import Refusal
from lockstep.recipe.methods import OFFLINE, ONLINE
from source_trees import nodes

pytestmark = pytest.mark.xdist_group("source trees")
ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "lockstep"
NAMED = re.compile(r"lockstep help ([a-z][a-z-]*)")


def messages() -> dict[str, str]:
    """Texts of the package that may name a page, except docstrings, with their file."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        if not re.search(r"lockstep help|docs/", path.read_text(encoding="utf-8")):
            continue
        docstrings = {
            id(node.value)
            for node in nodes(path)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        for node in nodes(path):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                found[node.value] = str(path.relative_to(SOURCE))
    for path in (*SOURCE.rglob("*.yaml"), *SOURCE.rglob("*.js"), *SOURCE.rglob("*.html")):
        found[re.sub(r"^\s*#.*$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)] = path.name
    return found


def test_messages_name_pages_that_an_installed_wheel_has() -> None:
    """A wheel has no docs/*.md to open, so messages name the command that prints the page."""
    texts = messages()
    topics = help_pages.topics()
    named = {topic: file for text, file in texts.items() for topic in NAMED.findall(text)}
    assert len(named) > 8
    assert {topic: file for topic, file in named.items() if topic not in topics} == {}
    paths = {text: file for text, file in texts.items() if re.search(r"docs/[\w-]+\.md", text)}
    assert set(paths) == {"docs/support.md"}  # the file that `compare --record` writes


def run(*words: str) -> str:
    done = CliRunner().invoke(app, ["help", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_the_list_has_every_page() -> None:
    lines = run().splitlines()
    pages = sorted(path.stem for path in (ROOT / "docs").glob("*.md") if not path.stem.endswith(".zh"))
    assert [line.split()[0] for line in lines[1:-1]] == pages
    assert "  data  " in run()


def test_a_page_without_a_terminal_is_plain_markdown() -> None:
    printed = run("sft")
    assert printed.startswith("# SFT on your data\n")
    assert "<!--" not in printed
    assert "(`lockstep help runs`)" in printed
    assert "中文" not in printed
    assert '{"prompt": "Capital of France?", "response": "Paris"}' in printed


def test_a_section_and_a_language() -> None:
    printed = run("data", "chat-templates")
    assert printed.startswith("## Chat templates\n")
    assert "\n## " not in printed
    assert run("sft", "--lang", "zh").startswith("# 用自己的数据做 SFT\n")
    assert run("data", "--lang", "zh").startswith("# Data\n")  # no translation


def test_the_language_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LC_ALL", raising=False)
    monkeypatch.delenv("LC_MESSAGES", raising=False)
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    assert run("sft").startswith("# 用自己的数据做 SFT")
    monkeypatch.setenv("LC_ALL", "en_US.UTF-8")
    assert run("sft").startswith("# SFT on your data")


def test_a_command_without_a_page_prints_its_options() -> None:
    assert "Train RECIPE, or resume its interrupted run." in run("train")


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["onlime"], "did you mean `lockstep help online`"),
        (["chekpoint"], "did you mean `lockstep help runs checkpoints`"),
        (["data", "chat-template"], "did you mean chat-templates?"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(words: list[str], near: str) -> None:
    with pytest.raises(Refusal, match="is not a") as refusal:
        run(*words)
    assert near in refusal.value.problems[0].remedy


@pytest.mark.parametrize(
    ("words", "page", "section"),
    [
        ("ppo", "online", "methods"),
        ("kto", "dpo", "a-kto-run"),
        ("lora", "low-memory", "lora-adapters"),
        ("vllm", "engines", "a-server-that-lockstep-starts"),
        ("sglang", "engines", "on-ascend"),
        ("install", "getting-started", "install"),
        ("callbacks", "python", "callbacks"),
        ("notebooks", "python", "notebooks"),
        ("images", "vision", None),
        ("checkpoint", "runs", "checkpoints"),
        ("resume", "runs", "resuming"),
        ("quantize", "low-memory", "quantised-base-weights"),
        ("weight sync", "engines", "weight-sync"),
        ("rm", "reward-models", "one-command"),
        ("batch", "recipe", "batch"),
    ],
)
def test_a_word_that_is_no_topic_finds_its_section(words: str, page: str, section: str | None) -> None:
    found = help_pages.look_up(words, None)
    assert (found.topic, found.section, found.rows) == (page, section, ())
    assert len(found.more) == 3


def test_every_method_has_a_page() -> None:
    found = {method: help_pages.look_up(method, None) for method in (*OFFLINE, *ONLINE)}
    assert {method for method, one in found.items() if one.rows} == set()
    assert {one.topic for one in found.values()} == {"sft", "dpo", "grpo", "online", "distillation", "reward-models"}


def test_a_recipe_key_has_its_row() -> None:
    keys = re.findall(r"^\| `([\w.]+)` \|", (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(keys) > 200
    assert [key for key in keys[::20] if not help_pages.rows_named(key, full=True)] == []


def test_a_key_is_printed_with_its_default_and_meaning() -> None:
    printed = run("batch.tokens")
    assert printed.startswith("`batch.tokens`\n\n- values: ")
    assert "\n- default: `" in printed
    assert "\n- page: `lockstep help recipe`\n" in printed
    assert "See also: `lockstep help " in printed
    assert "`reward.remote_retries`" in run("remote_retries")  # the last part is enough
    assert "`unknown-key`" in run("unknown-key")
    assert "`timing_s/gen`" in run("timing_s/gen")


def test_several_words_find_a_section() -> None:
    printed = run("chat", "template")
    assert printed.startswith("## Chat templates\n")
    assert printed.splitlines()[-1].startswith("This is `lockstep help data chat-templates`. See also: `lockstep help ")


def test_an_unknown_word_lists_three_pages() -> None:
    with pytest.raises(Refusal) as refusal:
        help_pages.look_up("deepspeed", None)
    named = re.findall(r"`lockstep help ([\w-]+)", refusal.value.problems[0].remedy)
    assert len(set(named)) == 3
    assert all("deepspeed" in help_pages.topics()[topic].read_text(encoding="utf-8").lower() for topic in named)
    with pytest.raises(Refusal) as refusal:
        help_pages.look_up("xyzzy", None)  # no page is near
    assert refusal.value.problems[0].remedy == "`lockstep help` lists the topics"


def test_a_found_section_is_shown_in_the_chosen_language() -> None:
    assert run("notebooks", "--lang", "zh").startswith("## 笔记本\n")
    assert run("python", "notebooks", "--lang", "zh").startswith("## 笔记本\n")


def test_a_heading_in_code_is_not_a_section() -> None:
    text = "# Page\n\n## One\n\n```sh\n## no heading\n```\n\n### Inner\n\nx\n\n## Two\n"
    assert [heading for _, _, heading in help_pages.headings(text)] == ["Page", "One", "Inner", "Two"]
    assert help_pages.section_of(text, "one", "page") == "## One\n\n```sh\n## no heading\n```\n\n### Inner\n\nx\n"


def test_links_name_commands() -> None:
    text = "[a](data.md#rows), [b](../bench/README.md), ![c](x.svg), [d](#here)\n```\n[e](f.md)\n```\n"
    shown = "a (`lockstep help data rows`), b, (figure: c), d\n```\n[e](f.md)\n```\n"
    assert help_pages.terminal_text(text) == shown


def test_opened_pages_link_to_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda address: opened.append(address) or True)
    run("compare", "the-verdict", "--open")
    address = urlsplit(opened[0])
    page = Path(unquote(address.path))
    try:
        text = page.read_text(encoding="utf-8")
        assert 'id="the-verdict"' in text
        links = re.findall(r'href="([^":]+?)(?:#[^"]*)?"', text)
        assert "verdict.html" in links
        assert [link for link in links if link and not (page.parent / link).exists()] == []
    finally:
        shutil.rmtree(page.parent)


def test_an_installed_package_has_its_own_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "only.md").write_text("# Only\n", encoding="utf-8")
    monkeypatch.setattr(help_pages, "PACKAGE_FOLDER", tmp_path)
    assert run("only") == "# Only\n"


def test_a_build_stores_every_page(tmp_path: Path) -> None:
    """setup.py copies the pages into the wheel."""
    # In a process of its own: setuptools must be imported before distutils, which some package may have imported here.
    code = (
        "import runpy, setuptools, sys; from pathlib import Path; setuptools.setup = lambda **settings: None; "
        "runpy.run_path(sys.argv[1])['store_pages'](Path(sys.argv[2]))"
    )
    subprocess.run([sys.executable, "-c", code, str(ROOT / "setup.py"), str(tmp_path / "docs")], check=True)
    stored = {path.name for path in (tmp_path / "docs").iterdir()}
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= stored
    assert "trajectory.svg" in stored
