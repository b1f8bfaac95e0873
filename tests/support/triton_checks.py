"""Triton kernels against their plain-torch twins on random numbers: on the host by Triton's interpreter
(TRITON_INTERPRET set before the import), on a device as they are compiled. Each check takes the device's name.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

DTYPES = (torch.float32, torch.bfloat16)


def agree(found: torch.Tensor, wanted: torch.Tensor, single: float = 1e-6) -> None:
    """In fp32 within a share of the largest number: 1e-6, and more where long sums are taken in another order. In bf16
    within some units of its last place: a gradient's twin rounds in between, and the interpreter cuts digits off where
    devices round."""
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    share = {torch.float32: single, torch.bfloat16: 3e-2}[found.dtype]
    far = (found.float() - wanted.float()).abs().max().item()
    assert far <= share * wanted.float().abs().max().item(), (far, wanted.float().abs().max().item())


def forwards_agree(found: torch.Tensor, wanted: torch.Tensor, single: float) -> None:
    """As `agree`; on a device in bf16 also bit by bit, but for a few that a sum in another order rounds otherwise."""
    agree(found, wanted, single)
    if found.is_cuda and found.dtype == torch.bfloat16:
        assert int((found != wanted).sum()) <= 2 + 0.02 * found.numel()


def with_gradients(
    one: Callable[..., torch.Tensor],
    other: Callable[..., torch.Tensor],
    inputs: Sequence[torch.Tensor],
    single: float = 1e-6,
) -> None:
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    found, wanted = one(*inputs), other(*inputs)
    forwards_agree(found, wanted, single)
    upstream = torch.randn_like(wanted)
    for a, b in zip(
        torch.autograd.grad(found, inputs, upstream), torch.autograd.grad(wanted, inputs, upstream), strict=True
    ):
        agree(a, b, 5e-6)


def drawn(*shape: int, device: str, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape) * scale).to(device, dtype)


def norm(device: str) -> None:
    from lockstep.kernels.norm_triton import plain_rms_norm, rms_norm

    torch.manual_seed(0)
    for dtype in DTYPES:
        for shape in ((3, 5, 896), (2, 7, 3, 40), (1, 3, 7), (2, 4099)):
            x = drawn(*shape, device=device, dtype=dtype)
            # So small that the epsilon decides.
            x[0] *= 1e-3
            weight = drawn(shape[-1], device=device, dtype=dtype)
            for offset in (False, True):
                with_gradients(
                    lambda *a, offset=offset: rms_norm(*a, 1e-6, offset),
                    lambda *a, offset=offset: plain_rms_norm(*a, 1e-6, offset),
                    [x, weight],
                )
    # More rows than programs: every program adds several tiles up.
    x, weight = drawn(2400, 4096, device=device, dtype=torch.float32), drawn(4096, device=device, dtype=torch.float32)
    if device != "cpu":
        with_gradients(lambda *a: rms_norm(*a, 1e-6), lambda *a: plain_rms_norm(*a, 1e-6), [x, weight])


def many_tiles(device: str) -> None:
    """The loop over tiles, by few programs."""
    from lockstep.kernels import norm_triton as triton_norm

    torch.manual_seed(0)
    kept, triton_norm.PARTS = triton_norm.PARTS, 3
    try:
        x, weight = (drawn(*s, device=device, dtype=torch.float32) for s in ((11, 2100), (2100,)))
        with_gradients(
            lambda *a: triton_norm.rms_norm(*a, 1e-6), lambda *a: triton_norm.plain_rms_norm(*a, 1e-6), [x, weight]
        )
    finally:
        triton_norm.PARTS = kept


def swiglu(device: str) -> None:
    from lockstep.kernels.swiglu_triton import gated, plain_gated, plain_swiglu, swiglu

    torch.manual_seed(0)
    for dtype in DTYPES:
        for shape in ((3, 5, 700), (1, 1), (2, 2048)):
            pair = [drawn(*shape, device=device, dtype=dtype, scale=5.0) for _ in range(2)]
            for gelu in (False, True):
                with_gradients(partial(swiglu, gelu=gelu), partial(plain_swiglu, gelu=gelu), pair)
        x = drawn(2, 9, 24, device=device, dtype=dtype)
        weights = [drawn(*s, device=device, dtype=dtype, scale=0.3) for s in ((50, 24), (50, 24), (24, 50))]
        for gelu in (False, True):
            with_gradients(partial(gated, gelu=gelu), partial(plain_gated, gelu=gelu), [x, *weights], 5e-6)
        # Only some weights are trained, and the input of the first layer may need no gradient.
        frozen = weights[0].detach()
        trained = [weight.detach().requires_grad_() for weight in weights[1:]]
        for a, b in zip(
            torch.autograd.grad(gated(x, frozen, *trained).sum(), trained),
            torch.autograd.grad(plain_gated(x, frozen, *trained).sum(), trained),
            strict=True,
        ):
            agree(a, b, 5e-6)


def gated_twice(device: str) -> None:
    """The first backward pass writes over what the forward pass kept; a second one computes it again."""
    from lockstep.kernels.swiglu_triton import gated

    torch.manual_seed(0)
    inputs = [
        drawn(*s, device=device, dtype=torch.float32).requires_grad_() for s in ((9, 24), (50, 24), (50, 24), (24, 50))
    ]
    out = gated(*inputs)
    first = torch.autograd.grad(out.sum(), inputs, retain_graph=True)
    second = torch.autograd.grad(out.sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with torch.no_grad():
        assert torch.equal(gated(*inputs), out)


def rotary(device: str) -> None:
    from lockstep.kernels.rotary_triton import plain_rotate, rotate

    torch.manual_seed(0)
    for dtype in DTYPES:
        for rows, queries, keys, width, size in ((1, 14, 2, 5, 64), (3, 3, 3, 4, 40), (2, 1, 1, 1, 2)):
            for tables in {1, rows}:
                # As the projections leave them: positions before heads.
                q = drawn(rows, width, queries, size, device=device, dtype=dtype).transpose(1, 2)
                k = drawn(rows, keys, width, size, device=device, dtype=dtype)
                # The two halves of a table may differ.
                angles = torch.randn(tables, width, size)
                tables_of = [part.to(device, dtype) for part in (angles.cos(), angles.sin())]
                with_gradients(
                    lambda q, k, given=tables_of: _line(rotate(q, k, *given)),
                    lambda q, k, given=tables_of: _line(plain_rotate(q, k, *given)),
                    [q, k],
                )


def _line(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def adamw(device: str) -> None:
    """Our step against torch's AdamW on masters: norms, masters, moments, counts, and a checkpoint taken over."""
    from lockstep.recipe.keys_optim import Optim
    from lockstep.train.optim import Optimizer

    shapes = {"a": (37, 130), "b": (5,), "c": (4097,), "even": (16, 272), "never": (3, 3)}

    def trained(
        kernel: str, micro: int, scale: float, clip: float | None, dtype: torch.dtype
    ) -> tuple[list, Optimizer]:
        torch.manual_seed(0)
        params = {name: torch.nn.Parameter(torch.randn(shape).to(device, dtype)) for name, shape in shapes.items()}
        optim = Optim(lr=1e-2, weight_decay=0.1, clip=clip)
        optimizer = Optimizer(params.items(), optim, masters=True, fused=True, kernel=kernel)
        assert (optimizer._kernel is not None) == (kernel == "triton")
        norms = []
        for step in range(4):
            if step == 2:
                # As a run that is resumed.
                kept = optimizer.full_state()
                kept |= {f"step/{n}": torch.zeros(()) for n in shapes if f"step/{n}" not in kept}
                for key in ("exp_avg", "exp_avg_sq"):
                    kept |= {f"{key}/{n}": torch.zeros(s) for n, s in shapes.items() if f"{key}/{n}" not in kept}
                optimizer = Optimizer(params.items(), optim, masters=True, fused=True, kernel=kernel)
                optimizer.restore(kept)
            for _ in range(micro):
                for name, parameter in params.items():
                    if name != "never":
                        parameter.grad = drawn(*shapes[name], device=device, dtype=dtype, scale=scale)
                optimizer.collect()
            norm = optimizer.gradient_norm(scale)
            norms.append((norm.item(), {name: optimizer.gradient(name) for name in shapes}))
            # A tape looks in between: the state comes with the first step.
            assert bool(optimizer.adamw.state.get(optimizer.trained["a"])) == (step > 0)
            optimizer.step(1e-2 / (step + 1), norm)
            for name, parameter in params.items():
                # What the model computes with is the master, rounded.
                apart = (parameter.detach().float() - optimizer.master_weights[name]).abs()
                assert (apart <= torch.finfo(dtype).eps * optimizer.master_weights[name].abs()).all()
        return norms, optimizer

    for dtype in DTYPES:
        for micro in (1, 3):
            for scale, clip in ((1.0, None), (8.0, 1.0)):
                (norms, ours), (wanted, theirs) = (trained(k, micro, scale, clip, dtype) for k in ("triton", "torch"))
                for (one, gradients), (other, twins) in zip(norms, wanted, strict=True):
                    assert abs(one - other) <= 1e-6 * other
                    for name, twin in twins.items():
                        assert (gradients[name] is None) == (twin is None)
                        if twin is not None:
                            # Of one micro-batch as the backward pass gave it, of several in fp32.
                            assert gradients[name].dtype == (torch.float32 if micro > 1 or scale != 1 else dtype)
                            if gradients[name].shape == twin.shape and clip is None:
                                assert torch.equal(gradients[name].float(), twin)
                mine, others = ours.full_state(), theirs.full_state()
                assert sorted(mine) == sorted(others)
                for name, tensor in others.items():
                    assert mine[name].dtype == tensor.dtype
                    torch.testing.assert_close(mine[name], tensor, rtol=2e-6, atol=2e-7)


