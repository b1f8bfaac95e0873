"""The Triton kernels against their twins: by Triton's interpreter on the host, and on an NVIDIA device."""

from __future__ import annotations

import json

import pytest
import torch

import paged_checks
import quantized_checks
import recurrent_checks
import triton_checks
import triton_host_checks
from interpreter import interpreted, needs_interpreter

CHOSEN = """
import json, traceback
import paged_checks, quantized_checks, recurrent_checks, triton_checks, triton_host_checks

checks = triton_checks.CHECKS | paged_checks.CHECKS | quantized_checks.CHECKS | recurrent_checks.CHECKS
everywhere = {{name: lambda check=check: check("cpu") for name, check in checks.items()}}
for name, check in (everywhere | triton_host_checks.CHECKS).items():
    if name not in {names}:
        continue
    try:
        check()
        why = ""
    except Exception:
        why = traceback.format_exc()
    print(json.dumps([name, why]), flush=True)
"""

EVERYWHERE = triton_checks.CHECKS | paged_checks.CHECKS | quantized_checks.CHECKS | recurrent_checks.CHECKS
# The interpreter takes longest for whole models, and several seconds for each of the others.
LONG = {
    *("generating", "generating_engine", "generating_in_low_precision", "generating_models", "hooked", "models"),
    *("recurrent_models", "kept_by_recurrent_layers", "decoding", "linear_rules", "eight_bit_steps", "convolutions"),
    *("products_with_few_rows", "adamw", "drawing_tokens", "dequantizing", "grouped_experts", "value_sizes"),
    *("grouped_norm_of_nemotron", "codes_of_training", "latents", "rows_of_logits", "routers_of_models"),
    *("codes_of_norms", "codes_of_gated_rows", "layers_that_quantise"),
}


def _parameter(name: str) -> object:
    return pytest.param(name, marks=pytest.mark.slow if name in LONG else ())


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, str]:
    """What is wrong with each kernel: one process for all that are run, whose imports take longer than most checks."""
    names = {vars(item)["callspec"].params["check"] for item in request.session.items if _is_interpreted(item)}
    return dict(json.loads(line) for line in interpreted(CHOSEN.format(names=sorted(names))).splitlines())


def _is_interpreted(item: pytest.Item) -> bool:
    return getattr(item, "function", None) is test_twins_by_the_interpreter


@needs_interpreter
@pytest.mark.xdist_group("interpreter")
@pytest.mark.parametrize("check", [_parameter(name) for name in (*EVERYWHERE, *triton_host_checks.CHECKS)])
def test_twins_by_the_interpreter(check: str, found: dict[str, str]) -> None:
    assert found[check] == ""


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA device")
@pytest.mark.parametrize("check", EVERYWHERE)
def test_twins_on_the_device(check: str) -> None:
    EVERYWHERE[check]("cuda")
