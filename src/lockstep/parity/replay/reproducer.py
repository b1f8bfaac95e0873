"""Writes a small script that reproduces a faulty operator. The script needs only torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from lockstep.parity.replay.operator_bisect import WrongOperator, in_double, in_torch, relative_difference, run_on_cpu
from lockstep.parity.replay.operator_log import Operator

# The maximum number of tensor elements that the script itself contains. If there are more elements, the tensors go into
# a separate file.
INLINE = 4096
# A relative difference between two float64 results that exceeds this value is more than rounding.
SEEN = 1e-6
# The tolerance for the relative difference of an operator. The difference of a correct fp32 operator is well below this
# tolerance.
ALLOWED = 1e-5


@dataclass(frozen=True)
class FaultCase:
    """An operator call with a wrong result, this result, and the reference, which is another operator call (`judge`) or
    expected values."""

    call: Operator
    found: torch.Tensor
    judge: Operator | None
    wanted: torch.Tensor
    index: int = 0
    """The index of the wrong result among the operator's results."""

    @property
    def allowed(self) -> float:
        """The tolerance for a correct operator: a little more than the rounding of the dtype."""
        kind = self.wanted.dtype if self.judge is None else self.found.dtype
        return max(ALLOWED, 1.5 * torch.finfo(kind).eps) if kind.is_floating_point else 0.0


def write_reproducer(wrong: WrongOperator, path: Path, title: str) -> Path | None:
    """Writes a script that runs the faulty operator and its reference, prints both values and exits with 1 if they
    differ. Returns None if the wrong result cannot be reproduced."""
    case = case_of(wrong)
    if case is None:
        return None
    case = smallest(case)
    given = case.call.inputs
    heavy = sum(tensor.numel() for tensor in (*given, case.wanted)) > INLINE
    if heavy:
        torch.save({"given": given, "wanted": case.wanted}, path.with_suffix(".pt"))
    path.write_text("\n".join(_lines(case, title, heavy)) + "\n", encoding="utf-8")
    return path


def case_of(wrong: WrongOperator) -> FaultCase | None:
    """Returns the faulty operator call and its reference, or None if the wrong result cannot be reproduced."""
    call, index = wrong.call, wrong.index
    if not call.outputs or not wrong.expected.numel() or wrong.expected.shape != wrong.actual.shape:
        return None
    if wrong.fault == "kernel":
        torchs = in_torch(call)
        if torchs is not None and _difference(torchs[index], wrong.expected) <= SEEN:
            return _shown(FaultCase(call, wrong.actual, call, wrong.expected, index))
        # torch's float64 operator is no reference: it is wrong too, or cannot run. So the script contains the expected
        # values.
        return _shown(FaultCase(call, wrong.actual, None, wrong.expected.to(wrong.actual.dtype), index))
    judge = with_settings(call, wrong.clean)
    wanted = in_double(judge) if judge is not None else None
    again = run(call, index)
    if again is None:
        again = call.outputs[index]  # the operator runs only on its device
    if (
        judge is not None
        and wanted
        and (case := _shown(FaultCase(call, again, judge, wanted[index], index))) is not None
    ):
        return case
    # No single operator call is a reference: the inputs differ, or a fused operator replaces several operators. So the
    # script contains the expected values.
    literal = wrong.expected
    if any(wrong.actual is one for one in call.inputs) and wrong.clean and wrong.clean.outputs:
        literal = wrong.clean.outputs[index]
    return _shown(FaultCase(call, again, None, literal, index))


def _shown(case: FaultCase) -> FaultCase | None:
    return case if _difference(case.found, case.wanted) > case.allowed else None


def smallest(case: FaultCase) -> FaultCase:
    """Reduces the tensors to one index along one axis after another, as long as the result stays wrong."""
    for axis in range(_axes(case)):
        width = case.found.shape[axis]
        differences = (case.found.double() - case.wanted.double()).abs()
        differences = differences.masked_fill(case.found == case.wanted, 0).movedim(axis, 0).reshape(width, -1).sum(1)
        for keep in (int(differences.argmax()), 0):
            cut = _cut(case, axis, slice(keep, keep + 1)) if width > 1 else None
            if cut is not None:
                case = cut
                break
    return case


def _axes(case: FaultCase) -> int:
    """Returns the number of axes that may be reduced to one index.

    Integer inputs are indices into other tensors, so a call with integer inputs is not reduced. For attention only the
    batch axis is reduced, because the sequences are independent.
    """
    if any(not one.is_floating_point() and one.dtype != torch.bool for one in case.call.inputs):
        return 0
    return min(1, case.found.ndim) if "attention" in case.call.name else case.found.ndim


def _cut(case: FaultCase, axis: int, keep: slice) -> FaultCase | None:
    """Returns the case with the slice `keep` of an axis that output and inputs share, or None if the result of this
    slice is not wrong."""
    width, ndim = case.found.shape[axis], case.found.ndim

    def sliced(tensor: torch.Tensor) -> torch.Tensor:
        # Axes align from the right, as in broadcasting. For a matrix product, a row axis matches the first input and a
        # column axis matches the second input.
        dim = axis - ndim + tensor.ndim
        if dim >= 0 and tensor.shape[dim] == width:
            return tensor.movedim(dim, 0)[keep].movedim(0, dim).clone()
        return tensor

    def cut(call: Operator) -> Operator:
        args, kwargs = pytree.tree_map(
            lambda leaf: sliced(leaf) if isinstance(leaf, torch.Tensor) else leaf, (call.args, call.kwargs)
        )
        return Operator(call.function, args, kwargs, [], call.device)

    call = cut(case.call)
    again = run(call, case.index)
    found, wanted = sliced(case.found), sliced(case.wanted)
    judge = None if case.judge is None else cut(case.judge)
    if judge is not None:
        doubled = in_double(judge)
        if not doubled or doubled[case.index].shape != wanted.shape or _difference(doubled[case.index], wanted) > SEEN:
            return None
    if again is None or again.shape != found.shape:
        return None
    if judge is None and _difference(again, found) > SEEN:
        return None
    return _shown(FaultCase(call, found, judge, wanted, case.index))