def models(device: str) -> None:
    """Whole models with the kernels in them against the same without: logits and every gradient."""
    import transformers

    from lockstep.kernels.fused import fuse, replaced

    shape = {
        "vocab_size": 100,
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
    }
    cases = {"Qwen2": (5, "swiglu"), "Gemma3": (13, "geglu")}
    if device != "cpu":  # the interpreter is slow
        cases |= {"Qwen3": (9, "swiglu"), "Gemma2": (9, "geglu")}
    for name, (norms, feed) in cases.items():
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")
        config = config(**shape, pad_token_id=0, attn_implementation="eager")
        model = getattr(transformers, f"{name}ForCausalLM")(config).to(device).eval()
        for parameter in model.parameters():
            parameter.data.copy_(torch.randn(parameter.shape) * 0.3)
        plain = copy.deepcopy(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            fuse(model, "flash_varlen")
        lines = replaced(model)
        kernels = ("triton_norm", f"triton_{feed}", "triton_rotary")
        assert [sum(kernel in line for line in lines) for kernel in kernels] == [1, 1, 1], lines
        assert any(line.startswith(f"{norms} x {name}RMSNorm") for line in lines), lines
        assert any(line.startswith(f"2 x {name}MLP") for line in lines), lines
        assert not replaced(plain)
        ids = torch.randint(100, (2, 4 if device == "cpu" else 9), device=device)
        ours, theirs = model(ids).logits, plain(ids).logits
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
        ours.square().mean().backward()
        theirs.square().mean().backward()
        for (where, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (one.grad - other.grad).norm() <= 2e-5 * other.grad.norm(), where


def hooked(device: str) -> None:
    """A hook on a projection is called, and the numbers stay."""
    import transformers

    from lockstep.kernels.fused import fuse

    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config).to(device)
    fuse(model, "flash_varlen")
    ids = torch.randint(50, (1, 5), device=device)
    alone, heard = model(ids).logits, []
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *given: heard.append(given[2]))
    torch.testing.assert_close(model(ids).logits, alone, rtol=1e-5, atol=1e-6)
    assert len(heard) == 1


