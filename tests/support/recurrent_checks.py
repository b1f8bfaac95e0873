"""Triton kernels of experts, latents and recurrent layers against their plain-torch twins (see `triton_checks.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from triton_checks import DTYPES, agree, drawn, forwards_agree, with_gradients

if TYPE_CHECKING:
    from lockstep.types import Completion


def experts(device: str) -> None:
    """Experts that many tokens choose, few, and none; widths that no tile divides."""
    from lockstep.kernels.decode import experts_triton

    torch.manual_seed(0)
    for dtype in DTYPES if device != "cpu" else DTYPES[:1]:
        for tokens, count, chosen, width, inner in ((5, 4, 2, 40, 24), (40, 3, 1, 70, 66), (1, 9, 3, 16, 16)):
            x = drawn(tokens, width, device=device, dtype=dtype)
            gate_up = drawn(count, 2 * inner, width, device=device, dtype=dtype, scale=width**-0.5)
            down = drawn(count, width, inner, device=device, dtype=dtype, scale=inner**-0.5)
            # No token chooses the first expert, if there are enough.
            scores = torch.rand(tokens, count).to(device)
            scores[:, 0] -= float(count > chosen)
            shares, which = scores.topk(chosen)
            for share in (shares.to(dtype), shares.float()):
                with torch.no_grad():
                    found = experts_triton.experts(x, which, share, gate_up, down)
                    agree(found, experts_triton.plain_experts(x, which, share, gate_up, down), 5e-6)


def latents_placed(device: str) -> None:
    from lockstep.kernels.decode import latent_triton
    from lockstep.kernels.norm_triton import RmsNorm

    torch.manual_seed(0)
    for dtype in DTYPES:
        for heads, nope, size, rank in ((3, 12, 8, 24), (16, 16, 6, 40)):
            # As a fused projection gives them: queries and latents of a token side by side.
            line = drawn(4, heads * (nope + size) + rank + size, device=device, dtype=dtype)
            query, latent = line.split([heads * (nope + size), rank + size], 1)
            angles = torch.randn(4, size)
            turns = [part.to(device, dtype) for part in (angles.cos(), angles.sin())]
            norm, slots = (
                RmsNorm(drawn(rank, device=device, dtype=dtype), 1e-2),
                torch.tensor([7, 3, 0, 9], device=device),
            )
            for paired in (False, True):
                sides = []
                for place in (latent_triton.place_latents, latent_triton.plain_place_latents):
                    cache = torch.zeros(10, 1, rank + size, device=device, dtype=dtype)
                    out = torch.zeros(4, heads, rank + size, device=device, dtype=dtype)
                    place(query, latent, *turns, slots, cache, norm, out, paired)
                    sides.append((cache, out))
                for found, wanted in zip(*sides, strict=True):
                    forwards_agree(found, wanted, 1e-6)


def delta_steps(device: str) -> None:
    from lockstep.kernels.recurrent import delta_step_triton as triton_step

    torch.manual_seed(0)
    for dtype in DTYPES:
        for heads, size, width in ((3, 24, 40), (2, 16, 32)):
            query, key = (drawn(2, heads, size, device=device, dtype=dtype) for _ in range(2))
            value = drawn(2, heads, width, device=device, dtype=dtype)
            decay = -drawn(2, heads, device=device, dtype=torch.float32).abs()
            beta = drawn(2, heads, device=device, dtype=dtype).sigmoid()
            states = drawn(4, heads, size, width, device=device, dtype=torch.float32)
            slots = torch.tensor([3, 1], device=device)
            for unit in (False, True):
                ours, twin = states.clone(), states.clone()
                with torch.no_grad():
                    found = triton_step.delta_step_(query, key, value, decay, beta, ours, slots, unit)
                    wanted = triton_step.plain_delta_step_(query, key, value, decay, beta, twin, slots, unit)
                agree(found, wanted, 2e-6)
                agree(ours, twin, 2e-6)
                assert torch.equal(ours[[0, 2]], states[[0, 2]])


def linear_rules(device: str) -> None:
    """Chunks against tokens one by one in fp32, for the gated delta rule and for linear attention (Mamba-2): outputs,
    last states and all gradients. The sizes of models are tried in `trials_of_sizes`."""
    from lockstep.kernels.recurrent import chunks_triton, delta_triton

    torch.manual_seed(0)

    def joined(rule: Callable[..., Sequence[torch.Tensor]]) -> Callable[..., torch.Tensor]:
        return lambda *given: torch.cat([part.flatten() for part in rule(*given)])

    with small_chunks(device):
        cases = (
            [(19, 2, 1, 16, 24)] if device == "cpu" else [(150, 2, 1, 16, 24), (64, 1, 1, 20, 16), (12, 4, 2, 16, 40)]
        )
        for tokens, heads, groups, size, width in cases:
            query, key = (drawn(2, tokens, groups, size, device=device, dtype=torch.float32) for _ in range(2))
            value = drawn(2, tokens, heads, width, device=device, dtype=torch.float32)
            decay = -drawn(2, tokens, heads, device=device, dtype=torch.float32, scale=0.3).abs()
            first = drawn(2, heads, size, width, device=device, dtype=torch.float32)
            ours, twin = joined(chunks_triton.linear_attention), joined(chunks_triton.plain_linear_attention)
            with_gradients(ours, twin, [query, key, value, decay, first], 2e-5)
            query, key = (
                torch.nn.functional.normalize(part.repeat_interleave(heads // groups, 2), dim=-1)
                for part in (query, key)
            )
            # The same key again and again: the system is as far from the unit matrix as it can be.
            key[:, 5:] = key[:, 5:6].expand_as(key[:, 5:])
            beta = drawn(2, tokens, heads, device=device, dtype=torch.float32).sigmoid()
            ours, twin = joined(delta_triton.delta_rule), joined(delta_triton.plain_delta_rule)
            with_gradients(ours, twin, [query, key, value, decay, beta, first], 2e-5)


@contextmanager
def small_chunks(device: str) -> Iterator[None]:
    """The interpreter is slow."""
    from lockstep.kernels.recurrent import chunks_triton, rule_trials

    small = {"CHUNK": 16, "BLOCK": 16, "COLUMNS": 16} if device == "cpu" else {}
    kept = {name: getattr(chunks_triton, name) for name in small}
    inputs = rule_trials.TOKENS, rule_trials.ROWS
    try:
        for name, value in small.items():
            setattr(chunks_triton, name, value)
        rule_trials.TOKENS, rule_trials.ROWS = (17, 1) if device == "cpu" else inputs
        yield
    finally:
        for name, value in kept.items():
            setattr(chunks_triton, name, value)
        rule_trials.TOKENS, rule_trials.ROWS = inputs


def mamba_steps(device: str) -> None:
    from lockstep.kernels.recurrent import mamba_step_triton as triton_step

    torch.manual_seed(0)
    for dtype in DTYPES:
        for heads, groups, size, width in ((4, 2, 24, 40), (3, 1, 16, 8)):
            x = drawn(2, heads, width, device=device, dtype=dtype)
            steps, bias, skip = (
                drawn(*shape, device=device, dtype=dtype) for shape in ((2, heads), (heads,), (heads,))
            )
            decay = -drawn(heads, device=device, dtype=torch.float32).abs()
            key, query = (drawn(2, groups, size, device=device, dtype=dtype) for _ in range(2))
            states = drawn(4, heads, width, size, device=device, dtype=torch.float32)
            slots = torch.tensor([3, 1], device=device)
            ours, twin = states.clone(), states.clone()
            given = (x, steps, decay, key, query, skip, bias)
            with torch.no_grad():
                found = triton_step.mamba_step_(*given, ours, slots)
                agree(found, triton_step.plain_mamba_step_(*given, twin, slots), 2e-6)
            # The interpreter cuts digits of the step off.
            agree(ours.to(dtype), twin.to(dtype), 2e-6)
            assert torch.equal(ours[[0, 2]], states[[0, 2]])


def convolutions(device: str) -> None:
    from lockstep.kernels.recurrent import conv_triton

    torch.manual_seed(0)
    for dtype in DTYPES:
        for channels, tokens, length, biased in ((40, 37, 4, True), (130, 2, 3, False)):
            # As a projection leaves them: the channels of a token are adjacent.
            x = drawn(2, tokens, channels, device=device, dtype=dtype).transpose(1, 2)
            weight = drawn(channels, length, device=device, dtype=dtype)
            bias = drawn(channels, device=device, dtype=dtype) if biased else None
            given = [x, weight, *([bias] if biased else [])]
            for silu in (False, True):

                def ours(
                    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None, silu: bool = silu
                ) -> torch.Tensor:
                    return conv_triton.convolve(x, w, b, silu)

                def twin(
                    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None, silu: bool = silu
                ) -> torch.Tensor:
                    return conv_triton.plain_convolve(x, w, b, silu)

                with_gradients(ours, twin, given, 2e-6)
                for wider in (0, 2):
                    state = drawn(2, channels, length + wider, device=device, dtype=dtype)
                    other = state.clone()
                    with torch.no_grad():
                        found = conv_triton.convolve_step_(x[..., :1], state, weight, bias, silu)
                        wanted = conv_triton.plain_convolve_step_(x[..., :1], other, weight, bias, silu)
                    agree(found, wanted, 2e-6)
                    assert torch.equal(state, other)
                    slots = torch.tensor([2, 0], device=device)
                    state = drawn(3, channels, length + wider, device=device, dtype=dtype)
                    other = state.clone()
                    with torch.no_grad():
                        found = conv_triton.convolve_step_(x[..., :1], state, weight, bias, silu, slots)
                        wanted = conv_triton.plain_convolve_step_(x[..., :1], other, weight, bias, silu, slots)
                    agree(found, wanted, 2e-6)
                    assert torch.equal(state, other)


def gated_norms(device: str) -> None:
    from lockstep.kernels.recurrent.gated_norm_triton import gated_norm, plain_gated_norm

    torch.manual_seed(0)
    for dtype in DTYPES:
        for shape, groups in (((3, 5, 128), 1), ((2, 7), 1), ((3, 5, 96), 4)):
            x, gate = (drawn(*shape, device=device, dtype=dtype) for _ in range(2))
            x[0] *= 1e-3
            # Groups of other sizes: then one scale for all of them is wrong.
            x[..., : shape[-1] // 2] *= 5
            weight = drawn(shape[-1], device=device, dtype=dtype)
            for first in (False, True):
                ours, twin = (partial(_norm_of, norm, first, groups) for norm in (gated_norm, plain_gated_norm))
                with_gradients(ours, twin, [x, gate, weight])


def grouped_norm_of_nemotron(device: str) -> None:
    """The values and gradients of the module of transformers, in two groups."""
    from transformers.models.nemotron_h import modeling_nemotron_h as file

    from lockstep.kernels.fused_modules import norm_groups
    from lockstep.kernels.recurrent.gated_norm_triton import gated_norm

    # The name of the class depends on the version of transformers.
    norm = next(value for name, value in vars(file).items() if name.endswith("RMSNormGated"))
    module = norm(48, group_size=24, eps=1e-5).to(device)
    x, gate, weight = (drawn(*shape, device=device, dtype=torch.float32) for shape in ((2, 5, 48), (2, 5, 48), (48,)))
    assert norm_groups(module) == 2

    def theirs(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.func.functional_call(module, {"weight": weight}, (x, gate))
        return out

    with_gradients(lambda *given: gated_norm(*given, 1e-5, True, 2), theirs, [x, gate, weight])


def _norm_of(norm: Callable[..., torch.Tensor], first: bool, groups: int, *given: torch.Tensor) -> torch.Tensor:
    return norm(*given, 1e-6, first, groups)


def _small(name: str, device: str) -> torch.nn.Module:
    import transformers

    from lockstep.kernels.attention.interface import ATTENTION, register_attention

    register_attention()
    torch.manual_seed(0)
    common = {
        "vocab_size": 100, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "pad_token_id": 0, "attn_implementation": ATTENTION,
    }  # fmt: skip
    if name == "qwen":
        config = transformers.Qwen3_5TextConfig(
            head_dim=16, linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=16,
            linear_value_head_dim=16, layer_types=["linear_attention", "full_attention"], **common,
        )  # fmt: skip
        model = transformers.Qwen3_5ForCausalLM(config)
    else:
        config = transformers.BambaConfig(
            mamba_n_heads=2, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=16, mamba_expand=1,
            attn_layer_indices=[1], attn_rotary_emb=8, **common,
        )  # fmt: skip
        model = transformers.BambaForCausalLM(config)
    model = model.to(device).eval()
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape) * 0.3)
    return model


USED = {
    "qwen": {"delta_rule", "delta_step_", "convolve", "convolve_step_"},
    "bamba": {"linear_attention", "mamba_step_", "convolve", "convolve_step_"},
}


def recurrent_models(device: str) -> None:
    """A packed pass with all gradients, and generation: kernels against the model's own functions, in fp32."""
    with small_chunks(device):
        for name, kernels in USED.items():
            whole = {"delta_rule", "linear_attention"} if device != "cpu" else set()
            _compared_model(name, kernels - whole, device)


