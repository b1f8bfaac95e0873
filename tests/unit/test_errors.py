"""Every problem has a code of the table, and shows it."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import lockstep
from lockstep import errors
from lockstep.errors import CODES, Problem, Refusal
from lockstep.run.console import print_problems
from refusals import has_problem, printed_problems, refuses
from source_trees import nodes

SOURCE = Path(lockstep.__file__).parent
CONSTRUCTORS = {"Problem", "Unloadable"}
REFUSALS = {"Refusal", "LostProcess", "OverLimit", "kind", "cls"}
MAKERS = {*CONSTRUCTORS, "at", "refuse", "add", "partial"}
FORM = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


def calls(code: Iterable[ast.AST]) -> Iterator[ast.Call]:
    """The calls that make a problem, directly or in a refusal of one problem."""
    for node in code:
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in CONSTRUCTORS:
                yield node
            elif isinstance(node.func, ast.Attribute) and node.func.attr == "at":
                maker = ast.unparse(node.func.value)
                if maker in REFUSALS or maker.startswith("refusal_kind("):
                    yield node


def called(call: ast.Call) -> str:
    """The last word of what is called."""
    return getattr(call.func, "attr", "") or getattr(call.func, "id", "")


def literals(code: Iterable[ast.AST]) -> set[str]:
    """The codes that a file names: as `code=` of a call that makes or forwards a problem, or as a default."""
    found: list[ast.expr | None] = []
    for node in code:
        if isinstance(node, ast.Call) and (name := called(node)) in MAKERS:
            found += [keyword.value for keyword in node.keywords if keyword.arg == "code"]
            # A conversion refuses a key: key, why, remedy, code.
            found += node.args[3:4] if name == "refuse" and isinstance(node.func, ast.Attribute) else []
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "code":
            found.append(node.value)
        elif isinstance(node, ast.FunctionDef) and node.name == "refuse":
            found += node.args.defaults
    inside = [node for value in found if value is not None for node in ast.walk(value)]
    return {
        node.value for node in inside if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value
    }


def without_code(code: Iterable[ast.AST]) -> list[int]:
    return [call.lineno for call in calls(code) if "code" not in {keyword.arg for keyword in call.keywords}]


FILES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.xdist_group("source trees")
def test_every_problem_has_a_code() -> None:
    found = {path.relative_to(SOURCE).as_posix(): without_code(nodes(path)) for path in FILES}
    assert {name: lines for name, lines in found.items() if lines} == {}
    assert sum(len(list(calls(nodes(path)))) for path in FILES) > 600
    bad = 'Refusal.at("a", "b")\nProblem("a", "b", code="c")\nkind.at(1, 2)\n'
    assert without_code(ast.walk(ast.parse(bad))) == [1, 3]


@pytest.mark.xdist_group("source trees")
def test_the_table_has_the_codes_that_are_used_and_no_others() -> None:
    used = set[str]().union(*(literals(nodes(path)) for path in FILES))
    assert used - set(CODES) == set()
    assert set(CODES) - used == set()
    for code, meaning in CODES.items():
        assert FORM.fullmatch(code), code
        assert meaning
        assert len(code) <= 30, code
    assert len(set(CODES.values())) == len(CODES)


def test_a_problem_shows_its_code_after_its_place() -> None:
    problem = Problem("optim.lrate", "no such key", "did you mean optim.lr?", code="unknown-key")
    assert str(problem) == "optim.lrate [unknown-key]: no such key\n    -> did you mean optim.lr?"
    with refuses("optim.lr", "unknown-key", "no such", remedy="optim.lr?"):
        raise Refusal([problem])
    assert not has_problem([problem], "optim.lr", "not-set")
    assert not has_problem([problem], "batch", "unknown-key")
    assert not has_problem([problem], "optim", "unknown-key", "other")
    assert not has_problem([problem], "optim", "unknown-key", remedy="other")


@pytest.mark.parametrize("where", ["optim.lr", "data/" + "long name " * 8 + "line 4", "x" * 90])
def test_printed_problems_fit_and_can_be_read_back(
    where: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    problem = Problem(where, "is wrong " * 20, "change it " * 12, code="prompt-ends-with-assistant")
    print_problems(Refusal([problem, Problem("b", "why", code="not-set")]), colour=False)
    text = capsys.readouterr().err
    first, second = printed_problems(text)
    assert (first.where, first.why, first.remedy) == (
        " ".join(where.split()),
        problem.why.strip(),
        problem.remedy.strip(),
    )
    assert (second.where, second.code, second.why, second.remedy) == ("b", "not-set", "why", "")
    assert all(len(line) <= 80 for line in text.splitlines() if " " in line.strip())


def test_the_code_is_dim_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_problems(Refusal.at("optim.lr", "why", code="not-set"), colour=True)
    line = capsys.readouterr().err.splitlines()[2]
    where, code = line.split(" ", 1)
    assert "1;31" in where
    assert "\x1b[2" in code
    assert "[not-set]" in code


@pytest.mark.parametrize("pip", [True, False])
def test_the_install_command_of_an_extra_works_in_every_folder(
    pip: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: name if pip else None)
    start = f"{sys.executable} -m pip install" if pip else f"uv pip install --python {sys.executable}"
    root = SOURCE.parents[1]
    if (root / "pyproject.toml").is_file():
        common = root / "constraints-common.txt"
        assert errors.install_command("math") == f'{start} -c "{common}" -e "{root}[math]"'
        assert common.is_file()
    monkeypatch.setattr(errors, "PACKAGE_FOLDER", tmp_path / "site-packages" / "lockstep")
    assert errors.install_command("math") == f"{start} 'math-verify>=0.8' 'pylatexenc>=2.10'"
    assert errors.install_command("gem") == f"""{start} 'gem-llm>=0.1; python_version < "3.12"'"""
