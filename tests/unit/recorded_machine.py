"""A machine made of recorded outputs, for the doctor. Where each comes from: doctor_outputs/README.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from lockstep.doctor.local_machine import CommandOutput, Disk

OUTPUTS = Path(__file__).parent / "doctor_outputs"
TOOLKIT = "/usr/local/Ascend/ascend-toolkit/latest"
INSTALL_INFO = f"{TOOLKIT}/aarch64-linux/ascend_toolkit_install.info"
DRIVER = "/usr/local/Ascend/driver/version.info"
FIRMWARE = "/usr/local/Ascend/firmware/version.info"
GIB = 2**30
ROOMY = Disk(500 * GIB, 1000 * GIB)


def output(name: str) -> str:
    return (OUTPUTS / name).read_text(encoding="utf-8")


@dataclass(frozen=True)
class RecordedMachine:
    commands: Mapping[str, CommandOutput] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    times: Mapping[str, float] = field(default_factory=dict)
    """Paths that exist besides the files, and when they were written."""
    torch_installed: float | None = 1000.0
    python: str = "3.11.13"
    architecture: str = "aarch64"
    system: str = "Ubuntu 22.04.5 LTS, kernel 5.10"
    space: Disk = ROOMY
    headers: bool = True

    def run(self, *command: str) -> CommandOutput | None:
        return self.commands.get(" ".join(command)) or self.commands.get(command[0])

    def read(self, path: str) -> str | None:
        return self.files.get(path)

    def matching(self, pattern: str) -> list[str]:
        return sorted(path for path in {*self.files, *self.times} if _glob(path, pattern))

    def modified(self, path: str) -> float | None:
        return self.times.get(path)

    def version(self, package: str) -> str | None:
        return self.packages.get(package)

    def installed(self, package: str) -> float | None:
        return self.torch_installed if package == "torch" else None

    def has_python_headers(self) -> bool:
        return self.headers

    def disk(self) -> Disk:
        return self.space

    def home(self) -> str:
        return "/home/me"

    def having(self, **changes: Any) -> RecordedMachine:
        """The same with other facts; packages, files, commands and variables are added (None takes away)."""
        merged = {}
        for name, value in changes.items():
            if isinstance(value, dict):
                both = {**getattr(self, name), **value}
                value = {key: each for key, each in both.items() if each is not None}
            merged[name] = value
        return replace(self, **merged)


def _glob(path: str, pattern: str) -> bool:
    """A star does not cross a slash, as in the shell."""
    return path.count("/") == pattern.count("/") and fnmatch(path, pattern)


CPU = RecordedMachine(
    commands={"gcc": CommandOutput(0, "gcc (Debian 12.2.0-14+deb12u1) 12.2.0\nCopyright")},
    packages={"torch": "2.13.0+cpu", "transformers": "5.22.2", "peft": "0.21.2"},
    architecture="x86_64",
)

H200 = CPU.having(
    commands={"nvidia-smi": CommandOutput(0, output("nvidia-smi-580.csv"))},
    packages={"torch": "2.11.0", "transformers": "5.17.0", "peft": "0.21.0", "triton": "3.6.0"},
)

# An Atlas A2 with lockstep's own stack: nothing wrong with it.
A2 = CPU.having(
    architecture="aarch64",
    commands={
        # The table of an older driver under the number of the one that lockstep's stack names.
        "npu-smi info": CommandOutput(0, output("npu-smi-23.0.3.txt").replace("23.0.3", "26.0.rc1")),
        "npu-smi": CommandOutput(0, output("board-23.0.5.txt")),
    },
    files={INSTALL_INFO: "package_name=Ascend-cann-toolkit\nversion=9.1.0\n"},
    packages={"torch": "2.12.0+cpu", "torch_npu": "2.12.0"},
    variables={"LD_LIBRARY_PATH": f"{TOOLKIT}/lib64:/usr/lib", "ASCEND_HOME_PATH": TOOLKIT},
)