@contextmanager
def _own_functions(name: str) -> Iterator[Any]:
    """Yields the modelling file with the functions of transformers, which an earlier test of the process may have
    replaced, and restores them."""
    import sys

    from lockstep.kernels.recurrent.rule_functions import FUNCTIONS, ORIGINAL

    file = sys.modules[type(_small(name, "cpu")).__module__]
    own = {each: getattr(file, each) for each in FUNCTIONS if hasattr(file, each)}
    own = {each: getattr(function, ORIGINAL, function) for each, function in own.items()}
    vars(file).update(own)
    try:
        yield file
    finally:
        vars(file).update(own)


def _compared_model(name: str, names: set[str], device: str) -> None:
    with _own_functions(name) as file:
        _compare_with_own(file, name, names, device)


def _compare_with_own(file: Any, name: str, names: set[str], device: str) -> None:
    from lockstep.kernels.recurrent import rule_functions

    used: list[str] = []
    kernels = {each: getattr(rule_functions, each) for each in names}
    for each, kernel in kernels.items():
        setattr(rule_functions, each, lambda *a, each=each, kernel=kernel: used.append(each) or kernel(*a))
    try:
        plain, states, grads = _side(name, device, 0)
        assert not used
        ours, found, fused_grads = _side(name, device, len(names))
        assert set(used) == names
        # The kernels are for the model in which they were installed, not for others of its file.
        before = len(used)
        file.causal_conv1d_fn(torch.ones(1, 3, 4, device=device), torch.ones(3, 2, device=device))
        assert len(used) == before
    finally:
        for each, kernel in kernels.items():
            setattr(rule_functions, each, kernel)
    assert [one.ids for one in ours] == [one.ids for one in plain]
    for one, other in zip(ours, plain, strict=True):
        assert (torch.tensor(one.logprobs) - torch.tensor(other.logprobs)).abs().max() <= 1e-4
    assert (found - states).abs().max() <= 1e-4 * states.abs().max()
    for each, grad in grads.items():
        assert (fused_grads[each] - grad).norm() <= 1e-3 * grad.norm() + 1e-7, each


