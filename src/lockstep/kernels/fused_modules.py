"""Replaces transformers modules (norm, MLP, rotary) by fused kernels, after testing each kernel against its module."""

from __future__ import annotations

import inspect
import math
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from lockstep.device.base import first_sentence
from lockstep.kernels.experts.grouped_experts import ADAPTERS, stacks_experts

# Number of token rows in the input of a kernel trial, more rows than one tile of a device's vector unit has.
TOKENS = 64
Answers = Sequence[torch.Tensor]


@dataclass(frozen=True)
class KernelTrial:
    """Tolerances of the trial in which a fused kernel is compared with the module it replaces."""

    tolerance: Mapping[torch.dtype, float]
    """Tolerance per dtype, relative to the largest absolute value of the module's output."""
    smallest: float
    """If the largest output value is below `smallest`, the tolerance is relative to `smallest` instead."""
    gradients: bool
    """Whether the trial also compares the gradients of the kernel with those of the module."""
    wait: Callable[[], None]
    """Synchronises the device, so that a kernel's error is raised in the trial and not in a training step."""
    errors: tuple[type[Exception], ...] = (TypeError, RuntimeError, ValueError, AttributeError)
    """Exceptions that a kernel raises if it does not work on this device, or a module that needs more than one input,
    such as a norm with a gate."""

    def alike(self, what: str, kernel: str, reference: Callable[[], Answers], fused: Callable[[], Answers]) -> bool:
        """Returns whether `reference` and `fused` give matching outputs. If the outputs differ, warns that the module
        `what` stays plain torch."""
        try:
            with torch.set_grad_enabled(self.gradients):
                expected, actual = reference(), fused()
            self.wait()
            same = all(self.close(a, b) for a, b in zip(expected, actual, strict=True))
        except self.errors as error:
            why = first_sentence(error)
            warnings.warn(f"{what} stays plain torch: {kernel} failed on a trial: {why}", stacklevel=3)
            return False
        if not same:
            warnings.warn(f"{what} stays plain torch: {kernel} gives different results", stacklevel=3)
        return same

    def close(self, reference: torch.Tensor, fused: torch.Tensor) -> bool:
        if reference.shape != fused.shape or reference.dtype != fused.dtype:
            return False
        error, largest = float((reference.float() - fused.float()).abs().max()), float(reference.float().abs().max())
        return error <= self.tolerance[reference.dtype] * max(self.smallest, largest)


