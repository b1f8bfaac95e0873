"""docs/architecture.md is current: its printed parts, the folders it tells of, and the modules of a GRPO step."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from source_trees import nodes

pytestmark = pytest.mark.xdist_group("source trees")
ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "architecture.py"
SOURCE = ROOT / "src" / "lockstep"
PAGES = sorted((ROOT / "docs").glob("architecture*.md"))


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("architecture", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_printed_parts_are_current(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(TOOL), "--check"])
    assert tool.main() == 0, f"{capsys.readouterr().out}run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_part_is_printed_on_the_page(tool: ModuleType, page: Path) -> None:
    assert re.findall(r"<!-- printed: (\w+) -->", page.read_text(encoding="utf-8")) == list(tool.PARTS)


def named(page: str) -> list[str]:
    """Modules and folders at the beginning of a table's row."""
    return [name for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for name in re.findall(r"`([^`]+)`", row)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_folder_is_told_of(page: Path) -> None:
    told = {name.rstrip("/").removesuffix(".py") for name in named(page.read_text(encoding="utf-8"))}
    here = {path.name.removesuffix(".py") for path in SOURCE.iterdir() if path.is_dir() or path.suffix == ".py"}
    assert here - told <= {"__init__", "__main__", "__pycache__"}


@cache
def reached(start: str) -> set[str]:
    """Files that a module imports, directly or through others; of a row of places, what it names."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        file = waiting.pop()
        if file in found:
            continue
        found.add(file)
        names: set[str] = set()
        for node in nodes(SOURCE / file):
            if isinstance(node, ast.ImportFrom):
                names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Constant) and re.fullmatch(r"lockstep\.[\w.]+:\w+", str(node.value)):
                names.add(str(node.value).partition(":")[0])
        paths = [name.removeprefix("lockstep.").replace(".", "/") + ".py" for name in names]
        waiting += [path for path in paths if (SOURCE / path).is_file()]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_way_of_a_step_is_real(page: Path) -> None:
    """Every module on it exists and is reached from the first one; the loop is not left out."""
    told = [name for name in named(page.read_text(encoding="utf-8")) if "/" in name and name.endswith(".py")]
    assert len(told) > 30
    assert len(told) == len(set(told))
    assert set(told) <= reached("train/start.py")
    direct = set(re.findall(r"from lockstep\.train\.(\w+) import", (SOURCE / "train" / "online.py").read_text()))
    assert {f"train/{name}.py" for name in direct} <= set(told) | {"train/monitor.py"}


def test_the_imports_of_a_small_house(tool: ModuleType, tmp_path: Path) -> None:
    house = tmp_path / "house"
    files = {
        "cli.py": "def f():\n    from house.train.loop import x\n    import house.data.read\n",
        "train/loop.py": "from house.data import read\nfrom house.errors import Bad\nimport os\n",
        "data/sources/read.py": "from house.errors import Bad\nif TYPE_CHECKING:\n    from house.train import loop\n",
        "errors.py": "",
    }
    for name, text in files.items():
        (house / name).parent.mkdir(parents=True, exist_ok=True)
        (house / name).write_text(text)
    edges = tool.folder_imports(house)
    assert edges == {"cli": {"train", "data"}, "data": {"errors"}, "errors": set(), "train": {"data", "errors"}}
    assert tool.reduced(edges) == {"cli": {"train"}, "data": {"errors"}, "errors": set(), "train": {"data"}}


def test_the_figure_has_every_folder_and_every_import(tool: ModuleType) -> None:
    figure = (ROOT / "docs" / "architecture.svg").read_text(encoding="utf-8")
    assert figure == tool.figure(SOURCE), "run `make docs`"
    edges = tool.reduced(tool.folder_imports(SOURCE))
    assert set(re.findall(r">(\w+)</text>", figure)) == set(edges)
    assert figure.count("marker-end") == sum(map(len, edges.values()))


def test_lines_of_code(tool: ModuleType) -> None:
    text = (
        '"""Doc\nof two."""\n\nimport os\n\n\ndef f(a,\n      b):\n    """Doc."""\n    # why\n    return """x\ny"""\n'
    )
    assert tool.code_lines(text) == 4


def test_a_grpo_step_is_read_in_under_600_lines(tool: ModuleType) -> None:
    assert sum(len((SOURCE / name).read_text(encoding="utf-8").splitlines()) for name in tool.READ) < 600


def test_a_page_that_is_not_current_is_seen(tool: ModuleType) -> None:
    page = PAGES[0].read_text(encoding="utf-8")
    assert tool.filled(page) == page
    assert tool.filled(page.replace("cli\napi\n", "")) == page
    assert tool.filled(re.sub(r"\d+ of code", "1 of code", page)) == page
