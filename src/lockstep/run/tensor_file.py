"""Writes safetensors files one tensor at a time, so that only one tensor is in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}
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
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        begin, end = end, end + shapes[name].numel() * dtypes[name].itemsize
        header[name] = {"dtype": NAMES[dtypes[name]], "shape": list(shapes[name]), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            tensor = read(name).detach().to("cpu", dtypes[name]).contiguous()
            assert tensor.shape == shapes[name], name
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            del tensor
