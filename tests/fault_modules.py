"""Faults inside the model: in its modules, forward and backward."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface
from transformers.models.qwen2 import modeling_qwen2

from fault_scene import Inject, Scene, wrap
from lockstep.kernels.attention.interface import transformers_attention
from lockstep.kernels.attention.layout import Layout

# -- honest noise


def other_arithmetic(scene: Scene) -> None:
    """What another device would do: every projection rounds differently (sums in double precision)."""
    for module in scene.policy.modules():
        if isinstance(module, torch.nn.Linear):
            wrap(module, "forward", partial(_in_double, module))


def _in_double(layer: torch.nn.Linear, original: Any, x: torch.Tensor) -> torch.Tensor:
    bias = None if layer.bias is None else layer.bias.double()
    return functional.linear(x.double(), layer.weight.double(), bias).to(x.dtype)


def in_parts(scene: Scene) -> None:
    """What a device does that divides the sums of a product: each half is rounded to the model's precision."""
    for module in scene.policy.modules():
        if isinstance(module, torch.nn.Linear):
            wrap(module, "forward", partial(_in_halves, module))


def _in_halves(layer: torch.nn.Linear, original: Any, x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    first = functional.linear(x[..., :half], layer.weight[:, :half], layer.bias)
    return first + functional.linear(x[..., half:], layer.weight[:, half:])


def fused_norms(scene: Scene) -> None:
    """What fused kernels do: a norm rounds once, at its end."""
    for module in scene.policy.modules():
        if isinstance(module, modeling_qwen2.Qwen2RMSNorm):
            wrap(module, "forward", partial(_fused_norm, module))


def fused(scene: Scene) -> None:
    """Norms, and the MLP between its projections."""
    fused_norms(scene)
    for module in scene.policy.modules():
        if isinstance(module, modeling_qwen2.Qwen2MLP):
            wrap(module, "forward", partial(_fused_mlp, module))


def _fused_norm(norm: Any, original: Any, x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    return (wide * norm.weight.float()).to(x.dtype)


def _fused_mlp(mlp: Any, original: Any, x: torch.Tensor) -> torch.Tensor:
    gate, up = mlp.gate_proj(x).float(), mlp.up_proj(x).float()
    return mlp.down_proj((functional.silu(gate) * up).to(x.dtype))


# -- settings and weights


def setting(module: str, name: str, change: Any) -> Inject:
    """An attribute of a module; `change` makes the new value of the old one."""
    return lambda scene: setattr(scene.module(module), name, change(getattr(scene.module(module), name)))


def weight(parameter: str, change: Any) -> Inject:
    """A weight that was loaded wrongly."""

    def inject(scene: Scene) -> None:
        module, _, name = parameter.rpartition(".")
        target = getattr(scene.module(module), name)
        with torch.no_grad():
            target.copy_(change(target.clone()))

    return inject


def without_row(row: int) -> Any:
    def change(matrix: torch.Tensor) -> torch.Tensor:
        matrix[row] = 0
        return matrix

    return change


def through_bf16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.bfloat16().float()


def through_fp8(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float8_e4m3fn).to(tensor.dtype)


def rotary_base(base: float) -> Inject:
    def inject(scene: Scene) -> None:
        rotary = scene.module("model.rotary_emb")
        size = 2 * len(rotary.inv_freq)
        rotary.inv_freq = (1.0 / base ** (torch.arange(0, size, 2).float() / size)).to(rotary.inv_freq.device)

    return inject


# -- what a module computes


def output(module: str, change: Any) -> Inject:
    """`change` makes another output of a module's output."""
    return lambda scene: wrap(scene.module(module), "forward", lambda original, *a, **k: change(original(*a, **k)))


def linear(module: str, compute: Any) -> Inject:
    """A projection computed by `compute(input, weight, bias)`."""

    def inject(scene: Scene) -> None:
        layer = scene.module(module)
        wrap(layer, "forward", lambda original, x: compute(x, layer.weight, layer.bias))

    return inject


def bf16_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return functional.linear(x.bfloat16(), weight.bfloat16(), bias.bfloat16()).float()


def activation(module: str, made: torch.nn.Module) -> Inject:
    return lambda scene: setattr(scene.module(module), "act_fn", made)


def no_residual(module: str) -> Inject:
    """The sum behind the layer's MLP is left out."""

    def inject(scene: Scene) -> None:
        layer = scene.module(module)

        def forward(original: Any, hidden: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden), **kwargs)
            return layer.mlp(layer.post_attention_layernorm(hidden + attended))

        wrap(layer, "forward", forward)

    return inject


def dropout_while_training(module: str) -> Inject:
    def inject(scene: Scene) -> None:
        layer = scene.module(module)
        wrap(layer, "forward", lambda original, x: functional.dropout(original(x), 0.1, training=layer.training))

    return inject


def rotary(module: str, rotate: Any) -> Inject:
    """One layer turns queries and keys by `rotate(turn, query, key, cos, sin)`."""

    def inject(scene: Scene) -> None:
        turn = modeling_qwen2.apply_rotary_pos_emb

        def forward(original: Any, *args: Any, **kwargs: Any) -> Any:
            with scene.patch.context() as patch:
                patch.setattr(modeling_qwen2, "apply_rotary_pos_emb", lambda q, k, c, s: rotate(turn, q, k, c, s))
                return original(*args, **kwargs)

        wrap(scene.module(module), "forward", forward)

    return inject


def keys_alone(turn: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    return q, turn(q, k, cos, sin)[1]


def keys_one_further(turn: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    """Positions count relative to each other, so only a shift of one side matters."""
    return turn(q, k, cos, sin)[0], turn(q, k, cos.roll(-1, 1), sin.roll(-1, 1))[1]


def attention(module: str, **faults: Any) -> Inject:
    """One layer's attention in plain torch, with what `plain_attention` can get wrong."""

    def inject(scene: Scene) -> None:
        layer = scene.module(module)
        name = f"faulty-{len(AttentionInterface().valid_keys())}"
        AttentionInterface.register(name, lambda *a, **k: plain_attention(*a, faults=faults, **k))
        layer.config = copy.copy(layer.config)
        layer.config._attn_implementation_internal = name

    return inject


def plain_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    *,
    faults: dict[str, Any],
    layout: Any,
    scaling: float,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """The formula, all scores at once. The engine's passes are left as they are."""
    if not isinstance(layout, Layout):
        return transformers_attention(module, query, key, value, mask, layout=layout, scaling=scaling, **rest)
    times = query.shape[1] // key.shape[1]
    if faults.get("interleaved"):
        k, v = (tensor.repeat(1, times, 1, 1) for tensor in (key, value))
    else:
        k, v = (tensor.repeat_interleave(times, 1) for tensor in (key, value))
    tokens = torch.arange(query.shape[2], device=query.device)
    back = tokens[:, None] - tokens[None, :]
    seen = back >= faults.get("from", 0)
    sequence = torch.bucketize(tokens, layout.bounds[1:].long(), right=True)
    if not faults.get("joined"):
        seen = seen & (sequence[:, None] == sequence[None, :])
    # Whoever sees nobody looks at itself.
    seen = seen | (~seen.any(1, keepdim=True) & (back == 0))
    scores = (query @ k.transpose(2, 3)) * scaling
    scores = scores.masked_fill(~seen, -1e30 if "softmax" not in faults else -1e4)
    kind = faults.get("softmax", torch.float32)
    shares = scores.to(kind).softmax(-1).float()
    out = shares.to(v.dtype) @ v
    if "swapped" in faults:
        one, two = faults["swapped"]
        order = list(range(out.shape[1]))
        order[one], order[two] = order[two], order[one]
        out = out[:, order]
    return out.transpose(1, 2), None


# -- scoring


def scoring(**changes: Any) -> Inject:
    return lambda scene: setattr(scene.policy, "scoring", replace(scene.policy.scoring, **changes))


def bf16_logprobs(scene: Scene) -> None:
    def forward(original: Any, batch: Any) -> Any:
        scores = original(batch)
        return scores._replace(logprobs_K=through_bf16(scores.logprobs_K))

    wrap(scene.policy, "forward", forward)


def scaled_head(factor: float) -> Inject:
    def inject(scene: Scene) -> None:
        embedding = scene.module("model.embed_tokens")

        class Head(torch.nn.Module):
            bias = None

            @property
            def weight(self) -> torch.Tensor:
                return factor * embedding.weight

        scene.policy.causal_lm.lm_head = Head()

    return inject


# -- the way back


def gradient(parameter: str, change: Any) -> Inject:
    def inject(scene: Scene) -> None:
        scene.policy.causal_lm.get_parameter(parameter).register_hook(change)

    return inject


def backward(module: str, change: Any) -> Inject:
    """The gradient at a module's output, before the module itself goes back."""

    def hooked(out: torch.Tensor) -> torch.Tensor:
        if out.requires_grad:
            out.register_hook(change)
        return out

    return output(module, hooked)
