"""Nothing here is collected where there is no NPU, emulated or real: without CANN, importing torch_npu fails.

`make test-ascend` runs these tests on the emulator. On a machine with a device and CANN sourced, plain pytest collects
them too: those marked `ascend` need the emulator and are skipped, those marked `ascend_hardware` run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

EMULATED = "ascend_emulator.hook" in sys.modules
REAL = not EMULATED and "ASCEND_HOME_PATH" in os.environ
# tools/ascend_evidence.sh is tried on the emulator too, so that it works on the day it is needed.
TRIAL = "LOCKSTEP_EVIDENCE_TRIAL" in os.environ
INSTALLED = find_spec("torch_npu") is not None

# These import the emulator or compare with what only it can tell.
ONLY_EMULATED = [
    "test_emulator_*.py",
    "test_recipes.py",
    "test_kernels.py",
    "test_parts.py",
    "test_device.py",
    "test_contract.py",
]
collect_ignore_glob = ["test_*.py"] if not INSTALLED else [] if EMULATED else ONLY_EMULATED if REAL else ["test_*.py"]


def pytest_report_header() -> str:
    if EMULATED:
        return "NPU: torch_npu on an emulated CANN"
    if not INSTALLED:
        return "NPU: torch_npu is not installed, tests/ascend is left out (make test-ascend runs it)"
    return "NPU: a real CANN" if REAL else "NPU: neither emulated nor real, tests/ascend is left out"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("ascend") and not EMULATED:
            item.add_marker(pytest.mark.skip(reason="needs the emulated NPU: make test-ascend"))
        if item.get_closest_marker("ascend_hardware") and EMULATED and not TRIAL:
            item.add_marker(pytest.mark.skip(reason="needs a real Ascend device"))


@pytest.fixture(autouse=True)
def first_device() -> Iterator[None]:
    """A test that changes the current device does not change the next test's."""
    yield
    if INSTALLED and (EMULATED or REAL):
        import torch_npu

        torch_npu.npu.set_device(0)
