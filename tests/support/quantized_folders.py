"""Model folders whose weights are quantised, and the values that their formats say. The codes, zero points and scales
are drawn, and packed here word by word as the formats describe it, so that nothing of the reader is used.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
# The tensors that a format stores for one weight [out, in], by suffix of its module, and the values of the weight.
Packer = Callable[[torch.Size, torch.Generator], tuple[Tensors, torch.Tensor]]
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned integers [n, k] in int32 words [n, k * bits / 32], the first value in the lowest bits."""
    per_word = 32 // bits
    rows = []
    for row in values.tolist():
        row = row + [0] * (-len(row) % per_word)
        packed = [
            sum(value << (bits * place) for place, value in enumerate(row[at : at + per_word]))
            for at in range(0, len(row), per_word)
        ]
        rows.append([word - 2**32 if word >= 2**31 else word for word in packed])
    return torch.tensor(rows, dtype=torch.int32)


def drawn(low: int, high: int, *shape: int, g: torch.Generator) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=g)


def scales(*shape: int, g: torch.Generator, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return ((torch.rand(shape, generator=g) + 0.5) * 0.01).to(dtype)


def gptq(bits: int, group: int, version: str, shuffled: bool) -> Packer:
    """w[n, k] = scale[g(k), n] * (q[k, n] - z[g(k), n]); "gptq" stores z - 1 in `bits` bits, "gptq_v2" stores z."""

    def pack(shape: torch.Size, g: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        out, columns = shape
        groups = columns // group
        q, z, s = drawn(0, 2**bits, columns, out, g=g), drawn(0, 2**bits, groups, out, g=g), scales(groups, out, g=g)
        z[0, 0], z[0, 1] = 0, 1  # the smallest zero point wraps around in "gptq"
        g_idx = torch.arange(columns) // group
        if shuffled:
            g_idx = g_idx[torch.randperm(columns, generator=g)]
        stored = (z - 1) % 2**bits if version == "gptq" else z
        parts = {
            "qweight": words(q.T, bits).T.contiguous(),
            "qzeros": words(stored, bits),
            "scales": s,
            "g_idx": g_idx.int(),
        }
        return parts, (s.float()[g_idx] * (q - z[g_idx]).float()).T

    return pack


def awq(shape: torch.Size, g: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    """w[n, k] = scale[g(k), n] * (q[k, n] - z[g(k), n]). A word has outputs 0, 2, 4, 6, 1, 3, 5, 7 of eight."""
    (out, columns), group = shape, 32
    q, z = drawn(0, 16, columns, out, g=g), drawn(0, 16, columns // group, out, g=g)
    s = scales(columns // group, out, g=g)
    order = torch.cat([torch.tensor([0, 2, 4, 6, 1, 3, 5, 7]) + at for at in range(0, out, 8)])
    parts = {"qweight": words(q[:, order], 4), "qzeros": words(z[:, order], 4), "scales": s}
    block = torch.arange(columns) // group
    return parts, (s.float()[block] * (q - z[block]).float()).T


def fp8(rows: int, columns: int, name: str = "weight_scale_inv") -> Packer:
    """Codes times the scale of their block."""

    def pack(shape: torch.Size, g: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        codes = (torch.randn(shape, generator=g) * 40).to(torch.float8_e4m3fn)
        grid = (-(-shape[0] // rows), -(-shape[1] // columns))
        s = scales(*grid, g=g, dtype=torch.float32) / 50
        values = codes.float()
        for i in range(shape[0]):
            for j in range(grid[1]):
                values[i, j * columns : (j + 1) * columns] *= s[i // rows, j]
        return {"weight": codes, name: s}, values

    return pack


def compressed_words(bits: int, group: int, zeros: bool) -> Packer:
    """Signed integers to which 2^(bits - 1) is added; zero points are packed along the outputs."""

    def pack(shape: torch.Size, g: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        (out, columns), half = shape, 2 ** (bits - 1)
        size = group or columns
        groups = -(-columns // size)  # the last one may be smaller
        q, z = drawn(-half, half, out, columns, g=g), drawn(-half, half, out, groups, g=g)
        s = scales(out, groups, g=g, dtype=torch.bfloat16)
        parts = {"weight_packed": words(q + half, bits), "weight_scale": s, "weight_shape": torch.tensor(shape)}
        if zeros:
            parts["weight_zero_point"] = words((z + half).T, bits).T.contiguous()
        block = torch.arange(columns) // size
        whole = q - z[:, block] if zeros else q
        return parts, s.float()[:, block] * whole.float()

    return pack


def compressed_rows(kind: str) -> Packer:
    """One int8 or fp8 code per value with a scale per row, or one for the tensor; activations have a scale too."""

    def pack(shape: torch.Size, g: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        if kind == "int8":
            codes, s = drawn(-128, 128, *shape, g=g).to(torch.int8), scales(shape[0], 1, g=g, dtype=torch.bfloat16) / 10
            return {"weight": codes, "weight_scale": s}, codes.float() * s.float()
        wide = (torch.randn(shape, generator=g) * 40).to(torch.float8_e4m3fn)
        s = scales(1, g=g, dtype=torch.float32) / 50
        return {"weight": wide, "weight_scale": s, "input_scale": torch.ones(1)}, wide.float() * s

    return pack


def bitsandbytes_8bit(shape: torch.Size, g: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    codes, absmax = drawn(-127, 128, *shape, g=g).to(torch.int8), torch.rand(shape[0], generator=g) + 0.5
    parts = {"weight": codes, "SCB": absmax, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, (codes.double() * absmax.double()[:, None] / 127).float()


def compressed(format: str, **weights: object) -> dict[str, Any]:
    """The settings of compressed-tensors: one group for all linear layers, and one for a layer that is not there."""
    groups = {
        "group_0": {"targets": ["Linear"], "weights": weights},
        "group_1": {"targets": ["re:.*lm_head"], "weights": {**weights, "group_size": 8}},
    }
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups}


PACKED, FLOATS = "pack-quantized", "float-quantized"
# The settings in config.json, and how a weight is packed.
CASES: dict[str, tuple[dict[str, Any], Packer]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32}, gptq(4, 32, "gptq", False)),
    "gptq-order": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
        gptq(4, 32, "gptq", True),
    ),
    "gptq-v2": (
        {"quant_method": "gptq", "bits": 8, "group_size": 64, "checkpoint_format": "gptq_v2"},
        gptq(8, 64, "gptq_v2", False),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}, awq),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8(128, 128)),
    "fp8-even": ({"quant_method": "fp8", "weight_block_size": [32, 32]}, fp8(32, 32)),
    "fp8-small": ({"quant_method": "fp8", "weight_block_size": [48, 24]}, fp8(48, 24)),
    "int4": (compressed(PACKED, strategy="group", group_size=32), compressed_words(4, 32, False)),
    "int4-zeros": (compressed(PACKED, strategy="group", group_size=64), compressed_words(4, 64, True)),
    # 3 groups of 128 columns: 48, 48 and 32.
    "int4-uneven": (compressed(PACKED, strategy="group", group_size=48), compressed_words(4, 48, False)),
    "int8-packed": (compressed(PACKED, strategy="channel", group_size=None), compressed_words(8, 0, False)),
    "int8": ({"quant_method": "compressed-tensors", "format": "int-quantized"}, compressed_rows("int8")),
    "fp8-tensor": ({"quant_method": "compressed-tensors", "format": FLOATS}, compressed_rows("fp8")),
    "fp8-blocks": (compressed(FLOATS, strategy="block", block_structure=[48, 96]), fp8(48, 96, "weight_scale")),
    "bitsandbytes-8bit": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, bitsandbytes_8bit),
}


def write_folder(case: str, source: Path, folder: Path) -> Tensors:
    """Writes the folder `source` with its projections in the format, and returns the values of all its tensors."""
    settings, pack = CASES[case]
    g = torch.Generator().manual_seed(34)
    shutil.copytree(source, folder)
    plain = load_file(source / "model.safetensors")
    stored: Tensors = {}
    values: Tensors = {}
    for name, tensor in plain.items():
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and module.endswith(PROJECTIONS):
            parts, values[name] = pack(tensor.shape, g)
            stored |= {f"{module}.{part}": one for part, one in parts.items()}
        else:
            stored[name] = values[name] = tensor
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    set_quantization(folder, settings)
    return values


def set_quantization(folder: Path, settings: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config))
