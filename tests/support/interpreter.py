"""Triton's interpreter, which runs kernels on the host."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest


def _runs() -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    if tuple(map(int, version("triton").split(".")[:2])) >= (3, 9):
        return True
    try:
        int(np.zeros(1))  # Triton 3.6 does so; numpy 2.4 no longer lets it
    except TypeError:
        return False
    return True


needs_interpreter = pytest.mark.skipif(not _runs(), reason="no Triton, or a numpy that its interpreter cannot use")


def interpreted(script: str) -> str:
    """What it prints, in a process of its own, which must know before it imports Triton; it finds what stands beside
    this file."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout
