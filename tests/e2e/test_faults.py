"""Faults put into a replay, one at a time: the stage, the module, the rank and the parameter must be named.

`python -m pytest tests/e2e/test_faults.py -s -m ""` prints the whole table.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import faults
from fault_modules import attention, other_arithmetic
from fault_scene import replay_with
from faults import ALONE, OTHER_BATCHES, RANKS, Fault, Named, name_it, summary
from hang import HANG

pytestmark = pytest.mark.xdist_group("tapes")

# For every day: of each stage, and of each place in the model, one or two of different kinds.
QUICK = {
    "norm epsilon 1e-5",
    "rotary base",
    "attention scale",
    "packed sequences see each other",
    "bf16 softmax",
    "bf16 in one projection",
    "embedding row",
    "residual dropped",
    "dropout left on",
    "temperature missing in scoring",
    "projection's gradient scaled",
    "MLP detached",
    "gradients not averaged",
    "micro-batch lost",
    "prompt token trained",
    "packing shifts by one",
    "stale weights in the engine",
    "wrong block after preemption",
    "engine's temperature missing",
    "text stripped",
    "not divided by the deviation",
    "GAE's lambda",
    "divisor of one micro-batch",
    "clip range",
    "DPO's beta",
    "decay on norms and biases",
    "moments reset",
    "clipped at another norm",
    "masters not copied",
    "weights lost after the update",
}


@pytest.fixture(scope="module")
def table() -> Iterator[list[Named]]:
    rows: list[Named] = []
    yield rows
    print(f"\n{summary(rows)}")


def _parameter(fault: Fault) -> object:
    marks = () if fault.name in QUICK else pytest.mark.slow
    return pytest.param(fault, id=fault.name.replace(" ", "-"), marks=marks)


def test_every_quick_fault_is_in_the_table() -> None:
    assert {fault.name for fault in ALONE} >= QUICK
    assert len(faults.FAULTS) == len(ALONE) + len(RANKS), "two faults share a name"


@pytest.mark.parametrize("fault", [_parameter(fault) for fault in ALONE])
def test_a_fault_is_named(fault: Fault, tape: Callable[[str], Path], table: list[Named]) -> None:
    named = name_it(tape(fault.recipe), fault)
    assert named is not None
    table.append(named)
    assert named.stage == fault.stage, named
    assert (named.module, named.rank) == (fault.module, fault.rank), named
    assert fault.says in named.said, named


def in_ranks(ranks: int, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [*command, faults.__file__, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=HANG,
        env=dict(os.environ),
        check=False,
    )


@pytest.mark.torchrun
@pytest.mark.slow
@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name.replace(" ", "-")) for fault in RANKS])
def test_a_fault_of_one_rank_is_named(fault: Fault, tape: Callable[[str], Path]) -> None:
    """Several processes replay what one recorded."""
    done = in_ranks(fault.ranks, tape(fault.recipe), fault.name)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.torchrun
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["sft", "sft-bf16", "grpo"])
def test_several_ranks_without_a_fault_are_in_step(recipe: str, tape: Callable[[str], Path]) -> None:
    done = in_ranks(2, tape(recipe))
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_a_fault_nothing_is_named(tape: Callable[[str], Path]) -> None:
    """Neither by the rounding that stands beside every fault, nor by the plain attention that faults are put into.

    Of GRPO and DPO the very same replays are among the clean repeats.
    """
    for recipe, inject in (
        ("sft", other_arithmetic),
        ("ppo", other_arithmetic),
        ("sft-bf16", other_arithmetic),
        ("sft", attention("model.layers.1.self_attn")),
    ):
        found = replay_with(tape(recipe), inject, OTHER_BATCHES)
        assert found is not None
        assert found.in_step, (found.cause, found.module)
