"""Our attention and modules through torch_npu's fused operators, against their plain-torch twins."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GemmaConfig, LlamaConfig, MistralConfig, Qwen3Config

from ascend_emulator import report
from lockstep.kernels.attention.kv_cache import KVCache, uniform_layout
from lockstep.kernels.attention.layout import DecodePass, make_layout
from lockstep.kernels.attention.npu_attention import fusion_fits, infer_fits
from lockstep.kernels.attention.paged import decode_attention, gathered_decode
from lockstep.kernels.attention.varlen import varlen_attention
from lockstep.kernels.fused_modules import plug_in
from lockstep.kernels.fused_modules_npu import KERNELS

pytestmark = pytest.mark.ascend
NPU = torch.device("npu")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LENGTHS = [7, 1, 12, 5]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (4, 1)])
def test_packed_attention_and_its_gradients(heads: int, groups: int, window: int | None) -> None:
    tokens = sum(LENGTHS)
    plain = [random(tokens, n, 16, seed=i).requires_grad_() for i, n in enumerate((heads, groups, groups))]
    fused = [tensor.detach().to(NPU).requires_grad_() for tensor in plain]
    upstream = random(tokens, heads, 16, seed=9)
    report.clear()
    found = []
    for tensors, kernel, device in ((plain, "sdpa", torch.device("cpu")), (fused, "npu_fusion", NPU)):
        out = varlen_attention(*tensors, make_layout(LENGTHS, device, kernel), scale=0.25, window=window)
        out.backward(upstream.to(device))
        found.append([out.detach().cpu(), *(tensor.grad.cpu() for tensor in tensors)])
    assert {"npu::npu_fusion_attention", "npu::npu_fusion_attention_grad"} <= {o.name for o in report.operators()}
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_shared_beginnings() -> None:
    """Two sequences of a line that begin alike."""
    line = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7])
    lengths, found = [5, 6], []
    for kernel, device in (("sdpa", torch.device("cpu")), ("npu_fusion", NPU)):
        tensors = [random(8, 2, 16, seed=i).to(device).requires_grad_() for i in range(3)]
        out = varlen_attention(*tensors, make_layout(lengths, device, kernel, line), scale=0.25)
        out.backward(random(8, 2, 16, seed=9).to(device))
        found.append([out.detach().cpu(), *(tensor.grad.cpu() for tensor in tensors)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_what_the_packed_operator_does_not_take_goes_to_the_twin() -> None:
    query = random(4, 2, 16).to(NPU)
    assert fusion_fits(query, make_layout([4], NPU, "npu_fusion"), 0.0)
    assert not fusion_fits(query, make_layout([4], NPU, "npu_fusion"), 0.1)
    assert not fusion_fits(query, make_layout([1] * 1025, NPU, "npu_fusion"), 0.0)
    assert not fusion_fits(random(4, 2, 1024).to(NPU), make_layout([4], NPU, "npu_fusion"), 0.0)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_decoding_from_the_paged_cache(groups: int) -> None:
    block, size, heads = 16, 16, 4
    cache = KVCache(uniform_layout(1, groups, size), 6, block, torch.empty(0, dtype=torch.bfloat16, device=NPU))
    cache.tensors[0].copy_(random(*cache.tensors[0].shape).to(torch.bfloat16))
    keys, values = cache.layer(0)
    table, lengths = torch.tensor([[4, 1], [0, 5]], device=NPU), torch.tensor([20, 3], device=NPU)
    query = random(2, heads, size, seed=3).to(torch.bfloat16).to(NPU)
    step = DecodePass(cache, "npu_infer", torch.zeros(2, dtype=torch.long), table, lengths)
    report.clear()
    found = decode_attention(query, keys, values, step, 0.25, None)
    assert "npu::npu_fused_infer_attention_score" in {o.name for o in report.operators()}
    host = [tensor.cpu() for tensor in (query, keys, values, table, lengths)]
    wanted = gathered_decode(*host, block, 0.25, None)
    torch.testing.assert_close(found.cpu().float(), wanted.float(), atol=2e-2, rtol=2e-2)
    assert not infer_fits(query.float(), keys, block, None, 32)
    assert not infer_fits(query, keys, 8, None, 32)
    assert not infer_fits(query, keys, block, 5, 32)


@pytest.mark.parametrize(
    ("config", "replaced"),
    [
        (LlamaConfig(**SIZES), {"LlamaMLP", "LlamaRMSNorm", "apply_rotary_pos_emb"}),
        (MistralConfig(**SIZES), {"MistralMLP", "MistralRMSNorm", "apply_rotary_pos_emb"}),
        (Qwen3Config(**SIZES, head_dim=8), {"Qwen3MLP", "Qwen3RMSNorm", "apply_rotary_pos_emb"}),
        # One plus the weight, and another activation: neither is what the operators compute.
        (GemmaConfig(**SIZES, head_dim=8, hidden_act="gelu_pytorch_tanh"), {"apply_rotary_pos_emb"}),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, set) else "",
)
def test_modules_are_replaced_where_they_compute_the_same(config, replaced: set[str]) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    ids = torch.tensor([[3, 1, 4, 1, 5, 9]])
    with torch.no_grad():
        wanted = model(ids).logits
    said = plug_in(model.to(NPU), KERNELS)
    assert {line.split(" x ")[-1].split(" ")[0] for line in said} <= replaced
    assert {name for name in replaced if not name.startswith("apply")} <= {
        line.split(" x ")[-1].split(" ")[0] for line in said
    }
    report.clear()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        found = model(ids.to(NPU)).logits.cpu()
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    ran = {o.name for o in report.operators()}
    assert ("npu::npu_rms_norm" in ran) == any("RMSNorm" in name for name in replaced)
    assert "npu::npu_rotary_mul" in ran


def test_plain_torch_is_asked_for(tmp_path: Path) -> None:
    """`model.attention: sdpa` leaves every module as it is."""
    from lockstep.model.load import load_policy
    from lockstep.model.tiny import write_tiny
    from lockstep.recipe.schema import Model

    write_tiny(tmp_path / "model", hidden=32, layers=1)
    policy = load_policy(Model(path=str(tmp_path / "model"), attention="sdpa"), NPU, "npu_fusion", seed=0)
    assert not [m for m in policy.modules() if "forward" in vars(m)]
    policy = load_policy(Model(path=str(tmp_path / "model")), NPU, "npu_fusion", seed=0)
    assert len([m for m in policy.modules() if "forward" in vars(m)]) == 4
