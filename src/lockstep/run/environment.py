"""What a run ran on, told without importing any of it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import lockstep
from lockstep.masking import masked_words

# Device facts (driver, accelerator packages) come from the device classes, through the caller.
PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "numpy",
    "safetensors",
    "tokenizers",
    "pyarrow",
    "pydantic",
    "triton",
    "ray",
    "vllm",
    "sglang",
)


def describe_environment() -> dict[str, Any]:
    """Versions, platform and command line. The host's name is left out: run folders are shared."""
    return {
        "lockstep": lockstep.__version__,
        "git_commit": own_commit(),
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := installed_version(name))},
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu_count": os.cpu_count(),
        "command": masked_words(sys.argv),
    }


@cache
def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def own_commit() -> str | None:
    """Asked once in a process: what it has imported does not follow a later checkout."""
    return checkout_commit(Path(lockstep.__file__).parent)


def checkout_commit(folder: Path) -> str | None:
    """The commit that `folder`'s own code is at, with `-dirty` when it was changed; None outside a checkout."""
    # A virtual environment inside somebody else's repository must not report that repository's commit.
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return _git(folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None  # no git here, or not a repository: both mean that there is no commit to tell
    return answer.stdout.strip()
