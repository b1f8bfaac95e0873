"""Mutation testing: inserts small mistakes into files, one at a time, and runs tests on each mutant.

    python tools/mutants.py --seed 1 --count 40 src/lockstep/device/npu*.py -- pytest -x tests/unit/test_npu_limits.py
    python tools/mutants.py --central --count 40 --workers 2

Prints `caught` or `SURVIVED` per mutant. The first form runs any command, changes the files in place and restores
them: run it in a separate checkout. The second form tests the central files of the project with the tests that
`CENTRAL` names, several at a time, each in a copy of `src`. A survivor is a missing test or a change without effect.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

# Central files below src/lockstep and the tests below tests/ that must notice a mistake in them, fastest first.
CENTRAL: dict[str, tuple[str, ...]] = {
    "algorithms/policy_loss.py": ("unit/test_policy_loss.py",),
    "algorithms/advantage.py": ("unit/test_advantage.py",),
    "algorithms/preference.py": ("unit/test_preference_loss.py", "unit/test_preference_loss_trl.py"),
    "algorithms/kto.py": ("unit/test_kto_loss.py", "unit/test_preference_loss_trl.py"),
    "algorithms/reduce.py": (
        "unit/test_reduce.py",
        "unit/test_policy_loss.py",
        "unit/test_correction.py",
        "unit/test_advantage.py",
    ),
    "algorithms/correction.py": ("unit/test_correction.py", "unit/test_conversions_algorithms.py"),
    "data/batching.py": (
        "unit/test_batching.py",
        "unit/test_updates.py",
        "unit/test_sharing.py",
        "unit/test_groups.py",
    ),
    "data/updates.py": ("unit/test_updates.py", "unit/test_row_cache.py"),
    "rollout/native/sampler.py": ("unit/test_sampler.py",),
    "rollout/native/scheduler.py": ("unit/test_scheduler.py", "unit/test_board.py", "unit/test_sampler.py"),
    "run/checkpoint.py": ("unit/test_checkpoint.py", "unit/test_sharded_checkpoint.py", "unit/test_resume_checks.py"),
    "rollout/servers/weight_sync.py": (
        "unit/test_weight_sync.py",
        "unit/test_server_memory.py",
        "unit/test_weight_group.py",
        "unit/test_sglang.py",
        "unit/test_server_engine.py",
    ),
    "compat/key_table.py": ("unit/test_key_tables.py", "unit/test_conversions.py", "unit/test_migration_settings.py"),
    "compat/verl/verl_algorithm.py": ("unit/test_conversions_algorithms.py", "unit/test_conversions.py"),
    "compat/verl/verl_main_ppo.py": ("unit/test_conversions.py", "unit/test_conversion_rules.py"),
    "compat/openrlhf/openrlhf_ppo.py": (
        "unit/test_conversions.py",
        "unit/test_conversion_rules.py",
        "unit/test_conversions_algorithms.py",
    ),
    "compat/openrlhf/openrlhf_rules.py": (
        "unit/test_conversion_offline.py",
        "unit/test_conversion_rules.py",
        "unit/test_conversions.py",
    ),
}
ROOT = Path(__file__).parents[1]
FORKING = threading.Lock()

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
    for place, kind in _places(path):
        mutant = _mutant(path, place, kind)
        if mutant is not None:
            yield mutant


def _places(path: Path) -> list[tuple[int, int]]:
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    # Values of arguments that `_call` does not drop either.
    skipped = {id(keyword.value) for node in nodes if isinstance(node, ast.Call) for keyword in _without_effect(node)}
    return [
        (place, kind) for place, node in enumerate(nodes) if id(node) not in skipped for kind in range(_kinds(node))
    ]


def _mutant(path: Path, place: int, kind: int) -> Mutant | None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    node = _at(tree, place)
    line = getattr(node, "lineno", 0)
    what = _change(node, kind)
    if what is None:
        return None
    mutant = Mutant(path, line, what, ast.unparse(ast.fix_missing_locations(tree)) + "\n")
    return mutant if _differs(mutant) else None


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


def _without_effect(node: ast.Call) -> list[ast.keyword]:
    """On a CPU nothing depends on the device; only programming errors depend on `strict` and a dataclass's options."""
    of_dataclass = ast.unparse(node.func).endswith("dataclass")
    return [keyword for keyword in node.keywords if of_dataclass or keyword.arg in ("device", "strict")]