def drawn(*shape: int, like: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Returns standard normal values, sampled on the host, in the dtype and on the device of `like`."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(like.device, like.dtype)


# Functions that recognise, by their structure, the transformers modules that a fused operator may replace.

GATED_INPUTS = ("hidden_states", "gate")
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def is_gated_norm(module: nn.Module) -> bool:
    """Returns whether the module looks like an RMSNorm whose output a second input gates."""
    return _has_norm_weight(module) and _inputs(module) == GATED_INPUTS


def is_rms_norm(module: nn.Module) -> bool:
    # A norm with a second input, such as a gate, is never called in the way the kernel supports.
    return _has_norm_weight(module) and len(_inputs(module)) == 1


def _has_norm_weight(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    is_norm = isinstance(weight, nn.Parameter) and weight.dim() == 1 and not list(module.children())
    return is_norm and getattr(module, "bias", None) is None and epsilon_of(module) is not None


def _inputs(module: nn.Module) -> tuple[str, ...]:
    return tuple(inspect.signature(type(module).forward).parameters)[1:]


def adds_one(norm: nn.Module) -> bool:
    """Returns whether an RMSNorm multiplies by 1 + weight, as Gemma's does. The norm of ones shows its factor."""
    weight: Any = norm.weight
    try:
        with torch.no_grad():
            factor = own_forward(norm, torch.ones_like(weight)[None, None])
    except (TypeError, RuntimeError, ValueError):
        return False
    off, off_by_one = ((factor - weight - one).abs().float().sum() for one in (0, 1))
    return bool(off_by_one < off)


def gates_first(norm: nn.Module) -> bool:
    """Returns whether a gated norm multiplies its input by the gate, as Mamba-2 does, and not its output. This function
    tries the norm with a constant gate of 3. A constant factor of the input does not change the normalized output, and
    a gate on the output multiplies it by silu(3)."""
    weight: Any = norm.weight
    ones = torch.ones_like(weight)[None, None]
    try:
        with torch.no_grad():
            result = own_forward(norm, ones, 3 * ones)
    except (TypeError, RuntimeError, ValueError):
        return False
    return bool((result.float() - weight.float()).abs().max() <= 0.1 * weight.float().abs().max())


def norm_groups(norm: Any) -> int:
    """Returns the number of groups of columns that a gated norm normalises apart, as Nemotron-H does."""
    width, size, count = len(norm.weight), getattr(norm, "group_size", None), getattr(norm, "n_groups", None)
    if isinstance(size, int) and size > 0 and width % size == 0:
        return width // size
    return count if isinstance(count, int) and count > 0 and width % count == 0 else 1


def epsilon_of(module: nn.Module) -> float | None:
    value = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return value if isinstance(value, float) else None


def is_gated(module: nn.Module) -> bool:
    """Returns whether the module is a gated MLP. Its projections are linear layers or adapters of them. Those of the
    tower of Gemma 4 are neither: they clamp."""
    projections = [getattr(module, name, None) for name in PROJECTIONS]
    return all(isinstance(getattr(one, "in_features", None), int) for one in projections) and not _clamps(module)


def _clamps(module: nn.Module) -> bool:
    """Returns whether the module clamps its activations (`limit`, `swiglu_limit`). The kernels do not clamp, and the
    small inputs of a trial would not reach the limit."""
    limits = (value for name, value in vars(module).items() if "limit" in name)
    return any(isinstance(value, int | float) and math.isfinite(value) for value in limits)


SILU, GELU_TANH = ("SiLU", "SiLUActivation"), ("GELUTanh", "PytorchGELUTanh")


def is_silu_gated(module: nn.Module) -> bool:
    """Returns whether the module is a SiLU-gated MLP without other submodules such as dropout, which a trial would
    miss."""
    return _is_gated_by(module, SILU)


def is_gelu_gated(module: nn.Module) -> bool:
    """Returns whether the module is an MLP that is gated by the tanh approximation of GELU, without other
    submodules."""
    return _is_gated_by(module, GELU_TANH)


def _is_gated_by(module: nn.Module, activations: Sequence[str]) -> bool:
    named = type(getattr(module, "act_fn", None)).__name__ in activations
    return is_gated(module) and named and {name for name, _ in module.named_children()} <= {*PROJECTIONS, "act_fn"}


def are_experts(module: nn.Module) -> bool:
    """Returns whether the module holds the weights of stacked experts, gate before up, and nothing else. Weights that
    are divided over ranks are not supported, unless the module shows those of this rank."""
    named = {name: vars(module).get(name, one) for name, one in module.named_parameters(recurse=False)}
    act = type(getattr(module, "act_fn", None)).__name__
    if set(named) != {"gate_up_proj", "down_proj"} or act not in (*SILU, *GELU_TANH) or _clamps(module):
        return False
    gate_up, down = named["gate_up_proj"], named["down_proj"]
    plain = all(type(one.data) is torch.Tensor for one in (gate_up, down))
    if gate_up.dim() != 3 or down.dim() != 3 or not plain or not stacks_experts(module):
        return False
    return gate_up.shape == (len(down), 2 * down.shape[2], down.shape[1])


def is_router(module: nn.Module) -> bool:
    """Returns whether the module looks like a router that chooses the `top_k` largest of all experts' probabilities. It
    has no parameter but its matrix, no groups of experts and no factor of its gates."""
    weight, count, top_k = (getattr(module, name, None) for name in ("weight", "num_experts", "top_k"))
    named = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    if not isinstance(weight, torch.Tensor) or not isinstance(top_k, int) or named != ["weight"]:
        return False
    if hasattr(module, "routed_scaling_factor"):
        return False
    return weight.dim() == 2 and len(weight) == count and list(_inputs(module)) == ["hidden_states"]


def gate_dtype(router: nn.Module) -> torch.dtype | None:
    """Returns the dtype of a router's gates: that of its weights, or fp32 (Mixtral). Returns None for a router whose
    logits have another dtype than its weights."""
    weight: Any = router.weight
    try:
        with torch.no_grad():
            logits, gates, _ = own_forward(router, torch.zeros_like(weight[:1]))
    except (TypeError, RuntimeError, ValueError):
        return None
    return gates.dtype if logits.dtype == weight.dtype else None


def fused_feed_forwards(model: nn.Module) -> int:
    """Returns the number of MLPs that run as one fused operation with all three projections."""
    return sum(
        (is_silu_gated(module) or is_gelu_gated(module)) and all(_without_bias(module, name) for name in PROJECTIONS)
        for module in model.modules()
    )


def _without_bias(module: nn.Module, name: str) -> bool:
    projection = getattr(module, name)
    return type(projection) is nn.Linear and projection.bias is None


def own_forward(module: nn.Module, *inputs: torch.Tensor) -> Any:
    """Calls the forward that the module's class defines, even if a kernel has replaced the forward of this module."""
    return type(module).forward(module, *inputs)


# The rotary kernel replaces `apply_rotary_pos_emb` of a transformers modelling file, which all models of that file
# call. The kernel is used only for models on which it was tested. The rotary embeddings of a tested model mark the cos
# and sin tensors that they return. With unmarked cos and sin the original function runs.

FUNCTION = "apply_rotary_pos_emb"
SCALE, MARK = "attention_scaling", "for_fused_rotary"


class Heads(NamedTuple):
    """Dtype, head counts and head size of a call of `apply_rotary_pos_emb`, used as the key of trial results."""

    dtype: torch.dtype
    queries: int
    keys: int
    size: int


class RotaryKernel(NamedTuple):
    """A device's rotary kernel."""

    name: str
    rotate: Callable[..., Any]
    """The kernel, with the signature of `apply_rotary_pos_emb`: q, k, cos, sin, `unsqueeze_dim`."""
    fits: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int], bool]
    """Returns whether the kernel supports these inputs (q, k, cos, sin, `unsqueeze_dim`)."""
    marks: Callable[[nn.Module], bool]
    """Returns whether the kernel supports the output of a rotary embedding. This function is called on each forward,
    because the scale of some rotary embeddings depends on the sequence length."""
    only_tried: bool
    """If true, the kernel runs only for the dtype, head counts and head size that passed a trial. For all other inputs
    the original function runs."""


