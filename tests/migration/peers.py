"""The other trainers' own modules, in the versions whose commands are understood.

They are installed without the packages that only their clusters and devices need. What such a package is imported for
does not run here, so a module of the same name that does nothing stands in while theirs is loaded.
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import cache
from importlib.machinery import ModuleSpec
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

FOLDER = Path(os.environ.get("LOCKSTEP_PEERS", "nowhere"))
VERL, OPENRLHF = ("0.4.1", "0.9.1"), ("0.7.5", "0.11.2")
ABSENT = (
    "ray", "deepspeed", "vllm", "flash_attn", "datasets", "torchdata", "codetiming", "orjson", "aiohttp",
    "pandas", "cachetools", "fastapi", "uvicorn", "PIL", "zmq", "sglang", "hydra", "loralib", "optimum", "bitsandbytes",
)  # fmt: skip


class _Nothing(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class _Finder:
    """Modules of ABSENT and their submodules, and the peer itself without its `__init__`."""

    def __init__(self, root: Path, peer: str):
        self.root, self.peer = root, peer

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        top = name.split(".")[0]
        if top in ABSENT:
            return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        if name == self.peer:
            spec = ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [str(self.root / name)]
            return spec
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Nothing(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []


@contextmanager
def _entered(peer: str, version: str) -> Iterator[None]:
    root = FOLDER / f"{peer}-{version}"
    assert root.is_dir(), f"{root} is not there: run `make test-migration`"
    before = set(sys.modules)
    finder = _Finder(root, peer)
    sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
    sys.path.insert(0, str(root))
    try:
        yield
    finally:
        sys.path.remove(str(root))
        sys.meta_path.remove(finder)  # type: ignore[arg-type]
        for name in set(sys.modules) - before:
            # The next version has the same names, and nobody else is to find what does nothing.
            if name.split(".")[0] in (peer, *ABSENT):
                del sys.modules[name]


@cache
def module(peer: str, version: str, name: str) -> Any:
    """`name` without the peer's own, as in `trainer.ppo.core_algos`."""
    with _entered(peer, version):
        return importlib.import_module(f"{peer}.{name}")


@cache
def agent_module(version: str, name: str) -> Any:
    """A module of verl that imports names from the package itself, which has no `__init__` here."""
    with _entered("verl", version):
        vars(importlib.import_module("verl"))["DataProto"] = importlib.import_module("verl.protocol").DataProto
        return importlib.import_module(f"verl.{name}")


def openrlhf_arguments(version: str, program: str, words: Sequence[str]) -> Namespace:
    """A command's settings as the program itself reads them, with its own defaults and corrections."""
    path = FOLDER / f"openrlhf-{version}" / "openrlhf" / "cli" / f"{program}.py"
    (block,) = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.If)]
    assert ast.unparse(block.body[-1]) == "train(args)"
    code = compile(ast.Module(block.body[:-1], []), str(path), "exec")
    scope: dict[str, Any] = {name: importlib.import_module(name) for name in ("argparse", "os", "sys")}
    scope["datetime"] = importlib.import_module("datetime").datetime
    before = sys.argv
    sys.argv = [program, *words]
    try:
        with _entered("openrlhf", version), redirect_stdout(StringIO()):
            exec(code, scope)
    finally:
        sys.argv = before
    return scope["args"]


@cache
def _verl_defaults(version: str) -> Any:
    from omegaconf import OmegaConf

    name = "ppo_trainer.yaml" if version == "0.4.1" else "_generated_ppo_trainer.yaml"
    return OmegaConf.load(FOLDER / f"verl-{version}" / "verl" / "trainer" / "config" / name)


def verl_settings(version: str, words: Sequence[str]) -> Any:
    """A command's settings over the defaults that the package ships."""
    from omegaconf import OmegaConf

    return OmegaConf.merge(_verl_defaults(version), OmegaConf.from_dotlist([word.lstrip("+") for word in words]))
