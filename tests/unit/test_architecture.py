"""The house rules that a reader relies on: accelerators are named in one place, imports go down, extras stay outside.

Each rule is a function from a package folder to its violations, so that the tests below can show it a bad house too.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import lockstep
from lockstep.recipe.methods import OFFLINE, ONLINE
from lockstep.recipe.registry import ESTIMATORS, LOSSES
from source_trees import nodes, parsed

HOUSE = Path(lockstep.__file__).parent
PACKAGE = "lockstep"


class Violation(NamedTuple):
    file: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}"


def listing(violations: Iterable[Violation]) -> str:
    return "\n" + "\n".join(str(violation) for violation in violations)


def modules(root: Path) -> Iterator[tuple[str, Path]]:
    """Every Python file of the package, with its path in the package."""
    for path in sorted(root.rglob("*.py")):
        yield path.relative_to(root).as_posix(), path


# The rules share the syntax trees, so one worker runs all of them.
pytestmark = pytest.mark.xdist_group("source trees")


# (a) Accelerators are named in their own folders only ------------------------------------------------------------

# doctor/ reports on the vendors' software, compat/ reads other projects' command lines: both are about those names.
MAY_NAME_ACCELERATORS = ("device/", "kernels/", "doctor/", "compat/")

ACCELERATOR = re.compile(r"(cuda|nccl|hccl)[a-z0-9]*|npu[s0-9]*|ascend[0-9]*")


@cache
def names_an_accelerator(text: str) -> bool:
    """Whether a word of the text, or a part of a name (snake_case, CamelCase), is an accelerator's."""
    parts = re.findall(r"[A-Z]+s?(?![a-z])|[A-Z]?[a-z0-9]+", text)
    return any(ACCELERATOR.fullmatch(part.lower()) for part in parts)


def accelerator_names(root: Path) -> list[Violation]:
    """Names and strings in code that speak of an accelerator. Comments and docstrings may."""
    found = []
    for file, path in modules(root):
        if file.startswith(MAY_NAME_ACCELERATORS):
            continue
        for name, line in names_in_code(path):
            if names_an_accelerator(name):
                found.append(Violation(file, line, f"name {name}"))
        for constant in strings_in_code(path):
            text = str(constant.value)
            if names_an_accelerator(text):
                found.append(Violation(file, constant.lineno, f"string {text!r}"))
    return found


def names_in_code(path: Path) -> Iterator[tuple[str, int]]:
    """Every identifier, whatever it names: all text in a syntax tree that is not a constant is one."""
    for node in nodes(path):
        if isinstance(node, ast.Constant):
            continue
        for _, value in ast.iter_fields(node):
            for name in value if isinstance(value, list) else [value]:
                if isinstance(name, str):
                    yield name, getattr(node, "lineno", 1)


def strings_in_code(path: Path) -> Iterator[ast.Constant]:
    """Strings that the program uses. One that stands alone as a statement is documentation."""
    alone = {id(node.value) for node in nodes(path) if isinstance(node, ast.Expr)}
    for node in nodes(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node


def test_accelerators_are_named_in_their_own_folders_only() -> None:
    violations = accelerator_names(HOUSE)
    assert not violations, listing(violations) + "\nput the fact on a Device (device/) and ask it for it"


@pytest.mark.parametrize(
    ("code", "hits"),
    [
        ("x.cuda()", ["name cuda"]),
        ("print('2 NPUs', 'npu0', 'Ascend910B')", ["string '2 NPUs'", "string 'npu0'", "string 'Ascend910B'"]),
        ("is_cuda = 1", ["name is_cuda"]),
        ("print(f'{x.cuda()}')", ["name cuda"]),
        ("def to_npu(hccl, *, x=1): ...", ["name to_npu", "name hccl"]),
        ("torch.npu.synchronize()", ["name npu"]),
        ("NpuFusedAdamW()", ["name NpuFusedAdamW"]),
        ("CUDAGraph()", ["name CUDAGraph"]),
        ("import torch_npu", ["name torch_npu"]),
        ("f(backend='nccl')", ["string 'nccl'"]),
        ("f'cpu:gloo,npu:hccl{x}'", ["string 'cpu:gloo,npu:hccl'"]),
        ("os.environ['ASCEND_RT_VISIBLE_DEVICES']", ["string 'ASCEND_RT_VISIBLE_DEVICES'"]),
        ("f('cuda:0')  # reached", ["string 'cuda:0'"]),
        ("'''About cuda.'''\nx = 1  # and npu\ndef f():\n    '''hccl'''", []),
        ("input_ids = sorted(ascending, key='barracuda')", []),
    ],
)
def test_the_accelerator_rule_can_fail(tmp_path: Path, code: str, hits: list[str]) -> None:
    write(tmp_path, {"train/step.py": code, "device/ok.py": code, "kernels/ok.py": code})
    assert [violation.what for violation in accelerator_names(tmp_path)] == hits


# (b) Imports go down ---------------------------------------------------------------------------------------------

# From the top. A module imports from its own package, from those beside it while no circle results, and from below.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("__main__", "cli"),
    ("api",),
    ("commands", "parity", "compat", "serve"),
    ("train", "preflight"),
    ("evaluate",),
    ("methods",),
    ("environments", "rollout", "reward"),
    ("tape",),
    ("data", "model", "run", "launch", "http_server", "optimizers"),
    ("parallel",),
    ("kernels",),
    ("device", "doctor"),
    (
        "types",
        "trajectory",
        "recipe",
        "recipes",
        "algorithms",
        "functions",
        "errors",
        "masking",
        "page",
        "http_client",
        "vision",
        "version",
    ),
)
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}


