"""Reading parts of tensors from safetensors files: every rectangle, dtype and target, and files that are damaged."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from allocated import allocated, marked
from lockstep.parallel import slice_reader
from lockstep.parallel.sharded_files import StoredTensors
from lockstep.parallel.slice_reader import read_headers, read_parts


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks and threads, although the tensors are small."""
    monkeypatch.setattr(slice_reader, "BLOCK_BYTES", 64)
    monkeypatch.setattr(slice_reader, "THREADED_BYTES", 0)


def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def write_slices(folder: Path, tensor: torch.Tensor, cuts: list[int], along: int) -> list[Path]:
    """Writes a tensor as torch.distributed.checkpoint does: a file for each slice, with its offsets in the header."""
    files, first = [], 0
    for number, size in enumerate(cuts):
        offsets = [first if dimension == along else 0 for dimension in range(tensor.ndim)]
        noted = {"DCP_SHARDING_INFO": json.dumps({"x": {"saved_offsets": offsets}})}
        files.append(folder / f"shard-{number}.safetensors")
        save_file({"x": tensor.narrow(along, first, size).contiguous()}, files[-1], noted)
        first += size
    return files


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", [(), (7,), (9, 5), (4, 6, 3)], ids=str)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.int64, torch.uint8], ids=str)
def test_complete_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: torch.dtype, shape: tuple[int, ...], threads: int
) -> None:
    monkeypatch.setattr(slice_reader, "THREADS", threads)
    tensors = {f"t{number}": drawn(shape, stored) + number for number in range(5)}
    save_file(tensors, tmp_path / "all.safetensors")
    found = StoredTensors([tmp_path / "all.safetensors"])
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found.shape(name), found.dtype(name)) == (tensor.shape, stored)
        assert torch.equal(found[name], tensor)
    # Into another dtype, and into memory that is not contiguous.
    other = {name: torch.empty((*shape, 2), dtype=torch.float64)[..., 0] for name in tensors}
    found.fill(other)
    for name, tensor in tensors.items():
        assert torch.equal(other[name], tensor.double())


@pytest.mark.parametrize("row_bytes", [0, 20, 10_000])
@pytest.mark.parametrize("along", [0, 1])
def test_every_part_of_a_tensor_in_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, along: int, row_bytes: int
) -> None:
    """Any rectangle is put together from the slices, whatever their cuts."""
    monkeypatch.setattr(slice_reader, "ROW_BYTES", row_bytes)
    draw = random.Random(along)
    tensor = drawn((12, 10, 3), torch.float32)
    stored = read_headers(write_slices(tmp_path, tensor, [5, 1, tensor.shape[along] - 6], along))
    assert stored["x"].shape == tensor.shape
    for _ in range(40):
        starts = [draw.randrange(size) for size in tensor.shape]
        sizes = [draw.randint(1, size - start) for size, start in zip(tensor.shape, starts, strict=True)]
        part = torch.full(sizes, -1.0)
        read_parts({"x": (part, tuple(starts))}, stored)
        region = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
        assert torch.equal(part, tensor[region]), (starts, sizes)
    read_parts({"x": (torch.empty(0, 10, 3), (12, 0, 0))}, stored)  # the part of a rank without rows


