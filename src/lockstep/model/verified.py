"""Cache of architectures that passed their check on this machine with the same code and packages."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from lockstep.device.base import EMULATED
from lockstep.device.select import DEVICES
from lockstep.kernels.fused import KERNEL_PACKAGES
from lockstep.run.caches import VERIFIED, cache_home
from lockstep.version import PACKAGE_FOLDER

# Folders with code that affects the computation of a model.
CODE = ("device", "kernels", "model", "parallel", "rollout")


def fingerprint(config: Any, *more: str) -> str:
    """Hash of an architecture with packages and code; weights and path do not count."""
    data = {name: value for name, value in config.to_dict().items() if name not in ("_name_or_path", "dtype")}
    versions = [torch.__version__, version("transformers"), *map(_version, KERNEL_PACKAGES), _code()]
    text = json.dumps([data, versions, more], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def hardware(torch_device: torch.device) -> list[str]:
    """The device of a check, for its fingerprint: several machines may share a home directory."""
    device = DEVICES[torch_device.type]()
    return [device.name, device.chip(), os.environ.get(EMULATED, "")]


def is_verified(key: str) -> bool:
    if key in _here():
        return True
    # Without a readable home directory, the check runs at every start.
    with contextlib.suppress(OSError, RuntimeError):
        return (_folder() / key).is_file()
    return False


def remember(key: str) -> None:
    _here().add(key)
    # Not fatal: the check runs again at the next start.
    with contextlib.suppress(OSError, RuntimeError):
        _folder().mkdir(parents=True, exist_ok=True)
        (_folder() / key).touch()


@cache
def _here() -> set[str]:
    return set()


def _folder() -> Path:
    return cache_home() / VERIFIED


@cache
def _version(package: str) -> str | None:
    with contextlib.suppress(PackageNotFoundError):
        return version(package)
    return None


@cache
def _code() -> str:
    digest = hashlib.sha256()
    for path in sorted(path for folder in CODE for path in (PACKAGE_FOLDER / folder).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
