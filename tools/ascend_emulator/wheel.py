"""What the installed torch and torch_npu wheels are and ask for, found without importing either of them.

Importing torch would load torch_npu, which cannot be loaded before the emulated libraries exist.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ascend_emulator.problems import CannotEmulate

# The version whose headers, symbols and operators the emulation was written for.
VERSION = "2.13.0"

_CANN_SYMBOL = re.compile(r"acl|Hccl|rt[A-Z]|Msprof")
_CANN_LIBRARY = re.compile(r"\[(lib(?:hccl|ascendcl|acl_\w+|ge_runner|graph)\.so)\]")


@dataclass(frozen=True)
class Wheels:
    torch: Path
    torch_npu: Path

    @property
    def acl_headers(self) -> Path:
        return self.torch_npu / "include" / "third_party" / "acl" / "inc"

    @property
    def hccl_headers(self) -> tuple[Path, Path]:
        return self.torch_npu / "include", self.torch_npu / "include" / "third_party" / "hccl" / "inc"

    @property
    def torch_headers(self) -> Path:
        return self.torch / "include"

    @property
    def torch_libraries(self) -> Path:
        return self.torch / "lib"

    def objects(self) -> list[Path]:
        """The shared objects of torch_npu that are loaded with it."""
        named = [self.torch_npu / "lib" / f"lib{name}.so" for name in ("torch_npu", "tensorpipe", "npu_profiler")]
        return [*sorted(self.torch_npu.glob("_C*.so")), *(path for path in named if path.exists())]


@dataclass(frozen=True)
class Requirements:
    """What torch_npu wants of a CANN installation."""

    symbols: frozenset[str]
    libraries: frozenset[str]


def installed() -> Wheels:
    """The wheels of this interpreter, or the reason why they cannot be used."""
    torch, torch_npu = (_folder(package) for package in ("torch", "torch_npu"))
    return Wheels(torch, torch_npu)


def _folder(package: str) -> Path:
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError as error:
        raise CannotEmulate(f"package {package} is not installed") from error
    if version.split("+")[0] != VERSION:
        raise CannotEmulate(f"{package} {version} is installed and the emulator is written for {VERSION}")
    return Path(str(metadata.distribution(package).locate_file(package)))


def requirements(wheels: Wheels) -> Requirements:
    """The CANN symbols that torch_npu links to and does not bring itself, and the CANN libraries that it names."""
    objects = wheels.objects()
    wanted = _union(dynamic_symbols(path, "--undefined-only") for path in objects)
    brought = _union(dynamic_symbols(path, "--defined-only") for path in objects)
    libraries = {name for path in objects for name in _CANN_LIBRARY.findall(_output("readelf", "-d", str(path)))}
    return Requirements(
        frozenset(symbol for symbol in wanted - brought if _CANN_SYMBOL.match(symbol)), frozenset(libraries)
    )


def dynamic_symbols(path: Path, kind: str) -> set[str]:
    """Dynamic symbols of a shared object; `kind` is --undefined-only or --defined-only."""
    lines = _output("nm", "-D", kind, str(path)).splitlines()
    return {line.split()[-1].split("@")[0] for line in lines if line.strip()}


def _union(sets: Iterable[set[str]]) -> set[str]:
    return set().union(*sets)


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
