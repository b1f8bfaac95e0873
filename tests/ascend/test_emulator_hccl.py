"""Two ranks over torch_npu's own ProcessGroupHCCL: what its collectives give and refuse, and training against gloo."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from .processes import torchrun

pytestmark = [pytest.mark.ascend, pytest.mark.torchrun, pytest.mark.xdist_group("hccl")]

RANKS = Path(__file__).with_name("hccl_ranks.py")
SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """One start of the ranks for both parts, because each process imports for seconds."""
    folder = tmp_path_factory.mktemp("hccl")
    done = torchrun(RANKS, folder, PYTHONPATH=os.pathsep.join([str(SUPPORT), os.environ["PYTHONPATH"]]))
    assert done.returncode == 0, done.stderr[-3000:]
    return {part: json.loads((folder / f"{part}.json").read_text()) for part in ("collectives", "training")}


@pytest.fixture(scope="module")
def collectives(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return found["collectives"]


@pytest.fixture(scope="module")
def losses(found: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
    return found["training"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("all_gather", [[5, 5], [6, 6]]),
        ("broadcast", [2, 2]),
        ("all_gather_object", [{"rank": 0}, {"rank": 1}]),
        ("reduce_scatter", [[0, 3], [6, 9]]),
        ("all_to_all", [0, 1, 10, 11]),
        ("exchange", [4, 4]),
        ("scatter", [[8, 8], [9, 9]]),
        ("large", [3, 3]),
    ],
)
def test_collectives(collectives: dict[str, Any], name: str, expected: object) -> None:
    assert collectives[name] == expected


@pytest.mark.parametrize(("operator", "expected"), [("SUM", 5), ("MAX", 3), ("MIN", 2), ("PRODUCT", 6)])
def test_reductions_of_two_and_three(collectives: dict[str, Any], operator: str, expected: int) -> None:
    assert collectives["reduce"][operator] == dict.fromkeys(
        ("float32", "float16", "bfloat16", "int64", "int8"), expected
    )


def test_what_process_group_hccl_refuses(collectives: dict[str, Any]) -> None:
    assert all("Cannot use ReduceOp.BAND with HCCL" in answer for answer in collectives["reduce"]["BAND"].values())
    average = collectives["reduce"]["AVG"]
    assert average["float32"] == average["bfloat16"] == 2.5
    assert isinstance(average["int64"], str)
    assert "No backend type associated with device type cpu" in collectives["host tensor"]


@pytest.mark.parametrize(
    ("way", "tolerance"), [("ddp", 1e-5), ("fsdp2", 1e-5), ("fsdp2 offload", 1e-5), ("fsdp2 bf16", 2e-2)]
)
def test_training_goes_as_with_gloo(losses: dict[str, list[float]], way: str, tolerance: float) -> None:
    """float32 differs by the order of sums; bfloat16 parameters have three digits."""
    on_device, on_host = losses[f"{way} npu"], losses[f"{way} cpu"]
    assert on_device[-1] < on_device[0] - 0.1
    assert on_device == pytest.approx(on_host, abs=tolerance)


def test_divided_attention_is_whole_attention(collectives: dict[str, Any]) -> None:
    """By the device's kernel for parts, forward and backward; each rank compares its own tokens."""
    operators = ["npu::npu_fusion_attention", "npu::npu_fusion_attention_grad"]
    assert collectives["divided attention"] == {"zigzag": operators, "gather": operators}
