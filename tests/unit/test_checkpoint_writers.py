"""The background writer of one process, and files that several threads write and checksum."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import killed_writer
from commands import warm_python
from conftest import run
from hang import HANG
from lockstep.device.base import Memory
from lockstep.errors import Refusal
from lockstep.run import checkpoint, checkpoint_writers, files, tensor_file
from lockstep.run.checkpoint import MANIFEST, MODEL, OPTIMIZER, State
from lockstep.run.checkpoint_writers import HostRoom, LocalWriter

BLOCK = 64


@pytest.fixture
def landed() -> list[Path]:
    return []


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def writer(tmp_path: Path, landed: list[Path], said: list[str]) -> Iterator[LocalWriter]:
    made = LocalWriter(tmp_path, torch.device("cpu"), landed.append, said.append)
    yield made
    made.close()


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file has several blocks, and every block is read in several pieces."""
    for module in (files, tensor_file, checkpoint):
        monkeypatch.setattr(module, "BLOCK", BLOCK)
    monkeypatch.setattr(files, "PIECE", BLOCK // 4)


def state(step: int) -> State:
    return State(step=step, rows_seen=0, recipe={}, data={"kept": {"rows": step}}, world_size=1)


def tensors() -> dict[str, dict[str, torch.Tensor]]:
    weights = {
        "b": torch.tensor([1.5, 2.5, 3.5], dtype=torch.bfloat16),
        "a": torch.arange(120.0).view(10, 12).T,  # not contiguous
        "empty": torch.empty(0, 4),
    }
    moments = {"step/a": torch.tensor(7.0), "rng": torch.arange(5, dtype=torch.uint8), "big": torch.arange(77)}
    return {MODEL: weights, OPTIMIZER: moments}


def assert_stored(path: Path) -> None:
    assert checkpoint.damage_of(path) is None
    found = checkpoint.read(path)
    for stored, part in ((found.weights, MODEL), (found.optimizer, OPTIMIZER)):
        wanted = tensors()[part]
        assert stored.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(stored[name], tensor), name
            assert stored[name].dtype == tensor.dtype


@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize("pinned", [0, 2**20])
def test_the_tensors_of_the_step_are_stored(
    writer: LocalWriter, landed: list[Path], tmp_path: Path, small_blocks: None, copies: bool, pinned: int
) -> None:
    """A write that training waits for uses pinned memory that is there."""
    given, described = tensors(), state(4)
    writer._pinned = pinned
    with patch.object(checkpoint_writers.HostRoom, "copy", autospec=True, side_effect=HostRoom.copy) as copied:
        writer.begin(described, given, copies=copies)
    assert bool(copied.call_args_list) is (copies or pinned > 0)
    path = checkpoint.folder_of(tmp_path, 4)
    assert landed == ([path] if not copies else landed)
    described.data["kept"]["rows"] = 99
    for part in given.values():
        for tensor in part.values():
            tensor.zero_()  # as in the next step
    writer.settle()
    assert landed == [path]
    assert_stored(path)
    assert checkpoint.read(path).state == state(4)


def test_files_are_ordinary_safetensors_files(tmp_path: Path, small_blocks: None) -> None:
    path = checkpoint.save(tmp_path, state(1), tensors())
    for part, wanted in tensors().items():
        found = load_file(path / part)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
        with safe_open(path / part, "pt") as file:
            assert file.metadata() == {"format": "pt"}


def test_the_checksum_of_a_large_file_is_that_of_its_block_digests(tmp_path: Path, small_blocks: None) -> None:
    path = checkpoint.save(tmp_path, state(1), tensors())
    manifest = json.loads((path / MANIFEST).read_text())
    content = (path / OPTIMIZER).read_bytes()
    blocks = [hashlib.sha256(content[start : start + BLOCK]).digest() for start in range(0, len(content), BLOCK)]
    assert len(blocks) > 2
    wanted = {"bytes": len(content), "block": BLOCK, "sha256_blocks": hashlib.sha256(b"".join(blocks)).hexdigest()}
    assert manifest[OPTIMIZER] == wanted == checkpoint.told_of(path, [path / OPTIMIZER])[OPTIMIZER]
    for place in (0, BLOCK - 1, BLOCK, len(content) - 1):
        (path / OPTIMIZER).write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert checkpoint.damage_of(path) == f"{OPTIMIZER} has a wrong checksum"
    # Two blocks in the other order have the same digests.
    (path / OPTIMIZER).write_bytes(content[BLOCK : 2 * BLOCK] + content[:BLOCK] + content[2 * BLOCK :])
    assert checkpoint.damage_of(path) == f"{OPTIMIZER} has a wrong checksum"


def test_a_checkpoint_with_plain_checksums_of_large_files_is_read(tmp_path: Path, small_blocks: None) -> None:
    """Earlier versions stored the SHA-256 of the whole file."""
    path = checkpoint.save(tmp_path, state(1), tensors())
    manifest = json.loads((path / MANIFEST).read_text())
    for part in (MODEL, OPTIMIZER):
        content = (path / part).read_bytes()
        manifest[part] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (path / MANIFEST).write_text(json.dumps(manifest))
    assert_stored(path)
    content = (path / MODEL).read_bytes()
    (path / MODEL).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert checkpoint.damage_of(path) == f"{MODEL} has a wrong checksum"


def test_a_full_disk_is_known_before_the_next_checkpoint(
    writer: LocalWriter, landed: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as change:
        change.setattr(os, "pwrite", full)
        writer.begin(state(4), tensors(), copies=True)
        assert writer._writing is not None
        writer._writing.exception(HANG)
    assert writer.failed
    with pytest.raises(Refusal, match="No space left") as refused:
        writer.settle()
    assert refused.value.problems[0].code == "disk-full"
    assert (landed, list(tmp_path.iterdir())) == ([], [])
    assert not writer.failed
    writer.begin(state(5), tensors(), copies=True)
    writer.settle()
    assert_stored(checkpoint.folder_of(tmp_path, 5))


def test_two_checkpoints_are_never_written_at_once(
    writer: LocalWriter, landed: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, first = os.pwrite, threading.Event()

    def slow(*words: Any) -> int:
        first.wait(HANG)
        return written(*words)

    monkeypatch.setattr(os, "pwrite", slow)
    writer.begin(state(1), tensors(), copies=True)
    assert landed == []
    threading.Timer(0.1, first.set).start()
    writer.begin(state(2), tensors(), copies=True)
    assert landed == [checkpoint.folder_of(tmp_path, 1)]
    writer.settle()
    assert len(landed) == 2


def test_without_memory_for_a_copy_training_waits(
    writer: LocalWriter, landed: list[Path], said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(map(checkpoint.bytes_of, tensors().values()))
    free = int(size * checkpoint_writers.COPY_MARGIN)
    memory = {"total": 2**40, "allocated": 0, "peak": 0}
    monkeypatch.setattr(checkpoint_writers, "host_memory", lambda: Memory(free=free - 1, **memory))
    writer.begin(state(1), tensors(), copies=True)
    assert landed == [checkpoint.folder_of(tmp_path, 1)]
    assert len(said) == 1
    assert_stored(landed[0])
    monkeypatch.setattr(checkpoint_writers, "host_memory", lambda: Memory(free=free + 1, **memory))
    writer.begin(state(2), tensors(), copies=True)
    assert writer._writing is not None
    writer.settle()
    assert len(said) == 1
    needy = LocalWriter(tmp_path, torch.device("cpu"), landed.append, said.append, needed=2)
    needy.begin(state(3), tensors(), copies=True)
    assert len(landed) == 3
    assert len(said) == 2
    needy.close()


def test_memory_that_cannot_be_allocated_makes_training_wait(
    writer: LocalWriter, landed: list[Path], said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> torch.Tensor:
        raise RuntimeError("cannot allocate memory")

    monkeypatch.setattr(checkpoint_writers.HostRoom, "copy", full)
    writer.begin(state(1), tensors(), copies=True)
    assert len(said) == 1
    assert landed == [checkpoint.folder_of(tmp_path, 1)]
    assert_stored(landed[0])


@pytest.mark.parametrize("moments", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_a_kill_in_the_background_write_leaves_a_complete_checkpoint(tmp_path: Path, moments: int) -> None:
    def run(folder: Path, last: int) -> subprocess.CompletedProcess[str]:
        folder.mkdir()
        words = [*warm_python(), killed_writer.__file__, str(folder), str(last)]
        return subprocess.run(words, capture_output=True, text=True, timeout=HANG, check=False)

    whole = run(tmp_path / "whole", 0)
    assert whole.returncode == 0, whole.stderr
    calls = int(whole.stdout)
    assert calls > 20
    for last in sorted({1 + (calls - 1) * number // (moments - 1) for number in range(moments)}):
        folder = tmp_path / str(last)
        assert run(folder, last).returncode == -9
        checkpoint.sweep(folder)
        checkpoint.set_damaged_aside(folder, pytest.fail)
        found = checkpoint.newest(folder)
        assert found is not None
        assert found.weights["w"].tolist() == [float(found.state.step)] * 100
        assert {path.name for path in folder.iterdir()} <= {"step_1", "step_2"}


@pytest.mark.parametrize(("every", "steps", "copied"), [(2, 4, True), (3, 3, False), (2, 2, False)])
def test_memory_for_copies_is_allocated_after_the_first_step(
    recipe_file: Path, tmp_path: Path, every: int, steps: int, copied: bool
) -> None:
    """Only checkpoints before the last step are copied. The sizes are those of all tensors of a checkpoint."""
    reserved: list[tuple[int, list[int]]] = []
    metrics = tmp_path / "runs" / "run" / "metrics.jsonl"

    def reserve(_: LocalWriter, sizes: list[int]) -> None:
        reserved.append((len(metrics.read_text().splitlines()), sorted(sizes)))

    with patch.object(LocalWriter, "reserve", reserve):
        words = [f"checkpoint.every={every}", f"run.steps={steps}", "optim.warmup=0", "val.every=null", "data.val=[]"]
        assert run("train", recipe_file, *words) == 0
    if not copied:
        assert not reserved
        return
    ((lines, sizes),) = reserved
    assert lines == 1
    found = checkpoint.read(tmp_path / "runs" / "run" / "checkpoints" / f"step_{every}")
    assert sizes == sorted(one.nbytes for part in (found.weights, found.optimizer) for one in part.values())