def _side(name: str, device: str, functions: int) -> tuple[list[Completion], torch.Tensor, dict[str, torch.Tensor]]:
    """Responses, hidden states of a packed row, and gradients, with so many functions replaced by kernels."""
    from lockstep.device.select import select
    from lockstep.kernels.fused import fuse, replaced
    from lockstep.model.check import packed_row
    from lockstep.model.policy import Policy
    from lockstep.recipe.keys_rollout import RolloutSettings
    from lockstep.rollout.native.native_engine import NativeEngine
    from lockstep.types import Request, Sampling

    kind = type(select(device))
    model = _small(name, device)
    if functions:
        fuse(model, "flash_varlen")
        assert sum("by Triton" in line for line in replaced(model)) == functions, replaced(model)
    policy = Policy(model, kind.attention)
    made = NativeEngine(policy, kind(), RolloutSettings(block_tokens=4), lambda ids: "").generate(
        [Request([5, 17, 3, 80, 41, 9], 0, 2)], Sampling(3, seed=1)
    )
    made = sorted(made, key=lambda one: (one.request, one.sample))
    places = [mixer.in_place for mixer in policy.decoder.mixers if mixer.number == 0]
    assert places == [{"convolution", "recurrent"} if functions else set()]
    # The second sequence must not see the state of the first, which is longer than a chunk of the interpreter.
    states = policy.decoder(packed_row([list(range(1, 18)), [7, 8, 9]], torch.device(device)))
    states.square().mean().backward()
    grads = {each: parameter.grad for each, parameter in model.named_parameters() if parameter.grad is not None}
    return made, states.detach(), grads


