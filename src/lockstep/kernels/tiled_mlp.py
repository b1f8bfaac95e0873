"""Runs the feed-forward (MLP) of a layer over tiles of the tokens, so that its wide activations exist for one tile.

An MLP computes every token alone, so its output for a tile is the part of its output for all tokens. The forward pass
keeps only the input of the MLP. The backward pass computes the tiles again, one after the other. Gradients of the
weights are summed over the tiles in fp32, because a sum in half precision would round once per tile.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lockstep.kernels.fused_modules import Forward, KernelForward

# Modules of transformers that compute the product with a matrix, beside subclasses of `nn.Linear`.
PRODUCTS = ("Conv1D",)


def is_mlp(module: nn.Module) -> bool:
    """Returns whether the module is a feed-forward: at least two products, activations and norms, with one input and no
    parameters of its own. Adapters may wrap the products. Such a module computes every token alone."""
    children = list(module.children())
    if list(module.parameters(recurse=False)) or not all(_is_tokenwise(child) for child in children):
        return False
    return sum(_is_product(child) for child in children) >= 2 and len(_inputs(module)) == 1


def _inputs(module: nn.Module) -> list[str]:
    return list(inspect.signature(type(module).forward).parameters)[1:]


def _is_product(module: nn.Module) -> bool:
    adapted = getattr(module, "get_base_layer", None)
    module = module if adapted is None else adapted()
    return isinstance(module, nn.Linear) or type(module).__name__ in PRODUCTS


def _is_tokenwise(module: nn.Module) -> bool:
    if _is_product(module):
        return True
    parameters = list(module.parameters())
    # Norms have one-dimensional weights, activations have none.
    return not list(module.children()) and all(parameter.dim() == 1 for parameter in parameters)


def mlps_of(layer: nn.Module) -> list[nn.Module]:
    """Returns the feed-forwards of a layer. Returns an empty list if the layer has experts, whose activations would
    remain."""
    found: list[nn.Module] = []
    for name, module in layer.named_modules():
        stacked = any(parameter.dim() > 2 for parameter in module.parameters(recurse=False))
        if (stacked and not isinstance(module, nn.Conv1d)) or "experts" in name.split("."):
            return []
        if is_mlp(module):
            found.append(module)
    return found


def untiled(layers: Sequence[nn.Module]) -> str | None:
    """Returns why the MLPs of these layers cannot be tiled, or None if they can."""
    if not layers:
        return "transformers does not list its layers"
    without = [layer for layer in layers if not mlps_of(layer)]
    if not without:
        return None
    parts = ", ".join(sorted({type(part).__name__ for layer in without for part in layer.children()})[:4])
    return f"{len(without)} of its {len(layers)} layers have experts or no MLP that computes each token alone ({parts})"


def tile_mlps(layers: Sequence[nn.Module], tokens: int) -> int:
    """Makes the MLPs of these layers compute `tokens` tokens at a time. Returns the number of MLPs."""
    found = [module for layer in layers for module in mlps_of(layer)]
    for module in found:
        module.forward = TiledForward(vars(module).get("forward"), module, tokens)
    return len(found)


def inner_forward(module: nn.Module, x: torch.Tensor, kernel: Forward | None) -> torch.Tensor:
    answer: torch.Tensor = type(module).forward(module, x) if kernel is None else kernel(x)
    return answer


class TiledForward(KernelForward):
    """The forward of an MLP over tiles. `kernel` is the fused kernel that replaced the module's forward before, or
    None."""

    def __init__(self, kernel: Forward | None, module: nn.Module | None, tokens: int):
        assert module is not None
        super().__init__(tiled, module)
        self.kernel, self.tokens = kernel, tokens

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        (x,) = (*args, *kwargs.values())
        module = self._module()
        assert module is not None  # the caller has a reference to the module
        return tiled(module, x, self.kernel, self.tokens)

    def __reduce__(self) -> Any:
        return type(self), (self.kernel, self._module(), self.tokens)


def tiled(module: nn.Module, x: torch.Tensor, kernel: Forward | None, tokens: int) -> torch.Tensor:
    """Computes the MLP `module` for `tokens` tokens at a time. The last dimension of `x` is the hidden size."""
    if x.numel() <= tokens * x.shape[-1]:
        return inner_forward(module, x, kernel)
    rows = x.reshape(1, -1, x.shape[-1])
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not torch.is_grad_enabled() or not (rows.requires_grad or trained):
        out = _over_tiles(module, rows, kernel, tokens)
    else:
        kept = _KeptInput.apply(rows)
        # The node that keeps the input saves it before the tiles run. So gradient checkpointing, which stops when it
        # has recomputed the last saved tensor of a layer, does not run an MLP at the end of the layer once more.
        out = _Tiled.apply(kept, module, kernel, tokens, kept.grad_fn, *trained)
    return out.view(*x.shape[:-1], out.shape[-1])


def _over_tiles(module: nn.Module, rows: torch.Tensor, kernel: Forward | None, tokens: int) -> torch.Tensor:
    out = None
    for start in range(0, rows.shape[1], tokens):
        tile = inner_forward(module, rows[:, start : start + tokens], kernel)
        if out is None:
            out = tile.new_empty(1, rows.shape[1], tile.shape[-1])
        out[:, start : start + tokens] = tile
    assert out is not None
    return out


class _KeptInput(torch.autograd.Function):
    """Keeps the input of an MLP for its backward pass."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        module: nn.Module,
        kernel: Forward | None,
        tokens: int,
        kept: Any,
        *trained: nn.Parameter,
    ) -> torch.Tensor:
        ctx.module, ctx.kernel, ctx.tokens, ctx.kept, ctx.trained = module, kernel, tokens, kept, trained
        if kept is None:  # the input needs no gradient
            ctx.save_for_backward(rows)
        ctx.draws = _Draws(module, rows)
        return _over_tiles(module, rows, kernel, tokens)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (rows,), (upstream,) = (ctx.kept or ctx).saved_tensors, grads
        wanted = [parameter for parameter, needed in zip(ctx.trained, ctx.needs_input_grad[5:], strict=True) if needed]
        grad_rows = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        sums: list[torch.Tensor | None] = [None] * len(wanted)
        with ctx.draws.again(), torch.enable_grad():
            for start in range(0, rows.shape[1], ctx.tokens):
                part = slice(start, start + ctx.tokens)
                tile = rows[:, part].detach().requires_grad_()
                out = inner_forward(ctx.module, tile, ctx.kernel)
                found = torch.autograd.grad(out, (tile, *wanted), upstream[:, part], allow_unused=True)
                del out
                if grad_rows is not None:
                    grad_rows[:, part] = found[0]
                sums = [_added(total, more) for total, more in zip(sums, found[1:], strict=True)]
        back = iter(sums)
        given = [next(back) if needed else None for needed in ctx.needs_input_grad[5:]]
        return (
            grad_rows,
            None,
            None,
            None,
            None,
            *(
                None if total is None else total.to(weight.dtype)
                for total, weight in zip(given, ctx.trained, strict=True)
            ),
        )


def _added(total: torch.Tensor | None, more: torch.Tensor | None) -> torch.Tensor | None:
    """Adds the gradient of a tile to the sum of the tiles before it, in fp32."""
    if more is None:
        return total
    return more.float() if total is None else total.add_(more)


class _Draws:
    """The random states before the tiles run, if the module has dropout, so that the backward pass drops the same
    values."""

    def __init__(self, module: nn.Module, rows: torch.Tensor):
        drops = any(isinstance(part, nn.Dropout) and part.training and part.p for part in module.modules())
        self._device = rows.device
        self._host = torch.get_rng_state() if drops else None
        api = None if rows.device.type == "cpu" else torch.get_device_module(rows.device)
        self._own = api.get_rng_state(rows.device) if drops and api is not None else None

    @contextmanager
    def again(self) -> Iterator[None]:
        if self._host is None:
            yield
            return
        where = {"devices": []} if self._own is None else {"devices": [self._device], "device_type": self._device.type}
        with torch.random.fork_rng(**where):
            torch.set_rng_state(self._host)
            if self._own is not None:
                torch.get_device_module(self._device).set_rng_state(self._own, self._device)
            yield
