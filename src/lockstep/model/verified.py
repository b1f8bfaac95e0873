"""Architectures that passed their check on this machine: the same code, packages and configuration need it once."""

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

# The folders whose code decides what a model computes.
CODE = ("device", "kernels", "model", "parallel", "rollout")


def fingerprint(config: Any, *more: str) -> str:
    """Of an architecture as these packages and this code run it; the weights and where they lie are no part of it."""
    data = {name: value for name, value in config.to_dict().items() if name not in ("_name_or_path", "dtype")}
    versions = [torch.__version__, version("transformers"), *map(_version, KERNEL_PACKAGES), _code()]
    text = json.dumps([data, versions, more], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def hardware(torch_device: torch.device) -> list[str]:
    """The device a check ran on, for its fingerprint: a home may be shared by machines of several kinds."""
    device = DEVICES[torch_device.type]()
    return [device.name, device.chip(), os.environ.get(EMULATED, "")]


def is_verified(key: str) -> bool:
    if key in _here():
        return True
    # No home, or one that may not be read: checked again at every start.
    with contextlib.suppress(OSError, RuntimeError):
        return (_folder() / key).is_file()
    return False


def remember(key: str) -> None:
    _here().add(key)
    # A cache that cannot be written costs a second at the next start.
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
