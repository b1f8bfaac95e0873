"""docs/metrics.md has every metric that the training code names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from source_trees import nodes

pytestmark = pytest.mark.xdist_group("source trees")
ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "lockstep"
WRITERS = (
    "train",
    "algorithms",
    "evaluate",
    "methods",
    "rollout/generator.py",
    "environments/metrics.py",
    "run/output.py",
)
GROUPS = (
    "actor|async|critic|data|environment|perf|prompt_length|response_length|reward|rollout|rollout_corr|timing_s|train|"
    "training|val"
)
METRIC = re.compile(rf"(?:{GROUPS})/[a-z][\w/@]*\w")


def listed(page: str) -> list[str]:
    """Names in the first column of the tables."""
    cells = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def is_listed(metric: str, names: list[str]) -> bool:
    """`/*` stands for the mean, the largest and the smallest value; words in capitals stand for any name."""
    same = metric.replace("val/", "train/", 1) if metric.startswith("val/") else metric
    for name in names:
        if name.endswith("/*"):
            pattern = re.escape(name.removesuffix("/*")) + r"(/\w+)?"
        else:
            pattern = re.sub(r"[A-Z]+", r"[\\w/]+", re.escape(name))
        if re.fullmatch(pattern, metric) or name == same:
            return True
    return False


def named_metrics() -> set[str]:
    """Whole names in the code. Names that are put together from parts are not seen."""
    files = [
        path
        for place in WRITERS
        for path in ([SOURCE / place] if place.endswith(".py") else (SOURCE / place).rglob("*.py"))
    ]
    texts = {
        node.value
        for path in files
        if path.is_file()
        for node in nodes(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return {text for text in texts if METRIC.fullmatch(text) and not (SOURCE / text).exists()}


def test_every_metric_is_on_the_page() -> None:
    names = listed((ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"))
    found = named_metrics()
    assert len(found) > 60
    assert sorted(metric for metric in found if not is_listed(metric, names)) == []


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("critic/score/mean", True),
        ("reward/rule/mean", True),
        ("val/loss", True),
        ("val/pass@4", True),
        ("actor/lost", False),
    ],
)
def test_names_of_the_page_match(metric: str, expected: bool) -> None:
    names = ["critic/score/*", "reward/NAME/mean", "train/loss", "val/pass@K", "actor/loss"]
    assert is_listed(metric, names) is expected
