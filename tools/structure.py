"""Prints the structure of the package: files, lines, folders, long functions, import cycles, names with two meanings.

    python tools/structure.py [folder]              structure and counts of words
    python tools/structure.py [folder] --executed   also the files that a GRPO run executes, in setup and in one step

Import cycles are counted twice: those at load time, and those that also count imports inside functions and under
TYPE_CHECKING. The exit status is 1 if there is a cycle at load time.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

LONG = 50
"""Lines of a function that one can hold in the head, from its `def` to its end."""
PACKAGE = Path(__file__).parents[1] / "src" / "lockstep"
WORDS = ("told", "said", "asked", "whole", "beside", "own", "known")
"""Words that mark sentences a newcomer misreads; docs/glossary.md has the terms to use instead."""
MOST_FILES = 25
"""Python files of one folder."""


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


def import_edges(trees: dict[str, ast.Module], packages: set[str], *, every: bool = False) -> dict[str, set[str]]:
    """Which modules each one imports as it is loaded; with `every` also inside functions and under TYPE_CHECKING."""
    return {name: set(_targets(name, tree, trees, packages, every)) - {name} for name, tree in trees.items()}


def _targets(
    name: str, tree: ast.Module, trees: dict[str, ast.Module], packages: set[str], every: bool
) -> Iterator[str]:
    for node in ast.walk(tree) if every else _loaded(tree.body):
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


def folders(root: Path) -> list[tuple[int, str]]:
    """(files, folder) of folders with more than MOST_FILES Python files."""
    counts = Counter(path.parent.relative_to(root).as_posix() for path in root.rglob("*.py"))
    return sorted(((count, name) for name, count in counts.items() if count > MOST_FILES), reverse=True)


def shared_file_names(root: Path) -> dict[str, list[str]]:
    """File names that occur in several folders."""
    homes: dict[str, list[str]] = defaultdict(list)
    for path in sorted(root.rglob("*.py")):
        if not path.name.startswith("__"):
            homes[path.name].append(path.parent.relative_to(root).as_posix())
    return {name: places for name, places in homes.items() if len(places) > 1}


def word_counts(texts: list[str]) -> dict[str, int]:
    found = Counter(word.lower() for text in texts for word in re.findall(r"[A-Za-z]+", text))
    return {word: found[word] for word in WORDS}


def report(root: Path) -> tuple[str, bool]:
    """The text, and whether modules import each other in a cycle when they are loaded."""
    trees = modules(root)
    packages = {".".join([root.name, *p.parent.relative_to(root).parts]) for p in root.rglob("__init__.py")}
    texts = [path.read_text(encoding="utf-8") for path in root.rglob("*.py")]
    lines = [line for text in texts for line in text.splitlines()]
    imports = sum(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
    )
    long, names = long_functions(trees), shared_names(trees)
    loaded = circles(import_edges(trees, packages))
    every = circles(import_edges(trees, packages, every=True))
    out = [f"files: {len(trees)}", f"lines: {len(lines):,}"]
    out.append(f"import lines: {imports:,} ({100 * imports / max(1, len(lines)):.1f} %)")
    out.append(f"folders over {MOST_FILES} files: {len(folders(root))}")
    out += [f"  {count:4} {name}" for count, name in folders(root)]
    out.append(f"functions over {LONG} lines: {len(long)}")
    out += [f"  {length:4} {name}" for length, name in long]
    out.append(f"import cycles at load time: {len(loaded)}")
    out += [f"  {' <> '.join(circle)}" for circle in loaded]
    out.append(f"import cycles with function-level imports: {len(every)}")
    out += [f"  {' <> '.join(circle)}" for circle in every]
    out.append(f"file names in several folders: {len(shared_file_names(root))}")
    out += [f"  {name}: {', '.join(places)}" for name, places in shared_file_names(root).items()]
    out.append("words: " + ", ".join(f"{word} {count}" for word, count in word_counts(texts).items()))
    out.append(f"names of more than one type: {len(names)}")
    out += [f"  {name}: {', '.join(found)}" for name, found in names.items()]
    return "\n".join(out), bool(loaded)


EXECUTED = """
import json, sys, threading
from pathlib import Path

phase, files = ["setup"], {"setup": set(), "step": set(), "rest": set()}
root = sys.argv[1]

def profile(frame, event, argument):
    name = frame.f_code.co_filename
    # The body of a module runs once, when it is imported, which says nothing about the step.
    if event == "call" and name.startswith(root) and frame.f_code.co_name != "<module>":
        files[phase[0]].add(name)

from lockstep.train import training

begin, finish = training.Training.step, training.Training.finish_step

def step(self, number):
    phase[0] = "step" if number == 2 else "rest"
    return begin(self, number)

def finish_step(self, number, metrics):
    finish(self, number, metrics)
    phase[0] = "rest"

training.Training.step, training.Training.finish_step = step, finish_step
threading.setprofile(profile)
sys.setprofile(profile)
import lockstep

lockstep.train("grpo-arithmetic", **{
    "run": {"steps": 2}, "model": {"path": "model"}, "data": {"train": "carry/train.parquet"},
    "batch": {"prompts": 4}, "rollout": {"n": 2, "max_tokens": 8}, "checkpoint": {"every": None},
    "val": {"questions": None, "at_start": False, "every": None},
})
sys.setprofile(None)
print(json.dumps({name: sorted(found) for name, found in files.items()}))
"""


def executed(root: Path) -> str:
    """The files whose functions a GRPO run calls before its first step, and in its second step."""
    environment = {**os.environ, "PYTHONPATH": str(root.parent)}
    with tempfile.TemporaryDirectory() as folder:
        for words in (["tiny", "model"], ["data", "arithmetic", "carry"]):
            subprocess.run([sys.executable, "-m", root.name, *words], cwd=folder, env=environment, check=True)
        script = [sys.executable, "-c", EXECUTED, f"{root}{os.sep}"]
        done = subprocess.run(script, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return f"files executed: setup {len(found['setup'])}, step {len(found['step'])}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=PACKAGE)
    parser.add_argument("--executed", action="store_true")
    options = parser.parse_args()
    text, circular = report(options.folder)
    print(text)
    if options.executed:
        print(executed(options.folder.resolve()))
    return 1 if circular else 0


if __name__ == "__main__":
    sys.exit(main())
