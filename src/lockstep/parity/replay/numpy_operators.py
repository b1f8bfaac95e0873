"""Torch operators in numpy float64, written from their definitions, so that a faulty library does not verify itself.

This file contains the operators that language models use. Operators that are not in this file run in torch's float64 on
the CPU (`operator_bisect.in_double`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from lockstep.parity.replay.numpy_modules import Array, array, erf, gelu, gelu_tanh, log_softmax, sigmoid, silu, softmax
from lockstep.parity.replay.operator_log import Operator


def numpy_results(call: Operator) -> list[torch.Tensor] | None:
    """Computes an operator call in numpy float64. Returns None if the operator is not implemented in this file."""
    library, _, name = call.name.partition(".")
    # An in-place operator (`add_`) has the same result as its out-of-place variant (`add`).
    operator = OPERATORS.get(name.split(".")[0].rstrip("_"))
    if operator is None or library != "aten":
        return None
    args, kwargs = pytree.tree_map(_plain, (call.args, call.kwargs))
    try:
        with np.errstate(all="ignore"):
            found = operator(*args, **kwargs)
    except (TypeError, ValueError, IndexError, KeyError, NotImplementedError):
        return None  # this overload is not implemented
    results = list(found) if isinstance(found, tuple) else [found]
    return [torch.from_numpy(np.array(one, order="C")) for one in results]


def _plain(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return array(leaf) if leaf.is_floating_point() else leaf.cpu().numpy()
    return leaf


def _axes(dim: int | Sequence[int] | None) -> int | tuple[int, ...] | None:
    if dim is None or isinstance(dim, int):
        return dim
    return tuple(dim) or None


def _reduced(function: Callable[..., Any]) -> Callable[..., Array]:
    def reduce(x: Array, dim: Any = None, keepdim: bool = False, **_: Any) -> Array:
        return np.asarray(function(x, axis=_axes(dim), keepdims=keepdim))

    return reduce


def _addmm(bias: Array, x: Array, y: Array, *, beta: float = 1, alpha: float = 1) -> Array:
    return beta * bias + alpha * (x @ y)


def _along(function: Callable[[Array], Array], x: Array, dim: int) -> Array:
    return np.moveaxis(function(np.moveaxis(x, dim, -1)), -1, dim)


def _silu_backward(gradient: Array, x: Array) -> Array:
    gate = sigmoid(x)
    return gradient * gate * (1 + x * (1 - gate))


def _softmax_backward(gradient: Array, output: Array, dim: int, _: Any) -> Array:
    weighted = gradient * output
    return weighted - output * weighted.sum(dim, keepdims=True)


def _log_softmax_backward(gradient: Array, output: Array, dim: int, _: Any) -> Array:
    return gradient - np.exp(output) * gradient.sum(dim, keepdims=True)


def _embedding_backward(gradient: Array, ids: Array, count: int, padding: int, by_frequency: bool) -> Array:
    if by_frequency:
        raise NotImplementedError
    found = np.zeros((count, gradient.shape[-1]))
    kept = ids.ravel() != padding
    np.add.at(found, ids.ravel()[kept], gradient.reshape(-1, gradient.shape[-1])[kept])
    return found


def _gather(x: Array, dim: int, index: Array) -> Array:
    if x.ndim != index.ndim or any(
        n < m for d, (n, m) in enumerate(zip(x.shape, index.shape, strict=True)) if d != dim % x.ndim
    ):
        raise NotImplementedError
    rows = tuple(slice(0, size) if d != dim % x.ndim else slice(None) for d, size in enumerate(index.shape))
    return np.take_along_axis(x[rows], index, dim)


def _scores(q: Array, k: Array, mask: Array | None, causal: bool, scale: float | None) -> tuple[Array, float]:
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = scale * (q @ np.swapaxes(k, -1, -2))
    if causal:
        scores = np.where(np.tril(np.ones(scores.shape[-2:], dtype=bool)), scores, -np.inf)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask
    return scores, scale


def _attention(
    q: Array,
    k: Array,
    v: Array,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    attn_mask: Array | None = None,
    scale: float | None = None,
) -> Array:
    """Returns the attention output. The torch operator also returns the log-sum-exp, which is not compared."""
    if dropout:
        raise NotImplementedError
    times = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, times, 1), np.repeat(v, times, 1)
    return _weights(_scores(q, k, attn_mask, causal, scale)[0]) @ v


def _weights(scores: Array) -> Array:
    """Returns the softmax of attention scores. A query whose keys are all masked gets zero weights."""
    return np.where(np.isneginf(scores.max(-1, keepdims=True)), 0.0, softmax(scores))


def _attention_backward(
    gradient: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    sums: Array,
    dropout: float,
    causal: bool,
    *,
    attn_mask: Array | None = None,
    scale: float | None = None,
) -> tuple[Array, Array, Array]:
    if dropout:
        raise NotImplementedError
    groups, times = k.shape[1], q.shape[1] // k.shape[1]
    k, v = np.repeat(k, times, 1), np.repeat(v, times, 1)
    scores, scale = _scores(q, k, attn_mask, causal, scale)
    weights = _weights(scores)
    at_weights = gradient @ np.swapaxes(v, -1, -2)
    at_scores = weights * (at_weights - (at_weights * weights).sum(-1, keepdims=True))
    at_k, at_v = scale * np.swapaxes(at_scores, -1, -2) @ q, np.swapaxes(weights, -1, -2) @ gradient
    # The gradient of a key-value head is the sum over the query heads that share it.
    shape = (len(q), groups, times, *k.shape[2:])
    return scale * at_scores @ k, at_k.reshape(shape).sum(2), at_v.reshape(shape).sum(2)


def _layer_norm(x: Array, shape: Sequence[int], weight: Array | None, bias: Array | None, eps: float) -> Array:
    axes = tuple(range(-len(shape), 0))
    centred = x - x.mean(axes, keepdims=True)
    found = centred / np.sqrt((centred * centred).mean(axes, keepdims=True) + eps)
    found = found if weight is None else found * weight
    return found if bias is None else found + bias


def _rms_norm(x: Array, shape: Sequence[int], weight: Array | None, eps: float | None) -> Array:
    if eps is None:
        raise NotImplementedError  # the default epsilon depends on the dtype
    found = x / np.sqrt((x * x).mean(tuple(range(-len(shape), 0)), keepdims=True) + eps)
    return found if weight is None else found * weight


OPERATORS: dict[str, Callable[..., Any]] = {
    "mm": np.matmul,
    "bmm": np.matmul,
    "addmm": _addmm,
    "baddbmm": _addmm,
    "mul": lambda x, y: np.asarray(x * y),
    "add": lambda x, y, alpha=1: np.asarray(x + alpha * y),
    "sub": lambda x, y, alpha=1: np.asarray(x - alpha * y),
    "div": lambda x, y: np.asarray(x / y),
    "neg": np.negative,
    "pow": lambda x, y: np.asarray(np.power(x, y)),
    "square": np.square,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "reciprocal": lambda x: 1 / x,
    "exp": np.exp,
    "log": np.log,
    "tanh": np.tanh,
    "erf": erf,
    "cos": np.cos,
    "sin": np.sin,
    "sigmoid": sigmoid,
    "silu": silu,
    "silu_backward": _silu_backward,
    "gelu": lambda x, approximate="none": gelu(x) if approximate == "none" else gelu_tanh(x),
    "relu": lambda x: np.maximum(x, 0),
    "mean": _reduced(np.mean),
    "sum": _reduced(np.sum),
    "cumsum": lambda x, dim, **_: np.cumsum(x, dim),
    "cat": lambda tensors, dim=0: np.concatenate([one for one in tensors if one.shape != (0,)], dim),
    "_softmax": lambda x, dim, _: _along(softmax, x, dim),
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax": lambda x, dim, _: _along(log_softmax, x, dim),
    "_log_softmax_backward_data": _log_softmax_backward,
    "embedding": lambda weight, ids, *_: weight[ids],
    "embedding_dense_backward": _embedding_backward,
    "index_select": lambda x, dim, index: np.take(x, index, dim),
    "gather": _gather,
    "native_layer_norm": _layer_norm,
    "_fused_rms_norm": _rms_norm,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
}
