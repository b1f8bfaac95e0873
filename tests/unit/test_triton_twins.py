"""The Triton kernels of training against their twins: by Triton's interpreter on the host, and on an NVIDIA device."""

from __future__ import annotations

import pytest
import torch

import triton_checks
from interpreter import interpreted, needs_interpreter


@needs_interpreter
@pytest.mark.parametrize("check", triton_checks.CHECKS)
def test_twins_by_the_interpreter(check: str) -> None:
    interpreted(f"import triton_checks\ntriton_checks.CHECKS[{check!r}]('cpu')")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA device")
@pytest.mark.parametrize("check", triton_checks.CHECKS)
def test_twins_on_the_device(check: str) -> None:
    triton_checks.CHECKS[check]("cuda")