def others(device: str) -> None:
    """Modules that look alike and compute something else stay as they are."""
    from torch import nn

    from lockstep.kernels.fused_modules import plug_in
    from lockstep.kernels.fused_modules_triton import KERNELS

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = nn.Linear(8, 16, bias=False), nn.Linear(8, 16, bias=False)
            self.down_proj, self.act_fn, self.dropout = nn.Linear(16, 8, bias=False), nn.SiLU(), nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.dropout(self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))

    class Scaled(Dropped):
        def __init__(self) -> None:
            super().__init__()
            del self.dropout

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 1.1 * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    torch.manual_seed(0)
    model = nn.ModuleList([Dropped(), Scaled(), nn.LayerNorm(64, bias=False)]).to(device)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        assert plug_in(model, KERNELS) == []
    told = [str(warning.message) for warning in said if "stays plain torch" in str(warning.message)]
    assert [line.split()[0] for line in told] == ["Scaled", "LayerNorm"], told
    assert not any("forward" in vars(module) for module in model.modules())


def generating(device: str) -> None:
    """The kernels between the products of a layer that generates, whose results lie over what they are given."""
    from lockstep.kernels.decode import decode_triton as triton_decode
    from lockstep.kernels.norm_triton import RmsNorm

    torch.manual_seed(0)
    for dtype in DTYPES:
        for tokens, width in ((3, 896), (2, 4099), (1, 7)):
            stream, more = (drawn(tokens, width, device=device, dtype=dtype) for _ in range(2))
            weights = [drawn(width, device=device, dtype=dtype) for _ in range(2)]
            for offset in (False, True):
                norm, post = (RmsNorm(weight, eps, offset) for weight, eps in zip(weights, (1e-6, 1e-2), strict=True))
                for after in (None, post):
                    sums, twin = stream.clone(), stream.clone()
                    found = triton_decode.add_norm_(sums, more, norm, after)
                    # The inner norm may round a number otherwise, which changes the outer norm of the whole token.
                    same = forwards_agree if after is None else agree
                    same(found, triton_decode.plain_add_norm_(twin, more, norm, after), 1e-6)
                    same(sums, twin, 1e-6 if after else 0)
        for tokens, width in ((3, 1500), (2, 40)):
            line = drawn(tokens, 2 * width, device=device, dtype=dtype, scale=5.0)
            for gelu in (False, True):
                ours, twin = line.clone(), line.clone()
                forwards_agree(triton_decode.swiglu_(ours, gelu), triton_decode.plain_swiglu_(twin, gelu), 1e-6)
                assert torch.equal(ours[:, width:], twin[:, width:])
        for queries, groups, size in ((14, 2, 64), (3, 3, 40), (1, 1, 2)):
            given = drawn(5, (queries + 2 * groups) * size, device=device, dtype=dtype)
            # The two halves of a table may differ.
            angles = torch.randn(5, size)
            turns = [part.to(device, dtype) for part in (angles.cos(), angles.sin())]
            weights = [drawn(size, device=device, dtype=dtype) for _ in range(2)]
            slots = torch.tensor([7, 3, 0, 19, 12], device=device)
            pairs = [(RmsNorm(weights[0], 1e-6, offset), RmsNorm(weights[1], 1e-2, offset)) for offset in (0, 1)]
            for norms in (None, *pairs):
                sides = []
                for place in (triton_decode.place_heads_, triton_decode.plain_place_heads_):
                    line, cache = given.clone(), torch.zeros(2, 20, groups, size, device=device, dtype=dtype)
                    place(line, *turns, slots, *cache, queries, norms)
                    sides.append((line, cache))
                for found, wanted in zip(*sides, strict=True):
                    forwards_agree(found, wanted, 1e-6)
                # Values are only copied, and nothing else is written.
                assert torch.equal(sides[0][1][1], sides[1][1][1])
                assert not sides[0][1].index_fill(1, slots, 0).any()


