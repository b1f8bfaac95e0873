"""A page and its translation say the same: the headings have the same levels, and the code is the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAIRS = [
    ("README.md", "README.zh.md"),
    ("docs/getting-started.md", "docs/getting-started.zh.md"),
    ("docs/sft.md", "docs/sft.zh.md"),
    ("docs/dpo.md", "docs/dpo.zh.md"),
    ("docs/grpo.md", "docs/grpo.zh.md"),
    ("docs/tools.md", "docs/tools.zh.md"),
    ("docs/ray.md", "docs/ray.zh.md"),
    ("docs/to-ascend.md", "docs/to-ascend.zh.md"),
    ("docs/commands.md", "docs/commands.zh.md"),
    ("docs/ascend.md", "docs/ascend.zh.md"),
    ("docs/ascend-faq.md", "docs/ascend-faq.zh.md"),
    ("docs/python.md", "docs/python.zh.md"),
    ("docs/environments.md", "docs/environments.zh.md"),
    ("docs/vision.md", "docs/vision.zh.md"),
    ("docs/architecture.md", "docs/architecture.zh.md"),
    ("docs/from-verl.md", "docs/from-verl.zh.md"),
    ("docs/from-openrlhf.md", "docs/from-openrlhf.zh.md"),
]
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def code_blocks(text: str) -> list[str]:
    return FENCE.findall(text)


def heading_levels(text: str) -> list[int]:
    """A comment in a block of code looks like a heading and is none."""
    return [len(marks) for marks in re.findall(r"^(#+) ", FENCE.sub("", text), re.MULTILINE)]


def names(text: str) -> list[str]:
    """What stands in backquotes: names, values and messages are not translated."""
    return sorted(" ".join(name.split()) for name in re.findall(r"`([^`]+)`", FENCE.sub("", text)))


def numbers(text: str) -> list[str]:
    """Issues, ports and error codes."""
    return sorted(re.findall(r"\d{2,}", FENCE.sub("", text)))


@pytest.mark.parametrize(("page", "translation"), PAIRS)
def test_a_translation_has_the_same_shape_and_code(page: str, translation: str) -> None:
    one, other = ((ROOT / name).read_text(encoding="utf-8") for name in (page, translation))
    assert heading_levels(one) == heading_levels(other)
    assert code_blocks(one) == code_blocks(other)
    assert names(one) == names(other)
    assert numbers(one) == numbers(other)


@pytest.mark.parametrize("page", [name for _, name in PAIRS if name.startswith("docs/")])
def test_a_translation_links_to_translations(page: str) -> None:
    """Only the link `[English](...)` leads to an English page that has a translation."""
    linked = re.findall(r"\[(?!English\])[^\]]*\]\(([\w-]+)\.md[)#]", (ROOT / page).read_text(encoding="utf-8"))
    assert [name for name in linked if (ROOT / "docs" / f"{name}.zh.md").exists()] == []


def test_every_translation_is_compared() -> None:
    assert {path.name for path in (ROOT / "docs").glob("*.zh.md")} == {
        name.removeprefix("docs/") for _, name in PAIRS if name.startswith("docs/")
    }


def test_the_comparison_can_fail() -> None:
    assert heading_levels("# a\n## b\n```sh\n# no\n```\n") == [1, 2]
    assert code_blocks("```sh\nls\n```\ntext\n```\nx\n```\n") == ["```sh\nls\n```", "```\nx\n```"]
    assert names("a `b\nc` and `a`") == ["a", "b c"]
