"""Standard modules in numpy float64, which decide whether the recorded run or its replay is wrong.

The references are written from the definitions of the modules. The references share no code with the modules that they
test: they use no torch operators, no transformers modelling files and no lockstep kernels. So an error in torch,
transformers or a lockstep kernel cannot also be in a reference. Modules without a reference in this file are not
tested.

References accept complex numbers. `directional` computes gradients by complex-step differentiation: it adds a tiny
imaginary step to the input, and the imaginary part of the result divided by the step is the directional derivative.
Complex-step differentiation avoids the rounding errors of finite differences. In variable names, T is the number of
tokens of a packed row, and D is the head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lockstep.tape.digest import BLOCKS, MARKS, SKETCH, sign_table
from lockstep.tape.module_trace import ROOT

Array = np.ndarray
# Model families with standard attention, norms, residuals and heads. Other families may scale the residuals, cap the
# logits or use sliding-window attention.
PLAIN_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3", "smollm3"})
LAYER_PARTS = frozenset({"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})
PROJECTIONS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
GATED = frozenset({"gate_proj", "up_proj", "down_proj"})
# The imaginary step of complex-step differentiation. The square of this step is too small to change any real number.
TINY = 1e-100
# The number of tokens whose logits are computed at once.
ROWS = 64


@dataclass(frozen=True)
class PackedTokens:
    """The packed row that the module processed."""

    ids: Array
    positions: Array
    lengths: tuple[int, ...]
    predictors: Array
    targets: Array


@dataclass
class NotedValues:
    """The intermediate values of a reference in the order of their computation. Each value is stored with substrings of
    the names of torch operators that may compute it."""

    values: list[tuple[Array, tuple[str, ...]]] = field(default_factory=list)

    def __call__(self, value: Array, *operators: str) -> Array:
        self.values.append((value, operators))
        return value


@dataclass(frozen=True)
class Reference:
    """The float64 reference of a module. `compute(inputs, weights, noted)` returns the module's outputs. The names in
    `weights` are relative to the module."""

    compute: Callable[[Sequence[Array], Mapping[str, Array], NotedValues], list[Array]]
    weights: Mapping[str, Array]
    tied: bool = False
    """Whether a weight is shared with another module, so that both modules contribute to its gradient."""


def reference_of(
    module: str,
    kind: str,
    config: Mapping[str, Any],
    weights: Mapping[str, Array],
    tokens: PackedTokens,
    temperature: float | None,
) -> Reference | None:
    """Returns the reference for a module with this name and class, or None if there is no reference for it.

    `config` is the content of the model's config.json. The names in `weights` are relative to the complete model. The
    reference for the complete model computes log-probabilities at `temperature`. If `temperature` is None, there is no
    reference for the complete model.
    """
    if module == ROOT:
        return _answers(config, weights, tokens, temperature)
    params = {name.removeprefix(f"{module}."): w for name, w in weights.items() if name.startswith(f"{module}.")}
    parts = {name.split(".")[0] for name in params}
    last = module.rpartition(".")[2]
    plain = config.get("model_type") in PLAIN_FAMILIES
    if parts and parts <= {"weight", "bias"}:
        return _single(last, kind, params, config, tokens)
    if last == "act_fn" and not params and config.get("hidden_act") in ACTIVATIONS:
        act, named = ACTIVATIONS[config["hidden_act"]]
        return Reference(lambda x, w, note: [note(act(x[0]), *named)], params)
    if last == "rotary_emb" and plain and (base := _rotary_base(config)) is not None:
        return Reference(lambda x, w, note: _rotary(base, _head_size(config), tokens, note), params)
    if not plain or config.get("hidden_act") not in ACTIVATIONS:
        return None
    if parts == GATED:
        return Reference(lambda x, w, note: [_mlp(x[0], w, config, note)], params)
    if _windowed(config) or _rotary_base(config) is None:
        return None
    if PROJECTIONS <= parts <= PROJECTIONS | {"q_norm", "k_norm"}:
        return Reference(lambda x, w, note: [_attention(*_layer_inputs(x, config), w, config, tokens, note)], params)
    if parts == LAYER_PARTS:
        return Reference(lambda x, w, note: [_layer(*_layer_inputs(x, config), w, config, tokens, note)], params)
    return None


def _single(
    last: str, kind: str, params: dict[str, Array], config: Mapping[str, Any], tokens: PackedTokens
) -> Reference | None:
    """Returns the reference of a module with one weight and possibly a bias."""
    shape = params["weight"].shape if "weight" in params else ()
    if kind == "Linear" and len(shape) == 2:
        return Reference(
            lambda x, w, note: [note(linear(x[0], w["weight"], w.get("bias")), "mm", "linear", "add")], params
        )
    if kind == "Embedding" and len(shape) == 2 and last == "embed_tokens":
        tied = bool(config.get("tie_word_embeddings"))
        return Reference(lambda x, w, note: [note(w["weight"][tokens.ids][None], "embedding", "index")], params, tied)
    if kind.endswith("RMSNorm") and set(params) == {"weight"} and len(shape) == 1 and "rms_norm_eps" in config:
        if config.get("model_type") not in PLAIN_FAMILIES:
            return None
        tiny = float(config["rms_norm_eps"])
        return Reference(lambda x, w, note: [rms_norm(x[0], w["weight"], tiny, note)], params)
    epsilon = config.get("layer_norm_eps", config.get("layer_norm_epsilon", config.get("norm_epsilon")))
    if kind == "LayerNorm" and len(shape) == 1 and epsilon is not None:
        small = float(epsilon)
        return Reference(lambda x, w, note: [layer_norm(x[0], w["weight"], w.get("bias"), small, note)], params)
    return None


# -- operators


def linear(x: Array, weight: Array, bias: Array | None) -> Array:
    found = x @ weight.T
    return found if bias is None else found + bias


def rms_norm(x: Array, weight: Array, epsilon: float, note: NotedValues) -> Array:
    """Computes RMSNorm (Zhang and Sennrich, arXiv 1910.07467)."""
    mean = note(note(x * x, "pow", "square", "mul").mean(-1, keepdims=True), "mean", "sum")
    scale = note(1 / np.sqrt(note(mean + epsilon, "add")), "rsqrt")
    return note(note(x * scale, "mul") * weight, "mul", "norm")


def layer_norm(x: Array, weight: Array, bias: Array | None, epsilon: float, note: NotedValues) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    found = weight * centred / np.sqrt((centred * centred).mean(-1, keepdims=True) + epsilon)
    return note(found if bias is None else found + bias, "norm", "add", "mul")


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def sigmoid(x: Array) -> Array:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + erf(x / math.sqrt(2)))


def gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def relu(x: Array) -> Array:
    return np.where(x.real > 0, x, 0)


_erf = np.vectorize(math.erf, otypes=[np.float64])


def erf(x: Array) -> Array:
    """Computes the error function. For complex numbers, the function uses a first-order expansion in the tiny imaginary
    part."""
    real: Array = _erf(x.real)
    return real + 2j / math.sqrt(math.pi) * np.exp(-x.real * x.real) * x.imag if np.iscomplexobj(x) else real


# Maps the name of an activation in transformers to its function and to substrings of the names of torch operators that
# may compute it.
ACTIVATIONS: dict[str, tuple[Callable[[Array], Array], tuple[str, ...]]] = {
    "silu": (silu, ("silu", "sigmoid", "mul")),
    "gelu": (gelu, ("gelu", "erf")),
    "gelu_pytorch_tanh": (gelu_tanh, ("gelu", "tanh")),
    "gelu_new": (gelu_tanh, ("gelu", "tanh")),
    "relu": (relu, ("relu", "clamp")),
}


def softmax(x: Array) -> Array:
    found = np.exp(x - x.real.max(-1, keepdims=True))
    return found / found.sum(-1, keepdims=True)


def log_softmax(x: Array) -> Array:
    moved = x - x.real.max(-1, keepdims=True)
    return moved - np.log(np.exp(moved).sum(-1, keepdims=True))


def causal_attention(q_HTD: Array, k_HTD: Array, v_HTD: Array, scale: float) -> Array:
    """Computes the grouped-query attention of one sequence."""
    times, tokens = len(q_HTD) // len(k_HTD), q_HTD.shape[1]
    hidden = np.triu(np.ones((tokens, tokens), dtype=bool), 1)
    found = [
        softmax(np.where(hidden, -np.inf, scale * (q_TD @ k_HTD[head // times].T))) @ v_HTD[head // times]
        for head, q_TD in enumerate(q_HTD)
    ]
    return np.stack(found)


# -- modules


def _mlp(x: Array, w: Mapping[str, Array], config: Mapping[str, Any], note: NotedValues) -> Array:
    act = ACTIVATIONS[config["hidden_act"]][0]
    gate, up = (linear(x, w[f"{name}.weight"], w.get(f"{name}.bias")) for name in ("gate_proj", "up_proj"))
    inner = note(act(gate) * up, "mul", "silu", "gelu")
    return linear(inner, w["down_proj.weight"], w.get("down_proj.bias"))


def _attention(
    x: Array,
    cos: Array,
    sin: Array,
    w: Mapping[str, Array],
    config: Mapping[str, Any],
    tokens: PackedTokens,
    note: NotedValues,
) -> Array:
    size, count = _head_size(config), len(tokens.ids)

    def heads(name: str) -> Array:
        found = linear(x, w[f"{name}_proj.weight"], w.get(f"{name}_proj.bias")).reshape(count, -1, size)
        if f"{name}_norm.weight" in w:
            found = rms_norm(found, w[f"{name}_norm.weight"], float(config["rms_norm_eps"]), NotedValues())
        return found.transpose(1, 0, 2)

    q, k, v = heads("q"), heads("k"), heads("v")
    q, k = (_rotated(one, cos.reshape(count, size), sin.reshape(count, size), note) for one in (q, k))
    ends = np.cumsum(tokens.lengths)
    rows = [slice(end - length, end) for end, length in zip(ends, tokens.lengths, strict=True)]
    mixed = np.concatenate([causal_attention(q[:, r], k[:, r], v[:, r], size**-0.5) for r in rows], axis=1)
    note(mixed.transpose(1, 0, 2), "attention", "softmax", "bmm")
    return linear(mixed.transpose(1, 0, 2).reshape(1, count, -1), w["o_proj.weight"], w.get("o_proj.bias"))


def _rotated(x: Array, cos: Array, sin: Array, note: NotedValues) -> Array:
    """Applies rotary embeddings (Su et al., arXiv 2104.09864) in the half-split layout of Hugging Face models."""
    one, two = np.split(x, 2, axis=-1)
    half = note(np.concatenate([-two, one], -1), "cat")
    return note(note(x * cos, "mul") + note(half * sin, "mul"), "add", "rotary")


def _layer(
    x: Array,
    cos: Array,
    sin: Array,
    w: Mapping[str, Array],
    config: Mapping[str, Any],
    tokens: PackedTokens,
    note: NotedValues,
) -> Array:
    def part(name: str) -> dict[str, Array]:
        return {key.removeprefix(f"{name}."): value for key, value in w.items() if key.startswith(f"{name}.")}

    def norm(value: Array, name: str) -> Array:
        return rms_norm(value, w[f"{name}.weight"], float(config["rms_norm_eps"]), NotedValues())

    attended = _attention(norm(x, "input_layernorm"), cos, sin, part("self_attn"), config, tokens, NotedValues())
    middle = note(x + attended, "mul", "add")
    return note(
        middle + _mlp(norm(middle, "post_attention_layernorm"), part("mlp"), config, NotedValues()), "mul", "add"
    )


def _answers(
    config: Mapping[str, Any], weights: Mapping[str, Array], tokens: PackedTokens, temperature: float | None
) -> Reference | None:
    """Returns a reference that computes the log-probabilities of the target tokens from the last hidden states."""
    name = "model.embed_tokens.weight" if config.get("tie_word_embeddings") else "lm_head.weight"
    if config.get("model_type") not in PLAIN_FAMILIES or temperature is None or name not in weights:
        return None

    def compute(x: Sequence[Array], w: Mapping[str, Array], note: NotedValues) -> list[Array]:
        states = note(x[0].reshape(len(tokens.ids), -1)[tokens.predictors], "index_select", "index")
        found = []
        for start in range(0, len(states), ROWS):
            logits = linear(states[start : start + ROWS], w[name], w.get("lm_head.bias")) / temperature
            wanted = tokens.targets[start : start + ROWS]
            found.append(log_softmax(logits)[np.arange(len(wanted)), wanted])
        return [note(np.concatenate(found), "log_softmax", "logsumexp", "sub", "gather", "mm")]

    return Reference(compute, {key: w for key, w in weights.items() if key in (name, "lm_head.bias")}, tied=True)


def _rotary(base: float, size: int, tokens: PackedTokens, note: NotedValues) -> list[Array]:
    turns = 1 / base ** (np.arange(0, size, 2) / size)
    angles = note(tokens.positions[:, None] * turns[None], "mm", "mul")
    angles = note(np.concatenate([angles, angles], -1), "cat")[None]
    return [note(np.cos(angles), "cos"), note(np.sin(angles), "sin")]


def _layer_inputs(inputs: Sequence[Array], config: Mapping[str, Any]) -> tuple[Array, Array, Array]:
    """Finds the hidden states, the rotary cosines and the rotary sines among the inputs of a decoder layer."""
    size = _head_size(config)
    states = next(x for x in inputs if x.shape[-1] == config["hidden_size"])
    cos, sin = [x for x in inputs if x is not states and x.shape[-1] == size][:2]
    return states, cos, sin


def _head_size(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _rotary_base(config: Mapping[str, Any]) -> float | None:
    """Returns the base (rope_theta) of standard rotary embeddings, or None for scaled or partial rotary embeddings."""
    keys = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = keys.get("rope_type", keys.get("type", "default"))
    base = keys.get("rope_theta", config.get("rope_theta"))
    if (
        kind != "default"
        or base is None
        or keys.get("partial_rotary_factor", 1.0) != 1.0
        or config.get("no_rope_layers")
    ):
        return None
    return float(base)


def _windowed(config: Mapping[str, Any]) -> bool:
    kinds = set(config.get("layer_types") or ())
    if kinds:
        return kinds != {"full_attention"}
    return bool(config.get("sliding_window")) and config.get("use_sliding_window", True)


# -- digests and derivatives


def array(tensor: torch.Tensor) -> Array:
    found: Array = tensor.detach().cpu().double().numpy()
    return found


def host_digest(value: Array) -> torch.Tensor:
    """Computes the same digest as `tape/digest.py`, but in numpy float64."""
    rows_RC = value.reshape(-1, 1) if value.ndim < 2 else value.reshape(-1, value.shape[-1])
    rows, columns = rows_RC.shape
    projected_RS = (rows_RC @ _signs(columns, 1, SKETCH)) * _signs(rows, 2, SKETCH)
    run = max(1, -(-rows // BLOCKS))
    padded = np.zeros((BLOCKS * run, SKETCH))
    padded[:rows] = projected_RS
    squares_RC = rows_RC * rows_RC
    size = math.sqrt(squares_RC.sum())
    largest = np.abs(rows_RC).max() if rows_RC.size else 0.0
    statistics = [size, rows_RC.mean() if rows_RC.size else 0.0, largest, float(not math.isfinite(size))]
    marks_CM, marks_RM = _signs(columns, 3, MARKS), _signs(rows, 4, MARKS)
    profiles = rows_RC.sum(0) @ marks_CM, squares_RC.sum(0) @ marks_CM, squares_RC.sum(1) @ marks_RM
    sketch = padded.reshape(BLOCKS, run, SKETCH).sum(1).ravel()
    return torch.from_numpy(np.concatenate([statistics, sketch, *profiles]))


def directional(compute: Callable[[Array], Array], at: Array, gradient: Array) -> Array:
    """Returns `SKETCH` random projections of the gradient of sum(`gradient` * `compute`(x)) at x = `at`. The
    projections are those of a digest, summed over its blocks of rows.

    Each projection is one directional derivative.
    """
    rows, columns = (at.size, 1) if at.ndim < 2 else (at.size // at.shape[-1], at.shape[-1])
    row_RS, column_CS = _signs(rows, 2, SKETCH), _signs(columns, 1, SKETCH)
    found = []
    for number in range(SKETCH):
        direction = np.outer(row_RS[:, number], column_CS[:, number]).reshape(at.shape)
        moved = compute(at + 1j * TINY * direction)
        found.append(float((gradient * moved.imag.reshape(gradient.shape)).sum()) / TINY)
    return np.array(found)


def _signs(count: int, seed: int, each: int) -> Array:
    return array(sign_table(count, seed, each))