def with_settings(call: Operator, clean: Operator | None) -> Operator | None:
    """Returns the operator call with the non-tensor arguments of the corresponding call in the clean copy of the
    module."""
    if clean is None or clean.name != call.name:
        return None
    mine, spec = pytree.tree_flatten((call.args, call.kwargs))
    theirs = pytree.tree_leaves((clean.args, clean.kwargs))
    if len(mine) != len(theirs):
        return None
    mixed = [one if isinstance(one, torch.Tensor) else other for one, other in zip(mine, theirs, strict=True)]
    args, kwargs = pytree.tree_unflatten(mixed, spec)
    return Operator(call.function, args, kwargs, call.outputs, call.device)


def run(call: Operator, index: int = 0) -> torch.Tensor | None:
    """Runs the operator on the CPU in its own dtype and returns one of its results, or None if the operator runs only
    on its device."""
    found = run_on_cpu(call, _fresh)
    return found[index] if found is not None and len(found) > index else None


def _fresh(leaf: Any) -> Any:
    if isinstance(leaf, torch.device):
        return torch.device("cpu")
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Returns the relative difference of two tensors. The result is 0 if the shapes differ, because the script cannot
    show a wrong shape."""
    return relative_difference(found, wanted) if found.shape == wanted.shape else 0.0


def _lines(case: FaultCase, title: str, heavy: bool) -> list[str]:
    given = [f"    {_literal(tensor)}," for tensor in case.call.inputs]
    if heavy:
        kept = ["KEPT = torch.load(Path(__file__).with_suffix('.pt'), weights_only=True)", "GIVEN = KEPT['given']"]
    else:
        kept = ["GIVEN = [", *given, "]"]
    if case.judge is None:
        judge = ["    # The result of a clean copy of the module."]
        judge.append("    return KEPT['wanted']" if heavy else f"    return {_literal(case.wanted)}")
    else:
        same = "The same operator" if case.judge is case.call else "With the arguments of a clean module copy"
        judge = [f"    # {same}, in float64 on the CPU.", f"    return {_call_text(case.judge, double=True)}"]
    return [
        f'"""{_quotable(title)}: needs only torch; exits with 1 if the two results differ and with 0 if they agree."""',
        "",
        *(["from pathlib import Path", ""] if heavy else []),
        "import torch",
        "",
        f"DEVICE = {case.call.device!r}",
        *kept,
        "",
        "",
        "def operator(given):",
        f"    return {_call_text(case.call)}",
        "",
        "",
        "def wanted(given):",
        *judge,
        "",
        "",
        "found = operator([tensor.to(DEVICE, copy=True) for tensor in GIVEN])",
        "judge = wanted([tensor.double() if tensor.is_floating_point() else tensor for tensor in GIVEN])",
        "",
        "",
        "def result(answer):",
        "    every = answer if isinstance(answer, (tuple, list)) else [answer]",
        f"    tensor = [one for one in every if isinstance(one, torch.Tensor)][{case.index}]",
        "    return tensor.detach().cpu().double().flatten()",
        "",
        "",
        "found, judge = result(found), result(judge)",
        "difference = torch.where((found == judge) | found.isnan() & judge.isnan(), 0.0, found - judge)",
        "worst = difference.abs().argmax()",
        f"differs = not difference.norm() <= {case.allowed:.3g} * judge[judge.isfinite()].norm()",
        "values = f'found {found[worst].item():.9g}, wanted {judge[worst].item():.9g}'",
        "print(f'differs: {values}' if differs else f'agrees: {values} at the largest difference')",
        "raise SystemExit(int(differs))",
    ]


def _quotable(title: str) -> str:
    """Replaces quotes and backslashes in the title, so that a module's name cannot end the docstring of the script."""
    return "".join(sign if sign.isprintable() and sign not in '"\\' else "'" for sign in title)


def _call_text(call: Operator, *, double: bool = False) -> str:
    numbers = iter(range(10**6))

    def text(leaf: Any) -> str:
        if isinstance(leaf, torch.Tensor):
            return f"given[{next(numbers)}]"
        if isinstance(leaf, torch.dtype):
            return str(torch.float64 if double and leaf.is_floating_point else leaf)
        if isinstance(leaf, torch.device):
            return "'cpu'" if double else "DEVICE"
        if isinstance(leaf, torch.layout | torch.memory_format):
            return str(leaf)
        if isinstance(leaf, list | tuple):
            return f"[{', '.join(text(one) for one in leaf)}]"
        return _number(leaf) if isinstance(leaf, float) else repr(leaf)

    arguments = [text(arg) for arg in call.args] + [f"{key}={text(value)}" for key, value in call.kwargs.items()]
    return f"torch.ops.{call.function}({', '.join(arguments)})"


def _literal(tensor: torch.Tensor) -> str:
    shape = "" if tensor.numel() else f".reshape({list(tensor.shape)})"
    return f"torch.tensor({_number(tensor.tolist())}, dtype={tensor.dtype}){shape}"


def _number(value: Any) -> str:
    # Python has no literals for nan and inf, so they are written as float('nan') and float('inf').
    return repr(value).replace("nan", "float('nan')").replace("inf", "float('inf')")
