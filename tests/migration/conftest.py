"""Nothing here is collected where the other trainers are not installed: `make test-migration` installs them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

INSTALLED = "LOCKSTEP_PEERS" in os.environ
collect_ignore_glob = [] if INSTALLED else ["test_*.py"]


def pytest_report_header() -> str:
    return f"peers: {os.environ['LOCKSTEP_PEERS']}" if INSTALLED else "peers: left out (make test-migration runs them)"


@pytest.fixture(scope="session")
def batch(tiny_folder: Path) -> object:
    from .batch import Batch

    return Batch(tiny_folder)
