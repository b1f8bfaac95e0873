"""Access to the machine: commands, files, variables and packages. Tests replace this class with recorded outputs."""

from __future__ import annotations

import glob
import os
import platform
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


@dataclass(frozen=True)
class CommandOutput:
    """The exit status of a command, and its combined stdout and stderr."""

    status: int
    text: str


@dataclass(frozen=True)
class Disk:
    free: int
    total: int


class Machine:
    """The machine that lockstep runs on."""

    seconds = 10.0
    """The time limit of a command, so that a hanging driver does not block the doctor."""

    @property
    def system(self) -> str:
        release = platform.freedesktop_os_release() if Path("/etc/os-release").exists() else {}
        return f"{release.get('PRETTY_NAME', platform.system())}, kernel {platform.release()}"

    @property
    def architecture(self) -> str:
        return platform.machine()

    @property
    def python(self) -> str:
        return platform.python_version()

    @property
    def variables(self) -> Mapping[str, str]:
        """The user's environment variables. The variable that lockstep sets to delay the import of torch_npu is
        removed."""
        variables = dict(os.environ)
        started_with = self.read("/proc/self/environ")
        if started_with is not None and f"\0{AUTOLOAD}=" not in f"\0{started_with}":
            variables.pop(AUTOLOAD, None)
        return variables

    def run(self, *command: str) -> CommandOutput | None:
        """Runs a command. Returns None if the command does not exist."""
        if shutil.which(command[0]) is None:
            return None
        try:
            done = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                timeout=self.seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return CommandOutput(124, f"no answer within {self.seconds:g} seconds")
        except OSError as error:
            return CommandOutput(126, str(error))
        return CommandOutput(done.returncode, done.stdout.decode("utf-8", errors="replace"))

    def read(self, path: str) -> str | None:
        """Reads a file. Returns None if the file does not exist or cannot be read."""
        try:
            return Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None  # the file is absent or forbidden, and the caller tries other paths

    def matching(self, pattern: str) -> list[str]:
        return sorted(glob.glob(pattern))

    def modified(self, path: str) -> float | None:
        """Returns the modification time of a file, in seconds since 1970."""
        try:
            return Path(path).stat().st_mtime
        except OSError:
            return None  # the file was deleted after it was listed

    def version(self, package: str) -> str | None:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    def installed(self, package: str) -> float | None:
        """Returns the installation time of a package, in seconds since 1970."""
        try:
            folder = metadata.distribution(package).locate_file("")
            name = metadata.distribution(package).metadata["Name"].replace("-", "_")
        except metadata.PackageNotFoundError:
            return None
        records = self.matching(f"{glob.escape(str(folder))}/{name}-*.dist-info/RECORD")
        return self.modified(records[0]) if records else None

    def has_python_headers(self) -> bool:
        # Debian's own scheme, posix_local, names a folder without headers.
        return (Path(sysconfig.get_path("include", "posix_prefix")) / "Python.h").is_file()

    def disk(self) -> Disk:
        usage = shutil.disk_usage(Path.cwd())
        return Disk(usage.free, usage.total)

    def home(self) -> str:
        return str(Path.home())