def test_columns_are_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that reads some columns never holds the complete tensor."""
    monkeypatch.setattr(slice_reader, "THREADS", 1)
    monkeypatch.setattr(slice_reader, "BLOCK_BYTES", 2**14)
    tensor = drawn((1024, 256), torch.float32)
    save_file({"x": tensor}, tmp_path / "all.safetensors")
    part, stored = torch.empty(1024, 2), read_headers([tmp_path / "all.safetensors"])
    with allocated() as held:
        marked("read", read_parts)({"x": (part, (0, 7))}, stored)
    assert torch.equal(part, tensor[:, 7:9])
    assert 0 < held["read"] < 2**15 < tensor.nbytes


def test_a_missing_slice_is_refused(tmp_path: Path) -> None:
    files = write_slices(tmp_path, drawn((8, 4), torch.float32), [3, 2, 3], 0)
    found = StoredTensors([files[0], files[2]])
    assert found.shape("x") == (8, 4)
    with pytest.raises(ValueError, match="x: the files have 24 of the 32 elements"):
        found["x"]


def test_targets_of_another_shape_are_refused(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(8, 4)}, tmp_path / "all.safetensors")
    with pytest.raises(ValueError, match=r"x has the shape \(8, 4\) in the files, and \(4, 8\) in the model"):
        StoredTensors([tmp_path / "all.safetensors"]).fill({"x": torch.zeros(4, 8)})


def test_damaged_files_are_errors(tmp_path: Path) -> None:
    file = tmp_path / "all.safetensors"
    save_file({"x": torch.arange(64.0)}, file)
    found = StoredTensors([file])
    content = file.read_bytes()
    file.write_bytes(content[:-40])  # after the header was read
    with pytest.raises(OSError, match=r"all.safetensors ends at byte .* within the tensor x"):
        found["x"]
    with pytest.raises(SafetensorError):
        StoredTensors([file])
    length = int.from_bytes(content[:8], "little")
    file.write_bytes(content[:8] + content[8 : 8 + length].replace(b'"F32"', b'"F99"') + content[8 + length :])
    with pytest.raises(SafetensorError):
        StoredTensors([file])
    with pytest.raises(OSError, match="No such file"):
        StoredTensors([tmp_path / "none.safetensors"])


def test_dtypes_are_those_of_safetensors(tmp_path: Path) -> None:
    for dtype in slice_reader.DTYPES.values():
        save_file({"x": torch.zeros(3, dtype=dtype)}, tmp_path / "one.safetensors")
        assert StoredTensors([tmp_path / "one.safetensors"]).dtype("x") == dtype


def test_targets_of_one_element_with_a_stride(tmp_path: Path) -> None:
    save_file({"x": torch.tensor([7.0]), "y": torch.arange(33.0)}, tmp_path / "all.safetensors")
    x, y = torch.zeros(3)[1::3], torch.zeros(33, 2)[:, 0]  # the last block of y has one element
    StoredTensors([tmp_path / "all.safetensors"]).fill({"x": x, "y": y})
    assert x.tolist() == [7.0]
    assert torch.equal(y, torch.arange(33.0))


def relabel(file: Path, kind: str, shape: list[int]) -> None:
    """Gives the tensor x another type and shape in the header."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["x"] |= {"dtype": kind, "shape": shape}
    written = json.dumps(header).encode()
    file.write_bytes(len(written).to_bytes(8, "little") + written + content[8 + length :])


def test_types_that_torch_lacks_are_refused_when_they_are_read(tmp_path: Path) -> None:
    file = tmp_path / "all.safetensors"
    save_file({"x": torch.zeros(6, dtype=torch.uint8), "y": torch.ones(2)}, file)
    relabel(file, "F8_E8M0", [6])
    assert StoredTensors([file]).dtype("x") == torch.float8_e8m0fnu
    relabel(file, "F4", [12])
    found = StoredTensors([file])
    assert found["y"].tolist() == [1, 1]
    with pytest.raises(SafetensorError, match="x has the type F4, which torch cannot read"):
        found["x"]


def test_slices_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    tensor = drawn((4, 4), torch.float32)
    files = write_slices(tmp_path, tensor, [2, 2], 0)
    noted = {"DCP_SHARDING_INFO": json.dumps({"x": {"saved_offsets": [2, 0]}})}
    save_file({"x": tensor[2:].double()}, files[1], noted)
    with pytest.raises(SafetensorError, match="x has the type F64, in other files F32"):
        StoredTensors(files)
    save_file({"x": tensor[2:], "y": torch.ones(2)}, files[1], noted)
    with pytest.raises(SafetensorError, match="does not say where y belongs"):
        StoredTensors(files)


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_error_ends_all_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]) -> None:
    save_file({"x": torch.zeros(16 * 1000)}, tmp_path / "all.safetensors")
    filled: list[int] = []

    def fill(file: int, target: torch.Tensor, block: object) -> None:
        filled.append(1)
        if len(filled) == 5:
            raise error("in a thread")
        time.sleep(0.001)

    monkeypatch.setattr(slice_reader, "_fill", fill)
    monkeypatch.setattr(slice_reader, "THREADS", 3)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    with pytest.raises(error, match="in a thread"):
        StoredTensors([tmp_path / "all.safetensors"])["x"]
    assert len(filled) < 20  # of 1,000
