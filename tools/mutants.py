"""Whether the tests notice a change: small mistakes put into given files one at a time, and a test command run on each.

    python tools/mutants.py --seed 1 --count 40 src/lockstep/device/npu*.py -- pytest -x tests/unit/test_npu_limits.py

Prints a table: caught, or SURVIVED. The files are changed in place, one at a time, and put back whatever happens; run
it in a separate checkout. A survivor is a missing test, or a change that makes no difference and is to be argued.
"""

from __future__ import annotations

import argparse
import ast
import copy
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


@dataclass(frozen=True)
class Mutant:
    path: Path
    line: int
    what: str
    source: str


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Every mutant of a file. The tree is walked in order, so that the same file gives the same list."""
    text = path.read_text(encoding="utf-8")
    for place, node in enumerate(ast.walk(ast.parse(text))):
        for kind in range(_kinds(node)):
            tree = ast.parse(text)
            what = _change(_at(tree, place), kind)
            if what is not None:
                source = ast.unparse(ast.fix_missing_locations(tree))
                yield Mutant(path, getattr(node, "lineno", 0), what, source + "\n")


def _at(tree: ast.AST, place: int) -> ast.AST:
    for number, node in enumerate(ast.walk(tree)):
        if number == place:
            return node
    raise IndexError(place)


def _kinds(node: ast.AST) -> int:
    """How many changes there are of this node."""
    if isinstance(node, ast.Call):
        return len(node.keywords) + 1
    if isinstance(node, ast.FunctionDef | ast.If | ast.For | ast.With | ast.Try):
        return len(node.body)
    return 1 if isinstance(node, ast.Constant | ast.Compare | ast.BoolOp | ast.UnaryOp) else 0


def _change(node: ast.AST, kind: int) -> str | None:
    """Make the change in the tree; what it is, or None where there is nothing to change."""
    if isinstance(node, ast.Constant):
        return _constant(node)
    if isinstance(node, ast.Compare):
        before = ast.unparse(node)
        operator = COMPARISONS[type(node.ops[0])]
        node.ops[0] = operator()
        return f"{before} -> {ast.unparse(node)}"
    if isinstance(node, ast.BoolOp):
        before = ast.unparse(node)
        node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return f"{before} -> {ast.unparse(node)}"
    if isinstance(node, ast.UnaryOp):
        return _without_not(node)
    if isinstance(node, ast.Call):
        return _call(node, kind)
    return _without_statement(node, kind)


def _constant(node: ast.Constant) -> str | None:
    before = ast.unparse(node)
    if isinstance(node.value, bool):
        node.value = not node.value
    elif isinstance(node.value, int | float):
        node.value = node.value + 1
    else:
        return None  # texts are names and messages, whose tests are of another kind
    return f"{before} -> {ast.unparse(node)}"


def _without_not(node: ast.UnaryOp) -> str | None:
    if not isinstance(node.op, ast.Not):
        return None
    before = ast.unparse(node)
    node.operand = ast.UnaryOp(ast.Not(), copy.deepcopy(node.operand))
    return f"{before} -> {ast.unparse(node.operand.operand)}"


def _call(node: ast.Call, kind: int) -> str | None:
    before = ast.unparse(node)[:60]
    if kind < len(node.keywords):
        dropped = node.keywords.pop(kind)
        return f"{before}: without {dropped.arg}="
    if len(node.args) < 2 or any(isinstance(argument, ast.Starred) for argument in node.args[:2]):
        return None
    if ast.dump(node.args[0]) == ast.dump(node.args[1]):
        return None
    node.args[0], node.args[1] = node.args[1], node.args[0]
    return f"{before}: first two arguments swapped"


def _without_statement(node: ast.AST, kind: int) -> str | None:
    body: list[ast.stmt] = node.body  # type: ignore[attr-defined]
    statement = body[kind]
    words = ast.unparse(statement).splitlines()[0][:60]
    docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    # Without an import or a definition nothing runs at all, which shows nothing.
    if docstring or isinstance(statement, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.Pass):
        return None
    body[kind] = ast.Pass()
    return f"removed: {words}"


def drawn(files: list[Path], count: int, seed: int) -> list[Mutant]:
    """Annotations are not evaluated in these files, so their mutants are left out."""
    found = [mutant for path in files for mutant in mutants_of(path) if _differs(mutant)]
    return random.Random(seed).sample(found, min(count, len(found)))


def _differs(mutant: Mutant) -> bool:
    def bare(text: str) -> str:
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.arg):
                node.annotation = None
            elif isinstance(node, ast.FunctionDef):
                node.returns = None
            elif isinstance(node, ast.AnnAssign):
                node.annotation = ast.Constant(None)
        return ast.unparse(tree)

    return bare(mutant.source) != bare(mutant.path.read_text(encoding="utf-8"))


def judged(mutant: Mutant, command: list[str], limit: float) -> str:
    kept = mutant.path.read_text(encoding="utf-8")
    mutant.path.write_text(mutant.source, encoding="utf-8")
    try:
        done = subprocess.run(command, capture_output=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return "caught (it hangs)"
    finally:
        mutant.path.write_text(kept, encoding="utf-8")
    return "caught" if done.returncode else "SURVIVED"


def main() -> int:
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--first", type=int, default=1, help="begin with this one of those that were drawn")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds after which a test run counts as hanging")
    options = parser.parse_args(words[:split])
    command = words[split + 1 :]
    chosen = drawn(sorted(options.files), options.count, options.seed)
    survivors = 0
    for number, mutant in enumerate(chosen, 1):
        if number < options.first:
            continue
        verdict = judged(mutant, command, options.limit) if command else "not tried"
        survivors += verdict == "SURVIVED"
        print(f"{number:>3}  {verdict:<10} {mutant.path.name}:{mutant.line}  {mutant.what}", flush=True)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
