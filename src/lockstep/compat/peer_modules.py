"""Modules with the names of verl's and OpenRLHF's programs, so that a command runs when only its module name changes.

`python -m verl.trainer.main_ppo ...` becomes `python -m lockstep.compat.verl.trainer.main_ppo ...`. The modules have no
files: a finder creates them when Python looks for them. They run `python -m lockstep.compat.verl main_ppo ...`.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# The packages of each trainer that contain programs.
PACKAGES = {
    "verl": ("trainer", "recipe", "experimental", "examples", "examples.data_preprocess"),
    "openrlhf": ("cli",),
}
# Packages whose programs write data instead of training, and the module with their function `main`.
_DATA_SCRIPTS = {"examples.data_preprocess": "lockstep.compat.verl.data_preprocess"}


def is_folder(peer: str, name: str) -> bool:
    """Returns whether `name` is a package. verl's recipes are packages such as `recipe.dapo`; their programs have the
    word `main` in their names."""
    package, _, last = name.rpartition(".")
    return name in PACKAGES[peer] or (package in ("recipe", "experimental") and "main" not in last)


class PeerModules(MetaPathFinder, InspectLoader):
    """Finds the packages and programs of one trainer below `lockstep.compat.PEER`."""

    def __init__(self, peer: str):
        self.peer, self.prefix = peer, f"lockstep.compat.{peer}."

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(self.prefix):
            return None
        name = fullname.removeprefix(self.prefix)
        package, _, program = name.rpartition(".")
        if is_folder(self.peer, name):
            return ModuleSpec(fullname, self, is_package=True)
        if not is_folder(self.peer, package) or not program.isidentifier():
            return None
        return ModuleSpec(fullname, self, origin=__file__)  # Python writes the origin to sys.argv[0]

    def get_source(self, fullname: str) -> str:
        name = fullname.removeprefix(self.prefix)
        if is_folder(self.peer, name):
            return ""
        package, _, program = name.rpartition(".")
        # The folder of a recipe tells apart programs of the same name.
        start = f"from {__name__} import run", f"run({self.peer!r}, {(name if '.' in package else program)!r})"
        if package in _DATA_SCRIPTS:
            start = f"import sys; from {_DATA_SCRIPTS[package]} import main", f"main({program!r}, sys.argv[1:])"
        return f"{start[0]}\n\nif __name__ == '__main__':\n    {start[1]}\n"

    def is_package(self, fullname: str) -> bool:
        return is_folder(self.peer, fullname.removeprefix(self.prefix))


def run(peer: str, program: str) -> None:
    """Runs `python -m lockstep.compat.PEER PROGRAM` with the arguments of this process."""
    # DeepSpeed's launcher puts --local_rank before the arguments of the command.
    before = 2 if sys.argv[1:] and sys.argv[1].startswith("--local_rank") else 1
    sys.argv.insert(before, program)
    runpy.run_module(f"lockstep.compat.{peer}", run_name="__main__")


def offer(peer: str) -> None:
    """Makes the programs of a trainer importable."""
    sys.meta_path.append(PeerModules(peer))
