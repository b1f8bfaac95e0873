"""The writer of several ranks, here as one of one: what is begun is what is stored, whole or not there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from lockstep.errors import Refusal
from lockstep.parallel import sharded_files as stored
from lockstep.parallel.world import World
from lockstep.run import checkpoint as checkpoints
from lockstep.run.checkpoint_writers import ShardedWriter


@pytest.fixture
def landed() -> list[Path]:
    return []


@pytest.fixture
def writer(tmp_path: Path, landed: list[Path]) -> Iterator[ShardedWriter]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    made = ShardedWriter(tmp_path, World(), landed.append)
    try:
        yield made
    finally:
        made.close()
        dist.destroy_process_group()


def state(step: int) -> checkpoints.State:
    return checkpoints.State(step=step, rows_seen=0, recipe={}, data={}, world_size=1, carried={"position": 3.0})


def tensors() -> dict[str, dict[str, torch.Tensor]]:
    weights = {"a.weight": torch.arange(12.0).view(3, 4), "b": torch.tensor([1.5, 2.5], dtype=torch.bfloat16)}
    moments = {"step/a.weight": torch.tensor(7.0), "rng/host/0": torch.arange(5, dtype=torch.uint8)}
    return {checkpoints.MODEL: weights, checkpoints.OPTIMIZER: moments}


@pytest.mark.parametrize("file_bytes", [2**30, 32])
def test_what_was_there_when_it_began_is_stored(
    writer: ShardedWriter,
    landed: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    file_bytes: int,
) -> None:
    monkeypatch.setattr(stored, "FILE_BYTES", file_bytes)
    given, wanted = tensors(), tensors()
    writer.begin(state(4), given)
    for part in given.values():
        for tensor in part.values():
            tensor.zero_()  # the next step goes on with them
    writer.settle()
    path = checkpoints.folder_of(tmp_path, 4)
    assert landed == [path]
    assert len(list((path / "shards").iterdir())) == (1 if file_bytes > 32 else 2)
    assert checkpoints.damage_of(path) is None
    found = checkpoints.read(path)
    assert found.state == checkpoints.State(**{**vars(state(4)), "version": 2})
    for stored_part, part in ((found.weights, checkpoints.MODEL), (found.optimizer, checkpoints.OPTIMIZER)):
        assert stored_part.keys() == wanted[part].keys()
        for name, tensor in wanted[part].items():
            assert torch.equal(stored_part[name], tensor), name
            assert stored_part[name].dtype == tensor.dtype
    assert not found.critic


def test_a_disk_that_takes_no_more_is_told_and_nothing_has_its_name(
    writer: ShardedWriter, landed: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as change:
        change.setattr(HuggingFaceStorageWriter, "write_data", full)
        writer.begin(state(4), tensors())
        with pytest.raises(Refusal, match=r"\[disk-full\]: .*rank 0: .*No space left") as caught:
            writer.settle()
    assert caught.value.problems[0].where == str(checkpoints.folder_of(tmp_path, 4))
    assert not landed
    assert checkpoints.steps_in(tmp_path) == []
    # The next one takes no notice of what is left of it.
    writer.begin(state(5), tensors())
    writer.settle()
    assert checkpoints.steps_in(tmp_path) == [5]


def test_a_slice_that_the_manifest_does_not_tell_of_is_damage(writer: ShardedWriter, tmp_path: Path) -> None:
    writer.begin(state(4), tensors())
    writer.settle()
    path = checkpoints.folder_of(tmp_path, 4)
    file, other = next((path / "shards").iterdir()), path / "shards" / "shard-00002-model-00001-of-00001.safetensors"
    other.write_bytes(file.read_bytes())
    assert checkpoints.damage_of(path) == f"manifest.json has no entry for shards/{other.name}"
    other.unlink()
    file.unlink()
    assert checkpoints.damage_of(path) == f"{file.name} is missing"