def trials_of_sizes(device: str) -> None:
    """On a device, the trials of all functions with the heads of real models in bf16."""
    import inspect

    from transformers.models.bamba import modeling_bamba
    from transformers.models.qwen3_5 import modeling_qwen3_5

    from lockstep.kernels.recurrent import rule_functions as rules
    from lockstep.kernels.recurrent import rule_trials

    delta, mamba, channels = (4, 128, 128), (8, 2, 128, 64), (512, 4, 1)
    sizes = {name: delta if "delta" in name else mamba if "mamba2" in name else channels for name in rules.FUNCTIONS}
    like = torch.zeros(1, device=device, dtype=torch.bfloat16)
    for name in rules.FUNCTIONS if device != "cpu" else ():
        plain = inspect.unwrap(getattr(modeling_bamba if "mamba2" in name else modeling_qwen3_5, name))
        plain = getattr(plain, rules.ORIGINAL, plain)
        ours = rules.running(name, partial(rules.FUNCTIONS[name][0], plain))
        assert rule_trials.passes(name, name, "Triton", plain, ours, sizes[name], like), name


def failed_trials(device: str) -> None:
    """A kernel, ours or that of a package, that gives other numbers than plain torch is not used."""
    with _own_functions("qwen") as file:
        _fail_trials(file, device)


