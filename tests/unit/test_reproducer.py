"""Reproducer scripts are run, one of them in a process that cannot import lockstep."""

from __future__ import annotations

import copy
import math
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from lockstep.parity.replay.operator_bisect import WrongOperator, other_code, wrong_kernel
from lockstep.parity.replay.operator_log import Operator, log_module
from lockstep.parity.replay.reproducer import INLINE, _literal, case_of, smallest, write_reproducer
from lockstep.parity.replay.tolerances import TOLERANCES

ROWS, WIDTH = 48, 40


class Module(nn.Module):
    """Operators of many kinds; faults change the attributes."""

    shift: torch.Tensor
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.eps, self.factor, self.fill = 1e-2, 3.0, -1e4
        self.cast: torch.dtype | None = None
        self.gate: Callable[[torch.Tensor], torch.Tensor] = torch.tanh
        self.register_buffer("shift", torch.linspace(-1, 1, WIDTH))
        self.register_buffer("mask", torch.arange(ROWS)[:, None] % 3 == 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        if self.cast is not None:
            x = x.to(self.cast).to(x.dtype)
        x = self.gate(x) + self.shift
        return x.clone().mul_(self.factor).masked_fill(self.mask, self.fill)


def setting(name: str, value: Any) -> Callable[[Module], None]:
    return lambda module: setattr(module, name, value)


def given() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def culprit_of(change: Callable[[Module], Any]) -> WrongOperator:
    faulty, clean, x = Module(), Module(), given()
    change(faulty)
    ours, theirs = (log_module(one, "(root)", lambda one=one: one(x)).calls or [] for one in (faulty, clean))  # type: ignore[misc]
    found = other_code(ours, theirs, TOLERANCES["fp32"])
    assert found is not None
    return found


Run = Callable[[Path], tuple[int, str]]


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a script in this process, which has torch loaded already."""

    def script(path: Path) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(path), run_name="__main__")
        return int(str(ended.value.code)), capsys.readouterr().out

    return script


def edited(script: Path, old: str, new: str) -> Path:
    """The operator's part of the script, without its judge."""
    head, operator, rest = re.split(r"(?<=def operator\(given\):\n)(.*\n)", script.read_text(), maxsplit=1)
    assert old in operator
    script.write_text(head + operator.replace(old, new) + rest)
    return script


FAULTS: dict[str, tuple[Callable[[Module], Any], str, str]] = {
    "constant": (setting("eps", 0.5), "0.5", "0.01"),
    "cast": (setting("cast", torch.bfloat16), "torch.bfloat16", "torch.float32"),
    "operator": (setting("gate", functional.gelu), "aten.gelu.default", "aten.tanh.default"),
    "buffer": (lambda module: module.shift.add_(0.25), "given[1]", "given[1] - 0.25"),
    "written in place": (setting("factor", 4.0), "4.0", "3.0"),
    "infinity": (setting("fill", -math.inf), "-float('inf')", "-10000.0"),
    "no number": (setting("fill", math.nan), "float('nan')", "-10000.0"),
}


ISOLATED = """import runpy, sys
try:
    import lockstep
except ImportError:
    runpy.run_path(sys.argv[1])
"""


@pytest.mark.slow
def test_a_script_needs_only_torch(tmp_path: Path) -> None:
    """In a process that cannot import lockstep."""
    script = write_reproducer(culprit_of(FAULTS["constant"][0]), tmp_path / "reproduce.py", "eps is off")
    assert script is not None
    (tmp_path / "lockstep.py").write_text("raise ImportError")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", ISOLATED, str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert re.fullmatch(r"differs: found \S+, wanted \S+\n", done.stdout)


@pytest.mark.parametrize("name", FAULTS)
def test_a_script_shows_the_fault_and_that_it_is_fixed(name: str, tmp_path: Path, here: Run) -> None:
    change, wrong, right = FAULTS[name]
    script = write_reproducer(culprit_of(change), tmp_path / "reproduce.py", f"the {name} is off")
    assert script is not None
    text = script.read_text()
    assert text.startswith(f'"""the {name} is off')
    assert set(re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE)) == {"torch"}
    code, output = here(script)
    numbers = re.fullmatch(r"differs: found (\S+), wanted (\S+)\n", output)
    assert numbers is not None
    assert (code, numbers[1] != numbers[2]) == (1, True)
    # One row of the many, and what it needs.
    assert len(re.findall(r"\d\.\d", text)) < 3 * WIDTH
    assert here(edited(script, wrong, right))[0] == 0