def _small(name: str, device: str, dtype: torch.dtype = torch.float32, **more: object) -> torch.nn.Module:
    import transformers

    from lockstep.kernels.attention.interface import ATTENTION, register_attention

    register_attention()
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 100,
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")
    config = config(**{**sizes, **more}, attn_implementation=ATTENTION)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(device, dtype).eval()
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape) * 0.3)
    return model


EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "norm_topk_prob": True}
LATENTS = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "n_group": 1,
    "topk_group": 1,
    "num_mtp_layers": 0,
    "head_dim": 8,
}


def grouped_experts(device: str) -> None:
    """Moving rows to experts and back, also with pairs that are left out, and act(gate) * up of both halves of rows."""
    from lockstep.kernels.experts import grouped_experts as plain
    from lockstep.kernels.experts import grouped_experts_triton as kernels

    torch.manual_seed(0)
    for dtype in DTYPES:
        for tokens, chosen, width in ((9, 2, 40), (5, 3, 1025), (1, 1, 7)):
            order = torch.randperm(tokens * chosen).to(device)
            place = torch.argsort(order)
            for held in {tokens * chosen, tokens * chosen // 2 + 1}:
                kept = order[:held]
                x = drawn(tokens, width, device=device, dtype=dtype)
                with_gradients(
                    lambda x, kept=kept, place=place, chosen=chosen: kernels.to_experts(x, kept, place, chosen),
                    lambda x, kept=kept, place=place, chosen=chosen: plain.to_experts(x, kept, place, chosen),
                    [x],
                )
                for kind in {dtype, torch.float32}:
                    rows = drawn(held, width, device=device, dtype=dtype)
                    shares = drawn(tokens, chosen, device=device, dtype=kind)
                    with_gradients(
                        lambda rows, shares, kept=kept, place=place: kernels.to_tokens(rows, shares, kept, place),
                        lambda rows, shares, kept=kept, place=place: plain.to_tokens(rows, shares, kept, place),
                        [rows, shares],
                    )
        for gelu in (False, True):
            rows = drawn(13, 2 * 37, device=device, dtype=dtype)
            with_gradients(partial(kernels.gate, gelu=gelu), partial(kernels.plain_gate, gelu=gelu), [rows])


def adapted_experts(device: str) -> None:
    """Experts with an adapter: also experts without rows, rows behind the last expert, ranks that are no power of 2,
    and more rows and columns than a program has."""
    from lockstep.kernels.experts.adapted_experts_triton import adapted, plain_adapted
    from lockstep.kernels.experts.grouped_experts import LowRank

    torch.manual_seed(0)
    cases = ((24, 40, 4, [3, 3, 10]), (16, 136, 24, [0, 66, 66, 70]), (8, 8, 1, [4]), (8, 8, 8, [0, 5]))
    for dtype in DTYPES:
        for inputs, outputs, rank, ends in cases:
            ends_E = torch.tensor(ends, dtype=torch.int32, device=device)
            x = drawn(ends[-1], inputs, device=device, dtype=dtype)
            weight = drawn(len(ends), inputs, outputs, device=device, dtype=dtype)
            a = drawn(len(ends), rank, inputs, device=device, dtype=dtype)
            b = drawn(len(ends), outputs, rank, device=device, dtype=dtype)

            def run(call: Any, x: Any, a: Any, b: Any, weight: Any = weight, ends_E: Any = ends_E) -> Any:
                behind = torch.cat([x, x.new_ones(2, x.shape[1])])
                return call(behind, weight, LowRank(a, b, 0.5), ends_E)[: len(x)]

            with_gradients(partial(run, adapted), partial(run, plain_adapted), [x, a, b])

    ends_E = torch.zeros(2, dtype=torch.int32, device=device)
    weight, a, b = (drawn(2, *shape, device=device, dtype=torch.float32) for shape in ((8, 16), (4, 8), (16, 4)))
    empty = adapted(weight.new_empty(0, 8), weight, LowRank(a.requires_grad_(), b.requires_grad_(), 0.5), ends_E)
    empty.sum().backward()
    assert empty.shape == (0, 16)
    assert not a.grad.any()
    assert not b.grad.any()


def routers(device: str) -> None:
    """Gates of the chosen experts, and the routers of models that run by the kernel."""
    from lockstep.kernels.experts.router_triton import gates, plain_gates

    torch.manual_seed(0)
    for dtype in DTYPES:
        for tokens, experts, top_k in ((37, 6, 2), (5, 128, 8), (3, 130, 1), (2, 3, 3)):
            # Even steps of 1/16 in another order for each token: exact in bf16, and no two are equal.
            steps = torch.stack([torch.randperm(experts) for _ in range(tokens)]) / 16
            logits = steps.to(device, dtype)
            # The normalised gate of one expert is 1, and its gradient is 0 up to rounding.
            for normalised in (False, True)[: 1 + (top_k > 1)]:
                kinds = [dtype] if dtype == torch.float32 else [dtype, torch.float32]
                for kind in kinds:
                    given = (top_k, normalised, kind)
                    chosen = gates(logits, *given)[1]
                    assert torch.equal(chosen, plain_gates(logits, *given)[1])
                    with_gradients(
                        lambda x, given=given: gates(x, *given)[0],
                        lambda x, given=given: plain_gates(x, *given)[0],
                        [logits],
                    )
        equal = torch.zeros(4, 9, device=device, dtype=dtype)
        assert gates(equal, 3, True, dtype)[1].tolist() == [[0, 1, 2]] * 4
        broken = torch.full((2, 9), float("nan"), device=device, dtype=dtype)
        values, chosen = gates(broken, 2, True, dtype)
        assert values.isnan().all()
        assert int(chosen.min()) >= 0
        assert int(chosen.max()) < 9
        assert gates(equal[:0], 3, True, dtype)[0].shape == (0, 3)


def routers_of_models(device: str) -> None:
    """Which routers run by the kernel, and that the model computes the same with it."""
    from lockstep.kernels.fused import fuse, replaced

    experts = {**EXPERTS, "num_local_experts": 6}
    cases = {"Qwen3Moe": (experts, "Qwen3MoeTopKRouter by triton_router"), "DeepseekV3": (LATENTS, "")}
    cases["Mixtral"] = ({**experts, "intermediate_size": 20}, "MixtralTopKRouter by triton_router")
    for name, (sizes, line) in cases.items():
        dtypes = (torch.float32, _half(device)) if name == "Mixtral" else (torch.float32,)
        for dtype in dtypes:
            model = _small(name, device, dtype, **{"num_hidden_layers": 1, **sizes, "first_k_dense_replace": 0})
            plain = copy.deepcopy(model)
            fuse(model, "flash_varlen")
            lines = [one for one in replaced(model) if "Router" in one or "router" in one]
            fp32_gates = " with gates in fp32" if dtype != torch.float32 else ""
            assert lines == ([line + fp32_gates] if line else []), lines
            router = model.model.layers[0].mlp.gate
            states = torch.randn(1, 7, 48).to(device, dtype)
            ours, theirs = router(states), type(router).forward(plain.model.layers[0].mlp.gate, states)
            assert [part.dtype for part in ours] == [part.dtype for part in theirs]
            if line:
                agree(ours[1], theirs[1])
                assert torch.equal(ours[2], theirs[2])


def generating_models(device: str) -> None:
    """Whose layers are taken, and who is told apart by what it computes."""
    from lockstep.kernels.decode.decode_layers_triton import fused_layers
    from lockstep.kernels.fused_modules import KernelForward
    from lockstep.model.decoder import inner_decoder
    from lockstep.model.policy import Policy

    cases = [
        ("Qwen2", {}, True),
        ("Llama", {"attention_bias": True}, True),
        ("Mistral", {"sliding_window": 7}, True),
        # Built like Llama, but with factors, or with layers that have no positions.
        ("Granite", {"residual_multiplier": 0.9}, False),
        ("Granite", {"embedding_multiplier": 1.1}, False),
        ("SmolLM3", {"no_rope_layer_interval": 2}, False),
        # Norms around attention and MLP, soft caps, layers with windows and rotary embeddings of their own.
        ("Gemma2", {"sliding_window": 7, "attn_logit_softcapping": 2.0}, True),
        ("Gemma3", {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}, True),
        ("Qwen3Moe", EXPERTS, True),
        ("DeepseekV3", LATENTS, True),
        ("DeepseekV3", {**LATENTS, "q_lora_rank": 24, "rope_interleave": False}, True),
        # Norms elsewhere.
        ("Olmo2", {}, False),
    ]
    for name, more, taken in cases:
        for dtype in DTYPES if name in ("Qwen2", "Granite") else DTYPES[:1]:
            model = _small(name, device, dtype, **more)
            policy = Policy(model, "sdpa")
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always", UserWarning)
                fused = fused_layers(inner_decoder(policy.causal_lm), policy.decoder.cache_layout())
            assert (fused is not None) == taken, (name, more, dtype, [str(one.message) for one in said])
            told = [str(one.message) for one in said if "without fused layers" in str(one.message)]
            assert len(told) == (not taken and name in ("Granite", "SmolLM3")), told
            if fused is None:
                continue
            assert fused.ready
            attention = model.model.layers[1].self_attn
            heard = attention.o_proj.register_forward_hook(lambda *_: None)
            assert not fused.ready, "somebody listens to a module that would not be called"
            heard.remove()
            moved = attention.k_proj if hasattr(attention, "k_proj") else attention.kv_a_proj_with_mqa
            moved.weight.data = moved.weight.data.clone()
            assert not fused.ready, "a weight lies elsewhere"
            fused.lay()
            assert fused.ready
            norm = model.model.norm
            norm.forward = KernelForward(type(norm).forward, norm)
            assert fused.ready, "a kernel of ours, which gives what the module does"
            norm.forward = lambda x: 2 * x
            assert not fused.ready, "somebody has put another forward in"
            del norm.forward


def generating_engine(device: str) -> None:
    """The engine draws the same responses, prompts in chunks and decoding, with the kernels and with the modules."""
    from lockstep.device.select import select
    from lockstep.model.policy import Policy
    from lockstep.recipe.keys_rollout import RolloutSettings
    from lockstep.rollout.native.native_engine import NativeEngine
    from lockstep.types import Request, Sampling

    kind = type(select(device))
    requests = [Request([5, 17, 3, 80, 41, 9][:length], key, 2) for key, length in enumerate((6, 1, 4))]
    gemma = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
    cases: list[tuple[str, dict[str, object]]] = [("Qwen3", {}), ("Gemma3", gemma), ("DeepseekV3", LATENTS)]
    if device != "cpu":  # the interpreter is slow
        cases += [("Qwen2", {}), ("Qwen3Moe", EXPERTS)]
    for name, more in cases:
        sides = []
        for layers in ("modules", "triton"):
            policy = Policy(_small(name, device, **more), kind.attention)
            own = type("Own", (kind,), {"generating_layers": layers})()
            engine = NativeEngine(policy, own, RolloutSettings(prefill_tokens=4, block_tokens=4), lambda ids: "")
            made = engine.generate(requests, Sampling(6, seed=1))
            sides.append(sorted(made, key=lambda one: (one.request, one.sample)))
            assert (engine._layers is not None) == (layers == "triton")
        for one, other in zip(*sides, strict=True):
            assert one.ids == other.ids, name
            far = (torch.tensor(one.logprobs) - torch.tensor(other.logprobs)).abs().max()
            assert far <= 1e-4, (name, far)


def generating_in_low_precision(device: str) -> None:
    """Fused layers use the quantised weights of a view, as the modules do, and not the trained weights."""
    from lockstep.device.select import select
    from lockstep.model.policy import Policy
    from lockstep.recipe.keys_rollout import RolloutSettings
    from lockstep.rollout.native.native_engine import NativeEngine
    from lockstep.types import Request, Sampling

    kind = type(select(device))
    requests = [Request([5, 17, 3, 80, 41, 9], 0, 2), Request([5], 1, 2)]
    for name, more, precision in (("Qwen2", {}, "int8"), ("Qwen3", {}, "fp8"), ("DeepseekV3", LATENTS, "int8")):
        sides = []
        # Rounding to bf16 would hide that of int8. The matrix units for fp8 need bf16.
        dtype = torch.bfloat16 if device != "cpu" and precision == "fp8" else torch.float32
        for layers, low in (("modules", precision), ("triton", precision), ("triton", None)):
            policy = Policy(_small(name, device, dtype, **more), kind.attention)
            own = type("Own", (kind,), {"generating_layers": layers})()
            settings = RolloutSettings(prefill_tokens=4, block_tokens=4, precision=low)
            engine = NativeEngine(policy, own, settings, lambda ids: "")
            made = sorted(engine.generate(requests, Sampling(4, seed=1)), key=lambda one: (one.request, one.sample))
            sides.append(torch.tensor([one.logprobs[0] for one in made]))
            assert (engine._layers is not None) == (layers == "triton")
        far, rounding = ((sides[at] - sides[1]).abs().max() for at in (0, 2))
        # A sum in another order may round an activation to another code.
        assert far <= (0.1 if dtype is torch.bfloat16 else 1e-3), (name, far)
        assert rounding > 5 * far, (name, far, rounding)


def shared_beginnings(device: str) -> None:
    """Rows in any order and of any strides: tensors lie as the projections and flash attention leave them."""
    from lockstep.kernels.attention import cascade_triton as triton_cascade
    from lockstep.kernels.attention import flash as cascade

    torch.manual_seed(0)
    for dtype in DTYPES:
        for heads, size in ((14, 64), (2, 40), (1, 128)):
            rows = torch.randperm(11)[:7].to(device)
            out = drawn(heads, 11, size, device=device, dtype=dtype).transpose(0, 1)
            more = drawn(7, heads, size, device=device, dtype=dtype)
            # Far apart, too: then one part alone counts.
            lse = drawn(heads, 11, device=device, dtype=torch.float32, scale=20.0)
            other = drawn(heads, 7, device=device, dtype=torch.float32, scale=20.0)
            made = []
            for way in (triton_cascade, cascade):
                total, sums = out.clone(), lse.clone()
                way.merge_(total, sums, rows, more, other)
                added = out.clone()
                way.add_rows_(added, rows, more)
                made.append((total, sums, added))
            for found, wanted in zip(*made, strict=True):
                agree(found, wanted)
            left = [row for row in range(11) if row not in rows.tolist()]
            assert torch.equal(made[0][0][left], out[left])
            assert torch.equal(made[0][1][:, left], lse[:, left])
            assert torch.equal(made[0][2][left], out[left])
    if device != "cpu":
        _many_merges(device)


def _many_merges(device: str) -> None:
    """The warps of a program run at different speeds: merges of many rows have the same bits every time."""
    from lockstep.kernels.attention import cascade_triton as triton_cascade
    from lockstep.kernels.attention import flash as cascade

    rows = torch.randperm(8192, device=device)[:6000]
    out = drawn(8192, 32, 128, device=device, dtype=torch.bfloat16)
    more = drawn(6000, 32, 128, device=device, dtype=torch.bfloat16)
    lse = drawn(32, 8192, device=device, dtype=torch.float32)
    other = drawn(32, 6000, device=device, dtype=torch.float32)
    wanted, wanted_lse = out.clone(), lse.clone()
    cascade.merge_(wanted, wanted_lse, rows, more, other)
    first: torch.Tensor | None = None
    for _ in range(50):
        total, sums = out.clone(), lse.clone()
        triton_cascade.merge_(total, sums, rows, more, other)
        first = total if first is None else first
        assert torch.equal(total, first)
        agree(total, wanted)
        agree(sums, wanted_lse)


def _half(device: str) -> torch.dtype:
    """The interpreter multiplies the bits of bf16 numbers as if they were whole numbers."""
    return torch.float32 if device == "cpu" else torch.bfloat16


def _same_bits(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """On a device; the interpreter's products are the host library's, which looks at the shape of a tile."""
    if found.is_cuda:
        assert torch.equal(found, wanted)
    else:
        agree(found, wanted)


def row_products(device: str) -> None:
    """A row's product is the same bit by bit whatever stands beside it, for as many inputs as tiles hold or not."""
    from lockstep.kernels.invariant_triton import product

    torch.manual_seed(0)
    dtype = _half(device)
    # More rows than those that share a program of a small batch; on the host no more than it takes.
    rows, sizes = (530, [(72, 70)]) if device == "cpu" else (5000, [(128, 72), (200, 136), (64, 2100), (896, 896)])
    for inputs, outputs in sizes:
        x = drawn(rows, inputs, device=device, dtype=dtype)
        weight = drawn(outputs, inputs, device=device, dtype=dtype)
        for bias in (None, drawn(outputs, device=device, dtype=dtype)):
            whole = product(x, weight, bias)
            wanted = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
            agree(whole, wanted.to(dtype), 2e-6)
            for first, last in ((0, 1), (3, 67), (10, 500)):
                # Also where rows do not lie behind one another.
                wide = torch.cat([x, x], 1)[first:last, :inputs]
                _same_bits(product(wide, weight, bias), whole[first:last])


def row_attention(device: str) -> None:
    """A token's attention is the same bit by bit on a line, alone over a cache in blocks, and as a part of a chunk; and
    it is what plain torch computes."""
    from lockstep.kernels.attention.layout import make_layout
    from lockstep.kernels.attention.varlen import varlen_attention
    from lockstep.kernels.invariant_triton import KeyPlaces, Queries, attend, store

    torch.manual_seed(0)
    dtype = _half(device)
    lengths = [1, 70] if device == "cpu" else [1, 64, 65, 700, 1300]
    block = 16
    for heads, groups, size in ((7, 1, 64), (4, 4, 40), (6, 2, 128))[: 1 if device == "cpu" else 3]:
        shapes = ((sum(lengths), count, size) for count in (heads, groups, groups))
        query, key, value = (drawn(*shape, device=device, dtype=dtype) for shape in shapes)
        bounds = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
        firsts, counts = bounds[:-1], bounds.diff()
        for window in (None, 40):
            queries = Queries(query, firsts, counts, counts, max(lengths))
            line, lse = attend(queries, KeyPlaces(key, value, firsts), size**-0.5, window)
            wide = (part.float() for part in (query, key, value))
            layout = make_layout(lengths, torch.device(device), "sdpa")
            agree(line, varlen_attention(*wide, layout, scale=size**-0.5, window=window).to(dtype), 2e-6)
            for back in (0, 5):
                # The token `back` before each sequence's end (or its first), over blocks of a cache in any order.
                seen = (counts - back).clamp(min=1)
                width = -(-max(lengths) // block)
                table = torch.randperm(len(lengths) * width).view(-1, width).to(device)
                cached = []
                for part in (key, value):
                    slots = torch.full(((table.max() + 1) * block, groups, size), 9.0, device=device, dtype=part.dtype)
                    for row, (first, length) in enumerate(zip(firsts.tolist(), lengths, strict=True)):
                        at = torch.arange(length, device=device)
                        slots[table[row, at // block] * block + at % block] = part[first : first + length]
                    cached.append(slots)
                again = [torch.full_like(part, 9.0) for part in cached]
                slots_of = [
                    table[row, at // block] * block + at % block
                    for row, at in enumerate(torch.arange(length, device=device) for length in lengths)
                ]
                store(key, value, *again, torch.cat(slots_of))
                assert all(torch.equal(one, other) for one, other in zip(again, cached, strict=True))
                places = (firsts + seen - 1).long()
                every = torch.arange(len(lengths), dtype=torch.int32, device=device)
                alone = Queries(query[places], every, torch.ones_like(every), seen.long(), 1)
                where = KeyPlaces(*cached, table=table, block=block)
                found, found_lse = attend(alone, where, size**-0.5, window)
                _same_bits(found, line[places])
                _same_bits(found_lse, lse[:, places])
            # The last sequence from its 11th token on.
            first, length = int(firsts[-1]), lengths[-1]
            zero, count, whole = (torch.tensor([n], dtype=torch.int32, device=device) for n in (0, length - 10, length))
            chunk = Queries(query[first + 10 :], zero, count, whole, length - 10)
            found = attend(chunk, KeyPlaces(key[first:], value[first:], zero), size**-0.5, window)[0]
            _same_bits(found, line[first + 10 :])


CHECKS = {
    check.__name__: check
    for check in (
        norm,
        many_tiles,
        swiglu,
        gated_twice,
        rotary,
        adamw,
        models,
        hooked,
        others,
        grouped_experts,
        adapted_experts,
        routers,
        routers_of_models,
        generating,
        generating_models,
        generating_engine,
        generating_in_low_precision,
        shared_beginnings,
        row_products,
        row_attention,
    )
}
