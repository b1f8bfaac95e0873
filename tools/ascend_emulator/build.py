"""Compiles the emulated CANN against the headers inside the installed wheels, into a folder of the virtual environment.

libascendcl.so             the runtime, and a stub for every entry point that is not emulated
libge_runner.so and so on  links to it, under the other names by which torch_npu asks for CANN
libhccl.so                 collectives
libopapi.so                aclnn operators (torch_npu opens it by name)
libfallback_interposer.so  makes torch_npu's CPU fall-backs countable
libhost_kernels.so         aten kernels on the host
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ascend_emulator import stubs, wheel
from ascend_emulator.problems import CannotEmulate

HERE = Path(__file__).resolve().parent
# Shaped like an installed toolkit, because torch_npu looks at the folders that its variables name.
HOME = Path(sys.prefix) / "ascend-emulator"
LIBRARIES = HOME / "lib64"
SUMMARY = HOME / "summary.json"

_RUNTIME = ("device", "memory", "streams", "options")
_HCCL = ("hccl", "hccl_segment", "hccl_reduce", "hccl_transfer")
_PROCESSORS = ("x86_64", "aarch64")


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler, and the flags that every file gets."""

    program: str

    def compile(self, *arguments: object) -> None:
        command = [self.program, "-O1", "-fPIC", "-std=c++20", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CannotEmulate(f"the compiler failed: {' '.join(command)}\n{done.stderr[-4000:]}")


def find_compiler() -> Compiler:
    if platform.system() != "Linux" or platform.machine() not in _PROCESSORS:
        raise CannotEmulate(
            f"torch_npu has wheels for Linux on {' and '.join(_PROCESSORS)} only, "
            f"and this is {platform.system()} on {platform.machine()}"
        )
    for tool in ("nm", "readelf"):
        if not shutil.which(tool):
            raise CannotEmulate(f"no {tool} found (it is part of binutils)")
    for name in ("g++", "clang++"):
        if program := shutil.which(name):
            return Compiler(program)
    raise CannotEmulate("no C++ compiler found (g++ or clang++)")


def sources() -> list[Path]:
    return sorted(path for path in HERE.rglob("*") if path.suffix in (".cpp", ".h"))


def fingerprint() -> str:
    """Changes when a source, the wheel version or this recipe changes, and then everything is compiled again."""
    digest = hashlib.sha256(wheel.VERSION.encode())
    for path in [*sources(), Path(__file__), HERE / "stubs.py", HERE / "wheel.py"]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def is_built() -> bool:
    return SUMMARY.exists() and json.loads(SUMMARY.read_text())["fingerprint"] == fingerprint()


def build() -> str:
    """Builds what is not built yet; returns a line that says what there is."""
    if not is_built():
        compiler, wheels = find_compiler(), wheel.installed()
        shutil.rmtree(HOME, ignore_errors=True)
        for folder in (LIBRARIES, HOME / "objects", HOME / "opp", HOME / "runtime", HOME / "compiler"):
            folder.mkdir(parents=True)
        # The two files that include torch's headers take nearly all the time; one core each.
        with ThreadPoolExecutor(2) as pool:
            work = [pool.submit(part, compiler, wheels) for part in (_host_kernels, _opapi, _cann)]
            counts = [job.result() for job in work][-1]
        SUMMARY.write_text(json.dumps({"fingerprint": fingerprint(), "symbols": counts}, indent=2))
    counts = json.loads(SUMMARY.read_text())["symbols"]
    return (
        f"emulated CANN in {HOME}: torch_npu links to {counts['wanted']} symbols, {counts['emulated']} emulated, "
        f"{counts['failing']} stubs that fail, {counts['harmless']} harmless"
    )


def _cann(compiler: Compiler, wheels: wheel.Wheels) -> dict[str, int]:
    """The runtime, the collectives and the stubs for whatever neither of them defines."""
    acl = f"-I{wheels.acl_headers}"
    runtime = [_object(compiler, HERE / "cann" / f"{name}.cpp", acl) for name in _RUNTIME]
    # _Float16 arithmetic needs a flag on the one processor and comes with the other.
    half = ["-mf16c"] if platform.machine() == "x86_64" else []
    hccl_flags = [acl, *(f"-I{folder}" for folder in wheels.hccl_headers), *half]
    hccl = [_object(compiler, HERE / "cann" / f"{name}.cpp", *hccl_flags) for name in _HCCL]

    required = wheel.requirements(wheels)
    compiler.compile(*_shared("libhccl.so"), *hccl, "-lrt")
    compiler.compile(*_shared("libascendcl.so"), *runtime)
    emulated = _defined("libhccl.so") | _defined("libascendcl.so")
    missing = required.symbols - emulated
    stub_file = HOME / "objects" / "stubs.cpp"
    stub_file.write_text('extern "C" {\n' + stubs.source(missing) + "}\n")
    compiler.compile(*_shared("libascendcl.so"), *runtime, stub_file)
    for name in sorted(required.libraries - {"libascendcl.so", "libhccl.so"}):
        (LIBRARIES / name).symlink_to("libascendcl.so")
    harmless = len(missing & stubs.HARMLESS.keys())
    return {
        "wanted": len(required.symbols),
        "emulated": len(required.symbols & emulated),
        "failing": len(missing) - harmless,
        "harmless": harmless,
    }


def _opapi(compiler: Compiler, wheels: wheel.Wheels) -> None:
    source = HERE / "cann" / "opapi.cpp"
    compiler.compile(*_shared("libopapi.so"), f"-I{wheels.acl_headers}", *_torch_flags(wheels), source, *_torch(wheels))


def _host_kernels(compiler: Compiler, wheels: wheel.Wheels) -> None:
    folder = HERE / "kernels" / "host"
    compiler.compile(*_shared("libfallback_interposer.so"), folder / "fallback_interposer.cpp", "-ldl")
    source = folder / "host_kernels.cpp"
    compiler.compile(*_shared("libhost_kernels.so"), *_torch_flags(wheels), source, *_torch(wheels), "-ldl")


def _torch_flags(wheels: wheel.Wheels) -> list[str]:
    # The headers are not ours to lint.
    return [f"-isystem{wheels.torch_headers}", f"-isystem{wheels.torch_headers}/torch/csrc/api/include"]


def _torch(wheels: wheel.Wheels) -> list[str]:
    return [f"-L{wheels.torch_libraries}", f"-Wl,-rpath,{wheels.torch_libraries}", "-ltorch_cpu", "-lc10"]


def _object(compiler: Compiler, source: Path, *flags: object) -> Path:
    target = HOME / "objects" / f"{source.stem}.o"
    compiler.compile("-c", *flags, source, "-o", target)
    return target


def _shared(name: str) -> list[object]:
    return ["-shared", f"-Wl,-soname,{name}", "-o", LIBRARIES / name]


def _defined(name: str) -> set[str]:
    return wheel.dynamic_symbols(LIBRARIES / name, "--defined-only")
