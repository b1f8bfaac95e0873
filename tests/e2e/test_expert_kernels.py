"""Divided experts run by the same Triton kernels as whole ones, in the interpreter and on an NVIDIA device."""

from __future__ import annotations

import sys

import pytest
import torch

import expert_kernel_ranks
from commands import TORCHRUN, completed
from hang import HANG
from interpreter import needs_interpreter


def check(**environment: str) -> None:
    """Ranks that import Triton after the environment is set."""
    done = completed([sys.executable, *TORCHRUN, "2", expert_kernel_ranks.__file__], HANG, environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.torchrun
@needs_interpreter
def test_divided_experts_by_the_interpreter() -> None:
    check(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@pytest.mark.cuda
@pytest.mark.torchrun
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA device")
def test_divided_experts_on_the_device() -> None:
    """Two ranks on one device, which exchange rows by gloo."""
    check()
