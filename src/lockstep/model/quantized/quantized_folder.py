"""Reads model folders whose weights are quantised already, tensor by tensor: GPTQ, AWQ, fp8 blocks (DeepSeek), MXFP4
(gpt-oss), compressed-tensors and bitsandbytes.

`QuantizedTensors` shows the tensors of such a folder under the names and shapes of the unquantised model. The files
store several tensors per weight (codes, scales, zero points); these are decoded when the weight is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from shlex import quote
from typing import Any, NoReturn

import torch
from safetensors import safe_open

from lockstep.errors import Refusal, first_line
from lockstep.kernels.quantized import packed
from lockstep.kernels.quantized.formats import Quantized, dequantize
from lockstep.parallel.sharded_files import StoredTensors
from lockstep.parallel.sharding import held_part

StoredParts = Mapping[str, torch.Tensor]
Decode = Callable[[StoredParts, torch.dtype], Quantized | torch.Tensor]
MethodSettings = Mapping[str, Any]

KEYS = ("quantization_config", "compression_config")
# Scales of activations and of the key-value cache: they do not change the weights.
_OTHER_SCALES = re.compile(r"\.(input|output|activation|k|v|q)_(scale|zero_point|global_scale|scale_inv)$")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
REMEDY = "use the folder of the model without quantization, in bf16 or fp32"


@dataclass(frozen=True)
class PackedWeight:
    """A weight that the files store as several tensors. `parts` has their names in the files."""

    parts: Mapping[str, str]
    shape: torch.Size
    decode: Decode


def quantization_of(folder: Path) -> dict[str, Any] | None:
    """The quantization settings in the config.json of a folder, or None."""
    file = folder / "config.json"
    if not file.is_file():
        return None
    config = json.loads(file.read_text(encoding="utf-8"))
    found = next((config[key] for key in KEYS if isinstance(config.get(key), dict)), None)
    return None if found is None else dict(found)


def readable_quantization(folder: Path) -> dict[str, Any] | None:
    """The quantization settings of a folder whose method lockstep reads, or None."""
    found = quantization_of(folder)
    return found if found is not None and found.get("quant_method") in READABLE else None


def stored_tensors(files: list[Path], where: str) -> StoredTensors:
    """The tensors of the files of one folder, under the names of the unquantised model."""
    settings = readable_quantization(files[0].parent) if files else None
    return StoredTensors(files) if settings is None else QuantizedTensors(files, settings, where)


def needs_dequantizing(folder: str, where: str, why: str) -> Refusal:
    """The error for a quantised folder that cannot be used as it is."""
    remedy = f"dequantize it with: lockstep dequantize {quote(folder)} DIR; then use DIR"
    return Refusal.at(where, f"its weights are quantized, and {why}", remedy, code="quantized-weights")


class QuantizedTensors(StoredTensors):
    """The tensors of a quantised folder, under the names of the unquantised model. `stored[name]` and `fill` decode;
    `quantized(name)` keeps the codes where `formats.py` has the format. Raises `Refusal` for what it cannot read."""

    def __init__(self, files: list[Path], settings: MethodSettings, where: str):
        self._files = _RawFiles(files, where)
        self._where = where
        method = str(settings.get("quant_method") or "")
        if method not in _METHODS:
            self.refuse(f"its weights are quantized with {method or 'an unnamed method'}, which lockstep cannot read")
        self._packed: dict[str, PackedWeight] = _METHODS[method](self._files, settings)
        used = {name for weight in self._packed.values() for name in weight.parts.values()}
        others = [name for name in self._files.places if name not in used and not _OTHER_SCALES.search(name)]
        for name in others:
            kind = self._files.dtype(name)
            if kind not in _FLOATS:
                self.refuse(f"its tensor {name} has the type {kind}, and is not a part of a weight in {method} format")
        self.dropped = len(self._files.places) - len(used) - len(others)
        self._plain = frozenset(others)
        self._names = [*others, *self._packed]
        if not self._packed:
            self.refuse(f"config.json says that its weights are quantized ({method}), but its files have none")

    def refuse(self, why: str) -> NoReturn:
        raise Refusal.at(self._where, why, REMEDY, code="quantized-weights")

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.values_of(name, self.dtype(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def shape(self, name: str) -> torch.Size:
        return self._files.shape(name) if name in self._plain else self._packed[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """The stored type of a weight that is not quantised. A decoded weight is fp32."""
        return self._files.dtype(name) if name in self._plain else torch.float32

    def is_quantized(self, name: str) -> bool:
        return name in self._packed

    def quantized(self, name: str, dtype: torch.dtype = torch.float32) -> Quantized | torch.Tensor:
        """The weight as codes and scales, or its values where no format of `formats.py` has them."""
        weight = self._packed[name]
        tensors = {role: self._files.read(file_name) for role, file_name in weight.parts.items()}
        try:
            found = weight.decode(tensors, dtype)
        except (ValueError, RuntimeError, IndexError) as error:
            self.refuse(f"its weight {name} cannot be decoded: {first_line(error)}")
        if tuple(found.shape) != tuple(weight.shape):
            self.refuse(f"its weight {name} is decoded to the shape {tuple(found.shape)}, not {tuple(weight.shape)}")
        return found

    def values_of(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        if name in self._plain:
            return self._files.read(name).to(dtype)
        found = self.quantized(name, dtype)
        return dequantize(found, dtype) if isinstance(found, Quantized) else found.to(dtype)

    @torch.no_grad()
    def fill(self, targets: Mapping[str, torch.Tensor]) -> None:
        for name, target in targets.items():
            part, offsets = held_part(target.detach())
            if part.numel():
                value = self.values_of(name, part.dtype if part.dtype in _FLOATS else torch.float32)
                for dimension, (offset, size) in enumerate(zip(offsets, part.shape, strict=True)):
                    value = value.narrow(dimension, offset, size)
                part.copy_(value)


class _RawFiles:
    """The tensors in the files, as they are stored."""

    def __init__(self, files: list[Path], where: str):
        self.where = where
        self._open = ExitStack()
        self.places: dict[str, Any] = {}
        for file in files:
            opened = self._open.enter_context(safe_open(file, "pt"))
            self.places |= dict.fromkeys(opened.keys(), opened)

    def read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self.places[name].get_tensor(name)
        return tensor

    def shape(self, name: str) -> torch.Size:
        return torch.Size(self.places[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        # An empty slice has the type, and reads nothing.
        part = self.places[name].get_slice(name)
        return part[:0].dtype if part.get_shape() else self.read(name).dtype

    def ending(self, suffix: str) -> list[str]:
        """The names that end with this suffix, without it."""
        return [name.removesuffix(suffix) for name in self.places if name.endswith(suffix)]

    def parts(self, base: str, needed: Mapping[str, str], optional: Mapping[str, str]) -> dict[str, str]:
        """The names of the tensors of one weight, by role. `needed` and `optional` have the suffixes."""
        for suffix in needed.values():
            if base + suffix not in self.places:
                why = f"its files have no {base + suffix}, which the weight {base} needs"
                raise Refusal.at(self.where, why, "copy or download the folder again", code="missing-weight")
        roles = {**needed, **{role: suffix for role, suffix in optional.items() if base + suffix in self.places}}
        return {role: base + suffix for role, suffix in roles.items()}

    def refuse(self, why: str) -> NoReturn:
        raise Refusal.at(self.where, why, REMEDY, code="quantized-weights")


def _gptq(files: _RawFiles, settings: MethodSettings) -> dict[str, PackedWeight]:
    kind = settings.get("checkpoint_format") or "gptq"
    if kind not in ("gptq", "gptq_v2"):
        files.refuse(f"its GPTQ weights have the layout {kind}, which lockstep cannot read")
    found: dict[str, PackedWeight] = {}
    for base in files.ending(".qweight"):
        needed = {"qweight": ".qweight", "qzeros": ".qzeros", "scales": ".scales"}
        parts = files.parts(base, needed, {"g_idx": ".g_idx"})
        words, outputs = files.shape(parts["qweight"])
        inputs = files.shape(parts["g_idx"])[0] if "g_idx" in parts else words * 32 // int(settings["bits"])
        bits = words * 32 // inputs
        if bits not in (2, 4, 8) or words * 32 != inputs * bits:
            files.refuse(f"its weight {base} has {bits} bits, and lockstep reads GPTQ weights of 2, 4 and 8 bits")
        decode = partial(_decode_gptq, bits=bits, block=_group_size(settings), plus_one=kind == "gptq")
        found[f"{base}.weight"] = PackedWeight(parts, torch.Size([outputs, inputs]), decode)
    return found


def _decode_gptq(
    parts: StoredParts, dtype: torch.dtype, *, bits: int, block: int, plus_one: bool
) -> Quantized | torch.Tensor:
    named = (parts["qweight"], parts["qzeros"], parts["scales"], parts.get("g_idx"))
    return packed.gptq(*named, bits, block, plus_one=plus_one)


def _awq(files: _RawFiles, settings: MethodSettings) -> dict[str, PackedWeight]:
    version, bits = str(settings.get("version") or "gemm").lower(), settings.get("bits", settings.get("w_bit", 4))
    if version != "gemm" or bits != 4:
        files.refuse(f"its AWQ weights have the layout {version} with {bits} bits, and lockstep reads gemm with 4 bits")
    found: dict[str, PackedWeight] = {}
    decode = partial(_decode_awq, block=_group_size(settings))
    for base in files.ending(".qweight"):
        parts = files.parts(base, {"qweight": ".qweight", "qzeros": ".qzeros", "scales": ".scales"}, {})
        inputs, words = files.shape(parts["qweight"])
        found[f"{base}.weight"] = PackedWeight(parts, torch.Size([words * 8, inputs]), decode)
    return found


def _decode_awq(parts: StoredParts, dtype: torch.dtype, *, block: int) -> Quantized | torch.Tensor:
    return packed.awq(parts["qweight"], parts["qzeros"], parts["scales"], block)


def _group_size(settings: MethodSettings) -> int:
    """How many inputs share a scale, or 0 if all do."""
    return max(0, int(settings.get("group_size", settings.get("q_group_size", 0)) or 0))


def _fp8(files: _RawFiles, settings: MethodSettings) -> dict[str, PackedWeight]:
    """fp8 weights with `_scale_inv` per block (DeepSeek), or with `_scale` per row or tensor."""
    block = settings.get("weight_block_size")
    found: dict[str, PackedWeight] = {}
    for suffix in ("_scale_inv", "_scale"):
        for name in files.ending(suffix):
            if _OTHER_SCALES.search(name + suffix):
                continue
            parts = files.parts(name, {"codes": "", "scales": suffix}, {})
            shape, grid = files.shape(name), files.shape(parts["scales"])
            if files.dtype(name) not in _FP8:
                files.refuse(f"its weight {name} has the type {files.dtype(name)}, not fp8")
            per_block = block if suffix == "_scale_inv" and grid.numel() > 1 else None
            if per_block and tuple(grid[-2:]) != tuple(
                ceil(size / step) for size, step in zip(shape[-2:], per_block, strict=True)
            ):
                files.refuse(f"the scales of {name} have the shape {tuple(grid)}, which does not fit blocks of {block}")
            found[name] = PackedWeight(parts, shape, partial(_decode_fp8, block=per_block))
    return found


def _decode_fp8(parts: StoredParts, dtype: torch.dtype, *, block: list[int] | None) -> Quantized | torch.Tensor:
    return packed.floats(parts["codes"], parts["scales"], block)


def _mxfp4(files: _RawFiles, settings: MethodSettings) -> dict[str, PackedWeight]:
    found: dict[str, PackedWeight] = {}
    for name in files.ending("_blocks"):
        parts = files.parts(name, {"blocks": "_blocks", "scales": "_scales"}, {})
        experts, outputs, groups, size = files.shape(parts["blocks"])
        found[name] = PackedWeight(parts, torch.Size([experts, groups * size * 2, outputs]), _decode_mxfp4)
    return found


def _decode_mxfp4(parts: StoredParts, dtype: torch.dtype) -> torch.Tensor:
    return packed.mxfp4(parts["blocks"], parts["scales"], dtype)


def _compressed(files: _RawFiles, settings: MethodSettings) -> dict[str, PackedWeight]:
    sparse = (settings.get("sparsity_config") or {}).get("format") or "dense"
    if sparse != "dense":
        files.refuse(f"its weights are stored sparse ({sparse}), which lockstep cannot read")
    found: dict[str, PackedWeight] = {}
    optional = {"zeros": ".weight_zero_point", "groups": ".weight_g_idx"}
    for base in files.ending(".weight_packed"):
        parts = files.parts(
            base, {"words": ".weight_packed", "scales": ".weight_scale", "shape": ".weight_shape"}, optional
        )
        words, kind = files.shape(parts["words"]), files.dtype(parts["words"])
        shape = torch.Size(files.read(parts["shape"]).tolist())
        bits = next((bits for bits in (2, 4, 8) if ceil(shape[-1] * bits / 32) == words[-1]), 0)
        if kind != torch.int32 or not bits or len(shape) != 2:
            files.refuse(f"its weight {base} is packed in {kind}, and lockstep reads integers of 2, 4 and 8 bits")
        decode = partial(_decode_words, bits=bits, shape=shape, block=_weight_block(settings, base)[1])
        found[f"{base}.weight"] = PackedWeight(parts, shape, decode)
    for base in files.ending(".weight_scale"):
        if f"{base}.weight_packed" in files.places:
            continue
        parts = files.parts(base, {"codes": ".weight", "scales": ".weight_scale"}, optional)
        kind = files.dtype(parts["codes"])
        if kind not in (torch.int8, *_FP8):
            files.refuse(f"its weight {base} has the type {kind}, and lockstep reads int8 and fp8")
        decode = partial(_decode_naive, block=_weight_block(settings, base))
        found[f"{base}.weight"] = PackedWeight(parts, files.shape(parts["codes"]), decode)
    return found


def _weight_block(settings: MethodSettings, base: str) -> tuple[int, int]:
    """Returns how many rows and columns of a weight share a scale, 0 where the settings do not say it. As in
    compressed-tensors, a group that names the layer comes before a group that names its class."""
    groups = (settings.get("config_groups") or {}).values()
    named = [group for group in groups if any(_names(target, base) for target in group.get("targets") or ())]
    for group in [*named, *groups]:
        weights = group.get("weights") or {}
        block, columns = weights.get("block_structure"), int(weights.get("group_size") or 0)
        if isinstance(block, str):
            block = [int(size) for size in block.lower().split("x")]
        return (int(block[0]), int(block[1])) if block else (1, max(0, columns))
    return 0, 0


def _names(target: str, base: str) -> bool:
    """Whether a target of compressed-tensors is the name of a layer: a name, or a regular expression after `re:`."""
    if target.startswith("re:"):
        return re.match(target[3:], base) is not None
    return base == target or base.endswith(f".{target}")


def _decode_words(
    parts: StoredParts, dtype: torch.dtype, *, bits: int, shape: torch.Size, block: int
) -> Quantized | torch.Tensor:
    """Signed integers, to which the packing adds half their range. Zero points are packed along the outputs."""
    rows, columns = shape
    half = 2 ** (bits - 1)
    codes = packed.unpacked(parts["words"], bits)[:, :columns] - half
    zeros = parts.get("zeros")
    if zeros is not None and zeros.dtype == torch.int32:
        zeros = packed.unpacked(zeros.T.contiguous(), bits)[:, :rows].T - half
    return packed.integers(codes, zeros, _by_row(parts["scales"], rows), parts.get("groups"), block)


def _decode_naive(parts: StoredParts, dtype: torch.dtype, *, block: tuple[int, int]) -> Quantized | torch.Tensor:
    codes, scales, zeros = parts["codes"], parts["scales"], parts.get("zeros")
    rows = codes.shape[0]
    if codes.dtype == torch.int8:
        zeros = None if zeros is None else _by_row(zeros, rows)
        return packed.integers(codes, zeros, _by_row(scales, rows), parts.get("groups"), block[1])
    return packed.floats(codes, scales, block)


def _by_row(values: torch.Tensor, rows: int) -> torch.Tensor:
    """Scales or zero points [out, blocks] from one value, one per row, or one per row and block."""
    values = values.reshape(-1, 1) if values.dim() < 2 else values
    return values.expand(rows, -1)


def _bitsandbytes(files: _RawFiles, settings: MethodSettings) -> dict[str, PackedWeight]:
    found: dict[str, PackedWeight] = {}
    for name in files.ending(".absmax"):
        state = next((one for one in files.places if one.startswith(f"{name}.quant_state.bitsandbytes__")), None)
        if state is None:
            files.refuse(f"the weight {name} has no quant_state tensor")
        told = json.loads(bytes(files.read(state).tolist()).decode())
        optional = {"nested_absmax": ".nested_absmax", "nested_table": ".nested_quant_map"}
        parts = files.parts(name, {"codes": "", "absmax": ".absmax", "table": ".quant_map"}, optional)
        decode = partial(_decode_4bit, told=told)
        found[name] = PackedWeight({**parts, "state": state}, torch.Size(told["shape"]), decode)
    for base in files.ending(".SCB"):
        parts = files.parts(base, {"codes": ".weight", "absmax": ".SCB"}, {"layout": ".weight_format"})
        found[f"{base}.weight"] = PackedWeight(parts, files.shape(parts["codes"]), _decode_8bit)
    return found


def _decode_4bit(parts: StoredParts, dtype: torch.dtype, *, told: MethodSettings) -> Quantized | torch.Tensor:
    nested = None
    if "nested_absmax" in parts:
        offset, size = float(told["nested_offset"]), int(told["nested_blocksize"])
        nested = (parts["nested_absmax"], parts["nested_table"], offset, size)
    codes, absmax, table = parts["codes"], parts["absmax"], parts["table"]
    return packed.bitsandbytes_4bit(codes, absmax, table, told["shape"], int(told["blocksize"]), nested)


def _decode_8bit(parts: StoredParts, dtype: torch.dtype) -> Quantized:
    return packed.bitsandbytes_8bit(parts["codes"], parts["absmax"])


_METHODS: dict[str, Callable[[_RawFiles, MethodSettings], dict[str, PackedWeight]]] = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed,
    "bitsandbytes": _bitsandbytes,
}
READABLE = tuple(_METHODS)