def test_a_wrong_kernel_of_this_machine_is_shown(tmp_path: Path, here: Run) -> None:
    """1e8 + 1 loses the 1 in single precision, not in double precision."""

    class Sums(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum(-1)

    layer, x = Sums(), torch.tensor([[1.0, 2.0, 3.0], [1e8, 1.0, -1e8], [4.0, 5.0, 6.0]])
    found = wrong_kernel(log_module(layer, "(root)", lambda: layer(x)).calls or [])
    assert found is not None
    script = write_reproducer(found, tmp_path / "reproduce.py", "a sum")
    assert script is not None
    assert here(script) == (1, "differs: found 0, wanted 1\n")


def test_a_kernel_of_another_device_runs_there(tmp_path: Path, here: Run) -> None:
    """The recorded result was wrong; on a device that computes it correctly the script passes."""
    x = given()
    call = Operator(torch.ops.aten.tanh.default, (x,), {}, [x.tanh() * 1.01], "other:3")
    script = write_reproducer(kernel_fault(call), tmp_path / "reproduce.py", "tanh")
    assert script is not None
    text = script.read_text()
    assert "DEVICE = 'other:3'" in text
    script.write_text(text.replace("other:3", "cpu"))
    assert here(script)[0] == 0


class _Foreign:
    def __call__(self, *_: Any) -> torch.Tensor:
        raise NotImplementedError("on another device only")

    def __str__(self) -> str:
        return "vendor.norm.default"


def test_an_operator_that_exists_elsewhere_only_gets_the_wanted_numbers(tmp_path: Path) -> None:
    x, wanted = torch.ones(2, 3), torch.full((2, 3), 0.5)
    call = Operator(_Foreign(), (x, 0.5), {}, [wanted * 2], "other:0")
    clean = Operator(_Foreign(), (x, 1e-6), {}, [wanted], "other:0")
    culprit = WrongOperator("code", call, clean, 1.0, call.outputs[0], wanted, "with 0.5 instead of 1e-06")
    script = write_reproducer(culprit, tmp_path / "reproduce.py", "a norm")
    assert script is not None
    text = script.read_text()
    assert "torch.ops.vendor.norm.default(given[0], 0.5)" in text
    assert f"return {_literal(wanted)}" in text
    compile(text, "reproduce.py", "exec")


def test_large_inputs_are_in_a_separate_file(tmp_path: Path, here: Run) -> None:
    """A table that is indexed is never cut."""
    torch.manual_seed(0)
    table = nn.Embedding(INLINE // 16 + 1, 16)
    other = copy.deepcopy(table)
    with torch.no_grad():
        other.weight[3] += 1
    ids = torch.tensor([[1, 3], [2, 5]])
    ours, theirs = (log_module(one, "(root)", lambda one=one: one(ids)).calls or [] for one in (other, table))  # type: ignore[misc]
    culprit = other_code(ours, theirs, TOLERANCES["fp32"])
    assert culprit is not None
    script = write_reproducer(culprit, tmp_path / "reproduce.py", "a table")
    assert script is not None
    assert script.stat().st_size < 2000
    kept = torch.load(script.with_suffix(".pt"))
    assert torch.equal(kept["given"][0], other.weight)
    assert torch.equal(kept["wanted"], table(ids))
    assert here(script)[0] == 1


def kernel_fault(call: Operator) -> WrongOperator:
    found = wrong_kernel([call])
    assert found is not None
    return found


def test_a_product_of_matrices_is_cut_to_one_number() -> None:
    x, w = given(), torch.randn(WIDTH, 56, generator=torch.Generator().manual_seed(2))
    wrong = x @ w
    wrong[31, 20] += 100
    case = case_of(kernel_fault(Operator(torch.ops.aten.mm.default, (x, w), {}, [wrong], "cpu")))
    assert case is not None
    case = smallest(case)
    assert [list(one.shape) for one in case.call.inputs] == [[1, WIDTH], [WIDTH, 1]]
    assert torch.equal(case.call.inputs[0][0], x[31])
    assert torch.equal(case.call.inputs[1][:, 0], w[:, 20])
    assert case.found.item() == wrong[31, 20]


@pytest.mark.parametrize("name", ["embedding", "index_select", "gather", "index"])
def test_what_looks_up_places_is_not_cut(name: str) -> None:
    """All axes have the same width: a cut would make indices invalid."""
    x, places = torch.randn(6, 6, generator=torch.Generator().manual_seed(3)), torch.tensor([5, 4, 3, 2, 1, 0])
    ops = torch.ops.aten
    call = {
        "embedding": Operator(ops.embedding.default, (x, places), {}, [x[places] + 1], "cpu"),
        "index_select": Operator(ops.index_select.default, (x, 0, places), {}, [x[places] + 1], "cpu"),
        "gather": Operator(ops.gather.default, (x, 1, places.expand(6, 6)), {}, [x.flip(1) + 1], "cpu"),
        "index": Operator(ops.index.Tensor, (x, [places]), {}, [x[places] + 1], "cpu"),
    }[name]
    case = case_of(kernel_fault(call))
    assert case is not None
    assert smallest(case) is case


def test_attention_is_cut_to_one_sequence_and_no_further() -> None:
    draw = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(3, 3, 3, 3, generator=draw) for _ in range(3))
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    out, sums = flash(q, k, v)
    wrong = out.clone()
    wrong[1, 2] += 1
    case = case_of(kernel_fault(Operator(flash, (q, k, v), {}, [wrong, sums], "cpu")))
    assert case is not None
    case = smallest(case)
    assert [list(one.shape) for one in case.call.inputs] == [[1, 3, 3, 3]] * 3
    assert torch.equal(case.call.inputs[0][0], q[1])


def test_a_second_result_is_looked_at_where_it_is_off(tmp_path: Path, here: Run) -> None:
    """The script runs on this machine, whose mean is correct."""
    x = given()
    call = Operator(torch.ops.aten.std_mean.correction, (x, [1]), {}, [x.std(1), x.mean(1) + 1], "cpu")
    script = write_reproducer(kernel_fault(call), tmp_path / "reproduce.py", "a mean")
    assert script is not None
    code, output = here(script)
    assert code == 0
    found = re.match(r"agrees: found (\S+), wanted", output)
    assert found is not None
    means = [float(mean) for mean in x.mean(1)]
    assert min(abs(float(found[1]) - mean) for mean in means) < 1e-5


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([True, False]),
        torch.tensor([[1, -2], [3, 2**40]]),
        torch.tensor(7, dtype=torch.int32),
        torch.tensor([0.1, -2e-30, 3e38]),
        torch.tensor([[1.5, math.inf], [-math.inf, math.nan]]),
        torch.tensor([0.1, math.nan], dtype=torch.bfloat16),
        torch.tensor([0.1], dtype=torch.float64),
        torch.tensor([1 + 2j]),
        torch.zeros(0),
        torch.zeros(0, 5),
        torch.zeros(2, 0, 3, dtype=torch.int64),
    ],
    ids=str,
)
def test_tensors_in_a_script_are_the_tensors(tensor: torch.Tensor) -> None:
    found = eval(_literal(tensor), {"torch": torch})
    assert found.dtype == tensor.dtype
    assert found.shape == tensor.shape
    assert torch.equal(found.isnan(), tensor.isnan())
    assert torch.equal(found[~found.isnan()], tensor[~tensor.isnan()])