class Import(NamedTuple):
    file: str
    line: int
    target: str
    in_function: bool
    for_types: bool


@cache
def imports(root: Path) -> tuple[Import, ...]:
    """Every import of every module, wherever it stands (also under TYPE_CHECKING), as absolute dotted names."""
    return tuple(line for file, path in modules(root) for line in imports_below(parsed(path), file, False, False))


def imports_below(node: ast.AST, file: str, in_function: bool, for_types: bool) -> Iterator[Import]:
    in_function |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    for_types |= isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
    for target in targets(node, file):
        yield Import(file, node.lineno, target, in_function, for_types)  # type: ignore[attr-defined]
    for child in ast.iter_child_nodes(node):
        yield from imports_below(child, file, in_function, for_types)


def targets(node: ast.AST, file: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            home = [PACKAGE, *Path(file).parent.parts]
            base = ".".join([*home[: len(home) - node.level + 1], *([base] if base else [])])
        # `from package import module` may name a module or a thing in it; the longer name serves both.
        return [f"{base}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if function in ("import_module", "__import__"):
            return [str(node.args[0].value)]
    return []


def home_of(file: str) -> str:
    """The first name below the package: `data` for data/a.py, `cli` for cli.py, nothing for the package itself."""
    first = Path(file).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def layer_violations(root: Path) -> list[Violation]:
    found = []
    edges: dict[str, set[str]] = {}
    for file, _ in modules(root):
        if home_of(file) and home_of(file) not in RANK:
            found.append(
                Violation(file, 1, f"{home_of(file)} has no layer: give it one in LAYERS, and in the design page")
            )
    for line in imports(root):
        parts = line.target.split(".")
        source, target = home_of(line.file), parts[1] if parts[0] == PACKAGE and len(parts) > 1 else ""
        if target == source or target not in RANK or (source and source not in RANK):
            continue
        if not source:
            # The package itself is imported by everything, so it may only bring in what is cheap and needs nothing.
            # The names it offers are loaded when they are asked for.
            if target not in ("device", "version") and not (line.in_function or line.for_types):
                found.append(Violation(line.file, line.line, f"the package itself imports {line.target}"))
            continue
        edges.setdefault(source, set()).add(target)
        if RANK[target] < RANK[source]:
            found.append(Violation(line.file, line.line, f"{source} imports {line.target} from a layer above"))
    found += [Violation(circle[0], 1, "circle of packages: " + " > ".join(circle)) for circle in circles(edges)]
    return found


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Circles among packages of one layer; a circle through layers has an upward import, which is reported itself."""
    found = []

    def walk(trail: list[str]) -> None:
        for target in sorted(edges.get(trail[-1], ())):
            if RANK[target] != RANK[trail[0]]:
                continue
            if target == trail[0] and target == min(trail):
                found.append([*trail, target])
            elif target not in trail:
                walk([*trail, target])

    for start in sorted(edges):
        walk([start])
    return found


def test_every_folder_says_what_lives_there() -> None:
    folders = {path.parent for path in HOUSE.rglob("*.py")}
    silent = {folder for folder in folders if not ast.get_docstring(parsed(folder / "__init__.py"))}
    assert not silent


def test_imports_go_down_the_layers() -> None:
    violations = layer_violations(HOUSE)
    assert not violations, listing(violations)


@pytest.mark.parametrize(
    ("files", "hits"),
    [
        ({"data/sources/read.py": "from lockstep.errors import Refusal\nfrom lockstep.model.load import load\n"}, []),
        ({"__init__.py": "import lockstep.device\n", "cli.py": "from lockstep.version import __version__\n"}, []),
        (
            {"device/cpu.py": "from lockstep.train.step import x\n"},
            ["device imports lockstep.train.step.x from a layer above"],
        ),
        ({"device/cpu.py": "from lockstep import train\n"}, ["device imports lockstep.train from a layer above"]),
        ({"data/prepare/a.py": "from ... import cli\n"}, ["data imports lockstep.cli from a layer above"]),
        (
            {"data/a.py": "from ..rollout.engine import x\n"},
            ["data imports lockstep.rollout.engine.x from a layer above"],
        ),
        ({"data/prepare/a.py": "from ..read import x\nfrom .b import y\n"}, []),
        (
            {"types.py": "if TYPE_CHECKING:\n    from lockstep.run.folder import Folder\n"},
            ["types imports lockstep.run.folder.Folder from a layer above"],
        ),
        (
            {"kernels/a.py": "def f():\n    import_module('lockstep.parallel')\n"},
            ["kernels imports lockstep.parallel from a layer above"],
        ),
        ({"helpers/a.py": ""}, ["helpers has no layer: give it one in LAYERS, and in the design page"]),
        ({"__init__.py": "from lockstep.train import x\n"}, ["the package itself imports lockstep.train.x"]),
        (
            {
                "__init__.py": "if TYPE_CHECKING:\n    from lockstep.api.handle import load\n"
                "def __getattr__(name):\n    return import_module('lockstep.train')\n"
            },
            [],
        ),
        (
            {"train/a.py": "from lockstep.api.handle import x\n"},
            ["train imports lockstep.api.handle.x from a layer above"],
        ),
        (
            {
                "data/a.py": "import lockstep.model\n",
                "model/a.py": "import lockstep.run\n",
                "run/a.py": "import lockstep.data",
            },
            ["circle of packages: data > model > run > data"],
        ),
    ],
)
def test_the_layer_rule_can_fail(tmp_path: Path, files: dict[str, str], hits: list[str]) -> None:
    write(tmp_path, files)
    assert [violation.what for violation in layer_violations(tmp_path)] == hits


# (c) The command line starts fast --------------------------------------------------------------------------------

HEAVY = ("torch", "transformers", "pydantic")


def heavy_imports(module: str, search: Path, heavy: Sequence[str] = HEAVY) -> list[str]:
    """Which of the heavy packages (or modules in one) `import module` brings in, in a fresh interpreter."""
    code = f"import sys; sys.path.insert(0, {str(search)!r}); import {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    brought = set(done.stdout.split())
    return sorted(name for name in heavy if name in brought)


@pytest.mark.parametrize("module", ["lockstep", "lockstep.device", "lockstep.cli", "lockstep.model.gguf"])
def test_importing_the_command_line_is_light(module: str) -> None:
    if module == "lockstep.cli" and not (HOUSE / "cli.py").exists():
        pytest.skip("no cli.py yet")
    assert heavy_imports(module, HOUSE.parent) == []


# Each takes about a second to import, and none is needed before a run has said what it runs on.
LATE = (
    "transformers",
    "peft",
    "accelerate",
    "datasets",
    "pandas",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
)
FIRST_LINE = "lockstep.train.offline, lockstep.train.online, lockstep.train.online_async, lockstep.commands.plan"


def test_the_loops_say_their_first_line_before_heavy_packages_are_imported() -> None:
    assert heavy_imports(FIRST_LINE, HOUSE.parent, LATE) == []


def test_a_process_that_calls_functions_starts_in_a_moment() -> None:
    """Every run that rewards by a function starts some of them, and what they import is imported by each."""
    brought = heavy_imports(
        "lockstep.launch.supervisor, lockstep.reward.function_worker",
        HOUSE.parent,
        (*HEAVY, "numpy", "asyncio", "yaml"),
    )
    assert brought == []


def test_the_light_import_rule_can_fail(tmp_path: Path) -> None:
    write(
        tmp_path, {"slow/cli.py": "import slow.schema", "slow/schema.py": "import pydantic", "pydantic/__init__.py": ""}
    )
    assert heavy_imports("slow.cli", tmp_path) == ["pydantic"]


# (d) Optional packages stay in their adapters --------------------------------------------------------------------

# package -> the files that may import it, inside their functions.
ADAPTERS: dict[str, tuple[str, ...]] = {
    "wandb": ("run/trackers/wandb.py",),
    "mlflow": ("run/trackers/mlflow.py",),
    "swanlab": ("run/trackers/swanlab.py",),
    "tensorboard": ("run/trackers/tensorboard.py", "parity/compare/logs/binary_logs.py"),
    "datasets": ("data/sources/read.py",),
    "gguf": ("model/gguf.py",),
    "ray": ("launch/ray_*.py",),
    "gymnasium": ("environments/adapters/gymnasium_env.py",),
    "textarena": ("environments/adapters/textarena_env.py",),
    "reasoning_gym": ("environments/adapters/reasoning_gym_env.py",),
    "gem": ("environments/adapters/gem_env.py",),
    "websockets": ("environments/adapters/openenv_client.py",),
    # The plugin runs in the Python of vLLM, which needs Pillow itself.
    "PIL": ("vision/images.py", "rollout/servers/plugin/lockstep_samples.py"),
    "vllm": ("rollout/servers/plugin/lockstep_vllm.py", "rollout/servers/plugin/lockstep_samples.py"),
    "sglang": ("rollout/servers/plugin/*.py",),
    "torch_npu": ("device/npu.py", "kernels/*_npu.py", "kernels/attention/npu_*.py"),
    "math_verify": ("reward/*.py",),
    "trl": (),
    "starlette": ("http_server/asgi.py",),
    "uvicorn": ("http_server/asgi.py",),
}
# Adapters with an optional package at the top: other modules import them inside functions only.
LAZY_ADAPTERS = ("http_server/asgi.py",)


def optional_package(target: str) -> str | None:
    # torch's writer is a door to the tensorboard package and fails without it.
    if target.startswith("torch.utils.tensorboard"):
        return "tensorboard"
    first = target.split(".")[0]
    return first if first in ADAPTERS else None


def module_name(file: str) -> str:
    return ".".join([PACKAGE, *Path(file).with_suffix("").parts])


def optional_imports(root: Path) -> list[Violation]:
    found = []
    for line in imports(root):
        adapter = next((file for file in LAZY_ADAPTERS if line.target.startswith(module_name(file))), None)
        if adapter is not None and not line.in_function:
            found.append(Violation(line.file, line.line, f"imports {adapter} outside of a function"))
        package = optional_package(line.target)
        if package is None:
            continue
        if not any(fnmatch(line.file, pattern) for pattern in ADAPTERS[package]):
            allowed = ", ".join(ADAPTERS[package]) or "no file of the package"
            found.append(Violation(line.file, line.line, f"imports {package}; allowed in {allowed}"))
        elif not line.in_function and line.file not in LAZY_ADAPTERS:
            found.append(Violation(line.file, line.line, f"imports {package} outside of a function"))
    return found


def test_optional_packages_are_imported_by_their_adapters_only() -> None:
    violations = optional_imports(HOUSE)
    assert not violations, listing(violations)


@pytest.mark.parametrize(
    ("files", "hits"),
    [
        ({"run/trackers/wandb.py": "class Wandb:\n    def start(self):\n        import wandb\n"}, []),
        ({"run/trackers/wandb.py": "import wandb\n"}, ["imports wandb outside of a function"]),
        (
            {"run/trackers/mlflow.py": "try:\n    import mlflow\nexcept ImportError: ...\n"},
            ["imports mlflow outside of a function"],
        ),
        (
            {"run/trackers/tensorboard.py": "from torch.utils.tensorboard import SummaryWriter\n"},
            ["imports tensorboard outside of a function"],
        ),
        (
            {"train/a.py": "def f():\n    import torch_npu\n"},
            ["imports torch_npu; allowed in device/npu.py, kernels/*_npu.py, kernels/attention/npu_*.py"],
        ),
        ({"kernels/norm_npu.py": "def f():\n    import torch_npu\n"}, []),
        ({"train/a.py": "def f():\n    from trl import x\n"}, ["imports trl; allowed in no file of the package"]),
        (
            {
                "http_server/asgi.py": "import uvicorn\n",
                "serve/a.py": "def f():\n    from lockstep.http_server import asgi\n",
            },
            [],
        ),
        (
            {"serve/a.py": "from lockstep.http_server import asgi\n"},
            ["imports http_server/asgi.py outside of a function"],
        ),
        ({"serve/a.py": "import uvicorn\n"}, ["imports uvicorn; allowed in http_server/asgi.py"]),
        (
            {"data/sources/mix.py": "def f():\n    import_module('datasets')\n"},
            ["imports datasets; allowed in data/sources/read.py"],
        ),
        ({"data/sources/read.py": "from lockstep.data.datasets import x\nfrom .gguf import y\nimport rays\n"}, []),
    ],
)
def test_the_optional_package_rule_can_fail(tmp_path: Path, files: dict[str, str], hits: list[str]) -> None:
    write(tmp_path, files)
    assert [violation.what for violation in optional_imports(tmp_path)] == hits


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


# (e) Methods, estimators and losses are known by their rows ------------------------------------------------------

# Where the rows are. Elsewhere a name may be looked up and written down, and never decides anything.
MAY_COMPARE_NAMES = ("methods/", "recipe/", "algorithms/", "compat/")
METHOD_NAMES = {*OFFLINE, *ONLINE, *ESTIMATORS, *LOSSES} - {"clip"}


def compared_names(root: Path) -> list[Violation]:
    """Comparisons with the name of a method, an estimator or a policy loss."""
    found = []
    for file, path in modules(root):
        if file.startswith(MAY_COMPARE_NAMES):
            continue
        for node in nodes(path):
            sides: list[ast.AST] = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            sides += [node.pattern] if isinstance(node, ast.match_case) else []
            for side in sides:
                names = {leaf.value for leaf in ast.walk(side) if isinstance(leaf, ast.Constant)} & METHOD_NAMES
                found += [Violation(file, side.lineno, f"compares with {name!r}") for name in sorted(names)]  # type: ignore[attr-defined]
    return found


def test_no_method_is_told_by_its_name() -> None:
    violations = compared_names(HOUSE)
    assert not violations, listing(violations)


@pytest.mark.parametrize(
    "line",
    ['method == "grpo"', '"rm" != method', 'loss in ("clip_cov", "kl_cov")', 'x = 1 if advantage == "gae" else 2'],
)
def test_the_name_rule_can_fail(tmp_path: Path, line: str) -> None:
    code = f"def f(method, loss, advantage):\n    {line}\n"
    write(tmp_path, {"train/loop.py": code, "recipe/ok.py": code, "methods/ok.py": code})
    assert {violation.file for violation in compared_names(tmp_path)} == {"train/loop.py"}


# (f) Test files stand alone ----------------------------------------------------------------------------------------


def imports_of_tests(root: Path) -> list[Violation]:
    """Test files that import another one: what both need belongs into tests/support."""
    line = re.compile(r"^\s*(from|import)\b.*\btest_", re.MULTILINE)
    return [
        Violation(file, node.lineno, name)
        for file, path in modules(root)
        if line.search(path.read_text(encoding="utf-8"))
        for node in nodes(path)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""])
        if name.split(".")[-1].startswith("test_")
    ]


def test_no_test_file_imports_another(tmp_path: Path) -> None:
    found = imports_of_tests(Path(__file__).parents[1])
    assert not found, listing(found)
    (tmp_path / "test_a.py").write_text("import os\nfrom test_b import helper\nfrom .test_c import other\n")
    assert [violation.line for violation in imports_of_tests(tmp_path)] == [2, 3]