class Rotary:
    """Replaces `apply_rotary_pos_emb` in a transformers modelling file. Calls the kernel if it supports the inputs and
    passed the trial. For other inputs calls the original function."""

    def __init__(self, original: Callable[..., Any], kernel: RotaryKernel):
        self.original, self.kernel = original, kernel
        self.tried: dict[Heads, bool] = {}

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *rest: Any, **more: Any
    ) -> Any:
        if rest or set(more) - {"unsqueeze_dim"} or not self.fits(q, k, cos, sin, **more):
            return self.original(q, k, cos, sin, *rest, **more)
        return self.kernel.rotate(q, k, cos, sin, **more)

    def fits(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> bool:
        marked = getattr(cos, MARK, False) and getattr(sin, MARK, False)
        if not (marked and self.kernel.fits(q, k, cos, sin, unsqueeze_dim)):
            return False
        return not self.kernel.only_tried or self.tried.get(Heads(q.dtype, q.shape[1], k.shape[1], q.shape[-1]), False)


def plug_rotary(model: nn.Module, kernel: RotaryKernel, trial: KernelTrial) -> list[str]:
    """Installs the rotary kernel. Returns the names of the transformers modelling files in which this model uses the
    kernel."""
    heads = heads_of(model)
    if heads is None:
        return []
    files = []
    for source in sorted({type(module).__module__ for module in model.modules()}):
        file = sys.modules.get(source)
        original = getattr(file, FUNCTION, None)
        if original is None:
            continue
        rotary = original if isinstance(original, Rotary) else Rotary(original, kernel)
        name = source.rsplit(".", 1)[-1]
        if heads not in rotary.tried:
            like = next(model.parameters())
            rotary.tried[heads] = _same(f"{FUNCTION} of {name}", rotary.original, kernel, trial, heads, like)
        if rotary.tried[heads]:
            setattr(file, FUNCTION, rotary)
            files.append(name)
    if files:
        for module in model.modules():
            if scales_of(module) and not any(isinstance(hook, _Marking) for hook in module._forward_hooks.values()):
                module.register_forward_hook(_Marking(kernel))
    return files


class _Marking:
    """Forward hook of a rotary embedding that marks the cos and sin outputs that the rotary kernel supports."""

    def __init__(self, kernel: RotaryKernel):
        self.kernel = kernel

    def __call__(self, module: nn.Module, _: Any, output: Any) -> None:
        if isinstance(output, tuple) and self.kernel.marks(module):
            for part in output:
                if isinstance(part, torch.Tensor):
                    setattr(part, MARK, True)


def scales_of(module: nn.Module) -> list[float]:
    """Returns the attention scales of a rotary embedding: one for all layers, or one per layer type. Returns an empty
    list for other modules."""
    return [value for name, value in vars(module).items() if name.endswith(SCALE) and isinstance(value, float | int)]


def heads_of(model: nn.Module) -> Heads | None:
    """Returns head counts and head size of a language model, or None if its config lacks them or its layers differ."""
    configs = (getattr(module, "config", None) for module in model.modules())
    try:
        # The config of a multimodal model is nested, and the config of its decoder has the head counts.
        config = next((config for config in configs if getattr(config, "num_attention_heads", None)), None)
        if config is None:
            return None
        queries = config.num_attention_heads
        keys = getattr(config, "num_key_value_heads", None) or queries
        size = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // queries
    except RuntimeError:  # transformers refuses to read a value that differs between layers
        return None
    return Heads(next(model.parameters()).dtype, queries, keys, size)


def _same(
    what: str, original: Callable[..., Any], kernel: RotaryKernel, trial: KernelTrial, heads: Heads, like: torch.Tensor
) -> bool:
    q, k = (drawn(1, count, TOKENS, heads.size, like=like, seed=count) for count in (heads.queries, heads.keys))
    angles = torch.randn(1, TOKENS, heads.size // 2, generator=torch.Generator().manual_seed(2)).repeat(1, 1, 2)
    cos, sin = (part.to(like.device, like.dtype) for part in (angles.cos(), angles.sin()))
    if not kernel.fits(q, k, cos, sin, 1):
        return False

    def outputs(call: Callable[..., Any]) -> Answers:
        if not trial.gradients:
            return list(call(q, k, cos, sin))
        inputs = [q.clone().requires_grad_(), k.clone().requires_grad_()]
        rotated = call(*inputs, cos, sin)
        return [t.detach() for t in rotated] + list(torch.autograd.grad(rotated, inputs, [q.flip(1), k.flip(1)]))

    return trial.alike(what, kernel.name, lambda: outputs(original), lambda: outputs(kernel.rotate))


# A module that looks like a norm or a gated MLP is compared with the kernel on random input in its dtype and width. The
# kernel replaces the module's forward only if the outputs of kernel and module match. So no list of supported models is
# needed, and a module that computes something else than the kernel stays unchanged. For calls that a kernel does not
# support, the module's original forward is used.

Forward = Callable[..., torch.Tensor]
# A function that returns a context manager, in which the sharded parameters of a module are gathered.
Gather = Callable[[nn.Module], AbstractContextManager[object]]


class ModuleKernel(NamedTuple):
    """A fused kernel for one kind of module. `looks` returns whether the structure of a module is one that the kernel
    supports; only such a module is tested. `forward` replaces its forward."""

    name: str
    looks: Callable[[nn.Module], bool]
    forward: Forward
    generates: bool = False
    """Whether the kernel is for experts, and computes passes without gradients in another way."""
    inputs: int = 1
    """Number of inputs of the module, which have the same shape."""
    routes: bool = False
    """Whether the kernel is for routers."""


class DeviceKernels(NamedTuple):
    """The fused kernels of a device type, and the tolerances with which they are tested."""

    modules: tuple[ModuleKernel, ...]
    rotary: RotaryKernel
    trial: KernelTrial


def plug_in(model: nn.Module, kernels: DeviceKernels, gather: Gather = nullcontext) -> list[str]:
    """Installs the fused kernels in the model. Returns a description of each replacement, for the log. During a trial
    `gather` gathers only the module and its parents, so that a sharded model is never gathered completely."""
    replaced: Counter[str] = Counter()
    for module in _gathered_one_by_one(model, gather, set()):
        for kernel in kernels.modules:
            if kernel.looks(module) and _trial_of(kernel)(module, kernel, kernels.trial):
                module.forward = KernelForward(kernel.forward, module)
                replaced[f"{_kind(module)} by {kernel.name}"] += 1
    for source in plug_rotary(model, kernels.rotary, kernels.trial):
        replaced[f"{FUNCTION} of {source} by {kernels.rotary.name}"] += 1
    return [f"{count} x {what}" if count > 1 else what for what, count in sorted(replaced.items())]


def _kind(module: nn.Module) -> str:
    """Returns the class of a module. FSDP replaces the class of a sharded module by a subclass."""
    return type(module).__name__.removeprefix("FSDP")


def _trial_of(kernel: ModuleKernel) -> Callable[[nn.Module, ModuleKernel, KernelTrial], bool]:
    return _same_experts if kernel.generates else _same_router if kernel.routes else _same_module


class KernelForward:
    """Calls a fused kernel as the forward of one module. This object keeps only a weak reference to the module. A bound
    method would form a reference cycle, which would keep the weights on the device until garbage collection. A copy of
    the module gets a copy of this object."""

    def __init__(self, forward: Forward, module: nn.Module):
        self._forward, self._module = forward, weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        module = self._module()
        assert module is not None  # the caller has a reference to the module
        return self._forward(module, *args, **kwargs)

    def __reduce__(self) -> tuple[type[KernelForward], tuple[Forward, nn.Module | None]]:
        return type(self), (self._forward, self._module())


def _gathered_one_by_one(module: nn.Module, gather: Gather, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """Yields all modules, like `modules()`. While the caller uses a module, the parameters of this module and of its
    parents are gathered."""
    if module in seen:
        return
    seen.add(module)
    with gather(module):
        yield module
        for child in module.children():
            yield from _gathered_one_by_one(child, gather, seen)


def _same_module(module: nn.Module, kernel: ModuleKernel, trial: KernelTrial) -> bool:
    """Returns whether the kernel's forward matches the module's. With `trial.gradients` the backward must match too."""
    parameter = _computed_like(module)
    gate = getattr(module, "gate_proj", None)
    width: int = parameter.shape[-1] if gate is None else gate.in_features
    # The trial input is not centred at 0, so that a norm that subtracts the mean (LayerNorm) gives different results.
    rows = drawn(1, TOKENS, width, like=parameter) + 0.5
    if gate is None:
        # Half of the input rows are so small that the epsilon of the norm changes the result.
        rows[:, ::2] *= (epsilon_of(module) or 0.0) ** 0.5
    upstream = drawn(1, TOKENS, width, like=parameter, seed=1)
    further = [drawn(1, TOKENS, width, like=parameter, seed=2 + number) for number in range(kernel.inputs - 1)]

    def outputs(call: Callable[..., torch.Tensor]) -> Answers:
        if not trial.gradients:
            return [call(rows, *further)]
        inputs = [tensor.clone().requires_grad_() for tensor in (rows, *further)]
        out = call(*inputs)
        # Input rows with small values have large gradients, so their gradients are compared separately.
        gradient, *others = torch.autograd.grad(out, inputs, upstream)
        return out.detach(), gradient[:, ::2], gradient[:, 1::2], *others

    training = module.training
    module.eval()
    try:
        return trial.alike(
            _kind(module),
            kernel.name,
            lambda: outputs(lambda *inputs: own_forward(module, *inputs)),
            lambda: outputs(lambda *inputs: kernel.forward(module, *inputs)),
        )
    finally:
        module.train(training)


def _computed_like(module: nn.Module) -> torch.Tensor:
    """Returns a tensor on the device of the module and in the dtype in which it computes. The parameters of quantised
    layers have other dtypes."""
    quantized: Any = next((part for part in module.modules() if hasattr(part, "coding")), None)
    if quantized is None:
        return next(module.parameters())
    return torch.empty(0, dtype=quantized.dtype, device=quantized.codes.device)


def _same_experts(module: Any, kernel: ModuleKernel, trial: KernelTrial) -> bool:
    """Returns whether the kernel's forward matches the module's for tokens with two experts each, or one if there is
    only one. With `trial.gradients` the backward must match too. Adapters do not take part in the trial."""
    like = module.gate_up_proj
    count, _, width = like.shape
    x = drawn(TOKENS, width, like=like)
    scores, chosen = drawn(TOKENS, count, like=like, seed=1).topk(min(2, count))

    shares, upstream = scores.softmax(-1), drawn(TOKENS, width, like=like, seed=2)

    def outputs(call: Callable[..., torch.Tensor]) -> Answers:
        with torch.no_grad():
            found = [call(module, x, chosen, shares)]
        if trial.gradients:
            inputs = [tensor.clone().requires_grad_() for tensor in (x, shares)]
            out = call(module, inputs[0], chosen, inputs[1])
            found += [out.detach(), *torch.autograd.grad(out, inputs, upstream)]
        return found

    adapters = vars(module).pop(ADAPTERS, None)
    try:
        return trial.alike(_kind(module), kernel.name, lambda: outputs(own_forward), lambda: outputs(kernel.forward))
    finally:
        if adapters is not None:
            vars(module)[ADAPTERS] = adapters


def _same_router(module: Any, kernel: ModuleKernel, trial: KernelTrial) -> bool:
    """Returns whether the kernel's forward matches the module's, and with `trial.gradients` the backward too. Only
    tokens without two equal probabilities are compared: of equal ones, a kernel may choose another."""
    weight, count = module.weight, module.num_experts
    # Logits of about 1, however small the weights are, and routers whose weights are still 0.
    x = drawn(TOKENS, weight.shape[1], like=weight)
    with torch.no_grad():
        size = float(own_forward(module, x)[0].float().abs().mean())
        x = x / size if size > 0 else x
        probs_TE = own_forward(module, x)[0].float().softmax(-1).sort(-1).values
    apart_T1 = ((probs_TE.diff(dim=-1).amin(-1) > 0) | (count == 1))[:, None].to(weight.dtype)
    upstream, beside = drawn(TOKENS, count, like=weight, seed=1), drawn(TOKENS, count, like=weight, seed=2)

    def outputs(call: Callable[..., Any]) -> Answers:
        states = x.clone().requires_grad_(trial.gradients)
        logits_TE, gates_TK, chosen_TK = call(module, states)
        dense_TE = torch.zeros_like(logits_TE, dtype=gates_TK.dtype).scatter(1, chosen_TK, gates_TK) * apart_T1
        found = [logits_TE.detach(), dense_TE.detach()]
        if trial.gradients:
            loss = (dense_TE * upstream).sum() + (logits_TE * beside * apart_T1).sum()
            found += torch.autograd.grad(loss, states)
        return found

    training = module.training
    module.eval()
    try:
        return trial.alike(_kind(module), kernel.name, lambda: outputs(own_forward), lambda: outputs(kernel.forward))
    finally:
        module.train(training)