def _fail_trials(file: Any, device: str) -> None:
    import functools
    import importlib.util
    import warnings
    from types import SimpleNamespace

    from lockstep.kernels.recurrent import rule_functions, rule_trials

    model = _small("qwen", device)
    module = next(part for part in model.modules() if hasattr(part, "head_k_dim"))
    name, own, kernel = rule_functions.STEP, getattr(file, rule_functions.STEP), rule_functions.delta_step_
    find, like = importlib.util.find_spec, next(model.parameters())

    @functools.wraps(own)
    def wrong(*given: Any, **named: Any) -> Any:
        out, last = own(*given, **named)
        return 1.01 * out, last

    def used() -> tuple[bool, list[str]]:
        rule_trials.PASSED.clear()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            return rule_functions._plug(file, name, "the step", module, like), [str(one.message) for one in said]

    try:
        assert used() == (True, [])
        rule_functions.delta_step_ = lambda *given: 1.01 * kernel(*given)
        assert used() == (False, ["the step stays plain torch: Triton gives different results"])
        rule_functions.delta_step_ = kernel
        importlib.util.find_spec = lambda package: SimpleNamespace() if package == "fla" else find(package)
        setattr(file, name, wrong)
        assert used() == (True, ["the step stays plain torch: fla gives different results"])
        setattr(file, name, functools.wraps(own)(lambda *given, **named: own(*given, **named)))
        assert used() == (False, [])
    finally:
        importlib.util.find_spec, rule_functions.delta_step_ = find, kernel
        rule_trials.PASSED.clear()


CHECKS = {
    check.__name__: check
    for check in (
        experts,
        latents_placed,
        delta_steps,
        linear_rules,
        mamba_steps,
        convolutions,
        gated_norms,
        grouped_norm_of_nemotron,
        trials_of_sizes,
        failed_trials,
        recurrent_models,
    )
}