def _call(node: ast.Call, kind: int) -> str | None:
    before = ast.unparse(node)[:60]
    name = ast.unparse(node.func)
    if kind < len(node.keywords):
        if node.keywords[kind] in _without_effect(node):
            return None
        dropped = node.keywords.pop(kind)
        return f"{before}: without {dropped.arg}="
    if len(node.args) < 2 or any(isinstance(argument, ast.Starred) for argument in node.args[:2]):
        return None
    if name in ("max", "min") or ast.dump(node.args[0]) == ast.dump(node.args[1]):
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
    """`count` random mutants. Annotations are not evaluated in these files, so their mutants are left out."""
    places = [(path, *place) for path in files for place in _places(path)]
    random.Random(seed).shuffle(places)
    mutants = (_mutant(*place) for place in places)
    return [mutant for mutant, _ in zip((one for one in mutants if one is not None), range(count), strict=False)]


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


def test_central(count: int, seed: int, workers: int, limit: float, only: str) -> int:
    """Tests mutants of the central files in copies of `src`; prints each result and a table per file."""
    wanted = {name: tests for name, tests in CENTRAL.items() if only in name}
    chosen = [
        (mutant, tests)
        for name, tests in wanted.items()
        for mutant in drawn([ROOT / "src" / "lockstep" / name], count, seed)
    ]
    results: Counter[tuple[str, str]] = Counter()
    _preload()
    with tempfile.TemporaryDirectory() as folder:
        copies: Queue[Path] = Queue()
        for number in range(workers):
            copies.put(Path(shutil.copytree(ROOT / "src", Path(folder) / str(number) / "src")))

        def judge(chosen: tuple[Mutant, tuple[str, ...]]) -> None:
            mutant, tests = chosen
            copied = copies.get()
            try:
                verdict = _judged_in(copied, mutant, tests, limit)
            finally:
                copies.put(copied)
            name = mutant.path.relative_to(ROOT / "src" / "lockstep")
            results[str(name), verdict] += 1
            print(f"{verdict:<10} {name}:{mutant.line}  {mutant.what}", flush=True)

        def passes_unchanged(tests: tuple[str, ...]) -> bool:
            copied = copies.get()
            try:
                return _passes(copied, tests, limit)
            finally:
                copies.put(copied)

        with ThreadPoolExecutor(workers) as pool:
            for (name, _), passed in zip(wanted.items(), pool.map(passes_unchanged, wanted.values()), strict=True):
                if not passed:
                    raise SystemExit(f"{name}: its tests fail without a mistake")
            list(pool.map(judge, chosen))
    for name in CENTRAL:
        caught, survived = results[name, "caught"], results[name, "SURVIVED"]
        if caught + survived:
            print(f"{name:<36} {caught:>4} of {caught + survived} caught ({caught / (caught + survived):.0%})")
    return 1 if any(verdict == "SURVIVED" for _, verdict in results) else 0


def _preload() -> None:
    """Imports the heavy packages once: the test processes are forks."""
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in ("pytest", "hypothesis", "pydantic", "typer", "sympy", "torch.distributed", "transformers"):
        importlib.import_module(name)


def _judged_in(copied: Path, mutant: Mutant, tests: tuple[str, ...], limit: float) -> str:
    changed = copied / mutant.path.relative_to(ROOT / "src")
    kept = changed.read_text(encoding="utf-8")
    changed.write_text(mutant.source, encoding="utf-8")
    try:
        return "SURVIVED" if _passes(copied, tests, limit) else "caught"
    finally:
        changed.write_text(kept, encoding="utf-8")


def _passes(source: Path, tests: tuple[str, ...], limit: float) -> bool:
    """Whether the tests pass in a forked process that imports lockstep from `source`; not if they exceed `limit`."""
    # Packages such as filelock refuse a fork while another thread forks.
    with FORKING:
        child = os.fork()
    if child == 0:
        _run_tests(source, tests)
    end = time.monotonic() + limit
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            _kill_group(child)
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.05)
    _kill_group(child)
    os.waitpid(child, 0)
    return False


def _run_tests(source: Path, tests: tuple[str, ...]) -> None:
    code = 70
    try:
        os.setsid()
        quiet = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(quiet, stream)
        os.environ["PYTHONPATH"] = os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        sys.dont_write_bytecode = True
        sys.path.insert(0, str(source))
        os.chdir(ROOT)
        import pytest

        words = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not cuda"]
        temporary = ["--basetemp", str(source.parent / "tmp")]
        code = int(pytest.main([*words, *temporary, *(str(ROOT / "tests" / name) for name in tests)]))
    finally:
        os._exit(code)


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def main() -> int:
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--central", action="store_true", help="test the central files, several mutants at a time")
    parser.add_argument("--only", default="", help="of the central files those whose path contains this")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--first", type=int, default=1, help="begin with this one of those that were drawn")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds after which a test run counts as hanging")
    options = parser.parse_args(words[:split])
    if options.central:
        return test_central(options.count, options.seed, options.workers, options.limit, options.only)
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
