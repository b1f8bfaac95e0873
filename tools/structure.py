"""Prints the shape of the package: files, lines, long functions, circles of imports, and names that mean two things.

    python tools/structure.py [folder]

The exit status is 1 where modules import each other in a circle.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

LONG = 50
"""Lines of a function that one can hold in the head, from its `def` to its end."""
PACKAGE = Path(__file__).parents[1] / "src" / "lockstep"


def modules(root: Path) -> dict[str, ast.Module]:
    """Every module below `root` by its dotted name, the root's own name first."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = [root.name, *path.relative_to(root).with_suffix("").parts]
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def long_functions(trees: dict[str, ast.Module]) -> list[tuple[int, str]]:
    """(lines, module.function) of those over the limit, the longest first."""
    found = [
        (node.end_lineno - node.lineno + 1, f"{name}.{node.name}")
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
    ]
    return sorted((entry for entry in found if entry[0] > LONG), reverse=True)


def import_edges(trees: dict[str, ast.Module], packages: set[str]) -> dict[str, set[str]]:
    """Which modules each one imports as it is loaded: not those inside functions or under TYPE_CHECKING."""
    return {name: set(_targets(name, tree, trees, packages)) - {name} for name, tree in trees.items()}


def _targets(name: str, tree: ast.Module, trees: dict[str, ast.Module], packages: set[str]) -> Iterator[str]:
    for node in _loaded(tree.body):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in trees)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                home = name.split(".")[: None if name in packages else -1]
                base = ".".join([*home[: len(home) - node.level + 1], *([base] if base else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                if inner in trees or base in trees:
                    yield inner if inner in trees else base


def _loaded(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when the module is imported."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            if "TYPE_CHECKING" not in ast.unparse(node.test):
                yield from _loaded(node.body)
            yield from _loaded(node.orelse)
        elif isinstance(node, ast.Try):
            yield from _loaded([*node.body, *(s for handler in node.handlers for s in handler.body), *node.orelse])
        elif isinstance(node, ast.With | ast.ClassDef):
            yield from _loaded(node.body)


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules each of which reaches the others (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in sorted(edges[name]):
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in edges:
        if name not in index:
            visit(name)
    return sorted(found)


def shared_names(trees: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Names that two modules or more give to a class, or to a class and a type of another making."""
    owners: dict[str, list[str]] = defaultdict(list)
    classes: set[str] = set()
    for module, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                owners[node.name].append(module)
                classes.add(node.name)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and _is_type(node.value):
                owners[node.targets[0].id].append(module)
    return {name: found for name, found in sorted(owners.items()) if len(found) > 1 and name in classes}


def _is_type(value: ast.expr) -> bool:
    """`Row = dict[str, Any]`, `Loss = Callable[...]`, `Turns = str | list[Message]`."""
    return isinstance(value, ast.Subscript) or (isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitOr))


def report(root: Path) -> tuple[str, bool]:
    """The text, and whether there is a circle."""
    trees = modules(root)
    packages = {".".join([root.name, *p.parent.relative_to(root).parts]) for p in root.rglob("__init__.py")}
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in root.rglob("*.py"))
    long, round_trips, names = long_functions(trees), circles(import_edges(trees, packages)), shared_names(trees)
    said = [f"files: {len(trees)}", f"lines: {lines:,}", f"functions over {LONG} lines: {len(long)}"]
    said += [f"  {length:4} {name}" for length, name in long]
    said.append(f"circles of imports: {len(round_trips)}")
    said += [f"  {' <> '.join(circle)}" for circle in round_trips]
    said.append(f"names of more than one type: {len(names)}")
    said += [f"  {name}: {', '.join(found)}" for name, found in names.items()]
    return "\n".join(said), bool(round_trips)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=PACKAGE)
    text, circular = report(parser.parse_args().folder)
    print(text)
    return 1 if circular else 0


if __name__ == "__main__":
    sys.exit(main())
