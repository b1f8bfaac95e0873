"""The Triton kernels of training against their twins: by Triton's interpreter on the host, and on an NVIDIA device."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import triton_checks


def _interpreter_runs() -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        int(np.zeros(1))  # Triton 3.6 does so; numpy 2.4 no longer lets it
    except TypeError:
        return False
    return True


@pytest.mark.skipif(not _interpreter_runs(), reason="no Triton, or a numpy that its interpreter cannot use")
@pytest.mark.parametrize("check", triton_checks.CHECKS)
def test_twins_by_the_interpreter(check: str) -> None:
    path = os.pathsep.join([str(Path(triton_checks.__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    script = f"import triton_checks\ntriton_checks.{check}('cpu')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA device")
@pytest.mark.parametrize("check", triton_checks.CHECKS)
def test_twins_on_the_device(check: str) -> None:
    triton_checks.CHECKS[check]("cuda")
