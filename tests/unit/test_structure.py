"""tools/structure.py: what it counts, and that it sees a circle and a name that means two things."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "structure.py"

HOUSE = {
    "__init__.py": "",
    "a.py": "from house.inner.b import x\n\nclass Row: ...\n",
    "inner/__init__.py": "",
    "inner/b.py": "def f():\n    from house.a import Row\n\nx = 1\n",
    "inner/c.py": "from typing import Any\n\nRow = dict[str, Any]\nOnly = list[int]\n",
}


def structure(folder: Path) -> tuple[int, list[str]]:
    done = subprocess.run([sys.executable, TOOL, folder], capture_output=True, text=True, check=False)
    assert not done.stderr
    return done.returncode, done.stdout.splitlines()


def house(root: Path, **changed: str) -> Path:
    for name, text in {**HOUSE, **{name.replace("__", "/") + ".py": text for name, text in changed.items()}}.items():
        path = root / "house" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "house"


def test_a_house_without_circles(tmp_path: Path) -> None:
    """An import inside a function does not fail at load time, but it is counted."""
    assert structure(house(tmp_path)) == (
        0,
        [
            "files: 5",
            "lines: 11",
            "import lines: 3 (27.3 %)",
            "folders over 25 files: 0",
            "functions over 50 lines: 0",
            "import cycles at load time: 0",
            "import cycles with function-level imports: 1",
            "  house.a <> house.inner.b",
            "file names in several folders: 0",
            "words: told 0, said 0, asked 0, whole 0, beside 0, own 0, known 0",
            "names of more than one type: 1",
            "  Row: house.a, house.inner.c",
        ],
    )


def test_a_circle_of_three_is_found(tmp_path: Path) -> None:
    code, said = structure(house(tmp_path, inner__b="from .c import Row\nx = 1\n", inner__c="from ..a import Row\n"))
    assert code == 1
    assert said[5:7] == ["import cycles at load time: 1", "  house.a <> house.inner.b <> house.inner.c"]
    assert said[-1] == "names of more than one type: 0"


def test_a_function_is_long_from_its_51st_line_on(tmp_path: Path) -> None:
    lines = {name: f"def {name}():\n" + "    x = 1\n" * count for name, count in (("short", 49), ("long", 50))}
    _, said = structure(house(tmp_path, a=lines["short"] + lines["long"]))
    assert said[4:6] == ["functions over 50 lines: 1", "    51 house.a.long"]


@pytest.mark.slow
def test_the_package_has_no_circle_and_no_name_of_ours_means_two_things() -> None:
    code, said = structure(TOOL.parents[1] / "src" / "lockstep")
    assert code == 0, "\n".join(said)
    assert "import cycles at load time: 0" in said
    start = next(number for number, line in enumerate(said) if line.startswith("import cycles with function-level"))
    cycles = [line for line in said[start + 1 :] if " <> " in line]
    # Cycles left in these two folders are counted; everywhere else there is none.
    assert not [line for line in cycles if not line.startswith(("  lockstep.compat.", "  lockstep.serve."))]
    assert "folders over 25 files: 0" in said
    assert said[-1] == "names of more than one type: 0"
