"""`lockstep dequantize`: writes a model folder with quantised weights as a folder with weights in bf16."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import Refusal, unwritten
from lockstep.run.files import share_model, written_aside

if TYPE_CHECKING:
    import torch

    from lockstep.model.quantized.quantized_folder import QuantizedTensors

# A file is assembled in memory before it is written.
FILE_BYTES = 2**31
INDEX = "model.safetensors.index.json"
# Files that belong to the quantised weights, or that only code of the folder would use.
_LEFT_OUT = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.gguf")
_LEFT_OUT_SETTINGS = ("quantize_config.json", "quant_config.json", "config.json", "*.py")
_DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True)
class DequantizedFolder:
    """What `dequantize_folder` wrote."""

    weights: int
    method: str
    size: int
    dropped: int

    @property
    def sentence(self) -> str:
        text = f"{self.weights:,} weights ({self.method}), {self.size / 1e9:,.2f} GB"
        return f"{text}; left out {self.dropped:,} scales of activations" if self.dropped else text


def dequantize_named(name: str, out: Path, dtype: str) -> str:
    """Dequantises a folder or a hub model, and returns a sentence about the result."""
    from lockstep.model.resolve import model_folder

    done = dequantize_folder(Path(model_folder(name, "FOLDER")), out, dtype)
    return f"dequantised {name} to {out}: {done.sentence}"


def dequantize_folder(source: Path, out: Path, dtype: str = "bf16") -> DequantizedFolder:
    """Writes the folder `source` to `out` with dequantised weights in `dtype`, tensor by tensor. Tensors that `source`
    stores in fp32 stay fp32. Refuses values that are not finite in `dtype`."""
    from safetensors import SafetensorError

    if dtype not in _DTYPE_NAMES:
        raise Refusal.at("--dtype", f"{dtype} is not known", f"use {' or '.join(_DTYPE_NAMES)}", code="unknown-name")
    if out.exists() and not out.is_dir():
        raise Refusal.at(out, "is a file, not a folder", "choose a new folder", code="not-a-folder")
    if out.exists() and any(out.iterdir()):
        raise Refusal.at(out, "is not empty", "choose a new folder", code="not-empty")
    stored, method = opened(source, str(source))
    _refuse_full_disk(stored, out, dtype)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with written_aside(out, over=True) as aside:
            aside.mkdir(exist_ok=True)
            size = _write_weights(stored, aside, dtype, str(source))
            _copy_settings(source, aside, dtype)
            share_model(aside)
    except (OSError, SafetensorError) as error:  # safetensors has a separate error type for a full disk
        raise unwritten(out, error) from error
    weights = sum(stored.is_quantized(name) for name in stored)
    return DequantizedFolder(weights, method, size, stored.dropped)


def opened(source: Path, where: str) -> tuple[QuantizedTensors, str]:
    """The tensors of a quantised folder and its method. Raises `Refusal` if the folder is not quantised."""
    from safetensors import SafetensorError

    from lockstep.model.pretrained import refuse_damaged_settings, refuse_no_weights
    from lockstep.model.quantized.quantized_folder import QuantizedTensors, quantization_of
    from lockstep.model.streamed import weight_files

    if not (source / "config.json").is_file():
        raise Refusal.at(where, "the folder has no config.json", "give a model folder", code="missing-file")
    refuse_damaged_settings(str(source), where)
    settings = quantization_of(source)
    if settings is None:
        why = "its weights are not quantised: config.json has no quantization_config"
        raise Refusal.at(where, why, "use the folder as it is", code="unused-key")
    refuse_no_weights(str(source), where)
    files = weight_files(str(source))
    if files is None:
        why = "its weights are not in safetensors files"
        raise Refusal.at(where, why, "download the safetensors files of the model", code="unsupported-format")
    try:
        return QuantizedTensors(files, settings, where), str(settings.get("quant_method"))
    except (OSError, SafetensorError) as error:
        raise Refusal.at(
            where, f"its weights cannot be read: {error}", "copy or download it again", code="unreadable"
        ) from error


def _target(stored: QuantizedTensors, name: str, dtype: torch.dtype) -> torch.dtype:
    import torch

    keeps = not stored.is_quantized(name) and stored.dtype(name) in (torch.float32, torch.float64)
    return stored.dtype(name) if keeps else dtype


def _shards(stored: QuantizedTensors, dtype: torch.dtype) -> list[list[str]]:
    """The names of the tensors of each file to write."""
    shards: list[list[str]] = [[]]
    room = FILE_BYTES
    for name in sorted(stored):
        size = stored.shape(name).numel() * _target(stored, name, dtype).itemsize
        if shards[-1] and size > room:
            shards.append([])
            room = FILE_BYTES
        shards[-1].append(name)
        room -= size
    return shards


def _write_weights(stored: QuantizedTensors, folder: Path, dtype: str, where: str) -> int:
    import torch
    from safetensors.torch import save_file

    kind: torch.dtype = getattr(torch, _DTYPE_NAMES[dtype])
    shards, total = _shards(stored, kind), 0
    places: dict[str, str] = {}
    for index, names in enumerate(shards):
        file = "model.safetensors" if len(shards) == 1 else f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: _finite(stored, name, _target(stored, name, kind), where) for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        total += sum(tensor.nbytes for tensor in tensors.values())
        places |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index_file = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (folder / INDEX).write_text(json.dumps(index_file, indent=2) + "\n", encoding="utf-8")
    return total


def _finite(stored: QuantizedTensors, name: str, dtype: torch.dtype, where: str) -> torch.Tensor:
    import torch

    value = stored.values_of(name, dtype).contiguous()
    if not torch.isfinite(value).all():
        why = f"its weight {name} holds NaN or infinity after dequantising to {str(dtype).removeprefix('torch.')}"
        remedy = "copy or download it again; for fp16, use --dtype bf16"
        raise Refusal.at(where, why, remedy, code="not-finite")
    return value


def _copy_settings(source: Path, folder: Path, dtype: str) -> None:
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(_unquantised(config, dtype), indent=2) + "\n", encoding="utf-8")
    for file in _others(source):
        shutil.copyfile(file, folder / file.name)


def _unquantised(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The config without quantization, also in nested configs such as `text_config`."""
    from lockstep.model.quantized.quantized_folder import KEYS

    kept = {key: value for key, value in config.items() if key not in KEYS}
    for key in ("dtype", "torch_dtype"):
        if key in kept:
            kept[key] = _DTYPE_NAMES[dtype]
    return {
        key: _unquantised(value, dtype) if key.endswith("_config") and isinstance(value, dict) else value
        for key, value in kept.items()
    }


def _others(source: Path) -> Iterator[Path]:
    """Tokenizer, chat template, generation settings, licence: every file that is not a weight and not code."""
    left_out = {file for pattern in (*_LEFT_OUT, *_LEFT_OUT_SETTINGS) for file in source.glob(pattern)}
    return (file for file in sorted(source.iterdir()) if file.is_file() and file not in left_out)


def _refuse_full_disk(stored: QuantizedTensors, out: Path, dtype: str) -> None:
    import torch

    kind: torch.dtype = getattr(torch, _DTYPE_NAMES[dtype])
    needed = sum(stored.shape(name).numel() * _target(stored, name, kind).itemsize for name in stored)
    place = next(folder for folder in (out, *out.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(place).free
    if free < needed:
        why = f"the folder needs {needed / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB are free"
        raise Refusal.at(out, why, "choose a folder on another disk", code="disk-full")
