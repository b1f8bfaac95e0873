"""Triton kernels that load and store the same tensor.

The warps of a Triton program do not wait for each other. A value that all warps load, such as one number per head, must
not be stored to the same place: a slow warp would load the new value. A kernel may work in place if each thread loads
only the elements that it stores. Each such kernel is listed here, and was read with this in mind.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import lockstep

ROOT = Path(lockstep.__file__).parent

IN_PLACE = {
    "adapted_experts_triton._add_products: out",
    "cascade_triton._add: total",
    "cascade_triton._merge: out",  # the lse, which all warps load, is stored to another tensor
    "decode_triton._add_norm: stream",
    "decode_triton._place_heads: qkv",
    "decode_triton._swiglu: gate_up",
    "logprob_triton._gradients: logits",
    # All warps load the scale of a block before the maximum over the block, which has a barrier, and store it after it.
    "adamw8bit_triton._moment: codes",
    "adamw8bit_triton._moment: scales",
    "adamw8bit_triton._step: weight",
    "adamw_triton._step: table",
    "conv_triton._step: state",
    "delta_step_triton._step: states",
    "mamba_step_triton._step: states",
    # The program uses the new key and value from registers, and does not load their slot.
    "paged_triton._decode: keys",
    "paged_triton._decode: values",
}


def _kernels() -> Iterator[tuple[str, ast.FunctionDef]]:
    for file in sorted(ROOT.rglob("*_triton.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
                yield f"{file.stem}.{node.name}", node


def _leftmost(node: ast.expr) -> str | None:
    """The name of the base pointer of `base + offset + ...`, of a cast and of a parenthesised pointer."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.BinOp):
            node = node.left
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            node = node.args[0] if ast.unparse(node.func) == "tl.load" else node.func.value
        else:
            return None
    return node.id


def _both(kernel: ast.FunctionDef) -> set[str]:
    """The parameters that the kernel loads from and stores to."""
    base = {one.arg: one.arg for one in kernel.args.args}
    for node in ast.walk(kernel):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = _leftmost(node.value)
            base.setdefault(node.targets[0].id, base.get(name or "", ""))
    used: dict[str, set[str]] = {"tl.load": set(), "tl.store": set()}
    for node in ast.walk(kernel):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in used:
            name = _leftmost(node.args[0])
            used[ast.unparse(node.func)].add(base.get(name or "", ""))
    return (used["tl.load"] & used["tl.store"]) - {""}


def test_kernels_that_work_in_place_are_known() -> None:
    found = {f"{name}: {tensor}" for name, kernel in _kernels() for tensor in _both(kernel)}
    assert found == IN_PLACE
