"""Folders whose weights are quantised already: what is read from them, and `lockstep dequantize`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import write_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GptOssConfig,
    GptOssForCausalLM,
    Mxfp4Config,
    Qwen3MoeConfig,
)

import quantized_folders
from lockstep.commands import dequantize as command
from lockstep.commands.dequantize import dequantize_folder, opened
from lockstep.errors import Refusal
from lockstep.kernels.quantized.formats import Quantized, quantize
from lockstep.kernels.quantized.formats import dequantize as values_of
from lockstep.model.load import load_policy
from lockstep.recipe.schema import Model
from quantized_folders import CASES, set_quantization, write_folder

PROJECTION = "model.layers.0.mlp.down_proj.weight"
# In these folders no format of `formats.py` has the codes in their order.
DENSE = {"gptq-order", "gptq-v2"}  # differences of eight-bit integers have nine bits


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_the_format(case: str, tiny_folder: Path, tmp_path: Path) -> None:
    wanted = write_folder(case, tiny_folder, tmp_path / "model")
    stored, _ = opened(tmp_path / "model", "model")
    assert set(stored) == set(wanted)
    for name, value in wanted.items():
        assert stored.shape(name) == value.shape
        found = stored[name].float()
        if case == "bitsandbytes-8bit":  # absmax / 127 is rounded to fp32
            torch.testing.assert_close(found, value.float(), rtol=2e-7, atol=0.0)
        else:
            assert torch.equal(found, value.float()), name
        if stored.is_quantized(name):
            assert isinstance(stored.quantized(name), Quantized) == (case not in DENSE)


@pytest.mark.parametrize("case", ["gptq", "fp8", "int4-zeros"])
def test_a_dequantised_folder_is_a_model(case: str, tiny_folder: Path, tmp_path: Path) -> None:
    wanted = write_folder(case, tiny_folder, tmp_path / "model")
    (tmp_path / "model" / "quantize_config.json").write_text("{}")
    (tmp_path / "model" / "modeling_tiny.py").write_text("raise SystemExit")
    done = dequantize_folder(tmp_path / "model", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config.get("dtype", config.get("torch_dtype")) == "bfloat16"
    assert {file.name for file in (tmp_path / "out").iterdir()} == {file.name for file in tiny_folder.iterdir()}
    assert (
        len({file.stat().st_mode for file in (tmp_path / "out").iterdir()}) == 1
    )  # weights are as readable as config.json
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto", trust_remote_code=False)
    parameters = dict(model.named_parameters())
    assert done.weights == sum(
        name.endswith(tuple(f"{one}.weight" for one in quantized_folders.PROJECTIONS)) for name in wanted
    )
    for name, value in wanted.items():
        if name in parameters:
            assert torch.equal(parameters[name].to(torch.bfloat16), value.to(torch.bfloat16)), name
    assert AutoTokenizer.from_pretrained(tmp_path / "out").vocab_size


def test_a_folder_of_several_files(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder("awq", tiny_folder, tmp_path / "model")
    monkeypatch.setattr(command, "FILE_BYTES", 200_000)
    done = dequantize_folder(tmp_path / "model", tmp_path / "several", "fp32")
    monkeypatch.undo()
    dequantize_folder(tmp_path / "model", tmp_path / "one", "fp32")
    index = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    whole = load_file(tmp_path / "one" / "model.safetensors")
    parts = {name: one for file in files for name, one in load_file(tmp_path / "several" / file).items()}
    assert index["metadata"]["total_size"] == done.size == sum(one.nbytes for one in whole.values())
    assert set(parts) == set(whole) == set(index["weight_map"])
    assert all(torch.equal(parts[name], one) for name, one in whole.items())
    AutoModelForCausalLM.from_pretrained(tmp_path / "several", trust_remote_code=False)


def test_fp8_blocks_are_those_of_transformers(tiny_folder: Path, tmp_path: Path) -> None:
    from transformers import FineGrainedFP8Config

    write_folder("fp8-even", tiny_folder, tmp_path / "model")
    stored, _ = opened(tmp_path / "model", "model")
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model",
        quantization_config=FineGrainedFP8Config(dequantize=True, weight_block_size=(32, 32)),
        dtype=torch.float32,
        trust_remote_code=False,
    )
    compared = 0
    for name, parameter in theirs.named_parameters():
        if stored.is_quantized(name):
            assert torch.equal(parameter.float(), stored[name]), name
            compared += 1
    assert compared == 14


def test_mxfp4_is_that_of_transformers(tmp_path: Path) -> None:
    config = GptOssConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_local_experts=3,
        num_experts_per_tok=2,
        layer_types=["full_attention"],
    )
    torch.manual_seed(0)
    GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(110, 130, (experts, rows, columns // 32), dtype=torch.uint8)
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    set_quantization(tmp_path / "model", {"quant_method": "mxfp4"})
    stored, _ = opened(tmp_path / "model", "model")
    theirs = GptOssForCausalLM.from_pretrained(
        tmp_path / "model",
        quantization_config=Mxfp4Config(dequantize=True),
        dtype=torch.bfloat16,
        trust_remote_code=False,
    )
    state = theirs.state_dict()
    assert set(stored) == set(state)
    assert sum(stored.is_quantized(name) for name in stored) == 2
    for name in stored:
        assert torch.equal(stored.values_of(name, torch.bfloat16), state[name]), name
    # By hand: byte 0x2b holds -1.5 (low four bits 1011) and 1.0 (0010); 2^(126 - 127) halves them.
    blocks, scales = torch.full((1, 1, 1, 16), 0x2B, dtype=torch.uint8), torch.full((1, 1, 1), 126, dtype=torch.uint8)
    from lockstep.kernels.quantized.packed import mxfp4

    assert mxfp4(blocks, scales, torch.float32)[0, :4, 0].tolist() == [-0.75, 0.5, -0.75, 0.5]


def test_experts_are_stacked(tiny_folder: Path, tmp_path: Path) -> None:
    """The files have fp8 codes of single experts, as DeepSeek stores them; the model has stacks."""
    config = Qwen3MoeConfig(
        vocab_size=259,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
    )
    write_model(tmp_path / "moe", config, tiny_folder)
    write_folder("fp8-small", tmp_path / "moe", tmp_path / "fp8")
    dequantize_folder(tmp_path / "fp8", tmp_path / "plain", "fp32")
    found, wanted = (
        load_policy(Model(path=str(tmp_path / name)), torch.device("cpu"), "sdpa", 0).state_dict()
        for name in ("fp8", "plain")
    )
    assert [one.shape for name, one in found.items() if name.endswith("experts.gate_up_proj")] == 2 * [(4, 96, 64)]
    assert set(found) == set(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in found)


def bitsandbytes_parts(weight: torch.Tensor, double: bool) -> tuple[dict[str, torch.Tensor], Quantized]:
    """As `QuantState.as_dict(packed=True)` of bitsandbytes stores a weight."""
    from lockstep.kernels.quantized import formats

    q = quantize(weight, "nf4", double)
    told: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    parts = {"": q.codes.reshape(-1, 1), ".quant_map": torch.tensor(formats.NF4)}
    if double:
        assert q.scale_codes is not None
        assert q.scale_scales is not None
        assert q.scale_offset is not None
        table = formats.dynamic_table(torch.device("cpu")).clone()
        parts |= {".absmax": q.scale_codes.flatten(), ".nested_absmax": q.scale_scales, ".nested_quant_map": table}
        told |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": q.scale_offset.item()}
    else:
        assert q.scales is not None
        parts[".absmax"] = q.scales.flatten()
    parts[".quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(told).encode()), dtype=torch.uint8)
    return parts, q


@pytest.mark.parametrize("double", [True, False])
def test_bitsandbytes_4bit_keeps_its_codes(double: bool, tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_folder("awq", tiny_folder, folder)
    tensors = load_file(tiny_folder / "model.safetensors")
    weight = tensors.pop(PROJECTION)
    parts, q = bitsandbytes_parts(weight, double)
    save_file({**tensors, **{PROJECTION + part: one for part, one in parts.items()}}, folder / "model.safetensors")
    set_quantization(folder, {"quant_method": "bitsandbytes", "load_in_4bit": True})
    stored, _ = opened(folder, "model")
    found = stored.quantized(PROJECTION)
    assert isinstance(found, Quantized)
    assert found.double == double
    for name, tensor in q.tensors().items():
        assert torch.equal(found.tensors()[name], tensor), name
    assert torch.equal(stored[PROJECTION], values_of(q, torch.float32))


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("shape", [(48, 128), (6, 40)])
def test_live_bitsandbytes_state(kind: str, shape: tuple[int, int], tmp_path: Path, tiny_folder: Path) -> None:
    bnb = pytest.importorskip("bitsandbytes.functional")
    torch.manual_seed(0)
    folder = tmp_path / "model"
    write_folder("awq", tiny_folder, folder)
    for double in (True, False):
        weight = torch.randn(shape).bfloat16()
        codes, state = bnb.quantize_4bit(weight, blocksize=64, quant_type=kind, compress_statistics=double)
        packed = {f"x.weight.{name}": one for name, one in state.as_dict(packed=True).items()}
        save_file({"x.weight": codes, **packed}, folder / "model.safetensors")
        set_quantization(folder, {"quant_method": "bitsandbytes", "load_in_4bit": True})
        stored, _ = opened(folder, "model")
        assert torch.equal(stored.values_of("x.weight", torch.bfloat16), bnb.dequantize_4bit(codes, state))


def test_live_compressed_tensors() -> None:
    """Their packing of random integers, and their dequantised values, which they round to the type of the scale."""
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    torch.manual_seed(0)
    for bits in (2, 4, 8):
        codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (24, 64)).to(torch.int8)
        packed = helpers.pack_to_int32(codes, bits)
        assert torch.equal(packed, quantized_folders.words(codes.int() + 2 ** (bits - 1), bits))
        along = helpers.pack_to_int32(codes, bits, packed_dim=0)
        assert torch.equal(along, quantized_folders.words((codes.int() + 2 ** (bits - 1)).T, bits).T)


def broken_settings(settings: dict[str, Any]) -> Any:
    return lambda folder: set_quantization(folder, settings)


def without(suffix: str) -> Any:
    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        save_file({n: t for n, t in tensors.items() if not n.endswith(suffix)}, folder / "model.safetensors")

    return change


def with_tensor(name: str, tensor: torch.Tensor) -> Any:
    def change(folder: Path) -> None:
        save_file({**load_file(folder / "model.safetensors"), name: tensor}, folder / "model.safetensors")

    return change


def with_nan(folder: Path) -> None:
    with_tensor(SCALES, load_file(folder / "model.safetensors")[SCALES] * float("nan"))(folder)


SCALES = "model.layers.0.mlp.down_proj.scales"
BROKEN = {
    "unknown method": (broken_settings({"quant_method": "quip"}), "quantized-weights", "quip"),
    "layout": (broken_settings({"quant_method": "awq", "version": "gemv"}), "quantized-weights", "gemv"),
    "no zero points": (without("mlp.down_proj.qzeros"), "missing-weight", "qzeros"),
    "left over": (with_tensor("model.extra", torch.ones(4, dtype=torch.int32)), "quantized-weights", "model.extra"),
    "NaN": (with_nan, "not-finite", PROJECTION),
    "too few scales": (with_tensor(SCALES, torch.ones(1, 128).half()), "quantized-weights", PROJECTION),
    "too many rows": (with_tensor(SCALES, torch.ones(4, 999).half()), "quantized-weights", PROJECTION),
    "marlin": (
        broken_settings({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}),
        "quantized-weights",
        "marlin",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_cannot_be_read_is_refused(case: str, tiny_folder: Path, tmp_path: Path) -> None:
    change, code, named = BROKEN[case]
    write_folder("awq", tiny_folder, tmp_path / "model")
    change(tmp_path / "model")
    with pytest.raises(Refusal) as refused:
        dequantize_folder(tmp_path / "model", tmp_path / "out")
    (problem,) = refused.value.problems
    assert problem.code == code
    assert named in str(problem)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("case", "key"), [("int4", "config_groups"), ("fp8-even", "weight_block_size")])
def test_blocks_of_unknown_size_are_refused(case: str, key: str, tiny_folder: Path, tmp_path: Path) -> None:
    """The number of scales does not tell the size of a block."""
    write_folder(case, tiny_folder, tmp_path / "model")
    settings = {name: value for name, value in CASES[case][0].items() if name != key}
    set_quantization(tmp_path / "model", settings)
    with pytest.raises(Refusal, match=r"config\.json does not say"):
        dequantize_folder(tmp_path / "model", tmp_path / "out")


def test_a_group_that_names_the_layer_comes_first(tiny_folder: Path, tmp_path: Path) -> None:
    wanted = write_folder("int4", tiny_folder, tmp_path / "model")
    (group,) = (one for one in CASES["int4"][0]["config_groups"].values() if one["targets"] == ["Linear"])
    others = {"targets": ["Linear"], "weights": {"group_size": 16}}
    for target in (r"re:model\.layers\..*_proj", "down_proj"):
        groups = {"a": others, "b": {**group, "targets": [target]}}
        set_quantization(tmp_path / "model", {**CASES["int4"][0], "config_groups": groups})
        stored, _ = opened(tmp_path / "model", "model")
        assert torch.equal(stored[PROJECTION], wanted[PROJECTION])


def test_three_bits_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    write_folder("gptq", tiny_folder, tmp_path / "model")
    parts = {"qweight": torch.zeros(12, 8, dtype=torch.int32), "g_idx": torch.zeros(128, dtype=torch.int32)}
    for name, tensor in parts.items():
        with_tensor(f"model.layers.0.mlp.down_proj.{name}", tensor)(tmp_path / "model")
    with pytest.raises(Refusal, match="3 bits"):
        dequantize_folder(tmp_path / "model", tmp_path / "out")


def test_folders_and_types(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(Refusal) as refused:
        dequantize_folder(tiny_folder, tmp_path / "out")
    assert refused.value.problems[0].code == "unused-key"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    for out, code in ((tmp_path / "full", "not-empty"), (tmp_path / "full" / "file", "not-a-folder")):
        with pytest.raises(Refusal) as refused:
            dequantize_folder(tiny_folder, out)
        assert refused.value.problems[0].code == code
    with pytest.raises(Refusal) as refused:
        dequantize_folder(tiny_folder, tmp_path / "out", "int8")
    assert refused.value.problems[0].code == "unknown-name"
