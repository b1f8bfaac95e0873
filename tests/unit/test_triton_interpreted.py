"""The Triton kernels against their twins on the host, by Triton's interpreter, where Triton is installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest


def _interpreter_runs() -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        int(np.zeros(1))  # Triton 3.6 does so; numpy 2.4 no longer lets it
    except TypeError:
        return False
    return True


pytestmark = pytest.mark.skipif(not _interpreter_runs(), reason="no Triton, or a numpy that its interpreter cannot use")


def interpreted(script: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def test_rows_of_logits() -> None:
    interpreted("""
import torch
from lockstep.kernels import logprob, triton_logprob
from lockstep.kernels.truncate import LEFT_OUT

torch.manual_seed(0)
targets = torch.tensor([0, 5, 4499])
upstream, spread = torch.randn(2, 3)
for softcap in (None, 2.0):
    for temperature in (1.0, 0.7):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            logits = (torch.randn(3, 4500) * 5).to(dtype)
            logits[:, 100:4400] = max(LEFT_OUT, torch.finfo(dtype).min)
            twins = logprob.row_logprobs(logits, targets, temperature, True, softcap)
            found = triton_logprob.row_logprobs(logits, targets, temperature, True, softcap)
            for a, b in zip(found, twins):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
            for more in ((None, None), (twins[2], spread)):
                given = (targets, twins[0], upstream, temperature, *more, softcap)
                twin = logprob.row_gradients_(logits.clone(), *given).float()
                fused = triton_logprob.row_gradients_(logits.clone(), *given).float()
                assert (fused[:, 100:4400] == 0).all()
                assert (fused - twin).norm() <= (1e-5 if dtype == torch.float32 else 1e-2) * twin.norm()
""")


def test_decoding() -> None:
    interpreted("""
import torch
from lockstep.kernels.paged import gathered_decode
from lockstep.kernels.triton_paged import paged_decode

torch.manual_seed(0)
lengths, block, width = torch.tensor([1, 7, 64, 130]), 16, 9
table = torch.randperm(4 * width).view(4, width)
for heads, groups, size in ((14, 2, 40), (4, 4, 32)):
    keys, values = torch.randn(2, 4 * width * block, groups, size)
    query = torch.randn(4, heads, size) * 3
    for softcap in (None, 3.0):
        for sinks in (None, torch.randn(heads) * 3, torch.randn(heads).bfloat16()):
            for window in (None, 37):
                given = (query, keys, values, table, lengths, block, size**-0.5, window, softcap, sinks)
                torch.testing.assert_close(paged_decode(*given), gathered_decode(*given), rtol=1e-5, atol=1e-5)
""")


def test_tanh_is_right_near_0_and_far_from_it() -> None:
    interpreted("""
import torch
import triton
import triton.language as tl
from lockstep.kernels.triton_math import tanh

@triton.jit
def kernel(x, out, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(out + places, tanh(tl.load(x + places)))

x = torch.cat([torch.linspace(-12, 12, 2000), torch.logspace(-8, 4, 2000), torch.tensor([0.0, 0.1, -0.1, 1e30, -1e30])])
x = torch.cat([x, torch.zeros(8192 - len(x))])
out = torch.empty_like(x)
kernel[(1,)](x, out, BLOCK=8192)
torch.testing.assert_close(out.double(), x.double().tanh(), rtol=1e-6, atol=0)
""")
