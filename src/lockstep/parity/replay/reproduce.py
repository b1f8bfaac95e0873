"""The smallest script that shows an operator's fault, with nothing but torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from lockstep.parity.replay.operators import Culprit, in_double, in_torch, relative_difference
from lockstep.parity.replay.oplog import Operator

# Numbers that a script holds itself; more go into a file beside it.
INLINE = 4096
# A difference that is no rounding of the judge.
SEEN = 1e-6
# As a share of the size of the result: what a right operator in single precision stays well below.
ALLOWED = 1e-5


@dataclass(frozen=True)
class Case:
    """A call that shows the fault, what it gives, and its judge: another call, or else the wanted numbers."""

    call: Operator
    found: torch.Tensor
    judge: Operator | None
    wanted: torch.Tensor
    index: int = 0
    """Which of the operator's results it is."""

    @property
    def allowed(self) -> float:
        """What a right operator may be off by: a little more than the wanted type rounds its results by."""
        kind = self.wanted.dtype if self.judge is None else self.found.dtype
        return max(ALLOWED, 1.5 * torch.finfo(kind).eps) if kind.is_floating_point else 0.0


def write_reproducer(culprit: Culprit, path: Path, title: str) -> Path | None:
    """A script that runs the operator and its judge, prints both values and exits with 1 while they differ."""
    case = case_of(culprit)
    if case is None:
        return None
    case = smallest(case)
    given = case.call.inputs
    heavy = sum(tensor.numel() for tensor in (*given, case.wanted)) > INLINE
    if heavy:
        torch.save({"given": given, "wanted": case.wanted}, path.with_suffix(".pt"))
    path.write_text("\n".join(_lines(case, title, heavy)) + "\n", encoding="utf-8")
    return path


def case_of(culprit: Culprit) -> Case | None:
    """The operator with its judge; None where nothing shows."""
    call, index = culprit.call, culprit.index
    if not call.outputs or not culprit.expected.numel() or culprit.expected.shape != culprit.actual.shape:
        return None
    if culprit.fault == "kernel":
        torchs = in_torch(call)
        if torchs is not None and _difference(torchs[index], culprit.expected) <= SEEN:
            return _shown(Case(call, culprit.actual, call, culprit.expected, index))
        # The same operator in float64 is wrong too, or cannot be run: the wanted numbers themselves are the judge.
        return _shown(Case(call, culprit.actual, None, culprit.expected.to(culprit.actual.dtype), index))
    judge = with_settings(call, culprit.clean)
    wanted = in_double(judge) if judge is not None else None
    again = run(call, index)
    if again is None:
        again = call.outputs[index]  # it runs on its own device alone, as the script will
    if judge is not None and wanted and (case := _shown(Case(call, again, judge, wanted[index], index))) is not None:
        return case
    # Its inputs are what differs, or many operators stand for it: the wanted numbers themselves are the judge.
    literal = culprit.expected
    if any(culprit.actual is one for one in call.inputs) and culprit.clean and culprit.clean.outputs:
        literal = culprit.clean.outputs[index]
    return _shown(Case(call, again, None, literal, index))


def _shown(case: Case) -> Case | None:
    return case if _difference(case.found, case.wanted) > case.allowed else None


def smallest(case: Case) -> Case:
    """The case cut along one axis after another, while it still shows the fault."""
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


def _axes(case: Case) -> int:
    """How many axes may be cut. Kernels trust indices into other tensors, which integers are, and attention's trust
    their shapes; of attention, sequences are independent, and that is all that can be cut."""
    if any(not one.is_floating_point() and one.dtype != torch.bool for one in case.call.inputs):
        return 0
    return min(1, case.found.ndim) if "attention" in case.call.name else case.found.ndim


def _cut(case: Case, axis: int, keep: slice) -> Case | None:
    """The case on a slice of an axis that output and inputs share; None when the fault does not show in it."""
    width, ndim = case.found.shape[axis], case.found.ndim

    def sliced(tensor: torch.Tensor) -> torch.Tensor:
        # Broadcasting counts axes from the right, matrices have the rows of the first and the columns of the second.
        own = axis - ndim + tensor.ndim
        if own >= 0 and tensor.shape[own] == width:
            return tensor.movedim(own, 0)[keep].movedim(0, own).clone()
        return tensor

    def cut(call: Operator) -> Operator:
        args, kwargs = pytree.tree_map(
            lambda leaf: sliced(leaf) if isinstance(leaf, torch.Tensor) else leaf,
            (
                call.args,
                call.kwargs,
            ),
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
    return _shown(Case(call, found, judge, wanted, case.index))


def with_settings(call: Operator, clean: Operator | None) -> Operator | None:
    """The call with the clean module's constants in the place of its own."""
    if clean is None or clean.name != call.name:
        return None
    mine, spec = pytree.tree_flatten((call.args, call.kwargs))
    theirs = pytree.tree_leaves((clean.args, clean.kwargs))
    if len(mine) != len(theirs):
        return None
    mixed = [one if isinstance(one, torch.Tensor) else other for one, other in zip(mine, theirs, strict=True)]
    args, kwargs = pytree.tree_unflatten(mixed, spec)
    return Operator(call.function, args, kwargs, call.outputs, call.device)


@torch.no_grad()
def run(call: Operator, index: int = 0) -> torch.Tensor | None:
    """A result of the operator on the CPU in its own precision."""
    try:
        args, kwargs = pytree.tree_map(_fresh, (call.args, call.kwargs))
        result = call.function(*args, **kwargs)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
        return None  # it runs on its own device alone
    leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    return leaves[index] if len(leaves) > index else None


def _fresh(leaf: Any) -> Any:
    if isinstance(leaf, torch.device):
        return torch.device("cpu")
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """0 of other shapes: nothing shows there."""
    return relative_difference(found, wanted) if found.shape == wanted.shape else 0.0


def _lines(case: Case, title: str, heavy: bool) -> list[str]:
    given = [f"    {_literal(tensor)}," for tensor in case.call.inputs]
    if heavy:
        kept = ["KEPT = torch.load(Path(__file__).with_suffix('.pt'), weights_only=True)", "GIVEN = KEPT['given']"]
    else:
        kept = ["GIVEN = [", *given, "]"]
    if case.judge is None:
        judge = ["    # What the clean module has at this place."]
        judge.append("    return KEPT['wanted']" if heavy else f"    return {_literal(case.wanted)}")
    else:
        same = "The same operator" if case.judge is case.call else "As the clean module asks for it"
        judge = [f"    # {same}, in float64 on the CPU.", f"    return {_call_text(case.judge, double=True)}"]
    return [
        f'"""{_quotable(title)}: needs only torch, exits with 1 while the two differ and with 0 where they agree."""',
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
        "apart = torch.where((found == judge) | found.isnan() & judge.isnan(), 0.0, found - judge)",
        "worst = apart.abs().argmax()",
        f"differs = not apart.norm() <= {case.allowed:.3g} * judge[judge.isfinite()].norm()",
        "said = f'found {found[worst].item():.9g}, wanted {judge[worst].item():.9g}'",
        "print(f'differs: {said}' if differs else f'agrees: {said} where they differ most')",
        "raise SystemExit(int(differs))",
    ]


def _quotable(title: str) -> str:
    """The title names a module of the model. Nothing in that name may end the docstring."""
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
    # Python shows numbers that it has no literal for as `nan` and `inf`, which are no names in a script.
    return repr(value).replace("nan", "float('nan')").replace("inf", "float('inf')")
