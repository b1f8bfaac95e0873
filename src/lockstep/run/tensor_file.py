"""Writes safetensors files: several files at once with their checksums, or tensor by tensor to save memory; copies and
links stored tensors."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import torch

from lockstep.run.files import BLOCK, checksum_entry, file_threads

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# Maximum size of one file; larger models get several files.
FILE_BYTES = 5 * 10**9
ALONE, INDEX = "model.safetensors", "model.safetensors.index.json"


def write_model(
    folder: Path,
    shapes: Mapping[str, torch.Size],
    dtype: torch.dtype,
    read: Callable[[str], torch.Tensor],
    others: Mapping[str, torch.dtype] = MappingProxyType({}),
) -> None:
    """Writes the weights of a Hugging Face folder: one file, or several files and an index. `read` returns the tensor
    with a given name. `dtype` is the dtype of all tensors except those in `others`, which maps tensor names to other
    dtypes."""
    dtypes = {name: others.get(name, dtype) for name in shapes}
    files: list[list[str]] = [[]]
    room = FILE_BYTES
    for name, shape in shapes.items():
        size = shape.numel() * dtypes[name].itemsize
        if files[-1] and size > room:
            files.append([])
            room = FILE_BYTES
        files[-1].append(name)
        room -= size
    places = {}
    for number, names in enumerate(files, 1):
        file = ALONE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        _write(folder / file, names, shapes, dtypes, read)
        places.update(dict.fromkeys(names, file))
    if len(files) > 1:
        total = sum(shape.numel() * dtypes[name].itemsize for name, shape in shapes.items())
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write(
    path: Path,
    names: Sequence[str],
    shapes: Mapping[str, torch.Size],
    dtypes: Mapping[str, torch.dtype],
    read: Callable[[str], torch.Tensor],
) -> None:
    header: dict[str, object] = {}
    end = 0
    for name in names:
        begin, end = end, end + shapes[name].numel() * dtypes[name].itemsize
        header[name] = {"dtype": NAMES[dtypes[name]], "shape": list(shapes[name]), "data_offsets": [begin, end]}
    with path.open("wb") as file:
        file.write(_opening(header))
        for name in names:
            tensor = read(name).detach().to("cpu", dtypes[name]).contiguous()
            assert tensor.shape == shapes[name], name
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            del tensor


# A file with the right tensors is shared instead of written again. Larger files are not: the Hugging Face hub takes
# files of up to 50 GB.
LINKED_BYTES = 50 * 10**9
# The ioctl of Linux that makes a file share the blocks of another file (linux/fs.h).
FICLONE = 0x40049409


def link_model(
    folder: Path, files: Sequence[Path], shapes: Mapping[str, torch.Size], dtypes: Mapping[str, torch.dtype]
) -> bool:
    """Makes a stored file the weights of a Hugging Face folder, if it has exactly the named tensors. The folder gets a
    reflink of the file, or a hard link if the file system has no reflinks. Returns False if neither is possible."""
    if len(files) != 1 or files[0].stat().st_size > LINKED_BYTES:
        return False
    with files[0].open("rb") as file:
        entries, _ = _header(file)
        found = {name: (entry["dtype"], entry["shape"]) for name, entry in entries.items()}
        if found != {name: (NAMES[dtypes[name]], list(shape)) for name, shape in shapes.items()}:
            return False
        target = folder / ALONE
        try:
            with target.open("wb") as copy:
                fcntl.ioctl(copy.fileno(), FICLONE, file.fileno())
        except OSError:
            target.unlink()
        else:
            return True
    try:
        target.hardlink_to(files[0])
    except OSError:  # another file system, or one without hard links
        return False
    return True


# Copies of stored tensors, byte by byte.

# Number of bytes that are copied at once.
PIECE = 2**24


def stored_names(path: Path) -> list[str]:
    """Returns the names of the tensors in a safetensors file."""
    with path.open("rb") as file:
        return list(_header(file)[0])


def add_tensors(folder: Path, sources: Sequence[Path], names: Sequence[str]) -> None:
    """Copies the tensors `names` of the source files to a new file of a Hugging Face folder that already has weights,
    and writes the index. The copies have the dtype and the bytes of the source."""
    files = sorted({*folder.glob("model*.safetensors")})
    renamed = {file: f"model-{number:05d}-of-{len(files) + 1:05d}.safetensors" for number, file in enumerate(files, 1)}
    places, total = {}, 0
    for file, name in renamed.items():
        with file.open("rb") as opened:
            entries, _ = _header(opened)
        places.update(dict.fromkeys(entries, name))
        total += sum(_size(entry) for entry in entries.values())
        file.rename(folder / name)
    last = f"model-{len(files) + 1:05d}-of-{len(files) + 1:05d}.safetensors"
    total += _copy(sources, set(names), folder / last)
    places.update(dict.fromkeys(names, last))
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _copy(sources: Sequence[Path], names: set[str], out: Path) -> int:
    """Writes the named tensors of the source files to `out`. Returns the size of the written tensors in bytes."""
    header: dict[str, object] = {}
    parts: list[tuple[Path, int, int]] = []
    end = 0
    for source in sources:
        with source.open("rb") as file:
            entries, data = _header(file)
        for name in (name for name in entries if name in names):
            begin, end = end, end + _size(entries[name])
            header[name] = {**entries[name], "data_offsets": [begin, end]}
            parts.append((source, data + entries[name]["data_offsets"][0], end - begin))
    with out.open("wb") as file:
        file.write(_opening(header))
        for source, begin, size in parts:
            with source.open("rb") as opened:
                opened.seek(begin)
                for offset in range(0, size, PIECE):
                    file.write(opened.read(min(PIECE, size - offset)))
    return end


def _opening(header: Mapping[str, object]) -> bytes:
    """Returns the beginning of a safetensors file, up to its data."""
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """Returns the entry of each tensor in a safetensors file, and the offset of the data."""
    length = int.from_bytes(file.read(8), "little")
    entries: dict[str, Any] = json.loads(file.read(length))
    entries.pop("__metadata__", None)
    return entries, 8 + length


def _size(entry: Mapping[str, Any]) -> int:
    begin, end = entry["data_offsets"]
    return int(end - begin)


# Several files at once. Threads write and checksum blocks of all files, so that neither the checksum nor a single file
# limits the speed.


def write_files(contents: Mapping[Path, Mapping[str, torch.Tensor]]) -> dict[Path, dict[str, Any]]:
    """Writes new safetensors files, flushed to disk. The tensors may be on any device and must not change meanwhile.
    Returns the size and the checksum of each file."""
    with ExitStack() as opened:
        # Twice as many threads: while one half computes checksums, the other half keeps the disk busy.
        threads = opened.enter_context(file_threads(2))
        descriptors = {path: os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600) for path in contents}
        for descriptor in descriptors.values():
            opened.callback(os.close, descriptor)
        opened.callback(threads.shutdown, cancel_futures=True)  # after an error, before the files are closed
        jobs: dict[Path, list[Future[bytes]]] = {}
        sizes: dict[Path, int] = {}
        for path, tensors in contents.items():
            parts = _parts(tensors)
            begins = list(accumulate(map(len, parts), initial=0))
            sizes[path] = begins[-1]
            jobs[path] = [
                threads.submit(_write_block, descriptors[path], parts, begins, start)
                for start in range(0, sizes[path], BLOCK)
            ]
        digests = {path: [job.result() for job in some] for path, some in jobs.items()}
    return {path: checksum_entry(sizes[path], digests[path]) for path in contents}


def _parts(tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Returns the parts of a safetensors file as bytes: the header and the tensors. Tensors with larger elements come
    first, so that each tensor is aligned."""
    header: dict[str, object] = {}
    parts, end = [], 0
    for name, tensor in sorted(tensors.items(), key=lambda one: (-one[1].element_size(), one[0])):
        part = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        begin, end = end, end + len(part)
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        parts.append(part)
    return [torch.frombuffer(bytearray(_opening(header)), dtype=torch.uint8), *parts]


def _write_block(descriptor: int, parts: Sequence[torch.Tensor], begins: Sequence[int], start: int) -> bytes:
    """Writes the block of a file that begins at `start`. Part i of the file begins at `begins[i]`. Returns the SHA-256
    digest of the block."""
    digest, position, end = hashlib.sha256(), start, min(start + BLOCK, begins[-1])
    while position < end:
        number = bisect_right(begins, position) - 1
        part = parts[number][position - begins[number] : end - begins[number]]
        rest = part.cpu().numpy().data
        digest.update(rest)
        while rest:
            written = os.pwrite(descriptor, rest, position)
            rest, position = rest[written:], position + written
    os.fdatasync(descriptor)
    return digest.digest()
