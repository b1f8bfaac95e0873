"""Stand-ins for modules of packages that are not installed, so that user files that import them can be loaded.

Only host processes of environments install stand-ins. If the package is installed, its own modules are used.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

# Environments are created in threads, and a second thread must not find half of the modules.
_INSTALLING = threading.Lock()


def install_stand_ins(package: str, modules: Mapping[str, Mapping[str, Any]]) -> None:
    """Registers `modules` (their names, each with its contents) unless the package is installed. Their parents become
    empty packages."""
    with _INSTALLING:
        if package not in sys.modules and find_spec(package) is None:
            _install(package, modules)


def _install(package: str, modules: Mapping[str, Mapping[str, Any]]) -> None:
    for name, contents in modules.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            made = ".".join(parts[:end])
            if made not in sys.modules:
                module = ModuleType(made, f"A stand-in of lockstep: the package {package} is not installed.")
                module.__path__ = []
                module.__spec__ = ModuleSpec(made, None, is_package=True)
                sys.modules[made] = module
                if end > 1:
                    setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], module)
        vars(sys.modules[name]).update(contents)
