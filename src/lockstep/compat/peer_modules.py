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
# Below these packages, each project has a package of its own, such as `recipe.dapo.main_dapo`.
_PROJECTS = ("recipe", "experimental")
# Packages whose programs write data instead of training, and the module with their function `main`.
_DATA_SCRIPTS = {"examples.data_preprocess": "lockstep.compat.verl.data_preprocess"}


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
        if self._contains_programs(name):
            return ModuleSpec(fullname, self, is_package=True)
        if not self._contains_programs(package) or not program.isidentifier():
            return None
        return ModuleSpec(fullname, self, origin=__file__)  # Python writes the origin to sys.argv[0]

    def get_source(self, fullname: str) -> str:
        name = fullname.removeprefix(self.prefix)
        if self._contains_programs(name):
            return ""
        package, _, program = name.rpartition(".")
        # The name of a project tells apart programs of the same name, such as `one_step_off_policy.main_ppo`.
        named = name if package.count(".") else program
        start = f"from {__name__} import run", f"run({self.peer!r}, {named!r})"
        if package in _DATA_SCRIPTS:
            start = f"import sys; from {_DATA_SCRIPTS[package]} import main", f"main({program!r}, sys.argv[1:])"
        return f"{start[0]}\n\nif __name__ == '__main__':\n    {start[1]}\n"

    def is_package(self, fullname: str) -> bool:
        return self._contains_programs(fullname.removeprefix(self.prefix))

    def _contains_programs(self, name: str) -> bool:
        first, _, project = name.partition(".")
        known = PACKAGES[self.peer]
        return name in known or (first in _PROJECTS and first in known and project.isidentifier())


def run(peer: str, program: str) -> None:
    """Runs `python -m lockstep.compat.PEER PROGRAM` with the arguments of this process."""
    # DeepSpeed's launcher puts --local_rank before the arguments of the command.
    before = 2 if sys.argv[1:] and sys.argv[1].startswith("--local_rank") else 1
    sys.argv.insert(before, program)
    runpy.run_module(f"lockstep.compat.{peer}", run_name="__main__")


def offer(peer: str) -> None:
    """Makes the programs of a trainer importable."""
    sys.meta_path.append(PeerModules(peer))
