"""Weights that are opened in the memory that they are in: where they are, when it is done, what is not shared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.device.cpu import Cpu
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.rollout.servers.plugin.lockstep_shared import _from_json, _to_json, opened
from lockstep.rollout.servers.sglang import Sglang
from lockstep.rollout.servers.vllm import Vllm
from lockstep.rollout.servers.weight_transports import SharedMemory, Unopened, by_memory


class Graphics(Cpu):
    """Says of itself what a CUDA device does."""

    shares_memory = True
    visible_variable = "SEEN_DEVICES"


def test_what_is_opened_is_what_was_placed(tmp_path: Path) -> None:
    weights = [("a", torch.randn(3, 5)), ("b", torch.randn(7)), ("c", torch.randn(2, 2))]
    placed = SharedMemory(Cpu()).placed(weights, torch.float32, tmp_path)
    assert (placed.names, placed.shapes, placed.dtype) == (["a", "b", "c"], [[3, 5], [7], [2, 2]], "float32")
    assert list(placed.sums) == [int(tensor.view(torch.int32).sum(dtype=torch.int64)) for _, tensor in weights]
    for (_, tensor), place, shape in zip(weights, placed.places, placed.shapes, strict=True):
        assert torch.equal(opened(dict(place), torch.float32, shape), tensor)


def test_what_torch_says_of_a_devices_memory_goes_through_json_and_back() -> None:
    """The kinds of things that its processes tell each other of a tensor there; nothing is unpickled."""
    said = (
        torch.Tensor,
        torch.Size([3, 5]),
        (5, 1),
        7,
        torch.storage.TypedStorage,
        torch.bfloat16,
        0,
        b"\x00\xffhandle",
        1024,
        512,
        False,
        b"counter",
        3,
        b"event",
        True,
    )
    assert tuple(_from_json(each) for each in json.loads(json.dumps([_to_json(each) for each in said]))) == said
    with pytest.raises(RuntimeError, match="unsupported value in an IPC handle"):
        _to_json(object)
    place = {"device": "x", "rebuild": "reduce_tensor", "said": [0] * 15}
    with pytest.raises(ValueError, match="reduce_tensor"):
        opened(place, torch.float32, [1])


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.zeros(2, dtype=torch.float16), "b has dtype torch.float16"),
        (torch.zeros(2, 3).t(), "b is not contiguous"),
    ],
)
def test_what_would_have_to_be_copied_is_not_shared(tmp_path: Path, tensor: torch.Tensor, why: str) -> None:
    with pytest.raises(Unopened, match=why):
        SharedMemory(Cpu()).placed([("a", torch.zeros(2)), ("b", tensor)], torch.float32, tmp_path)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, True),
        ({"server": {"devices": [0]}}, True),
        ({"server": {"devices": [1]}}, False),
        ({"server": {"tensor_parallel": 2}}, False),
        ({"url": "http://there:1"}, False),
        ({"weight_sync": "files"}, False),
        ({"weight_sync": "collective"}, False),
        ({"weight_sync": "memory", "url": "http://127.0.0.1:1"}, True),
    ],
)
def test_by_itself_only_for_a_server_of_ours_on_our_device(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], expected: bool
) -> None:
    monkeypatch.delenv("SEEN_DEVICES", raising=False)
    settings = RolloutSettings(engine="vllm", **values)
    assert by_memory(settings, Vllm(), Graphics(), 1, adapter=False) is expected
    assert not by_memory(settings, Vllm(), Graphics(), 1, adapter=True)
    if "weight_sync" not in values:
        assert not by_memory(settings, Vllm(), Cpu(), 1, adapter=False)
        assert not by_memory(settings, Vllm(), Graphics(), 2, adapter=False)
        assert not by_memory(settings, Sglang(), Graphics(), 1, adapter=False)
