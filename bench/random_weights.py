"""Model folders whose weights are drawn when they are read, so that a model of 70B parameters needs no disk.

    write_hollow(folder, config)     # config, tokenizer, and a weight file that has a header and a hole
    draw_weights()                   # from now on this process draws the weights of such files

The weight file has the header of a usual safetensors file. Its data were never written, so that they take no space.
lockstep reads such a folder like any other, tensor by tensor. Only the function that reads a tensor is replaced.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from lockstep.model import load_folder
from lockstep.model.tiny import write_tiny
from lockstep.parallel.sharded_files import StoredTensors

SPREAD = 0.02


def write_hollow(folder: Path, config: Any) -> int:
    """Returns the number of parameters."""
    write_tiny(folder)
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    # A tied parameter has one name.
    parameters = {name: tuple(one.shape) for name, one in model.named_parameters()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in parameters.items():
        begin, end = end, end + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return end // 2


def draw_weights(device: torch.device) -> None:
    """Replaces reading by drawing, in this process. Complete tensors are drawn on `device`: a processor would take
    minutes for billions of numbers. The values of a tensor depend on its name and the device."""

    def fill(stored: StoredTensors, targets: Mapping[str, torch.Tensor]) -> None:
        for name, target in targets.items():
            with torch.no_grad():
                target.copy_(_drawn(name, target.shape, device).to(target.dtype))

    def read(stored: StoredTensors, name: str) -> torch.Tensor:
        return _drawn(name, stored.shape(name), device)

    StoredTensors.fill = fill  # type: ignore[method-assign]
    StoredTensors.__getitem__ = read  # type: ignore[method-assign]
    # An unquantised model of one device would be read by transformers.
    load_folder.has_codes = lambda *_: True  # type: ignore[assignment]


def _drawn(name: str, shape: torch.Size, device: torch.device) -> torch.Tensor:
    """Norms are ones and biases zeros, as in a new model."""
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=torch.bfloat16, device=device)
    if name.endswith(".bias"):
        return torch.zeros(shape, dtype=torch.bfloat16, device=device)
    draw = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, SPREAD, generator=draw)
