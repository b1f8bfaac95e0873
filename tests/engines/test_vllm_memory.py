"""Weights that a real vLLM server opens in the memory that they are in, which on a CPU is a file that both map."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_session import GREEDY, load, move, opened, requests, run, sync
from lockstep.device.cpu import Cpu
from lockstep.errors import Refusal
from lockstep.model.load import load_tokenizer
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.rollout.native.native_engine import NativeEngine
from lockstep.rollout.servers import weight_transports as memory
from lockstep.rollout.servers.adapter import Placed
from lockstep.rollout.servers.server_engine import ServerEngine
from lockstep.rollout.servers.weight_transports import SharedMemory

LEFT_OUT = "model.layers.1.self_attn.k_proj.weight"


def assert_generates_with_the_weights(engine: ServerEngine, embedded: Path) -> None:
    made = run(engine, requests(1), GREEDY)
    native = NativeEngine(engine.policy, Cpu(), RolloutSettings(), load_tokenizer(str(embedded)).decode)
    ours = run(native, requests(1), GREEDY)
    assert [(one.ids, one.stop) for one in made] == [(one.ids, one.stop) for one in ours]
    for one, other in zip(made, ours, strict=True):
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), rtol=0, atol=1e-4)


def placing(monkeypatch: pytest.MonkeyPatch, change: Callable[[Placed], Placed]) -> list[Placed]:
    """What the run says of its memory, changed on its way."""
    placed, said = SharedMemory.placed, []

    def changed(self: SharedMemory, *words: Any) -> Placed:
        said.append(change(placed(self, *words)))
        return said[-1]

    monkeypatch.setattr(SharedMemory, "placed", changed)
    return said


def left_out(placed: Placed) -> Placed:
    number = list(placed.names).index(LEFT_OUT)
    fields = {name: list(getattr(placed, name)) for name in ("names", "shapes", "sums", "places")}
    for values in fields.values():
        values.pop(number)
    return replace(placed, **fields)


def elsewhere(placed: Placed) -> Placed:
    """A tensor's place is that of the one behind it."""
    places = [dict(place) for place in placed.places]
    number = list(placed.names).index(LEFT_OUT)
    places[number]["start"] = places[number + 1]["start"]
    return replace(placed, places=places)


def test_three_pushes_are_opened_and_no_file_is_written(
    server, embedded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = placing(monkeypatch, lambda placed: placed)
    monkeypatch.setattr("lockstep.rollout.servers.weight_sync.write_weights", None)
    with opened(server.url, load(embedded), embedded, tmp_path, weight_sync="memory") as engine:
        for update in range(3):
            move(engine.policy, by=10 ** -(1.5 + update), seed=update)
            sync(engine, update)
            assert_generates_with_the_weights(engine, embedded)
        print({part: round(seconds, 3) for part, seconds in engine.sync_parts.items()})
        assert engine.metadata()["hand_over"] == "memory"
    assert len(said) == 4  # the first weights twice


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (left_out, "log-probs of the weight check differ"),
        (elsewhere, f"such as ['{LEFT_OUT}'"),
    ],
)
def test_a_tensor_left_out_or_out_of_place_is_caught(
    server,
    embedded: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Placed], Placed],
    why: str,
) -> None:
    with opened(server.url, load(embedded), embedded, tmp_path, weight_sync="memory") as engine:
        sync(engine)
        move(engine.policy, by=0.01)
        placing(monkeypatch, change)
        with pytest.raises(Refusal) as caught:
            sync(engine, 1)
    assert "weights after 1 updates" in str(caught.value)
    assert why in str(caught.value)


def test_a_tensor_that_changes_on_its_way_is_caught(
    server, embedded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(server.url, load(embedded), embedded, tmp_path, weight_sync="memory") as engine:
        sync(engine)
        move(engine.policy, by=0.01)
        places = memory.host_places

        def spoiled(file: Path, tensors: list[torch.Tensor], dtype: torch.dtype) -> Any:
            return places(file, [tensors[0] * 1.5, *tensors[1:]], dtype)

        monkeypatch.setattr(memory, "host_places", spoiled)
        with pytest.raises(Refusal, match=r"such as \['model.embed_tokens.weight'\]"):
            sync(engine, 1)


def test_where_it_was_not_asked_for_files_take_its_place_aloud(
    server, embedded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(server.url, load(embedded), embedded, tmp_path) as engine:
        engine.weight_sync.by_memory = True  # as `auto` has it with CUDA devices
        placing(monkeypatch, elsewhere)
        with pytest.warns(UserWarning, match="weights go to vllm through files, which takes longer: .* not what the"):
            sync(engine)
        assert engine.metadata()["hand_over"] == "files"
        assert_generates_with_the_weights(engine, embedded)
