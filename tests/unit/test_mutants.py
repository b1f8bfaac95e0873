"""tools/mutants.py: which mistakes it makes, and that it tells those that are noticed from those that are not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "mutants.py"

CODE = '''"""A limit."""

MOST = 4


def fits(size: int, name: str = "") -> bool:
    """Whether it fits."""
    if not name:
        return size <= MOST
    return fits(size, name=name)
'''


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(TOOL), *words], cwd=folder, capture_output=True, text=True, check=False)


def test_the_mistakes_that_it_makes(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(CODE)
    done = run(tmp_path, "--count", "99", "code.py")
    made = sorted(line.split("  ", 3)[-1].split("  ")[-1] for line in done.stdout.splitlines())
    assert made == sorted(
        [
            "4 -> 5",
            "size <= MOST -> size < MOST",
            "not name -> name",
            "fits(size, name=name): without name=",
            "removed: if not name:",
            "removed: return size <= MOST",
            "removed: return fits(size, name=name)",
        ]
    )
    # The same seed draws the same ones in the same order, another seed others.
    assert run(tmp_path, "--count", "3", "code.py").stdout == run(tmp_path, "--count", "3", "code.py").stdout
    assert (
        run(tmp_path, "--count", "3", "code.py").stdout
        != run(tmp_path, "--count", "3", "--seed", "5", "code.py").stdout
    )


def test_a_survivor_is_told_and_the_file_is_put_back(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(CODE)
    check = "names = {}; exec(open('code.py').read(), names); assert names['fits'](4)"
    done = run(tmp_path, "--count", "99", "code.py", "--", sys.executable, "-c", check)
    verdicts = {line.split("  ")[-1]: "SURVIVED" in line for line in done.stdout.splitlines()}
    assert done.returncode == 1
    assert verdicts["4 -> 5"]
    assert not verdicts["size <= MOST -> size < MOST"]
    assert not verdicts["removed: return size <= MOST"]
    assert (tmp_path / "code.py").read_text() == CODE


def test_arguments_without_an_effect_are_left_out(tmp_path: Path) -> None:
    code = "@dataclass(frozen=True)\nclass A:\n    pairs = zip(first(), second, strict=True)\n"
    (tmp_path / "code.py").write_text(code)
    made = [line.split("  ")[-1] for line in run(tmp_path, "--count", "99", "code.py").stdout.splitlines()]
    assert made == ["zip(first(), second, strict=True): first two arguments swapped"]
